"""The site of docs/ builds, strictly: no link leads nowhere, no docstring of the API fails to parse; and it is complete."""

import inspect
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
from support.chromium import chromium, need_chromium
from support.pages import python_of

import t5ckpt

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def site(tmp_path_factory) -> pathlib.Path:
    """The built pages; a warning is an error."""
    directory = tmp_path_factory.mktemp('site')
    mkdocs = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(directory)]
    # The theme's makers announce another tool on standard error.
    env = {**os.environ, 'NO_MKDOCS_2_WARNING': '1'}
    done = subprocess.run(mkdocs, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.mark.slow
def test_every_page_is_there(site):
    pages = {path.relative_to(ROOT / 'docs').with_suffix('.html') for path in (ROOT / 'docs').glob('*.md')}
    assert {page for page in pages if not (site / page).is_file()} == set()


@pytest.mark.slow
@pytest.mark.parametrize('width', [390, 1280])
def test_no_line_of_code_is_cut(site, tmp_path, width):
    need_chromium()
    cut = """[...document.querySelectorAll('.md-typeset pre > code')]
        .filter((code) => code.scrollWidth > code.clientWidth + 1).map((code) => code.innerText)"""
    with chromium(tmp_path) as page:
        page.size(width, 900)
        for name in ('index.html', 'looking.html', 'errors.html', 'notebooks/how-did-the-weights-move.html'):
            page.open(site / name, f'location.pathname.endsWith({name!r}) && document.readyState === "complete"')
            assert page.run(cut) == [], name


@pytest.mark.slow
@pytest.mark.parametrize('width', [390, 1280])
def test_both_columns_of_a_table_of_calls_are_visible(site, tmp_path, width):
    need_chromium()
    cut = """[...document.querySelectorAll('.md-typeset__scrollwrap')]
        .filter((table) => table.innerText.includes('t5ckpt')).map((table) => table.scrollWidth > table.clientWidth)"""
    with chromium(tmp_path) as page:
        page.size(width, 900)
        page.open(site / 'migration.html', 'document.readyState === "complete"')
        page.wait('document.querySelector(".md-typeset__scrollwrap") !== null')
        tables = page.run(cut)
    assert tables == [False] * 6


def test_every_page_is_in_the_navigation_once():
    text = (ROOT / 'mkdocs.yml').read_text(encoding='utf-8')
    listed = re.findall(r'^ +- (?:Overview: )?([\w/-]+\.md)$', text, re.MULTILINE)
    docs = ROOT / 'docs'
    pages = [path.name for path in docs.glob('*.md')] + [f'notebooks/{path.stem}.md' for path in docs.rglob('*.ipynb')]
    assert sorted(listed) == sorted(pages)


@pytest.mark.parametrize('page', sorted((ROOT / 'docs').glob('*.md')), ids=lambda page: page.name)
def test_a_page_begins_with_code(page):
    """Within the first screen; performance.md begins with its table, and decisions.md is for contributors."""
    lines = page.read_text(encoding='utf-8').splitlines()
    shown = [number for number, line in enumerate(lines) if line.startswith('```')]
    assert page.name in {'performance.md', 'decisions.md'} or shown[0] < 25


def test_the_api_reference_lists_every_public_name_once():
    """In docs/api.md as it stands."""
    page = (ROOT / 'docs' / 'api.md').read_text(encoding='utf-8')
    names = [name for name in t5ckpt.__all__ if not name.startswith('__')]
    assert sorted(re.findall(r'\[`(\w+)`\]\(#t5ckpt\.(?!errors)', page)) == sorted(names)
    assert sorted(re.findall(r'^::: t5ckpt\.(\w+)$', page, re.MULTILINE)) == sorted({*names, 'errors', 'training'})
    used = set(re.findall(r'\bt5ckpt\.(\w+)', python_of(page)))
    assert {*names} <= used, 'a name without an example'


def test_the_api_reference_has_the_signatures():
    """In docs/api.md as it stands; the site has them from the docstrings."""
    make = runpy.run_path(str(ROOT / 'docs' / 'make_signatures.py'))['page']
    page = (ROOT / 'docs' / 'api.md').read_text(encoding='utf-8')
    assert make() == page, 'a signature has changed: run python docs/make_signatures.py'
    assert '<' not in ''.join(re.findall(r'^```py\n(.*?)^```\n\n:::', page, re.DOTALL | re.MULTILINE))


@pytest.mark.slow
def test_every_public_name_is_described_once(site):
    text = (site / 'api.html').read_text(encoding='utf-8')
    ids = re.findall(r' id="([^"]+)"', text)
    assert sorted(name for name in set(ids) if ids.count(name) > 1) == []
    warned = [
        name
        for name, value in vars(t5ckpt.errors).items()
        if getattr(value, '__module__', '') == 't5ckpt.errors' and name[0].isupper()
    ]
    expected = {f't5ckpt.errors.{name}' for name in warned}
    expected |= {f't5ckpt.{name}' for name in t5ckpt.__all__ if not name.startswith('__') and name not in warned}
    assert expected - set(ids) == set()
    internal = ('PendingSave.start', 'PendingSave.complete', 'errors.with_cures')
    assert [name for name in internal if f't5ckpt.{name}' in ids] == []


@pytest.mark.slow
def test_the_reference_links_pages_and_has_no_markup_of_docstrings(site):
    text = (site / 'api.html').read_text(encoding='utf-8')
    assert re.findall(r':(?:attr|class|func|meth|mod):', text) == []
    assert re.findall(r'(?<!\w.html\">)docs/[\w-]+\.md', text) == []
    # A section of a docstring begins on a line of its own, else its first line becomes a title.
    assert set(re.findall(r'<details class=\"notes[^>]*>\s*<summary>(.*?)</summary>', text)) <= {'Notes'}
    for page, messages in (('api.html', 'storage.html'), ('errors.html', 'changed-models.html')):
        assert f'href="{messages}">docs/' in (site / page).read_text(encoding='utf-8')


@pytest.mark.slow
def test_it_asks_no_other_host_for_anything(site):
    """It reads offline, and tells nobody who reads it."""
    asked = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:)?//', re.IGNORECASE)
    assert [page.name for page in site.rglob('*.html') if asked.search(page.read_text(encoding='utf-8'))] == []


@pytest.mark.slow
def test_messages_are_wrapped(site):
    """docs/site.css wraps the blocks of this class."""
    text = (site / 'errors.html').read_text(encoding='utf-8')
    assert text.count('<div class="language-text highlight">') == 19
    assert '.language-text code' in (site / 'site.css').read_text(encoding='utf-8')


@pytest.mark.slow
def test_notebooks_are_pages(site):
    """With what their cells show; links to a notebook lead to its page."""
    page = (site / 'notebooks' / 'what-is-in-this-checkpoint.html').read_text(encoding='utf-8')
    assert ' src="data:image/png;base64,' in page
    assert 'token_embedder' in page
    assert '@output' not in page
    assert [path for path in site.rglob('*.html') if '.ipynb"' in path.read_text(encoding='utf-8')] == []


@pytest.mark.slow
def test_the_search_works_from_a_disk_and_has_the_guide_at_the_first_or_second_place(site, tmp_path):
    need_chromium()
    guides = {
        'preemption': 'cookbook',
        'async save': 'cookbook',
        'partial restore': 'changed-models',
        'reshard': 'changed-models',
        'install': 'start',
        'diff': 'looking',
        'exit code': 'looking',
        'LocalTier': 'tiers',
        'verify': 'damage',
        'StandardCheckpointer': 'migration',  # a word in code, after a dot
        'save_interval_steps': 'migration',
    }
    search = """((words) => {
        const box = document.querySelector('.md-search__input');
        box.focus(); box.value = words; box.dispatchEvent(new Event('keyup'));
    })"""
    found = """[...document.querySelectorAll('.md-search-result__item')].map((item) =>
        item.querySelector('a').href.match(/([\\w-]+)\\.html/)[1])"""
    with chromium(tmp_path) as page:
        page.open(site / 'index.html', 'document.readyState === "complete"')
        for words, guide in guides.items():
            page.run(f'{search}("")')
            page.wait(f'{found}.length === 0')
            page.run(f'{search}({words!r})')
            page.wait(f'{found}.length > 0')
            assert guide in page.run(found)[:2], words
        # Lunr finds nothing by a beginning that a word with an asterisk has, too.
        page.run(f'{search}("")')
        page.run(f'{search}("k")')
        page.wait(f'{found}.length > 0')


@pytest.mark.slow
def test_the_copy_button_copies_a_block_as_it_stands(site, tmp_path):
    """Wrapped lines are one line, and no line is empty that is not so in the source."""
    need_chromium()
    block = re.search(r'```python\n(.*?)```', (ROOT / 'docs' / 'frameworks.md').read_text(encoding='utf-8'), re.DOTALL)
    with chromium(tmp_path) as page:
        page.size(400, 900)
        page.open(site / 'frameworks.html', 'document.readyState === "complete"')
        page.wait('document.querySelector("[data-clipboard-target]") !== null')
        press = """document.addEventListener('copy', (event) => { window.copied = event.target.value });
            document.querySelector('[data-clipboard-target]').click()"""
        page.call('Runtime.evaluate', expression=press, userGesture=True)
        page.wait('window.copied !== undefined')
        assert page.run('window.copied').strip() == block[1].strip()


@pytest.mark.parametrize('name', [name for name in t5ckpt.__all__ if not name.startswith('__')])
def test_arguments_are_described_where_an_editor_and_the_reference_look(name):
    """By the function; or by the class that users make and not by its __init__, since the one would hide the other."""
    item = getattr(t5ckpt, name)
    doc = inspect.getdoc(item) or ''
    made_by_users = inspect.isclass(item) and 'Args:' in doc
    assert made_by_users or name != 'Checkpointer'
    assert not (made_by_users and item.__init__.__doc__)
    if made_by_users or inspect.isfunction(item):
        arguments = list(inspect.signature(item).parameters)
        undescribed = [arg for arg in arguments if not re.search(rf'^ *\**{arg}: ', doc, re.MULTILINE)]
        assert len(arguments) == 1 or undescribed == []

"""Every ```python and ```bash block of README.md and docs/ runs as it stands: those of one page one after another, in one
directory, as one program. What cannot be run (it installs, or needs a machine that is not here) stands in a ```sh block.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.nursery import Nursery
from support.pages import blocks_of, python_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
# Those that a newcomer reads first; all others run, too, in `make test-all`.
FIRST = (ROOT / 'README.md', ROOT / 'docs' / 'start.md')


@pytest.fixture(scope='module')
def nursery() -> Iterator[Nursery]:
    """Starts a process for each page; the libraries that the pages use are imported once."""
    made = Nursery('page_program', {'MPLBACKEND': 'Agg'}, ['-W', 'error'])
    yield made
    made.close()


@pytest.mark.parametrize(
    'page',
    [page if page in FIRST else pytest.param(page, marks=pytest.mark.slow) for page in PAGES],
    ids=lambda page: page.name,
)
def test_page_runs(page: Path, tmp_path: Path, nursery: Nursery):
    code = python_of(page.read_text(encoding='utf-8'))
    if not code.strip():
        return
    program = tmp_path / f'{page.stem}.py'
    program.write_text(code, encoding='utf-8')
    work = tmp_path / 'work'
    work.mkdir()
    (work / 'testdata').symlink_to(ROOT / 'testdata')  # as in a checkout
    commands = tmp_path / 'bin'
    commands.mkdir()
    (commands / 't5ckpt').write_text(f'#!/bin/sh\nexec {sys.executable} -m t5ckpt "$@"\n', encoding='utf-8')
    (commands / 't5ckpt').chmod(0o755)
    path = f'{commands}:{Path(sys.executable).parent}:{os.environ["PATH"]}'
    log = tmp_path / 'log'
    with log.open('wb') as output:
        ended = nursery.run([str(program), path], directory=work, stdout=output, stderr=subprocess.STDOUT)
    assert ended == 0, log.read_text(encoding='utf-8')
    assert 't5ckpt: warning' not in log.read_text(encoding='utf-8')


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path):
    """`make docs` looks at the links within docs/; this also at those of the README."""
    text = re.sub(r'```.*?```', '', page.read_text(encoding='utf-8'), flags=re.DOTALL)
    links = re.findall(r'\]\(([^)#\s]+)', text)
    assert [link for link in links if not link.startswith('http') and not (page.parent / link).exists()] == []


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_what_is_to_be_installed_exists(page: Path):
    """Lines that are not run, but which a newcomer types first: the extras are there, and so are make's targets."""
    text = '\n'.join(
        '\n'.join(lines) for language, _, lines in blocks_of(page.read_text(encoding='utf-8')) if language == 'sh'
    )
    extras = {name for names in re.findall(r'\[([a-z,]+)\]', text) for name in names.split(',')}
    known = re.findall(r"^    '([a-z0-9]+)': \[", (ROOT / 'setup.py').read_text(encoding='utf-8'), re.MULTILINE)
    assert extras <= set(known)
    targets = re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(encoding='utf-8'), re.MULTILINE)
    assert set(re.findall(r'^make ([a-z-]+)', text, re.MULTILINE)) <= set(targets)


def test_readme_has_both_examples():
    code = python_of((ROOT / 'README.md').read_text(encoding='utf-8'))
    assert 't5ckpt.Checkpointer(' in code
    assert 't5ckpt.open_checkpoint(' in code


def test_readme_can_be_read_at_once():
    page = (ROOT / 'README.md').read_text(encoding='utf-8')
    assert len(page.split()) <= 800
    assert len(re.findall(r'(?<!!)\[[^\]]*\]\(', page)) <= 10


def test_only_code_is_taken_and_lines_stay():
    page = 'a\n```sh\nrm x\n```\n```python\nb = 1\n```\nc\n```bash\ntrue\n```\n```python\nd = b\n```\n'
    *before, after = python_of(page).splitlines()[:13]
    assert [line for line in before if line] == ['b = 1', before[8]]
    assert "'true'" in before[8]
    assert before[5] == 'b = 1'
    assert after == 'd = b'


def test_a_command_that_fails_fails_the_page(tmp_path):
    code = python_of('```bash\nfalse\ntrue\n```\n')
    assert subprocess.run([sys.executable, '-c', code], check=False, capture_output=True).returncode != 0

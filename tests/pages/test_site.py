"""The site of docs/ builds, strictly: no link leads nowhere, no docstring of the API fails to parse; and it is complete."""

import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest

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


def test_every_page_is_there(site):
    pages = {path.relative_to(ROOT / 'docs').with_suffix('.html') for path in (ROOT / 'docs').glob('*.md')}
    assert {page for page in pages if not (site / page).is_file()} == set()


def test_every_page_is_in_the_navigation(site):
    navigation = (site / 'index.html').read_text(encoding='utf-8').partition('md-content')[0]
    pages = sorted(path.with_suffix('.html').name for path in (ROOT / 'docs').glob('*.md') if path.name != 'index.md')
    assert [page for page in pages if f'href="{page}"' not in navigation] == []


def test_every_public_name_is_in_the_api_reference(site):
    text = (site / 'api.html').read_text(encoding='utf-8')
    missing = [name for name in t5ckpt.__all__ if not name.startswith('__') and f'id="t5ckpt.{name}"' not in text]
    missing += [
        name for name in t5ckpt.errors.__all__ if name[0].isupper() and f'id="t5ckpt.errors.{name}"' not in text
    ]
    assert missing == []


def test_it_asks_no_other_host_for_anything(site):
    """It reads offline, and tells nobody who reads it."""
    asked = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:)?//', re.IGNORECASE)
    assert [page.name for page in site.glob('*.html') if asked.search(page.read_text(encoding='utf-8'))] == []


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

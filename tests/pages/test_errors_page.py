"""docs/errors.md is what docs/make_errors.py writes: each mistake is made again, and says what the page says."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import t5ckpt

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / 'docs' / 'errors.md').read_text(encoding='utf-8')


@pytest.mark.slow
def test_the_page_is_up_to_date(tmp_path):
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': '', 'COLUMNS': '80'}
    script = [sys.executable, '-W', 'error', str(ROOT / 'docs' / 'make_errors.py'), '--print']
    done = subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE, 'a message has changed: run python docs/make_errors.py, and read what it says now'


def test_it_has_19_mistakes_and_names_no_path_of_this_machine():
    assert re.findall(r'^## (\d+)\. ', PAGE, re.MULTILINE) == [str(n) for n in range(1, 20)]
    assert set(re.findall(r'(?<=[\s(\'"])/[a-z]+', PAGE)) == {'/proc', '/data'}
    assert 'Traceback' not in PAGE


def test_every_error_is_of_the_tree_or_of_python():
    """And ends with a full stop or with what to paste: a sentence that says what to do."""
    said = re.findall(r'```text\n(\w+): (.*?)\n```', PAGE, re.DOTALL)
    assert len(said) == 19
    for name, text in said:
        assert name in {'KeyError', 'ValueError'} or hasattr(t5ckpt.errors, name), name
        assert text.endswith(('.', "]'")), text

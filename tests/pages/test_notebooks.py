"""The notebooks in docs/ run as they stand, on a run of the example trainer, and the shapes of what they show hold."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / 'docs' / 'notebooks').glob('*.ipynb'))


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the run that both notebooks look at; they would train it themselves."""
    work = tmp_path_factory.mktemp('notebooks')
    subprocess.run(
        [sys.executable, ROOT / 'examples' / 'train_t5.py', work / 'run', '--steps', '30', '--save-every', '10'],
        check=True,
        capture_output=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )
    return work


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 2


@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_no_path_of_the_machine_that_ran_it(notebook):
    text = re.sub(r'"image/png": ".*"', '', notebook.read_text('utf-8'))
    assert re.findall(r'(?<![\w.:<\\/])/[\w.-]+/[\w./-]+', text) == []


@pytest.mark.slow
@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=lambda path: path.stem)
# The kernel's client uses what its own dependencies have deprecated.
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_a_notebook_runs(notebook, trained, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    monkeypatch.setenv('PYTHONWARNINGS', 'error::UserWarning')
    book = nbformat.read(notebook, as_version=4)
    stored = _kinds(book)
    nbclient.NotebookClient(book, timeout=300, resources={'metadata': {'path': str(trained)}}).execute()
    assert {'text/html', 'image/png'} <= {kind for kinds in stored for kind in kinds}
    assert _kinds(book) == stored, 'each cell shows what it shows on the site'


def _kinds(book) -> list[list[str]]:
    """The kinds of what each cell of code shows."""
    return [
        sorted(kind for out in cell.outputs for kind in out.get('data', {}))
        for cell in book.cells
        if cell.cell_type == 'code'
    ]

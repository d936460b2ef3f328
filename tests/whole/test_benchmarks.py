"""The benchmark runs and its report is whole. Nothing is said about the numbers."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = pathlib.Path(__file__).parents[2] / 'benchmarks'


@pytest.fixture(scope='module')
def results(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What a short run leaves behind."""
    out = tmp_path_factory.mktemp('benchmarks')
    command = [sys.executable, os.fspath(BENCHMARKS / 'run.py'), '--short', '--out', os.fspath(out)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return out


def test_every_case_measures_t5ckpt_and_the_limit(results: pathlib.Path) -> None:
    answer = json.loads((results / 'results.json').read_text())
    measured = {(series['case'], series['peer']) for series in answer['series']}
    for case in ('s1', 'stall', 'small', 'big', 'reshard', 'zeros', 'frozen'):
        assert {(case, 't5ckpt'), (case, 'limit')} <= measured


def test_nothing_failed(results: pathlib.Path) -> None:
    assert json.loads((results / 'results.json').read_text())['failed'] == []


def test_a_peer_is_left_out_only_with_a_reason(results: pathlib.Path) -> None:
    answer = json.loads((results / 'results.json').read_text())
    assert all(entry['reason'] for entry in answer['left_out'])


def test_the_report_says_that_a_short_run_measures_nothing(results: pathlib.Path) -> None:
    assert 'only shows that everything works' in (results / 'results.md').read_text()


def test_the_results_name_no_path_of_this_machine(results: pathlib.Path) -> None:
    text = (results / 'results.json').read_text() + (results / 'results.md').read_text()
    assert os.fspath(results) not in text
    assert os.fspath(pathlib.Path.home()) not in text


def test_only_the_report_is_left(results: pathlib.Path) -> None:
    assert {path.name for path in results.iterdir()} <= {'results.json', 'results.md', 'results.png'}


@pytest.mark.parametrize(
    'words',
    [
        'conversion.py --gigabytes 0.02',
        'events.py 2000 10',
        'integrity.py 1 --short',
        'page_cache.py 32 1',
        'cold.py 2 --short',
        'profiles.py reshard restore_warm 2 --short --act',
        'profiles.py small save 2 --short --act',
        'scaling.py --hosts 8 --tensor 8 --layers 2 --all',
        'stores.py listing 2 5',
        'tiers.py --short',
    ],
)
def test_the_others_run(words: str) -> None:
    script, *arguments = words.split()
    command = [sys.executable, os.fspath(BENCHMARKS / script), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout

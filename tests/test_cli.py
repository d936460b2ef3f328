"""The command line, as a shell would call it: real processes, exit codes, output for people and for programs."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import t5ckpt
from t5ckpt.cli import VERBS

ROOT = Path(__file__).resolve().parents[1]


def t5ckpt_cli(*words: object, code: int = 0, stdin: str | None = None) -> str:
    """Runs a verb, checks the exit code; what it printed, or what it complained of where the code is not 0."""
    done = subprocess.run(
        [sys.executable, '-W', 'error', '-m', 't5ckpt', *map(str, words)],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr


@pytest.fixture(scope='module')
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp('cli') / 'run'
    kernel = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
    state = {'target': {'mlp': {'kernel': kernel}, 'scale': np.ones(8, np.float32)}}
    with t5ckpt.Checkpointer(state, checkpoints_dir=run, inline_bytes=1024) as checkpointer:
        for step in (0, 100, 200):
            checkpointer.save(state, step=step)
    t5ckpt.pin_checkpoint(run / 'checkpoint_0')
    (run / 'checkpoint_300.tmp-1700000000').mkdir()
    (run / 'checkpoint_300.tmp-1700000000' / 'x').write_bytes(b'1')
    (run / 'checkpoint_400').mkdir()
    (run / 'checkpoint_400' / 'checkpoint').write_bytes(b'\x82')
    return run


@pytest.mark.parametrize('verb', VERBS)
def test_every_verb_explains_itself_with_an_example(verb):
    text = t5ckpt_cli(verb, '--help')
    assert f't5ckpt {verb} ' in text.partition('Example')[2]
    assert '--json' in text


def test_the_help_lists_every_verb_and_the_exit_codes():
    text = t5ckpt_cli('--help')
    assert all(f'  {verb}' in text for verb in VERBS)
    assert '130' in text


def test_ls_lists_complete_steps_as_a_table(run_dir):
    lines = t5ckpt_cli('ls', run_dir).splitlines()
    assert [line.split()[0] for line in lines] == ['step', '0', '100', '200']
    assert 'pinned' in lines[1]
    assert 'latest' in lines[3]


def test_ls_all_shows_what_is_not_complete(run_dir):
    entries = json.loads(t5ckpt_cli('ls', run_dir, '--all', '--json'))
    assert {entry['step']: entry['state'] for entry in entries} == {
        0: 'complete',
        100: 'complete',
        200: 'complete',
        300: 'unfinished',
        400: 'broken',
    }


def test_ls_counts_the_bytes_that_are_there(run_dir):
    by_step = {entry['step']: entry for entry in json.loads(t5ckpt_cli('ls', run_dir, '--json'))}
    files = (run_dir / 'checkpoint_100').rglob('*')
    assert by_step[100]['nbytes'] == sum(file.stat().st_size for file in files if file.is_file())


def test_ls_loads_neither_jax_nor_tensorstore(run_dir):
    code = (
        'import sys; from t5ckpt.cli._app import run\n'
        f'try: run(["ls", {str(run_dir)!r}])\n'
        'finally: print(sorted({"jax", "flax", "tensorstore", "asyncio"} & set(sys.modules)))'
    )
    done = subprocess.run(
        [sys.executable, '-c', code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )
    assert done.stdout.splitlines()[-1] == '[]'


def test_a_directory_that_is_not_there_is_exit_code_3(run_dir):
    assert 'no such directory' in t5ckpt_cli('ls', run_dir / 'nope', code=3)


def test_wrong_words_are_exit_code_2(run_dir):
    assert 'No such command' in t5ckpt_cli('list', run_dir, code=2)


def test_a_reader_that_stops_early_gets_no_traceback(run_dir):
    done = subprocess.run(
        ['bash', '-c', f'{sys.executable} -m t5ckpt ls {run_dir} | true; exit ${{PIPESTATUS[0]}}'],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (1, '')


def test_on_a_terminal_the_table_has_lines(run_dir):
    parent, child = pty.openpty()
    with subprocess.Popen(
        [sys.executable, '-m', 't5ckpt', 'ls', str(run_dir)],
        stdout=child,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'TERM': 'xterm', 'COLUMNS': '100'},
    ) as process:
        os.close(child)
        text = b''
        try:
            while piece := os.read(parent, 4096):
                text += piece
        except OSError:  # Linux says EIO when the other end is closed.
            pass
        assert process.wait() == 0
    os.close(parent)
    assert '─' in text.decode()


def test_shell_completion_is_there():
    done = subprocess.run(
        [sys.executable, '-m', 't5ckpt'],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT), '_T5CKPT_COMPLETE': 'bash_source'},
    )
    assert '_t5ckpt_completion' in done.stdout


def test_without_its_extra_the_command_says_what_to_install():
    done = subprocess.run(
        [sys.executable, '-c', 'import sys; sys.modules["click"] = None; from t5ckpt.cli import main; main()'],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )
    assert done.returncode == 1
    assert "pip install 't5ckpt[cli]'" in done.stderr

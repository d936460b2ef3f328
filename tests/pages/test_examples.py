"""The demo as `make demo` runs it, in its own directory."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import t5ckpt

ROOT = Path(__file__).resolve().parents[2]
PNG = b'\x89PNG\r\n\x1a\n'


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_bit(tmp_path: Path):
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    env.pop('XLA_FLAGS', None)  # the demo chooses its own number of devices
    # Its trainers compile the same step.
    env |= {
        'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'cache'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }
    command = [sys.executable, str(ROOT / 'examples' / 'demo.py'), str(tmp_path / 'run')]
    options = ['--steps', '24', '--save-every', '4', '--kill-at', '18']
    done = subprocess.run([*command, *options], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'every loss equal to the last bit' in done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines() if ' MB in ' in line] == ['16', '20', '24']
    assert (tmp_path / 'run' / 'demo.png').read_bytes().startswith(PNG)
    assert 'class="' in (tmp_path / 'run' / 'report.html').read_text('utf-8')
    assert 'Warning' not in done.stderr
    # The curves have the steps of both processes: a kill loses only events of steps that are trained again.
    assert sorted(t5ckpt.TensorBoardMetrics(tmp_path / 'run').by_step('train/loss', range(24))) == [*range(24)]
    # What it suggests at its end works where it was typed; diff answers with 1: the checkpoints differ.
    suggested = [shlex.split(line) for line in done.stdout.partition('7. What to try next')[2].splitlines()[1:]]
    assert [words[1] for words in suggested[:2]] == ['ls', 'diff']
    assert Path(suggested[2][1]).samefile(ROOT / 'examples' / 'train_t5.py')
    for words, code in zip(suggested, (0, 1, 0), strict=True):
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, 'Warning' in done.stderr) == (code, False), done.stderr
    # Its names are T5X's, so that what docs/hugging-face.md says can be tried on it.
    t5ckpt.convert_checkpoint('to-hf', tmp_path / 'run', tmp_path / 'model')
    assert json.loads((tmp_path / 'model' / 'config.json').read_text('utf-8'))['model_type'] == 't5'
    t5ckpt.convert_checkpoint('hf', tmp_path / 'model', tmp_path / 'back')
    names = {
        leaf.name
        for leaf in t5ckpt.diff(tmp_path / 'run', tmp_path / 'back').leaves
        if not leaf.name.startswith('opt_state')
    }
    assert names <= {'step', 'state/step'}

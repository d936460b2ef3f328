"""The demo as `make demo` runs it, in its own directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PNG = b'\x89PNG\r\n\x1a\n'


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_bit(tmp_path: Path):
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    env.pop('XLA_FLAGS', None)  # the demo chooses its own number of devices
    command = [sys.executable, str(ROOT / 'examples' / 'demo.py'), str(tmp_path / 'run')]
    options = ['--steps', '24', '--save-every', '4', '--kill-at', '18']
    done = subprocess.run([*command, *options], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'every loss equal to the last bit' in done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines() if ' MB in ' in line] == ['16', '20', '24']
    assert (tmp_path / 'run' / 'embedding.png').read_bytes().startswith(PNG)

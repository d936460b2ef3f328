"""SIGKILL at the file-system calls of local saves, intents, uploads and the retention of both tiers."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from support import faultshim

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

# Each fifth call that changes something; ``kill_program.py 1 DIRECTORY`` takes all.
EVERY = 5


def test_a_killed_trainer_loses_nothing(tmp_path):
    library = faultshim.build(tmp_path)
    environment = os.environ | {'LD_PRELOAD': str(library), 'JAX_PLATFORMS': 'cpu', 'OPENBLAS_NUM_THREADS': '1'}
    environment |= {
        'OMP_NUM_THREADS': '1',
        'PYTHONPATH': os.pathsep.join(map(str, pathlib.Path(__file__).parents[1:3])),
    }
    program = str(pathlib.Path(__file__).with_name('kill_program.py'))
    done = subprocess.run(
        [sys.executable, program, str(EVERY), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report['broken'] == []
    assert report['killed'] >= 50

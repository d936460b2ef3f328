"""SIGKILL, EIO and a full disk at the file-system calls of local saves, intents, uploads and the retention of both tiers."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from support import faultshim

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

# One call of so many that change something; ``kill_program.py 1 DIRECTORY MODE`` takes all.
EVERY = {'kill': 5, 'EIO': 9, 'full': 15}


@pytest.mark.parametrize('mode', EVERY)
def test_a_trainer_that_is_killed_or_whose_disk_fails_loses_nothing(tmp_path, mode):
    library = faultshim.build(tmp_path)
    environment = os.environ | {'LD_PRELOAD': str(library), 'JAX_PLATFORMS': 'cpu', 'OPENBLAS_NUM_THREADS': '1'}
    environment |= {
        'OMP_NUM_THREADS': '1',
        'PYTHONPATH': os.pathsep.join(map(str, pathlib.Path(__file__).parents[1:3])),
    }
    program = str(pathlib.Path(__file__).with_name('kill_program.py'))
    done = subprocess.run(
        [sys.executable, program, str(EVERY[mode]), str(tmp_path), mode],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report['broken'] == []
    assert report['hit'] >= 250 // EVERY[mode]

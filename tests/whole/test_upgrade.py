"""What an earlier version wrote is read: the package of an earlier commit, from git's history, beside this one."""

import os
import pathlib
import subprocess
import sys
import tarfile

import numpy as np
import pytest

import t5ckpt
from t5ckpt.testing import mixed_state

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A state of the day before; there is no tag yet.
EARLIER = 'e80d622'

_SAVE = """
import sys, t5ckpt
from t5ckpt.testing import mixed_state
assert t5ckpt.__file__.startswith(sys.argv[2]), t5ckpt.__file__
with t5ckpt.Checkpointer(mixed_state(), checkpoints_dir=sys.argv[1], compression=sys.argv[3] or None) as checkpointer:
    checkpointer.save(mixed_state(), step=3)
"""
_LOAD = """
import sys, numpy as np, t5ckpt
from t5ckpt.testing import mixed_state
assert t5ckpt.__file__.startswith(sys.argv[2]), t5ckpt.__file__
assert t5ckpt.all_steps(sys.argv[1]) == [3]
options = t5ckpt.CheckpointerOptions(verify='full')
with t5ckpt.Checkpointer(mixed_state(1), checkpoints_dir=sys.argv[1], options=options) as checkpointer:
    state = checkpointer.restore()
np.testing.assert_array_equal(state['params']['w'], mixed_state()['params']['w'])
assert (state['note'], state['empty'], state['none'], state['rate']) == ('text', {}, None, 0.5)
t5ckpt.verify(sys.argv[1], full=True).raise_if_damaged()
with t5ckpt.Checkpointer(mixed_state(), checkpoints_dir=sys.argv[1], keep=1) as checkpointer:
    checkpointer.save(mixed_state(), step=4)
assert t5ckpt.all_steps(sys.argv[1]) == [4]
"""


@pytest.fixture(scope='module')
def earlier(tmp_path_factory):
    """The directory of the earlier package."""
    found = tmp_path_factory.mktemp('earlier')
    with (found / 'package.tar').open('wb') as out:
        done = subprocess.run(
            ['git', 'archive', EARLIER, 't5ckpt'], cwd=ROOT, stdout=out, stderr=subprocess.PIPE, check=False
        )
    if done.returncode != 0:
        pytest.skip(f'this checkout has no history: {done.stderr.decode().strip()}')
    with tarfile.open(found / 'package.tar') as archive:
        archive.extractall(found, filter='data')
    return found


def run(code, package, run_dir, compression=''):
    environment = {**os.environ, 'PYTHONPATH': str(package)}
    command = [sys.executable, '-P', '-c', code, run_dir, package, compression]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize('compression', ['', 'zstd'])
def test_a_step_of_an_earlier_version_is_read(compression, earlier, tmp_path):
    """Also deletes it, and saves beside it."""
    run(_SAVE, earlier, tmp_path / 'run', compression)
    state = t5ckpt.load_t5x_checkpoint(tmp_path / 'run', step=3)
    np.testing.assert_array_equal(state['params']['w'], mixed_state()['params']['w'])
    run(_LOAD, ROOT, tmp_path / 'run')

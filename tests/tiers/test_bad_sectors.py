"""Local files whose sectors cannot be read: real EIO at the reads of a restore, by LD_PRELOAD."""

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from support import faultshim

import t5ckpt

pytestmark = [pytest.mark.multiprocess]

_PROGRAM = """
import errno, json, sys, threading
import numpy as np
import t5ckpt
from support.faultshim import FAIL, GETS, READ, Shim
run, local, steps, how, error = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4], int(sys.argv[5])
state = lambda step: {'w': np.full((64, 96), step, np.float32), 'step': np.int32(step)}
options = t5ckpt.CheckpointerOptions(inline_bytes=64)
with t5ckpt.Checkpointer(state(0), None, run, local=t5ckpt.LocalTier(local, persist=t5ckpt.SaveAt(steps)), options=options) as ck:
    for step in (1, 2):
        ck.save(state(step))
        ck.wait_until_persisted()
shim = Shim()
with t5ckpt.Checkpointer(state(0), None, run, local=t5ckpt.LocalTier(local), options=options) as ck:
    shim.arm(f'{local}/checkpoint_2/w', 0, FAIL, error, GETS, 0 if how == 'once' else GETS)
    if how == 'moment':
        threading.Timer(0.7, shim.disarm).start()
    try:
        restored = t5ckpt.restore_or_init(ck, lambda: state(0), fallback='older')
        print(json.dumps([int(restored['step']), float(restored['w'][0, 0])]))
    except t5ckpt.errors.StorageError as caught:
        print(json.dumps([type(caught).__name__, caught.errno]))
    finally:
        shim.disarm()
    assert shim.fired
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ('uploaded', 'how', 'expected'),
    [
        ([1, 2], 'always', 2),
        ([1], 'always', 1),
        ([1, 2], 'once', 2),
        ([1], 'once', 2),
        ([1, 2], 'moment', 2),
        ([1], 'moment', 1),
    ],
)
def test_a_bad_sector_is_a_damaged_file(tmp_path, uploaded, how, expected):
    """The step comes from the run, or else the older step is restored. A read that fails once is repeated."""
    assert restored(tmp_path, uploaded, how, errno.EIO) == [expected, expected]
    found = t5ckpt.load_t5x_checkpoint(tmp_path / 'run', 1)
    assert np.array_equal(found['w'], np.full((64, 96), 1, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize('error', [errno.EMFILE, errno.ESTALE])
def test_an_error_that_is_not_of_the_disk_is_raised(tmp_path, error):
    """No older step is restored, and the next start restores this one."""
    assert restored(tmp_path, [1], 'always', error) == ['StorageError', error]
    assert t5ckpt.all_steps(tmp_path / 'local') == [1, 2]
    assert t5ckpt.verify(tmp_path / 'local', 2, full=True).ok


def restored(tmp_path, uploaded, how, error):
    """The step and a value that a program restores, or the name and the number of the error."""
    faultshim.require_gcc()
    words = [tmp_path / 'run', tmp_path / 'local', json.dumps(uploaded), how, error]
    environment = {**os.environ, 'LD_PRELOAD': str(faultshim.build(tmp_path)), 'PYTHONPATH': os.pathsep.join(sys.path)}
    command = [sys.executable, '-c', _PROGRAM, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

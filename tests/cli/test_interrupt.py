"""Ctrl-C while a verb waits for a slow bucket: it ends at once, and nothing is damaged."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support import forked
from support.cli import ROOT, t5ckpt_cli

import t5ckpt

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

DELAY_SECONDS = 20
STATE = {'target': {name: np.full((256, 256), index, np.float32) for index, name in enumerate('abcd')}}


def save(place):
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=place, options=t5ckpt.CheckpointerOptions(inline_bytes=0)) as ck:
        ck.save(STATE, step=1)
    return place


@pytest.fixture
def slow(s3):
    """A bucket whose chunks are slow to be read and written; an event that is set when one is waited for."""
    waits, is_over = threading.Event(), threading.Event()

    def delay(kind, key, _):
        if kind in ('read', 'write') and '/target.' in key and key.endswith('0.0'):
            waits.set()
            is_over.wait(DELAY_SECONDS)

    s3.proxy.watch = delay
    yield s3, waits, is_over
    is_over.set()


# What runs the tests may ignore interrupts, and its children then do, too.
_PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from t5ckpt.cli import main
main()
"""


def interrupted(waits, words):
    """Runs a verb and interrupts it while it waits; what it said, and the seconds until its end."""
    process = forked.start(_PROGRAM, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert waits.wait(60), process.communicate(timeout=5)
    time.sleep(0.5)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    seconds = time.monotonic() - started
    assert process.returncode == 130, out + err
    return err, seconds


_DURING_AN_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupting:
    def find_spec(self, name, *_):
        if name == os.environ['INTERRUPTED_IMPORT']:
            del sys.meta_path[0]
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from t5ckpt.cli import main
main()
"""


# Before there is a handler, and with it: a module of Python, one that C code imports, and one that has threads.
@pytest.mark.parametrize(
    'module',
    ['t5ckpt.cli.interrupts', 't5ckpt.core.standard_descriptors', 'click', 'numpy.dtypes', 'tensorstore._tensorstore'],
)
def test_ctrl_c_during_an_import_ends_with_its_exit_code(tmp_path, module):
    run = save(tmp_path / 'run')
    done = subprocess.run(
        [sys.executable, '-c', _DURING_AN_IMPORT, 'verify', '--full', str(run)],
        capture_output=True,
        text=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'INTERRUPTED_IMPORT': module},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1:]) == (130, '', ['t5ckpt: interrupted'])
    assert 'Traceback' not in done.stderr


def test_ctrl_c_ends_a_conversion_at_once(slow, tmp_path):
    s3, waits, is_over = slow
    remote = s3.url()
    ocp = pytest.importorskip('orbax.checkpoint')
    with ocp.CheckpointManager(tmp_path / 'run') as manager:
        manager.save(1, args=ocp.args.StandardSave(STATE))
    words = ['convert', 'orbax', tmp_path / 'run', remote]
    said, seconds = interrupted(waits, words)
    assert seconds < 2
    assert said.splitlines()[-1] == 't5ckpt: interrupted'
    assert t5ckpt.all_steps(remote) == []
    is_over.set()
    t5ckpt_cli(*words)
    assert t5ckpt.all_steps(remote) == [1]
    assert t5ckpt.verify(remote, full=True).ok


@pytest.mark.parametrize('verb', ['cp to', 'cp from', 'cp with changes', 'export', 'verify', 'stats', 'cat'])
def test_ctrl_c_ends_a_verb_at_once(verb, slow, tmp_path):
    s3, waits, is_over = slow
    local, remote = tmp_path / 'run', s3.url()
    is_upload = verb in ('cp to', 'cp with changes')
    with s3.served_by(s3.server):
        save(local if is_upload else remote)
    words = {
        'cp to': ['cp', local, remote],
        'cp from': ['cp', remote, local],
        'cp with changes': ['cp', local, remote, '--rename', 'target/a', 'target/z'],
        'export': ['convert', 'to-safetensors', remote, local / 'out.safetensors'],
        'verify': ['verify', remote, '--full'],
        'stats': ['stats', remote],
        'cat': ['cat', remote, 'target/a'],
    }[verb]
    said, seconds = interrupted(waits, words)
    assert seconds < 2
    assert said.splitlines()[-1] == 't5ckpt: interrupted'
    assert t5ckpt.all_steps(words[2] if words[0] == 'cp' else remote) == ([] if words[0] == 'cp' else [1])
    assert not list(local.glob('out.safetensors*'))
    is_over.set()
    t5ckpt_cli(*words)
    if words[0] == 'cp':
        assert t5ckpt.verify(words[2], full=True).ok

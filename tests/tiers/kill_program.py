"""Kills a trainer with two tiers at its file-system calls, or fails them, and judges what the next start makes of it.

Started by test_killed_trainers.py with faultshim.so in LD_PRELOAD: ``kill_program.py <every> <directory> <mode>``; prints a JSON
object. The modes are ``kill``, ``EIO`` (one call fails) and ``full`` (every write fails from the call on). This process starts no
thread, so it may fork; the trainers and the judges are its children.
"""

import errno
import json
import logging
import os
import pathlib
import shutil
import sys
import traceback

# Everything is imported before the first fork.
import flax.serialization  # noqa: F401
import jax  # noqa: F401
import numpy as np
import tensorstore  # noqa: F401
from support import faultshim
from support.faultshim import CREATE, FAIL, KILL, LINK, LOCK, REMOVE, RENAME, SYNC, WRITE

import t5ckpt
import t5ckpt.checkpointer
import t5ckpt.save.execute
import t5ckpt.tiers.restore
import t5ckpt.tiers.tiers

SHIM = faultshim.Shim()
CHANGES = CREATE | WRITE | SYNC | RENAME | LINK | REMOVE | LOCK
# How a call is hit: mode, error, and the classes of the calls that fail after it.
MODES = {'kill': (KILL, 0, 0), 'EIO': (FAIL, errno.EIO, 0), 'full': (FAIL, errno.ENOSPC, CREATE | WRITE)}


def state(step):
    rng = np.random.default_rng(step)
    return {'w': rng.standard_normal((64, 64), dtype=np.float32), 'v': rng.standard_normal(100), 'step': np.int32(step)}


def in_child(function):
    """Runs a function in a fork; how it ended, and what it raised."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:  # noqa: BLE001 - the parent reports it
            os.write(write, traceback.format_exc()[-3000:].encode())
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read()
    return os.waitpid(pid, 0)[1], said


class Campaign:
    """A run and its local directory, and what was promised to the trainer that was killed."""

    def __init__(self, home):
        self.root, self.template, self.promised = home / 'tiers', home / 'template', home / 'promised'
        code, said = in_child(self.prepare)
        assert code == 0, said
        shutil.copytree(self.root, self.template)

    def checkpointer(self):
        options = {'local_dir': self.root / 'local', 'local_keep': 1, 'chunk_bytes': 2**13, 'inline_bytes': 64}
        return t5ckpt.Checkpointer(state(0), None, self.root / 'run', keep=2, **options)

    def prepare(self):
        """Two steps, the first of which local retention has deleted."""
        with self.checkpointer() as ck:
            for step in (1, 2):
                ck.save(state(step))
                ck.wait_until_persisted(step)

    def act(self):
        """Two saves with their uploads and the retention of both tiers."""
        with self.checkpointer() as ck:
            for step in (3, 4):
                ck.save(state(step))
                self.promise(f'{step}')
                ck.wait_until_persisted(step)
                self.promise(f'{step} uploaded')

    def promise(self, text):
        """Notes what has returned; another thread may be killed at any moment."""
        new = self.promised.with_name('promised.new')
        new.write_text(text)
        new.replace(self.promised)

    def judge(self):
        """What was saved is restored, what was uploaded is there, and the next start uploads the rest and removes leftovers."""
        promised = self.promised.read_text() if self.promised.exists() else '2 uploaded'
        run, local = self.root / 'run', self.root / 'local'
        before = int(promised[0])
        if promised.endswith('uploaded'):
            assert before in t5ckpt.all_steps(run)
        with self.checkpointer() as ck:
            found = ck.restore()
            step = int(found['step'])
            assert step >= before, f'step {step} was restored, {promised}'
            for name, values in state(step).items():
                assert np.array_equal(found[name], values), name
            ck.wait_until_persisted()
            assert t5ckpt.latest_step(run) == step
            for tier in (run, local):
                for each in t5ckpt.all_steps(tier):
                    t5ckpt.verify(tier, each, full=True).raise_if_damaged()
            ck.save(state(9))
        assert t5ckpt.all_steps(local) == [9]
        assert os.listdir(local / '.t5ckpt/to_persist') == []
        names = {*os.listdir(run), *os.listdir(local)} - {'.t5ckpt', 'checkpoint_9', f'checkpoint_{step}'}
        assert names == set(), f'not removed: {names}'

    def reset(self):
        shutil.rmtree(self.root)
        shutil.copytree(self.template, self.root)
        self.promised.unlink(missing_ok=True)

    def calls(self):
        """The indices of the calls that change something, in a run of the act without a fault."""
        self.reset()

        def counted():
            SHIM.arm(self.root)
            self.act()
            SHIM.disarm()

        code, said = in_child(counted)
        assert code == 0, said
        return [index for index, call in enumerate(SHIM.calls()) if call.kind & CHANGES]

    def hit(self, at, mode):
        """Kills a trainer at a call, or fails the call; whether it came to that, and what broke."""
        self.reset()

        def victim():
            kind, error, sticky = MODES[mode]
            SHIM.arm(self.root, at, kind, error, CHANGES, sticky)
            self.act()

        in_child(victim)
        where = str(SHIM.hit()) if SHIM.fired else ''
        code, said = in_child(self.judge)
        return bool(where), [] if code == 0 else [f'call {at}, {where}:\n{said}']


def main():
    logging.getLogger('t5ckpt').addHandler(logging.NullHandler())
    logging.getLogger('t5ckpt').propagate = False
    campaign = Campaign(pathlib.Path(sys.argv[2]))
    results = [campaign.hit(at, sys.argv[3]) for at in campaign.calls()[:: int(sys.argv[1])]]
    broken = [each for _, found in results for each in found]
    sys.stdout.write(json.dumps({'hit': sum(hit for hit, _ in results), 'broken': broken}))


if __name__ == '__main__':
    main()

"""Programs whose functions run as other users, each in a fork of a process that has imported everything.

The interpreter's own files may lie where other users cannot read, so nothing may be imported after the change of user.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support import forked

PRELUDE = """
import codecs, glob, importlib, json, os, pkgutil, shutil, sys, time, warnings
import click, jax, numpy as np, tensorstore
import t5ckpt
for name in ('ascii', 'latin-1'):
    codecs.lookup(name)
for module in pkgutil.walk_packages(t5ckpt.__path__, 't5ckpt.'):
    if '__main__' not in module.name:
        try:
            importlib.import_module(module.name)
        except ImportError:
            pass
warnings.simplefilter('ignore')
A, B, GROUP = 4001, 4002, 4100
run = sys.argv[1] + '/run'
STATE = {'w': np.arange(2000, dtype=np.float32), 'step': np.int32(0)}

def checkpointer(**options):
    how = t5ckpt.CheckpointerOptions(inline_bytes=64, reuse_unchanged=False)
    return t5ckpt.Checkpointer(STATE, checkpoints_dir=run, options=how, **options)

def save(step, keep=None):
    with checkpointer(keep=keep) as ck:
        return ck.save(STATE, step=step).step

def become(user, function, umask=0o022):
    '''What a function returns, or the name of its error and the text, as another user.'''
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.umask(umask)
        os.setgroups([GROUP])
        os.setresgid(GROUP, GROUP, GROUP)
        os.setresuid(user, user, user)
        try:
            answer = function()
        except Exception as error:
            answer = [type(error).__name__, str(error)]
        os.write(writing, json.dumps(answer, default=str).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer)

def tree():
    return {place: sorted(files) for place, _, files in os.walk(run)}
"""


def run_as_users(code: str, directory: Path) -> Any:
    """What a program prints as JSON; it has the functions above, and ``directory``, which everybody may enter."""
    directory.chmod(0o777)
    done = forked.run(PRELUDE + code, directory)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

"""Checkpoints that are damaged, and how."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import numpy as np

import t5ckpt
from support.facts import facts_of, put_facts
from support.options import with_options
from support.states import leaf_print
from t5ckpt.format.checksum import digest
from t5ckpt.format.file_checksums import FileChecksums

W = np.random.default_rng(1).standard_normal((128, 64), dtype=np.float32)


class Iterator:
    """A data iterator whose state is a file of two lines."""

    def __init__(self, position=0):
        self.position = position

    def save(self, filename):
        pathlib.Path(f'{filename}.txt').write_text(f'position\n{self.position}\n')

    def load(self, filename):
        self.position = int(pathlib.Path(f'{filename}.txt').read_text().split()[1])


def state_of(seed=0):
    """Stored and inline arrays, a chunk at an edge, and leaves with facts."""
    rng = np.random.default_rng(seed)
    return {
        'params': {
            'w': rng.standard_normal((96, 64), dtype=np.float32),
            'edge': rng.standard_normal((50, 33), dtype=np.float32),
            'embed': np.repeat(np.arange(64, dtype=np.int16), 64).reshape(64, 64),
            'bits': rng.integers(0, 255, (80, 64), np.uint8).view(jax.numpy.float8_e4m3.dtype),
        },
        'bias': np.arange(5.0),
        'key': jax.random.key(seed),
        'count': seed,
        'empty': {},
        'note': 'text',
    }


def save(run_dir, step=1, seed=0, **options):
    options = {'chunk_bytes': 4096, 'inline_bytes': 1024, 'reuse_unchanged': False} | options
    state = state_of(seed)
    with t5ckpt.Checkpointer(state, None, str(run_dir), Iterator(step), **with_options(**options)) as ck:
        ck.save(state, step=step)
    return run_dir / f'checkpoint_{step}'


def files_of(step_dir):
    return sorted(path for path in step_dir.rglob('*') if path.is_file())


def flip(path, rng):
    """Flips one bit of a file; returns what undoes it."""
    before = path.read_bytes()
    data = bytearray(before)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return before


def some_file(step_dir, rng):
    """A file of the checkpoint: half of the time each as likely, else by its length."""
    paths = files_of(step_dir)
    sizes = [path.stat().st_size for path in paths]
    return rng.choice(paths) if rng.random() < 0.5 else rng.choices(paths, sizes)[0]


def copied(golden, tmp_path, case):
    shutil.copytree(golden / case, tmp_path / 'run')
    return next((tmp_path / 'run').glob('checkpoint_*'))


def bytes_of(step_dir):
    return {path.relative_to(step_dir).as_posix(): path.read_bytes() for path in files_of(step_dir)}


def arrays_of(step_dir):
    """Every array, as anybody reads it: dtype, shape and bytes."""
    view = t5ckpt.open_checkpoint(step_dir)
    return {info.name: leaf_print(np.asarray(view[info.name])) for info in view.infos() if info.dtype}


def with_fields(facts, /, **fields):
    """The bytes of the facts with these fields, which may be of any type, and a checksum that matches."""
    contents = {**json.loads(facts), **fields}
    del contents['checksum']
    text = (json.dumps(contents, indent=1, sort_keys=True) + '\n').encode()
    return b'{\n "checksum": "%s",\n%s' % (digest(text).encode(), text.removeprefix(b'{\n'))


def of_two_processes(step_dir):
    """The list in two halves, as two processes write it; the facts are signed again."""
    files = FileChecksums.decode((step_dir / 'integrity.0.json').read_bytes(), '')
    halves = [dict(list(files.items())[part::2]) for part in (0, 1)]
    facts = facts_of(step_dir)
    digests = json.loads(facts)['digests']
    for number, half in enumerate(halves):
        data = FileChecksums(half).encode()
        (step_dir / f'integrity.{number}.json').write_bytes(data)
        digests[f'integrity.{number}.json'] = [len(data), digest(data)]
    put_facts(step_dir, with_fields(facts, digests=digests))
    assert t5ckpt.verify(step_dir, full=True).ok
    return halves

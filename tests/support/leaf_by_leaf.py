"""A checkpoint that is written leaf by leaf, and a source that counts its reads."""

from __future__ import annotations

import weakref

import ml_dtypes
import numpy as np

from support.bits import random_bits
from t5ckpt.format.facts import Facts
from t5ckpt.lazy import LazyThreadPoolArray
from t5ckpt.planning.save_plan import SaveOptions
from t5ckpt.save.request import STREAM_BYTES, SaveContext, SaveRequest
from t5ckpt.storage import open_storage

SMALL_CHUNKS = SaveOptions(chunk_bytes=2**16, inline_bytes=256)


RNG = np.random.default_rng(5)


ARRAYS = {
    ('target', 'a'): random_bits(RNG, (300, 200), np.float32),
    ('target', 'b', 'kernel'): random_bits(RNG, (64, 130), ml_dtypes.bfloat16),
    ('state', 'v'): random_bits(RNG, (7, 11, 13), np.int16),
    ('state', 'small'): random_bits(RNG, (3,), np.float64),
    ('state', 'packed'): random_bits(RNG, (100, 8), ml_dtypes.int4),
    ('state', 'step'): np.int32(12),
}


class Source:
    """Lazy arrays that say what was read of them, and what of it is still held."""

    def __init__(self, arrays, whole=()):
        self.reads = []
        self.held = weakref.WeakValueDictionary()
        self.peak = 0
        self.table = {path: self._lazy(path, value, path in whole) for path, value in arrays.items()}

    def _lazy(self, path, value, whole):
        if np.ndim(value) == 0:
            return value
        return LazyThreadPoolArray(
            value.shape,
            value.dtype,
            lambda: self._read(path, value, ...),
            None if whole else lambda index: self._read(path, value, index),
        )

    def _read(self, path, value, index):
        copy = value[index].copy()
        self.reads.append(path)
        self.held[len(self.reads)] = copy
        self.peak = max(self.peak, sum(array.nbytes for array in self.held.values()))
        return copy


def request_for(place, *, step=12, options=SMALL_CHUNKS, budget_bytes=STREAM_BYTES, overwrite=False, **shared):
    context = SaveContext(open_storage(place), options, **shared)
    return SaveRequest(context, step, budget_bytes, overwrite, Facts())

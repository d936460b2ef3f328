"""Chooses the codec of each leaf for ``compression='auto'``.

A sample of 256 KiB from the leaf's first chunk is encoded with each candidate, on one core. Encoding and writing overlap, so a
byte of the leaf takes the longer of

    bytes after encoding / bytes per second of the storage
    seconds of encoding / free cores

and the codec with the shortest time is used. The candidates are tried from the one that takes the least processor time: none,
bit-shuffled lz4, bit-shuffled zstd, zstd. Each has to save a twentieth of the time of no codec.

The rate of the storage is measured in the saves of this run; before the first one, it is a typical rate of its kind. If a codec
limits a save, the measured rate is too low, and a faster disk is recognized only once a leaf without a codec is written.

A leaf keeps the codec of the previous checkpoint while it saves a third of the time of no codec, and otherwise until another one
takes less than two thirds of its time, so that unchanged chunks stay equal and can be linked.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.format.codecs import AUTO, BIT_LZ4, BIT_ZSTD, ZSTD, encode
from t5ckpt.format.dtypes import to_stored
from t5ckpt.lazy import LazyArray
from t5ckpt.planning.save_plan import ArrayWrite
from t5ckpt.storage import Storage
from t5ckpt.tree.leaves import explicit_transfers, is_jax_array

_CANDIDATES: tuple[dict[str, Any], ...] = (BIT_LZ4, BIT_ZSTD, ZSTD)
_SAMPLE_BYTES = 256 * 1024
_SLICES = 4
# The samples of all leaves together stay on the device of the first shard until the save has ended.
_SAMPLES_BYTES = 64 * 2**20
# The first turn loads the library and touches new memory; others are interrupted on a busy machine.
_TURNS = 3
_WORTH_IT = 0.05
_WORTH_CHANGING = 2 / 3
# Bytes per second: a network disk of a cloud, and one host's connection to a bucket.
_TYPICAL_DISK = 5e8
_TYPICAL_BUCKET = 2e8
# A smaller save measures the time of its requests, not the rate of the storage.
_LEAST_BYTES = 32 * 2**20


def compression_for(compression: str | None, storage: Storage) -> str | None:
    """The name of the codec that ``'default'`` stands for: ``'auto'`` on object stores, None on disks and in memory."""
    if not isinstance(compression, str) or compression != 'default':
        return compression
    return None if storage.is_file_system or not storage.is_shared else 'auto'


class CodecSelection:
    """Chooses codecs for the saves of one run, and measures its storage. One save runs at a time.

    Attributes:
      agreed: in a job of several processes, the codecs by array directory that process 0 has chosen from its data. All processes
        use them until the checkpointer is closed. None in a single process, which chooses from each array.
    """

    def __init__(self, storage: Storage):
        """Takes the run's storage."""
        self._typical = _TYPICAL_DISK if storage.is_file_system else _TYPICAL_BUCKET
        self.agreed: dict[str, Any] | None = None
        self._bytes = 0
        self._seconds = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second that the storage takes."""
        return self._bytes / self._seconds if self._bytes else self._typical

    def measured(self, nbytes: int, seconds: float) -> None:
        """Adds the bytes that a save wrote, and the time from its first write to the end of its last."""
        if nbytes >= _LEAST_BYTES and seconds > 0:
            # The last saves count most.
            self._bytes = self._bytes // 2 + nbytes
            self._seconds = self._seconds / 2 + seconds

    def samples(self, writes: Sequence[ArrayWrite]) -> dict[str, tuple[Any, np.dtype]]:
        """By array directory, a sample of process 0's values from which the codec is chosen; fetched in the background.

        A leaf is sampled once in the life of a checkpointer: each sample is a computation on the device and takes memory there.
        """
        agreed = self.agreed or {}
        chosen = [
            write
            for write in writes
            if write.array.metadata['compressor'] == AUTO and write.array.location not in agreed
        ]
        samples: dict[str, tuple[Any, np.dtype]] = {}
        for write in chosen:
            shards = write.value.addressable_shards if is_jax_array(write.value) else None
            data = write.value if shards is None else shards[0].data if shards else None
            if data is not None and not isinstance(data, LazyArray):
                samples[write.array.location] = beginning_of(data, _SAMPLES_BYTES // len(chosen)), write.dtype
        return samples

    def choose_from_samples(
        self, samples: Mapping[str, tuple[Any, np.dtype]], last_codec: Callable[[str], Any]
    ) -> dict[str, Any]:
        """In process 0, the codecs by array directory, for ``agreed``: those of before, and those of the sampled arrays.

        Args:
          samples: from :meth:`samples`.
          last_codec: returns the codec that an array has in the previous checkpoint; None without one.
        """
        codecs = dict(self.agreed or {})
        for location, (sample, dtype) in samples.items():
            with explicit_transfers():
                values = to_stored(np.asarray(sample).astype(dtype))
            codecs[location] = self.choose(values, last_codec(location))
        if samples:
            # Also for the next save if this one fails: a leaf is sampled once.
            self.agreed = codecs
        return codecs

    def choose(self, values: np.ndarray, last: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The codec for an array.

        Args:
          values: the first chunk, in the dtype on disk.
          last: the codec of the array in the previous checkpoint; None without one.

        Returns:
          A zarr compressor; None if compression does not pay.
        """
        sample = _sample(values)
        if sample.size == 0:
            return None
        cores, rate = _free_cores(), self.rate
        worth = _WORTH_IT / rate
        best, least, kept = None, 1 / rate, None
        for codec in _CANDIDATES:
            cost = _cost(sample, codec, rate, cores)
            kept = cost if codec == last else kept
            if cost <= least - worth:
                best, least = codec, cost
        if kept is not None and (kept < _WORTH_CHANGING / rate or kept * _WORTH_CHANGING < least):
            return last
        return best


def beginning_of(data: Any, limit: int) -> Any:
    """A copy of the first elements along each axis of an array: at most 256 KiB, and at most ``limit`` bytes or one element."""
    limit, left = min(limit, _SAMPLE_BYTES), data.nbytes
    index: list[slice] = []
    for size in data.shape:
        taken = size if left <= limit else max(1, size * limit // left)
        left = left * taken // max(1, size)
        index.append(slice(taken))
    return data[tuple(index)].copy()


def _free_cores() -> float:
    """The cores of this process that were idle in the last minute; at least half of them, its share of a busy machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return max(cores / 2, cores - os.getloadavg()[0])


def _cost(sample: np.ndarray, codec: dict[str, Any], rate: float, cores: float) -> float:
    """Seconds that a byte of the sample takes with a codec."""
    nbytes, seconds = 0, math.inf
    for _ in range(_TURNS):
        # Not the elapsed time, in which other threads run.
        started = time.thread_time()
        nbytes = len(encode(sample, codec))
        seconds = min(seconds, time.thread_time() - started)
        if seconds / cores <= nbytes / rate:
            # The storage is the limit, so the least time does not matter.
            break
    return max(nbytes / rate, seconds / cores) / sample.nbytes


def _sample(values: np.ndarray) -> np.ndarray:
    """Samples four runs spread over the chunk, so that a first row of zeros does not decide alone."""
    flat = values.reshape(-1)
    length = _SAMPLE_BYTES // flat.itemsize
    if flat.size <= length:
        return flat
    run = length // _SLICES
    starts = [int(i * (flat.size - run) / (_SLICES - 1)) for i in range(_SLICES)]
    return np.concatenate([flat[start : start + run] for start in starts])

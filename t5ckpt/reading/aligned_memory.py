"""Allocates host arrays that XLA's CPU backend uses without a copy, and keeps memory for another use."""

from __future__ import annotations

import contextlib
import math
import os
import queue
from collections.abc import Generator, Sequence

import numpy as np

from t5ckpt.errors import NotEnoughMemoryError

_LONGEST_WAIT_SECONDS = 10.0
ALIGNMENT = 64
"""Bytes of which the addresses of XLA's buffers are multiples."""


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialized C-order array whose data begins at a multiple of 64 bytes, as XLA wants its buffers.

    Raises:
      NotEnoughMemoryError: the process cannot get so much memory.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        raw = np.empty(size + ALIGNMENT, np.uint8)
    except (MemoryError, ValueError) as error:
        raise NotEnoughMemoryError(
            f'an array of shape {tuple(shape)} and dtype {dtype.name} needs {size} bytes, which cannot be allocated. Read a '
            'slice of it; if you saved no array of this size, the manifest is damaged.'
        ) from error
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


class SpareMemory:
    """Memory for one encoded chunk per core, which is used again, since the first access to memory is slow."""

    def __init__(self) -> None:
        """Allocates nothing yet."""
        self._spare: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        for _ in range(os.cpu_count() or 1):
            self._spare.put(np.empty(0, np.uint8))

    @contextlib.contextmanager
    def taken(self, size: int) -> Generator[memoryview]:
        """Memory of ``size`` bytes; waits for another thread if all is in use."""
        try:
            memory = self._spare.get(timeout=_LONGEST_WAIT_SECONDS)
        except queue.Empty:
            # An exception from a signal handler between two lines here loses memory.
            memory = np.empty(0, np.uint8)
        try:
            if memory.size < size:
                memory = np.empty(size, np.uint8)
            yield memory[:size].data
        finally:
            self._spare.put(memory)

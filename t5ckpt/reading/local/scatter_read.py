"""Reads a range of a file into many addresses with one system call (``preadv``).

``os.preadv`` takes a buffer object for each address, which costs more than the read of a row of a few KB. This module passes
an array of addresses to libc.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence

import numpy as np

# IOV_MAX of Linux.
_MAX_PLACES = 1024


@functools.cache
def _preadv() -> Callable[..., int]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    libc.preadv.restype = ctypes.c_ssize_t
    return libc.preadv


@functools.cache
def can_scatter() -> bool:
    """Whether this system has a libc whose argument types this module knows."""
    return sys.platform == 'linux' and sys.maxsize > 2**32 and hasattr(ctypes.CDLL(None), 'preadv')


def runs_in(shape: Sequence[int], strides: Sequence[int], itemsize: int, base: int) -> tuple[np.ndarray, int]:
    """The contiguous runs of a box.

    Args:
      shape: of the box.
      strides: in bytes.
      itemsize: bytes of an element.
      base: the offset or address of the first element.

    Returns:
      The start of each run, in C order, and the bytes of each.
    """
    axis, length = len(shape), itemsize
    while axis > 0 and strides[axis - 1] == length:
        axis -= 1
        length *= shape[axis]
    starts = np.array(base, np.int64)
    for size, stride in zip(shape[:axis], strides[:axis], strict=True):
        starts = starts[..., None] + np.arange(size, dtype=np.int64) * stride
    return starts.reshape(-1), length


def read_runs(
    fd: int, offset: int, places: np.ndarray, lengths: np.ndarray, preadv: Callable[..., int] | None = None
) -> None:
    """Reads the bytes of a file at ``offset`` into the addresses ``places``, ``lengths`` bytes each.

    The caller must keep this memory allocated until the function returns.

    Raises:
      EOFError: the file is too short.
      OSError: it cannot be read.
    """
    call = _preadv() if preadv is None else preadv
    vector = np.empty((len(places), 2), np.int64)
    vector[:, 0] = places
    vector[:, 1] = lengths
    ends = np.cumsum(lengths)
    first, done = 0, 0
    while first < len(vector):
        count = min(_MAX_PLACES, len(vector) - first)
        read = call(fd, vector[first:].ctypes.data, count, offset + done)
        if read < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        if read == 0:
            raise EOFError
        done += read
        # A short read may end inside a run, where the next read continues.
        first = int(np.searchsorted(ends, done, side='right'))
        if first < len(vector):
            missing = int(ends[first]) - done
            vector[first] = int(places[first]) + int(lengths[first]) - missing, missing

"""Reading a range of a file into many places at once (``preadv``).

``os.preadv`` takes a buffer object for each place, which costs more than to read a row of a few KB; here the places are
arrays of addresses and go to libc as they are.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ['can_scatter', 'read_runs', 'runs_in']

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
    """Whether this system's libc is one whose types are known here."""
    return sys.platform == 'linux' and sys.maxsize > 2**32 and hasattr(ctypes.CDLL(None), 'preadv')


def runs_in(shape: Sequence[int], strides: Sequence[int], itemsize: int, base: int) -> tuple[np.ndarray, int]:
    """Where the elements of a box lie one after another.

    Args:
      shape: of the box.
      strides: bytes from one index to the next, by axis.
      itemsize: bytes of an element.
      base: of the first element.

    Returns:
      Where each run begins, in C order, and how many bytes each has.
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
    """Reads the bytes of a file from ``offset`` on to the addresses ``places``, so many each.

    The memory there must be the caller's and stay it until this returns.

    Raises:
      EOFError: the file ends before.
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
        # A short read ends within a place: the next one begins there.
        first = int(np.searchsorted(ends, done, side='right'))
        if first < len(vector):
            missing = int(ends[first]) - done
            vector[first] = int(places[first]) + int(lengths[first]) - missing, missing

"""Maps files privately as numpy arrays.

Uses libc because Python's ``mmap`` keeps a duplicate of every file descriptor, and one open file per chunk would be too many.

Maps do not reserve memory or swap (``MAP_NORESERVE``), so together they may be larger than both. At most half of the kernel's
limit on maps per process is used (``vm.max_map_count``), since the allocator needs some, too.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import threading
from typing import Any

import numpy as np

_DEFAULT_MAX_MAPS = 65530
_MAP_FIXED = 0x10
_PROT_NONE = 0
_NORESERVE = getattr(mmap, 'MAP_NORESERVE', 0x4000 if sys.platform == 'linux' else 0)
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int64),
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


@functools.cache
def max_maps() -> int:
    """Half of the kernel's limit on the maps of one process."""
    try:
        with open('/proc/sys/vm/max_map_count', encoding='ascii') as file:
            return int(file.read()) // 2
    except (OSError, ValueError):
        return _DEFAULT_MAX_MAPS // 2


class _MapCount:
    """The number of live maps of this module; the kernel's limit is per process."""

    def __init__(self) -> None:
        self._count = 0
        # Reentrant, since Python's garbage collector may delete a region while the lock is held.
        self._guard = threading.RLock()

    def take(self, maps: int) -> None:
        with self._guard:
            if self._count + maps > max_maps():
                raise OSError(errno.ENOMEM, 'half of all maps are taken')
            self._count += maps

    def give(self, maps: int) -> None:
        with self._guard:
            self._count -= maps


_count = _MapCount()


class Region:
    """A range of addresses that is unmapped when the last array on it is deleted.

    Not ``weakref.finalize``, which would also unmap at the interpreter's exit, while threads of JAX may still read.
    """

    def __init__(self, size: int, maps: int):
        """Prepares a region of ``size`` bytes in ``maps`` maps; nothing is mapped yet.

        Raises:
          OSError: this process has too many maps.
        """
        _count.take(maps)
        self._maps = maps
        self._size = size
        self._address: int | None = None
        # Module globals may be None when ``__del__`` runs at the interpreter's exit.
        self._libc = _libc()
        self._give = _count.give
        self.__array_interface__: dict[str, Any] = {}

    def reserve(self) -> None:
        """Reserves the range of addresses, for more than one map."""
        self._map(None, self._size, _PROT_NONE, mmap.MAP_ANON, -1)

    def map(self, fd: int, offset: int, size: int) -> None:
        """Maps the first ``size`` bytes of a file, ``offset`` bytes into the region: a multiple of the page size.

        Raises:
          OSError: the file system cannot map, or the address space is full.
        """
        place, fixed = (None, 0) if self._address is None else (self._address + offset, _MAP_FIXED)
        self._map(place, size, mmap.PROT_READ | mmap.PROT_WRITE, fixed, fd)

    def _map(self, place: int | None, size: int, protection: int, flags: int, fd: int) -> None:
        address = self._libc.mmap(place, size, protection, flags | mmap.MAP_PRIVATE | _NORESERVE, fd, 0)
        if address is None or address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f'mmap of {size:,} bytes: {os.strerror(code)}')
        if self._address is None:
            self._address = address

    def array(self) -> np.ndarray:
        """The bytes, as an array that keeps the region alive."""
        data = (self._address, False)
        self.__array_interface__ = {'data': data, 'shape': (self._size,), 'typestr': '|u1', 'version': 3}
        return np.asarray(self)

    def __del__(self) -> None:
        if getattr(self, '_maps', 0):
            if self._address is not None:
                self._libc.munmap(self._address, self._size)
            self._give(self._maps)

"""Memory-maps boxes of plain chunks instead of reading them.

A box is mapped if it is contiguous in one uncompressed chunk with the bits of an array in memory, from a multiple of 64 bytes, as
XLA wants its buffers. Any other box is read.

Maps are private (``MAP_PRIVATE``): a write copies the page, so a change of an array never reaches the file. A checkpoint larger
than memory can be mapped: maps do not reserve memory or swap (``MAP_NORESERVE``). At most half of the kernel's limit on maps per
process is used (``vm.max_map_count``), since the allocator needs some, too. Files are mapped through libc, because Python's
``mmap`` keeps a duplicate of every file descriptor, and one open file per chunk would be too many.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import threading
from typing import Any

import numpy as np

_DEFAULT_MAX_MAPS = 65530
_NORESERVE = getattr(mmap, 'MAP_NORESERVE', 0x4000 if sys.platform == 'linux' else 0)
# Reentrant, since Python's garbage collector may delete a map while the lock is held.
_lock = threading.RLock()
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


class FileMap:
    """A private map of a file, which is unmapped when the last array on it is deleted.

    Not ``weakref.finalize``, which would also unmap at the interpreter's exit, while threads of JAX may still read.
    """

    count = 0

    def __init__(self, address: int, size: int):
        self._address, self._size = address, size
        # A module's globals may be None when ``__del__`` runs at the interpreter's exit.
        self._munmap, self._release = _libc().munmap, _release
        data = (address, False)
        self.__array_interface__: dict[str, Any] = {'data': data, 'shape': (size,), 'typestr': '|u1', 'version': 3}

    @classmethod
    def of(cls, fd: int, size: int) -> np.ndarray | None:
        """The bytes of a file; None if the file system cannot map, or the process has too many maps.

        A read beyond the end of a mapped file ends the process, so the caller has compared the size.
        """
        with _lock:
            if cls.count >= max_maps():
                return None
            flags = mmap.MAP_PRIVATE | _NORESERVE
            address = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
            if address is None or address == _FAILED:
                return None
            cls.count += 1
        return np.asarray(cls(address, size))

    def __del__(self) -> None:
        self._munmap(self._address, self._size)
        self._release()


def _release(lock: threading.RLock = _lock, kind: type[FileMap] = FileMap) -> None:
    with lock:
        kind.count -= 1

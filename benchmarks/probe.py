"""Clocks, caches and counters: everything that is asked of the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import pathlib
import platform
import resource
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIBC = ctypes.CDLL(None, use_errno=True)
_STATUS = pathlib.Path('/proc/self/status')
_MEMINFO = pathlib.Path('/proc/meminfo')
_CLEAR_REFS = pathlib.Path('/proc/self/clear_refs')
_DROP_CACHES = pathlib.Path('/proc/sys/vm/drop_caches')


def make_durable(directory: pathlib.Path) -> None:
    """Returns when everything written to the file system of `directory` is on the disk.

    One `syncfs` rather than an fsync a file: most peers do neither, and for thousands of files the first is far
    cheaper. A peer that has synced its own files finds next to nothing left to do here.
    """
    if not hasattr(_LIBC, 'syncfs'):
        os.sync()
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if _LIBC.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), f'syncfs {directory}')
    finally:
        os.close(descriptor)


def settle(directory: pathlib.Path) -> None:
    """Leaves nothing behind that the next measurement would pay for: garbage, or pages waiting for the disk."""
    gc.collect()
    make_durable(directory)


def empty_page_cache() -> str | None:
    """All of it, where root allows. Returns how that was done."""
    try:
        _DROP_CACHES.write_text('3')
    except OSError:
        return None
    return 'drop_caches'


def touch_memory(nbytes: int) -> None:
    """Writes to that much memory and gives it back, so that what is measured next gets memory that was used before.

    A virtual machine's host finds memory for a page when the guest first writes to it. On one machine a restore from
    the page cache was slower than one from the disk, only because the former got pages that had not been used before.
    """
    block = bytes(1 << 20)
    room = _meminfo('MemAvailable') // 2 if _MEMINFO.exists() else nbytes
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, max(len(block), min(nbytes, room)), flags=private) as memory:
        if hasattr(mmap, 'MADV_HUGEPAGE'):
            memory.madvise(mmap.MADV_HUGEPAGE)
        for _ in range(len(memory) // len(block)):
            memory.write(block)


def _files(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    return (path for path in directory.rglob('*') if path.is_file())


def warm_cache(directory: pathlib.Path) -> None:
    """Reads every file once, so that all peers find theirs in the page cache, however they were written."""
    buffer = bytearray(1 << 20)
    for path in _files(directory):
        with path.open('rb', buffering=0) as file:
            while file.readinto(buffer):
                pass


def cool_cache(directory: pathlib.Path) -> None:
    """Has the files under `directory` leave the page cache. They have to be durable."""
    for path in _files(directory):
        with path.open('rb') as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_bytes(directory: pathlib.Path) -> int:
    """Bytes allocated under `directory`, a file of several names counted once."""
    blocks = {stat.st_ino: stat.st_blocks for stat in (path.stat() for path in _files(directory))}
    return 512 * sum(blocks.values())


def disk_busy_seconds(directory: pathlib.Path) -> float:
    """For how long the disk of a directory has had something to do since the boot; NaN if it is not on a disk."""
    device = directory.stat().st_dev
    try:
        text = pathlib.Path(f'/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat').read_text()
    except OSError:
        return float('nan')
    # Milliseconds: io_ticks of Documentation/block/stat.rst.
    return int(text.split()[9]) / 1000


class Clock:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Since then."""
        return time.perf_counter() - self._start


class PeakMemory:
    """The peak of the resident memory from when it is made, above what was resident then.

    Linux keeps the number that `ru_maxrss` reports as VmHWM too, and only that one can be reset: `ru_maxrss` starts at
    the peak of the parent process and remembers how the state was made. Free memory is given back to the system first,
    so that using it again counts; `settle` has collected the garbage.
    """

    def __init__(self) -> None:
        if hasattr(_LIBC, 'malloc_trim'):
            _LIBC.malloc_trim(0)
        with contextlib.suppress(OSError):
            _CLEAR_REFS.write_text('5')
        self._start = _status('VmRSS') if _STATUS.exists() else _peak()

    def above_start(self) -> float:
        """In bytes."""
        return float(_peak() - self._start)


def _peak() -> int:
    if _STATUS.exists():
        return _status('VmHWM')
    unit = 1 if platform.system() == 'Darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int:
    return _kilobytes(_STATUS, field)


def _meminfo(field: str) -> int:
    return _kilobytes(_MEMINFO, field)


def _kilobytes(file: pathlib.Path, field: str) -> int:
    """A line like `VmRSS:   1234 kB`, in bytes."""
    line = next(line for line in file.read_text().splitlines() if line.startswith(f'{field}:'))
    return int(line.split()[1]) * 1024

"""What writing costs the processors: through the page cache, and past it (O_DIRECT).

    python benchmarks/page_cache.py [MB] [ROUNDS]

Writes and syncs files of 16 MiB, 16 at once, from one buffer, in turns: nothing but the kernel's own work. The buffered
turn comes twice: first into pages that the page cache has to get anew, then into those that the turn before gave back. On a
virtual machine the first may be many times as dear, since the host has to find memory for each. Everything that saves in the
background takes these seconds from the training step.
"""

from __future__ import annotations

import concurrent.futures
import mmap
import os
import pathlib
import sys
import tempfile
import time

_FILE = 16 * 2**20
_PIECE = 4 * 2**20


def _busy_seconds() -> float:
    """Seconds that all processors together have worked since the boot."""
    user, nice, system, _, _, irq, softirq = map(int, pathlib.Path('/proc/stat').read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf('SC_CLK_TCK')


def _write(path: pathlib.Path, data: mmap.mmap, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
    try:
        view, offset = memoryview(data), 0
        while offset < _FILE:
            offset += os.pwrite(fd, view[offset : offset + _PIECE], offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def _turn(name: str, flags: int, megabytes: int, directory: pathlib.Path, data: mmap.mmap) -> None:
    paths = [directory / str(number) for number in range(max(1, megabytes * 2**20 // _FILE))]
    os.sync()
    wall, busy = time.perf_counter(), _busy_seconds()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda path: _write(path, data, flags), paths))
    print(f'{name:16} {time.perf_counter() - wall:.3f} s, {_busy_seconds() - busy:.2f} s of processors', flush=True)
    for path in paths:
        path.unlink()


def main() -> None:
    """Prints a line a turn."""
    megabytes, rounds = (int(word) for word in (sys.argv[1:] or ('704', '3')))
    with tempfile.TemporaryDirectory(dir=pathlib.Path(__file__).parent) as name, mmap.mmap(-1, _FILE) as data:
        data.write(os.urandom(_FILE))
        for _ in range(rounds):
            _turn('past the cache', os.O_DIRECT, megabytes, pathlib.Path(name), data)
            _turn('buffered', 0, megabytes, pathlib.Path(name), data)
            _turn('buffered, again', 0, megabytes, pathlib.Path(name), data)


if __name__ == '__main__':
    main()

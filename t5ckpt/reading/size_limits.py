"""Sizes that a checkpoint claims, and what speaks for them.

A manifest of a hundred bytes can say that an array has 2^60 elements, and ``.zarray`` that a chunk has. Memory is taken
only for what the files can hold: a plain chunk is as long as its file, and no codec of zarr makes more than 2^17 bytes of
one (zstd 2^15, gzip 2^10, blosc 2^8; bz2 could, for zeros in chunks far above the limit that needs no proof). What is
left could still be more than the machine has, and is refused before the kernel kills the process for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from t5ckpt.errors import CorruptCheckpointError, NotEnoughMemoryError

__all__ = ['check_chunk', 'check_count', 'check_memory']

_NEEDS_NO_PROOF = 256 * 2**20
_MAX_RATIO = 2**17
_MANY = 2**14
_CGROUP = '/sys/fs/cgroup'


def check_chunk(chunk_bytes: int, file_bytes: Callable[[], int], where: str) -> None:
    """Checks that a chunk file can hold as much as its metadata says; it is looked at only if that is much.

    Raises:
      CorruptCheckpointError: no codec packs that much into so little.
      NotEnoughMemoryError: this machine could not hold it.
    """
    if chunk_bytes <= _NEEDS_NO_PROOF:
        return
    if chunk_bytes > (found := file_bytes()) * _MAX_RATIO:
        raise CorruptCheckpointError(
            f'{where}: the metadata claims a chunk of {chunk_bytes:,} bytes, which a file of {found:,} bytes cannot '
            'hold. Do not use this checkpoint.'
        )
    check_memory(chunk_bytes, where)


def check_memory(nbytes: int, where: str) -> None:
    """Checks that this machine has the memory that an array needs.

    Raises:
      NotEnoughMemoryError: it has not.
    """
    if nbytes <= _NEEDS_NO_PROOF:
        return
    limit = memory_limit()
    if limit is not None and nbytes > limit:
        raise NotEnoughMemoryError(
            f'{where}: {nbytes:,} bytes are needed, this machine has {limit:,}. Read a slice of it '
            '(open_checkpoint(path)[name][:100]), map it (mmap=True), or restore it sharded.'
        )


def check_count(chunks: int, files: Callable[[], int], where: str) -> None:
    """Checks that there are as many files as an array is said to have chunks; they are counted only if it has many.

    Raises:
      CorruptCheckpointError: there are fewer.
    """
    if chunks > _MANY and chunks > (found := files()):
        raise CorruptCheckpointError(
            f'{where}: the metadata claims {chunks:,} chunks, and there are {found:,} files. It is damaged or made up; '
            'restore an older step, or copy the checkpoint again.'
        )


def memory_limit() -> int | None:
    """The bytes that this process may use at most: of the machine, or of its control group; None if nobody says."""
    limits = [_sysconf()] if hasattr(os, 'sysconf') else []
    for name in ('memory.max', 'memory/memory.limit_in_bytes'):
        try:
            with open(os.path.join(_CGROUP, name), encoding='ascii') as file:
                limits.append(int(file.read()))
        except (OSError, ValueError):
            # Another version of control groups, or no limit ("max").
            continue
    known = [limit for limit in limits if limit is not None]
    return min(known, default=None)


def _sysconf() -> int | None:
    try:
        return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    except (OSError, ValueError):
        return None

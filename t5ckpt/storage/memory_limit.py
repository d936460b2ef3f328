"""The memory of this machine, and the largest file that is read at once."""

from __future__ import annotations

import os

from t5ckpt.errors import NotEnoughMemoryError

_CGROUP = '/sys/fs/cgroup'
_NEEDS_NO_PROOF = 256 * 2**20


def check_whole_read(nbytes: int, where: str) -> None:
    """Checks the size of a file before all of it is read: its bytes and the values decoded from them must fit in memory.

    Raises:
      NotEnoughMemoryError: the file is larger than half of the memory.
    """
    if nbytes <= _NEEDS_NO_PROOF:
        return
    limit = memory_limit()
    if nbytes > limit // 2:
        raise NotEnoughMemoryError(
            f'{where} has {nbytes:,} bytes and is read at once, which takes more than the {limit:,} bytes of memory that this '
            'machine has. If no program of yours has written so large a file, copy the checkpoint again.'
        )


def memory_limit() -> int:
    """The memory limit of this process in bytes, from the machine or its control group."""
    limits = [os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')]
    for name in ('memory.max', 'memory/memory.limit_in_bytes'):
        try:
            with open(os.path.join(_CGROUP, name), encoding='ascii') as file:
                limits.append(int(file.read()))
        except (OSError, ValueError):
            # Another version of control groups, or no limit ("max").
            continue
    return min(limits)

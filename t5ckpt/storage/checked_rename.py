"""Renames and exchanges of names, with a check of their result.

A rename can be lost without an error, on a faulty disk or an unusual file system. On a network, the reply can be lost although
the rename was made. Comparing the inode afterwards detects both.
"""

from __future__ import annotations

import ctypes
import errno
import os

_RENAME_EXCHANGE = 2
# The kernel, the file system or the C library does not support the exchange, or, as a lower
# layer of an overlay, no rename.
_ABSENT = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV}


def leads_to(path: str, info: os.stat_result) -> bool:
    """Whether a path leads to this file or directory; False if it cannot be inspected."""
    try:
        return os.path.samestat(info, os.stat(path))
    except OSError:
        return False


def check_renamed(info: os.stat_result, source: str) -> None:
    """Checks that a rename was made, since a lost one would leave out a file of a checkpoint."""
    if leads_to(source, info):
        raise OSError(errno.EIO, 'the rename was reported as successful, but was not made')


def exchange(one: str, other: str) -> bool:
    """Swaps two names in one atomic operation (renameat2 of Linux); returns False if the system cannot.

    Raises:
      OSError: the exchange failed.
    """
    before = os.stat(one)
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, 'renameat2'):
        return False
    at_cwd = -100
    if library.renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        if code in _ABSENT:
            return False
        # A network file system may have made the exchange and lost the reply.
        if not leads_to(other, before):
            raise OSError(code, os.strerror(code))
    check_renamed(before, one)
    return True

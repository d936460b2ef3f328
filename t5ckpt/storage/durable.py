"""Writes, new directories and renames that are durable when they return.

A rename whose directory cannot be synchronized is undone, so that an error means that nothing has changed.

A rename can be lost without an error, on a faulty disk or an unusual file system. On a network, the reply can be lost although
the rename was made. Comparing the inode afterwards detects both.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat

from t5ckpt.errors import NotDurableError

_RENAME_EXCHANGE = 2
# The kernel, the file system or the C library does not support the exchange, or, as a lower layer of an overlay, no rename.
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


def sync_dir(path: str) -> None:
    """Makes the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems do not support fsync of a directory. They determine when a rename is durable.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


def write_synced(path: str, data: bytes) -> os.stat_result:
    """Writes a file that does not exist and makes its bytes durable; its directory entry is not."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
        return os.fstat(fd)
    finally:
        os.close(fd)


def make_dir_durably(path: str, *, syncs_name: bool) -> None:
    """Creates a directory and its parents, unless they exist.

    The names of the parents are durable, that of the directory only with ``syncs_name``.
    """
    missing: list[str] = []
    parent = os.path.dirname(path)
    while not os.path.isdir(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)
        sync_dir(os.path.dirname(directory))
    try:
        os.mkdir(path)
        if syncs_name:
            sync_dir(os.path.dirname(path))
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None


def rename_durably(source: str, target: str) -> None:
    """Renames a directory to a name that does not exist.

    Raises:
      NotDurableError: the rename is visible.
      OSError: nothing has changed.
    """
    before = os.stat(source)
    try:
        os.rename(source, target)
    except OSError:
        # A network file system may have made the rename and lost the reply.
        if not leads_to(target, before):
            raise
    check_renamed(before, source)
    try:
        sync_dir(os.path.dirname(target))
    except OSError as error:
        try:
            os.rename(target, source)
        except OSError:
            raise _not_durable(target, error) from error
        raise


def exchange_durably(source: str, target: str) -> bool:
    """Swaps two directories; returns False if the system cannot.

    Raises:
      OSError: as for :func:`rename_durably`.
    """
    if not exchange(source, target):
        return False
    try:
        sync_dir(os.path.dirname(target))
    except OSError as error:
        try:
            exchange(source, target)
        except OSError:
            raise _not_durable(target, error) from error
        raise
    return True


def _not_durable(path: str, cause: OSError) -> NotDurableError:
    return NotDurableError(
        cause.errno,
        f'{path}: {cause.strerror}; the rename is visible, but may be gone after a power cut. The disk or the file system failed '
        '(see dmesg): save again, or use another directory.',
    )

"""Opening the files of a checkpoint so that nothing outside its directory is read.

Names from a manifest are checked when they are parsed; what is left are symbolic links, and files that are none. Each
component is opened with ``O_NOFOLLOW``. A link inside the checkpoint is followed to where it leads if that is inside,
too; one that leads out is refused, unless the caller asked to follow links. A FIFO or a device in the place of a file
would block the reader, or never end: only regular files are read.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from t5ckpt.errors import CorruptCheckpointError, UnsafeSpecError, UnsupportedFormatError

__all__ = ['Fence', 'check_size', 'open_source', 'read_source']

_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_DIRECTORY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY
_MAX_DEPTH = 64


def open_source(path: str) -> BinaryIO:
    """Opens a file that a user named, or that another program's checkpoint consists of; links are followed.

    Raises:
      UnsupportedFormatError: it is not a regular file. A FIFO would block the reader, a device may never end.
      OSError: it cannot be opened.
    """
    # Not blocking: to open a FIFO is to wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, 'rb')
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise UnsupportedFormatError(f'{path} is not a regular file (mode {stat.filemode(mode)}). Copy it to one first.')


def read_source(path: str, limit: int) -> bytes:
    """All bytes of such a file, which describes others and is small.

    Raises:
      CorruptCheckpointError: it has more than ``limit`` bytes; nothing was read.
      UnsupportedFormatError, OSError: as for :func:`open_source`.
    """
    with open_source(path) as file:
        check_size(os.fstat(file.fileno()).st_size, limit, path)
        return file.read(limit)


def check_size(size: int, limit: int, where: str) -> None:
    """Refuses a file that would fill the memory, and cannot be what its name says."""
    if size > limit:
        raise CorruptCheckpointError(f'{where} has {size:,} bytes, expected at most {limit:,}. Copy it again.')


class Fence:
    """The directory of one checkpoint, and what may be read of it. Safe from any thread."""

    def __init__(self, root: str, *, follow_links: bool = False):
        """Takes the checkpoint's directory; with ``follow_links`` symbolic links may lead out of it."""
        self._root = root
        self._follow = follow_links

    def open_dir(self, name: str, leaf: str) -> int:
        """A descriptor of a directory below the root, which the caller closes.

        Raises:
          UnsafeSpecError: a symbolic link leads out of the checkpoint.
          OSError: it cannot be opened.
        """
        fd = os.open(self._root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            return self._below(fd, '', name, (leaf, _DIRECTORY)) if name else os.dup(fd)
        finally:
            os.close(fd)

    def open_file(self, directory: tuple[int, str], name: str, leaf: str) -> tuple[int, int]:
        """A descriptor of a file, which the caller closes, and the file's size.

        Args:
          directory: a descriptor of an open directory, and its name below the root.
          name: relative to that directory.
          leaf: for messages.

        Raises:
          CorruptCheckpointError: it is no regular file.
          UnsafeSpecError: a symbolic link leads out of the checkpoint.
          OSError: it cannot be opened.
        """
        fd = self._below(*directory, name, (leaf, _FILE))
        try:
            info = os.fstat(fd)
        except OSError:
            os.close(fd)
            raise
        if stat.S_ISREG(info.st_mode):
            return fd, info.st_size
        os.close(fd)
        raise CorruptCheckpointError(
            f'{leaf}: {self._path(directory[1], name)} is no regular file. Restore an older step, or copy the checkpoint '
            'again.'
        )

    def check(self, name: str, leaf: str) -> None:
        """Looks for links that lead out, at a name and at everything below it, before another library opens it.

        Raises:
          CorruptCheckpointError: something is neither a file nor a directory.
          UnsafeSpecError: a symbolic link leads out of the checkpoint.
          OSError: a directory cannot be read; one that is missing is nothing to worry about.
        """
        parts = name.split('/') if name else []
        for length in range(1, len(parts)):
            self._check_link('/'.join(parts[:length]), leaf)
        for each in self._tree(name):
            mode = self._check_link(each, leaf)
            if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise CorruptCheckpointError(
                    f'{leaf}: {self._path(each)} is no regular file. Restore an older step, or copy the checkpoint again.'
                )

    def _tree(self, name: str, depth: int = 0) -> Iterator[str]:
        yield name
        try:
            with os.scandir(self._path(name)) as scan:
                # An ordinary file needs no second look, and most entries are.
                found = [(item.name, item.is_dir(follow_symlinks=False)) for item in scan if not _is_plain(item)]
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry, is_dir in found:
            below = os.path.join(name, entry)
            if is_dir and depth < _MAX_DEPTH:
                yield from self._tree(below, depth + 1)
            else:
                yield below

    def _check_link(self, name: str, leaf: str) -> int | None:
        """The mode of what a name stands for; None if there is nothing."""
        path = self._path(name)
        try:
            if stat.S_ISLNK(os.lstat(path).st_mode):
                path = self._resolved(name, leaf)
            return os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _path(self, *names: str) -> str:
        return os.path.join(self._root, *(name for name in names if name))

    def _below(self, fd: int, above: str, name: str, leaf_and_flags: tuple[str, int]) -> int:
        leaf, flags = leaf_and_flags
        *parents, last = name.split('/')
        opened = [fd]
        try:
            for parent in parents:
                opened.append(os.open(parent, _DIRECTORY, dir_fd=opened[-1]))
            return os.open(last, flags, dir_fd=opened[-1])
        except OSError as error:
            # A link itself gives ELOOP, or ENOTDIR where a directory was asked for.
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            return os.open(self._resolved(f'{above}/{name}' if above else name, leaf), flags)
        finally:
            for each in opened[1:]:
                os.close(each)

    def _resolved(self, name: str, leaf: str) -> str:
        """The path behind a link, if it is one of the checkpoint's own or links may lead out."""
        root = os.path.realpath(self._root)
        path = os.path.join(root, name)
        real = os.path.realpath(path)
        if not self._follow and os.path.commonpath([root, real]) != root:
            raise UnsafeSpecError(
                f'{leaf}: {path} is a symbolic link that leads to {real}, outside the checkpoint. Copy the file here, or, '
                'if you trust who made the link, pass follow_links=True.'
            )
        return real


def _is_plain(item: os.DirEntry[str]) -> bool:
    return item.is_file(follow_symlinks=False)

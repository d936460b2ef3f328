"""A POSIX file system in memory, which simulates power cuts.

A file's bytes are durable after ``fsync`` of the file, and its name after ``fsync`` of its directory. A power cut keeps these.
Of the changes of a directory since its last ``fsync``, any may be there or not, but a rename or an exchange of two names in one
directory is one change. A file that was written since its last ``fsync`` has the old bytes, the new ones, or a part of these.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import stat
from collections.abc import Callable, Mapping
from typing import Any


class File:
    """An inode with bytes."""

    is_dir = False

    def __init__(self, number: int, now: float):
        self.number, self.mtime, self.links = number, now, 1
        self.data = b''
        self.durable = b''


class Directory:
    """An inode with names. ``pending`` are the changes since the last fsync, each by name."""

    is_dir = True
    links = 1

    def __init__(self, number: int, now: float):
        self.number, self.mtime = number, now
        self.names: dict[str, File | Directory] = {}
        self.durable: dict[str, File | Directory] = {}
        self.pending: list[dict[str, File | Directory | None]] = []

    def change(self, change: dict[str, File | Directory | None], now: float) -> None:
        """Sets names, or removes those that are None, in one operation."""
        self.pending.append(change)
        _apply(self.names, change)
        self.mtime = now


def _copied(inode: File | Directory, copies: dict[int, File | Directory]) -> File | Directory:
    copy = copies.get(inode.number)
    if copy is not None:
        return copy
    if isinstance(inode, Directory):
        return _copied_directory(inode, copies)
    file = copies[inode.number] = File(inode.number, inode.mtime)
    file.links, file.data, file.durable = inode.links, inode.data, inode.durable
    return file


def _copied_directory(inode: Directory, copies: dict[int, File | Directory]) -> Directory:
    made = copies[inode.number] = Directory(inode.number, inode.mtime)
    made.names = {name: _copied(child, copies) for name, child in inode.names.items()}
    made.durable = {name: _copied(child, copies) for name, child in inode.durable.items()}
    made.pending = [
        {name: None if child is None else _copied(child, copies) for name, child in change.items()}
        for change in inode.pending
    ]
    return made


@functools.lru_cache(100_000)
def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split('/') if part)


def _apply(names: dict[str, File | Directory], change: Mapping[str, File | Directory | None]) -> None:
    for name, inode in change.items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


class Disk:
    """The file system. Paths are absolute, without ``.`` and ``..``.

    Attributes:
      now: returns unix seconds of the file server.
      numbers: the number of the newest inode.
      locks: the holder of each lock, by the inode's number and, if ``has_local_locks``, the machine.
      has_local_locks: whether locks exclude processes of one machine alone, as on some network file systems.
      changed: called with the paths after each change of the names or bytes that a program can see.
    """

    def __init__(self, now: Callable[[], float]):
        self.now = now
        self.changed: Callable[[tuple[str, ...]], None] = lambda paths: None
        self.numbers = 1
        self.locks: dict[tuple[int, str], Any] = {}
        self.has_local_locks = False
        self.root = Directory(1, now())

    # --- lookups ---------------------------------------------------------------------------------------------------------

    def find(self, path: str) -> File | Directory:
        """The inode at a path."""
        inode: File | Directory = self.root
        for part in _parts(path):
            if not isinstance(inode, Directory):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            below = inode.names.get(part)
            if below is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            inode = below
        return inode

    def read(self, path: str) -> bytes | None:
        """The bytes of a file; None if there is no file."""
        inode: File | Directory | None = self.root
        for part in _parts(path):
            inode = inode.names.get(part) if isinstance(inode, Directory) else None
        return inode.data if isinstance(inode, File) else None

    def copied(self, now: Callable[[], float]) -> Disk:
        """A disk with the same inodes. No lock is held."""
        other = Disk(now)
        copies: dict[int, File | Directory] = {}
        other.root, other.numbers = _copied_directory(self.root, copies), self.numbers
        return other

    def parent(self, path: str) -> tuple[Directory, str]:
        """The directory of a path, and the last name."""
        above, _, name = path.rstrip('/').rpartition('/')
        inode = self.find(above)
        if not isinstance(inode, Directory):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return inode, name

    def status(self, inode: File | Directory) -> os.stat_result:
        """``os.stat`` of an inode."""
        size = len(inode.data) if isinstance(inode, File) else 0
        mode = stat.S_IFREG | 0o644 if isinstance(inode, File) else stat.S_IFDIR | 0o755
        seconds = int(inode.mtime)
        times = (inode.mtime, inode.mtime, inode.mtime, *[int(inode.mtime * 1e9)] * 3)
        return os.stat_result((mode, inode.number, 1, inode.links, 0, 0, size, seconds, seconds, seconds, *times))

    def files(self) -> dict[str, bytes]:
        """All files by path."""
        files: dict[str, bytes] = {}

        def walk(directory: Directory, prefix: str) -> None:
            for name, inode in directory.names.items():
                if isinstance(inode, Directory):
                    walk(inode, f'{prefix}{name}/')
                else:
                    files[prefix + name] = inode.data

        walk(self.root, '/')
        return files

    def paths(self) -> list[str]:
        """All files and directories."""
        paths: list[str] = []

        def walk(directory: Directory, prefix: str) -> None:
            for name, inode in directory.names.items():
                paths.append(prefix + name)
                if isinstance(inode, Directory):
                    walk(inode, f'{prefix}{name}/')

        walk(self.root, '/')
        return paths

    # --- changes ---------------------------------------------------------------------------------------------------------

    def _number(self) -> int:
        self.numbers += 1
        return self.numbers

    def create(self, path: str) -> File:
        """Creates an empty file."""
        directory, name = self.parent(path)
        file = File(self._number(), self.now())
        directory.change({name: file}, self.now())
        self.changed((path,))
        return file

    def write(self, file: File, data: bytes, offset: int) -> None:
        """Writes bytes into a file."""
        file.data = file.data[:offset].ljust(offset, b'\0') + data + file.data[offset + len(data) :]
        file.mtime = self.now()

    def sync(self, inode: File | Directory) -> None:
        """``fsync``."""
        if isinstance(inode, File):
            inode.durable = inode.data
        else:
            inode.durable = dict(inode.names)
            inode.pending.clear()

    def mkdir(self, path: str) -> None:
        """Creates a directory."""
        directory, name = self.parent(path)
        if name in directory.names or not name:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        directory.change({name: Directory(self._number(), self.now())}, self.now())
        self.changed((path,))

    def rename(self, source: str, target: str) -> None:
        """Renames; a file may replace a file, and a directory an empty directory."""
        (old, old_name), (new, new_name) = self.parent(source), self.parent(target)
        inode, other = self.find(source), new.names.get(new_name)
        if other is inode:
            return
        if other is not None:
            if inode.is_dir and not other.is_dir:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), target)
            if not inode.is_dir and other.is_dir:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
            if isinstance(other, Directory) and other.names:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
        if old is new:
            old.change({old_name: None, new_name: inode}, self.now())
        else:
            new.change({new_name: inode}, self.now())
            old.change({old_name: None}, self.now())
        self.changed((source, target))

    def exchange(self, one: str, other: str) -> None:
        """Swaps two names of one directory."""
        (directory, name), (_, other_name) = self.parent(one), self.parent(other)
        first, second = self.find(one), self.find(other)
        directory.change({name: second, other_name: first}, self.now())
        self.changed((one, other))

    def link(self, source: str, target: str) -> None:
        """Adds a name of a file."""
        directory, name = self.parent(target)
        inode = self.find(source)
        if name in directory.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        if isinstance(inode, Directory):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source)
        inode.links += 1
        directory.change({name: inode}, self.now())
        self.changed((target,))

    def unlink(self, path: str) -> None:
        """Removes a name of a file."""
        inode = self.find(path)
        if isinstance(inode, Directory):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        directory, name = self.parent(path)
        inode.links -= 1
        directory.change({name: None}, self.now())
        self.changed((path,))

    def rmdir(self, path: str) -> None:
        """Removes an empty directory."""
        inode = self.find(path)
        if not isinstance(inode, Directory):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if inode.names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        directory, name = self.parent(path)
        directory.change({name: None}, self.now())
        self.changed((path,))

    # --- power cuts ------------------------------------------------------------------------------------------------------

    def cut_power(self, seed: int) -> None:
        """Keeps the durable changes and, at random, some of the others. All locks are released."""
        choice = random.Random(seed)
        self.locks.clear()
        # Half of the seeds keep as little as is allowed, or as much.
        keep = (0.0, 1.0, 0.5, 0.5)[seed % 4]
        seen: set[int] = set()

        def settle(inode: File | Directory) -> None:
            if inode.number in seen:
                return
            seen.add(inode.number)
            if isinstance(inode, File):
                if inode.data != inode.durable and choice.random() >= keep:
                    torn = inode.data[: choice.randrange(len(inode.data) + 1)]
                    inode.data = inode.durable if choice.random() < 0.5 else torn
                inode.durable = inode.data
                return
            names = dict(inode.durable)
            for change in inode.pending:
                if choice.random() < keep:
                    _apply(names, change)
            inode.names, inode.durable, inode.pending = names, dict(names), []
            for name in sorted(names):
                settle(names[name])

        settle(self.root)
        self.changed(())

"""POSIX file systems.

Files are written with ``fsync``, large chunks without the page cache (``storage/direct_io.py``). The directory entries of chunks
are not durable, so ``sync_tree`` fsyncs every directory from the leaves up, and ``publish`` fsyncs the parent after the rename.

The umask determines the permissions of files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from t5ckpt.core.keys import join
from t5ckpt.core.standard_descriptors import open_standard_descriptors
from t5ckpt.errors import StorageError
from t5ckpt.format.file_checksums import FileEntry
from t5ckpt.storage.base import Entry, Storage
from t5ckpt.storage.directory_lock import DirectoryLock, lock_directory
from t5ckpt.storage.durable import (
    check_renamed,
    exchange_durably,
    make_dir_durably,
    rename_durably,
    sync_dir,
    write_synced,
)
from t5ckpt.storage.error_mapping import foreign_errors, map_os_error
from t5ckpt.storage.forked import use_tensorstore
from t5ckpt.storage.memory_limit import check_whole_read
from t5ckpt.storage.options import FileOptions

if TYPE_CHECKING:
    import tensorstore as ts


# The limit on TensorStore's open files: 32 keep a disk busy, far below ulimit -n.
_IO_CONCURRENCY = 32
# The limit on attempts; each ends when the other process has removed a name.
_RIVAL_ATTEMPTS = 1000


def _status(path: str, *, may_dangle: bool) -> os.stat_result | None:
    """The status of a file, following links; None if it does not exist.

    Raises:
      StorageError: it is a symbolic link to nothing, and may not be.
    """
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if may_dangle or not os.path.islink(path):
            return None
        raise StorageError(
            errno.ENOENT,
            f'{path} is a symbolic link to {os.readlink(path)}, which does not exist. Mount the disk with it, or remove the '
            'link.',
        ) from None


def _remove_tree(path: str) -> None:
    """Removes a directory; another process may remove names in it at the same time."""
    for left in range(_RIVAL_ATTEMPTS, -1, -1):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if left == 0:
                raise
        if not os.path.lexists(path):
            return


class FileStorage(Storage):
    """A directory of a POSIX file system."""

    commits_by_rename = True
    links = True
    driver = 'file'

    def __init__(self, root: str, options: FileOptions = FileOptions()):  # noqa: B008 - frozen
        """Takes a path, which need not exist."""
        self._options = options
        self._root = os.path.abspath(root)
        self._prefix = os.path.join(self._root, '')
        self._context: ts.Context | None = None
        open_standard_descriptors()

    def url(self, key: str = '') -> str:
        return self._prefix + key if key else self._root

    local_path = _path = url

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        with foreign_errors(self.url(key)):
            # Non-blocking, since opening a FIFO would wait for its writer.
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(fd, 'rb') as file:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL, 'not a regular file')
                if stop is None:
                    check_whole_read(status.st_size, self.url(key))
                file.seek(start)
                return file.read(None if stop is None else stop - start)

    def write(self, key: str, data: bytes) -> None:
        path = self._path(key)
        # Of its own, since another process may write the same file.
        partial = f'{path}.{secrets.token_hex(4)}.__partial'
        with foreign_errors(self.url(key)):
            try:
                written = write_synced(partial, data)
                os.replace(partial, path)
                check_renamed(written, partial)
                sync_dir(os.path.dirname(path))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise

    def write_chunk(self, key: str, data: Any) -> tuple[FileEntry, Any]:
        # Imports numpy, which listings do not need.
        from t5ckpt.storage.direct_io import write_new

        smallest = self._options.direct_bytes
        entry = write_new(self._path(key), data, is_direct=smallest is not None and len(data) >= smallest)
        version = self.stamp(key)
        if version is None and self.size(key) is None:
            raise StorageError(
                errno.EIO, f'{self.url(key)}: was written without an error, but does not exist. Save again.'
            )
        return entry, version

    def _stat(self, key: str) -> os.stat_result | None:
        with foreign_errors(self.url(key)):
            return _status(self._path(key), may_dangle='/' in key)

    def kind(self, key: str) -> str | None:
        info = self._stat(key)
        mode = 0 if info is None else info.st_mode
        return 'dir' if stat.S_ISDIR(mode) else 'file' if stat.S_ISREG(mode) else None

    def size(self, key: str) -> int | None:
        info = self._stat(key)
        return info.st_size if info is not None and stat.S_ISREG(info.st_mode) else None

    def stamp(self, key: str, before: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
        try:
            info = os.lstat(self._path(key))
        except OSError:
            return None
        # The change time also detects a modification time that was set back. New hard links change it, too.
        now = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
        return None if before is not None and now[:-1] != before[:-1] else now

    def modified(self, key: str) -> float | None:
        try:
            return os.stat(self._path(key)).st_mtime
        except OSError:
            return None

    def server_time(self, key: str) -> float | None:
        try:
            self.write(key, b'')
            return self.modified(key)
        finally:
            with contextlib.suppress(StorageError):
                self.delete_file(key)

    def version(self, key: str) -> Any:
        try:
            info = self._stat(key)
        except StorageError as error:
            # Another machine has removed the file. After any other error, it may exist.
            if error.errno == errno.ESTALE:
                return None
            raise
        if info is None:
            return None
        # The version of a directory does not change with its entries, only if it is removed and created again.
        is_dir = stat.S_ISDIR(info.st_mode)
        return info.st_dev, info.st_ino, *(() if is_dir else (info.st_size, info.st_mtime_ns))

    def entries(self, key: str = '') -> list[Entry]:
        entries: list[Entry] = []
        with foreign_errors(self.url(key)):
            try:
                with os.scandir(self._path(key)) as scan:
                    items = sorted(scan, key=lambda item: item.name)
            except (FileNotFoundError, NotADirectoryError):
                self._check_links()
                return []
            for item in items:
                try:
                    info = item.stat()
                except OSError as error:
                    if item.is_symlink():
                        # What it leads to cannot be inspected. It does not keep the other names from being listed.
                        entries.append(Entry(item.name, is_dir=True))
                    elif error.errno != errno.ENOENT:
                        # The listing would be incomplete, except without a name that was just deleted.
                        raise
                else:
                    is_dir = stat.S_ISDIR(info.st_mode)
                    entries.append(Entry(item.name, is_dir, 0 if is_dir else info.st_size))
        return entries

    def _check_links(self) -> None:
        """Raises StorageError if a symbolic link on the way to the root leads to nothing: no run can be created there."""
        path = self._root
        while not os.path.lexists(path):
            path = os.path.dirname(path)
        _status(path, may_dangle=False)

    def walk(self, key: str) -> Iterator[tuple[str, int | None]]:
        for entry in self.entries(key):
            below = join(key, entry.name)
            if entry.is_dir:
                # Links to directories may form a loop.
                if not os.path.islink(self._path(below)):
                    yield from self.walk(below)
            else:
                yield below, entry.size

    def make_dir(self, key: str) -> None:
        # Before every save, since the program may have closed them.
        open_standard_descriptors()
        with foreign_errors(self.url(key), writing=True):
            # The name of a step's directory becomes durable by a rename, that of the root does not.
            make_dir_durably(self._path(key), syncs_name=not key)

    def try_lock(self, key: str) -> DirectoryLock | None:
        with foreign_errors(self.url(key)):
            return lock_directory(self._path(key))

    def sync_tree(self, key: str, below: Sequence[str]) -> None:
        parents = {key}
        for name in below:
            parts = name.split('/')
            parents |= {join(key, *parts[:depth]) for depth in range(1, len(parts) + 1)}
        with foreign_errors(self.url(key)):
            # Leaves first, since a directory is durable only with its entry in the parent.
            for directory in sorted(parents, key=lambda name: (-name.count('/'), name)):
                sync_dir(self._path(directory))

    def publish(self, source: str, target: str) -> None:
        with foreign_errors(self.url(target)):
            try:
                rename_durably(self._path(source), self._path(target))
            except FileNotFoundError as error:
                # The system does not say of which name.
                raise map_os_error(error, self.url(source)) from error

    def exchange(self, source: str, target: str) -> bool:
        with foreign_errors(self.url(target)):
            return exchange_durably(self._path(source), self._path(target))

    def link(self, source: str, target: str, of: Storage | None = None) -> bool:
        path = (of or self).local_path(source)
        try:
            if path is None or not stat.S_ISREG(os.lstat(path).st_mode):
                # A hard link to a symbolic link would depend on its target.
                return False
            # Another program may have written it, and not synchronized it.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
            os.makedirs(os.path.dirname(self._path(target)), exist_ok=True)
            os.link(path, self._path(target), follow_symlinks=False)
        except OSError:
            # The file is gone or on another device, or the file system has no more links: the caller writes it instead.
            return False
        return True

    def delete_files(self, keys: Sequence[str]) -> None:
        for key in keys:
            with foreign_errors(self.url(key)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(key))
                with contextlib.suppress(FileNotFoundError):
                    sync_dir(os.path.dirname(self._path(key)))

    def delete_tree(self, key: str) -> None:
        path = self._path(key)
        with foreign_errors(self.url(key)):
            if os.path.islink(path):
                os.unlink(path)
            else:
                _remove_tree(path)

    def array_kvstore(self, key: str) -> dict[str, Any]:
        return {'driver': 'file', 'path': self._path(key).rstrip('/') + '/'}

    def context(self) -> ts.Context:
        use_tensorstore()
        if self._context is None:
            import tensorstore as ts

            self._context = ts.Context({'file_io_concurrency': {'limit': _IO_CONCURRENCY}})
        return self._context


def open_at(bucket: str, path: str, options: FileOptions) -> FileStorage:
    """Opens a directory; ``bucket`` is empty."""
    del bucket
    return FileStorage(path, options)

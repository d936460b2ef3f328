"""``os``, ``fcntl``, ``shutil`` and ``ctypes`` over a :class:`~simulation.disk.Disk`, below ``/simulated``.

The module that writes to file systems, ``t5ckpt/storage/file.py``, runs unchanged on them. Every call that another process could
notice is a point of the schedule.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import io
import itertools
import os
import shutil
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

from simulation.disk import Directory, Disk, File
from simulation.scheduler import active, current_task, facade
from simulation.tasks import Process

ROOT = '/simulated'
_FIRST_DESCRIPTOR = 10**6
_mounted: list[Disk] = []


class _Open:
    """An open file."""

    def __init__(self, inode: File | Directory, process: Process):
        self.inode, self.offset, self.process = inode, 0, process


_open_files: dict[int, _Open] = {}
_descriptors = itertools.count(_FIRST_DESCRIPTOR)


def mount(disk: Disk) -> None:
    """Makes the paths below ``/simulated`` those of a disk."""
    _mounted[:] = [disk]
    _open_files.clear()


def is_descriptor(fd: int) -> bool:
    """Whether a descriptor is one of this module."""
    return fd >= _FIRST_DESCRIPTOR


def opened(fd: int) -> Any:
    """The file of ``open(fd, 'rb')``."""
    inode = _open_files[fd].inode

    class _Reader(io.BytesIO):
        def close(self) -> None:
            _open_files.pop(fd, None)
            super().close()

    return _Reader(inode.data if isinstance(inode, File) else b'')


def _is_ours(path: Any) -> bool:
    return isinstance(path, str) and path.startswith(ROOT)


@functools.lru_cache(100_000)
def _below(path: str) -> str:
    return os.path.normpath(path)[len(ROOT) :] or '/'


def _point(operation: str, *paths: str) -> bool:
    """A point; raises the error of a fault. Returns whether the reply of the operation is lost."""
    scheduler = active()
    if scheduler is None:
        return False
    fault = scheduler.point(lambda: f'{operation} {" ".join(_below(path).lstrip("/") or "/" for path in paths)}')
    if fault is None:
        return False
    if fault.action == 'lost':
        return True
    raise OSError(errno.EIO, 'injected: the disk failed', paths[0])


def _or_real(name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """A function for simulated paths and descriptors; the real one for all others."""
    real = getattr(os, name)

    def call(path: Any, *args: Any, **options: Any) -> Any:
        is_simulated = is_descriptor(path) if isinstance(path, int) else _is_ours(path)
        return (replacement if is_simulated else real)(path, *args, **options)

    return call


def _open(path: str, flags: int, mode: int = 0o777, **options: Any) -> int:
    del mode, options
    _point('opens' if not flags & os.O_CREAT else 'creates', path)
    disk, key = _mounted[0], _below(path)
    try:
        inode = disk.find(key)
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
        inode = disk.create(key)
    if flags & os.O_DIRECTORY and not inode.is_dir:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if flags & os.O_TRUNC and isinstance(inode, File):
        inode.data = b''
    # A file of an earlier schedule may be closed later, by its finalizer.
    fd = next(_descriptors)
    _open_files[fd] = _Open(inode, current_task().process)
    return fd


def _close(fd: int) -> None:
    file = _open_files.pop(fd, None)
    if file is not None and _mounted[0].locks.get(_lock_key(file)) is file:
        del _mounted[0].locks[_lock_key(file)]


def _lock_key(file: _Open) -> tuple[int, str]:
    return file.inode.number, file.process.machine if _mounted[0].has_local_locks else ''


def _write(fd: int, data: Any) -> int:
    file = _open_files[fd]
    assert isinstance(file.inode, File)
    _mounted[0].write(file.inode, bytes(data), file.offset)
    file.offset += len(data)
    return len(data)


def _pwrite(fd: int, data: Any, offset: int) -> int:
    file = _open_files[fd]
    assert isinstance(file.inode, File)
    _mounted[0].write(file.inode, bytes(data), offset)
    return len(bytes(data))


def _fsync(fd: int) -> None:
    inode = _open_files[fd].inode
    is_lost = _point('fsyncs', f'{ROOT}/#{inode.number}')
    _mounted[0].sync(inode)
    _raise_if(is_lost)


def _raise_if(is_lost: bool) -> None:
    if is_lost:
        raise OSError(errno.EIO, 'injected: the reply was lost')


def _stat(path: str | int, **options: Any) -> os.stat_result:
    del options
    if isinstance(path, int):
        return _mounted[0].status(_open_files[path].inode)
    _point('stats', path)
    return _mounted[0].status(_mounted[0].find(_below(path)))


def _changing(name: str, change: Callable[[Disk], Callable[..., None]], paths: int = 1) -> Callable[..., None]:
    def call(*args: Any, **options: Any) -> None:
        del options
        is_lost = _point(name, *args[:paths])
        change(_mounted[0])(*(_below(path) for path in args[:paths]))
        _raise_if(is_lost)

    return call


class _Item:
    """``os.DirEntry``."""

    def __init__(self, parent: str, name: str):
        self.name, self.path = name, os.path.join(parent, name)

    def stat(self, **options: Any) -> os.stat_result:
        del options
        return _mounted[0].status(_mounted[0].find(_below(self.path)))

    def is_dir(self, **options: Any) -> bool:
        del options
        return _is_dir(self.path)

    def is_symlink(self) -> bool:
        return False


@contextlib.contextmanager
def _scandir(path: str) -> Generator[Iterator[_Item]]:
    _point('lists', path)
    yield iter([_Item(path, name) for name in sorted(_directory(path).names)])


def _directory(path: str) -> Directory:
    inode = _mounted[0].find(_below(path))
    if not isinstance(inode, Directory):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    return inode


def _listdir(path: str) -> list[str]:
    _point('lists', path)
    return sorted(_directory(path).names)


def _found(path: str) -> File | Directory | None:
    try:
        return _mounted[0].find(_below(path))
    except OSError:
        return None


def _exists(path: str) -> bool:
    return _found(path) is not None


def _is_dir(path: str) -> bool:
    return isinstance(_found(path), Directory)


def _makedirs(path: str, mode: int = 0o777, exist_ok: bool = False) -> None:
    if not _exists(os.path.dirname(path)):
        _makedirs(os.path.dirname(path), mode, exist_ok=True)
    try:
        _mkdir(path)
    except FileExistsError:
        if not exist_ok:
            raise


def _rmtree(path: str) -> None:
    for name in _listdir(path):
        below = os.path.join(path, name)
        if _is_dir(below):
            _rmtree(below)
        else:
            _unlink(below)
    _rmdir(path)


def _flock(fd: int, operation: int) -> None:
    if not is_descriptor(fd):
        fcntl.flock(fd, operation)
        return
    file = _open_files[fd]
    _point('locks', f'{ROOT}/#{file.inode.number}')
    holder = _mounted[0].locks.get(_lock_key(file))
    if holder is not None and not holder.process.is_dead:
        raise BlockingIOError(errno.EWOULDBLOCK, 'locked')
    _mounted[0].locks[_lock_key(file)] = file


def _renameat2(_: int, one: bytes, __: int, other: bytes, flags: int) -> int:
    del flags
    source, target = os.fsdecode(one), os.fsdecode(other)
    try:
        is_lost = _point('exchanges', source, target)
        _mounted[0].exchange(_below(source), _below(target))
        _raise_if(is_lost)
    except OSError as error:
        ctypes.set_errno(error.errno or errno.EIO)
        return -1
    return 0


_mkdir = _changing('makes', lambda disk: disk.mkdir)
_unlink = _changing('unlinks', lambda disk: disk.unlink)
_rmdir = _changing('removes', lambda disk: disk.rmdir)
_rename = _changing('renames', lambda disk: disk.rename, 2)
_link = _changing('links', lambda disk: disk.link, 2)

_path = facade(
    'os.path',
    os.path,
    exists=lambda path: _exists(path) if _is_ours(path) else os.path.exists(path),
    lexists=lambda path: _exists(path) if _is_ours(path) else os.path.lexists(path),
    isdir=lambda path: _is_dir(path) if _is_ours(path) else os.path.isdir(path),
    islink=lambda path: False if _is_ours(path) else os.path.islink(path),
)
MEMBERS: dict[str, Any] = {
    name: _or_real(name, function)
    for name, function in {
        'close': _close,
        'fstat': _stat,
        'fsync': _fsync,
        'link': _link,
        'listdir': _listdir,
        'lstat': _stat,
        'makedirs': _makedirs,
        'mkdir': _mkdir,
        'open': _open,
        'pwrite': _pwrite,
        'rename': _rename,
        'replace': _rename,
        'rmdir': _rmdir,
        'scandir': _scandir,
        'stat': _stat,
        'unlink': _unlink,
        'write': _write,
    }.items()
} | {'path': _path}
FCNTL = facade('fcntl', fcntl, flock=_flock, fcntl=lambda fd, *args: 0 if is_descriptor(fd) else fcntl.fcntl(fd, *args))
SHUTIL = facade(
    'shutil',
    shutil,
    rmtree=lambda path, *args, **options: (_rmtree if _is_ours(path) else shutil.rmtree)(path, *args, **options),
)
CTYPES = facade('ctypes', ctypes, CDLL=lambda *args, **options: types.SimpleNamespace(renameat2=_renameat2))

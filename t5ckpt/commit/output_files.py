"""Writes the outputs of exports atomically: files and directories that appear complete, and replace others only on request.

Exports go to a local file system. An output is written to ``<name>.tmp-<pid>`` next to its target and renamed when it is durable.
A crash leaves the temporary output. The next export to the same name removes it if no process has that number and nothing was
written to it for ten minutes, since other machines may share the directory. A directory that is replaced is first renamed to
``<name>.old-<pid>``, where a crash between the two renames leaves it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Generator

from t5ckpt.catalog.listing import checkpoint_around
from t5ckpt.errors import OutputExistsError, UnsupportedFormatError
from t5ckpt.storage import foreign_errors, open_storage
from t5ckpt.storage.durable import sync_dir

_STALE_SECONDS = 600.0


def local_output(path: str | os.PathLike[str]) -> str:
    """The absolute path of an output.

    Raises:
      UnsupportedFormatError: it is not on a local file system, or is '-'.
      OutputExistsError: it is inside a step's directory, where it could replace a file of the checkpoint.
    """
    if os.fspath(path) == '-':
        raise UnsupportedFormatError(
            "'-': exports are not written to standard output, because their files are renamed when they are complete. Name a "
            'file, such as ./-.'
        )
    local = open_storage(path).local_path('')
    if local is None:
        raise UnsupportedFormatError(f'{path}: exports go to a local file system. Export to one, then copy the files.')
    local = local.rstrip('/') or '/'
    within = checkpoint_around(open_storage(os.path.dirname(local)))
    if within is not None:
        raise OutputExistsError(f'{local} is inside {within}, which is a checkpoint. Pass a path outside it.')
    return local


def check_output(path: str, force: bool, is_ours: Callable[[str], bool] | None = None) -> None:
    """Raises OutputExistsError if the output exists and may not be replaced; called before anything is read.

    Args:
      path: of the output.
      force: allows to replace a file, or a directory in which ``is_ours`` is true for every name. An empty directory is always
        replaced by a directory.
      is_ours: whether an export writes a file with that name; None if the output is a file.
    """
    if not os.path.lexists(path):
        return
    is_dir = os.path.isdir(path) and not os.path.islink(path)
    if is_dir != (is_ours is not None):
        kinds = ('directory', 'file') if is_dir else ('file', 'directory')
        raise OutputExistsError(f'{path} is a {kinds[0]}, but the output is a {kinds[1]}. Choose another name.')
    names = sorted(os.listdir(path)) if is_dir else []
    foreign = [name for name in names if is_ours is not None and not is_ours(name)]
    if force and foreign:
        raise OutputExistsError(
            f'{path} holds {", ".join(foreign[:5])}, which no export wrote, so it is not replaced. Move these files away.'
        )
    if not force and (names or not is_dir):
        raise OutputExistsError(
            f'{path} exists. Choose another name, or replace it (force=True, or overwrite=True of a conversion).'
        )


@contextlib.contextmanager
def output(path: str, force: bool, is_ours: Callable[[str], bool] | None = None) -> Generator[str]:
    """Yields the temporary path to write to; renames it to ``path`` at the end, and removes it after an error.

    The arguments are those of :func:`check_output`; with ``is_ours`` the temporary path is a directory.
    """
    check_output(path, force, is_ours)
    temporary = f'{path}.tmp-{os.getpid()}'
    with foreign_errors(path, writing=True):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _remove(temporary)
        _remove_dead(path)
        if is_ours is not None:
            os.mkdir(temporary)
    try:
        yield temporary
        with foreign_errors(path, writing=True):
            _publish(temporary, path, force, is_ours)
    except BaseException:
        with contextlib.suppress(OSError):
            _remove(temporary)
        raise


def _remove_dead(path: str) -> None:
    """Removes the temporary files of exports to ``path`` that were killed."""
    beginning = f'{os.path.basename(path)}.tmp-'
    for name in os.listdir(os.path.dirname(path)):
        pid = name.removeprefix(beginning)
        if not name.startswith(beginning) or not pid.isdecimal() or _is_running(int(pid)):
            continue
        leftover = os.path.join(os.path.dirname(path), name)
        with contextlib.suppress(OSError):
            if time.time() - _last_written(leftover) > _STALE_SECONDS:
                _remove(leftover)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _last_written(path: str) -> float:
    """The newest modification time of a file, or of a directory and the files in it."""
    inside = [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path)] if os.path.isdir(path) else []
    return max([os.lstat(path).st_mtime, *inside])


def _publish(temporary: str, path: str, force: bool, is_ours: Callable[[str], bool] | None) -> None:
    if os.path.isdir(temporary):
        sync_dir(temporary)
    # Another process may have written to the path since the first check.
    check_output(path, force, is_ours)
    old = f'{path}.old-{os.getpid()}'
    if os.path.isdir(path) and not os.path.islink(path):
        os.rename(path, old)
    try:
        os.replace(temporary, path)
    except OSError:
        if os.path.lexists(old):
            os.rename(old, path)
        raise
    sync_dir(os.path.dirname(path))
    _remove(old)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)

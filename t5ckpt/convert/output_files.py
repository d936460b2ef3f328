"""Files and directories that appear whole or not at all, and are not overwritten unless asked.

Exports go to a local file system. What is written lies under ``<name>.tmp-<pid>`` beside its target and is renamed when
it is durable; a crash leaves that name behind, which nobody takes for the result. The next export to the same name removes it
when no process has that number and nothing was written there for ten minutes, since other machines may share the directory.
A directory that is replaced is moved to ``<name>.old-<pid>`` first: a crash between the two renames leaves it there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Generator

from t5ckpt.catalog.layouts import step_around
from t5ckpt.commit.write_lease import TAKE_OVER_SECONDS
from t5ckpt.errors import OutputExistsError, UnsupportedFormatError
from t5ckpt.storage import foreign_errors, open_storage

__all__ = ['check_output', 'local_output', 'output']


def local_output(path: str | os.PathLike[str]) -> str:
    """The absolute path of an output.

    Raises:
      UnsupportedFormatError: it is not on a local file system, or is '-'.
      OutputExistsError: it lies in a step's directory, where it could replace a file of the checkpoint.
    """
    if os.fspath(path) == '-':
        raise UnsupportedFormatError(
            "'-': an export is not written to standard output, since it appears under its name when it is whole. Name a file; "
            './- is one, too.'
        )
    local = open_storage(path).local_path('')
    if local is None:
        raise UnsupportedFormatError(f'{path}: exports are written to a local file system. Write there, then copy.')
    local = local.rstrip('/') or '/'
    within = step_around(open_storage(os.path.realpath(os.path.dirname(local))))
    if within is not None:
        raise OutputExistsError(
            f'{local} lies in {within[0]}, which is step {within[1]} of a run. Name a path outside of the checkpoint.'
        )
    return local


def check_output(path: str, force: bool, is_ours: Callable[[str], bool] | None = None) -> None:
    """Says before anything is read that something is in the way.

    Args:
      path: of the output.
      force: a file may be replaced, and a directory in which ``is_ours`` is true of every name.
      is_ours: whether an export writes a file of that name; None where the output is a file.

    Raises:
      OutputExistsError: something else is there. An empty directory is nothing, where a directory is to be.
    """
    if not os.path.lexists(path):
        return
    is_dir = os.path.isdir(path) and not os.path.islink(path)
    if is_dir != (is_ours is not None):
        kinds = ('directory', 'file') if is_dir else ('file', 'directory')
        raise OutputExistsError(f'{path} is a {kinds[0]}, and a {kinds[1]} is to be written. Choose another name.')
    names = sorted(os.listdir(path)) if is_dir else []
    foreign = [name for name in names if is_ours is not None and not is_ours(name)]
    if force and foreign:
        raise OutputExistsError(
            f'{path} holds {", ".join(foreign[:5])}, which no export wrote, and is not replaced. Move it away yourself.'
        )
    if not force and (names or not is_dir):
        raise OutputExistsError(
            f'{path} is there already. Choose another name, or replace it: --force; in Python force=True, '
            'or overwrite=True of a conversion.'
        )


@contextlib.contextmanager
def output(path: str, force: bool, is_ours: Callable[[str], bool] | None = None) -> Generator[str]:
    """Gives the temporary path to write to; renames it to ``path`` at the end, and removes it after an error.

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
    """Removes what exports to ``path`` that were killed left."""
    beginning = f'{os.path.basename(path)}.tmp-'
    for name in os.listdir(os.path.dirname(path)):
        pid = name.removeprefix(beginning)
        if not name.startswith(beginning) or not pid.isdecimal() or _is_running(int(pid)):
            continue
        left = os.path.join(os.path.dirname(path), name)
        with contextlib.suppress(OSError):
            if time.time() - _last_written(left) > TAKE_OVER_SECONDS:
                _remove(left)


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
        _sync(temporary)
    # Again, since it took a while.
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
    _sync(os.path.dirname(path))
    _remove(old)


def _sync(directory: str) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)

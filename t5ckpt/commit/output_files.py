"""Writes the outputs of exports atomically: files and directories that appear complete, and replace others only on request.

Exports go to a local file system. An output is written into a directory ``<name>.tmp-...`` next to its target and renamed when it
is durable. A crash leaves this directory, which the user may remove. A directory is replaced by an exchange, or removed first
where the file system has none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator

from t5ckpt.catalog.listing import checkpoint_around
from t5ckpt.core.arguments import check_flags
from t5ckpt.errors import OutputExistsError, UnsupportedFormatError
from t5ckpt.storage import foreign_errors, open_storage
from t5ckpt.storage.durable import exchange_durably, sync_dir


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
    check_flags(force=force)
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
        raise OutputExistsError(f'{path} exists. Choose another name, or replace it (overwrite=True, or --force).')


@contextlib.contextmanager
def output(path: str, force: bool, is_ours: Callable[[str], bool] | None = None) -> Generator[str]:
    """Yields the temporary path to write to; renames it to ``path`` at the end, and removes it after an error.

    The arguments are those of :func:`check_output`, which the caller calls before it reads. With ``is_ours`` the temporary path
    is a directory.
    """
    parent, name = os.path.split(path)
    with foreign_errors(path, writing=True):
        os.makedirs(parent, exist_ok=True)
        scratch = tempfile.mkdtemp(prefix=f'{name}.tmp-', dir=parent)
    temporary = os.path.join(scratch, name)
    try:
        if is_ours is not None:
            os.mkdir(temporary)
        yield temporary
        with foreign_errors(path, writing=True):
            # Another process may have written to the path since the check of the caller.
            check_output(path, force, is_ours)
            _publish(temporary, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(temporary: str, path: str) -> None:
    if os.path.isdir(temporary):
        sync_dir(temporary)
        if os.path.isdir(path):
            if exchange_durably(temporary, path):
                return
            shutil.rmtree(path)
    os.replace(temporary, path)
    sync_dir(os.path.dirname(path))

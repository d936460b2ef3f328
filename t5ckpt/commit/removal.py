"""Removes directories of steps, but only files that T5X or t5ckpt wrote.

``format.names.foreign_keys`` recognizes files of other programs by their names. A directory without such files is removed as a
whole. One with such files is renamed to ``checkpoint_<step>.foreign-<unix seconds>``, which no listing shows and no garbage
collection removes, and the files are logged. If it was a checkpoint, its own files are removed. A store that cannot rename keeps
the other files in the step's directory.

The names are checked when a directory is removed, not when it is hidden, because the removal runs in the background. The check
costs one listing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
from collections.abc import Collection, Generator, Sequence

from t5ckpt.catalog.listing import read_facts, read_head
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.core.text import some_of
from t5ckpt.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    FormatError,
    StepKeptError,
    StorageError,
    UnsupportedFormatError,
)
from t5ckpt.format.facts import FORMAT, newer_format
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.manifest import VERSION, is_of_others, version_of
from t5ckpt.format.names import (
    MANIFEST,
    PINNED,
    aside_dir,
    foreign_keys,
    generation_of,
    is_facts_file,
    is_file_checksums,
    step_dir,
)
from t5ckpt.policies import HELD, WAITS
from t5ckpt.storage import Storage, foreign_errors

_log = logging.getLogger('t5ckpt')


def check_known(storage: Storage, directory: str, *, manifest: bytes | None = None) -> None:
    """Refuses to remove a checkpoint whose manifest or facts have a version that this program does not know.

    Args:
      storage: the run.
      directory: of the checkpoint.
      manifest: its bytes, if the caller has read them.

    Raises:
      UnsupportedFormatError: a newer program wrote it.
    """
    with contextlib.suppress(CheckpointNotFoundError):
        head = read_head(storage, directory) if manifest is None else manifest
        version = version_of(head)
        if version is None and manifest is None:
            # Flax sorts the keys, so T5X's version is last.
            version = version_of(storage.read(join(directory, MANIFEST)))
        if version is not None and version > VERSION:
            raise _newer(storage, directory, 'manifest', version, VERSION)
        newer = newer_format(read_facts(storage, directory, head))
        if newer is not None:
            raise _newer(storage, directory, 'facts', newer, FORMAT)


def _newer(storage: Storage, directory: str, what: str, version: int, newest: int) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f'{storage.url(directory)} has {what} of version {version}, this program knows versions up to {newest}, so it does not '
        'remove the step. Update t5ckpt.'
    )


def foreign_files(storage: Storage, directory: str) -> list[str]:
    """The files in a step's directory that neither T5X nor t5ckpt wrote, relative to it."""
    return _foreign(storage, directory, keys_below(storage, directory))


def keys_below(storage: Storage, directory: str) -> list[str]:
    """All files of a directory, relative to it."""
    return [key[len(directory) + 1 :] for key, _ in storage.walk(directory)]


def _foreign(storage: Storage, directory: str, keys: Sequence[str]) -> list[str]:
    foreign = foreign_keys(keys)
    if foreign:
        # A copy has all files of its source, and a converted checkpoint lists the files that were copied.
        recorded = _listed(storage, directory, keys)
        foreign = [key for key in foreign if key not in recorded]
    if (
        MANIFEST in keys
        and not any(map(is_file_checksums, keys))
        and _is_another_manifest(storage, join(directory, MANIFEST))
    ):
        foreign.append(MANIFEST)
    return foreign


def _listed(storage: Storage, directory: str, keys: Sequence[str]) -> set[str]:
    listed: set[str] = set()
    for name in keys:
        if is_file_checksums(name):
            with contextlib.suppress(FormatError, CheckpointNotFoundError):
                listed |= FileChecksums.decode(storage.read(join(directory, name)), name, generation_of(name)).keys()
    return listed


def _is_another_manifest(storage: Storage, key: str) -> bool:
    size = storage.known_size(key)
    try:
        # A larger file of this name is a manifest.
        return size is not None and size < 2**20 and is_of_others(storage.read(key))
    except CheckpointNotFoundError:
        # Its writer has removed it.
        return False


def remove_checkpoint(storage: Storage, name: str, step: int, unix: float) -> None:
    """Removes a directory that no listing shows, on a storage that commits by rename; files of other programs stay.

    Args:
      storage: the run.
      name: the directory.
      step: of the directory.
      unix: the time in the name under which files of other programs stay.
    """
    local = storage.local_path(name)
    if local is not None and os.path.islink(local):
        # Only the link is removed, not its target.
        storage.delete_tree(name)
        return
    keys = keys_below(storage, name)
    foreign = _foreign(storage, name, keys)
    if not foreign:
        storage.delete_tree(name)
        return
    aside = name
    with unless_renameless():
        aside = move_aside(storage, name, step, unix, foreign)
    if any(is_facts_file(key) or is_file_checksums(key) for key in keys) or (
        MANIFEST in keys and MANIFEST not in foreign
    ):
        kept = {key.partition('/')[0] for key in foreign}
        for entry in storage.entries(aside):
            if entry.name not in kept:
                (storage.delete_tree if entry.is_dir else storage.delete_file)(join(aside, entry.name))


def move_aside(storage: Storage, name: str, step: int, unix: float, foreign: Sequence[str]) -> str:
    """Renames a directory with files of other programs to a name that no program uses, and logs it; returns the name."""
    aside = rename_aside(storage, name, step, 'foreign', unix)
    _log.warning(
        't5ckpt: %s contains files that neither T5X nor t5ckpt wrote (%s). It was moved to %s and is not removed',
        storage.url(name),
        few(foreign) or 'a file in the place of a directory',
        storage.url(aside),
    )
    return aside


def few(names: Sequence[str]) -> str:
    """The first three of some names, as text with the number of the others."""
    return some_of(names, 3)


def check_removable(storage: Storage, directory: str) -> None:
    """Refuses to hide a directory whose files this user may not remove, as those of another user of a shared run.

    Every user who may write to the run may rename the directory, so it would be hidden and remain with half of its files.

    Raises:
      AccessDeniedError: it names the owner; or the file system is mounted read-only.
    """
    path = storage.local_path(directory)
    if path is None or os.path.islink(path) or _may_write(path):
        return
    with foreign_errors(storage.url(directory), writing=True):
        try:
            info = os.stat(path)
            if os.statvfs(path).f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        except FileNotFoundError:
            # Another process has removed it.
            return
    # os.access returns False for every error of the disk, too, so a permission counts only if the second call agrees.
    if _may_write(path):
        return
    if info.st_uid == os.geteuid():
        cure = f'Make it writable: chmod -R u+w {shlex.quote(path)}'
    else:
        cure = 'Delete it as its owner, or let the group write to it (chmod -R g+w; with umask 002 for later saves).'
    raise AccessDeniedError(
        errno.EACCES,
        f'{storage.url(directory)} belongs to user {info.st_uid} and has the permissions {info.st_mode & 0o7777:o}, so user '
        f'{os.geteuid()} may not remove its files. Nothing was changed. {cure}',
    )


def _may_write(path: str) -> bool:
    return os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def is_pinned(storage: Storage, directory: str) -> bool:
    """Whether a checkpoint is pinned, so that it is never deleted."""
    return storage.is_file(join(directory, PINNED))


def kept_by(storage: Storage, step: int, held: Collection[int]) -> str | None:
    """The reason not to remove a checkpoint: it is pinned, or it is among the ``held`` steps. None if it may be removed.

    Another process may pin or hold the step afterwards. So a process that removes or replaces it checks both again, after it has
    announced this.
    """
    return 'pinned' if is_pinned(storage, step_dir(step)) else HELD if step in held else None


def check_not_kept(storage: Storage, step: int, held: Collection[int], action: str) -> None:
    """Raises StepKeptError for a step that is kept, see :func:`kept_by`; ``action`` is a participle."""
    reason = kept_by(storage, step, held)
    if reason is not None:
        raise kept_error(storage, step, reason, action)


def kept_error(storage: Storage, step: int, reason: str, action: str) -> StepKeptError:
    """The error for a step that is kept for a reason of :func:`kept_by`; ``action`` is a participle."""
    cures = {
        HELD: 'Try again when the reader is done.',
        WAITS: 'The next start of its run with this local_dir uploads it; t5ckpt rm --force deletes it without.',
    }
    verb = '' if reason == WAITS else 'is '
    cure = cures.get(reason, 'Unpin it first.')
    return StepKeptError(f'{storage.url(step_dir(step))} {verb}{reason}, so it was not {action}. {cure}')


def rename_aside(storage: Storage, name: str, step: int, state: str, unix: float) -> str:
    """Renames a directory to the first free ``aside_dir`` of its step and a state, starting at a time; returns the new name.

    Garbage collection removes a ``'deleted'`` one, and restores a ``'replaced'`` one if the step is missing. Another process may
    take a name between the check and the rename.
    """
    unix = int(unix)
    while True:
        target = aside_dir(step, state, unix)
        if storage.kind(target) is None:
            try:
                storage.publish(name, target)
            except StorageError as error:
                # The process that took it may have left it again.
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            else:
                return target
        unix += 1


@contextlib.contextmanager
def unless_renameless() -> Generator[None]:
    """Continues after a rename of a directory in a lower layer of an overlay file system, which is refused."""
    try:
        yield
    except StorageError as error:
        if error.errno != errno.EXDEV:
            raise


def hide_directory(storage: Storage, step: int, clock: Clock, state: str = 'deleted') -> str | None:
    """Renames the directory of a step; in a lower layer of an overlay file system, which cannot rename it, removes it.

    The deletion of the manifest, which is the first, then hides the step, as in a bucket.

    Returns:
      The new name; None if the directory was removed.
    """
    with unless_renameless():
        return rename_aside(storage, step_dir(step), step, state, clock())
    storage.delete_file(join(step_dir(step), MANIFEST))
    remove_checkpoint(storage, step_dir(step), step, clock())
    return None


def remove_own_keys(storage: Storage, directory: str, keys: Sequence[str]) -> None:
    """Removes the files of T5X or t5ckpt below a directory of a store that cannot rename; others stay and are logged.

    Args:
      storage: the run.
      directory: of the files.
      keys: all files of the directory, from :func:`keys_below`.
    """
    if not keys:
        return
    foreign = _foreign(storage, directory, keys)
    storage.delete_files([join(directory, key) for key in sorted({*keys}.difference(foreign))])
    if not foreign:
        return
    _log.warning('t5ckpt: %s keeps files that neither T5X nor t5ckpt wrote: %s', storage.url(directory), few(foreign))

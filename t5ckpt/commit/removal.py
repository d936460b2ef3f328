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
import re
import shlex
from collections.abc import Collection, Generator, Sequence
from typing import Any

from t5ckpt.catalog.layouts import LEVANTER, ListedStep, orbax_marks
from t5ckpt.catalog.listing import read_facts, read_head, waiting_steps
from t5ckpt.catalog.pin_file import pin_reason
from t5ckpt.commit.taken_steps import BeingHiddenError, locked
from t5ckpt.commit.transfer import copy_files
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.core.text import some_of
from t5ckpt.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    StepKeptError,
    StorageError,
    UnsupportedFormatError,
)
from t5ckpt.format.checksum import digest
from t5ckpt.format.facts import decode_facts
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.manifest import VERSION, is_tensorflow_state, version_of
from t5ckpt.format.names import (
    DATASET_REMOVED,
    MANIFEST,
    PINNED,
    aside_dir,
    foreign_keys,
    generation_of,
    is_file_checksums,
    positions_for_t5x,
    step_dir,
)
from t5ckpt.policies import HELD, WAITS
from t5ckpt.storage import Storage, foreign_errors

# The directory of a save, in the location of an array or in the facts, and not in a text of the user's: what comes before the
# name is a key of MessagePack with the header of its string, or a key of our JSON; in earlier facts, the name of a list.
_GENERATION = re.compile(
    rb'(?:\xa4path(?:[\xa0-\xbf]|\xd9.|\xda..)|\n "positions_in": "|\n  "(?=[^"/]*/integrity\.))'
    rb'(t5ckpt-[0-9a-f]{16})[/"]',
    re.DOTALL,
)
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
    # Damaged facts do not keep a step.
    with contextlib.suppress(CheckpointNotFoundError, CorruptCheckpointError):
        head = read_head(storage, directory) if manifest is None else manifest
        version = version_of(head) or 0
        if version > VERSION:
            raise UnsupportedFormatError(
                f'{storage.url(directory)} has a manifest of version {version}, and this program knows versions up to {VERSION}, '
                'so it does not remove the step. Update t5ckpt.'
            )
        decode_facts(read_facts(storage, directory, head), storage.url(directory))


def keys_below(storage: Storage, directory: str) -> list[str]:
    """All files of a directory, relative to it."""
    return [key[len(directory) + 1 :] for key, _ in storage.walk(directory)]


def foreign_files(storage: Storage, directory: str, keys: Sequence[str]) -> list[str]:
    """Those of all files of a step's directory that neither T5X nor t5ckpt wrote; all names are relative to it."""
    foreign = foreign_keys(keys)
    lists = [key for key in keys if is_file_checksums(key)]
    recorded = set[str]()
    # A copy has all files of its source, and a converted checkpoint lists the files that were copied.
    for key in lists if foreign else ():
        with contextlib.suppress(FormatError, CheckpointNotFoundError):
            recorded |= FileChecksums.decode(storage.read(join(directory, key)), key, generation_of(key)).keys()
    if MANIFEST in keys and not lists and is_tensorflow_state(read_head(storage, directory)):
        foreign.append(MANIFEST)
    return [key for key in foreign if key not in recorded]


def remove_checkpoint(storage: Storage, name: str, step: int, unix: float) -> None:
    """Removes a directory that no listing shows, on a storage that commits by rename; files of other programs stay.

    Args:
      storage: the run.
      name: the directory.
      step: of the directory.
      unix: the time in the name under which files of other programs stay.
    """
    # Of a link, only the link is removed, not its target.
    keys = [] if os.path.islink(storage.local_path(name) or '') else keys_below(storage, name)
    foreign = foreign_files(storage, name, keys)
    if not foreign:
        storage.delete_tree(name)
        return
    aside = name
    with unless_renameless():
        aside = move_aside(storage, name, step, unix, foreign)
    if any(map(is_file_checksums, keys)) or (MANIFEST in keys and MANIFEST not in foreign):
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
        some_of(foreign, 3) or 'a file in the place of a directory',
        storage.url(aside),
    )
    return aside


def check_removable(storage: Storage, directory: str) -> None:
    """Refuses to hide a directory whose files this user may not remove, as those of another user of a shared run.

    Every user who may write to the run may rename the directory, so it would be hidden and remain with half of its files.

    Raises:
      AccessDeniedError: it names the owner; or the file system is mounted read-only.
    """
    path = storage.local_path(directory)
    if path is None or os.path.islink(path) or not os.path.isdir(path):
        return
    # os.access returns False for every error of the disk, too, so a permission counts only if the second call agrees.
    may_act_as_user = os.access in os.supports_effective_ids
    if any(os.access(path, os.W_OK | os.X_OK, effective_ids=may_act_as_user) for _ in range(2)):
        return
    with foreign_errors(storage.url(directory), writing=True):
        info = os.stat(path)
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    if info.st_uid == os.geteuid():
        cure = f'Make it writable: chmod -R u+w {shlex.quote(path)}'
    else:
        cure = 'Delete it as its owner, or let the group write to it (chmod -R g+w; with umask 002 for later saves).'
    raise AccessDeniedError(
        errno.EACCES,
        f'{storage.url(directory)} belongs to user {info.st_uid} and has the permissions {info.st_mode & 0o7777:o}, so user '
        f'{os.geteuid()} may not remove its files. Nothing was changed. {cure}',
    )


def is_pinned(storage: Storage, directory: str) -> bool:
    """Whether a checkpoint is pinned, so that it is never deleted."""
    return storage.is_file(join(directory, PINNED))


def kept_by(
    storage: Storage,
    listed: ListedStep,
    held: Collection[int],
    *,
    even_pinned: bool = False,
    even_waiting: bool = False,
) -> str | None:
    """The reason not to remove or replace a step; None if it may be removed.

    Another process may pin or hold the step afterwards. So a process that removes or replaces it checks this after it has
    announced that.

    Args:
      storage: the run.
      listed: the step.
      held: the steps that readers hold.
      even_pinned: whether a pin keeps no step.
      even_waiting: whether a step may wait for its upload.
    """
    if not even_pinned and is_pinned(storage, listed.name):
        return pin_reason(storage, listed.name)
    if listed.step in held:
        return HELD
    return WAITS if not even_waiting and listed.step in waiting_steps(storage) else None


def check_not_kept(storage: Storage, listed: ListedStep, held: Collection[int], action: str, **even: bool) -> None:
    """Raises StepKeptError for a step that is kept, see :func:`kept_by`; ``action`` is a participle."""
    reason = kept_by(storage, listed, held, **even)
    if reason is None:
        return
    cures = {
        HELD: 'Try again when the reader is done.',
        WAITS: 'The next start of its run with this local directory uploads it; t5ckpt rm --force deletes it without.',
    }
    verb = '' if reason == WAITS else 'is '
    cure = cures.get(reason, 'Unpin it first.')
    raise StepKeptError(f'{storage.url(listed.name)} {verb}{reason}, so it was not {action}. {cure}')


def rename_aside(storage: Storage, name: str, step: int, state: str, unix: float) -> str:
    """Renames a directory to the first free ``aside_dir`` of its step and a state, starting at a time; returns the new name.

    Another process may take a name between the check and the rename.
    """
    second = int(unix)
    while True:
        target = aside_dir(step, state, second)
        second += 1
        try:
            if storage.kind(target) is None:
                storage.publish(name, target)
                return target
        except StorageError as error:
            # The process that took it may have left it again.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise


@contextlib.contextmanager
def unless_renameless() -> Generator[None]:
    """Continues after a rename of a directory in a lower layer of an overlay file system, which is refused."""
    try:
        yield
    except StorageError as error:
        if error.errno != errno.EXDEV:
            raise


def hide_directory(storage: Storage, step: int, aside: str, clock: Clock) -> None:
    """Renames the directory of a step; in a lower layer of an overlay file system, which cannot rename it, removes it.

    The deletion of the manifest, which is the first, then hides the step, as in a bucket. ``aside`` exists afterwards.
    """
    with unless_renameless():
        storage.publish(step_dir(step), aside)
        return
    storage.make_dir(aside)
    storage.delete_file(join(step_dir(step), MANIFEST))
    remove_checkpoint(storage, step_dir(step), step, clock())


def end_work(storage: Storage, step: int, new: str, hidden: str, clock: Clock) -> None:
    """Removes what the owner of a marker has left, in the directories of ``format/names.work_dirs``."""
    final = step_dir(step)
    if storage.kind(hidden) and storage.is_file(join(new, MANIFEST)):
        # Its owner ended while it replaced the step, where two names cannot be exchanged.
        with locked(storage, final):
            kind = storage.kind(final)
            if kind != 'file' and not storage.is_file(join(final, MANIFEST)):
                if kind:
                    remove_checkpoint(storage, final, step, clock())
                storage.publish(new, final)
                text = 't5ckpt: published %s, which was about to replace the step when its writer ended'
                _log.warning(text, storage.url(final))
    for name in (hidden, new, hidden):
        if storage.kind(name) is not None:
            check_removable(storage, name)
            if name == new:
                with contextlib.suppress(StorageError):
                    # A writer of another machine, which was stopped, can no longer publish it.
                    storage.publish(new, hidden)
                    continue
            remove_checkpoint(storage, name, step, clock())
            # Before the marker goes, also on a disk that loses its power.
            storage.sync_tree('', ())


def remove_own_keys(storage: Storage, directory: str, keys: Sequence[str]) -> None:
    """Removes the files of T5X or t5ckpt below a directory of a store that cannot rename; others stay and are logged.

    Args:
      storage: the run.
      directory: of the files.
      keys: all files of the directory, from :func:`keys_below`.
    """
    foreign = foreign_files(storage, directory, keys)
    storage.delete_files([join(directory, key) for key in sorted({*keys}.difference(foreign))])
    if foreign:
        text = 't5ckpt: %s keeps files that neither T5X nor t5ckpt wrote: %s'
        _log.warning(text, storage.url(directory), some_of(foreign, 3))


def generations_in(manifest: bytes) -> set[str]:
    """The directories of saves that a manifest names: in the locations of its arrays, or in its facts."""
    return {match.decode() for match in _GENERATION.findall(manifest)}


def directories_of(manifest: bytes) -> set[str]:
    """The directories below the step with the files of a manifest: that of its save, and '' for files in none."""
    return {'', *generations_in(manifest)}


def remove_unnamed(storage: Storage, step: int, directories: Collection[str]) -> bool:
    """Removes the files in some directories below a step that its manifest does not name.

    Copies the positions of data iterators to T5X's names, which a crash may have left out.

    Args:
      storage: the run.
      step: its number.
      directories: those below the step; '' stands for the files in none.

    Returns:
      Whether the step has no manifest.
    """
    directory = step_dir(step)
    try:
        manifest, version = storage.read_with_version(join(directory, MANIFEST))
    except CheckpointNotFoundError:
        manifest, version = None, None
    keys = keys_below(storage, directory)
    is_of_other = manifest is None and not {*orbax_marks(''), LEVANTER}.isdisjoint(keys)
    if is_of_other:
        # Another program has saved the step since, and its files may have the names of T5X's.
        directories = {*directories} - {''}
    named = generations_in(manifest or b'')
    if named and named.isdisjoint(map(generation_of, keys)):
        # It arrived after its files were removed, or was replaced meanwhile.
        delete_manifest(storage, directory, version)
        manifest = None
    # A manifest is only deleted in the version that was read, and a pin only where it can be announced.
    doomed = [key for key in keys if generation_of(key) in {*directories} - named and key not in (MANIFEST, PINNED)]
    if manifest is None:
        remove_own_keys(storage, directory, doomed)
        if is_of_other:
            return False
        # A save that has committed since the first request may have written positions under the same names.
        return not storage.is_file(join(directory, MANIFEST)) or remove_unnamed(storage, step, ())
    current = [key for key in keys if generation_of(key) in named]
    kept = {DATASET_REMOVED, f't5ckpt.{digest(manifest)}.json', *positions_for_t5x(current)}
    # The names of the files of T5X's own steps are in none of our directories.
    remove_own_keys(storage, directory, [key for key in doomed if named and key not in kept])
    copy_positions(storage, directory, current)
    return False


def delete_manifest(storage: Storage, directory: str, version: Any) -> None:
    """Deletes the manifest of a step.

    Raises:
      BeingHiddenError: it has another version than this one.
    """
    if not storage.delete_unchanged(join(directory, MANIFEST), version):
        raise BeingHiddenError(
            errno.EBUSY, f'{storage.url(directory)} was replaced by another process in the meantime.'
        )


def copy_positions(storage: Storage, directory: str, keys: Collection[str]) -> None:
    """Copies the positions of data iterators among some files of a step to T5X's names."""
    sizes = dict.fromkeys(positions_for_t5x(keys).values(), 0)
    for _ in copy_files(lambda key: storage.read(join(directory, key)), sizes, storage, directory, 16):
        pass

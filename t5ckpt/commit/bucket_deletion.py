"""Deletion and garbage collection on object stores, which cannot rename; ``commit/markers.py`` has the order of the requests."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
from collections.abc import Collection

from t5ckpt.catalog.layouts import ORBAX, has_placeholder, other_layout
from t5ckpt.catalog.run_catalog import BucketListing
from t5ckpt.commit.announcement import announced
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.markers import HIDE, Marker, read_marker
from t5ckpt.commit.occupancy import generations_in
from t5ckpt.commit.removal import check_known, is_pinned, keys_below, remove_own_keys
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.core.thread_pool import Pool
from t5ckpt.errors import AccessDeniedError, CheckpointNotFoundError, StorageError, T5CkptError
from t5ckpt.format.checksum import digest
from t5ckpt.format.names import (
    DATASET_REMOVED,
    MANIFEST,
    PINNED,
    facts_file_of,
    generation_of,
    positions_for_t5x,
    step_dir,
)
from t5ckpt.storage import Storage

_WORKERS = 16
_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class Hidden:
    """A step that no listing shows and whose files still exist.

    Attributes:
      directory: of the files; '' if nothing is left to remove.
      step: its number.
      directories: on object stores, those below ``directory`` that belong to what was hidden.
    """

    directory: str
    step: int
    directories: frozenset[str] = frozenset()


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
    named = generations_in(manifest) if manifest is not None else set[str]()
    if manifest is not None and named and named.isdisjoint(map(generation_of, keys)):
        # It arrived after its files were removed, or was replaced meanwhile.
        if not storage.delete_unchanged(join(directory, MANIFEST), version):
            raise StorageError(
                errno.EBUSY, f'{storage.url(directory)} was replaced by another process in the meantime.'
            )
        manifest = None
    # A manifest is only deleted in the version that was read, and a pin only where it can be announced.
    doomed = [key for key in keys if generation_of(key) in {*directories} - named and key not in (MANIFEST, PINNED)]
    if manifest is None:
        remove_own_keys(storage, directory, doomed)
        # A save that has committed since the first request may have written positions under the same names.
        return not storage.is_file(join(directory, MANIFEST)) or remove_unnamed(storage, step, ())
    current = [key for key in keys if generation_of(key) in named]
    kept = {DATASET_REMOVED, facts_file_of(digest(manifest)), *positions_for_t5x(current)}
    # The names of the files of T5X's own steps are in none of our directories.
    remove_own_keys(storage, directory, [key for key in doomed if named and key not in kept])
    copy_positions(storage, directory, current)
    return False


def copy_positions(storage: Storage, directory: str, keys: Collection[str]) -> None:
    """Copies the positions of data iterators among some files of a step to T5X's names."""
    names = positions_for_t5x(keys)

    def copy(item: tuple[str, str]) -> None:
        storage.write(join(directory, item[0]), storage.read(join(directory, item[1])))

    with Pool(_WORKERS) as pool:
        for future in [pool.submit(copy, item) for item in names.items()]:
            future.result()


def hide_in_bucket(
    storage: Storage, step: int, clock: Clock, *, even_pinned: bool = False, even_waiting: bool = False
) -> Hidden | None:
    """Like ``by_rename.hide_by_rename``, but deletes the manifest."""
    # Only steps of a local directory wait.
    del even_waiting
    directory = step_dir(step)
    key = join(directory, MANIFEST)
    manifest, version = storage.read_with_version(key)
    if has_placeholder(manifest):
        raise other_layout(storage.url(directory), ORBAX, 'which t5ckpt does not delete', 'Delete it with Orbax.')
    check_known(storage, directory, manifest=manifest)
    directories = directories_of(manifest)
    marker = Marker(storage, step, clock, HIDE, directories)
    with contextlib.ExitStack() as undecided:
        undecided.callback(marker.remove)
        if step in held_steps(storage, clock) or (not even_pinned and is_pinned(storage, directory)):
            return None
        marker.check()
        undecided.pop_all()
    try:
        is_deleted = storage.delete_unchanged(key, version)
    except AccessDeniedError:
        # Readers would wait for this deletion.
        marker.end()
        raise
    if not is_deleted:
        marker.remove()
        raise StorageError(errno.EBUSY, f'{storage.url(directory)} was replaced by another process in the meantime.')
    if even_pinned:
        storage.delete_file(join(directory, PINNED))
    marker.end()
    return Hidden(directory, step, frozenset(directories))


def _remove_pin(storage: Storage, step: int, clock: Clock) -> None:
    """Removes the pin of a step without a manifest, which was written after the deletion."""
    directory = step_dir(step)
    if is_pinned(storage, directory):
        # A program that pins a later save of the step sees this, and looks for its pin again.
        with announced(storage, step, clock):
            if not storage.is_file(join(directory, MANIFEST)):
                storage.delete_file(join(directory, PINNED))


def collect_in_bucket(storage: Storage, listed: BucketListing, clock: Clock) -> list[str]:
    """Removes what work has left whose marker is due; returns the directories of the steps without a manifest."""
    removed: list[str] = []
    # By step and key; a failed save of many processes leaves one marker of each.
    due: dict[int, dict[str, frozenset[str]]] = {}
    for marker in listed.announcements.markers:
        if marker.due < clock():
            try:
                record = read_marker(storage, marker.key)
            except StorageError as error:
                _log.warning('t5ckpt: could not collect %s: %s', storage.url(step_dir(marker.step)), error)
                continue
            if record is not None:
                due.setdefault(marker.step, {})[marker.key] = record.directories
    for step, directories in sorted(due.items()):
        where = step_dir(step)
        try:
            if remove_unnamed(storage, step, frozenset[str]().union(*directories.values())):
                _remove_pin(storage, step, clock)
                removed.append(where)
            storage.delete_files([*directories])
        except T5CkptError as error:
            _log.warning('t5ckpt: could not collect %s: %s', storage.url(where), error)
            if isinstance(error, AccessDeniedError):
                break
    return removed

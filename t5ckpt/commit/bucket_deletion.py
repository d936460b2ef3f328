"""Deletion and garbage collection on object stores, which cannot rename; ``commit/markers.py`` has the order of the requests."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
from collections.abc import Callable, Collection

from t5ckpt.catalog.layouts import ORBAX, ListedStep, has_placeholder, other_layout
from t5ckpt.commit.announcement import announced
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.markers import HIDE, Marker
from t5ckpt.commit.occupancy import generations_in
from t5ckpt.commit.removal import check_known, check_not_kept, is_pinned, keys_below, remove_own_keys
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.core.thread_pool import Pool
from t5ckpt.errors import AccessDeniedError, CheckpointNotFoundError, StorageError
from t5ckpt.format.checksum import digest
from t5ckpt.format.names import (
    DATASET_REMOVED,
    MANIFEST,
    PINNED,
    generation_of,
    positions_for_t5x,
    step_dir,
)
from t5ckpt.storage import Storage

_WORKERS = 16
_log = logging.getLogger('t5ckpt')


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
    kept = {DATASET_REMOVED, f't5ckpt.{digest(manifest)}.json', *positions_for_t5x(current)}
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


def hide_in_bucket(storage: Storage, step: int, clock: Clock, *, even_pinned: bool) -> Callable[[], object]:
    """As ``deletion.hide``; it deletes the manifest."""
    listed = ListedStep(step, step_dir(step))
    key = join(listed.name, MANIFEST)
    manifest, version = storage.read_with_version(key)
    if has_placeholder(manifest):
        raise other_layout(storage.url(listed.name), ORBAX, 'which t5ckpt does not delete', 'Delete it with Orbax.')
    check_known(storage, listed.name, manifest=manifest)
    directories = directories_of(manifest)
    marker = Marker(storage, step, clock, HIDE, directories)
    with contextlib.ExitStack() as undecided:
        undecided.callback(marker.remove)
        check_not_kept(storage, listed, held_steps(storage, clock), 'deleted', even_pinned=even_pinned)
        marker.check()
        undecided.pop_all()
    try:
        is_deleted = storage.delete_unchanged(key, version)
    except AccessDeniedError:
        # Readers would wait for this deletion.
        marker.remove()
        raise
    if not is_deleted:
        marker.remove()
        raise StorageError(errno.EBUSY, f'{storage.url(listed.name)} was replaced by another process in the meantime.')
    if even_pinned:
        storage.delete_file(join(listed.name, PINNED))
    marker.end()
    return functools.partial(remove_unnamed, storage, step, directories)


def remove_pin(storage: Storage, step: int, clock: Clock) -> None:
    """Removes the pin of a step without a manifest, which was written after the deletion."""
    directory = step_dir(step)
    if is_pinned(storage, directory):
        # A program that pins a later save of the step sees this, and looks for its pin again.
        with announced(storage, step, clock):
            if not storage.is_file(join(directory, MANIFEST)):
                storage.delete_file(join(directory, PINNED))

"""Removes the files in a step's directory that its manifest does not name, on storage that cannot rename.

They are those of a checkpoint that was overwritten, or of a writer that was killed or came second, see ``commit/by_manifest.py``.

A step with positions of data iterators is not overwritten: T5X reads them from files with fixed names, so no single write
replaces both the weights and the position (docs/decisions.md). Nor is a step without facts, as one of T5X: its files are unknown.
"""

from __future__ import annotations

import errno

from t5ckpt.catalog.locate import Located
from t5ckpt.commit.removal import keys_below
from t5ckpt.commit.write_lease import WriteLease
from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError
from t5ckpt.format.names import MANIFEST, TRAIN_DS_PREFIX, generation_of, is_bucket_facts_file, step_dir, superseded
from t5ckpt.reading.contents import listed_files
from t5ckpt.reading.raw_files import read_raw
from t5ckpt.storage import Storage


def check_replaceable(storage: Storage, step: int, *, has_positions: bool) -> None:
    """Checks that a complete step can be overwritten in place.

    Args:
      storage: the run, which does not rename.
      step: the step.
      has_positions: whether the new checkpoint has positions of data iterators.

    Raises:
      CheckpointExistsError: it cannot; the message has the reason.
      CheckpointNotFoundError: another process has deleted it.
    """
    directory = step_dir(step)
    if has_positions or storage.names(directory, TRAIN_DS_PREFIX):
        reason = 'with positions of data iterators'
    else:
        if read_raw(_located(storage, step)).facts is not None:
            return
        if not storage.is_file(join(directory, MANIFEST)):
            raise CheckpointNotFoundError(f'{storage.url(directory)}: another process has deleted it')
        reason = 'without facts of t5ckpt'
    raise CheckpointExistsError(
        f'{storage.url(directory)}: on a storage that cannot rename, a step {reason} is not replaced, because no single write '
        f'would replace all of it. Call delete({step}) before the save.'
    )


def _located(storage: Storage, step: int) -> Located:
    return Located(storage, step_dir(step), MANIFEST, step)


def is_of_one_save(key: str) -> bool:
    """Whether a file in a step's directory has a name that no other save of the step gives a file."""
    return generation_of(key) != '' or is_bucket_facts_file(key)


def remove_superseded(storage: Storage, step: int, lease: WriteLease) -> None:
    """Removes the files that do not belong to the current manifest.

    Lists the files before it checks the lease, so those of a process that takes the step over later are not among them. Without
    facts, the files of the step are unknown, and all stay.

    Raises:
      CorruptCheckpointError: the facts, or the file checksums, are damaged.
      StorageError: a file could not be read or removed, or another process has taken the step over.
    """
    located = _located(storage, step)
    raw = read_raw(located, checksums=True)
    if raw.facts is None:
        return
    doomed = superseded(keys_below(storage, located.directory), {*listed_files(located, raw), *raw.versions})
    if not lease.is_ours():
        raise StorageError(errno.EBUSY, f'{located.url} was taken over by another process in the meantime')
    storage.delete_files([join(located.directory, key) for key in sorted(doomed)])

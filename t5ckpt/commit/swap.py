"""Overwrites a complete step on storage that cannot rename: new files under new names, then one write of the manifest.

The arrays and the file checksums of the new checkpoint are in ``checkpoint_<step>/t5ckpt-<nonce>/``, and its manifest has these
locations, so T5X reads them as well. Its sidecar is ``t5ckpt.<checksum of the manifest>.json`` until the swap is complete: a
reader takes the sidecar that has the manifest's checksum, see ``reading/contents.py``. The order of the writes:

    [lease with ``replaces``], new files, new sidecar, [no pin? no read lease? is the lease still ours?],
    manifest if it is still the old one, [no pin? no read lease?], t5ckpt.json, -old files, -lease

The step is the old checkpoint before the write of the manifest, and the new one after it. A crash leaves files of the other
one, which garbage collection removes when the step has no read lease. If a pin or a read lease was written just before the
manifest, the old manifest is written back.

A step with positions of data iterators is not overwritten: T5X reads them from files with fixed names, so no single write
replaces both the weights and the position (docs/decisions.md). Nor is a step whose sidecar lacks the checksum of its manifest:
a reader could not distinguish the new sidecar from that of the old checkpoint.
"""

from __future__ import annotations

import errno
import logging
import secrets
from typing import Any

from t5ckpt.catalog.locate import Located
from t5ckpt.commit.removal import is_pinned, kept_by, kept_error, keys_below
from t5ckpt.commit.write_lease import AlreadyCommittedError, BeingWrittenError, WriteLease
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import (
    AccessDeniedError,
    CheckpointExistsError,
    CorruptCheckpointError,
    StepKeptError,
    StorageError,
    T5CkptError,
)
from t5ckpt.format.checksum import digest
from t5ckpt.format.names import (
    MANIFEST,
    SIDECAR,
    TRAIN_DS_PREFIX,
    generation_dir,
    sidecar_of,
    step_dir,
    superseded,
)
from t5ckpt.reading.contents import listed_files
from t5ckpt.reading.raw_files import is_sidecar_of, read_raw
from t5ckpt.storage import Storage

__all__ = ['Swap', 'check_swappable', 'finish_swap']

_log = logging.getLogger('t5ckpt')


def check_swappable(storage: Storage, step: int, *, has_positions: bool) -> None:
    """Checks that a complete step can be overwritten in place.

    Args:
      storage: the run, which does not rename.
      step: the step.
      has_positions: whether the new checkpoint has positions of data iterators.

    Raises:
      CheckpointExistsError: it cannot; the message has the reason.
    """
    directory = step_dir(step)
    if has_positions or storage.names(directory, f'{TRAIN_DS_PREFIX}-'):
        reason = 'with positions of data iterators'
    else:
        raw = read_raw(_located(storage, step))
        if raw.manifest is not None and is_sidecar_of(raw.manifest, raw.sidecar):
            return
        reason = f'without a {SIDECAR} that has the checksum of its manifest'
    raise CheckpointExistsError(
        f'{storage.url(directory)}: on a storage that cannot rename, a step {reason} is not replaced, because no single write '
        f'would replace all of it. Call delete({step}) before the save.'
    )


def _located(storage: Storage, step: int) -> Located:
    return Located(storage, step_dir(step), MANIFEST, step)


class Swap:
    """One overwrite; its caller has the write lease of the step.

    Attributes:
      generation: the directory of its arrays and file checksums, in that of the step.
      is_unknown: whether the new manifest may be there, or may still arrive, although the commit failed.
    """

    def __init__(self, storage: Storage, step: int, lease: WriteLease):
        """Reads the manifest to replace, and records the overwrite in the lease."""
        self._storage = storage
        self._step = step
        self._lease = lease
        self._key = join(step_dir(step), MANIFEST)
        self._old, self._version = storage.read_with_version(self._key)
        self._sidecar = ''
        self.is_unknown = False
        self.generation = generation_dir(secrets.token_hex(8))
        lease.note_replacement()

    def commit(self, manifest: bytes, sidecar: bytes, clock: Clock) -> None:
        """Replaces the manifest.

        Raises:
          StepKeptError: it is pinned or has a read lease; nothing has changed.
          StepTakenError: another process has replaced or deleted the step, or is doing so.
          StorageError: nothing has changed, unless ``is_unknown``.
        """
        storage = self._storage
        self._sidecar = join(step_dir(self._step), sidecar_of(digest(manifest)))
        storage.write(self._sidecar, sidecar)
        self._check_not_kept(clock)
        if not self._lease.is_ours():
            raise BeingWrittenError(
                f'{storage.url(step_dir(self._step))} was taken over by another writer, since the write lease of this one '
                'expired'
            )
        version = self._put(manifest, self._version)
        if version is None:
            raise AlreadyCommittedError(f'{storage.url(self._key)} was replaced or deleted by another program')
        try:
            self._check_not_kept(clock)
            finish_swap(storage, self._step)
            self._lease.replaces = False
        except StepKeptError as error:
            self._put_back(version, error)
            raise
        except T5CkptError as error:
            where = storage.url(step_dir(self._step))
            _log.warning('t5ckpt: %s: the replaced files are left to the next save: %s', where, error)

    def _check_not_kept(self, clock: Clock) -> None:
        storage, step = self._storage, self._step
        reason = kept_by(storage, step, clock, pinned=is_pinned(storage, step_dir(step)))
        if reason is not None:
            raise kept_error(storage, step, reason, 'replaced')

    def _put(self, manifest: bytes, version: Any) -> Any:
        try:
            return self._storage.replace(self._key, manifest, version)
        except AccessDeniedError:
            raise
        except StorageError:
            # The new manifest may still arrive, and needs its files then.
            self.is_unknown = True
            raise

    def _put_back(self, version: Any, error: T5CkptError) -> None:
        """Writes the old manifest again, since a pin or a read lease was written before it was replaced."""
        try:
            if self._storage.replace(self._key, self._old, version) is not None:
                return
            reason = 'another program has replaced it'
        except StorageError as second:
            reason = str(second)
        self.is_unknown = True
        raise StorageError(errno.EIO, f'{error} The old manifest could not be written back: {reason}') from error

    def abandon(self) -> None:
        """Removes the new files; the manifest is still the old one."""
        storage = self._storage
        storage.delete_tree(join(step_dir(self._step), self.generation))
        if self._sidecar:
            storage.delete_file(self._sidecar)
        self._lease.replaces = any(owner.replaces for owner in self._lease.predecessors)


def finish_swap(storage: Storage, step: int) -> None:
    """Removes the files that do not belong to the current manifest; the caller has the write lease.

    Raises:
      CorruptCheckpointError: no sidecar has the checksum of the manifest, so its files are unknown.
      StorageError: a file could not be read or removed.
    """
    located = _located(storage, step)
    directory = located.directory
    raw = read_raw(located, checksums=True)
    if raw.manifest is None or raw.sidecar is None or not is_sidecar_of(raw.manifest, raw.sidecar):
        raise CorruptCheckpointError(f'{located.url} has no {SIDECAR} with the checksum of its manifest.')
    if SIDECAR not in raw.versions:
        storage.write(join(directory, SIDECAR), raw.sidecar)
    keys = keys_below(storage, directory)
    doomed = superseded(keys, listed_files(located, raw))
    storage.delete_files([join(directory, key) for key in sorted(doomed)])

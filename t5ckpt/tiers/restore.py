"""Restores the newest step of either tier, in a job of one process.

A local step is read like any other checkpoint. If one of its files is damaged, the file is fetched from the run's storage if that
has the same save. Otherwise the run's copy of the step is read; without one, the error is raised, as without tiers. A read that
fails because of the disk is first repeated. Other errors of reads, such as too many open files, are raised.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from t5ckpt.catalog.listing import has_step
from t5ckpt.commit.deletion import try_to_rename_damaged
from t5ckpt.core.text import without_cure_of_damage
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    T5CkptError,
)
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.names import step_dir
from t5ckpt.restore.execute import run_restore
from t5ckpt.restore.request import LocalPart, RestoreRequest
from t5ckpt.storage import means_damage
from t5ckpt.tiers.catalog import TierCatalog
from t5ckpt.tiers.complete import complete_from
from t5ckpt.tiers.local_reads import LocalReads
from t5ckpt.tiers.part import part_alone

_log = logging.getLogger('t5ckpt')
_DAMAGES = (CorruptCheckpointError, CheckpointNotFoundError, StorageError)


class BytesRead:
    """The bytes of arrays that the latest restore of a request has read in this process."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, nbytes: int) -> None:
        """Takes the bytes of a restore."""
        self.nbytes = nbytes


def restore_from_tiers(catalog: TierCatalog, request: RestoreRequest) -> Any:
    """Restores a step of either tier, and logs which, and how many bytes were read from each tier.

    Raises:
      CheckpointNotFoundError: no tier has the step.
      CorruptCheckpointError: it is damaged, and no other tier has it.
    """
    choice = catalog.choose(request.step)
    step, counted = choice.step, BytesRead()
    fetched, is_local = 0, choice.is_local

    def sources() -> str:
        # The files that were fetched are read from the local directory, too.
        local_bytes, run_bytes = (max(0, counted.nbytes - fetched), fetched) if is_local else (0, counted.nbytes)
        return f'; {local_bytes} bytes of arrays from {catalog.local.url()}, {run_bytes} from {catalog.run.url()}'

    from_run = dataclasses.replace(request, step=step, note_read=counted, sources=sources)
    catalog.begin_restore(step)
    if step is None or not is_local:
        with catalog.noting_damage(step, catalog.run):
            restored = run_restore(from_run)
    else:
        try:
            restored = LocalReads().repeated(lambda: run_restore(_of_disk(catalog, from_run, step)))
        except _DAMAGES as error:
            if not means_damage(error):
                raise
            with catalog.noting_damage(step, catalog.local):
                found = _mended(catalog, step, error)
                fetched, is_local = found or 0, found is not None
                with catalog.noting_damage(step, *([] if is_local else [catalog.run])):
                    restored = run_restore(_of_disk(catalog, from_run, step) if is_local else from_run)
            if not is_local and not catalog.read_only:
                try_to_rename_damaged(catalog.local, step, catalog.clock)
    if request.step is None and step is not None:
        for each, reason in sorted(catalog.unusable().items()):
            if each > step or (each == step and not choice.is_local):
                _log.warning('t5ckpt: local step %d was not restored: %s', each, reason)
        catalog.warn_of_parts(step)
    return restored


def _of_disk(catalog: TierCatalog, request: RestoreRequest, step: int) -> RestoreRequest:
    """The request of a restore from the local directory; also of a part with all chunks, without the lists of other processes."""
    local = dataclasses.replace(request, storage=catalog.local)
    part = part_alone(catalog.local, step)
    if part is None or not part.has_all_chunks():
        return local
    there = FileChecksums({name: part.checksums[name] for name in part.there})
    return dataclasses.replace(local, local_part=LocalPart(part.located, part.manifest, part.facts, lambda *_: there))


def _mended(catalog: TierCatalog, step: int, error: T5CkptError) -> int | None:
    """Finds the step elsewhere after its local files failed.

    Returns:
      The bytes of arrays that were fetched from the run's storage; None if the step is to be read from there.

    Raises:
      T5CkptError: ``error``, if the run does not have the step; a CorruptCheckpointError if a local file cannot be read.
    """
    where = catalog.local.url(step_dir(step))
    text = without_cure_of_damage(str(error))
    _log.warning('t5ckpt: %s is damaged, looking for its files in %s: %s', where, catalog.run.url(), text)
    try:
        nbytes = None if catalog.read_only else complete_from(catalog.run, catalog.local, step)
        is_there = nbytes is not None or has_step(catalog.run, step)
    except StorageError as second:
        _log.warning('t5ckpt: the files of %s could not be fetched from %s: %s', where, catalog.run.url(), second)
        raise error from second
    if not is_there and isinstance(error, StorageError):
        raise CorruptCheckpointError(
            f'{where} cannot be read, and {catalog.run.url()} does not have it: {error}'
        ) from error
    if not is_there:
        raise error
    if nbytes is None:
        _log.warning('t5ckpt: step %d is read from %s', step, catalog.run.url())
    return nbytes

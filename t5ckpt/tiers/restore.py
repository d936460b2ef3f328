"""Restores the newest step of either tier, and fetches it ahead.

A local step is read like any other checkpoint. If one of its files is damaged, the file is fetched from the run's storage if that
has the same save. Otherwise the run's copy of the step is read; without one, the error is raised, as without tiers.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from t5ckpt.catalog.listing import has_step
from t5ckpt.catalog.locate import locate_step
from t5ckpt.commit.deletion import rename_damaged
from t5ckpt.commit.transfer import Transfer, TransferOptions
from t5ckpt.core.thread_pool import start_thread
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    T5CkptError,
)
from t5ckpt.format.names import step_dir
from t5ckpt.reading.identity import Identity
from t5ckpt.restore.execute import run_restore
from t5ckpt.restore.request import RestoreRequest
from t5ckpt.tiers.catalog import TierCatalog
from t5ckpt.tiers.complete import complete_from

_log = logging.getLogger('t5ckpt')
# A StorageError is of one of the local files, such as one in a bad sector.
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
    choice = catalog.choose(request.call.step)
    step, counted = choice.step, BytesRead()
    call = dataclasses.replace(request.call, step=step)
    from_run = dataclasses.replace(request, call=call, note_read=counted)
    fetched, is_local = 0, choice.is_local
    if step is None or not is_local:
        restored = run_restore(from_run)
    else:
        local = dataclasses.replace(from_run, storage=catalog.local)
        try:
            restored = run_restore(local)
        except _DAMAGES as error:
            found = _mended(catalog, step, error)
            fetched, is_local = found or 0, found is not None
            restored = run_restore(local if is_local else from_run)
            if not is_local:
                _put_damaged_aside(catalog, step)
    local_bytes, run_bytes = (counted.nbytes, fetched) if is_local else (0, counted.nbytes)
    urls = catalog.local.url(), catalog.run.url()
    _log.info(
        't5ckpt: restored step %s: %d bytes of arrays from %s, %d from %s',
        step,
        local_bytes,
        urls[0],
        run_bytes,
        urls[1],
    )
    if request.call.step is None and step is not None:
        for each, reason in sorted(catalog.unusable().items()):
            if each > step or (each == step and not choice.is_local):
                _log.warning('t5ckpt: local step %d was not restored: %s', each, reason)
        _put_parts_aside(catalog, step)
    return restored


def _mended(catalog: TierCatalog, step: int, error: T5CkptError) -> int | None:
    """Finds the step elsewhere after its local files failed.

    Returns:
      The bytes that were fetched from the run's storage; None if the step is to be read from there.

    Raises:
      T5CkptError: ``error``, if the run does not have the step; a CorruptCheckpointError if a local file cannot be read.
    """
    where = catalog.local.url(step_dir(step))
    _log.warning('t5ckpt: %s is damaged, looking for its files in %s: %s', where, catalog.run.url(), error)
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


def _put_damaged_aside(catalog: TierCatalog, step: int) -> None:
    """Renames a damaged local step that is complete in the run's storage."""
    if catalog.read_only:
        return
    where = catalog.local.url(step_dir(step))
    try:
        aside = rename_damaged(catalog.local, step, catalog.clock)
    except T5CkptError as error:
        _log.warning('t5ckpt: %s is damaged, and could not be renamed: %s', where, error)
    else:
        _log.error('t5ckpt: %s is damaged and was renamed to %s', where, catalog.local.url(aside))


def _put_parts_aside(catalog: TierCatalog, step: int) -> None:
    """Renames parts that are newer than the restored step, so that the training can save their steps again."""
    if catalog.read_only:
        return
    for each in catalog.partial_steps():
        if each > step:
            aside = rename_damaged(catalog.local, each, catalog.clock)
            _log.warning(
                't5ckpt: local step %d was not restored: %s has the part of one of several processes; it was renamed to %s',
                each, catalog.local.url(), aside,
            )  # fmt: skip


class Prefetch:
    """Fetches the step to restore in a thread: from the run's storage to the local disk, or from the disk to memory."""

    def __init__(self, catalog: TierCatalog, begin_fetch: Callable[[], None], *, is_shared: bool):
        """Begins at once; ``begin_fetch`` makes the local directory ready. ``is_shared``: other processes read the step, too."""
        self._is_shared = is_shared
        self._catalog = catalog
        self._begin_fetch = begin_fetch
        self._is_stopped = False
        self._thread: threading.Thread | None = start_thread(self._run, 't5ckpt-prefetch', daemon=True)

    def wait(self) -> None:
        """Waits for its end."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Ends it, after the files that are on their way."""
        self._is_stopped = True
        self.wait()

    def _pace(self, nbytes: int) -> None:
        del nbytes
        if self._is_stopped:
            raise CancelledError

    def _run(self) -> None:
        try:
            self._fetch()
        except CancelledError:
            # The checkpointer is closed. The next fetch goes on with the files.
            return
        except Exception as error:  # noqa: BLE001 - the restore reads the step itself, and raises its errors
            _log.warning('t5ckpt: the prefetch ended, and restore reads what is left: %s', error)

    def _fetch(self) -> None:
        catalog = self._catalog
        choice = catalog.choose(None)
        if choice.step is None:
            return
        if not choice.is_local:
            if self._is_shared:
                # The processes choose the step together, in the restore.
                return
            located = locate_step(catalog.run, choice.step)
            if catalog.read_only or not located.manifest:
                return
            self._begin_fetch()
            source = Identity.now(located)
            with source.checked_on_failure('fetched'):
                options = TransferOptions(pace=self._pace)
                done = Transfer(source, catalog.local, choice.step, options).run(catalog.clock)
            _log.info('t5ckpt: fetched step %d to %s: %d bytes', choice.step, catalog.local.url(), done.nbytes)
            return
        directory = step_dir(choice.step)
        for key, _ in catalog.local.walk(directory):
            _read_ahead(catalog.local.local_path(key))


def _read_ahead(path: str | None) -> None:
    """Asks the kernel to read a file into memory."""
    if path is None or not hasattr(os, 'posix_fadvise'):
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(fd)

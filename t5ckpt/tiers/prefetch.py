"""Fetches the step to restore ahead, in a thread: from the run's storage to the local disk, or from the disk to memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import CancelledError

from t5ckpt.catalog.locate import locate_step
from t5ckpt.commit.transfer import Transfer, TransferOptions
from t5ckpt.core.thread_pool import start_thread
from t5ckpt.format.names import step_dir
from t5ckpt.reading.identity import Identity
from t5ckpt.storage import Storage
from t5ckpt.tiers.catalog import TierCatalog

_log = logging.getLogger('t5ckpt')
Check = Callable[[], None]
"""Raises CancelledError if the prefetch is to end."""


class Prefetch:
    """A thread that fetches."""

    def __init__(self, fetch: Callable[[Check], None]):
        """Begins at once; ``fetch`` calls its argument often."""
        self._fetch = fetch
        self._is_stopped = False
        self._ended = start_thread(self._run, 't5ckpt-prefetch', daemon=True)

    def wait(self) -> None:
        """Waits for its end."""
        if self._ended is not None:
            self._ended.wait()

    def stop(self) -> None:
        """Ends it, after the files that are on their way."""
        self._is_stopped = True
        self.wait()

    def _check(self) -> None:
        if self._is_stopped:
            raise CancelledError

    def _run(self) -> None:
        try:
            self._fetch(self._check)
        except CancelledError:
            # The checkpointer is closed. The next fetch goes on with the files.
            return
        except Exception as error:  # noqa: BLE001 - the restore reads the step itself, and raises its errors
            _log.warning('t5ckpt: the prefetch ended, and restore reads the remaining files: %s', error)


def fetch_alone(catalog: TierCatalog, begin_fetch: Callable[[], None], check: Check) -> None:
    """Fetches the newest step in a job of one process; ``begin_fetch`` makes the local directory ready."""
    choice = catalog.choose(None)
    if choice.step is None:
        return
    if choice.is_local:
        read_ahead(catalog.local, choice.step, check)
        return
    located = locate_step(catalog.run, choice.step)
    if catalog.read_only or not located.manifest:
        return
    begin_fetch()
    source = Identity.now(located)
    with source.checked_on_failure('fetched'):
        options = TransferOptions(pace=lambda _: check())
        done = Transfer(source, catalog.local, choice.step, options).run(catalog.clock)
    urls = catalog.run.url(), catalog.local.url()
    _log.info('t5ckpt: fetched step %d from %s to %s: %d bytes', choice.step, *urls, done.nbytes)


def read_ahead(local: Storage, step: int, check: Check) -> None:
    """Asks the kernel to read the files of a step in a local directory into memory."""
    if not hasattr(os, 'posix_fadvise'):
        return
    for key, _ in local.walk(step_dir(step)):
        check()
        path = local.local_path(key)
        if path is None:
            continue
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)

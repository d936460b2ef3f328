"""The two tiers of one checkpointer: saves go to the local directory, restores read either."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from t5ckpt.commit.retention import Retention
from t5ckpt.core.protocols import Clock
from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.errors import UnsupportedTopologyError
from t5ckpt.policies import KeepLatest
from t5ckpt.restore.request import RestoreRequest
from t5ckpt.save.arguments import TierOptions
from t5ckpt.save.request import SaveRequest
from t5ckpt.storage import Storage
from t5ckpt.tiers.catalog import TierCatalog
from t5ckpt.tiers.local_dir import LocalDir, open_local
from t5ckpt.tiers.restore import Prefetch, restore_from_tiers
from t5ckpt.tiers.uploads import Uploads


class Tiers:
    """The local directory and the run's storage of a job of one process; :class:`OneTier` has the same methods.

    Attributes:
      local: the storage that saves write to.
      retention: of the local directory.
      catalog: the steps of both tiers.
      facts: of the steps of both tiers.
    """

    def __init__(
        self,
        options: TierOptions,
        run: Storage,
        of_run: Retention,
        clock: Clock,
        coordinator: Coordinator,
        *,
        read_only: bool,
    ):
        """Reads and creates nothing.

        Args:
          options: of the constructor.
          run: the run's storage.
          of_run: its retention.
          clock: unix seconds.
          coordinator: of the job.
          read_only: whether nothing may be written.
        """
        self.local = open_local(options.local_dir, run)
        self._read_only = read_only
        self._coordinator = coordinator
        self._dir = LocalDir(self.local, run, options.keep, read_only=read_only)
        self.retention = Retention(self.local, KeepLatest(options.keep), clock)
        self.catalog = self.facts = TierCatalog(self._dir, self._open, self.retention, of_run, clock)
        self._uploads = Uploads(options, self._dir, self.catalog)
        self._prefetch: Prefetch | None = None

    def _open(self, *, create: bool = False) -> bool:
        """Opens the local directory; the first time, the uploads that were cut off are begun again.

        Raises:
          UnsupportedTopologyError: the job has several processes.
          LocalDirError: the directory is in use, or of another run.
        """
        count = self._coordinator.processes_of_job().count
        if count > 1:
            raise UnsupportedTopologyError(
                f'local_dir is for jobs of one process so far, and this one has {count}. Leave local_dir out; save_async to '
                f'{self.catalog.run.url()} continues the training at once, too.'
            )
        if not self._dir.open(create=create):
            return False
        if not self._read_only:
            self._uploads.resume()
        return True

    def begin_save(self) -> None:
        """Creates, locks and checks the local directory, in the caller's thread.

        Raises:
          LocalDirError: it is in use, or of another run.
        """
        self._uploads.check_not_refused()
        self._open(create=True)

    def persisting(self, request: SaveRequest, *, preempted: bool) -> SaveRequest:
        """The request of a local save, whose commit is followed by the upload if the persist policy takes the step."""
        around = functools.partial(self._uploads.around_commit, request.step, request.call, preempted)
        return dataclasses.replace(request, around_commit=around)

    def wait_until_persisted(self, step: int | None) -> None:
        """Waits for the upload of a step; None waits for all that wait.

        Raises:
          NotPersistedError: it failed, or the step is not uploaded.
          LocalDirError: the local directory is of another run.
        """
        self._open()
        self._uploads.wait(step)

    def restore(self, request: RestoreRequest, run: Callable[[RestoreRequest], Any]) -> Any:
        """Restores a step of either tier; ``run`` carries out a request."""
        if request.call.path is not None:
            return run(request)
        if self._prefetch is not None:
            self._prefetch.wait()
        return restore_from_tiers(self.catalog, request, run)

    def prefetch(self) -> None:
        """Begins to fetch the newest step in the background."""
        if self._prefetch is None:
            self._prefetch = Prefetch(self.catalog, self._begin_fetch)

    def _begin_fetch(self) -> None:
        """As :meth:`begin_save`, also with a record, for a step that comes from the run's storage."""
        self.begin_save()
        self._dir.ensure_record()

    def delete(self, step: int) -> None:
        """Deletes a step from both tiers, and ends its upload; see :meth:`TierCatalog.delete`."""
        self._open()
        with self._uploads.without(step):
            self.catalog.delete(step)

    def close(self) -> None:
        """Waits for the uploads, unless the run's storage fails; the next start uploads what is left. Releases the lock."""
        try:
            self._uploads.close()
        finally:
            self.retention.wait()
            self._dir.end()

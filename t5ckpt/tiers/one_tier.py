"""The one tier of a checkpointer without a local directory: the run's storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from t5ckpt.catalog.listing import dataset_steps_in, listing, newest, steps_in
from t5ckpt.commit.deletion import delete_step
from t5ckpt.commit.retention import Retention
from t5ckpt.core.call_site import Notices
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import NoEffectWarning
from t5ckpt.restore.request import RestoreRequest
from t5ckpt.save.request import SaveRequest
from t5ckpt.storage import Storage


class RunCatalog:
    """The complete steps of the run's storage."""

    def __init__(self, storage: Storage):
        self._storage = storage

    def steps(self) -> list[int]:
        """The steps, ascending."""
        return steps_in(self._storage)

    def latest(self) -> int | None:
        """The largest step, or None."""
        found = newest(self._storage)
        return None if found is None else found.step

    def dataset_steps(self) -> list[int]:
        """The steps with states of data iterators, ascending."""
        return dataset_steps_in(self._storage)

    def to_restore(self) -> list[int]:
        """The steps that ``restore_or_init`` tries, ascending."""
        return listing(self._storage).to_restore

    def parts(self) -> list[int]:
        """The steps of which this process has a part: none."""
        return []

    def storage_with(self, step: int) -> Storage:  # noqa: ARG002
        """The storage that has a step."""
        return self._storage


class OneTier:
    """The run's storage; :class:`t5ckpt.tiers.tiers.Tiers` has the same methods.

    Attributes:
      local: the storage that saves write to, which is the run's.
      retention: of the run.
      catalog: the steps of the run.
      facts: of these steps.
    """

    def __init__(self, run: Storage, retention: Retention, clock: Clock, notices: Notices):
        """Reads nothing."""
        self.local = run
        self.catalog = RunCatalog(run)
        self.facts = self.retention = retention
        self._clock = clock
        self._notices = notices

    def begin_save(self) -> None:
        """Does nothing: the save makes its directory."""

    def persisting(self, request: SaveRequest, *, preempted: bool) -> SaveRequest:  # noqa: ARG002
        """The request, which writes to the run's storage."""
        return request

    def wait_until_persisted(self, step: int | None) -> None:
        """Does nothing: a save that ended is in the run's storage."""

    def restore(self, request: RestoreRequest, run: Callable[[RestoreRequest], Any], *, has_iterator: bool) -> Any:  # noqa: ARG002
        """Restores a step of the run; ``run`` carries out a request."""
        return run(request)

    def prefetch(self) -> None:
        """Warns that there is nothing to fetch ahead."""
        text = 'prefetch has no effect without local_dir. Pass local_dir= to the constructor, or leave it out.'
        self._notices.warn('prefetch', NoEffectWarning(text))

    def delete(self, step: int) -> None:
        """Deletes a step, see :func:`delete_step`."""
        delete_step(self.local, step, self._clock)

    def delete_part(self, step: int) -> None:
        """Does nothing: process 0 has deleted the step."""

    def close(self) -> None:
        """Does nothing."""

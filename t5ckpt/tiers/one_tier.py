"""The interface of tiers for a checkpointer, and the only tier of one without a local directory: the run's storage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any

from t5ckpt.catalog.listing import dataset_steps_in, newest, steps_in
from t5ckpt.commit.deletion import delete_step
from t5ckpt.commit.retention import Retention, RunFacts
from t5ckpt.core.call_site import Notices
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import NoEffectWarning, T5CkptError
from t5ckpt.restore.execute import run_restore
from t5ckpt.restore.request import RestoreRequest
from t5ckpt.save.request import SaveRequest
from t5ckpt.storage import Storage


class StepCatalog(ABC):
    """The complete steps of all tiers."""

    @abstractmethod
    def steps(self) -> list[int]:
        """The steps, ascending."""

    @abstractmethod
    def latest(self) -> int | None:
        """The largest step, or None."""

    def latest_or_error(self) -> int | str | None:
        """As :meth:`latest`, or the class of the error, for a ``repr``."""
        try:
            return self.latest()
        except T5CkptError as error:
            return f'<{type(error).__name__}>'

    @abstractmethod
    def dataset_steps(self) -> list[int]:
        """The steps with states of data iterators, ascending."""

    @abstractmethod
    def to_restore(self, on_disks: Collection[int] = ()) -> list[int]:
        """The steps that ``restore_or_init`` tries, ascending; ``on_disks`` are those in the local directories of the job."""

    @abstractmethod
    def local_part_steps(self) -> list[int]:
        """The steps of which this process may have a part, in a job of several, ascending."""

    @abstractmethod
    def damaged_copies(self, step: int, *, shared: bool) -> list[Storage]:
        """The storages in which a step is damaged, after ``restore(step)`` has failed.

        With ``shared``, those of all processes; else, in a job of several, those of this process alone.
        """


class _OneTierCatalog(StepCatalog):
    """The complete steps of the run's storage."""

    def __init__(self, storage: Storage):
        self._storage = storage

    def steps(self) -> list[int]:
        return steps_in(self._storage)

    def latest(self) -> int | None:
        found = newest(self._storage)
        return None if found is None else found.step

    def dataset_steps(self) -> list[int]:
        return dataset_steps_in(self._storage)

    def to_restore(self, on_disks: Collection[int] = ()) -> list[int]:  # noqa: ARG002
        return self.steps()

    def local_part_steps(self) -> list[int]:
        return []

    def damaged_copies(self, step: int, *, shared: bool) -> list[Storage]:  # noqa: ARG002
        return [self._storage] if shared else []


class StepTiers(ABC):
    """The storages of the steps of one checkpointer.

    Attributes:
      local: the storage that saves write to.
      retention: of that storage.
      catalog: the steps of all tiers.
      facts: of these steps.
    """

    local: Storage
    retention: Retention
    catalog: StepCatalog
    facts: RunFacts

    @abstractmethod
    def begin_save(self) -> None:
        """Makes the storage that saves write to ready, in the caller's thread.

        Raises:
          LocalDirError: the local directory is in use, or of another run.
        """

    @abstractmethod
    def with_upload(self, request: SaveRequest, *, preempted: bool) -> SaveRequest:
        """The request of a save, whose commit is followed by the upload if the persist policy takes the step."""

    @abstractmethod
    def note_save(self, has_ended: Callable[[], bool]) -> None:
        """Takes a save that begins; the uploads pause between two files until it has ended."""

    @abstractmethod
    def wait_until_persisted(self, step: int | None) -> None:
        """Waits for the upload of a step; None waits for all that wait.

        Raises:
          NotPersistedError: it failed, or the step is not uploaded.
          LocalDirError: the local directory is of another run.
        """

    @abstractmethod
    def restore(self, request: RestoreRequest) -> Any:
        """Restores a step from the tier that has it; see ``run_restore``."""

    @abstractmethod
    def delete(self, step: int) -> None:
        """Deletes a step from all tiers, and ends its upload; see :func:`delete_step`."""

    @abstractmethod
    def begin_deletion(self) -> None:
        """Locks and checks the local directory in a job of several processes; all of them call it.

        Raises:
          LocalDirError: the local directory is in use, or of another run.
          ClosedError: the checkpointer is closed.
        """

    @abstractmethod
    def deletion_vote(self, step: int) -> tuple[str, bool]:
        """The error that a deletion of the local part of a step would raise, or ''; and whether there is a local part."""

    @abstractmethod
    def delete_part(self, step: int) -> None:
        """Deletes the local part of a step, which process 0 has deleted."""

    @abstractmethod
    def close(self) -> None:
        """Waits for the uploads, unless the run's storage fails; the next start uploads the rest. Releases the lock."""


class OneTier(StepTiers):
    """The run's storage alone."""

    def __init__(self, run: Storage, retention: Retention, clock: Clock, notices: Notices):
        """Reads nothing."""
        self.local = run
        self.catalog = _OneTierCatalog(run)
        self.facts = self.retention = retention
        self._clock = clock
        self._notices = notices

    def begin_save(self) -> None:
        pass

    def with_upload(self, request: SaveRequest, *, preempted: bool) -> SaveRequest:  # noqa: ARG002
        return request

    def note_save(self, has_ended: Callable[[], bool]) -> None:
        pass

    def wait_until_persisted(self, step: int | None) -> None:  # noqa: ARG002
        text = (
            'wait_until_persisted has no effect without local_dir, except that it waits for a running save. Pass local_dir= to '
            'the constructor, or call wait_until_finished.'
        )
        self._notices.warn('wait_until_persisted', NoEffectWarning(text))

    def restore(self, request: RestoreRequest) -> Any:
        return run_restore(request)

    def delete(self, step: int) -> None:
        delete_step(self.local, step, self._clock)

    def begin_deletion(self) -> None:
        pass

    def deletion_vote(self, step: int) -> tuple[str, bool]:  # noqa: ARG002
        return '', False

    def delete_part(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass

"""The steps of a local directory that wait for their upload, and the decision which steps do.

``.t5ckpt/to_persist/<step>`` is written before the local commit of a step that the persist policy takes, and removed after the
commit in the run's storage. No program deletes a step that has it, see ``commit/deletion.py``. A crash between the two leaves a
file whose step is uploaded by the next start; without the step, the next start removes the file.

``.t5ckpt/taken.json`` has the step and the time of the latest decision, so that intervals of time continue after a restart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import threading
from collections.abc import Generator, Mapping

from t5ckpt.catalog.listing import steps_in, waiting_steps
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError, StorageError
from t5ckpt.format.names import INDEX, PARTIAL_SUFFIX, TO_PERSIST, to_persist_file
from t5ckpt.save.schedule import Best, with_best
from t5ckpt.save_policies import Moment, SavePolicy
from t5ckpt.storage import Storage
from t5ckpt.tiers.part import save_of

_TAKEN = f'{INDEX}/taken.json'
_log = logging.getLogger('t5ckpt')


class Intents:
    """The steps that wait for their upload."""

    def __init__(self, local: Storage):
        """Takes the local directory."""
        self._local = local
        self._guard = threading.RLock()
        self._committing: int | None = None
        # Steps that no longer wait, whose records could not be removed.
        self._ended = set[int]()
        # Whether a write that failed may have left a file.
        self._has_partial = False

    def steps(self) -> list[int]:
        """The steps, ascending."""
        with self._guard:
            return sorted(waiting_steps(self._local) - self._ended)

    def overwrites(self, step: int) -> bool:
        """Whether the upload of a step may replace a complete checkpoint of the run."""
        try:
            return self._local.read(to_persist_file(step)) == b'overwrite'
        except CheckpointNotFoundError:
            return False

    def records(self) -> list[tuple[int, bool]]:
        """The steps, ascending, each with :meth:`overwrites`."""
        return [(step, self.overwrites(step)) for step in self.steps()]

    def add(self, step: int, *, overwrite: bool) -> bool:
        """Records durably that a step is to be uploaded; returns whether it was not recorded."""
        with self._guard:
            is_new = step in self._ended or not self._local.is_file(to_persist_file(step))
            self._ended.discard(step)
        self._local.make_dir(TO_PERSIST)
        if self._has_partial:
            self.collect()
            self._has_partial = False
        try:
            self._local.write(to_persist_file(step), b'overwrite' if overwrite else b'')
            self._local.sync_tree(INDEX, [])
        except BaseException:
            # The file may be there, and its save fails.
            self._has_partial = True
            if is_new:
                self.drop(step)
            raise
        return is_new

    def collect(self) -> None:
        """Removes the files of writes that were cut off by a crash or a failed disk."""
        for directory in (INDEX, TO_PERSIST):
            for entry in self._local.entries(directory):
                if entry.name.endswith(PARTIAL_SUFFIX):
                    self._local.delete_file(f'{directory}/{entry.name}')

    @contextlib.contextmanager
    def committing(self, step: int) -> Generator[None]:
        """Surrounds the commit of a step: until its end, the end of an upload of the step removes no record."""
        with self._guard:
            self._committing = step
        try:
            yield
        finally:
            with self._guard:
                self._committing = None

    def is_of(self, step: int, save: str) -> bool:
        """Whether the local directory has no other save of a step, and is getting none."""
        with self._guard:
            return step != self._committing and save_of(self._local, step) in ('', save)

    def drop(self, step: int, save: str | None = None) -> bool:
        """Removes the record of a step. If the deletion fails, the next start repeats it; no caller waits for it.

        Args:
          step: the step.
          save: that was uploaded. The record stays if the directory has another save of the step, or is getting one.

        Returns:
          Whether the step no longer waits.
        """
        with self._guard:
            if save is not None and not self.is_of(step, save):
                return False
            try:
                self._local.delete_file(to_persist_file(step))
            except StorageError as error:
                self._ended.add(step)
                _log.warning('t5ckpt: %s could not be removed: %s', self._local.url(to_persist_file(step)), error)
            return True


@dataclasses.dataclass(frozen=True)
class _Taken:
    """The latest decision.

    Attributes:
      step: that is uploaded; None before the first one.
      unix: when it was decided.
      best: the lowest and the highest value of each metric so far.
    """

    step: int | None = None
    unix: float | None = None
    best: Best = dataclasses.field(default_factory=dict[str, tuple[float, float]])


def _taken_of(data: bytes) -> _Taken:
    """Decodes ``taken.json``. Raises ValueError for other contents."""
    try:
        match json.loads(data):
            case {'step': int(step), 'unix': int() | float() as unix, 'best': dict(best)} if math.isfinite(unix):
                values = {str(name): (float(low), float(high)) for name, (low, high) in best.items()}
                return _Taken(step, float(unix), values)
            case other:
                raise ValueError(f'{other!r:.100} is not a step, a time and metrics')
    except (TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(str(error)) from error


class PersistSchedule:
    """Decides which saved steps wait for their upload; ``tiers/queue.py`` drops those that a newer one overtakes.

    Called in the thread of the save, so by one thread at a time.
    """

    def __init__(self, policy: SavePolicy | None, local: Storage, clock: Clock):
        """``policy`` None takes every step."""
        self._policy = policy
        self._local = local
        self._clock = clock
        self._began = clock()
        self._previous: int | None = None
        self._taken: _Taken | None = None
        self._owed = ''
        self.upload_seconds: float | None = None
        """The duration of the latest upload, in seconds."""

    def reason(self, step: int, metrics: Mapping[str, float], *, preempted: bool, is_uploading: bool) -> str | None:
        """The reason to upload a step that is being saved, or None.

        Args:
          step: the step.
          metrics: of the save.
          preempted: whether the job is preempted.
          is_uploading: whether an upload is running.
        """
        if self._policy is None:
            return 'every save'
        if self._owed:
            return self._owed
        if self._previous is None:
            # The previous save may be one of an earlier process. A job of several may have left newer ones to a job of one.
            self._previous = max((earlier for earlier in steps_in(self._local) if earlier < step), default=None)
        previous, self._previous = self._previous, step
        now, taken = self._clock(), self._last()
        # If the clock was set back, uploads continue without waiting until it has caught up.
        self._began = min(self._began, now)
        self._taken = taken = dataclasses.replace(taken, unix=None if taken.unix is None else min(taken.unix, now))
        return self._policy.reason(
            Moment(
                step=step,
                previous_step=previous,
                last_saved_step=taken.step,
                seconds_since_save=now - (self._began if taken.unix is None else taken.unix),
                preempted=preempted,
                metrics=metrics,
                best=taken.best,
                blocked_seconds=self.upload_seconds,
                write_seconds=self.upload_seconds,
                saving=is_uploading,
            )
        )

    def owe(self, step: int) -> None:
        """Requests the upload of the next save, in place of a step that could not be uploaded."""
        self._owed = f'step {step} was not uploaded'

    def note_taken(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records that a step is uploaded."""
        if self._policy is None:
            return
        self._owed = ''
        self._taken = _Taken(step, self._clock(), with_best(self._last().best, metrics))
        try:
            self._local.write(_TAKEN, json.dumps(dataclasses.asdict(self._taken)).encode())
        except StorageError as error:
            # The step is committed, and only the intervals of a later process depend on this file.
            _log.warning('t5ckpt: %s could not be written: %s', self._local.url(_TAKEN), error)

    def _last(self) -> _Taken:
        if self._taken is None:
            self._taken = self._recorded()
        return self._taken

    def _recorded(self) -> _Taken:
        try:
            return _taken_of(self._local.read(_TAKEN))
        except CheckpointNotFoundError:
            pass
        except ValueError as error:
            # Only intervals depend on it.
            _log.warning('t5ckpt: %s is ignored, since it is damaged: %s', self._local.url(_TAKEN), error)
        return _Taken()

"""Inspects all checkpoints of a run: the steps with their metrics, and values of a leaf over the steps."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from t5ckpt.catalog.listing import listing
from t5ckpt.catalog.locate import no_checkpoint, open_run_storage, refuse_other_contents
from t5ckpt.catalog.step_summaries import StepSummary, summaries
from t5ckpt.commit.retention import Retention, recorded_policy
from t5ckpt.core.arguments import integer
from t5ckpt.core.protocols import Progress
from t5ckpt.core.text import counted, human_bytes
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.inspection.block_iteration import bytes_in
from t5ckpt.inspection.diff import diff
from t5ckpt.inspection.kept import named_by_policy, with_reasons
from t5ckpt.inspection.report.facts import checkpoint_facts, heat_facts, largest, plain, step_facts
from t5ckpt.inspection.report.page import SAMPLE_BYTES, checked_output, write_report
from t5ckpt.inspection.tables import pandas, table_html, table_text
from t5ckpt.inspection.view import CheckpointView, open_checkpoint
from t5ckpt.lazy import LazyArray
from t5ckpt.metrics import TensorBoardMetrics
from t5ckpt.metrics.curves import curves
from t5ckpt.policies import KeepAll
from t5ckpt.save.best_step import best_in
from t5ckpt.storage import PathOrStorage, Storage


def open_run(path: PathOrStorage, *, storage_options: Mapping[str, Any] | None = None) -> Run:
    """Opens a run's directory; each access lists its steps again.

    Args:
      path: the directory, or a Storage with it as its root.
      storage_options: see docs/storage.md.

    Raises:
      CheckpointNotFoundError: there is no such directory, or it is a step's directory.
      UnsupportedFormatError: it is a file of another format; the message names the format.
    """
    storage = open_run_storage(path, storage_options)
    if storage.kind('') != 'dir':
        raise no_checkpoint(storage)
    refuse_other_contents(storage, marks=False)
    return Run(storage)


class _StepNotFoundError(CheckpointNotFoundError, KeyError):
    """The error of a missing step: also a KeyError, as for any mapping."""


class Run(Mapping[int, CheckpointView]):
    """A mapping from step to CheckpointView; its repr is a table of the steps with their metrics.

    Notes: each access lists the steps again, so that new steps of a running training appear.
    """

    def __init__(self, storage: Storage):
        self._storage = storage

    @property
    def path(self) -> str:
        """The run's directory."""
        return self._storage.url()

    def summaries(self) -> list[StepSummary]:
        """The summary of each step, ascending; an unreadable step has the reason."""
        return [summary for summary in summaries(self._storage) if summary.complete or summary.reason]

    @property
    def steps(self) -> list[int]:
        """The complete steps, ascending."""
        return [listed.step for listed in listing(self._storage) if listed.error is None]

    def metrics(self, step: int | None = None) -> dict[str, float]:
        """The metrics of a step, as ``Checkpointer.metrics`` returns them.

        Args:
          step: None takes the latest.

        Raises:
          CheckpointNotFoundError: there is no such step.
        """
        return dict(self._retention().metrics_at(None if step is None else integer('step', step)))

    def best_step(self, metric: str | None = None, mode: str | None = None) -> int | None:
        """The step that is best by a metric of the steps, or of TensorBoard's event files in the run's directory.

        Args:
          metric: its name; None takes the metric of the latest step's keep policy.
          mode: 'max' or 'min'; None takes the policy's.

        Returns:
          None where there is no step, no step has any metric, or all values are NaN.

        Raises:
          ValueError: the policy determines no metric or mode; or steps have other metrics, but not this one.
        """
        return best_in(self._storage, metric, mode).step

    def _retention(self) -> Retention:
        """The metrics of the steps, under the keep policy of the latest save."""
        source = TensorBoardMetrics(self._storage)
        return Retention(self._storage, recorded_policy(self._storage) or KeepAll(), time.time, source=source)

    def __getitem__(self, step: int) -> CheckpointView:
        try:
            return open_checkpoint(self._storage, step)
        except CheckpointNotFoundError as error:
            raise _StepNotFoundError(str(error)) from error

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def series(self, name: str, fn: Callable[[LazyArray], Any], *, since: int = 0) -> dict[int, Any]:
        """Applies a function, such as ``lambda x: float(np.linalg.norm(x))``, to a leaf at every step that has it.

        Args:
          name: of the leaf.
          fn: a function of a LazyArray, which NumPy functions accept; a slice of it reads only its part.
          since: the first step.

        Returns:
          The results by step. A step that is deleted during the call is left out.

        Raises:
          KeyError: no step has the leaf.
          CheckpointNotFoundError: every step that might have it was deleted during the call.
        """
        values: dict[int, Any] = {}
        gone: CheckpointNotFoundError | None = None
        for step in self.steps:
            try:
                leaf = self[step].get(name) if step >= since else None
                if leaf is not None:
                    values[step] = fn(leaf)
            except CheckpointNotFoundError as error:
                if step in self.steps:
                    raise
                gone = error
        if not values and gone is not None:
            raise gone
        if not values and (steps := self.steps):
            # Its error names leaves that are meant.
            _ = self[steps[-1]][name]
        return values

    def report(
        self,
        output: str | os.PathLike[str],
        *,
        steps: int | Sequence[int] = (),
        sample_bytes: int | None = SAMPLE_BYTES,
        force: bool = False,
        progress: Progress | None = None,
    ) -> str:
        """Writes one HTML page on the run, which needs no server and no network; see docs/report.md.

        The page has all steps with their metrics, the curves of TensorBoard's event files in the run, the leaves of one step with
        their statistics, and the differences from another step.

        Args:
          output: the file, on a local file system.
          steps: the step to describe, or that step and the one to compare it with; the latest, and the one before, by default.
          sample_bytes: about how many bytes of each step to read, spread evenly over the leaves; None reads all of them.
          force: replaces a file.
          progress: called with (bytes read, bytes to read).

        Returns:
          The absolute path of the page.

        Raises:
          ValueError: more than two steps, or ``sample_bytes`` is below 1.
          CheckpointNotFoundError: there is no such step, or none at all.
          OutputExistsError: there is such a file.
          MissingDependencyError: plotly is not installed.
        """
        local = checked_output(output, force)
        all_steps = with_reasons(self._storage, self.summaries())
        before, step = _chosen(
            [steps] if isinstance(steps, int) else steps,
            [summary.step for summary in all_steps if summary.state == 'complete'],
        )
        facts: dict[str, Any] = {
            'steps': step_facts(all_steps),
            'compared': plain(named_by_policy(all_steps)),
            'curves': [plain(dataclasses.asdict(curve)) for curve in curves(self._storage)],
        }
        with self[step].in_one() as view:
            infos = view.infos()
            nbytes = bytes_in(largest(infos), sample_bytes)
            of_step = _part_of(progress, 0, 0 if before is None else nbytes)
            facts['checkpoint'] = {'step': step, **checkpoint_facts(view, infos, sample_bytes, of_step)}
            if before is not None:
                of_changes = _part_of(progress, 2 * nbytes, 0)
                changes = diff(self[before], view, sample_bytes=sample_bytes, progress=of_changes)
                leaves = [plain(dataclasses.asdict(leaf)) for leaf in changes.leaves]
                facts['changes'] = {
                    'steps': (before, step),
                    'same': changes.same,
                    'leaves': leaves,
                    'heat': heat_facts(largest(infos), leaves),
                }
        return write_report(local, self.path, facts, force)

    def to_pandas(self) -> Any:
        """A DataFrame with a row per step: bytes, time of the save, pinned, and a column for each metric."""
        rows = [
            {'step': item.step, 'nbytes': item.nbytes, 'saved': _saved(item), 'pinned': item.pinned, **item.metrics}
            for item in self.summaries()
        ]
        return pandas().DataFrame(rows).set_index('step') if rows else pandas().DataFrame()

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        """The title, the columns and the rows."""
        all_steps = self.summaries()
        names = sorted({name for item in all_steps for name in item.metrics})
        rows = [
            [
                str(item.step),
                human_bytes(item.nbytes),
                '' if item.created is None else f'{_saved(item):%Y-%m-%d %H:%M:%S}',
                *['' if name not in item.metrics else f'{item.metrics[name]:.6g}' for name in names],
                ', '.join(filter(None, [item.kept, item.state if item.reason else '', item.reason])),
            ]
            for item in all_steps
        ]
        return f'{self.path}: {counted(len(rows), "step")}', ['step', 'size', 'saved (UTC)', *names, ''], rows

    def __repr__(self) -> str:
        return table_text(*self._table(), left=0, more='.to_pandas()')

    def _repr_html_(self) -> str:
        return table_html(*self._table())


def _part_of(progress: Progress | None, before: int, after: int) -> Progress | None:
    """The progress of a part of the work; ``before`` and ``after`` are the bytes of the parts around it."""
    if progress is None:
        return None
    return lambda done, total: progress(before + done, before + total + after)


def _chosen(steps: Sequence[int], complete: Sequence[int]) -> tuple[int | None, int]:
    """The step to compare with, or None, and the step to describe."""
    wanted = sorted({integer('steps', step) for step in steps})
    if len(wanted) > 2:
        raise ValueError(
            f'steps: {wanted} are more than two. Pass the step to describe, and the one to compare it with.'
        )
    if len(wanted) == 2:
        return wanted[0], wanted[1]
    if not wanted and not complete:
        raise CheckpointNotFoundError('the run has no complete step to report on.')
    step = wanted[0] if wanted else complete[-1]
    return max((each for each in complete if each < step), default=None), step


def _saved(summary: StepSummary) -> datetime.datetime | None:
    return None if summary.created is None else datetime.datetime.fromtimestamp(summary.created, datetime.UTC)

"""Reads the facts of each step for retention, ``best_step`` and ``metrics``: the time of its save, its metrics and its pin."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from t5ckpt.catalog.listing import read_facts, waiting_steps
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import MetricSource
from t5ckpt.core.text import did_you_mean
from t5ckpt.errors import FormatError
from t5ckpt.format.facts import NO_FACTS, Facts, decode_facts, newer_format
from t5ckpt.format.names import MANIFEST, PINNED, step_dir
from t5ckpt.policies import StepInfo
from t5ckpt.storage import Storage


class StepFacts:
    """Reads the facts that a keep policy takes. They never change for a complete step, so those of each step are read once."""

    def __init__(self, storage: Storage, source: MetricSource | None):
        """Takes the run, and the source of the metrics that were not passed to ``save``."""
        self._storage = storage
        self._source = source
        self._facts: dict[int, tuple[float | None, Mapping[str, float]]] = {}

    def note_saved(self, step: int, facts: Facts) -> None:
        """Stores the facts of a checkpoint that this process has just committed."""
        self._facts[step] = facts.created_unix, facts.metrics

    def infos(
        self, steps: Sequence[int], held: Collection[int], names: Collection[str], just_saved: int | None
    ) -> list[StepInfo]:
        """The facts of the steps.

        Args:
          steps: ascending.
          held: those that a reader holds.
          names: the metrics to find.
          just_saved: the step that was just saved, which has no pin.
        """
        self._facts = {step: self._facts[step] if step in self._facts else self._read_facts(step) for step in steps}
        values_by_metric = self._found_metrics(steps, names)
        older = [step for step in steps if step != just_saved]
        pins = self._storage.are_files([join(step_dir(step), PINNED) for step in older])
        waiting = waiting_steps(self._storage)
        pinned = {step for step, is_pinned in zip(older, pins, strict=True) if is_pinned}
        return [
            StepInfo(
                step,
                step in pinned,
                step in held,
                self._facts[step][0],
                {
                    **{name: values[step] for name, values in values_by_metric.items() if step in values},
                    **self._facts[step][1],
                },
                step in waiting,
            )
            for step in steps
        ]

    def _read_facts(self, step: int) -> tuple[float | None, Mapping[str, float]]:
        return _facts_in(self._storage, step, known_facts(self._storage, step_dir(step)))

    def _found_metrics(self, steps: Sequence[int], names: Collection[str]) -> dict[str, Mapping[int, float]]:
        if self._source is None:
            return {}
        return {name: self._source.by_step(name, steps) for name in names}


class MetricCoverage:
    """Tracks which steps lack a metric that the keep policy uses, over the saves of this process."""

    def __init__(self) -> None:
        # The steps after whose saves retention ran; and by metric, the older ones without it, with the metrics they have.
        self._seen: set[int] = set()
        self._lacking: dict[str, dict[int, Collection[str]]] = {}
        self._measured: set[str] = set()

    def record(self, infos: Sequence[StepInfo], names: Collection[str], just_saved: int | None) -> None:
        """Records the metrics of all steps but the latest, whose metrics a source may get only after its save."""
        for info in infos:
            if info.step in self._seen and info.step != just_saved:
                self._measured |= info.metrics.keys()
                for name in set(names) - info.metrics.keys():
                    self._lacking.setdefault(name, {})[info.step] = tuple(info.metrics)
        if just_saved is not None:
            self._seen.add(just_saved)

    def missing(self) -> dict[str, tuple[int, Collection[str]]]:
        """The metrics that several steps lack and no step has: by name, the first step and the metrics that it has."""
        # One step may lack them, because T5X's training loop saves the first step before any evaluation.
        lacking = {name: steps for name, steps in self._lacking.items() if name not in self._measured}
        return {name: next(iter(steps.items())) for name, steps in lacking.items() if len(steps) > 1}


def _facts_in(storage: Storage, step: int, facts: Facts) -> tuple[float | None, Mapping[str, float]]:
    """The time of a step's save, in unix seconds or None, and the metrics passed to it."""
    created = facts.created_unix
    if created is None:
        # T5X writes no facts, and the manifest last.
        created = storage.modified(join(step_dir(step), MANIFEST))
    return created, facts.metrics


def known_facts(storage: Storage, directory: str) -> Facts:
    """A step's facts; ``NO_FACTS`` if they are damaged, gone, or of a newer format.

    A failed read is an error: the step may be the best.
    """
    key = join(directory, MANIFEST)
    try:
        data = read_facts(storage, directory)
        return NO_FACTS if newer_format(data) is not None else decode_facts(data, storage.url(key))
    except (FileNotFoundError, FormatError):
        return NO_FACTS


def missing_from_all(infos: Sequence[StepInfo], metric: str) -> str | None:
    """The message for a metric that no step has, with the existing ones; None if a step has it or the run is empty."""
    metrics = sorted({name for info in infos for name in info.metrics})
    if not infos or metric in metrics:
        return None
    return (
        f'no step has the metric {metric!r}; there are: {", ".join(metrics) or "none"}.{did_you_mean(metric, metrics)}'
    )

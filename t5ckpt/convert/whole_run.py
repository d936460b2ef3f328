"""Converts the steps of a run, each on its own: from Orbax or Flax to T5X's format, or back to a run of Orbax.

A step that an earlier call has converted is skipped, so a conversion that was interrupted is resumed by the same call: the
step under way continues as in a conversion of one step.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from t5ckpt.catalog.layouts import FLAX, ORBAX, PADDED, T5X, ZARR, ListedStep, readable
from t5ckpt.catalog.listing import facts_of, inspect_step, listing
from t5ckpt.catalog.locate import locate, no_checkpoint, open_run_storage, open_target, openable_below
from t5ckpt.convert.options import TO_ORBAX, ConvertOptions, ConvertReport, check_options
from t5ckpt.convert.source import source_identity, write_source
from t5ckpt.convert.to_orbax import convert_to_orbax, recorded_source
from t5ckpt.convert.trees import log_left_out, open_tree
from t5ckpt.core.arguments import check_word, given_steps
from t5ckpt.core.protocols import Progress
from t5ckpt.core.text import counted, numbered, some_of
from t5ckpt.errors import CheckpointExistsError, CheckpointNotFoundError
from t5ckpt.format.names import step_dir
from t5ckpt.storage import Storage

_LAYOUTS = {'orbax': (ORBAX,), 'flax': (FLAX,), 'zarr': (ZARR,), TO_ORBAX: (T5X, PADDED)}
_log = logging.getLogger('t5ckpt')
_CURE = 'Convert to another directory, or replace such steps (overwrite=True, or --force).'
RUN_FORMATS = tuple(_LAYOUTS)
"""The formats that :func:`convert_run` takes."""


def convert_run(
    kind: str,
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    options: ConvertOptions = ConvertOptions(),  # noqa: B008 - frozen
    *,
    steps: Collection[int] | None = None,
) -> tuple[ConvertReport, ...]:
    """Converts the steps of a run, with their metrics, times and custom metadata; skips those that are converted already.

    Args:
      kind: 'orbax', 'flax' and 'zarr' write T5X's format; 'to-orbax' reads it and writes a run of Orbax's ``CheckpointManager``,
        whose steps have an item ``default`` and their metrics. Orbax records no other time than the time of the conversion.
      source: the run's directory. Its steps in other layouts are left out.
      directory: the new run's.
      options: see :class:`ConvertOptions`; without ``step``. ``overwrite`` converts every step again.
      steps: which steps; None takes all.

    Returns:
      A report for each step, ascending; its ``outcome`` says whether the step was converted.

    Raises:
      CheckpointNotFoundError: the run has no such step, or none in the layout.
      CheckpointExistsError: the new run has a step that was not converted from this one, or with other options; nothing was
        written.
      T5CkptError: a step cannot be read or written. The steps before it are converted, and the same call resumes.
    """
    check_word('the format of a run', kind, RUN_FORMATS)
    check_options(options, kind)
    if options.step is not None:
        raise ValueError('ConvertOptions(step=...) is for one checkpoint. Pass steps=[...] to convert_run.')
    run, target = open_run_storage(source), open_target(directory)
    chosen = _chosen_steps(run, kind, None if steps is None else given_steps(steps))
    converted = [] if options.overwrite else _converted_before(run, target, chosen, kind, options)
    _log_left_out(run, [] if steps is not None else chosen)
    reports: list[ConvertReport] = []
    logged: set[str] = set()
    remaining = len(chosen) - len(converted)
    for listed_step in chosen:
        there = ConvertReport(listed_step.step, target.url(step_dir(listed_step.step)), outcome='there')
        if listed_step.step in converted:
            reports.append(there)
            continue
        before = sum(report.outcome != 'there' for report in reports)
        part = dataclasses.replace(options, progress=_part(options.progress, before, remaining))
        try:
            reports.append(_convert(kind, run, listed_step, target, part, logged))
        except CheckpointNotFoundError:
            if inspect_step(run, listed_step.step) is not None:
                raise
            reports.append(dataclasses.replace(there, outcome='gone'))
    return tuple(reports)


def _chosen_steps(run: Storage, kind: str, steps: Collection[int] | None) -> list[ListedStep]:
    if run.root_kind() != 'dir':
        raise no_checkpoint(run)
    listed = listing(run)
    # A step that cannot be inspected is an error and not left out.
    for listed_step in listed:
        readable(listed_step)
    of_layout = [listed_step for listed_step in listed if listed_step.layout in _LAYOUTS[kind]]
    missing = sorted(set(steps or ()) - {listed_step.step for listed_step in of_layout})
    if missing or not of_layout:
        asked = f'has no {numbered("step", missing)}' if missing else 'has no step'
        other_layouts = sorted({listed_step.layout for listed_step in listed} - {*_LAYOUTS[kind]})
        count = counted(len(listed) - len(of_layout), 'step')
        of_others = f' In other layouts ({", ".join(other_layouts)}) the run has {count}.' if other_layouts else ''
        existing = some_of([str(listed_step.step) for listed_step in of_layout], 10) or 'none'
        named = openable_below(run) if not listed and run.is_file_system else []
        of_others += f' Convert each of these by its path: {some_of(named, 10)}.' if named else ''
        raise CheckpointNotFoundError(
            f'{run.url()} {asked} in the layout of {_LAYOUTS[kind][0]}; there are: {existing}.{of_others}'
        )
    return [listed_step for listed_step in of_layout if steps is None or listed_step.step in steps]


def _log_left_out(run: Storage, chosen: Sequence[ListedStep]) -> None:
    """Logs the steps in other layouts, and the checkpoints under other names, which a conversion of all steps omits."""
    if chosen and run.is_file_system:
        others = openable_below(run, {listed_step.name for listed_step in chosen})
        if others:
            _log.warning('t5ckpt: not converted: %s in %s. Convert each by its path.', some_of(others, 10), run.url())


def _converted_before(
    run: Storage, target: Storage, chosen: Sequence[ListedStep], kind: str, options: ConvertOptions
) -> list[int]:
    """The steps that an earlier call has converted.

    Raises:
      CheckpointExistsError: a step was not converted from the one in the source, or with other options.
    """
    layout = ORBAX if kind == TO_ORBAX else T5X
    existing = {listed.step: listed for listed in listing(target)} if target.root_kind() == 'dir' else {}
    converted: list[int] = []
    for listed in chosen:
        existing_step = existing.get(listed.step)
        if existing_step is None:
            continue
        recorded, source = _recorded(target, existing_step, kind), _source(kind, run.url(listed.name))
        if existing_step.layout != layout or {**recorded, 'options': None} != {**source, 'options': None}:
            raise CheckpointExistsError(
                f'{target.url(existing_step.name)} exists and was not converted from {run.url(listed.name)} as it is now. {_CURE}'
            )
        if recorded != {**source, **options.recorded}:
            was, now = recorded.get('options', {}), options.recorded.get('options', {})
            differing = ', '.join(sorted(name for name in {*was, *now} if was.get(name) != now.get(name)))
            raise CheckpointExistsError(
                f'{target.url(existing_step.name)} exists and was converted with other options ({differing}). {_CURE}'
            )
        converted.append(listed.step)
    return converted


def _recorded(target: Storage, step: ListedStep, kind: str) -> Mapping[str, Any]:
    """The source that a converted step records, with the options of the conversion."""
    return recorded_source(target.url(step.name)) if kind == TO_ORBAX else facts_of(target, step).source


def _source(kind: str, source: str) -> Mapping[str, Any]:
    return source_identity(locate(source)) if kind == TO_ORBAX else open_tree(kind, source, ConvertOptions()).identity


def _convert(
    kind: str, run: Storage, listed_step: ListedStep, target: Storage, options: ConvertOptions, logged: set[str]
) -> ConvertReport:
    """Converts a step; logs the items that it leaves out and that are not in ``logged``."""
    source = run.url(listed_step.name)
    if kind == TO_ORBAX:
        return convert_to_orbax(source, target.url(str(listed_step.step)), options, is_step=True)
    found = dataclasses.replace(open_tree(kind, source, options), step=listed_step.step)
    log_left_out([name for name in found.left_out if name not in logged], found, source)
    logged.update(found.left_out)
    return write_source(found, target, options)


def _part(progress: Progress | None, before: int, parts: int) -> Progress | None:
    """The progress of one step of several, as if all had the size of this one."""
    if progress is None:
        return None
    return lambda done, total: progress(before * total + done, parts * total)

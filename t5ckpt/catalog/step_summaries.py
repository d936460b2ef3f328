"""Summarizes each step of a run without opening it, for ``t5ckpt ls`` and for choosing a step.

Notes: reads the head of the manifest of each step, and lists the files of steps that t5ckpt did not write.
Does not load JAX or TensorStore.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from t5ckpt.catalog.layouts import ORBAX, T5X, ListedStep, readable
from t5ckpt.catalog.listing import listing, read_facts
from t5ckpt.catalog.orbax_facts import read_orbax_facts
from t5ckpt.catalog.pin_file import pin_reason
from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError, FormatError, T5CkptError
from t5ckpt.format.facts import NO_FACTS, decode_facts
from t5ckpt.format.manifest import facts_entry
from t5ckpt.format.names import COPIES, MANIFEST, PINNED, parse_step_dir, part_of
from t5ckpt.storage import Entry, Storage

# The states of the directories of ``format/names.aside_dir``.
_ASIDE = {
    'tmp': 'unfinished',
    'deleted': 'being deleted',
    'damaged': 'damaged',
    'foreign': 'moved aside',
}


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """One step of a run.

    Attributes:
      step: its number.
      path: the path or URL of its directory.
      complete: whether readers can see it.
      state: ``'complete'``, ``'part'`` (complete; the local directory of one of several processes, see ``save/parts.py``),
        ``'unreadable'``, ``'unfinished'``, ``'being deleted'``, ``'broken'``, ``'damaged'`` (renamed by a restore that could not
        read it), or ``'moved aside'`` (renamed by a save because it holds files of other programs).
      nbytes: the bytes of its arrays, manifest, file checksums and facts; of a part, and without facts on file systems, of
        all files there. None if neither its facts nor a listing has them.
      created: when it was saved, in unix seconds; without facts, the modification time of the manifest; or None.
      metrics: the metrics passed to ``save``.
      pinned: whether it is pinned.
      writer: the program that wrote it, such as ``'t5ckpt 0.1.0'``; '' if unknown.
      kept: the reasons why it is kept that do not depend on a policy.
      policy: the keep policy of the save, see ``keep_policy.policy_of``; None if it is not recorded.
      layout: ``'t5x'``, ``'orbax'``, ``'flax'``, ``'zarr'`` or ``'t5x-padded'``, see ``catalog/layouts.py``.
      reason: why it is unreadable.
      custom_metadata: the argument of ``save``.
    """

    step: int
    path: str
    complete: bool
    state: str
    nbytes: int | None = None
    created: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    pinned: bool = False
    writer: str = ''
    kept: str = ''
    policy: Mapping[str, Any] | None = None
    layout: str = T5X
    reason: str = ''
    custom_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def summaries(storage: Storage) -> list[StepSummary]:
    """Every step of a run, ascending, including unfinished and broken ones.

    A step that is deleted during the call is left out. One that could not be inspected is included with the reason.
    """
    listed = listing(storage)
    by_name = {each.name: each for each in listed}
    rows: list[StepSummary] = []
    for entry in storage.entries():
        found = by_name.get(entry.name)
        row = _named(storage, entry, found)
        if row is None:
            continue
        try:
            if found is not None:
                readable(found)
            rows += _with_files(storage, entry, row, is_latest=found in listed[-1:])
        except T5CkptError as error:
            rows.append(dataclasses.replace(row, state='unreadable', reason=str(error)))
    return sorted(rows, key=lambda summary: (summary.step, not summary.complete))


def _named(storage: Storage, entry: Entry, found: ListedStep | None) -> StepSummary | None:
    """The number and the state of a listed step or, by its name, of an incomplete one; None for another name."""
    url = storage.url(entry.name)
    if found is not None:
        return StepSummary(found.step, url, found.error is None, 'complete', layout=found.layout)
    name, dot, rest = entry.name.partition('.')
    without_manifest = 'broken' if storage.commits_by_rename else 'unfinished'
    step, state = parse_step_dir(name), _ASIDE.get(rest.partition('-')[0]) if dot else without_manifest
    return StepSummary(step, url, False, state) if entry.is_dir and step is not None and state is not None else None


def _with_files(storage: Storage, entry: Entry, row: StepSummary, *, is_latest: bool) -> list[StepSummary]:
    """The summary with the facts of the step and of its files; none if it is gone."""
    files = {each.name: each for each in (storage.entries(entry.name) if entry.is_dir else [entry])}
    if not files and storage.kind(entry.name) is None:
        return []
    facts, nbytes, is_part, reason = NO_FACTS, None, False, ''
    try:
        if row.layout == ORBAX:
            facts = read_orbax_facts(storage, entry.name)
        elif entry.is_dir:
            data = read_facts(storage, entry.name)
            facts = decode_facts(data, storage.url(join(entry.name, MANIFEST)))
            # Of several processes, one may have a local directory of its own.
            is_part = COPIES in files and part_of(facts.digests.lists, files) is not None
            if facts.bytes is not None:
                nbytes = facts.bytes + len(facts_entry(data)) + sum(size for size, _ in facts.digests.values())
    except CheckpointNotFoundError:
        pass
    except FormatError as error:
        reason = str(error) if row.complete else ''
    if storage.commits_by_rename and (is_part or nbytes is None):
        nbytes = sum(size or 0 for _, size in storage.walk(entry.name)) if entry.is_dir else entry.size
    created = facts.created_unix
    if created is None:
        created = storage.modified(join(entry.name, MANIFEST) if MANIFEST in files else entry.name)
    # Keep policies apply only to T5X's layout.
    kept = ['no keep policy applies'] * (row.layout != T5X)
    kept += [pin_reason(storage, entry.name)] if PINNED in files else []
    kept += ['latest'] * is_latest
    is_unreadable = reason and row.layout != ORBAX
    row = dataclasses.replace(
        row,
        state='unreadable' if is_unreadable else 'part' if is_part and row.complete else row.state,
        nbytes=nbytes,
        created=created,
        metrics=facts.metrics,
        pinned=PINNED in files,
        writer=facts.program,
        kept=', '.join(kept) if row.complete else '',
        policy=facts.keep or None,
        reason=reason,
        custom_metadata=facts.custom_metadata,
    )
    return [row]

"""Summarizes each step of a run without opening it, for ``t5ckpt ls`` and for choosing a step.

Notes: reads the head of the manifest of each step, and lists the files of steps that t5ckpt did not write.
Does not load JAX or TensorStore.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from t5ckpt.catalog.layouts import ORBAX, T5X, ListedStep
from t5ckpt.catalog.listing import catalog_of, read_facts
from t5ckpt.catalog.orbax_facts import read_orbax_facts
from t5ckpt.catalog.pin_file import pin_reason
from t5ckpt.catalog.run_catalog import RunCatalog
from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError, FormatError, T5CkptError
from t5ckpt.format.facts import NO_FACTS, Facts, decode_facts
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.manifest import facts_entry
from t5ckpt.format.names import (
    COPIES,
    MANIFEST,
    PINNED,
    parse_damaged,
    parse_foreign,
    parse_leftover,
    parse_step_dir,
    part_of,
)
from t5ckpt.storage import Entry, Storage


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
    nbytes: int | None
    created: float | None
    metrics: Mapping[str, float]
    pinned: bool
    writer: str
    kept: str
    policy: Mapping[str, Any] | None = None
    layout: str = T5X
    reason: str = ''
    custom_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def summaries(storage: Storage) -> list[StepSummary]:
    """Every step of a run, ascending, including unfinished and broken ones.

    A step that is deleted during the call is left out. One that could not be inspected is included with the reason.
    """
    catalog = catalog_of(storage)
    listed = catalog.listing()
    complete = {listed_step.name: listed_step for listed_step in listed.steps}
    latest = listed.steps[-1].step if listed.steps else None
    rows: list[StepSummary] = []
    for entry in catalog.entries(complete):
        named = _state_of(entry, complete, catalog.incomplete_state)
        if named is None:
            continue
        try:
            if entry.name in listed.unreadable:
                raise listed.unreadable[entry.name]
            summary = _summary(storage, catalog, entry, named, latest)
        except T5CkptError as error:
            summary = _unreadable(storage, entry, named, error)
        rows += [] if summary is None else [summary]
    return sorted(rows, key=lambda summary: (summary.step, not summary.complete))


def _unreadable(storage: Storage, entry: Entry, named: _Named, error: T5CkptError) -> StepSummary:
    unknown = (None, None, {}, False, '', '', None)
    return StepSummary(
        named.step, storage.url(entry.name), named.is_complete, 'unreadable', *unknown, named.layout, str(error)
    )


@dataclasses.dataclass(frozen=True)
class _Named:
    """The state of a step by its name and the listing."""

    step: int
    state: str
    layout: str = T5X

    @property
    def is_complete(self) -> bool:
        return self.state == 'complete'


def _state_of(entry: Entry, complete: Mapping[str, ListedStep], incomplete: str) -> _Named | None:
    listed_step = complete.get(entry.name)
    if listed_step is not None:
        return _Named(listed_step.step, 'complete', listed_step.layout)
    if not entry.is_dir:
        return None
    for state, parse in ((incomplete, parse_step_dir), ('damaged', parse_damaged), ('moved aside', parse_foreign)):
        step = parse(entry.name)
        if step is not None:
            return _Named(step, state)
    leftover = parse_leftover(entry.name)
    if leftover is None:
        return None
    return _Named(leftover.step, 'unfinished' if leftover.state == 'tmp' else 'being deleted')


def _summary(
    storage: Storage, catalog: RunCatalog, entry: Entry, named: _Named, latest: int | None
) -> StepSummary | None:
    is_orbax = named.layout == ORBAX
    facts, recorded, damage = (_orbax_facts if is_orbax else _facts)(storage, entry)
    files = catalog.files(entry)
    if files is None:
        return None
    pinned = PINNED in files
    manifest = files.get(MANIFEST, entry if not entry.is_dir else None)
    created = facts.created_unix
    if created is None:
        created = manifest.mtime if manifest is not None and manifest.mtime else None
    is_part = COPIES in files and _is_part(facts, files)
    state = 'part' if is_part and named.is_complete else named.state
    # Keep policies apply only to T5X's layout.
    kept = ['no keep policy applies'] if named.layout != T5X else []
    kept += [pin_reason(storage, entry.name)] if pinned else []
    kept += ['latest'] * (named.is_complete and named.step == latest)
    return StepSummary(
        step=named.step,
        path=storage.url(entry.name),
        complete=named.is_complete,
        state='unreadable' if damage and named.is_complete and not is_orbax else state,
        nbytes=catalog.nbytes(entry.name, None if is_part else recorded, files),
        created=created,
        metrics=facts.metrics,
        pinned=pinned,
        writer=facts.program,
        kept=', '.join(kept) if named.is_complete else '',
        policy=facts.keep or None,
        layout=named.layout,
        reason=damage if named.is_complete else '',
        custom_metadata=facts.custom_metadata,
    )


def _orbax_facts(storage: Storage, entry: Entry) -> tuple[Facts, None, str]:
    """Orbax's metadata of a step as facts, and the text of the error if it does not decode."""
    try:
        return read_orbax_facts(storage, entry.name), None, ''
    except FormatError as error:
        return NO_FACTS, None, f'its metrics and times are not read: {error}'


def _facts(storage: Storage, entry: Entry) -> tuple[Facts, int | None, str]:
    """A step's facts, the bytes of the files that they record with their own, and the text of the error if they are damaged."""
    if not entry.is_dir:
        return NO_FACTS, None, ''
    try:
        data = read_facts(storage, entry.name)
        facts = decode_facts(data, storage.url(join(entry.name, MANIFEST)))
    except CheckpointNotFoundError:
        return NO_FACTS, None, ''
    except FormatError as error:
        return NO_FACTS, None, str(error)
    return facts, _recorded_bytes(facts, len(facts_entry(data))), ''


def _is_part(facts: Facts, files: Mapping[str, Entry]) -> bool:
    """Whether the files of other processes of the save are on other disks."""
    try:
        return part_of(FileChecksums.recorded_by(facts, MANIFEST).lists, files) is not None
    except FormatError:
        return False


def _recorded_bytes(facts: Facts, facts_bytes: int) -> int | None:
    """The bytes of the arrays' files, of the manifest and the file checksums (``digests``), and of the facts."""
    try:
        beside = FileChecksums.recorded_by(facts, MANIFEST).values()
    except FormatError:
        return None
    return None if facts.bytes is None else facts.bytes + facts_bytes + sum(size for size, _ in beside)

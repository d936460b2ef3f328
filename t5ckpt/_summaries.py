"""What can be said of each step of a run without opening it: for ``ls``, and for who chooses among steps.

Notes: reads one small file a step where t5ckpt wrote it, and lists the step's files where somebody else did. Loads
neither jax nor tensorstore.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from t5ckpt._index import read_index
from t5ckpt._layout import MANIFEST, PINNED, SIDECAR, join, parse_damaged, parse_leftover, parse_step_dir, step_dir
from t5ckpt._ledger import ledger_entries
from t5ckpt._sidecar import decode_sidecar, metrics_of, time_of
from t5ckpt.errors import CheckpointNotFoundError, FormatError
from t5ckpt.steps import steps_in
from t5ckpt.storage import Entry, Storage

__all__ = ['StepSummary', 'summaries']


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """One step of a run.

    Attributes:
      step: its number.
      path: its directory, as a user would write it.
      complete: whether readers see it.
      state: ``'complete'``, ``'unfinished'``, ``'being deleted'``, ``'broken'``, or ``'damaged'``, which a restore has set aside.
      nbytes: of all its files; None where neither a sidecar nor the storage's listing says it.
      created: unix seconds of the save; of the manifest file where no sidecar says it; None where nothing does.
      metrics: given to ``save``.
      pinned: whether retention never deletes it.
      writer: who wrote it, such as ``'t5ckpt 0.1.0'``; empty where it is not known.
      kept: why it stays, in words, as far as that is known without a policy.
      policy: the keep policy that it was saved under, see ``policies.policy_of``; None where nobody says.
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


def summaries(storage: Storage) -> list[StepSummary]:
    """Every step below a storage's root, ascending, with what is unfinished or broken.

    A step that is deleted meanwhile is left out.
    """
    complete = set(steps_in(storage))
    latest = max(complete, default=None)
    found: list[StepSummary] = []
    for entry in _directories(storage, complete):
        named = _state_of(entry, complete) if entry.is_dir else None
        if named is not None:
            summary = _summary(storage, entry, *named, latest)
            found += [] if summary is None else [summary]
    return sorted(found, key=lambda summary: (summary.step, not summary.complete))


def _directories(storage: Storage, complete: set[int]) -> list[Entry]:
    if storage.renames:
        return storage.entries()
    # There, to list the names is to list every chunk.
    return [Entry(step_dir(step), True) for step in complete | read_index(storage).busy]


def _state_of(entry: Entry, complete: set[int]) -> tuple[int, str] | None:
    step = parse_step_dir(entry.name)
    if step is not None:
        return step, 'complete' if step in complete else 'broken'
    damaged = parse_damaged(entry.name)
    if damaged is not None:
        return damaged, 'damaged'
    leftover = parse_leftover(entry.name)
    if leftover is None:
        return None
    return leftover.step, 'unfinished' if leftover.state == 'tmp' else 'being deleted'


def _summary(storage: Storage, entry: Entry, step: int, state: str, latest: int | None) -> StepSummary | None:
    extra = _sidecar(storage, entry.name)
    if storage.renames:
        files = {item.name: item for item in storage.entries(entry.name)}
        if not files:
            return None
    else:
        is_pinned = storage.is_file(join(entry.name, PINNED))
        files = {PINNED: Entry(PINNED, False)} if is_pinned else {}
    pinned = PINNED in files
    manifest = files.get(MANIFEST)
    created = time_of(extra)
    if created is None:
        created = manifest.mtime if manifest is not None and manifest.mtime else None
    kept = ['pinned'] * pinned + ['latest'] * (state == 'complete' and step == latest)
    return StepSummary(
        step=step,
        path=storage.url(entry.name),
        complete=state == 'complete',
        state=state,
        nbytes=_nbytes(storage, entry.name, extra, files),
        created=created,
        metrics=metrics_of(extra),
        pinned=pinned,
        writer=_writer(extra),
        kept=', '.join(kept) if state == 'complete' else '',
        policy=extra.get('keep') if isinstance(extra.get('keep'), Mapping) else None,
    )


def _nbytes(storage: Storage, directory: str, extra: Mapping[str, Any], files: Mapping[str, Entry]) -> int | None:
    arrays, digests = extra.get('bytes'), extra.get('digests')
    if isinstance(arrays, int) and 0 <= arrays < 2**63:
        # The sidecar counts what lies in the arrays' directories, and knows the files beside them, but not itself.
        if storage.renames:
            return arrays + sum(item.size or 0 for item in files.values())
        try:
            return arrays + sum(size for size, _ in ledger_entries(digests, SIDECAR).values())
        except FormatError:
            return None
    return sum(size or 0 for _, size in storage.walk(directory)) if storage.renames else None


def _sidecar(storage: Storage, directory: str) -> Mapping[str, Any]:
    key = join(directory, SIDECAR)
    try:
        return decode_sidecar(storage.read(key), storage.url(key)).extra
    except (CheckpointNotFoundError, FormatError):
        return {}


def _writer(extra: Mapping[str, Any]) -> str:
    writer = extra.get('writer')
    if not isinstance(writer, Mapping):
        return ''
    return ' '.join(str(writer[key]) for key in ('name', 'version') if key in writer)

"""Runs one restore: resolves the checkpoint, plans, reads the arrays, and rebuilds the state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from t5ckpt.catalog.locate import Located
from t5ckpt.core.keys import join
from t5ckpt.core.telemetry import READ_EVENT, record_duration
from t5ckpt.core.text import counted, human_bytes
from t5ckpt.datasets import warn_of_unused
from t5ckpt.distributed.rounds import Phase
from t5ckpt.planning.restore_plan import RestoreOptions, RestorePlan, plan_restore
from t5ckpt.reading.array_reader import ArrayReader, reader_of
from t5ckpt.reading.contents import Contents, leaves_of
from t5ckpt.restore.all_gather import gather
from t5ckpt.restore.make_leaf import make_inline_leaf
from t5ckpt.restore.read_arrays import lazy_leaves, read_leaves
from t5ckpt.restore.report import report_plan
from t5ckpt.restore.request import LocalPart, RestoreRequest
from t5ckpt.restore.resolve import contents_to_restore
from t5ckpt.tree.leaf_table import LeafTable, unflatten
from t5ckpt.tree.leaves import is_jax_array
from t5ckpt.tree.template import leaf_templates
from t5ckpt.tree.train_state import StateView, flatten_state
from t5ckpt.tree.transfers import explicit_transfers

_log = logging.getLogger('t5ckpt')


def run_restore(request: RestoreRequest) -> Any:
    """Restores a state with the structure of the template.

    Raises:
      CheckpointNotFoundError: there is no checkpoint, or one of its files is missing.
      FormatError: the checkpoint is damaged, of another format, or of a newer version.
      TreeMismatchError: it does not fit the template; nothing was read.
      StorageError: a file cannot be read.
      RemoteError: the restore failed in another process.
    """
    started = time.monotonic()
    last = Phase.READ if request.reading.share_replicated else Phase.RESTORE
    part = request.local_part
    with request.round.failing_together(last if part is None else Phase.NEED):
        planned = _planned(request)
        if part is not None:
            _agree(request, part, planned)
    in_collectives = contextlib.nullcontext() if part is None else request.round.failing_together(Phase.SEND)
    with request.round.failing_together(last), in_collectives:
        finish, summary = _read(request, planned)
    if request.reading.share_replicated:
        # A collective follows, which must not begin before all processes are known to have succeeded.
        request.round.barrier(Phase.READ)
    with request.round.together(Phase.RESTORE):
        restored = finish()
    request.note_step(planned.contents.located.step if request.path is None else None)
    seconds = time.monotonic() - started
    record_duration(READ_EVENT, seconds)
    leaves, data = summary
    data += request.sources()
    # The disk of this process may have nothing of a local step.
    located = planned.contents.located
    source = _source(located) if part is None else f'step {located.step} from local directories'
    _log.info('t5ckpt: restored %s: %s, in %.2f s%s', source, leaves, seconds, data)
    return restored


def _source(located: Located) -> str:
    return located.url if located.step is None else f'step {located.step} from {located.storage.url(located.directory)}'


@dataclasses.dataclass(frozen=True)
class _Planned:
    """A planned restore; nothing of the arrays is read yet."""

    view: StateView
    contents: Contents
    plan: RestorePlan


def _planned(request: RestoreRequest) -> _Planned:
    if request.lazy and getattr(request.partitioner, 'params_on_devices', False):
        raise ValueError(
            'lazy_parameters: LazyArrays cannot be put on devices, and the partitioner has params_on_devices=True. '
            'Set it to False, or restore without lazy_parameters.'
        )
    contents, view = contents_to_restore(request), flatten_state(request.template)
    leaves, tree_facts = leaves_of(contents, request.transforms, unflatten(view.table))
    fallback = flatten_state(request.fallback).table if request.fallback else {}
    options = RestoreOptions(
        request.cast,
        fallback,
        tree_facts.keys,
        knows_keys=contents.facts.knows_tree,
        strict=request.strict,
        on_devices=not request.lazy,
        resize=request.resize,
    )
    templates = leaf_templates(view, request.template, request.partitioner, request.only)
    with contents.naming_unread():
        plan = plan_restore(leaves, templates, options, contents.located.url)
    report_plan(plan, request, contents, view.table, fallback)
    return _Planned(view, contents, plan)


def _agree(request: RestoreRequest, part: LocalPart, planned: _Planned) -> None:
    """Agrees with the other processes on what each of them reads from its own storage."""
    dataset = None if request.leaves_iterator else request.dataset
    prefix = None if dataset is None else dataset.prefix(request.round.processes)
    part.agree(request.round, planned.plan.stored, prefix)


def _read(request: RestoreRequest, planned: _Planned) -> tuple[Callable[[], Any], tuple[str, str]]:
    """Reads all values; returns a function that builds the state from them, and for the log what was read, and the data."""
    view, contents, plan = planned.view, planned.contents, planned.plan
    reader = reader_of(contents, request.reading)
    if request.donate:
        _free(view.table, [read.value for read in (*plan.inline, *plan.fallback)])
    with contents.identity.reading(), explicit_transfers():
        values, final_shardings, nbytes = (
            lazy_leaves(reader, plan) if request.lazy else read_leaves(reader, plan, request)
        )
        values |= {read.path: make_inline_leaf(read) for read in plan.fallback}
    data = '' if request.leaves_iterator else _move_iterator(request, reader, contents)
    summary = _leaves_text(plan, nbytes), '; data iterator is unchanged' if request.dataset and not data else data
    only = request.only
    gathered = functools.partial(gather, values, final_shardings)
    if only is not None:
        return lambda: {path: leaf for path, leaf in (values | gathered()).items() if path in only}, summary
    return lambda: view.rebuild(plan.kept | values | gathered()), summary


def _leaves_text(plan: RestorePlan, nbytes: int | None) -> str:
    """The leaves that came from the checkpoint, and the bytes of them that this process has read, for the log."""
    text = f'{counted(len(plan.stored) + len(plan.inline), "leaf", "leaves")}, {human_bytes(nbytes) or "not read yet"}'
    return f'{text}, {len(plan.fallback)} more given' if plan.fallback else text


def _free(template: LeafTable, kept: Sequence[Any]) -> None:
    """Frees the template's arrays before anything is read; their shapes and shardings remain."""
    needed = {id(value) for value in kept}
    for leaf in template.values():
        if is_jax_array(leaf) and id(leaf) not in needed and not leaf.is_deleted():
            leaf.delete()


def _move_iterator(request: RestoreRequest, reader: ArrayReader, contents: Contents) -> str:
    """Restores the position of the data iterator; warns if the checkpoint or the checkpointer has none.

    Returns:
      Where the data continues, for the log; empty if the iterator is unchanged.
    """
    dataset, located, below = request.dataset, contents.located, contents.facts.positions_in
    storage, directory = located.storage, join(located.directory, below)
    if dataset is not None:
        is_part = request.local_part is not None
        processes = request.round.processes
        received = None if request.local_part is None else request.local_part.positions()
        text = dataset.load(
            *(received or (storage, directory)),
            processes,
            # The sender has checked what it sent.
            lambda prefix: None if received else reader.check_prefixed(join(below, prefix)),
            of_orbax=not located.manifest,
            is_part=is_part,
        )
        return '' if text is None else f'; {text}'
    if request.round.is_leader and request.continues:
        warn_of_unused(storage, directory, of_orbax=not located.manifest)
    return ''

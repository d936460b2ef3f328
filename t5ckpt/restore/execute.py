"""Runs one restore: resolves the checkpoint, plans, reads the arrays, and rebuilds the state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5ckpt.catalog.locate import Located
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import Path, leaf_name, path_of
from t5ckpt.core.loaded import READ_EVENT, record_duration
from t5ckpt.core.text import counted, human_bytes, some_of
from t5ckpt.datasets import warn_of_unused
from t5ckpt.distributed.rounds import Phase
from t5ckpt.errors import TreeMismatchError, mismatch_error
from t5ckpt.planning.restore_plan import RestoreOptions, RestorePlan, plan_restore
from t5ckpt.reading.array_reader import ArrayReader, reader_of
from t5ckpt.reading.contents import Contents, leaves_of
from t5ckpt.restore.all_gather import gather
from t5ckpt.restore.make_leaf import make_inline_leaf
from t5ckpt.restore.read_arrays import lazy_leaves, read_leaves
from t5ckpt.restore.report import report_plan
from t5ckpt.restore.request import LocalPart, RestoreRequest
from t5ckpt.restore.resolve import contents_to_restore
from t5ckpt.tree.leaf_table import Empty, LeafTable, unflatten
from t5ckpt.tree.leaves import LeafTemplate, explicit_transfers, is_jax_array
from t5ckpt.tree.train_state import StateView, flatten_state, leaf_templates

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
    first, is_new = last if part is None else Phase.NEED, request.init is not None
    with request.round.together(Phase.INIT) if is_new else request.round.failing_together(first):
        found = _find(request)
    with request.round.failing_together(first):
        plan = _plan(request, found)
        if part is not None:
            _agree(request, part, plan)
    in_collectives = contextlib.nullcontext() if part is None else request.round.failing_together(Phase.SEND)
    with request.round.failing_together(last), in_collectives:
        finish, summary = _read(request, found, plan)
    if request.reading.share_replicated:
        # A collective follows, which must not begin before all processes are known to have succeeded.
        request.round.barrier(Phase.READ)
    with request.round.together(Phase.RESTORE):
        restored = finish()
    request.note_step(found.contents.located.step if request.path is None else None)
    seconds = time.monotonic() - started
    record_duration(READ_EVENT, seconds)
    leaves, data = summary
    data += request.sources()
    # The disk of this process may have nothing of a local step.
    located = found.contents.located
    source = _source(located) if part is None else f'step {located.step} from local directories'
    _log.info('t5ckpt: restored %s: %s, in %.2f s%s', source, leaves, seconds, data)
    return restored


def _source(located: Located) -> str:
    return located.url if located.step is None else f'step {located.step} from {located.storage.url(located.directory)}'


@dataclasses.dataclass(frozen=True)
class _Found:
    """A checkpoint, with its leaves and keys under the template's paths, and the leaves of the template that are not from it."""

    view: StateView
    contents: Contents
    leaves: LeafTable
    keys: Mapping[Path, str]
    templates: dict[Path, LeafTemplate]
    new: list[Path]


def _find(request: RestoreRequest) -> _Found:
    if request.lazy and getattr(request.partitioner, 'params_on_devices', False):
        raise ValueError(
            'lazy_parameters: LazyArrays cannot be put on devices, and the partitioner has params_on_devices=True. '
            'Set it to False, or restore without lazy_parameters.'
        )
    choice = request.choice
    contents, view = contents_to_restore(request)
    held, facts = leaves_of(contents, request.transforms, unflatten(view.table) if request.transforms else {})
    paths = choice.sources(held, view.table, repeats=request.repeats)
    leaves = {path: held[old] for path, old in paths.items()}
    keys = {path: facts.keys[old] for path, old in paths.items() if old in facts.keys}
    templates = leaf_templates(view, request.template, request.partitioner)
    arrays = [path for path, each in templates.items() if each.dtype is not None]
    absent = [path for path in arrays if isinstance(leaves.get(path), Empty | str | None)]
    new = [path for path in absent if choice.missing == 'init' or not choice.takes(leaf_name(path))]
    if absent and new == arrays:
        raise ValueError(
            f'{contents.located.url} provides no leaf of the template. Correct take=, leave= and rename=, or leave it out.'
        )
    return _Found(view, contents, leaves, keys, templates, new)


def _plan(request: RestoreRequest, found: _Found) -> RestorePlan:
    contents, table = found.contents, found.view.table
    asked = flatten_state(request.fallback).table if request.fallback else {}
    given = {**asked}
    if new := [path for path in found.new if path not in given]:
        given |= {path: table[path] for path in new} if request.init is None else request.init(new)
    options = RestoreOptions(
        request.cast,
        given,
        found.keys,
        knows_keys=contents.facts.knows_tree,
        strict=request.strict,
        on_devices=not request.lazy,
        resize=request.choice.patterns['resize'],
    )
    where = contents.located.url
    try:
        plan = plan_restore(found.leaves, found.templates, options, where)
    except TreeMismatchError as error:
        keys = {path_of(each.leaf)[0] for each in error.problems if each.kind == 'missing'}
        items = sorted(keys.intersection(contents.left_out))
        if not items:
            raise
        # Without rules of ``rename``, which would take the leaves of the item that is read.
        others = f'(not read of it: {some_of(items, 8)}; path={where}/{items[0]} reads this item of Orbax)'
        raise mismatch_error(error.problems, f'{where} {others}') from error
    report_plan(plan, request, contents, table, asked)
    return plan


def _agree(request: RestoreRequest, part: LocalPart, plan: RestorePlan) -> None:
    """Agrees with the other processes on what each of them reads from its own storage."""
    dataset = None if request.leaves_iterator else request.dataset
    prefix = None if dataset is None else dataset.prefix(request.round.processes)
    part.agree(request.round, plan.stored, prefix)


def _read(request: RestoreRequest, found: _Found, plan: RestorePlan) -> tuple[Callable[[], Any], tuple[str, str]]:
    """Reads all values; returns a function that builds the state from them, and for the log what was read, and the data."""
    view, contents = found.view, found.contents
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
    gathered = functools.partial(gather, values, final_shardings)
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
        # A restore from another run begins a training with data of its own.
        is_own = request.path is None or storage.url() == request.storage.url()
        warn_of_unused(storage, directory, logging.WARNING if is_own else logging.INFO, of_orbax=not located.manifest)
    return ''

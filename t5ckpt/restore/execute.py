"""Runs one restore: resolves the checkpoint, plans, reads the arrays, and rebuilds the state."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from t5ckpt.catalog.locate import Located
from t5ckpt.core.protocols import Partitioner
from t5ckpt.core.telemetry import READ_EVENT, record_duration
from t5ckpt.datasets import DatasetState, warn_of_unused
from t5ckpt.distributed.rounds import Phase
from t5ckpt.planning.restore_plan import RestoreOptions, plan_restore
from t5ckpt.reading.array_reader import ArrayReader, reader_of
from t5ckpt.reading.contents import leaves_of, read_contents
from t5ckpt.restore.all_gather import completed
from t5ckpt.restore.fit import leaf_templates
from t5ckpt.restore.make_leaf import make_fallback_leaf
from t5ckpt.restore.read_arrays import lazy_leaves, read_leaves
from t5ckpt.restore.report import report_plan
from t5ckpt.restore.request import RestoreRequest
from t5ckpt.restore.resolve import find_checkpoint_to_restore
from t5ckpt.storage import requests_between
from t5ckpt.tree.leaf_table import LeafTable, unflatten
from t5ckpt.tree.leaves import is_jax_array
from t5ckpt.tree.train_state import flatten_state

_log = logging.getLogger('t5ckpt')


def run_restore(
    request: RestoreRequest, state: Any, partitioner: Partitioner | None, dataset: DatasetState | None
) -> Any:
    """Restores a state with the structure of ``state``."""
    started, before = time.monotonic(), request.storage.requests()
    with request.round.failing_together(Phase.READ if request.reading.share_replicated else Phase.RESTORE):
        finish = _read(request, state, partitioner, dataset)
    if request.reading.share_replicated and not request.round.is_single_process:
        # A collective follows, which must not begin before all processes are known to have succeeded.
        request.round.reduce_on_leader(Phase.READ, None, lambda _: None)
    with request.round.failing_together(Phase.RESTORE):
        restored = finish()
    if not request.round.is_single_process:
        request.round.reduce_on_leader(Phase.RESTORE, None, lambda _: None)
    seconds = time.monotonic() - started
    record_duration(READ_EVENT, seconds)
    sent = requests_between(before, request.storage.requests())
    if sent:
        _log.info('t5ckpt: restored from %s in %.2f s%s', request.storage.url(), seconds, sent)
    return restored


def _read(
    request: RestoreRequest, state: Any, partitioner: Partitioner | None, dataset: DatasetState | None
) -> Callable[[], Any]:
    """Reads all values; returns a function that builds the state from them."""
    if request.call.lazy and getattr(partitioner, 'params_on_devices', False):
        raise ValueError(
            'lazy_parameters: LazyArrays cannot be put on devices, and the partitioner has params_on_devices=True. '
            'Set it to False, or restore without lazy_parameters.'
        )
    located, raw = find_checkpoint_to_restore(request)
    view = flatten_state(state)
    contents = read_contents(located, raw)
    template = unflatten(view.table)
    leaves, facts = leaves_of(contents, request.call.transforms, template)
    fallback = {} if request.call.fallback is None else flatten_state(request.call.fallback).table
    # Without a record of the keys in the sidecar, any uint32 array may be keys.
    has_facts = contents.sidecar.format and contents.sidecar.facts != 'unknown'
    options = RestoreOptions(
        request.cast,
        fallback,
        facts.keys if has_facts else None,
        lenient_keys=bool(request.call.transforms),
        strict=request.call.strict,
        places=not request.call.lazy,
        resize=request.call.resize,
    )
    targets = leaf_templates(view, state, partitioner, request.call.only)
    plan = plan_restore(leaves, targets, options, located.url)
    report_plan(plan, request, contents, view.table, fallback)
    reader = reader_of(contents, request.reading)
    if request.call.donate:
        _free(view.table, [read.value for read in plan.fallback])
    with contents.identity.reading():
        values, final_shardings = lazy_leaves(reader, plan) if request.call.lazy else read_leaves(reader, plan, request)
    values |= {read.path: make_fallback_leaf(read) for read in plan.fallback}
    if not request.call.leaves_iterator:
        _move_iterator(request, reader, located, dataset)
    only = request.call.only
    gathered = functools.partial(completed, values, final_shardings)
    if only is not None:
        return lambda: {path: leaf for path, leaf in (values | gathered()).items() if path in only}
    return lambda: view.rebuild(plan.kept | values | gathered())


def _free(template: LeafTable, kept: Sequence[Any]) -> None:
    """Frees the template's arrays before anything is read; their shapes and shardings remain."""
    needed = {id(value) for value in kept}
    for leaf in template.values():
        if is_jax_array(leaf) and id(leaf) not in needed and not leaf.is_deleted():
            leaf.delete()


def _move_iterator(
    request: RestoreRequest, reader: ArrayReader, located: Located, dataset: DatasetState | None
) -> None:
    """Restores the position of the data iterator; warns if the checkpoint or the checkpointer has none."""
    if dataset is not None:
        reader.check_prefixed(dataset.prefix(request.round.processes))
        dataset.load(located.storage, located.directory, request.round.processes)
    elif request.round.is_leader:
        warn_of_unused(located.storage, located.directory)

"""Runs one restore: resolves the checkpoint, plans, reads the arrays, and rebuilds the state."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from t5ckpt.catalog.locate import Located, no_links_text
from t5ckpt.core.byte_budget import ByteBudget
from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.protocols import Partitioner
from t5ckpt.core.telemetry import READ_EVENT, record_duration
from t5ckpt.core.text import some_of
from t5ckpt.datasets import DatasetState, warn_of_unused
from t5ckpt.distributed.rounds import Phase
from t5ckpt.errors import NoEffectWarning
from t5ckpt.format.dtypes import cast_dtype
from t5ckpt.lazy import LazyArray, LazyThreadPoolArray
from t5ckpt.planning.leaves import restricted
from t5ckpt.planning.resizing import resized
from t5ckpt.planning.restore_plan import InlineRead, RestoreOptions, RestorePlan, StoredRead, plan_restore
from t5ckpt.reading.array_reader import ArrayReader, lazy_leaf, reader_of
from t5ckpt.reading.contents import leaves_of, read_contents
from t5ckpt.restore.all_gather import completed, in_parts
from t5ckpt.restore.fit import leaf_templates
from t5ckpt.restore.make_leaf import make_inline_leaf
from t5ckpt.restore.read_arrays import read_arrays
from t5ckpt.restore.request import RestoreRequest
from t5ckpt.restore.resolve import find_checkpoint_to_restore
from t5ckpt.restore.warnings import warn_if_local, warn_if_narrowed, warn_if_unsharded
from t5ckpt.storage import requests_between
from t5ckpt.tree.leaf_table import LeafTable, unflatten
from t5ckpt.tree.leaves import LeafTemplate, is_jax_array
from t5ckpt.tree.train_state import flatten_state

_log = logging.getLogger('t5ckpt')
_PARAMETERS = ('target', 'params')


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
    targets = leaf_templates(view, state, partitioner)
    if request.call.only is not None:
        targets = restricted(targets, request.call.only)
    plan = plan_restore(leaves, targets, options, located.url)
    _log_plan(plan, request)
    if request.round.is_leader:
        for text in _unused_options(request, located, view.table, fallback):
            warn_caller(NoEffectWarning(text))
    warn_if_narrowed(plan)
    if request.round.is_single_process and not request.call.lazy:
        warn_if_unsharded(plan, view.table, contents.sidecar.devices, request.notices)
    elif not request.call.lazy:
        warn_if_local(plan)
    reader = reader_of(contents, request.reading)
    final_shardings: dict[Path, Any] = {}
    if request.call.donate:
        _free(view.table, [fallback[path] for path in plan.fallback])
    with contents.identity.reading():
        values = _lazy_values(reader, plan) if request.call.lazy else _values(reader, plan, request, final_shardings)
    values |= {path: _fallback_value(request, path, fallback[path], targets[path]) for path in plan.fallback}
    if not request.call.leaves_iterator:
        _move_iterator(request, reader, located, dataset)
    only = request.call.only
    gathered = functools.partial(completed, values, final_shardings)
    if only is not None:
        return lambda: {path: leaf for path, leaf in (values | gathered()).items() if path in only}
    return lambda: view.rebuild(plan.kept | values | gathered())


def _log_plan(plan: RestorePlan, request: RestoreRequest) -> None:
    """Logs the leaves that differ from the checkpoint: not cast, resized, or left out."""
    if plan.notes:
        how = (
            ' (restore_dtype casts)'
            if request.cast is None
            else ', since restore_dtype and cast_leaves do not change them'
        )
        _log.warning('t5ckpt: restored as in the checkpoint%s: %s', how, some_of(plan.notes, 5, '; '))
    if plan.resized:
        _log.warning('t5ckpt: padded with zeros or truncated: %s', some_of(plan.resized, 20, '; '))
    elif request.call.resize:
        _log.info('t5ckpt: resize=%r: every leaf has the shape of the template', request.call.resize.patterns)
    if plan.ignored:
        # A template for inference omits the optimizer state on purpose. Omitted parameters are worth a warning.
        named = sorted(plan.ignored, key=lambda path: path[0] not in _PARAMETERS)
        log = _log.warning if named[0][0] in _PARAMETERS else _log.info
        log('t5ckpt: %d leaves that the template does not have were left out: %s', len(named), _listed(named))
    if plan.skipped and request.call.only is None:
        _log.info('t5ckpt: left out, the template has ... there: %s', _listed(plan.skipped))


def _listed(paths: Sequence[Path]) -> str:
    """Names of leaves for the log, shortened to one line."""
    return some_of([leaf_name(path) for path in paths], 20, ', ')


def _unused_options(request: RestoreRequest, located: Located, template: LeafTable, fallback: LeafTable) -> list[str]:
    """Describes the options that have no effect in this restore, for warnings."""
    texts: list[str] = []
    unknown = [path for path in fallback if path not in template]
    if unknown:
        roots = some_of(list(dict.fromkeys(path[0] for path in template)), 8)
        texts.append(
            f'fallback_state holds leaves that the template lacks: {_listed(unknown)}. Correct their names; the template '
            f'begins with {roots}.'
        )
    if request.call.donate and not any(is_jax_array(leaf) for leaf in template.values()):
        texts.append('donate has no effect: the template holds no jax.Array. Leave it out.')
    if located.storage.local_path('') is None:
        where = located.storage.url()
        if request.reading.mmap:
            texts.append(
                f'mmap has no effect: {where} is not on a local file system, so its files are read. Leave it out.'
            )
        if request.reading.follow_links:
            texts.append(no_links_text(located))
    return texts


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


def _values(
    reader: ArrayReader, plan: RestorePlan, request: RestoreRequest, final_shardings: dict[Path, Any]
) -> LeafTable:
    """Reads the leaves; adds to ``final_shardings`` those that remain to be gathered, see ``restore/all_gather.py``."""
    values: LeafTable = {read.path: make_inline_leaf(read) for read in plan.inline}
    reads, split = in_parts(plan.stored, request.round.processes.count if request.reading.share_replicated else 1)
    final_shardings |= split
    budget = ByteBudget(request.reading.budget_bytes)
    values |= read_arrays(reader, reads, budget, request.progress)
    _log.info('t5ckpt: read %d arrays, at most %d bytes of them in flight at once', len(reads), budget.peak)
    return values


def _lazy_values(reader: ArrayReader, plan: RestorePlan) -> LeafTable:
    values: LeafTable = {
        read.path: make_inline_leaf(read) if read.target.kind == 'scalar' else _lazy(reader, read, read.value)
        for read in plan.inline
    }
    return values | {read.path: _lazy(reader, read, read.leaf) for read in plan.stored}


def _lazy(reader: ArrayReader, read: StoredRead | InlineRead, leaf: Any) -> LazyArray:
    found = lazy_leaf(reader, leaf, read.name, read.dtype)
    shape = read.target.shape
    return LazyThreadPoolArray(shape, read.dtype, lambda: resized(found.get(), shape)) if read.resizes else found


def _fallback_value(request: RestoreRequest, path: Path, value: Any, target: LeafTemplate) -> Any:
    """A fallback value, placed as the template asks; jax.Arrays stay on their devices."""
    to_template = request.cast is not None and request.cast.dtype is None
    array = value if is_jax_array(value) else np.asarray(value.get() if isinstance(value, LazyArray) else value)
    casts = to_template and isinstance(array.dtype, np.dtype)
    dtype = cast_dtype(path, array.dtype, request.cast, target.dtype) if casts else array.dtype
    if is_jax_array(array):
        return array if array.dtype == dtype else array.astype(dtype)
    return make_inline_leaf(InlineRead(path, leaf_name(path), array, target, dtype))

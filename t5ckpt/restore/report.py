"""Reports casts, left-out leaves and unused options before a restore reads: in the log, and as warnings at the caller's line."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from t5ckpt.catalog.locate import Located, no_links_text
from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.leaf_path import PARAMETER_ROOTS, Path, leaf_name
from t5ckpt.core.text import counted, some_of
from t5ckpt.errors import NarrowedDtypeWarning, NoEffectWarning, UnshardedTemplateWarning
from t5ckpt.planning.leaf_reads import InlineRead, StoredRead
from t5ckpt.planning.restore_plan import RestorePlan
from t5ckpt.reading.contents import Contents
from t5ckpt.restore.request import RestoreRequest
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.leaves import canonical_dtype, is_abstract, is_jax_array

_WIDE_BYTES = 8
_SHOWN = 5
_log = logging.getLogger('t5ckpt')


def report_plan(
    plan: RestorePlan, request: RestoreRequest, contents: Contents, template: LeafTable, fallback: LeafTable
) -> None:
    """Logs and warns of results that the caller may not expect.

    Args:
      plan: of the restore.
      request: of the caller.
      contents: of the checkpoint.
      template: the template's leaves.
      fallback: the leaves of ``fallback_state``.
    """
    _log_plan(plan, request, template)
    if request.round.is_leader:
        for text in _unused_options(request, contents.located, template, fallback):
            warn_caller(NoEffectWarning(text))
    warn_if_narrowed(plan)
    if not request.lazy:
        _warn_if_unsharded(plan, request, template, contents.facts.devices or 1)


def _log_plan(plan: RestorePlan, request: RestoreRequest, template: LeafTable) -> None:
    """Logs the leaves that differ from the checkpoint: not cast, resized, or left out."""
    if plan.notes:
        how = (
            ' (restore_dtype casts floating leaves)'
            if request.cast is None
            else ', since restore_dtype and cast_leaves do not change them'
        )
        _log.warning('t5ckpt: restored as in the checkpoint%s: %s', how, some_of(plan.notes, 5, '; '))
    if plan.resized:
        _log.warning('t5ckpt: padded with zeros or truncated: %s', some_of(plan.resized, 20, '; '))
    elif request.choice.resize is not None:
        _log.info('t5ckpt: resize=%r: every leaf has the shape of the template', request.choice.resize)
    if plan.ignored:
        # A template for inference omits the optimizer state, or takes an average in place of all parameters, on purpose.
        # Some omitted parameters are worth a warning.
        warned = {path[0] for path in template}.intersection(PARAMETER_ROOTS)
        named = sorted(plan.ignored, key=lambda path: path[0] not in warned)
        is_meant = request.strict == 'contains' and named[0][0] not in warned
        log = _log.info if is_meant else _log.warning
        count = counted(len(named), 'leaf', 'leaves')
        log('t5ckpt: left out %s that the template does not have: %s', count, _listed(named))
    if plan.absent:
        _log.warning("t5ckpt: not in the checkpoint, so the template's text or ... stays: %s", _listed(plan.absent))
    if plan.fallback:
        filled = _listed([read.path for read in plan.fallback])
        count = counted(len(plan.fallback), 'leaf', 'leaves')
        _log.info('t5ckpt: %s as given (fallback_state, init_fn), not from the checkpoint: %s', count, filled)
    if plan.skipped:
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
    if request.donate and not any(is_jax_array(leaf) for leaf in template.values()):
        texts.append('donate has no effect: the template holds no jax.Array. Leave it out.')
    if not located.storage.is_file_system:
        where = located.storage.url()
        if request.reading.mmap:
            texts.append(
                f'mmap has no effect: {where} is not on a local file system, so its files are read. Leave it out.'
            )
        if request.reading.follow_links:
            texts.append(no_links_text(located))
    return texts


def warn_if_narrowed(plan: RestorePlan) -> None:
    """Warns of 64-bit leaves that JAX narrows to 32 bits on a device, which JAX itself does silently."""
    wide = [
        read for read in (*plan.stored, *plan.inline) if read.template.device and read.dtype.itemsize >= _WIDE_BYTES
    ]
    names = [f'{r.name} ({r.dtype.name})' for r in wide if not _fits(r, canonical_dtype(r.dtype))]
    if names:
        warn_caller(
            NarrowedDtypeWarning(
                f'{some_of(names, _SHOWN)}: JAX narrows these to 32 bits on a device. Set jax_enable_x64, or restore to numpy, '
                'to keep all bits.'
            )
        )


def _fits(read: StoredRead | InlineRead, dtype: np.dtype) -> bool:
    """Whether ``dtype`` holds the value exactly; the values of inline leaves, such as a step, are known here."""
    if read.dtype == dtype or not isinstance(read, InlineRead):
        return read.dtype == dtype
    value = np.asarray(read.value)
    return value.size == 0 or (read.dtype.kind in 'iu' and bool((value.astype(dtype) == value).all()))


def _warn_if_unsharded(plan: RestorePlan, request: RestoreRequest, template: LeafTable, saved_over: int) -> None:
    """Warns of leaves for which the template names no devices.

    Each process of a job gets its own array of such a leaf. In a single process it is put on one device, which gives one warning
    if the leaf is abstract, and was saved from several. A scalar needs no sharding, since JAX moves it to the devices of the
    computation. A NumPy array in the template is restored as an array on the host.

    Args:
      plan: of the restore.
      request: of the caller.
      template: the template's leaves.
      saved_over: ``devices`` in the facts.
    """
    reads = [read for read in (*plan.stored, *plan.inline) if read.template.device and read.template.sharding is None]
    if not request.round.is_single_process:
        if reads:
            warn_caller(
                UnshardedTemplateWarning(
                    f'{some_of([read.name for read in reads], _SHOWN)}: the template gives no sharding over the devices of all '
                    'processes, so each process gets a separate array, which the next save refuses. Give the leaves of the '
                    'template global shardings: jax.ShapeDtypeStruct(shape, dtype, sharding=...).'
                )
            )
        return
    import jax

    names = [read.name for read in reads if read.template.shape and is_abstract(template[read.path])]
    if names and saved_over > 1 and jax.device_count() > 1:
        text = (
            f'{some_of(names, _SHOWN)}: the template names no sharding, so each is restored to one device; the checkpoint was '
            f'saved from {saved_over} devices. Attach shardings to the template: jax.eval_shape(jax.jit(init, '
            'out_shardings=...)), or jax.ShapeDtypeStruct(shape, dtype, sharding=...). If one device is meant: '
            'sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]). If the host is meant, as for jax.pmap: NumPy arrays.'
        )
        request.notices.warn('unsharded', UnshardedTemplateWarning(text))

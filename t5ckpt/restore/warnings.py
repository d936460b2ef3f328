"""Warnings of a restore, given at the caller's line."""

from __future__ import annotations

import numpy as np

from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.notices import Notices
from t5ckpt.core.text import some_of
from t5ckpt.errors import NarrowedDtypeWarning, UnshardedTemplateWarning
from t5ckpt.planning.restore_plan import InlineRead, RestorePlan, StoredRead
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.leaves import canonical_dtype, is_abstract
from t5ckpt.tree.train_state import unsharded_warning

_WIDE_BYTES = 8
_SHOWN = 5


def warn_if_narrowed(plan: RestorePlan) -> None:
    """Warns of 64-bit leaves that JAX narrows to 32 bits on a device, which JAX itself does silently."""
    wide = [read for read in (*plan.stored, *plan.inline) if read.target.device and read.dtype.itemsize >= _WIDE_BYTES]
    if not wide:
        return
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


def warn_if_local(plan: RestorePlan) -> None:
    """Warns of leaves that each process of a job restores separately, since their sharding does not cover all processes."""
    reads = [read for read in (*plan.stored, *plan.inline) if read.target.device]
    local = [read.name for read in reads if read.target.sharding is None or read.target.sharding.is_fully_addressable]
    if local:
        warn_caller(
            UnshardedTemplateWarning(
                f'{some_of(local, _SHOWN)}: the template gives no sharding over the devices of all processes, so each process '
                'gets a separate array, which the next save refuses. Give the leaves of the template global shardings: '
                'jax.ShapeDtypeStruct(shape, dtype, sharding=...).'
            )
        )


def warn_if_unsharded(plan: RestorePlan, template: LeafTable, saved_over: int | None, notices: Notices) -> None:
    """Warns once of abstract leaves without a sharding, if the checkpoint was saved from several devices.

    A scalar needs no sharding, since JAX moves it to the devices of the computation. A NumPy array in the template asks for
    an array on the host.

    Args:
      plan: of a restore in a job of one process.
      template: the template's leaves.
      saved_over: the sidecar's ``devices``.
      notices: of the checkpointer.
    """
    if saved_over is None or saved_over < 2:
        return
    names = [
        read.name
        for read in (*plan.stored, *plan.inline)
        if read.target.device
        and read.target.sharding is None
        and read.target.shape
        and is_abstract(template[read.path])
    ]
    if names and _device_count() > 1:
        warning = unsharded_warning(
            f'{some_of(names, _SHOWN)}: the template names no sharding, so each is restored to one device; the checkpoint was '
            f'saved from {saved_over} devices.'
        )
        notices.warn('unsharded', warning)


def _device_count() -> int:
    import jax

    return jax.device_count()

"""What a restore says when it does something other than was meant: warnings at the caller's line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.leaf_path import leaf_name
from t5ckpt.core.text import some_of
from t5ckpt.errors import NarrowedDtypeWarning, NoEffectWarning, UnshardedTemplateWarning
from t5ckpt.planning.restore_plan import InlineRead, RestorePlan, StoredRead
from t5ckpt.save.notices import Notices
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.leaf_values import is_abstract
from t5ckpt.tree.template import canonical_dtype

__all__ = ['warn_if_local', 'warn_if_narrowed', 'warn_if_unsharded', 'warn_of_idle']

_WIDE_BYTES = 8
_SHOWN = 5


def warn_of_idle(texts: Sequence[str]) -> None:
    """Warns of what the caller asked for and this restore has no use for."""
    for text in texts:
        warn_caller(NoEffectWarning(text))


def warn_if_narrowed(plan: RestorePlan) -> None:
    """JAX puts 64-bit arrays on devices as 32-bit ones unless told otherwise, and says nothing when it is asked to."""
    wide = [read for read in (*plan.stored, *plan.inline) if read.target.device and read.dtype.itemsize >= _WIDE_BYTES]
    if not wide:
        return
    names = [f'{leaf_name(r.path)} ({r.dtype.name})' for r in wide if not _fits(r, canonical_dtype(r.dtype))]
    if names:
        warn_caller(
            NarrowedDtypeWarning(
                f'{some_of(names, _SHOWN)}: JAX narrows these to 32 bits on a device. Set jax_enable_x64, or restore to numpy, '
                'to keep all bits.'
            )
        )


def _fits(read: StoredRead | InlineRead, dtype: np.dtype) -> bool:
    """Whether no bit is lost in ``dtype``: a Python int that counts steps, say, is at hand to look at."""
    if read.dtype == dtype or not isinstance(read, InlineRead):
        return read.dtype == dtype
    value = np.asarray(read.value)
    return value.size == 0 or (read.dtype.kind in 'iu' and bool((value.astype(dtype) == value).all()))


def warn_if_local(plan: RestorePlan) -> None:
    """In a job of several processes each gets arrays of its own where the model names no sharding over all of them."""
    reads = [read for read in (*plan.stored, *plan.inline) if read.target.device]
    local = [
        leaf_name(read.path)
        for read in reads
        if read.target.sharding is None or read.target.sharding.is_fully_addressable
    ]
    if local:
        warn_caller(
            UnshardedTemplateWarning(
                f'{some_of(local, _SHOWN)}: the model gives no sharding over the devices of all processes, so each process gets '
                'an array of its own, which the next save refuses. Give the leaves of the model global shardings: '
                'jax.ShapeDtypeStruct(shape, dtype, sharding=...).'
            )
        )


def warn_if_unsharded(plan: RestorePlan, template: LeafTable, saved_over: Any, notices: Notices) -> None:
    """Warns of abstract leaves without a sharding, once, where the checkpoint was saved from several devices.

    A scalar goes with whatever it is computed with, so it needs no sharding. Arrays of NumPy in the template ask for the
    host.

    Args:
      plan: of a restore in a job of one process.
      template: the model's leaves.
      saved_over: the sidecar's ``devices``; anything where a stranger wrote it.
      notices: of the checkpointer.
    """
    if not isinstance(saved_over, int) or saved_over < 2:
        return
    names = [
        leaf_name(read.path)
        for read in (*plan.stored, *plan.inline)
        if read.target.device
        and read.target.sharding is None
        and read.target.shape
        and is_abstract(template[read.path])
    ]
    if names and _device_count() > 1:
        notices.unsharded(
            f'{some_of(names, _SHOWN)}: the template names no sharding, so each is restored to one device; the checkpoint was '
            f'saved from {saved_over} devices.'
        )


def _device_count() -> int:
    import jax

    return jax.device_count()

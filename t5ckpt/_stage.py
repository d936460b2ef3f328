"""Staging: making the state safe before the caller goes on.

After ``stage`` returns, the caller may donate, overwrite or drop every array of the state. How a leaf is made safe
depends on where it lies:

- ``view``: arrays on the CPU backend are viewed as numpy without a copy. A buffer with an outside reference cannot be
  donated in place, so XLA allocates anew for the step's output and the view stays as it was. The view waits for the
  array to be computed.
- ``copy``: a device-side copy is dispatched and nothing is waited for; the copy is ordered before any later step that
  donates the original. Costs the state's size in device memory until it is written.
- ``pinned_host``: the same, but the copy goes to pinned host memory, which is where a GPU or TPU writes fastest.

``auto`` takes views on the CPU when the arrays are there already and a dispatched copy when they are still being
computed, and pinned host memory elsewhere.

Host arrays are copied for an asynchronous save, since their owner may write into them, and used as they are for a
blocking one. A LazyArray is read when its turn to be written comes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from t5ckpt._plan import ArrayWrite, InlineWrite, SavePlan
from t5ckpt._types import Path
from t5ckpt.lazy import LazyArray

__all__ = ['STAGING_MODES', 'Source', 'StagedSave', 'stage']

STAGING_MODES = ('auto', 'copy', 'pinned_host', 'view')


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the values of one stored leaf come from: host views per shard, a staged copy, or a lazy array."""

    leaf: Any
    views: tuple[np.ndarray | None, ...] = ()

    def shard(self, index: int) -> np.ndarray:
        """The values of one addressable shard, or of the whole leaf for -1. May wait for a transfer or a read."""
        if index < 0:
            return np.asarray(self.leaf.get() if isinstance(self.leaf, LazyArray) else self.leaf)
        view = self.views[index] if self.views else None
        return np.asarray(self.leaf.addressable_shards[index].data) if view is None else view


@dataclasses.dataclass(frozen=True)
class StagedSave:
    """A plan whose values no longer depend on the caller's state.

    Attributes:
      plan: what to write.
      sources: for each stored leaf.
      inline: values of the inline leaves, still on the device where ``stage`` only dispatched their copy.
    """

    plan: SavePlan
    sources: dict[Path, Source]
    inline: dict[Path, Any]

    def inline_values(self) -> dict[Path, Any]:
        """The inline leaves as numpy, after their cast; waits for their transfer."""
        return {write.path: _as_inline(write, self.inline[write.path]) for write in self.plan.inline}


def stage(plan: SavePlan, mode: str = 'auto', *, private_host: bool = True) -> StagedSave:
    """Stages a plan's leaves.

    Args:
      plan: from ``plan_save``.
      mode: one of ``STAGING_MODES``.
      private_host: whether numpy leaves are copied, for a save that outlives the call.
    """
    if mode not in STAGING_MODES:
        raise ValueError(f'staging must be one of {STAGING_MODES}, got {mode!r}')
    moved = _copied([*plan.writes, *plan.inline], mode)
    sources: dict[Path, Source] = {}
    for write in plan.writes:
        if write.path in moved:
            sources[write.path] = Source(moved[write.path])
        elif hasattr(write.leaf, 'addressable_shards'):
            sources[write.path] = Source(write.leaf, _views(write))
        else:
            sources[write.path] = Source(_host(write.leaf, private_host))
    inline = {write.path: moved.get(write.path, _inline_source(write.leaf, private_host)) for write in plan.inline}
    return StagedSave(plan, sources, inline)


def _views(write: ArrayWrite) -> tuple[np.ndarray | None, ...]:
    wanted = {piece.shard for piece in write.pieces}
    shards = write.leaf.addressable_shards
    return tuple(np.asarray(shard.data) if index in wanted else None for index, shard in enumerate(shards))


def _host(leaf: Any, private: bool) -> Any:
    if isinstance(leaf, LazyArray) or not private:
        return leaf
    return np.array(leaf)


def _inline_source(leaf: Any, private: bool) -> Any:
    if leaf is None or not hasattr(leaf, 'addressable_shards'):
        return None if leaf is None else _host(leaf, private)
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    return np.asarray(leaf.addressable_data(0))


def _copied(writes: Sequence[ArrayWrite | InlineWrite], mode: str) -> dict[Path, Any]:
    """Dispatches the copies that ``mode`` asks for; leaves that need none are left out."""
    arrays = {write.path: write.leaf for write in writes if hasattr(write.leaf, 'addressable_shards')}
    chosen = {path: _mode_of(array, mode) for path, array in arrays.items()}
    to_copy = {path: array for path, array in arrays.items() if chosen[path] == 'copy'}
    to_pin = {path: array for path, array in arrays.items() if chosen[path] == 'pinned_host'}
    moved: dict[Path, Any] = {}
    if to_copy:
        moved |= dict(zip(to_copy, _device_copies(list(to_copy.values())), strict=True))
    if to_pin:
        moved |= dict(zip(to_pin, _pinned_copies(list(to_pin.values())), strict=True))
    return moved


def _mode_of(array: Any, mode: str) -> str:
    if mode != 'auto':
        return mode
    platform = next(iter(array.sharding.device_set)).platform
    if platform != 'cpu':
        return 'pinned_host'
    return 'view' if array.is_ready() else 'copy'


def _device_copies(arrays: list[Any]) -> list[Any]:
    import jax
    import jax.numpy as jnp

    return jax.tree.map(jnp.copy, arrays)


def _pinned_copies(arrays: list[Any]) -> list[Any]:
    import jax

    return jax.device_put(arrays, [array.sharding.with_memory_kind('pinned_host') for array in arrays])


def _as_inline(write: InlineWrite, value: Any) -> Any:
    """A numpy array or scalar as T5X expects it in the manifest; never a Python number."""
    if value is None:
        return None
    if isinstance(value, LazyArray):
        value = value.get()
    array = np.asarray(value)
    if write.dtype is not None and array.dtype != write.dtype:
        array = array.astype(write.dtype)
    was_scalar = isinstance(write.leaf, (bool, int, float, complex, np.generic))
    return array[()] if was_scalar else np.ascontiguousarray(array).reshape(array.shape)

"""Applies the caller's save transforms to the state dict and its parameter infos.

``LeafAxes.t5x_inlines`` says which leaves T5X would write into the manifest: those whose mesh axes are None. After the
transforms it is computed from the parameter infos that they returned.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.protocols import ParameterInfo, Partitioner
from t5ckpt.core.text import some_of
from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.format.array_spec import StoredArray, spec_of
from t5ckpt.format.dtypes import stored_dtype
from t5ckpt.planning.chunk_shape import DEFAULT_CHUNK_BYTES, choose_chunks
from t5ckpt.tree.leaf_table import LeafTable, flatten_nested, lookup, unflatten
from t5ckpt.tree.train_state import axes_tree, flatten_state

_UNKNOWN = object()


class LeafAxes:
    """The mesh axes that a partitioner gives to the leaves of a template; computed once, as in T5X's constructor.

    A leaf without axes has no entry; the saved state may hold more leaves than the template.
    """

    def __init__(self, partitioner: Partitioner | None, template: Any):
        """Stores its arguments; the partitioner is called on first use."""
        self.partitioner = partitioner
        self.template = template

    @functools.cached_property
    def by_path(self) -> dict[Path, Any]:
        """By path of each leaf that is an array, its PartitionSpec, or None."""
        if self.partitioner is None:
            return {}
        tree = axes_tree(self.partitioner, self.template)
        paths = [path for path, leaf in flatten_state(self.template).table.items() if hasattr(leaf, 'shape')]
        axes_by_path = {path: lookup(tree, path, _UNKNOWN) for path in paths}
        return {path: axes for path, axes in axes_by_path.items() if axes is not _UNKNOWN}

    @functools.cached_property
    def t5x_inlines(self) -> dict[Path, bool]:
        """By path, whether T5X writes the leaf into the manifest, which it does if the axes are None."""
        return {path: axes is None for path, axes in self.by_path.items()}

    def info(self, path: Path, leaf: Any) -> ParameterInfo:
        """The parameter info of an array, which save transforms get along with the leaf."""
        name, shape = leaf_name(path), tuple(leaf.shape)
        axes = self.by_path.get(path, _UNKNOWN)
        if axes is None:
            return ParameterInfo(name, shape)
        spec = functools.partial(_array_spec, name, shape, leaf.dtype)
        if axes is _UNKNOWN:
            return ParameterInfo(name, shape, spec)
        chunk_info = getattr(self.partitioner, 'get_local_chunk_info', None)
        local = None if chunk_info is None else functools.partial(chunk_info, shape, axes)
        return ParameterInfo(name, shape, spec, local, axes)


def _array_spec(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """The spec of a leaf's array as T5X makes it before a save: relative, without the decisions of the save."""
    import tensorstore as ts

    on_disk = stored_dtype(np.dtype(dtype)) if isinstance(dtype, np.dtype) else np.dtype(np.uint32)
    metadata = {'chunks': choose_chunks(shape, on_disk.itemsize, DEFAULT_CHUNK_BYTES), 'compressor': None}
    return ts.Spec(spec_of(StoredArray(name.replace('/', '.'), shape, on_disk, on_disk, metadata), 'file'))


def transformed(
    table: LeafTable, axes: LeafAxes, transforms: Sequence[Any]
) -> tuple[LeafTable, Mapping[Path, ParameterInfo], Mapping[Path, bool]]:
    """The leaves after the transforms, their infos, and for those of which it is known, whether T5X writes them inline.

    Raises:
      UnsupportedLeafError: a transform returned something else than two mappings, or the info of a leaf that it dropped.
    """
    if not transforms:
        # Without transforms each leaf is its own info.
        return table, {}, axes.t5x_inlines
    state: Any = unflatten(table)
    # Leaves without an array (None, numbers, empty) have None for an info, as in T5X.
    tree: Any = unflatten(
        {path: axes.info(path, leaf) if hasattr(leaf, 'shape') else None for path, leaf in table.items()}
    )
    for fn in transforms:
        made = fn(state, tree)
        if not isinstance(made, tuple | list) or [isinstance(part, Mapping) for part in made] != [True, True]:
            raise UnsupportedLeafError(
                f'{getattr(fn, "__name__", fn)!r:.80}: a state transformation must return the new state dict and the new '
                f'parameter infos, got {made!r:.80}.'
            )
        state, tree = made
    leaves = flatten_nested(state)
    moved = flatten_nested(tree)
    infos = {path: info for path, info in moved.items() if isinstance(info, ParameterInfo)}
    stray = [path for path in infos if path not in leaves]
    if stray:
        raise UnsupportedLeafError(
            'the parameter infos that the state transformations returned name leaves that the state dict lacks: '
            f'{some_of([leaf_name(path) for path in stray], 5)}. A function that moves or drops a leaf does so with its info.'
        )
    if axes.partitioner is None:
        return leaves, infos, {}
    kept_infos = {path: info for path, info in moved.items() if info is None or path in infos}
    return leaves, infos, {path: info is None or not info.is_stored for path, info in kept_infos.items()}

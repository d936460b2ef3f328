"""Loads a checkpoint without a template, as nested dicts of numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.core.byte_budget import ByteBudget
from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.protocols import RestoreStateTransformationFn
from t5ckpt.core.thread_pool import Pool
from t5ckpt.errors import NoEffectWarning
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.dtypes import cast as cast_values
from t5ckpt.format.facts import TreeFacts
from t5ckpt.options import CheckpointerOptions
from t5ckpt.planning.casts import Cast, cast_dtype, check_cast
from t5ckpt.planning.leaf_reads import StoredRead
from t5ckpt.reading.array_reader import ArrayReader, lazy_leaf, open_contents, reader_of
from t5ckpt.reading.contents import leaves_of
from t5ckpt.restore.read_arrays import read_arrays
from t5ckpt.storage import PathOrStorage
from t5ckpt.tree.leaf_table import LeafTable, unflatten
from t5ckpt.tree.leaves import LeafTemplate

__all__ = ['load_t5x_checkpoint']

# The most bytes of reads in flight, in addition to the result.
_IN_FLIGHT_BYTES = 4 * 2**30
_PYTHON: Mapping[str, type] = {'int': int, 'float': float, 'bool': bool, 'complex': complex}


def load_t5x_checkpoint(
    path: PathOrStorage,
    step: int | None = None,
    state_transformation_fns: Sequence[RestoreStateTransformationFn] = (),
    remap: bool = True,
    restore_dtype: Any = None,
    lazy_parameters: bool = False,
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: CheckpointerOptions = CheckpointerOptions(),
) -> dict[str, Any]:
    """Loads a checkpoint for analysis. The signature is T5X's, with the additional parameters from ``storage_options`` on.

    Args:
      path: a run's directory, a step's directory, or the manifest file; or a Storage with one of the first two as its root.
      step: which step, if ``path`` is a run's directory; None takes the latest.
      state_transformation_fns: called in order with (state, {}) before arrays are read, see :meth:`Checkpointer.restore`.
      remap: False skips the transformations, as in T5X, with a warning if there are any.
      restore_dtype: floating leaves of ``target`` and ``params`` are cast to it.
      lazy_parameters: returns LazyArrays, which are read by ``get``.
      storage_options: see docs/storage.md.
      options: ``verify``, ``mmap``, ``follow_links`` and ``cast_leaves`` are used. Arrays of one chunk that are mapped are read
        on access; they are writable, and writes stay in memory.

    Returns:
      Nested dicts, with the keys '0', '1', ... for lists and tuples; leaves are NumPy arrays or scalars, LazyArrays, None, or
      empty containers. Python numbers and strings are restored if the facts record them; typed PRNG keys are returned as their
      uint32 data.

    Raises:
      CheckpointNotFoundError: no such checkpoint.
      UnmatchedPattern: the cast applies to no leaf.
      FormatError: the checkpoint is damaged, or in another format.
      StorageError: the checkpoint cannot be read.
    """
    cast = Cast.of(restore_dtype, options.cast_leaves, 'restore_dtype')
    if state_transformation_fns and not remap:
        text = 'state_transformation_fns has no effect with remap=False, as in T5X. Leave one of them out.'
        warn_caller(NoEffectWarning(text))
    contents = open_contents(path, step, storage_options, options)
    contents.check_not_part()
    leaves, tree_facts = leaves_of(contents, state_transformation_fns if remap else (), {})
    reader = reader_of(contents, options)
    check_cast(cast, leaves)
    if lazy_parameters:
        table = {path: _lazy(reader, path, leaf, cast, tree_facts) for path, leaf in leaves.items()}
    else:
        with contents.identity.reading():
            table = _read_all(reader, leaves, cast, tree_facts)
    return unflatten(table)


def _lazy(reader: ArrayReader, path: Path, leaf: Any, cast: Cast | None, tree_facts: TreeFacts) -> Any:
    if not hasattr(leaf, 'dtype') or path in tree_facts.python:
        return _inline(path, leaf, cast, tree_facts)
    return lazy_leaf(reader, leaf, leaf_name(path), cast_dtype(path, np.dtype(leaf.dtype), cast))


def _read_all(reader: ArrayReader, leaves: LeafTable, cast: Cast | None, tree_facts: TreeFacts) -> LeafTable:
    reads = [
        StoredRead(
            path,
            leaf_name(path),
            leaf,
            LeafTemplate('array', leaf.shape, leaf.dtype),
            cast_dtype(path, leaf.dtype, cast),
        )
        for path, leaf in leaves.items()
        if isinstance(leaf, StoredArray)
    ]
    # In another thread, because an event loop may be running in the caller's.
    with Pool(1) as executor:
        values = executor.submit(read_arrays, reader, reads, ByteBudget(_IN_FLIGHT_BYTES)).result()
    return {
        path: values[path] if path in values else _inline(path, leaf, cast, tree_facts) for path, leaf in leaves.items()
    }


def _inline(path: Path, leaf: Any, cast: Cast | None, tree_facts: TreeFacts) -> Any:
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return leaf
    python = _PYTHON.get(tree_facts.python.get(path, ''))
    if python is not None and np.ndim(leaf) == 0:
        return python(np.asarray(leaf)[()])
    dtype = cast_dtype(path, leaf.dtype, cast)
    # A copy, because the decoded array is a read-only view of the manifest's bytes.
    return cast_values(leaf, dtype, leaf_name(path)).copy()

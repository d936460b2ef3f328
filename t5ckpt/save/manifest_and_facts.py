"""The manifest and the facts of a save, from what all processes wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.commit.transaction import Transaction
from t5ckpt.core.gc_pause import paused
from t5ckpt.core.leaf_path import Path
from t5ckpt.errors import SaveFailedError, StepMismatchWarning
from t5ckpt.format.array_spec import StoredArray, spec_of
from t5ckpt.format.dtypes import cast
from t5ckpt.format.facts import Facts
from t5ckpt.format.file_checksums import FileEntry
from t5ckpt.format.manifest import encode_manifest
from t5ckpt.format.names import MANIFEST, file_checksums_name
from t5ckpt.lazy import LazyArray
from t5ckpt.planning.save_plan import InlineWrite
from t5ckpt.save.prepare import PreparedSave
from t5ckpt.save.request import SaveRequest
from t5ckpt.save.staged_leaf import values_of, whole_value
from t5ckpt.tree.leaf_table import LeafTable, unflatten
from t5ckpt.tree.leaves import is_jax_array
from t5ckpt.tree.train_state import OWN_STEPS


def manifest_bytes(save: PreparedSave, arrays: Mapping[Path, StoredArray]) -> bytes:
    """The manifest: the staged inline leaves as numpy, after their cast, and specs of the arrays."""
    # Waits for the transfer of the inline leaves.
    table = {write.path: _as_inline(write, value) for write, value in save.staging.inline}
    table |= {path: spec_of(array, save.request.context.storage.driver) for path, array in arrays.items()}
    _warn_of_other_step(save.request, table)
    with paused():
        return encode_manifest(unflatten(table))


def _warn_of_other_step(request: SaveRequest, table: LeafTable) -> None:
    """Warns if the step in the state differs from the step that it is saved as; a restored run continues from the former.

    Checked here because the step has been transferred; in the caller's thread the check would wait for the device.
    """
    if not request.round.is_leader or not request.names_step:
        return
    value = np.asarray(next((table[path] for path in OWN_STEPS if path in table), None))
    if value.shape == () and value.dtype.kind in 'iu' and int(value) != request.step:
        text = (
            f'the state is saved as step {request.step}, but holds step {value}, from which a restored run continues. '
            f'Save it with save(state), or set the step in it to {request.step}.'
        )
        request.context.notices.warn('step', StepMismatchWarning(text), request.site)


def _as_inline(write: InlineWrite, value: Any) -> Any:
    """The value as T5X expects it in the manifest: a numpy array or scalar, never a Python number."""
    if value is None:
        return None
    if write.value is None and type(value) is np.ndarray and value.dtype == write.dtype and value.flags.c_contiguous:
        # First, because most leaves are arrays that are not cast.
        return value
    if isinstance(value, LazyArray):
        value = values_of(value, write.name)
    elif is_jax_array(value):
        value = whole_value(value)
    array = np.asarray(value)
    if write.dtype is not None:
        array = cast(array, write.dtype, write.name)
    was_scalar = isinstance(write.value, (bool, int, float, complex, np.generic))
    return array[()] if was_scalar else np.ascontiguousarray(array).reshape(array.shape)


def facts_of_save(
    save: PreparedSave, work: Transaction, votes: Sequence[Any], arrays: Mapping[Path, StoredArray], manifest: FileEntry
) -> tuple[Facts, int]:
    """The facts of what all processes wrote, and the bytes of all files.

    Raises:
      SaveFailedError: the files are not those of the arrays.
    """
    files = {MANIFEST: manifest}
    files |= {file_checksums_name(index): tuple(vote['checksums']) for index, vote in enumerate(votes)}
    nbytes, count = (sum(vote[key] for vote in votes) for key in ('bytes', 'files'))
    expected = sum(1 + array.grid.num_chunks for array in arrays.values())
    if count != expected:
        raise SaveFailedError(
            f'all processes together wrote {count} files, but the arrays have {expected}; nothing is committed.'
        )
    facts = work.facts(dataclasses.replace(save.facts, bytes=nbytes, files=count), files)
    return facts, nbytes + sum(size for size, _ in files.values())

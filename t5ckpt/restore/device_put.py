"""Host buffers to where a model wants them: a jax.Array of any sharding, a numpy array, a number.

Buffers that begin at a multiple of 64 bytes are taken over by the CPU backend without a copy. They count as immutable
there: a step that donates such an array computes into new memory.

A sharded array is made in one call for all its shards (``jax.make_array_from_callback``), 35 us for four; a
``jax.device_put`` for each and ``make_array_from_single_device_arrays`` take 130 us.

``jax.device_put`` of a numpy array with such an address, and ``jax.dlpack.from_dlpack``, make a jax.Array of memory that its
owner may still write to. JAX does not say which arrays these are, but it notes the Python frames in which a buffer was made,
and a view of the buffer has the same note: :func:`is_private` reads it, in 1 us.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.core.leaf_path import leaf_name
from t5ckpt.core.private_memory import makes_private
from t5ckpt.errors import CorruptCheckpointError, DtypeMismatch, LeafProblem
from t5ckpt.format.chunk_grid import Box
from t5ckpt.planning.device_boxes import boxes_wanted
from t5ckpt.planning.resizing import resized
from t5ckpt.planning.restore_plan import InlineRead
from t5ckpt.reading.array_reader import aligned_empty
from t5ckpt.tree.leaf_values import as_instance, base_number
from t5ckpt.tree.template import LeafTemplate, canonical_dtype

__all__ = ['check_fit', 'device_put', 'device_put_value']

_NARROW_BYTES = 4
# Up to this size it costs less to let JAX copy than to make an aligned buffer that it takes over.
_SMALL_BYTES = 64 * 1024


def check_fit(values: np.ndarray, name: str) -> None:
    """Raises where JAX would narrow integers to others without a word.

    Raises:
      DtypeMismatch: with one of them.
    """
    narrow = (
        canonical_dtype(values.dtype)
        if values.dtype.kind in 'iu' and values.dtype.itemsize > _NARROW_BYTES
        else values.dtype
    )
    if narrow == values.dtype:
        return
    wrong = values[values.astype(narrow) != values]
    if wrong.size:
        raise DtypeMismatch(
            f'{name}: holds {wrong.flat[0]}, and JAX puts {values.dtype.name} on a device as {narrow.name}, which has no such '
            'number. Set jax_enable_x64, or restore this leaf to numpy: give the model a numpy array there.',
            (LeafProblem(name, 'dtype', values.dtype.name, narrow.name),),
        )


@makes_private
def device_put(
    hosts: Mapping[Box, np.ndarray], target: LeafTemplate, shape: tuple[int, ...], dtype: np.dtype, name: str
) -> Any:
    """Hands a leaf's buffers to where its target wants them.

    Args:
      hosts: a buffer for each of ``boxes_wanted``; not to be written to afterwards.
      target: of the leaf.
      shape: of the whole leaf.
      dtype: of the result, which a process that holds nothing of it has to know, too.
      name: the leaf's, for errors.

    Raises:
      DtypeMismatch: an integer does not fit the dtype that JAX would give it.
    """
    if not target.device:
        whole = hosts[Box.whole(shape)]
        if target.python is None:
            return whole
        if target.python is np.generic:
            return whole[()]
        return as_instance(target.python, base_number(target.python)(whole[()]))
    import jax

    for values in hosts.values():
        check_fit(values, name)
    if target.sharding is None:
        array = jax.device_put(hosts[Box.whole(shape)], may_alias=True)
    elif not hosts:
        array = jax.make_array_from_single_device_arrays(shape, target.sharding, [], dtype=dtype)
    else:
        array = jax.make_array_from_callback(
            shape, target.sharding, lambda index: hosts[Box.from_slices(index or (), shape)]
        )
    return jax.random.wrap_key_data(array, impl=target.impl) if target.kind == 'key' else array


@makes_private
def device_put_value(read: InlineRead) -> Any:
    """An inline leaf where its target wants it; each device gets only its own part."""
    value = np.asarray(read.value)
    if value.dtype != read.dtype:
        value = value.astype(read.dtype)
    if read.resizes:
        value = resized(value, read.target.shape)
    if value.shape != read.target.shape:
        raise CorruptCheckpointError(f'{leaf_name(read.path)}: holds {value.shape}, says {read.target.shape}.')
    target = read.target
    sharding = target.sharding
    is_small = target.device and target.kind == 'array' and value.nbytes <= _SMALL_BYTES
    if is_small and sharding is not None and sharding.addressable_devices:
        # The bulk of the leaves where there are very many: each device's part is cut by JAX.
        import jax

        check_fit(value, leaf_name(read.path))
        whole = value.copy()
        return jax.make_array_from_callback(value.shape, sharding, lambda index: whole[(..., *(index or ()))])
    wanted = boxes_wanted(target, value.shape)
    hosts = {box: _own_copy(value[box.slices]) for box in wanted}
    return device_put(hosts, target, value.shape, value.dtype, leaf_name(read.path))


def _own_copy(values: np.ndarray) -> np.ndarray:
    """A private, writable copy: what msgpack decoded lies read-only inside the manifest's bytes."""
    out = aligned_empty(values.shape, values.dtype)
    out[...] = values
    return out

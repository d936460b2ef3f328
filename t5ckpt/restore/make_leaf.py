"""Converts host buffers to the type of the template: a jax.Array of any sharding, a numpy array, or a number.

``make_inline_leaf`` casts a leaf that the manifest holds.

The CPU backend uses a buffer that begins at a multiple of 64 bytes without a copy. It treats the buffer as immutable: a step
that donates such an array computes into new memory.

A sharded array is made in one call for all its shards (``jax.make_array_from_callback``), which takes 35 us for four shards.
One ``jax.device_put`` per shard and ``make_array_from_single_device_arrays`` take 130 us.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.errors import CorruptCheckpointError, DtypeMismatch, LeafProblem
from t5ckpt.format.chunk_grid import Box
from t5ckpt.format.dtypes import cast
from t5ckpt.planning.leaf_reads import InlineRead, boxes_wanted, resized
from t5ckpt.reading.aligned_memory import aligned_empty
from t5ckpt.tree.leaves import LeafTemplate, as_instance, base_number, canonical_dtype, is_jax_array

# Up to this size, a copy by JAX is faster than making an aligned buffer that JAX uses in place.
_SMALL_BYTES = 64 * 1024


def _check_narrowed(values: np.ndarray, name: str) -> None:
    """Checks that JAX keeps the values of integers when it narrows their dtype.

    Raises:
      DtypeMismatch: naming a value that would change.
    """
    narrow = canonical_dtype(values.dtype) if values.dtype.kind in 'iu' else values.dtype
    if narrow == values.dtype:
        return
    wrong = values[values.astype(narrow) != values]
    if wrong.size:
        raise DtypeMismatch(
            f'{name}: holds {wrong.flat[0]}, and JAX puts {values.dtype.name} on a device as {narrow.name}, which has no such '
            'number. Set jax_enable_x64, or restore this leaf to numpy: give the template a numpy array there.',
            (LeafProblem(name, 'dtype', values.dtype.name, narrow.name),),
        )


def make_leaf(
    hosts: Mapping[Box, np.ndarray], template: LeafTemplate, shape: tuple[int, ...], dtype: np.dtype, name: str
) -> Any:
    """Makes a leaf from its host buffers, in the type and sharding of its template.

    Args:
      hosts: one buffer for each box of ``planning/leaf_reads.py``; must not be written to afterwards.
      template: the template of the leaf.
      shape: of the complete leaf.
      dtype: of the result; needed also in a process that holds no part of it.
      name: the name of the leaf, for errors.

    Raises:
      DtypeMismatch: an integer does not fit the dtype that JAX would give it.
    """
    for values in hosts.values() if template.device else ():
        _check_narrowed(values, name)
    if not template.device:
        (whole,) = hosts.values()
        if template.python is None:
            return whole
        if template.python is np.generic:
            return whole[()]
        return as_instance(template.python, base_number(template.python)(whole[()]))
    import jax

    if template.sharding is None:
        array = jax.device_put(next(iter(hosts.values())), may_alias=True)
    elif not hosts:
        array = jax.make_array_from_single_device_arrays(shape, template.sharding, [], dtype=dtype)
    else:
        array = jax.make_array_from_callback(
            shape, template.sharding, lambda index: hosts[Box.from_slices(index or (), shape)]
        )
    if template.python not in (None, np.generic) and not shape and array.is_fully_addressable:
        return _weakly_typed(array, template.python, template.sharding)
    return jax.random.wrap_key_data(array, impl=template.impl) if template.kind == 'key' else array


def _weakly_typed(strong: Any, number: type, sharding: Any) -> Any:
    """Makes a scalar weakly typed, as ``jnp.asarray(1.0)`` is; unchanged if JAX would give the number other bits.

    The product of a weakly typed float32 and a bfloat16 is a bfloat16, that of a strongly typed one is a float32.
    """
    import jax

    weak = jax.numpy.asarray(number(strong.item()))
    if weak.dtype != strong.dtype or np.asarray(weak).tobytes() != np.asarray(strong).tobytes():
        return strong
    return weak if sharding is None else jax.device_put(weak, sharding)


def make_inline_leaf(read: InlineRead) -> Any:
    """Makes an inline leaf in the type and sharding of its template; each device gets only its part.

    A jax.Array of the caller is moved between devices; it stays on its own if the template names none.
    """
    if is_jax_array(read.value) and read.template.device and not read.resizes:
        shardings = [read.value.sharding, read.template.sharding or read.value.sharding]
        # JAX does not put an array of one process on devices of several.
        if len({sharding.is_fully_addressable for sharding in shardings}) == 1:
            return _moved(read, shardings[1])
    value = cast(np.asarray(read.value), read.dtype, read.name)
    if read.resizes:
        value = resized(value, read.template.shape)
    if value.shape != read.template.shape:
        raise CorruptCheckpointError(f'{read.name}: holds {value.shape}, says {read.template.shape}.')
    template = read.template
    sharding = template.sharding
    is_small = template.device and template.kind == 'array' and template.python is None and value.nbytes <= _SMALL_BYTES
    if is_small and sharding is not None and sharding.addressable_devices:
        # Most leaves of a very large tree take this branch. JAX cuts the part of each device.
        import jax

        _check_narrowed(value, read.name)
        whole = value.copy()
        return jax.make_array_from_callback(value.shape, sharding, lambda index: whole[(..., *(index or ()))])
    hosts = {box: _own_copy(value[box.slices]) for box in boxes_wanted(template)}
    return make_leaf(hosts, template, value.shape, value.dtype, read.name)


def _moved(read: InlineRead, sharding: Any) -> Any:
    import jax

    array = cast(read.value, read.dtype, read.name)
    if sharding != array.sharding or (read.template.sharding is not None and not array.committed):
        array = jax.device_put(array, sharding)
    return jax.random.wrap_key_data(array, impl=read.template.impl) if read.template.kind == 'key' else array


def _own_copy(values: np.ndarray) -> np.ndarray:
    """A writable copy; the array that msgpack decoded is a read-only part of the manifest's bytes."""
    out = aligned_empty(values.shape, values.dtype)
    out[...] = values
    return out

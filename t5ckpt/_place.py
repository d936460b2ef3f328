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

import functools
import math
import os
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

import numpy as np

from t5ckpt._leaves import Target, narrowed
from t5ckpt._plan_restore import InlineRead
from t5ckpt._types import leaf_name
from t5ckpt.errors import CorruptCheckpointError, DtypeMismatch, LeafProblem
from t5ckpt.format.chunk_grid import Box
from t5ckpt.planning.resizing import resized
from t5ckpt.tree.leaf_values import as_instance, base_number

__all__ = ['aligned_empty', 'boxes_wanted', 'check_fit', 'is_on_cpu', 'is_private', 'place', 'place_value']

_ALIGNMENT = 64
_NARROW_BYTES = 4
# Up to this size it costs less to let JAX copy than to make an aligned buffer that it takes over.
_SMALL_BYTES = 64 * 1024


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised C-order array whose data begins at a multiple of 64 bytes, as XLA wants its buffers."""
    size = math.prod(shape) * dtype.itemsize
    try:
        raw = np.empty(size + _ALIGNMENT, np.uint8)
    except (MemoryError, ValueError) as error:
        raise CorruptCheckpointError(
            f'an array of shape {tuple(shape)} and dtype {dtype.name} needs {size} bytes, more than memory has. Read a slice '
            'of it, or, if no array of yours is so large, the manifest is damaged.'
        ) from error
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def boxes_wanted(target: Target, shape: tuple[int, ...]) -> list[Box]:
    """The distinct boxes that this process's devices hold, or the whole array for a host target."""
    if not target.device or target.sharding is None:
        return [Box.whole(shape)]
    indices = target.sharding.addressable_devices_indices_map(shape)
    return list(dict.fromkeys(Box.from_slices(index, shape) for index in indices.values()))


def is_on_cpu(target: Target) -> bool:
    """Whether a buffer of this process can be the target's own: numpy, or the CPU backend's default memory."""
    if not target.device:
        return True
    import jax

    if target.sharding is None:
        return jax.default_backend() == 'cpu'
    device = next(iter(target.sharding.addressable_devices), None)
    if device is None or device.platform != 'cpu':
        return False
    return target.sharding.memory_kind in (None, device.default_memory().kind)


# In these parts of JAX nothing makes buffers but computations; the innermost frame of others may have taken over memory.
_COMPUTING = tuple(os.path.join('_src', name, '') for name in ('image', 'lax', 'nn', 'numpy', 'random', 'scipy'))
_RUNNERS = ('ExecuteReplicated.__call__', 'apply_primitive')
# From the frame that made the buffer to the caller of jax.device_put there are seven.
_FRAMES = 12


def is_private(array: Any) -> bool:
    """Whether nobody but XLA can write to the memory of a jax.Array: a computation or a restore of ours made it.

    False also where that is not known. On another platform than the CPU, arrays of host memory are copies.
    """
    frames = getattr(getattr(array, 'traceback', None), 'raw_frames', None)
    if frames is None:
        return False
    codes = frames()[0][:_FRAMES]
    if next(iter(array.sharding.device_set)).platform != 'cpu':
        return not any(_is_dlpack(code.co_filename) for code in codes)
    return bool(codes) and (_computes(codes[0]) or any(code in _RESTORING for code in codes))


@functools.lru_cache(4096)
def _computes(code: CodeType) -> bool:
    """Whether a buffer that was made while this was the innermost frame is the output of a computation."""
    import jax

    root = os.path.join(os.path.dirname(jax.__file__), '')
    if not code.co_filename.startswith(root):
        # It called a jitted function, which has no frame of its own.
        return True
    return code.co_qualname in _RUNNERS or code.co_filename.removeprefix(root).startswith(_COMPUTING)


def _is_dlpack(filename: str) -> bool:
    return filename.endswith(os.path.join('jax', '_src', 'dlpack.py'))


def check_fit(values: np.ndarray, name: str) -> None:
    """Raises where JAX would narrow integers to others without a word.

    Raises:
      DtypeMismatch: with one of them.
    """
    narrow = (
        narrowed(values.dtype) if values.dtype.kind in 'iu' and values.dtype.itemsize > _NARROW_BYTES else values.dtype
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


def place(hosts: Mapping[Box, np.ndarray], target: Target, shape: tuple[int, ...], dtype: np.dtype, name: str) -> Any:
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


def place_value(read: InlineRead) -> Any:
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
    return place(hosts, target, value.shape, value.dtype, leaf_name(read.path))


def _own_copy(values: np.ndarray) -> np.ndarray:
    """A private, writable copy: what msgpack decoded lies read-only inside the manifest's bytes."""
    out = aligned_empty(values.shape, values.dtype)
    out[...] = values
    return out


# What these hand to JAX is nobody else's.
_RESTORING = {place.__code__, place_value.__code__}

"""Decides whether the memory of a jax.Array belongs to XLA alone, so that no other code can write to it."""

from __future__ import annotations

import functools
import os
from types import CodeType, FunctionType
from typing import Any, TypeVar

# In these parts of JAX only computations make buffers. Other parts may have wrapped existing memory.
_COMPUTING = tuple(os.path.join('_src', name, '') for name in ('image', 'lax', 'nn', 'numpy', 'random', 'scipy'))


_RUNNERS = ('ExecuteReplicated.__call__', 'apply_primitive')


# There are seven frames from the one that made the buffer to the caller of jax.device_put.
_FRAMES = 12

F = TypeVar('F', bound=FunctionType)


_MAKERS: set[CodeType] = set()


def makes_private(function: F) -> F:
    """Decorates a function of this package that passes JAX only memory to which no other code can write."""
    _MAKERS.add(function.__code__)
    return function


def is_private(array: Any) -> bool:
    """Whether only XLA can write to the memory of a jax.Array, because a computation or a restore of t5ckpt made it.

    False where the origin is unknown. On other platforms than the CPU, arrays made from host memory are copies.
    """
    frames = getattr(getattr(array, 'traceback', None), 'raw_frames', None)
    if frames is None:
        return False
    codes = frames()[0][:_FRAMES]
    if next(iter(array.sharding.device_set)).platform != 'cpu':
        return not any(_is_dlpack(code.co_filename) for code in codes)
    return bool(codes) and (_computes(codes[0]) or any(code in _MAKERS for code in codes))


@functools.lru_cache(4096)
def _computes(code: CodeType) -> bool:
    """Whether a buffer is the output of a computation, by the innermost frame at its creation."""
    import jax

    root = os.path.join(os.path.dirname(jax.__file__), '')
    if not code.co_filename.startswith(root):
        # A user's function called a jitted function, which has no frame.
        return True
    return code.co_qualname in _RUNNERS or code.co_filename.removeprefix(root).startswith(_COMPUTING)


def _is_dlpack(filename: str) -> bool:
    return filename.endswith(os.path.join('jax', '_src', 'dlpack.py'))

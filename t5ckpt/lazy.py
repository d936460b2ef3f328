"""Lazy arrays, which have a shape and a dtype and read their values on request.

The classes and their constructors are T5X's (t5x/checkpoint_importer.py). In addition, a lazy array can be sliced, which reads
only the chunks of the slice, and ``get`` works while an event loop is running, as in a notebook.

The leaves of a checkpoint are made and read by ``reading/array_reader.py``.

Notes: values are not cached; each ``get`` reads again. All methods may be called from any thread.
"""

from __future__ import annotations

import asyncio
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from t5ckpt.core.text import printable
from t5ckpt.core.thread_pool import Pool

__all__ = ['LazyArray', 'LazyAwaitableArray', 'LazyThreadPoolArray', 'run_coroutine']


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine to its end; in a new thread if this thread's event loop is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with Pool(1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


class LazyArray(NDArrayOperatorsMixin, ABC):
    """An array that is read on request.

    Operators and NumPy's functions read the whole array: ``x * 2`` is ``x[...] * 2``, a NumPy array. A lazy array itself never
    changes.

    Args:
      shape: of the array.
      dtype: of the result; values of another dtype are cast to it.
      get_fn: returns the values, or an awaitable of them in LazyAwaitableArray.
      slice_fn: takes a NumPy basic index and returns these values in the dtype on disk; without it, a slice reads the whole
        array.
      name: of the leaf, for the repr.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        get_fn: Callable[[], Any],
        slice_fn: Callable[[Any], np.ndarray] | None = None,
        name: str = '',
    ):
        self._shape = tuple(int(size) for size in shape)
        self._dtype = np.dtype(dtype)
        self._get_fn = get_fn
        self._slice_fn = slice_fn
        self._name = name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self._shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype that ``get`` returns."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """The rank."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self._shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes in memory after the array is read."""
        return self.size * self._dtype.itemsize

    @property
    def is_sliceable(self) -> bool:
        """Whether a slice reads only a part of the array."""
        return self._slice_fn is not None

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError('len() of an array without dimensions')
        return self._shape[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        # Without this, Python would index until an IndexError, so that an array without dimensions would seem empty.
        rows = range(len(self))
        return (self[row] for row in rows)

    def __contains__(self, value: Any) -> bool:
        return value in np.asarray(self)

    def __repr__(self) -> str:
        name = f'{printable(self._name)!r}, ' if self._name else ''
        return f'{type(self).__name__}({name}shape={self._shape}, dtype={self._dtype.name})'

    def __copy__(self) -> LazyArray:
        return self

    def __deepcopy__(self, memo: Any) -> LazyArray:
        # A lazy array is immutable.
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if any('<locals>' in getattr(fn, '__qualname__', '') for fn in (self._get_fn, self._slice_fn)):
            raise TypeError(
                f'{self!r} cannot be pickled, because it refers to the open checkpoint. Pass the path and call '
                't5ckpt.open_checkpoint in the other process, or pickle its values: numpy.asarray(x).'
            )
        return super().__reduce_ex__(protocol)

    @abstractmethod
    def get(self) -> Any:
        """Reads and returns the values."""

    @abstractmethod
    async def get_async(self) -> Any:
        """Reads and returns the values without blocking the event loop."""

    def astype(self, dtype: Any) -> LazyArray:
        """The same array, cast to ``dtype`` when it is read."""
        if np.dtype(dtype) == self._dtype:
            return self
        return type(self)(self._shape, dtype, self._get_fn, self._slice_fn)

    def __getitem__(self, index: Any) -> np.ndarray:
        """The values of a NumPy basic index; reads only the chunks that contain them, if the array is sliceable."""
        if self._slice_fn is None:
            return np.asarray(self.get())[index]
        return self._cast(self._slice_fn(index))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.get())
        if dtype is not None and array.dtype != np.dtype(dtype):
            if copy is False:
                raise ValueError(
                    f'{self!r} cannot be converted to {np.dtype(dtype).name} without a copy. Leave copy=False out.'
                )
            return array.astype(dtype)
        return array.copy() if copy else array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if any(isinstance(array, LazyArray) for array in options.get('out') or ()):
            raise TypeError(
                f'{self!r} cannot be changed in place, because it is a leaf of a checkpoint. Copy it first: x = x[...].copy().'
            )
        values = [np.asarray(array) if isinstance(array, LazyArray) else array for array in inputs]
        return getattr(ufunc, method)(*values, **options)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Reads the values, for ``torch.from_dlpack`` and similar functions."""
        values = np.asarray(self)
        if values.dtype.kind != 'V':
            return values.__dlpack__(**kwargs)
        # JAX exports bfloat16 and similar dtypes, NumPy does not.
        import jax

        return jax.device_put(values, jax.devices('cpu')[0]).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Host memory, in DLPack's numbers."""
        return (1, 0)

    def item(self) -> Any:
        """The value of an array of one element, as a Python number."""
        if self.size != 1:
            raise ValueError(
                f'{self!r} has {self.size} elements, and only an array of one element is a number or a truth value. Read a '
                'slice of it, or write numpy.asarray(x).any().'
            )
        return np.asarray(self).item()

    def __bool__(self) -> bool:
        # Without this, Python would use the length.
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        if self._shape or self._dtype.kind not in 'iu':
            raise TypeError(f'{self!r} cannot be used as an index; only an integer array without dimensions can.')
        return operator.index(self.item())

    def __getattr__(self, name: str) -> Any:
        # The hint is for attributes of NumPy's arrays that lazy arrays lack.
        hint = f'; read it first: np.asarray(x).{name}' if hasattr(np.ndarray, name) and name[:1] != '_' else ''
        raise AttributeError(f'{type(self).__name__} has no attribute {name!r}{hint}')

    def _cast(self, values: Any) -> Any:
        return values if values.dtype == self._dtype else values.astype(self._dtype)


def _dtype_of_spec(spec: Mapping[str, Any]) -> Any:
    """The dtype at the top of a spec, or in its metadata as zarr's name, which is NumPy's or 'bfloat16'."""
    name = spec.get('dtype', spec['metadata'].get('dtype'))
    return getattr(ml_dtypes, name) if isinstance(name, str) and hasattr(ml_dtypes, name) else name


class LazyThreadPoolArray(LazyArray):
    """A lazy array whose ``get_fn`` blocks; ``get_async`` runs it in the loop's thread pool."""

    def get(self) -> Any:
        """Reads and returns the values."""
        return self._cast(self._get_fn())

    async def get_async(self) -> Any:
        """Reads in a thread."""
        return await asyncio.get_running_loop().run_in_executor(None, self.get)


class LazyAwaitableArray(LazyArray):
    """A lazy array whose ``get_fn`` returns an awaitable."""

    @classmethod
    def from_array(cls, array: Any, get_fn: Callable[[], Awaitable[Any]], dtype: Any = None) -> LazyAwaitableArray:
        """A lazy array with the shape of ``array`` and its dtype, or ``dtype``."""
        return cls(array.shape, array.dtype if dtype is None else dtype, get_fn)

    @classmethod
    def from_tensor_store_spec(
        cls, ts_spec: Any, get_fn: Callable[[], Awaitable[Any]], dtype: Any = None
    ) -> LazyAwaitableArray:
        """A lazy array with the shape and the dtype, or ``dtype``, of a ``tensorstore.Spec`` or its dict.

        uint16 becomes bfloat16, because version 2 of the format stores bfloat16 as uint16.
        """
        spec = ts_spec if isinstance(ts_spec, Mapping) else ts_spec.to_json()
        wanted = np.dtype(_dtype_of_spec(spec) if dtype is None else dtype)
        wanted = np.dtype(ml_dtypes.bfloat16) if wanted == np.uint16 else wanted
        return cls(spec['metadata']['shape'], wanted, get_fn)

    @classmethod
    def from_tensor_store_spec_or_array(
        cls, maybe_ts_spec: Any, get_fn: Callable[[], Awaitable[Any]], dtype: Any = None
    ) -> LazyAwaitableArray:
        """``from_tensor_store_spec`` of a spec, ``from_array`` of anything else."""
        is_spec = isinstance(maybe_ts_spec, Mapping) or hasattr(maybe_ts_spec, 'to_json')
        make = cls.from_tensor_store_spec if is_spec else cls.from_array
        return make(maybe_ts_spec, get_fn, dtype)

    def get(self) -> Any:
        """Reads and returns the values, also while an event loop is running."""
        return run_coroutine(self.get_async())

    async def get_async(self) -> Any:
        """Reads and returns the values."""
        return self._cast(await self._get_fn())

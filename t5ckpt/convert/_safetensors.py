"""The safetensors format, one tensor at a time (github.com/huggingface/safetensors, "Format").

    8 bytes   n, the header's length, little endian
    n bytes   JSON: {"__metadata__": {text: text}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...},
              padded with spaces to a multiple of 8
    the rest  the tensors, C order, little endian, without holes; offsets count from here

The ``safetensors`` package takes all tensors at once to write a file, and has no numpy dtype for bfloat16 to read one
into. The format is the header, so that is what this module does: it knows all shapes before the first value, writes
the header, and then rows to where they belong, in any order. Tests read every file with the package.

Notes: reading maps the file; a view of a tensor stays valid as long as it lives. Everything in a header is checked
before it is believed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt._dtypes import dtype_from_name
from t5ckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from t5ckpt.lazy import LazyThreadPoolArray
from t5ckpt.storage import foreign_errors

__all__ = ['NAMES', 'TensorReader', 'TensorSpec', 'TensorWriter', 'check_dtype', 'lazy_copy']

# Dtypes that have a name in the format and whole bytes in numpy.
NAMES = {
    'bool': 'BOOL',
    'int8': 'I8',
    'int16': 'I16',
    'int32': 'I32',
    'int64': 'I64',
    'uint8': 'U8',
    'uint16': 'U16',
    'uint32': 'U32',
    'uint64': 'U64',
    'float16': 'F16',
    'bfloat16': 'BF16',
    'float32': 'F32',
    'float64': 'F64',
    'complex64': 'C64',
    'float8_e4m3fn': 'F8_E4M3',
    'float8_e5m2': 'F8_E5M2',
    'float8_e8m0fnu': 'F8_E8M0',
}
_DTYPES = {text: name for name, text in NAMES.items()}
_METADATA = '__metadata__'
# The package refuses longer headers.
_MAX_HEADER = 100_000_000


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor that is to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_dtype(name: str, dtype: np.dtype) -> None:
    """Says which tensor cannot be written: one of another dtype, or with the name of the metadata.

    Raises:
      UnsupportedLeafError: the format has no name for the dtype.
    """
    if name == _METADATA:
        raise UnsupportedLeafError(f'{name}: a safetensors file has another use for this name. Leave the array out.')
    if dtype.name not in NAMES:
        raise UnsupportedLeafError(
            f'{name}: safetensors has no {dtype.name}, only {", ".join(NAMES)}. Leave it out with a selection, or cast it.'
        )


class TensorWriter:
    """Writes one file. Not safe from several threads."""

    def __init__(self, path: str, tensors: Sequence[TensorSpec], metadata: Mapping[str, str]):
        """Creates the file, with its header.

        Args:
          path: must not exist.
          tensors: in any order; wide dtypes come first in the file, as the package writes them, so that all are aligned.
          metadata: text to text.
        """
        header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
        self._places: dict[str, tuple[int, TensorSpec]] = {}
        end = 0
        for spec in sorted(tensors, key=lambda spec: -spec.dtype.itemsize):
            check_dtype(spec.name, spec.dtype)
            start, end = end, end + spec.nbytes
            header[spec.name] = {
                'dtype': NAMES[spec.dtype.name],
                'shape': list(spec.shape),
                'data_offsets': [start, end],
            }
            self._places[spec.name] = (start, spec)
        text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
        text += b' ' * (-len(text) % 8)
        if len(text) > _MAX_HEADER:
            raise UnsupportedLeafError(
                f'{path}: {len(tensors)} tensors, whose names do not fit into one header. Select fewer.'
            )
        self._path = path
        self._data = 8 + len(text)
        with foreign_errors(path, writing=True):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            _write_all(self._file, len(text).to_bytes(8, 'little') + text, 0)
            os.ftruncate(self._file, self._data + end)

    def write(self, name: str, row: int, values: np.ndarray) -> None:
        """Writes the rows of a tensor from ``row`` on; of one without dimensions, its value."""
        start, spec = self._places[name]
        data = np.ascontiguousarray(values)
        if data.dtype.byteorder == '>':
            data = data.astype(data.dtype.newbyteorder('<'))
        row_bytes = math.prod(spec.shape[1:]) * spec.dtype.itemsize
        with foreign_errors(self._path, writing=True):
            _write_all(self._file, data.reshape(-1).view(np.uint8), self._data + start + row * row_bytes)

    def close(self) -> None:
        """Makes the file durable."""
        with foreign_errors(self._path, writing=True):
            os.fsync(self._file)
        self.abort()

    def abort(self) -> None:
        """Lets go of the file as it is; closing twice is no error."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _write_all(file: int, data: Any, offset: int) -> None:
    view = memoryview(data)
    while len(view) > 0:
        # Linux writes at most 2 GiB in one call.
        done = os.pwrite(file, view[: 2**30], offset)
        view, offset = view[done:], offset + done


class TensorReader:
    """One mapped file: ``tensors`` are views of it, by name."""

    def __init__(self, path: str):
        """Maps a file.

        Raises:
          CorruptCheckpointError: the header is not what the format says, or does not fit the file.
          StorageError: the file cannot be opened.
        """
        self.path = path
        with foreign_errors(path), open(path, 'rb') as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise CorruptCheckpointError(f'{path} has {size} bytes, which is no safetensors file. Copy it again.')
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._mapped = mapped
        length = int.from_bytes(mapped[:8], 'little')
        if length > min(_MAX_HEADER, size - 8):
            raise CorruptCheckpointError(
                f'{path}: a header of {length} bytes in a file of {size}: truncated, or no safetensors.'
            )
        try:
            header = json.loads(mapped[8 : 8 + length])
            self.metadata = {str(key): str(value) for key, value in header.pop(_METADATA, {}).items()}
            self.tensors = self._views(mapped, header, 8 + length)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError, OverflowError) as error:
            raise CorruptCheckpointError(
                f'{path}: the header does not decode ({error!s:.120}). Copy the file again.'
            ) from error

    def forget(self) -> None:
        """Lets go of the pages that were read, which else count as this process's memory. Views stay valid."""
        self._mapped.madvise(mmap.MADV_DONTNEED)

    def _views(self, mapped: mmap.mmap, header: Mapping[str, Any], data: int) -> dict[str, np.ndarray]:
        views: dict[str, np.ndarray] = {}
        spans: list[tuple[int, int]] = []
        for name, entry in header.items():
            if entry['dtype'] not in _DTYPES:
                raise ValueError(f'{name} has the dtype {entry["dtype"]!r:.40}, which numpy does not hold')
            dtype = dtype_from_name(_DTYPES[entry['dtype']])
            shape, (start, end) = tuple(map(_size, entry['shape'])), map(_size, entry['data_offsets'])
            if len(shape) > 32 or math.prod(shape) * dtype.itemsize != end - start or data + end > len(mapped):
                raise ValueError(
                    f'{name}: shape {shape} of {dtype.name} at bytes {start} to {end} of {len(mapped) - data}'
                )
            spans.append((start, end))
            views[name] = np.ndarray(shape, dtype, mapped, data + start)
        spans.sort()
        if [start for start, _ in spans] + [len(mapped) - data] != [0] + [end for _, end in spans]:
            raise ValueError('the tensors overlap, leave holes, or do not fill the file')
        return views


def lazy_copy(
    shape: tuple[int, ...], dtype: np.dtype, read: Callable[[Any], np.ndarray], forget: Callable[[], None]
) -> LazyThreadPoolArray:
    """A lazy array of what ``read`` makes of mapped tensors: each slice is copied, then the pages are let go of."""

    def part(index: Any) -> np.ndarray:
        values = np.array(read(index), order='C')
        forget()
        return values

    return LazyThreadPoolArray(shape, dtype, lambda: part(...), part)


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise ValueError(f'{value!r:.40} is no size')
    return value

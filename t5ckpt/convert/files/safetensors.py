"""Reads and writes safetensors files, one tensor at a time; ``format/safetensors.py`` describes the format.

The ``safetensors`` package writes all tensors at once, and cannot read bfloat16 into NumPy. This module writes the header first,
since all shapes are known, and then the rows of the tensors in any order. Tests read every file with the package.

Notes: reading maps the file; a view of a tensor stays valid as long as it exists. Headers are checked against the file.
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

from t5ckpt.catalog.locate import locate
from t5ckpt.errors import CheckpointNotFoundError, UnsupportedFormatError, UnsupportedLeafError
from t5ckpt.format.dtypes import kind
from t5ckpt.format.safetensors import DTYPE_NAMES, MAX_HEADER, METADATA, is_tensor_file
from t5ckpt.lazy import LazyThreadPoolArray
from t5ckpt.reading.checkpoint_files import CheckpointFiles, open_source
from t5ckpt.reading.safetensors import read_headers
from t5ckpt.storage import foreign_errors, open_storage, split_path


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The name, dtype and shape of a tensor to write."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_dtype(name: str, dtype: np.dtype) -> None:
    """Raises UnsupportedLeafError for a dtype that the format lacks, and for the name of the metadata."""
    if name == METADATA:
        raise UnsupportedLeafError(f'{name}: this name is reserved in safetensors files. Leave the array out.')
    if dtype.name not in DTYPE_NAMES:
        # Only floating leaves can be cast.
        cure = ', or cast it' if kind(dtype) == 'float' else ''
        raise UnsupportedLeafError(
            f'{name}: safetensors has no {dtype.name}, only {", ".join(DTYPE_NAMES)}. Leave it out with a selection{cure}.'
        )


class TensorWriter:
    """Writes one file. Not safe from several threads."""

    def __init__(self, path: str, tensors: Sequence[TensorSpec], metadata: Mapping[str, str]):
        """Creates the file, with its header.

        Args:
          path: must not exist.
          tensors: in any order. In the file, wide dtypes come first, as the package writes them, so that all are aligned.
          metadata: of the file.
        """
        header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
        self._places: dict[str, tuple[int, TensorSpec]] = {}
        end = 0
        for spec in sorted(tensors, key=lambda spec: -spec.dtype.itemsize):
            check_dtype(spec.name, spec.dtype)
            start, end = end, end + spec.nbytes
            header[spec.name] = {
                'dtype': DTYPE_NAMES[spec.dtype.name],
                'shape': list(spec.shape),
                'data_offsets': [start, end],
            }
            self._places[spec.name] = (start, spec)
        text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
        text += b' ' * (-len(text) % 8)
        if len(text) > MAX_HEADER:
            raise UnsupportedLeafError(
                f'{path}: the names of {len(tensors)} tensors do not fit into one header. Select fewer.'
            )
        self._path = path
        self._data = 8 + len(text)
        with foreign_errors(path, writing=True):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            _write_all(self._file, len(text).to_bytes(8, 'little') + text, 0)
            os.ftruncate(self._file, self._data + end)

    def write(self, name: str, row: int, values: np.ndarray) -> None:
        """Writes the rows of a tensor from ``row`` on; for a tensor without dimensions, its value."""
        start, spec = self._places[name]
        data = np.ascontiguousarray(values)
        if data.dtype.byteorder == '>':
            data = data.astype(data.dtype.newbyteorder('<'))
        row_bytes = math.prod(spec.shape[1:]) * spec.dtype.itemsize
        with foreign_errors(self._path, writing=True):
            _write_all(self._file, data.reshape(-1).view(np.uint8), self._data + start + row * row_bytes)

    def close(self) -> None:
        """Makes the file durable and closes it."""
        with foreign_errors(self._path, writing=True):
            os.fsync(self._file)
        self.abort()

    def abort(self) -> None:
        """Closes the unfinished file, if it is open."""
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
    """Mapped tensors, by name: those of a file, or of all files of an index or a directory.

    Attributes:
      tensors: views of the files.
      metadata: of all files.
      files: their paths.
    """

    def __init__(self, path: str):
        """Maps the files.

        Raises:
          CheckpointNotFoundError: there is no such file, or the directory has no model.
          FormatError: see ``reading/safetensors.read_headers``.
          StorageError: a file cannot be opened.
        """
        parent, name = split_path(path)
        storage, directory = open_storage(parent), ''
        # A file may have any name: a blob in a cache of Hugging Face has none that ends in .safetensors.
        is_model = storage.is_file(name)
        if not is_model:
            located = locate(path, tensors=True)
            storage, directory, name = located.storage, located.directory, located.manifest
            is_model = is_tensor_file(name)
        root = storage.local_path(directory)
        if root is None or not is_model:
            raise UnsupportedFormatError(
                f'{path} is not a safetensors file on a local disk, nor a directory with model.safetensors. Check the path.'
            )
        headers, _ = read_headers(CheckpointFiles.at(storage, directory, follow_links=True), name)
        self.files = [os.path.join(root, file) for file in headers]
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, np.ndarray] = {}
        self._mapped: list[mmap.mmap] = []
        for file, header in zip(self.files, headers.values(), strict=True):
            with foreign_errors(file), open_source(file) as opened:
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            if len(mapped) != header.size:
                raise CheckpointNotFoundError(f'{file} was replaced while it was being read. Import it again.')
            self._mapped.append(mapped)
            self.metadata |= header.metadata
            self.tensors |= {
                name: np.ndarray(array.shape, array.dtype, mapped, array.metadata['offset'])
                for name, array in header.arrays
            }

    def forget(self) -> None:
        """Releases the pages that were read, which would count as memory of this process. Views stay valid."""
        for mapped in self._mapped:
            mapped.madvise(mmap.MADV_DONTNEED)


def lazy_copy(
    shape: tuple[int, ...], dtype: np.dtype, read: Callable[[Any], np.ndarray], forget: Callable[[], None]
) -> LazyThreadPoolArray:
    """A lazy array over mapped tensors; copies each slice that ``read`` returns and then releases the pages."""

    def part(index: Any) -> np.ndarray:
        values = np.array(read(index), order='C')
        forget()
        return values

    return LazyThreadPoolArray(shape, dtype, lambda: part(...), part)

"""Reads large msgpack files of Flax lazily: decodes the structure and reads arrays on request.

Each msgpack value begins with its length (github.com/msgpack/msgpack/blob/master/spec.md), so the scan skips the bytes of an
array and records its offset. Small values and names are decoded as in any manifest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from t5ckpt.catalog.locate import Located
from t5ckpt.convert.files.flat_array import FlatArray
from t5ckpt.core.leaf_path import leaf_name
from t5ckpt.errors import CorruptCheckpointError, FormatError
from t5ckpt.format.facts import NO_FACTS
from t5ckpt.format.manifest import STREAM_ITEM, array_header, decode_ext, manifest_of, stream_path
from t5ckpt.lazy import LazyArray, LazyThreadPoolArray
from t5ckpt.reading.checkpoint_files import open_source
from t5ckpt.reading.contents import Contents
from t5ckpt.storage import foreign_errors
from t5ckpt.tree.leaf_table import MAX_DEPTH, MAX_RANK, LeafTable, unflatten, unique

LARGE_BYTES = 64 * 2**20
"""Smaller files are decoded at once."""

_IN_PLACE_BYTES = 2**16
_HEADER_BYTES = 512
_EXT_ARRAY = 1
_CHUNKED = '__msgpack_chunked_array__'
# The struct format of the length after the first byte, by that byte.
_STRINGS = {0xD9: '>B', 0xDA: '>H', 0xDB: '>I', 0xC4: '>B', 0xC5: '>H', 0xC6: '>I'}
_EXTENSIONS = {0xC7: '>B', 0xC8: '>H', 0xC9: '>I'}
_LISTS, _MAPS = {0xDC: '>H', 0xDD: '>I'}, {0xDE: '>H', 0xDF: '>I'}
# The longest value without a length after its first byte is a string of 31 bytes.
_SHORT_BYTES = 32


@dataclasses.dataclass(frozen=True)
class LargeFile:
    """A decoded file, in which a text replaces each large array; ``arrays`` maps these texts to the arrays."""

    contents: Contents
    arrays: dict[str, LazyArray]


def read_large(located: Located, path: str, in_place_bytes: int = _IN_PLACE_BYTES) -> LargeFile:
    """Reads the structure of a local file; arrays above ``in_place_bytes`` are read lazily.

    Raises:
      FormatError: it is truncated, or in another format.
      StorageError: it cannot be read.
    """
    with foreign_errors(path), open_source(path) as file:
        scan = _Scan(file.fileno(), path, in_place_bytes)
        try:
            tree = scan.tree()
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f'{path}: {error}. Copy the file again.') from error
        except FormatError as error:
            raise type(error)(f'{path}: {error}') from error
        except (ValueError, TypeError, struct.error, msgpack.UnpackException) as error:
            raise CorruptCheckpointError(f'{path} does not decode as msgpack ({error!s:.120}).') from error
        if scan.at != scan.size:
            raise CorruptCheckpointError(
                f'{path}: {scan.size - scan.at:,} bytes follow the end of the map. Copy the file again.'
            )
    return LargeFile(Contents(located, manifest_of(tree, path), NO_FACTS), scan.arrays)


class _Scan:
    """Decodes a file in one pass.

    Attributes:
      at, size: the position, and the end.
      arrays: the lazy arrays, by the text that replaces each.
    """

    def __init__(self, fd: int, path: str, in_place_bytes: int):
        self._in_place_bytes = in_place_bytes
        self.size = os.fstat(fd).st_size
        self.at = 0
        self.arrays: dict[str, LazyArray] = {}
        self._flat: dict[str, FlatArray] = {}
        self._fd = fd
        self._path = path
        # Random, so that a text in the file cannot equal one of the replacements.
        self._mark = uuid.uuid4().hex

    def tree(self) -> Any:
        """Decodes the file: one map or, as EasyLM writes, a stream of (keys, bytes of msgpack), see ``format/manifest.py``."""
        if self._peek(1) != STREAM_ITEM:
            return self.value(0)
        table: LeafTable = {}
        while self.at < self.size:
            if self._take(1) != STREAM_ITEM:
                raise CorruptCheckpointError(f'the item at byte {self.at - 1:,} is not (keys, bytes)')
            path = stream_path(self.value(1), table)
            first = self._peek(1)[0]
            end = self._number(_STRINGS[first]) + self.at if first in _STRINGS else -1
            table[path] = self.value(len(path))
            if self.at != end:
                raise CorruptCheckpointError(f'the value of {leaf_name(path)} does not end at byte {self.at:,}')
        return unflatten(table)

    def value(self, depth: int) -> Any:
        """Decodes the value at the position."""
        if depth > MAX_DEPTH:
            raise CorruptCheckpointError(f'nested more than {MAX_DEPTH} deep, deeper than any model')
        first = self._peek(1)[0]
        if 0x80 <= first <= 0x8F or first in _MAPS:
            return self._map(self._count(first, _MAPS), depth)
        if 0x90 <= first <= 0x9F or first in _LISTS:
            return [self.value(depth + 1) for _ in range(self._count(first, _LISTS))]
        if first in _EXTENSIONS:
            start = self.at
            length = self._number(_EXTENSIONS[first])
            code = self._take(1)[0]
            if code == _EXT_ARRAY and length > self._in_place_bytes:
                return self._array(length)
            self.at = start
        return self._small(first)

    def _count(self, first: int, wide: Mapping[int, str]) -> int:
        if first not in wide:
            self.at += 1
            return first & 0x0F
        count = self._number(wide[first])
        if count > self.size - self.at:
            raise CorruptCheckpointError(f'a header gives {count:,} items, but {self.size - self.at:,} bytes are left')
        return count

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(1 + struct.calcsize(form))[1:])[0])

    def _map(self, count: int, depth: int) -> Any:
        pairs: list[tuple[Any, Any]] = []
        for _ in range(count):
            key = self.value(depth + 1)
            if isinstance(key, str) and key in self.arrays:
                raise CorruptCheckpointError(f'the key of a map at byte {self.at:,} is an array')
            pairs.append((key, self.value(depth + 1)))
        fields = unique(pairs)
        shape, chunks = _in_order(fields.get('shape')), _in_order(fields.get('chunks'))
        if _CHUNKED in fields and shape is not None and chunks is not None:
            return self._joined(shape, chunks) or fields
        return fields

    def _small(self, first: int) -> Any:
        """Decodes a value that is neither a container nor a lazy array."""
        start, length = self.at, _SHORT_BYTES
        form = (_STRINGS | _EXTENSIONS).get(first)
        if form is not None:
            length = self._number(form) + 1 + struct.calcsize(form) + (first in _EXTENSIONS)
        data = os.pread(self._fd, min(length, self.size - start), start)
        unpacker = msgpack.Unpacker(
            ext_hook=decode_ext, raw=False, strict_map_key=False, max_buffer_size=length, max_array_len=length
        )
        unpacker.feed(data)
        try:
            value = unpacker.unpack()
        except msgpack.OutOfData as error:
            raise CorruptCheckpointError(f'truncated at byte {self.size:,}') from error
        self.at = start + unpacker.tell()
        return value

    def _array(self, length: int) -> str:
        """Skips an array of ``length`` bytes and returns the text that replaces it."""
        end = self.at + length
        head = msgpack.Unpacker(raw=True, max_buffer_size=2 * _HEADER_BYTES)
        head.feed(self._peek(min(length, _HEADER_BYTES)))
        if head.read_array_header() != 3:
            raise CorruptCheckpointError(f'the array at byte {self.at:,} is not (shape, dtype, bytes)')
        shape, name = head.unpack(), head.unpack()
        self.at += head.tell()
        first = self._peek(1)[0]
        nbytes = self._number(_STRINGS[first]) if first in _STRINGS else -1
        if self.at + nbytes != end or end > self.size:
            raise CorruptCheckpointError(f'the length of the array at byte {self.at:,} does not match its data')
        dims, dtype = array_header(shape, name, nbytes)
        flat = FlatArray(f'array at byte {self.at:,}', dtype, dims, self._path, self.at)
        self.at = end
        return self._kept(flat.shape, flat.dtype, _reader(flat), flat)

    def _kept(self, shape: Sequence[int], dtype: np.dtype, read: Callable[[Any], np.ndarray], flat: Any) -> str:
        text = f'{self._mark} {len(self.arrays)}'
        self.arrays[text] = LazyThreadPoolArray(tuple(shape), dtype, lambda: read(...), read)
        if flat is not None:
            self._flat[text] = flat
        return text

    def _joined(self, shape: Sequence[Any], chunks: Sequence[Any]) -> str | None:
        """An array that Flax wrote in parts, which are joined on reading; None for another map, or without a lazy part."""
        parts = [self._flat.get(chunk) if isinstance(chunk, str) else chunk for chunk in chunks]
        arrays = [part for part in parts if isinstance(part, (FlatArray, np.ndarray))]
        if len(arrays) < len(parts) or not any(isinstance(part, FlatArray) for part in arrays):
            return None
        good = len(shape) <= MAX_RANK and all(isinstance(size, (int, np.integer)) and size >= 0 for size in shape)
        if not good or len({part.dtype for part in arrays}) != 1:
            raise CorruptCheckpointError('the chunks of an array are not arrays of one dtype')
        if math.prod(shape) != sum(math.prod(part.shape) for part in arrays):
            raise CorruptCheckpointError(f'the chunks of an array do not fill an array of shape {shape!r:.80}')
        sizes = [int(size) for size in shape]
        return self._kept(sizes, arrays[0].dtype, _joined_reader(sizes, arrays), None)

    def _peek(self, count: int) -> bytes:
        data = os.pread(self._fd, count, self.at)
        if len(data) < count:
            raise CorruptCheckpointError(f'truncated at byte {self.size:,}')
        return data

    def _take(self, count: int) -> bytes:
        if self.at + count > self.size:
            raise CorruptCheckpointError(f'truncated at byte {self.size:,}')
        data = self._peek(count)
        self.at += count
        return data


def _in_order(items: Any) -> list[Any] | None:
    """The values of {'0': ..., '1': ...}, Flax's encoding of a list; None for any other value."""
    if not isinstance(items, Mapping) or {str(number) for number in range(len(items))} != set(items):
        return None
    return [items[str(number)] for number in range(len(items))]


def _reader(flat: FlatArray) -> Callable[[Any], np.ndarray]:
    def read(index: Any) -> np.ndarray:
        with foreign_errors(flat.file), open_source(flat.file) as file:
            return flat.read(file.fileno(), index)

    return read


def _joined_reader(shape: Sequence[int], parts: Sequence[FlatArray | np.ndarray]) -> Callable[[Any], np.ndarray]:
    """Returns a function that reads boxes of an array that is stored in several flat parts."""
    ends = list(itertools.accumulate(math.prod(part.shape) for part in parts))

    def elements(start: int, stop: int) -> np.ndarray:
        """The elements from ``start`` to ``stop`` of the flattened array."""
        out = np.empty(stop - start, parts[0].dtype)
        for part, end in zip(parts, ends, strict=True):
            begin = end - math.prod(part.shape)
            first, last = max(start, begin), min(stop, end)
            if first >= last:
                continue
            if isinstance(part, np.ndarray):
                out[first - start : last - start] = part.reshape(-1)[first - begin : last - begin]
            else:
                flat = dataclasses.replace(part, shape=(math.prod(part.shape),))
                out[first - start : last - start] = _reader(flat)((slice(first - begin, last - begin),))
        return out

    def read(index: Any) -> np.ndarray:
        """Reads only the rows of a slice along the first axis; for any other index, the whole array."""
        first = index[0] if isinstance(index, tuple) and index else None
        row = math.prod(shape[1:])
        if not shape or not isinstance(first, slice) or first.step not in (None, 1):
            return elements(0, ends[-1]).reshape(shape)[index]
        start, stop, _ = first.indices(shape[0])
        rows = elements(start * row, max(start, stop) * row).reshape(max(0, stop - start), *shape[1:])
        return rows[(slice(None), *index[1:])]

    return read

"""The files that an array's metadata implies, for checkpoints that do not list theirs.

Of an array without a codec each file's size follows from the metadata; the others must decode. The grid of chunks is as
large as the metadata claims, so it is walked through only as far as there are files.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from t5ckpt._budget import ByteBudget
from t5ckpt._checks import names_of
from t5ckpt._chunks import Box, whole_box
from t5ckpt._claims import check_chunk
from t5ckpt._damage import Damage
from t5ckpt._layout import join
from t5ckpt._ledger import Ledger
from t5ckpt._local import grid_of, has_plain_chunks
from t5ckpt._plan_restore import StoredLeaf
from t5ckpt._reader import ArrayReader
from t5ckpt._scan import Scanner
from t5ckpt.steps import Located
from t5ckpt.storage import Storage, foreign_errors

__all__ = ['ArrayFiles', 'Implied', 'is_listed', 'placed']

Cell = tuple[int, ...]

_MAX_NAMED = 100
_METADATA = {'zarr': '.zarray', 'zarr3': 'zarr.json'}
_DECODED_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class _Keys:
    """How chunk keys are made: ``prefix``, then the indices with ``separator`` between."""

    separator: str
    prefix: str = ''

    def key(self, cell: Cell) -> str:
        if self.prefix:
            return self.separator.join([self.prefix, *map(str, cell)])
        return self.separator.join(map(str, cell)) or '0'


@dataclasses.dataclass(frozen=True)
class ArrayFiles:
    """The files of one array.

    Attributes:
      leaf: its name.
      damages: what is missing or of the wrong size.
      sizes: of the files that are there, relative to the checkpoint's directory.
      cells: the chunks that are there in the right size.
      chunk_bytes: of a decoded chunk.
    """

    leaf: str
    damages: list[Damage]
    sizes: dict[str, int]
    cells: list[Cell]
    chunk_bytes: int
    _owner: Implied
    _array: _Array

    def file(self, cell: Cell) -> str:
        """The file of a chunk; in an OCDBT database its key."""
        return self._array.file(cell)

    def decode(self, cell: Cell) -> None:
        """Reads a chunk and decodes it, if it has a codec.

        Raises:
          CorruptCheckpointError: it does not decode.
          StorageError: it cannot be read.
        """
        self._owner.decode(self._array, cell, self.sizes.get(self.file(cell)))


@dataclasses.dataclass(frozen=True)
class _Array:
    """An opened array."""

    leaf: str
    stored: StoredLeaf
    store: Any
    chunks: tuple[int, ...]
    keys: _Keys
    file_bytes: int | None

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(-(-size // chunk) for size, chunk in zip(self.stored.shape, self.chunks, strict=True))

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunks) * self.stored.array.dtype.itemsize

    def file(self, cell: Cell) -> str:
        return f'{self.stored.array.location}/{self.keys.key(cell)}'


class Implied:
    """Looks at the arrays of one checkpoint. Safe from any thread."""

    def __init__(self, storage: Storage, directory: str, *, follow_links: bool = False):
        """Takes the checkpoint's directory."""
        self._storage = storage
        self._directory = directory
        self._reader = ArrayReader(Located(storage, directory, '', None, follow_links))
        self._scanner = Scanner(storage, directory, follow_links=follow_links)
        self._budget = ByteBudget(_DECODED_BYTES)

    def files(self, leaf: str, stored: StoredLeaf) -> ArrayFiles:
        """Opens an array and looks for its files.

        Raises:
          FormatError: its metadata cannot be read, contradicts the manifest, or it leads outside the checkpoint.
          StorageError: a directory cannot be listed.
        """
        array = self._open(leaf, stored)
        location = stored.array.location
        present = self._present(array)
        damages: list[Damage] = []
        sizes: dict[str, int] = {}
        cells: list[Cell] = []
        metadata = _METADATA[stored.array.driver]
        if stored.array.container == 'dir' and metadata not in present:
            text = 'nobody but t5ckpt can open the array without it'
            damages.append(Damage('missing', f'{location}/{metadata}', text, leaf))
        for cell in _cells(array.grid):
            key, file = array.keys.key(cell), array.file(cell)
            box = cell_box(cell, array.chunks, stored.shape)
            if key not in present:
                if len(damages) >= _MAX_NAMED:
                    left = math.prod(array.grid) - len(cells) - _MAX_NAMED
                    damages.append(Damage('missing', location, f'and up to {left:,} more chunks are missing', leaf))
                    break
                damages.append(Damage('missing', file, 'the metadata implies this chunk', leaf, cell, box))
                continue
            size = present[key]
            if size is None:
                # The storage's listing does not say it; who decodes the chunk will see.
                cells.append(cell)
                continue
            sizes[file] = size
            if array.file_bytes is not None and size != array.file_bytes:
                text = f'has {size:,} bytes, its chunk {array.file_bytes:,}'
                ends = (min(size, array.file_bytes), max(size, array.file_bytes))
                damages.append(Damage('size', file, text, leaf, cell, box, ends))
            else:
                cells.append(cell)
        return ArrayFiles(leaf, damages, sizes, cells, array.chunk_bytes, self, array)

    def decode(self, array: _Array, cell: Cell, file_bytes: int | None) -> None:
        """See ``ArrayFiles.decode``."""
        if array.file_bytes is not None:
            self._scanner.digest(array.file(cell))
            return
        if file_bytes is not None:
            check_chunk(array.chunk_bytes, lambda: file_bytes, f'{array.leaf} ({array.file(cell)})')
        self._budget.acquire(array.chunk_bytes)
        try:
            with foreign_errors(f'{array.leaf} ({self._storage.url(join(self._directory, array.file(cell)))})'):
                box = cell_box(cell, array.chunks, array.stored.shape)
                array.store[tuple(slice(start, stop) for start, stop in box)].read().result()
        finally:
            self._budget.release(array.chunk_bytes)

    def _open(self, leaf: str, stored: StoredLeaf) -> _Array:
        store = self._reader.open(stored, leaf)
        metadata = store.spec().to_json()['metadata']
        file_bytes = None
        if has_plain_chunks(stored.array):
            grid = grid_of(json.dumps(metadata).encode(), stored.array)
            file_bytes = None if grid is None else grid.cell_bytes
        chunks = tuple(store.chunk_layout.write_chunk.shape or ())  # None for a scalar
        return _Array(leaf, stored, store, chunks, _keys_of(metadata), file_bytes)

    def _present(self, array: _Array) -> dict[str, int | None]:
        """The array's files by key, with sizes where they say something."""
        if array.stored.array.container == 'ocdbt':
            with foreign_errors(self._reader.url(array.stored.array)):
                return {key.decode(): 0 for key in array.store.kvstore.list().result()}
        base = join(self._directory, array.stored.array.location)
        return {key.removeprefix(f'{base}/'): size for key, size in self._storage.walk(base)}


def _keys_of(metadata: Any) -> _Keys:
    """From zarr v2's ``dimension_separator`` or zarr v3's ``chunk_key_encoding``."""
    encoding = metadata.get('chunk_key_encoding')
    if encoding is None:
        return _Keys(metadata.get('dimension_separator', '.'))
    is_default = encoding.get('name') == 'default'
    separator = encoding.get('configuration', {}).get('separator', '/' if is_default else '.')
    return _Keys(separator, 'c' if is_default else '')


def _cells(grid: Sequence[int]) -> Iterator[Cell]:
    """Every position in C order. Not ``itertools.product``, which begins by making tuples as long as the grid claims."""
    for number in range(math.prod(grid)):
        cell: list[int] = []
        rest = number
        for size in reversed(grid):
            rest, index = divmod(rest, size)
            cell.append(index)
        yield tuple(reversed(cell))


def cell_box(cell: Sequence[int], chunks: Sequence[int], shape: Sequence[int]) -> Box:
    """The elements in a chunk, (start, stop) per dimension, without what sticks out at the array's end."""
    return tuple(
        (index * chunk, min((index + 1) * chunk, size)) for index, chunk, size in zip(cell, chunks, shape, strict=True)
    )


def cell_of(key: str, rank: int) -> Cell | None:
    """The position that a chunk's file name says; None for another file."""
    parts = key.replace('/', '.').split('.')
    if rank == 0:
        return () if parts == ['0'] else None
    good = len(parts) == rank and all(part.isdecimal() and part.isascii() for part in parts)
    return tuple(map(int, parts)) if good else None


def placed(damage: Damage, name: str, leaf: StoredLeaf, key: str) -> Damage:
    """With the leaf's name and, where the file is a chunk, its position and elements."""
    chunks = leaf.array.metadata.get('chunks')
    cell = damage.chunk if damage.chunk is not None else cell_of(key, len(leaf.shape))
    box = None
    if cell is not None and isinstance(chunks, list | tuple) and len(chunks) == len(cell):
        box = cell_box(cell, chunks, leaf.shape)
    return dataclasses.replace(damage, leaf=name, chunk=cell, box=box)


def is_listed(leaf: StoredLeaf, ledger: Ledger) -> bool:
    """Whether lists have every file of an array; of several lists one may be gone."""
    array = leaf.array
    chunks = array.metadata.get('chunks', ())
    if f'{array.location}/.zarray' not in ledger or len(chunks) != len(array.shape):
        return False
    count = math.prod(-(-size // chunk) for size, chunk in zip(array.shape, chunks, strict=True))
    names = names_of(whole_box(array.shape), chunks) if count <= len(ledger) else ['']
    # Other writers may name them with slashes, which only the .zarray says.
    return any(
        all(f'{array.location}/{name.replace(".", separator)}' in ledger for name in names) for separator in ('.', '/')
    )

"""Checks the files that an array's metadata implies, for checkpoints without file checksums.

For an array without a codec, the size of each file follows from the metadata; chunks with a codec must decode. Hostile metadata
may describe a huge grid of chunks, so the check ends after a limited number of missing chunks.
"""

from __future__ import annotations

import dataclasses
import math
import operator

from t5ckpt.core.byte_budget import ByteBudget
from t5ckpt.core.keys import join
from t5ckpt.format.array_spec import METADATA_FILES, StoredArray
from t5ckpt.format.chunk_grid import ChunkGrid, ChunkIndex
from t5ckpt.format.file_checksums import FileChecksums, size_text
from t5ckpt.format.orbax import DATABASE_FILE
from t5ckpt.format.zarray import zarray_file
from t5ckpt.integrity.report import Damage
from t5ckpt.reading.array_reader import open_array
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.chunks import OpenArray
from t5ckpt.reading.tensorstore_array import TensorStoreArray

_MAX_NAMED = 100
_DECODED_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class ArrayFiles:
    """The files of one array.

    Attributes:
      name: of the leaf.
      stored: the leaf.
      array: the opened array.
      damages: files that are missing or have the wrong size.
      sizes: of the existing files, by name relative to the checkpoint's directory; in an OCDBT database, of its files.
      chunks: the indices of the chunks that exist in the right size.
    """

    name: str
    stored: StoredArray
    array: OpenArray
    damages: list[Damage] = dataclasses.field(default_factory=list[Damage])
    sizes: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    chunks: list[ChunkIndex] = dataclasses.field(default_factory=list[ChunkIndex])

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded chunk."""
        return math.prod(self.array.grid.chunk_shape) * self.stored.dtype.itemsize

    def file(self, chunk_index: ChunkIndex) -> str:
        """The file of a chunk; in an OCDBT database its key."""
        return f'{self.stored.location}/{self.array.grid.key(chunk_index)}'


class ImpliedFiles:
    """Lists and decodes the files of arrays of one checkpoint. Safe from any thread."""

    def __init__(self, files: CheckpointFiles):
        """Takes the reader of the checkpoint's files."""
        self._files = files
        self._budget = ByteBudget(_DECODED_BYTES)
        self._databases: dict[str, dict[str, int]] = {}

    def files(self, name: str, stored: StoredArray) -> ArrayFiles:
        """Opens an array and lists its files.

        Raises:
          FormatError: its metadata cannot be read, contradicts the manifest, or it leads outside the checkpoint.
          StorageError: a directory cannot be listed.
        """
        array = ArrayFiles(name, stored, open_array(self._files, stored, name))
        location, grid, file_bytes = stored.location, array.array.grid, array.array.file_bytes
        present = self._present(array)
        if stored.is_in_database:
            array.sizes.update(self._database(location))
        metadata = METADATA_FILES.get(stored.driver)
        if metadata is not None and not stored.is_in_database and metadata not in present:
            text = 'only t5ckpt opens the array without it'
            array.damages.append(Damage('missing', f'{location}/{metadata}', text, name))
        implied = grid
        if array.array.is_filled:
            indices = map(grid.index, present)
            implied = [
                index for index in indices if index is not None and all(map(operator.lt, index, grid.grid_shape))
            ]
        for chunk_index in implied:
            key, file, box = grid.key(chunk_index), array.file(chunk_index), grid.box(chunk_index)
            if key not in present:
                if len(array.damages) >= _MAX_NAMED:
                    left = grid.num_chunks - len(array.chunks) - _MAX_NAMED
                    array.damages.append(
                        Damage('missing', location, f'and up to {left:,} more chunks are missing', name)
                    )
                    break
                array.damages.append(Damage('missing', file, 'the metadata implies this chunk', name, chunk_index, box))
                continue
            size = present[key]
            if size is None:
                # The listing has no sizes; decoding the chunk detects a wrong one.
                array.chunks.append(chunk_index)
                continue
            array.sizes[file] = size
            if file_bytes is not None and size != file_bytes:
                array.damages.append(Damage('size', file, size_text(size, file_bytes), name, chunk_index, box))
            else:
                array.chunks.append(chunk_index)
        return array

    def decode(self, array: ArrayFiles, chunk_index: ChunkIndex) -> None:
        """Reads a chunk and decodes it.

        Raises:
          CorruptCheckpointError: it does not decode.
          StorageError: it cannot be read.
        """
        self._budget.acquire(array.chunk_bytes)
        try:
            array.array.read([range(*ends) for ends in array.array.grid.box(chunk_index)])
        finally:
            self._budget.release(array.chunk_bytes)

    def _present(self, array: ArrayFiles) -> dict[str, int | None]:
        """The array's files by key, with their sizes if the listing has them."""
        if isinstance(array.array, TensorStoreArray) and array.stored.is_in_database:
            return dict.fromkeys(array.array.keys())
        base = join(self._files.directory, array.stored.location)
        return {key.removeprefix(f'{base}/'): size for key, size in self._files.storage.walk(base)}

    def _database(self, location: str) -> dict[str, int]:
        """The sizes of the files of the OCDBT database that contains an array; 0 where the listing has none."""
        base = location.partition('//')[0]
        if base not in self._databases:
            whole = join(self._files.directory, base)
            files = ((key.removeprefix(f'{whole}/'), size or 0) for key, size in self._files.storage.walk(whole))
            self._databases[base] = {join(base, name): size for name, size in files if DATABASE_FILE.fullmatch(name)}
        return dict(self._databases[base])


def has_checksums(array: StoredArray, checksums: FileChecksums) -> bool:
    """Whether every file of an array has a checksum. Those of one process may be lost."""
    chunks = array.metadata.get('chunks', ())
    if zarray_file(array) not in checksums or len(chunks) != len(array.shape):
        return False
    # Other writers may use slashes in chunk names, which only the .zarray records.
    grids = [ChunkGrid(array.shape, tuple(chunks), separator) for separator in ('.', '/')]
    return any(
        grid.num_chunks <= len(checksums) and all(f'{array.location}/{grid.key(index)}' in checksums for index in grid)
        for grid in grids
    )

"""Reads chunk files directly into the buffers of a restore, without TensorStore: uncompressed and blosc chunks.

TensorStore would read a chunk into its own memory first, which halves the speed on machines with expensive page faults. An
array is read in three stages:

1. ``reading/local/regions.py`` computes which elements of which chunk each buffer gets.
2. ``DirectArray.tasks`` divides the chunks into tasks of at least 8 MiB, each for one thread, which opens the files.
3. ``reading/local/chunk_reader.py`` reads an open file into the regions: decoded, verified, scattered, or through a scratch.

Each byte is read once, even if several devices need parts of its chunk. The kernel is asked to read a few files ahead
(``posix_fadvise``), which keeps the disk busy when nothing is cached.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box
from t5ckpt.format.file_checksums import entry_of
from t5ckpt.reading.checksum_verifier import ChecksumVerifier
from t5ckpt.reading.local.chunk_file import ChunkFile, ChunkFiles, Limits
from t5ckpt.reading.local.chunk_reader import ChunkMemory, ChunkPart, ChunkReader, chunk_reader
from t5ckpt.reading.local.native_chunks import NativeChunks, chunk_of_file, native_chunks
from t5ckpt.reading.local.regions import ReadRequest, regions_by_chunk
from t5ckpt.reading.open_array import FileArray, Task
from t5ckpt.storage import foreign_errors

# For more chunks the list of reads would be large; TensorStore iterates over such a grid.
_MAX_CHUNKS = 2**14
# The files of a task that are open at once; the kernel reads all but the first ahead.
_AHEAD = 4


class DirectReader:
    """Opens arrays of one checkpoint in a local directory. Safe from any thread.

    Attributes:
      checks: if set, complete chunks are read and their checksums compared.
      limits: sizes of reads.
      memory: of all reads.
    """

    def __init__(
        self,
        root: str,
        limits: Limits | None = None,
        *,
        checks: ChecksumVerifier | None = None,
        follow_links: bool = False,
    ):
        """Takes the checkpoint's directory."""
        self.checks = checks
        self.limits = Limits() if limits is None else limits
        self.memory = ChunkMemory(self.limits.scratch)
        self._root = root
        self._follow_links = follow_links

    def open(self, leaf: StoredArray, name: str, where: str, boxes: Iterable[Box]) -> DirectArray | None:
        """Opens an array that ``native_chunks.is_read_natively``, for reads of some boxes.

        Returns:
          The opened array; None if TensorStore has to read it, because of its ``.zarray`` or of the number of chunks.

        Raises:
          CorruptCheckpointError: its ``.zarray`` is not a regular file, or differs from its checksum.
        """
        try:
            with self.files(leaf.location, name) as files:
                text = files.metadata()
        except OSError:
            # TensorStore reads the array instead, and reports the error.
            return None
        if self.checks is not None:
            self.checks.compare(f'{leaf.location}/.zarray', name, entry_of(text))
        chunks = native_chunks(text, leaf)
        if chunks is None or chunks.has_fill or sum(chunks.grid.count(box) for box in boxes) > _MAX_CHUNKS:
            return None
        return DirectArray(self, leaf, name, where, chunks)

    def open_range(self, leaf: StoredArray, name: str, where: str) -> DirectArray:
        """Opens an array that is a range of bytes of a file."""
        return DirectArray(self, leaf, name, where, chunk_of_file(leaf))

    def files(self, location: str, name: str) -> ChunkFiles:
        """Opens the directory of an array."""
        return ChunkFiles(self._root, location, name, follow_links=self._follow_links)


class DirectArray(FileArray):
    """An array whose chunk files are read, and decoded if they are encoded, by the tasks."""

    def __init__(self, reader: DirectReader, leaf: StoredArray, name: str, where: str, chunks: NativeChunks):
        """Takes what ``DirectReader`` found."""
        # A cast reads blocks into a scratch, which would read more of a file of many tensors than the boxes.
        super().__init__(leaf, where, can_convert=not chunks.file)
        self._reader = reader
        self._name = name
        self._chunks = chunks

    def tasks(self, buffers: Mapping[Box, np.ndarray]) -> list[Task]:
        """The tasks that fill buffers, in the dtype on disk or the one to convert to, with boxes of the array."""
        request = ReadRequest(self._leaf, self._name, buffers)
        regions = regions_by_chunk(request, self._chunks)
        limits = self._reader.limits
        reader = chunk_reader(request, self._chunks, regions, self._reader.checks, limits, self._reader.memory)
        tasks: list[Task] = []
        batch: list[ChunkPart] = []
        size = 0
        for chunk_index, chunk_regions in regions.items():
            for start, stop in reader.ranges(chunk_regions):
                first, last = reader.blocks.offset(start), reader.blocks.offset(stop)
                overlapping = [
                    region for region in chunk_regions if region.start_byte < last and first < region.stop_byte
                ]
                if not overlapping:
                    continue
                batch.append(ChunkPart(self._chunks.name(chunk_index), start, stop, overlapping))
                size += last - first
                if size >= limits.task:
                    tasks.append(functools.partial(self._read, reader, batch))
                    batch, size = [], 0
        if batch:
            tasks.append(functools.partial(self._read, reader, batch))
        return tasks

    def _read(self, reader: ChunkReader, parts: Sequence[ChunkPart]) -> None:
        chunks = self._chunks
        location = '' if chunks.file else self._leaf.location
        with foreign_errors(self._where), self._reader.files(location, self._name) as files:
            opened: collections.deque[tuple[ChunkFile, ChunkPart]] = collections.deque()
            try:
                for part in parts:
                    if len(opened) == _AHEAD:
                        _read_first(reader, opened)
                    fd = files.open_chunk(part.name, chunks.file_bytes)
                    opened.append((ChunkFile(fd, files.path(part.name), self._name, chunks.offset), part))
                    opened[-1][0].announce(reader.blocks.offset(part.start), reader.blocks.offset(part.stop))
                while opened:
                    _read_first(reader, opened)
            finally:
                for file, _ in opened:
                    file.close()


def _read_first(reader: ChunkReader, opened: collections.deque[tuple[ChunkFile, ChunkPart]]) -> None:
    file, part = opened[0]
    reader.read(file, part)
    opened.popleft()
    file.close()

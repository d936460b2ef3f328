"""Reads chunk files of blosc: verifies the encoded bytes, and decodes them into the regions.

A chunk that is contiguous in one buffer is decoded into it, others into memory from which each region copies its elements.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator

import numpy as np

from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.codecs import decode
from t5ckpt.format.file_checksums import entry_of
from t5ckpt.reading.checksum_verifier import ChecksumVerifier
from t5ckpt.reading.local.chunk_file import Blocks, ChunkFile, Limits
from t5ckpt.reading.local.chunk_reader import ChunkPart, ChunkReader
from t5ckpt.reading.local.regions import ReadRequest
from t5ckpt.reading.local.uncompressed import PlainChunks
from t5ckpt.reading.size_limits import check_chunk

# Blosc adds 16 bytes to values that it cannot compress.
_OVERHEAD = 4096


class ChunkMemory:
    """Memory for as many chunks as there are cores, used again and again, because the first access to memory is slow."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(os.cpu_count() or 1)
        self._spare: list[_Pair] = []

    @contextlib.contextmanager
    def reserved(self) -> Generator[_Pair]:
        """Memory for one chunk; waits for another thread if all is in use."""
        with self._free:
            pair = self._spare.pop() if self._spare else _Pair()
            try:
                yield pair
            finally:
                self._spare.append(pair)


class _Pair:
    """Memory for the encoded and the decoded bytes of a chunk."""

    def __init__(self) -> None:
        self._encoded = self._decoded = np.empty(0, np.uint8)

    def encoded(self, size: int) -> memoryview:
        """The first ``size`` bytes of the memory for encoded bytes."""
        if self._encoded.size < size:
            self._encoded = np.empty(size, np.uint8)
        return self._encoded[:size].data

    def decoded(self, size: int) -> memoryview:
        """The first ``size`` bytes of the memory for decoded bytes."""
        if self._decoded.size < size:
            self._decoded = np.empty(size, np.uint8)
        return self._decoded[:size].data


class DecodingReader(ChunkReader):
    """Reads and decodes whole chunks."""

    reads_whole_chunks = True

    def __init__(
        self,
        request: ReadRequest,
        chunks: PlainChunks,
        limits: Limits,
        memory: ChunkMemory,
        checks: ChecksumVerifier | None,
    ):
        super().__init__(request, chunks, Blocks(chunks, max(1, chunks.chunk_bytes)), limits)
        self._memory = memory
        self._checks = checks

    def read(self, file: ChunkFile, part: ChunkPart) -> None:
        """See ``ChunkReader``."""
        size, chunk_bytes = file.size(), self._chunks.chunk_bytes
        if size > chunk_bytes + _OVERHEAD:
            raise CorruptCheckpointError(
                f'{self._leaf}: {file.path} has {size:,} bytes, its chunk {chunk_bytes:,}. It is damaged; restore an older '
                'step, or copy the checkpoint again.'
            )
        check_chunk(chunk_bytes, lambda: size, f'{self._leaf} ({file.path})')
        with self._memory.reserved() as memory:
            encoded = memory.encoded(size)
            file.read(encoded, 0)
            if self._checks is not None:
                self._checks.compare(f'{self._array.location}/{part.name}', self._leaf, entry_of(encoded))
            straight = ((region, region.straight_bytes(0, chunk_bytes)) for region in part.regions)
            filled, into = next(((region, into) for region, into in straight if into is not None), (None, None))
            if into is None:
                into = memory.decoded(chunk_bytes)
            try:
                decode(encoded, into)
            except ValueError as error:
                raise CorruptCheckpointError(
                    f'{self._leaf}: {file.path} cannot be decoded: {error}. It is damaged; restore an older step, or copy the '
                    'checkpoint again.'
                ) from error
            self._copy(into, self._block(0, [region for region in part.regions if region is not filled]))

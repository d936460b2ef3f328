"""Compares the checksums of chunk files with the recorded ones (``format/file_checksums.py``) while a checkpoint is read.

Chunks that are read into buffers are hashed as they are read (``reading/local/chunk_reader.py``). A file that another reader
opens (TensorStore for another codec, the kernel for a mapped array) is read and hashed once before it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from t5ckpt.core.keys import join
from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box, ChunkGrid
from t5ckpt.format.file_checksums import FileChecksums, FileEntry
from t5ckpt.format.zarray import ZARRAY
from t5ckpt.reading.checkpoint_files import CheckpointFiles

_CURE = (
    f'{CURE_OF_DAMAGE} "t5ckpt verify --full" lists all that is damaged. "t5ckpt cp --drop" copies the step without these '
    'leaves.'
)
_CURE_OF_METADATA = 'Remove this file: the manifest has the same metadata, and is then used.'


class ChecksumVerifier:
    """The checksums of one checkpoint's files. Safe from any thread."""

    def __init__(self, checksums: FileChecksums, files: CheckpointFiles, *, only_whole_chunks: bool = False):
        """Takes the checkpoint's file checksums, and the reader of its files.

        With ``only_whole_chunks`` an uncompressed chunk is verified only if one request reads all of it. A compressed chunk is
        always read completely, and so verified.
        """
        self.only_whole_chunks = only_whole_chunks
        self._checksums = checksums
        self._files = files
        self._good: set[str] = set()

    def listed(self, prefix: str) -> list[str]:
        """The files with a checksum whose names begin with ``prefix``."""
        return [file for file in self._checksums if file.startswith(prefix)]

    def compare(self, file: str, name: str, entry: FileEntry) -> None:
        """Compares a file's length and checksum with the recorded ones.

        Raises:
          CorruptCheckpointError: they differ, or the file has none.
        """
        if file not in self._checksums:
            raise CorruptCheckpointError(f'{self._where(file, name)} has no checksum in this checkpoint. {_CURE}')
        cure = _CURE_OF_METADATA if file.endswith(f'/{ZARRAY}') else _CURE
        self._checksums.check(file, entry, self._where(file, name), cure)
        self._good.add(file)

    def check(self, file: str, name: str) -> None:
        """Reads and verifies a file, once.

        Raises:
          CorruptCheckpointError: as for :meth:`compare`, or the file is missing.
          StorageError: the file cannot be read.
        """
        if file in self._good:
            return
        try:
            entry = self._files.digest(file)
        except CheckpointNotFoundError as error:
            raise CorruptCheckpointError(f'{self._where(file, name)} is missing. {_CURE}') from error
        self.compare(file, name, entry)

    def _where(self, file: str, name: str) -> str:
        return f'{name}: {self._files.storage.url(join(self._files.directory, file))}'

    def tasks(self, array: StoredArray, name: str, boxes: Iterable[Box]) -> list[Callable[[], None]]:
        """One check per chunk file that the boxes overlap; none if the metadata is inconsistent."""
        chunks = array.metadata.get('chunks', ())
        if len(chunks) != len(array.shape):
            return []
        grid = ChunkGrid(array.shape, tuple(chunks))
        files = {f'{array.location}/{grid.key(index)}' for box in boxes for index in grid.chunks_of(box)}
        metadata = f'{array.location}/{ZARRAY}'
        return [
            lambda: self._check_metadata(metadata, name),
            *(lambda file=file: self.check(file, name) for file in files),
        ]

    def _check_metadata(self, file: str, name: str) -> None:
        """Verifies a ``.zarray``; a missing one is replaced by the manifest, which has the same metadata."""
        with contextlib.suppress(CheckpointNotFoundError):
            self.compare(file, name, self._files.digest(file))

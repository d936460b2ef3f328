"""An open chunk file: readahead, and reads of byte ranges into buffers."""

from __future__ import annotations

import contextlib
import dataclasses
import os

import numpy as np

from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.reading.local.scatter_read import read_runs


@dataclasses.dataclass(frozen=True)
class ChunkFile:
    """An open chunk file.

    Attributes:
      fd: its descriptor, which ``close`` closes.
      path, leaf: for messages.
      base: the offset of the chunk in the file; other offsets are relative to it.
    """

    fd: int
    path: str
    leaf: str
    base: int = 0

    def announce(self, start: int, stop: int) -> None:
        """Asks the kernel to read a range of bytes ahead, if the system supports it."""
        if hasattr(os, 'posix_fadvise'):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fd, self.base + start, stop - start, os.POSIX_FADV_WILLNEED)

    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self.fd).st_size

    def read(self, into: memoryview, offset: int) -> None:
        """Fills a buffer with the bytes at an offset.

        Raises:
          CorruptCheckpointError: the file is too short.
          OSError: it cannot be read.
        """
        offset += self.base
        while into:
            count = os.preadv(self.fd, [into], offset)
            if count == 0:
                raise self._cut_off()
            offset, into = offset + count, into[count:]

    def read_runs(self, offset: int, places: np.ndarray, lengths: np.ndarray) -> None:
        """Fills several buffers with consecutive bytes of the file; see ``scatter_read.read_runs``. Raises as ``read``."""
        try:
            read_runs(self.fd, self.base + offset, places, lengths)
        except EOFError as error:
            raise self._cut_off() from error

    def _cut_off(self) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f'{self.leaf}: {self.path} became shorter while it was read. Restore an older step, or copy the checkpoint again.'
        )

    def close(self) -> None:
        """Closes the descriptor; to be called once."""
        os.close(self.fd)

"""Checks the sizes in a checkpoint's metadata against its files, before memory is allocated.

A manifest of a hundred bytes can describe an array or a chunk of 2^60 elements. Memory is allocated only for sizes that the files
can hold. A plain chunk is as long as its file, and no codec of zarr expands one byte to more than 2^17 bytes (zstd 2^15, gzip
2^10, blosc 2^8; bz2 can, but only for chunks of zeros far above the size that is checked). An array that needs more memory
than the machine has is refused, before the kernel kills the process.
"""

from __future__ import annotations

from collections.abc import Callable

from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import CorruptCheckpointError, NotEnoughMemoryError
from t5ckpt.storage.memory_limit import memory_limit

_NEEDS_NO_PROOF = 256 * 2**20
_MAX_RATIO = 2**17
_MANY = 2**14


def check_chunk(chunk_bytes: int, file_bytes: Callable[[], int], where: str) -> None:
    """Checks that a chunk file can hold the bytes that its metadata describes; small chunks are accepted unchecked.

    Raises:
      CorruptCheckpointError: no codec compresses that many bytes to the size of the file.
      NotEnoughMemoryError: the chunk does not fit in this machine's memory.
    """
    if chunk_bytes <= _NEEDS_NO_PROOF:
        return
    if chunk_bytes > (size := file_bytes()) * _MAX_RATIO:
        raise CorruptCheckpointError(
            f'{where}: the metadata describes a chunk of {chunk_bytes:,} bytes, which a file of {size:,} bytes cannot '
            'hold. Do not use this checkpoint.'
        )
    check_memory(chunk_bytes, where)


def check_memory(nbytes: int, where: str) -> None:
    """Checks that this machine has the memory that an array needs.

    Raises:
      NotEnoughMemoryError: the array does not fit.
    """
    if nbytes <= _NEEDS_NO_PROOF:
        return
    limit = memory_limit()
    if nbytes > limit:
        raise NotEnoughMemoryError(
            f'{where}: {nbytes:,} bytes are needed, this machine has {limit:,}. Read a slice of it '
            '(open_checkpoint(path)[name][:100], t5ckpt cat PATH NAME[:100]), map it (mmap=True), or restore it sharded.'
        )


def check_count(chunks: int, files: Callable[[], int], where: str) -> None:
    """Checks that an array with many chunks has a file for each; the files of an array with few chunks are not counted.

    Raises:
      CorruptCheckpointError: it has fewer files.
    """
    if chunks > _MANY and chunks > (count := files()):
        raise CorruptCheckpointError(
            f'{where}: the metadata describes {chunks:,} chunks, and there are {count:,} files. It is damaged or forged. '
            f'{CURE_OF_DAMAGE}'
        )

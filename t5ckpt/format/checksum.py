"""Computes the checksum of files: xxh3-64 from the xxhash package, which hashes 28 GB/s on one core.

``storage/`` computes the checksums of the chunks that it writes. ``reading/checkpoint_files.py`` compares those of the files
that are read, and ``format/file_checksums.py`` describes the files that record them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

ALGORITHM = 'xxh3_64'


def digest(data: bytes | memoryview | np.ndarray) -> str:
    """The xxh3-64 of a buffer, as 16 hex digits; an array must be contiguous."""
    buffer: Any = data.reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else data
    return xxhash.xxh3_64_hexdigest(buffer)

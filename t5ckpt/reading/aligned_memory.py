"""Allocates host arrays that XLA's CPU backend uses without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from t5ckpt.errors import CorruptCheckpointError

ALIGNMENT = 64
"""Bytes of which the addresses of XLA's buffers are multiples."""


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialized C-order array whose data begins at a multiple of 64 bytes, as XLA wants its buffers."""
    size = math.prod(shape) * dtype.itemsize
    try:
        raw = np.empty(size + ALIGNMENT, np.uint8)
    except (MemoryError, ValueError) as error:
        raise CorruptCheckpointError(
            f'an array of shape {tuple(shape)} and dtype {dtype.name} needs {size} bytes, which cannot be allocated. Read a '
            'slice of it; if you saved no array of this size, the manifest is damaged.'
        ) from error
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)

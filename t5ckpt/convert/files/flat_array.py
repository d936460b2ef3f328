"""Reads boxes of arrays that are stored in C order in a file, for the files of TensorFlow."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import numpy as np

from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.chunk_grid import Box, strides_of


@dataclasses.dataclass(frozen=True)
class FlatArray:
    """The location of an array.

    Attributes:
      name: for messages.
      dtype, shape: of the array.
      file: the path of the file.
      offset: of the array's first byte in the file.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: str
    offset: int

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, fd: int, index: Any) -> np.ndarray:
        """The values of a NumPy basic index, as a copy; reads only the bounding box of these values.

        Raises:
          CorruptCheckpointError: the file is too short.
          OSError: it cannot be read.
        """
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)[index]
        box = box_of(index, self.shape)
        if box is None:
            return read_box(fd, self, Box.whole(self.shape))[index]
        return read_box(fd, self, box)


def box_of(index: Any, shape: tuple[int, ...]) -> Box | None:
    """The box of an index of one slice with step 1 per dimension; None for any other index."""
    if not isinstance(index, tuple) or len(index) != len(shape):
        return None
    if not all(isinstance(part, slice) and part.step in (None, 1) for part in index):
        return None
    return Box.from_slices(index, shape)


def read_box(fd: int, array: FlatArray, box: Box) -> np.ndarray:
    """Reads a box, one contiguous run after another; a memory map would count the pages as memory of this process."""
    shape = box.shape
    out = np.empty(shape, array.dtype)
    if not out.size:
        return out
    cut = [axis for axis, size in enumerate(array.shape) if shape[axis] != size]
    outer = cut[-1] if cut else 0
    strides = strides_of(array.shape)
    flat = out.reshape(math.prod(shape[:outer]), -1).view(np.uint8)
    for row, position in enumerate(np.ndindex(*shape[:outer])):
        first = sum((i + start) * stride for i, (start, _), stride in zip(position, box, strides, strict=False))
        first += box[outer][0] * strides[outer] if shape else 0
        view, offset = memoryview(flat[row]), array.offset + first * array.dtype.itemsize
        while view:
            count = os.preadv(fd, [view], offset)
            if not count:
                raise CorruptCheckpointError(f'{array.name}: {array.file} is too short. Copy the checkpoint again.')
            view, offset = view[count:], offset + count
    return out

"""The arrays of a checkpoint for an export: name, shape, dtype, and slices on request."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from t5ckpt.catalog.locate import Located, locate
from t5ckpt.core.arguments import check_patterns
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.protocols import leaf_pattern, meant_pattern
from t5ckpt.core.text import some_of
from t5ckpt.errors import UnmatchedPattern
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box
from t5ckpt.reading.array_reader import ArrayReader, lazy_leaf
from t5ckpt.reading.contents import decode_contents, read_raw
from t5ckpt.reading.identity import Identity


@dataclasses.dataclass(frozen=True)
class Source:
    """One array: ``read`` takes a tuple of slices; ``chunks`` is the shape of a chunk."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Sources:
    """A checkpoint's arrays by name.

    Attributes:
      arrays: by leaf name.
      located: the checkpoint.
      identity: of the checkpoint, to detect a replacement during the export.
      others: names of leaves that are not arrays: None, text, empty containers.
    """

    arrays: Mapping[str, Source]
    located: Located
    identity: Identity
    others: tuple[str, ...]

    def select(self, pattern: str | None) -> dict[str, Source]:
        """The arrays with a match of a regular expression in their names; all for None.

        Raises:
          ValueError: not a regular expression.
          UnmatchedPattern: no name has a match.
        """
        if pattern is None:
            return dict(self.arrays)
        check_patterns([pattern], 'select')
        chosen = {name: source for name, source in self.arrays.items() if leaf_pattern(pattern).search(name)}
        if not chosen:
            raise UnmatchedPattern(
                f'select={pattern!r} matches no array. The arrays are {some_of(list(self.arrays), 10) or "none"}.'
                f'{meant_pattern(pattern, self.arrays, anywhere=True)}'
            )
        return chosen


def open_sources(path: str | os.PathLike[str], step: int | None) -> Sources:
    """Opens a checkpoint; no array is read.

    Raises:
      CheckpointNotFoundError, FormatError: see ``t5ckpt.open_checkpoint``.
    """
    located = locate(path, step, tensors=True)
    contents = decode_contents(located, read_raw(located, checksums=True))
    # Checksums are verified, so that an export of damaged files fails.
    reader = ArrayReader(located, True, checksums=contents.checksums)
    arrays: dict[str, Source] = {}
    others: list[str] = []
    for tree_path, leaf in contents.leaves().items():
        name = leaf_name(tree_path)
        if not hasattr(leaf, 'dtype'):
            others.append(name)
            continue
        lazy = lazy_leaf(reader, leaf, name)
        chunks = leaf.metadata.get('chunks', lazy.shape) if isinstance(leaf, StoredArray) else lazy.shape
        arrays[name] = Source(tree_path, name, lazy.shape, lazy.dtype, tuple(chunks), lazy.__getitem__)
    return Sources(arrays, located, contents.identity, tuple(others))


def boxes_of(source: Source, axis: int, box_bytes: int) -> Iterator[Box]:
    """Yields boxes that cover an array, divided along one axis, each of whole chunks and of about ``box_bytes``.

    Chunks are always read completely, so a chunk in which a box ended would be read twice. If the chunks of one box have more
    than eight times ``box_bytes``, the box is smaller than a chunk, to limit memory.
    """
    whole = Box.whole(source.shape)
    if not source.shape or source.nbytes <= box_bytes or source.shape[axis] <= 1:
        yield whole
        return
    size = source.shape[axis]
    rows = max(1, box_bytes * size // source.nbytes)
    chunk = min(size, max(1, source.chunks[axis]))
    step = rows // chunk * chunk or (chunk if chunk <= 8 * rows else rows)
    for start in range(0, size, step):
        yield Box([*whole[:axis], (start, min(size, start + step)), *whole[axis + 1 :]])

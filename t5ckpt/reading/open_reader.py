"""Opens a checkpoint to read its arrays: finds it, decodes it, and chooses the reader."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.catalog.locate import locate, with_links
from t5ckpt.core.arguments import check_word
from t5ckpt.format.stored_leaf import StoredLeaf
from t5ckpt.lazy import LazyArray, LazyThreadPoolArray
from t5ckpt.reading.array_reader import ArrayReader
from t5ckpt.reading.cached_chunks import CachedChunks
from t5ckpt.reading.contents import Contents, check_step, read_contents
from t5ckpt.reading.raw_files import read_raw
from t5ckpt.storage import Storage


def lazy_leaf(reader: ArrayReader, leaf: Any, name: str, dtype: np.dtype | None = None) -> LazyArray:
    """A lazy array of a leaf, stored or inline, cast to ``dtype`` when it is read."""
    wanted = np.dtype(leaf.dtype) if dtype is None else dtype
    if not isinstance(leaf, StoredLeaf):
        value = np.asarray(leaf)
        return LazyThreadPoolArray(value.shape, wanted, value.copy, lambda index: value[index].copy())
    # Read in the calling thread, because pools and event loops do not work while the interpreter exits.
    return LazyThreadPoolArray(
        leaf.shape, wanted, lambda: reader.read(leaf, name), lambda index: reader.read(leaf, name, index)
    )


def open_contents(
    path: str | os.PathLike[str],
    step: int | None,
    storage_options: Mapping[str, Any] | None,
    reading: ReadOptions,
    *,
    lazy: bool,
) -> Contents:
    """Finds a checkpoint and decodes its manifest and sidecar; raises as ``locate`` and ``read_contents``."""
    located = with_links(locate(path, step, storage_options, tensors=True), reading.follow_links)
    checksums = reading.verifies_checksums(located.storage, lazy=lazy)
    return read_contents(located, read_raw(located, checksums=checksums))


def reader_of(contents: Contents, reading: ReadOptions) -> ArrayReader:
    """A reader of an opened checkpoint's arrays, which verifies checksums if the checkpoint was opened with them.

    Raises:
      CorruptCheckpointError: with ``verify='full'``, the directory's name has another step than the checkpoint.
    """
    located = contents.located
    check_step(contents, strictly=reading.verify == 'full')
    if located.storage.caches:
        checksums = contents.checksums if reading.verify == 'full' else None
        return ArrayReader(located, checksums=checksums, identity=contents.identity, cache=CachedChunks(contents))
    only_whole_chunks = reading.verify == 'auto'
    return ArrayReader(
        located,
        reading.mmap,
        checksums=contents.checksums,
        only_whole_chunks=only_whole_chunks,
        identity=contents.identity,
    )


VERIFY_LEVELS = ('auto', 'full', 'quick')


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """How a checkpoint is read; see ``Checkpointer`` for each field.

    Raises:
      ValueError: ``verify`` is none of ``VERIFY_LEVELS``.
    """

    mmap: bool = False
    verify: str = 'auto'
    follow_links: bool = False
    share_replicated: bool = False
    budget_bytes: int = 4 * 10**9

    def __post_init__(self) -> None:
        check_word('verify', self.verify, VERIFY_LEVELS)

    def verifies_checksums(self, storage: Storage, *, lazy: bool, by_index: bool = True) -> bool:
        """Whether checksums are verified: always, never, or with 'auto' only for files that are read whole.

        On storage without local files, verification would fetch each file twice, except through a cache, which serves
        reads ``by_index`` (``ArrayReader.read``).
        """
        reads_whole_chunks = storage.local_path('') is not None and not self.mmap and not lazy
        is_cached = storage.caches and by_index
        return self.verify == 'full' or (self.verify == 'auto' and (reads_whole_chunks or is_cached))

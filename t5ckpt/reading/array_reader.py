"""Opens a checkpoint to read its arrays, by index (lazily) or into the buffers of a restore.

``ArrayReader`` chooses how an array is read. It uses the first method that the array supports. A restore first calls
``map_boxes`` for all arrays (``restore/read_arrays.py``), and then reads the others:

1. memory-mapped (``reading/local/mmap_reader.py``), with ``mmap``;
2. directly from its local files into buffers (``reading/local/direct_reader.py``), in a restore;
3. as ranges of bytes of an object, for tensor files in a bucket, or
4. through TensorStore, which reads every zarr array (both: ``reading/open_array.py``).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from t5ckpt.catalog.locate import Located, locate, with_links
from t5ckpt.core.keys import join
from t5ckpt.core.thread_pool import Pool
from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box
from t5ckpt.format.dtypes import cast, from_stored
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.names import DATASET_REMOVED
from t5ckpt.lazy import LazyArray, LazyThreadPoolArray
from t5ckpt.reading.basic_index import basic_index, relative_to_box
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.checksum_verifier import ChecksumVerifier
from t5ckpt.reading.contents import Contents, decode_contents
from t5ckpt.reading.identity import Identity
from t5ckpt.reading.local.direct_reader import DirectReader
from t5ckpt.reading.local.mmap_reader import ArrayMapper
from t5ckpt.reading.local.native_chunks import is_read_natively
from t5ckpt.reading.open_array import OpenArray, RangeArray, TensorStoreArrays
from t5ckpt.reading.raw_files import read_raw
from t5ckpt.reading.read_options import ReadOptions
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


class ArrayReader:
    """Reads arrays of one checkpoint. Safe from any thread."""

    def __init__(
        self,
        located: Located,
        mmap: bool = False,
        *,
        checksums: FileChecksums | None = None,
        only_whole_chunks: bool = False,
        identity: Identity | None = None,
    ):
        """Makes a reader.

        Args:
          located: the checkpoint.
          mmap: arrays are memory-mapped where possible, see ``reading/local/mmap_reader.py``.
          checksums: the checkpoint's file checksums; every file that is read is compared with them.
          only_whole_chunks: verifies an uncompressed chunk only if one request reads all of it.
          identity: each :meth:`read` checks that the checkpoint is still this one; None if the caller checks it once for
            many reads.
        """
        self._storage = storage = located.storage
        self._directory = directory = located.directory
        self._identity = identity
        follow_links = located.follow_links
        root = storage.local_path(directory)
        self._files = CheckpointFiles.of(located)
        self._checks = (
            None if checksums is None else ChecksumVerifier(checksums, self._files, only_whole_chunks=only_whole_chunks)
        )
        self._mapper = None if root is None or not mmap else ArrayMapper(root, follow_links=follow_links)
        self._direct = None if root is None else DirectReader(root, checks=self._checks, follow_links=follow_links)
        self._arrays = TensorStoreArrays(self._files, self._checks)
        self._around_read: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @property
    def is_local(self) -> bool:
        """Whether the checkpoint's files are on a local file system."""
        return self._direct is not None

    def map_boxes(self, leaf: StoredArray, name: str, boxes: Sequence[Box]) -> dict[Box, np.ndarray] | None:
        """Verified buffers on private maps, by box, in the leaf's dtype; None if the array is not mapped."""
        views = None if self._mapper is None else self._mapper.map_boxes(leaf, name, boxes)
        if views is None:
            return None
        for task in self._check_tasks(leaf, name, boxes):
            task()
        return {box: from_stored(view, leaf.dtype) for box, view in views.items()}

    def start_open(
        self, leaf: StoredArray, name: str, boxes: Sequence[Box], pool: Pool | None = None
    ) -> Callable[[], OpenArray]:
        """Starts to open an array for reads of some boxes.

        Args:
          leaf: the array.
          name: of the leaf, for errors.
          boxes: that will be read.
          pool: its threads run the reads. Without it, they run in the caller's thread or in TensorStore's.

        Returns:
          A function that waits for the opened array; raises as the one that ``TensorStoreArrays.start_open`` returns.
        """
        where = f'{name} ({self._arrays.url(leaf)})'
        direct = self._direct
        if leaf.driver == 'bytes':
            opened = (
                RangeArray(leaf, where, self._storage, self._directory)
                if direct is None
                else direct.open_range(leaf, name, where)
            )
            return lambda: opened
        if direct is None or pool is None or not is_read_natively(leaf):
            return self._arrays.start_open(leaf, name, where)
        opening = pool.submit(direct.open, leaf, name, where, boxes)
        return lambda: opening.result() or self._arrays.start_open(leaf, name, where)()

    def read(self, leaf: StoredArray, name: str, index: Any = ...) -> np.ndarray:
        """Reads a numpy basic index of an array; only the chunks that it overlaps are read.

        Args:
          leaf: the array.
          name: of the leaf, for errors.
          index: an integer, a slice with any step, Ellipsis or None, or a tuple of these.

        Returns:
          An array of the leaf's dtype: a new array or, for the index ``...`` of a mapped leaf, an array on a private map.

        Raises:
          CheckpointNotFoundError: the checkpoint was deleted or overwritten since it was opened.
          FormatError: the array is damaged.
          StorageError: a file cannot be read.
        """
        with self._around_read():
            return self._read_identified(leaf, name, index)

    def _read_identified(self, leaf: StoredArray, name: str, index: Any) -> np.ndarray:
        if self._identity is None:
            return self._read(leaf, name, index)
        # A read that verifies checksums needs no check of the checkpoint's identity.
        file = leaf.location if leaf.driver == 'bytes' else None
        with self._identity.checked_on_failure() if self._compares_all() else self._identity.reading(file=file):
            return self._read(leaf, name, index)

    def _compares_all(self) -> bool:
        return self._checks is not None and not self._checks.only_whole_chunks

    def in_one(self) -> Self:
        """A reader for many reads, after which the caller checks the checkpoint's identity once."""
        reader = copy.copy(self)
        reader._identity = None  # noqa: SLF001 - a copy of itself
        return reader

    def within(self, context: Callable[[], contextlib.AbstractContextManager[None]]) -> Self:
        """A reader each :meth:`read` of which runs in a context."""
        reader = copy.copy(self)
        reader._around_read = context  # noqa: SLF001 - a copy of itself
        return reader

    def _read(self, leaf: StoredArray, name: str, index: Any) -> np.ndarray:
        basic = basic_index(index, leaf.shape)
        if basic is None:
            return self._read(leaf, name, ...)[index]
        slices, after = basic
        box = Box.from_slices(slices, leaf.shape)
        for task in self._check_tasks(leaf, name, [box]):
            task()
        values = self._read_mapped(leaf, name, slices, whole=index is Ellipsis)
        if values is None:
            values = self.start_open(leaf, name, [box])().read(slices)
        return from_stored(values, leaf.dtype)[after]

    def _check_tasks(self, array: StoredArray, name: str, boxes: Iterable[Box]) -> list[Callable[[], None]]:
        """The checks to run before boxes are read by a reader that does not verify checksums."""
        return [] if self._checks is None else self._checks.tasks(array, name, boxes)

    def check_prefixed(self, prefix: str) -> None:
        """Verifies the files with a prefix that are not arrays, before another library opens them.

        Raises:
          FormatError: a file is damaged, missing, or a link out of the checkpoint.
        """
        parent, _, beginning = prefix.rpartition('/')
        names = [join(parent, name) for name in self._storage.names(join(self._directory, parent), beginning)]
        for name in names:
            self._files.check(name, name)
        removed = not names and self._storage.kind(join(self._directory, parent, DATASET_REMOVED)) == 'file'
        if self._checks is not None and not removed:
            for file in self._checks.listed(prefix):
                self._checks.check(file, 'data iterator')

    def _read_mapped(
        self, array: StoredArray, name: str, slices: tuple[slice, ...], *, whole: bool
    ) -> np.ndarray | None:
        if self._mapper is None:
            return None
        box = Box.from_slices(slices, array.shape)
        views = self._mapper.map_boxes(array, name, [box], strided=not whole)
        if views is None:
            return None
        if whole:
            return views[box]
        # A copy of the slice, since a view would keep the whole map alive.
        return views[box][relative_to_box(slices)].copy()


def lazy_leaf(reader: ArrayReader, leaf: Any, name: str, dtype: np.dtype | None = None) -> LazyArray:
    """A lazy array of a leaf, stored or inline, cast to ``dtype`` when it is read."""
    wanted = np.dtype(leaf.dtype) if dtype is None else dtype
    if not isinstance(leaf, StoredArray):
        value = np.asarray(leaf)
        return LazyThreadPoolArray(
            value.shape,
            wanted,
            lambda: cast(value, wanted, name).copy(),
            lambda index: cast(value[index], wanted, name).copy(),
            name,
        )
    # Read in the calling thread, because pools and event loops do not work while the interpreter exits.
    return LazyThreadPoolArray(
        leaf.shape,
        wanted,
        lambda: cast(reader.read(leaf, name), wanted, name),
        lambda index: cast(reader.read(leaf, name, index), wanted, name),
        name,
    )


def open_contents(
    path: str | os.PathLike[str] | Storage,
    step: int | None,
    storage_options: Mapping[str, Any] | None,
    reading: ReadOptions,
    *,
    lazy: bool,
) -> Contents:
    """Finds a checkpoint and decodes its manifest and facts; raises as ``locate`` and ``decode_contents``."""
    located = with_links(locate(path, step, storage_options, tensors=True), reading.follow_links)
    checksums = reading.verifies_checksums(located.storage, lazy=lazy)
    return decode_contents(located, read_raw(located, checksums=checksums))


def reader_of(contents: Contents, reading: ReadOptions) -> ArrayReader:
    """A reader of an opened checkpoint's arrays, which verifies checksums if the checkpoint was opened with them.

    Raises:
      CorruptCheckpointError: with ``verify='full'``, the directory's name has another step than the checkpoint.
    """
    located = contents.located
    _check_step_of_directory(contents, strictly=reading.verify == 'full')
    return ArrayReader(
        located,
        reading.mmap,
        checksums=contents.checksums,
        only_whole_chunks=reading.verify == 'auto',
        identity=contents.identity,
    )


def _check_step_of_directory(contents: Contents, *, strictly: bool) -> None:
    """Checks that the directory's name has the step that was saved; a renamed or copied directory may have another.

    Raises:
      CorruptCheckpointError: with ``strictly``, the name has another step; otherwise a warning is logged.
    """
    written, step = contents.facts.step, contents.located.step
    if written is None or step is None or written == step:
        return
    text = f'{contents.located.url} was saved as step {written!r:.40}: its directory was renamed, or is a copy'
    if strictly:
        raise CorruptCheckpointError(f"{text}. Rename it, or pass verify='auto'.")
    _log.warning('t5ckpt: %s.', text)

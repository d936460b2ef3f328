"""Opens a checkpoint to read its arrays, by index (lazily) or into the buffers of a restore.

A plain array may be memory-mapped (``reading/mapped.py``). Otherwise its chunks are read (``reading/chunks.py``), those of
databases and of zarr v3 by TensorStore (``reading/tensorstore_array.py``).
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from t5ckpt.catalog.locate import Located, locate, with_links
from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box
from t5ckpt.format.dtypes import cast
from t5ckpt.format.file_checksums import entry_of
from t5ckpt.format.names import DATASET_REMOVED
from t5ckpt.format.zarray import decode_zarray, implied_metadata, layout_in_manifest, layout_of_range, zarray_file
from t5ckpt.lazy import LazyArray, LazyThreadPoolArray
from t5ckpt.options import CheckpointerOptions
from t5ckpt.reading.checkpoint_files import CheckpointFiles, Checksums
from t5ckpt.reading.chunks import ChunkedArray, OpenArray
from t5ckpt.reading.contents import Contents, read_contents
from t5ckpt.reading.identity import Identity
from t5ckpt.reading.size_limits import check_count
from t5ckpt.storage import PathOrStorage

_log = logging.getLogger('t5ckpt')
# The .zarray of an array with 32 dimensions has less than a kilobyte.
_MAX_ZARRAY_BYTES = 2**20


def open_array(files: CheckpointFiles, leaf: StoredArray, name: str, *, verifies_all: bool = False) -> OpenArray:
    """Opens an array of a checkpoint.

    A ``.zarray`` that is missing, or that the manifest implies, is replaced by the metadata in the manifest.

    Args:
      files: of the checkpoint.
      leaf: the array.
      name: of the leaf, for errors.
      verifies_all: verifies also chunks of which little is read.

    Raises:
      CorruptCheckpointError: the array is missing, or its metadata contradicts the manifest or the size of its files.
      UnsupportedFormatError: its dtype or a codec is not read.
      NotEnoughMemoryError: a chunk is larger than this machine's memory.
      FormatError: a file of the array is a link out of the checkpoint.
    """
    if leaf.driver == 'bytes':
        return ChunkedArray(leaf, name, files, layout_of_range(leaf), verifies_all=verifies_all)
    if not leaf.is_zarr_directory:
        from t5ckpt.reading.tensorstore_array import TensorStoreArray

        return TensorStoreArray(leaf, name, files)
    file = zarray_file(leaf)
    where = files.where(file, name)
    try:
        data = implied_metadata(leaf, files.checksums or {}).get(file)
        if data is None:
            data = files.read(file, name, _MAX_ZARRAY_BYTES)
            files.compare(file, name, entry_of(data))
        layout = decode_zarray(data, leaf, where)
    except CheckpointNotFoundError as error:
        if 'chunks' not in leaf.metadata:
            raise files.missing(file, name) from error
        layout = layout_in_manifest(leaf, where)
    if layout.fill is None:
        check_count(layout.grid.num_chunks, lambda: sum(1 for _ in files.storage.walk(files.key(leaf.location))), where)
    return ChunkedArray(leaf, name, files, layout, verifies_all=verifies_all)


class ArrayReader:
    """Reads arrays of one checkpoint. Safe from any thread."""

    def __init__(
        self,
        located: Located,
        mmap: bool = False,
        *,
        checksums: Checksums = None,
        verifies_all: bool = True,
        identity: Identity | None = None,
        cure_of_missing: str = '',
    ):
        """Makes a reader.

        Args:
          located: the checkpoint.
          mmap: arrays are memory-mapped where possible, see ``reading/mapped.py``.
          checksums: the checkpoint's file checksums; every file that is read whole is compared with them.
          verifies_all: reads all of each chunk, and verifies it, also if it is mapped or little of it is wanted.
          identity: each :meth:`read` checks that the checkpoint is still this one; None if the caller checks it once for
            many reads.
          cure_of_missing: replaces the usual last sentences of the error that a file is missing.
        """
        self.files = CheckpointFiles.of(located, checksums, cure_of_missing)
        self._mmap = mmap and located.storage.is_file_system
        self._verifies_all = verifies_all
        self._identity = identity

    def open(self, leaf: StoredArray, name: str) -> OpenArray:
        """Opens an array; raises as :func:`open_array`."""
        return open_array(self.files, leaf, name, verifies_all=self._verifies_all)

    def map_boxes(self, leaf: StoredArray, name: str, boxes: Sequence[Box]) -> dict[Box, np.ndarray] | None:
        """Writable buffers on private maps, by box, in the leaf's dtype; None if a box is to be read."""
        if not self._mmap or not leaf.is_zarr_directory or leaf.metadata.get('compressor') is not None:
            return None
        array = self.open(leaf, name)
        return array.map_boxes(boxes) if isinstance(array, ChunkedArray) else None

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
        with self.identified(leaf):
            return self._read(leaf, name, index)

    @contextlib.contextmanager
    def identified(self, leaf: StoredArray) -> Generator[None]:
        """For a block that reads files of an array: an error says whether the checkpoint was deleted or overwritten."""
        if self._identity is None:
            yield
            return
        with self._identity.checked_on_failure():
            # A read that verifies all checksums needs no other check of the checkpoint's identity.
            compares_all = self._verifies_all and self.files.checksums is not None
            file = leaf.location if leaf.driver == 'bytes' else None
            with contextlib.nullcontext() if compares_all else self._identity.reading(file=file):
                yield

    def in_one(self) -> Self:
        """A reader for many reads, after which the caller checks the checkpoint's identity once."""
        reader = copy.copy(self)
        reader._identity = None  # noqa: SLF001 - a copy of itself
        return reader

    def _read(self, leaf: StoredArray, name: str, index: Any) -> np.ndarray:
        basic = _basic_index(index, leaf.shape)
        if basic is None:
            return self._read(leaf, name, ...)[index]
        whole = Box.whole(leaf.shape)
        mapped = self.map_boxes(leaf, name, [whole]) if index is Ellipsis else None
        if mapped is not None:
            return mapped[whole]
        positions, after = basic
        return self.open(leaf, name).read(positions)[after]

    def check_prefixed(self, prefix: str) -> None:
        """Verifies the files with a prefix that are not arrays, before another library opens them.

        Raises:
          FormatError: a file is damaged, missing, or a link out of the checkpoint.
        """
        files, (parent, _, beginning) = self.files, prefix.rpartition('/')
        names = [join(parent, name) for name in files.storage.names(files.key(parent), beginning)]
        for name in names:
            files.check(name, name)
        removed = not names and files.storage.kind(files.key(join(parent, DATASET_REMOVED))) == 'file'
        for file in () if removed else files.checksums or ():
            if file.startswith(prefix):
                files.verify(file, 'data iterator')


def lazy_leaf(reader: ArrayReader, leaf: Any, name: str, dtype: np.dtype | None = None) -> LazyArray:
    """A lazy array of a leaf, stored or inline, cast to ``dtype`` when it is read."""
    wanted = np.dtype(leaf.dtype) if dtype is None else dtype

    def read(index: Any = ...) -> np.ndarray:
        if isinstance(leaf, StoredArray):
            # Read in the calling thread, because event loops do not work while the interpreter exits.
            return cast(reader.read(leaf, name, index), wanted, name)
        return cast(np.asarray(leaf)[index], wanted, name).copy()

    return LazyThreadPoolArray(leaf.shape, wanted, read, read, name)


def open_contents(
    path: PathOrStorage,
    step: int | None,
    storage_options: Mapping[str, Any] | None,
    options: CheckpointerOptions,
) -> Contents:
    """Finds a checkpoint and decodes its manifest and facts; raises as ``locate`` and ``read_contents``."""
    return read_contents(with_links(locate(path, step, storage_options, tensors=True), options.follow_links))


def reader_of(contents: Contents, options: CheckpointerOptions) -> ArrayReader:
    """A reader of an opened checkpoint's arrays, which reads its file checksums at the first use.

    Raises:
      CorruptCheckpointError: with ``verify='full'``, the directory's name has another step than the checkpoint.
    """
    is_full, part = options.verify == 'full', contents.part
    # A part has only the checksums of its own files.
    verifies = options.verifies and (is_full or not part or contents.checksums is not None)
    _check_step_of_directory(contents, strictly=is_full)
    return ArrayReader(
        contents.located,
        options.mmap,
        checksums=contents.read_checksums if verifies else None,
        verifies_all=is_full,
        identity=contents.identity,
        cure_of_missing=part,
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


def _basic_index(index: Any, shape: Sequence[int]) -> tuple[list[range], tuple[Any, ...]] | None:
    """Splits a numpy basic index into positions to read, ascending on each axis, and an index for numpy on the result.

    Returns:
      None for an advanced index (arrays, lists), which numpy applies to the whole array.

    Raises:
      IndexError: too many indices, or one out of bounds.
    """
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if not all(part is None or part is Ellipsis or isinstance(part, slice) or _is_integer(part) for part in parts):
        return None
    absent = len(shape) - sum(part is not None and part is not Ellipsis for part in parts)
    parts = parts if Ellipsis in parts else [*parts, Ellipsis]
    if absent < 0 or parts.count(Ellipsis) > 1:
        raise IndexError(f'{index!r:.80}: does not fit an array of {len(shape)} dimensions')
    at = parts.index(Ellipsis)
    parts[at : at + 1] = [slice(None)] * absent
    read: list[range] = []
    after: list[Any] = []
    for part in parts:
        if part is None:
            after.append(None)
            continue
        axis, size = len(read), shape[len(read)]
        try:
            chosen: Any = range(size)[part]
        except IndexError as error:
            raise IndexError(f'index {part} is out of bounds for axis {axis} with size {size}') from error
        if isinstance(chosen, int):
            read.append(range(chosen, chosen + 1))
            after.append(0)
        else:
            is_forward = chosen.step > 0
            read.append((chosen if is_forward else chosen[::-1]) or range(0))
            after.append(slice(None, None, 1 if is_forward else -1))
    return read, tuple(after)


def _is_integer(part: Any) -> bool:
    return hasattr(part, '__index__') and np.ndim(part) == 0 and not isinstance(part, (bool, np.bool_))

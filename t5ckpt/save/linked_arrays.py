"""Links or copies the arrays of one checkpoint into another without decoding them.

Chunk files do not contain the name of their leaf, so a checkpoint with other names, or with fewer leaves, can share them:
by hard link on one file system, otherwise by a copy of the bytes. In both cases each file is read once and compared with
the recorded checksum, if the source has one, so that damage is not copied.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import numpy as np

from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import leaf_name
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, T5CkptError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import separator_of
from t5ckpt.format.facts import TreeFacts
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, entry_of, size_text
from t5ckpt.format.zarray import implied_metadata, zarray_file, zarray_of
from t5ckpt.lazy import LazyThreadPoolArray
from t5ckpt.planning.save_plan import ArrayWrite, ChunkWrite
from t5ckpt.reading.array_reader import ArrayReader
from t5ckpt.reading.contents import Contents
from t5ckpt.storage import Storage
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.leaves import KeyData

_CURE = 'Use another copy of the checkpoint, or leave the leaf out: t5ckpt cp --leave.'
_PYTHON: Mapping[str, type] = {python.__name__: python for python in (bool, complex, float, int)}


def verified_reader(contents: Contents, *, trusts_files: bool = False) -> ArrayReader:
    """A reader of a checkpoint whose arrays are taken over. It verifies them by the file checksums, if there are any.

    Raises:
      CorruptCheckpointError: a list of checksums is lost or damaged, without ``trusts_files``.
    """
    checksums = contents.checksums
    if checksums is None and not trusts_files:
        checksums = contents.read_checksums()
    # Arrays that are read to be cast or averaged are verified, too.
    return ArrayReader(contents.located, checksums=checksums, identity=contents.identity)


@dataclasses.dataclass(frozen=True)
class ArraySource:
    """A stored array whose files are linked: the reader of its checkpoint, and the array as described there."""

    reader: ArrayReader
    leaf: StoredArray

    def linked(self, write: ArrayWrite) -> ArrayWrite:
        """The write of all files of the array with the source as its value; unchanged if the values have to be read.

        They have to be read if this array is cast, is not a directory of zarr chunks, holds the uint16 bits of a version-2
        bfloat16, or has metadata that t5ckpt does not write, which T5X might not accept.
        """
        files, leaf = self.reader.files, self.leaf
        if not leaf.is_zarr_directory or write.dtype != leaf.dtype or leaf.disk_dtype != write.array.disk_dtype:
            return write
        try:
            metadata = {'chunks': tuple(leaf.metadata['chunks']), 'compressor': leaf.metadata['compressor']}
            array = dataclasses.replace(write.array, metadata=metadata)
            file = zarray_file(leaf)
            data = implied_metadata(leaf, files.checksums or {}).get(file)
            zarray = json.loads(data or files.read(file))
            same = {**zarray, 'dimension_separator': separator_of(zarray)} == zarray_of(array)
        except (T5CkptError, ValueError, TypeError, KeyError):
            # If the file is damaged, the reader of the values says so.
            return write
        if not same:
            return write
        grid = array.grid
        chunks = tuple(ChunkWrite(box, None, box) for box in map(grid.box, grid))
        return dataclasses.replace(write, value=self, array=array, chunks=chunks)

    def link(self, write: ArrayWrite, name: str, storage: Storage, directory: str) -> FileEntry:
        """Links or copies one chunk file of :meth:`linked` into ``directory``; returns its entry.

        Raises:
          CheckpointNotFoundError: the source was deleted or overwritten in the meantime.
          CorruptCheckpointError: a file is missing, or does not match its checksum.
          UnsafeSpecError: a file is a symbolic link that leads out of the checkpoint.
        """
        files, leaf = self.reader.files, self.leaf
        old, target = join(leaf.location, name.rpartition('/')[2]), join(directory, name)
        source = files.key(old)
        where = f'{write.name}: {files.storage.url(source)}'
        with self.reader.identified(leaf):
            checksums = files.checksums or FileChecksums()
            try:
                # A damaged file may be larger than the memory.
                data = files.read(old, limit=checksums.get(old, (None,))[0])
            except CheckpointNotFoundError as error:
                raise CorruptCheckpointError(f'{where} is missing. {_CURE}') from error
            entry = entry_of(data)
            checksums.check(old, entry, where, _CURE)
            if write.array.metadata['compressor'] is None and len(data) != write.chunk_bytes:
                raise CorruptCheckpointError(f'{where} {size_text(len(data), write.chunk_bytes)}. {_CURE}')
            if not storage.link(source, target, files.storage):
                storage.write_chunk(target, data)
        return entry


class LinkedArray(LazyThreadPoolArray):
    """A stored array of another checkpoint.

    Attributes:
      source: of the files that are linked. None after a cast, which keeps only the four other arguments; then the array is read.
    """

    source: ArraySource | None = None

    @classmethod
    def of(cls, reader: ArrayReader, leaf: StoredArray, name: str) -> LinkedArray:
        """The array of a leaf, which has this name in errors."""
        read = reader.read
        array = cls(leaf.shape, leaf.dtype, lambda: read(leaf, name), lambda index: read(leaf, name, index))
        array.source = ArraySource(reader, leaf)
        return array


def linked_write(write: ArrayWrite) -> ArrayWrite:
    """The write with the files of a :class:`LinkedArray` as its value, if they can be linked."""
    source = write.value.source if isinstance(write.value, LinkedArray) else None
    return write if source is None else source.linked(write)


def linked_leaves(contents: Contents, reader: ArrayReader | None = None, *, typed: bool = True) -> LeafTable:
    """The leaves of a checkpoint, from which an identical checkpoint can be written. No stored array is read.

    ``reader`` is that of :func:`verified_reader`, if the caller has it.

    With ``typed`` Python numbers and PRNG keys are restored as such if the facts record them; else they are arrays.

    Raises:
      CorruptCheckpointError: the checksums cannot be read.
    """
    tree_facts = contents.facts.tree if typed else TreeFacts()
    reader = reader or verified_reader(contents)
    table: LeafTable = {}
    for path, leaf in contents.leaves().items():
        value = LinkedArray.of(reader, leaf, leaf_name(path)) if isinstance(leaf, StoredArray) else leaf
        if path in tree_facts.keys:
            value = KeyData(value, tree_facts.keys[path])
        elif path in tree_facts.python and not isinstance(value, LinkedArray):
            value = _PYTHON[tree_facts.python[path]](np.asarray(value)[()])
        table[path] = value
    return table

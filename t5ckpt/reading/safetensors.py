"""Reads the headers of tensor files as a checkpoint: safetensors, one file or several with an index, and npz.

Each tensor becomes a stored array that is a range of bytes of its file. A restore reads it as a chunk of a checkpoint: each
process reads the bytes that its devices need.

Process 0 reads the headers and broadcasts them as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Generator, Mapping, Sequence
from typing import Any, BinaryIO

from t5ckpt.core.keys import is_inside, join
from t5ckpt.core.leaf_path import Path, path_of
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError, UnsupportedLeafError
from t5ckpt.format.array_spec import ArrayLayout, SpecDict, StoredArray
from t5ckpt.format.dtypes import dtype_from_name
from t5ckpt.format.manifest import Manifest
from t5ckpt.format.safetensors import INDEX_SUFFIX, MAX_HEADER, Header, data_bytes, header_bytes, is_npz, parse_header
from t5ckpt.reading.checkpoint_files import CheckpointFiles, ContainedDirectory
from t5ckpt.reading.npz import NpzArray, npz_arrays, npz_errors, stored_range
from t5ckpt.reading.open_array import read_range
from t5ckpt.storage import Storage, foreign_errors
from t5ckpt.tree.leaf_table import unflatten, unique


def read_tensors(
    storage: Storage, directory: str, name: str, *, follow_links: bool = False
) -> tuple[bytes, dict[str, Any]]:
    """The tensors of a file, or of all files that an index names, as JSON for :func:`decode_tensors`.

    Returns:
      The JSON, and the ``Storage.version`` of each file from before it was read.

    Raises:
      UnsupportedFormatError: two tensors have the same place in a tree.
      CheckpointNotFoundError: a file that the index names is missing.
      CorruptCheckpointError: a header or the index does not decode, or the two disagree.
    """
    local = storage.local_path(directory)
    headers = _Bucket(storage, directory) if local is None else _Local(local, follow_links)
    versions: dict[str, Any] = {}

    def entries(file: str) -> tuple[int, list[Any]]:
        versions[file] = storage.version(join(directory, file))
        return _entries(headers, file, storage.url(join(directory, file)))

    where = storage.url(join(directory, name))
    if not name.endswith(INDEX_SUFFIX):
        tensors_by_file = {name: entries(name)}
    else:
        versions[name] = storage.version(join(directory, name))
        index = CheckpointFiles.at(storage, directory, follow_links=follow_links).read(name, MAX_HEADER)
        by_tensor = _weight_map(index, where)
        tensors_by_file = _chosen(by_tensor, {file: entries(file) for file in sorted(set(by_tensor.values()))}, where)
    _check_places([tensor[0] for _, tensors in tensors_by_file.values() for tensor in tensors], where)
    return json.dumps(tensors_by_file).encode(), versions


def _weight_map(text: bytes, where: str) -> dict[str, str]:
    """The file of each tensor, from an index.

    Raises:
      CorruptCheckpointError: the index does not decode, or names a file that is not below its directory.
    """
    try:
        by_tensor = {name: str(file) for name, file in json.loads(text, object_pairs_hook=unique)['weight_map'].items()}
        for file in by_tensor.values():
            # JSON may hold a lone surrogate, which is not valid in a file name.
            os.fsencode(file)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f'{where} does not decode ({error!s:.120}). Copy it again.') from error
    outside = [file for file in by_tensor.values() if not is_inside(file)]
    if outside:
        raise CorruptCheckpointError(f'{where} names {outside[0]!r:.80}, which is not below its directory.')
    return by_tensor


def _chosen(
    by_tensor: Mapping[str, str], headers: Mapping[str, tuple[int, list[Any]]], where: str
) -> dict[str, tuple[int, list[Any]]]:
    """The tensors of each file for which the index names this file; several files may have the same tensor.

    Raises:
      CorruptCheckpointError: a file lacks a tensor that the index assigns to it, or the index lacks a tensor.
    """
    files_of: dict[str, list[str]] = {}
    for file, (_, tensors) in headers.items():
        for tensor in tensors:
            files_of.setdefault(tensor[0], []).append(file)
    wrong = sorted(
        tensor for tensor in by_tensor.keys() | files_of.keys() if by_tensor.get(tensor) not in files_of.get(tensor, ())
    )
    if wrong:
        first, more = wrong[0], f', and so are {len(wrong) - 1} more' if wrong[1:] else ''
        raise CorruptCheckpointError(
            f'{where}: {first} is in {by_tensor.get(first, "no file")} by the index, and in '
            f'{" and ".join(files_of.get(first, ["no file"]))} by the headers{more}. Copy the directory again.'
        )
    return {
        file: (size, [tensor for tensor in tensors if by_tensor[tensor[0]] == file])
        for file, (size, tensors) in headers.items()
    }


def _check_places(names: Sequence[str], where: str) -> None:
    """Checks that no tensor has the path of another or a path below it, since a tree could not hold both.

    Raises:
      UnsupportedFormatError: naming two such tensors.
    """
    paths: dict[Path, str] = {}
    for name in names:
        other = paths.setdefault(path_of(name), name)
        if other is not name:
            raise UnsupportedFormatError(
                f'{where}: the tensors {other!r:.80} and {name!r:.80} have the same place in a tree, where a backslash escapes. '
                'Rename one of them in the file.'
            )
    try:
        unflatten(paths)
    except UnsupportedLeafError as error:
        raise UnsupportedFormatError(f"{where}: a '/' in a name begins a level of the tree. {error}") from error


def _entries(headers: _Local | _Bucket, file: str, where: str) -> tuple[int, list[Any]]:
    """A file's size, and (name, dtype, shape, offset) of each tensor; ``where`` is its path or URL, for errors."""
    if is_npz(file):
        return headers.npz(file, where)
    header, size = headers.header(file, where)
    return size, [(tensor.name, tensor.dtype.name, tensor.shape, tensor.offset) for tensor in header.tensors]


class _Local:
    """The files of a local directory."""

    def __init__(self, root: str, follow_links: bool):
        self._contained = ContainedDirectory(root, follow_links=follow_links)

    def header(self, file: str, where: str) -> tuple[Header, int]:
        """The header of a file, and the file's size."""
        with self._opened(file, where) as (opened, size):
            text = opened.read(header_bytes(opened.read(8), size, where))
        return parse_header(text, size, where), size

    def npz(self, file: str, where: str) -> tuple[int, list[Any]]:
        """The size of an npz file, and (name, dtype, shape, offset) of each array."""
        with self._opened(file, where) as (opened, size), npz_errors(where), zipfile.ZipFile(opened) as archive:
            return size, [_npz_entry(opened, archive, array, where) for array in npz_arrays(archive, where)]

    @contextlib.contextmanager
    def _opened(self, file: str, where: str) -> Generator[tuple[BinaryIO, int]]:
        """Opens a file; yields it and its size."""
        with foreign_errors(where):
            try:
                fd, size = self._contained.open(file, file)
            except FileNotFoundError as error:
                raise CheckpointNotFoundError(f'{where} is missing. Copy the directory again.') from error
            with os.fdopen(fd, 'rb') as opened:
                yield opened, size


class _Bucket:
    """The files below a prefix of an object store, which reports no sizes: the size is taken from the header."""

    def __init__(self, storage: Storage, directory: str):
        self._storage = storage
        self._directory = directory

    def header(self, file: str, where: str) -> tuple[Header, int]:
        """The header of a file, and the file's size."""
        key = join(self._directory, file)
        length = header_bytes(self._storage.read_range(key, 0, 8), 2**62, where)
        text = read_range(self._storage, key, 8, 8 + length)
        size = 8 + length + data_bytes(text)
        return parse_header(text, size, where), size

    def npz(self, file: str, where: str) -> tuple[int, list[Any]]:  # noqa: ARG002
        """Raises UnsupportedFormatError, since the directory of the archive is at the end of an object of unknown size."""
        raise UnsupportedFormatError(f'{where}: npz files are read on local file systems. Copy it to a disk.')


def _npz_entry(opened: BinaryIO, archive: zipfile.ZipFile, array: NpzArray, where: str) -> tuple[Any, ...]:
    if array.obstacle:
        raise UnsupportedFormatError(
            f'{where}: {array.name} is {array.obstacle}, so it cannot be read in place. Convert the file: '
            't5ckpt import npz FILE RUN.'
        )
    try:
        dtype_from_name(array.dtype.name)
    except KeyError:
        raise UnsupportedFormatError(
            f'{where}: {array.name} has the dtype {array.dtype}, which a checkpoint cannot hold. Leave it out.'
        ) from None
    return array.name, array.dtype.name, array.shape, stored_range(opened, archive, array)


def decode_tensors(data: bytes) -> Manifest:
    """The tree of the tensors; a '/' in a name begins a level of it."""
    table: dict[Path, Any] = {}
    for file, (size, tensors) in json.loads(data).items():
        for name, dtype, shape, offset in tensors:
            path = path_of(name)
            spec = SpecDict(driver='safetensors', dtype=dtype, kvstore={}, metadata={'shape': shape})
            spec.array = StoredArray(
                file,
                tuple(shape),
                dtype_from_name(dtype),
                metadata={'offset': offset, 'file_bytes': size},
                layout=ArrayLayout.BYTE_RANGE,
            )
            table[path] = spec
    return Manifest(3, unflatten(table))

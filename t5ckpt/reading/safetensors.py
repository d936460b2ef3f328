"""Reads the headers of safetensors files as a checkpoint: one file, or several with an index.

Each tensor becomes a stored array that is a range of bytes of its file. A restore reads it as a chunk of a checkpoint: each
process reads the bytes that its devices need.

Process 0 reads the headers and broadcasts them as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.core.keys import is_inside
from t5ckpt.core.leaf_path import Path, path_of
from t5ckpt.core.text import printable, some_of
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError, UnsupportedLeafError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.decoding import decoding
from t5ckpt.format.dtypes import DTYPES
from t5ckpt.format.manifest import Manifest, refuse_pointer
from t5ckpt.format.safetensors import (
    INDEX,
    MAX_HEADER,
    SHARD,
    Header,
    header_bytes,
    parse_header,
)
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.tree.leaf_table import unflatten, unique

_log = logging.getLogger('t5ckpt')


def read_tensors(files: CheckpointFiles, name: str) -> tuple[bytes, dict[str, Any]]:
    """The tensors of :func:`read_headers` as JSON for :func:`decode_tensors`, and the versions."""
    headers, versions = read_headers(files, name)
    arrays = [
        (name, array.location, array.shape, array.dtype.name, array.metadata)
        for header in headers.values()
        for name, array in header.arrays
    ]
    return json.dumps(arrays).encode(), versions


def read_headers(source: CheckpointFiles, name: str) -> tuple[dict[str, Header], dict[str, Any]]:
    """The header of a file, or of each file that an index names.

    A tensor is in one of the headers. Logs the tensors that are left out because of their dtype.

    Returns:
      The headers by file, and the ``Storage.version`` of each file from before it was read.

    Raises:
      UnsupportedFormatError: a shard is not a whole model; or two tensors have the same place in a tree; or none is left.
      CheckpointNotFoundError: a file that the index names is missing.
      CorruptCheckpointError: a header or the index does not decode, or the two disagree.
    """
    versions: dict[str, Any] = {}

    def header(file: str) -> Header:
        versions[file] = source.storage.version(source.key(file))
        return _header(source, file, source.url(file))

    where = source.url(name)
    refuse_shard(name, where)
    if INDEX.fullmatch(name) is None:
        files = {name: header(name)}
    else:
        versions[name] = source.storage.version(source.key(name))
        index = source.read(name, limit=MAX_HEADER)
        by_tensor = weight_map(index, where)
        files = _chosen(by_tensor, {file: header(file) for file in sorted(set(by_tensor.values()))}, where)
    unread = {tensor: dtype for found in files.values() for tensor, dtype in found.unread.items()}
    if unread:
        text = some_of([f'{tensor} ({dtype})' for tensor, dtype in unread.items()], 5)
        text = f'{where}: t5ckpt does not read the dtypes of these tensors, which are left out: {text}'
        if not any(found.arrays for found in files.values()):
            raise UnsupportedFormatError(
                f'{text}. There is no other tensor. Load the file with the library that wrote it, as the init_fn of '
                'restore_or_init (docs/migration.md).'
            )
        _log.warning('t5ckpt: %s', printable(text))
    _check_places([tensor for found in files.values() for tensor, _ in found.arrays], where)
    return files, versions


def refuse_shard(name: str, where: str) -> None:
    """Raises UnsupportedFormatError for one of several files of a model, which would be taken for the whole."""
    shard = SHARD.fullmatch(name)
    if shard is not None and int(shard[1]) > 1:
        raise UnsupportedFormatError(
            f'{where} is one of {int(shard[1])} files of a model. Pass its directory, with the index in it. To read '
            'this file alone, copy it under another name.'
        )


def weight_map(text: bytes, where: str) -> dict[str, str]:
    """The file of each tensor, from an index.

    Raises:
      CorruptCheckpointError: the index does not decode, or names a file that is not below its directory.
    """
    refuse_pointer(text, where)
    with decoding(where, 'Copy it again.'):
        by_tensor = {name: str(file) for name, file in json.loads(text, object_pairs_hook=unique)['weight_map'].items()}
        for file in by_tensor.values():
            # JSON may hold a lone surrogate, which is not valid in a file name.
            os.fsencode(file)
    outside = [file for file in by_tensor.values() if not is_inside(file)]
    if outside:
        raise CorruptCheckpointError(f'{where} names {outside[0]!r:.80}, which is not below its directory.')
    return by_tensor


def _chosen(by_tensor: Mapping[str, str], files: Mapping[str, Header], where: str) -> dict[str, Header]:
    """The headers, each with the tensors for which the index names its file, and with those that only this file has.

    Several files may have a tensor. If the index does not list it, it is none of the model's.

    Raises:
      CorruptCheckpointError: a file lacks a tensor that the index assigns to it.
    """
    files_of: dict[str, list[str]] = {}
    for file, header in files.items():
        for name in (*dict(header.arrays), *header.unread):
            files_of.setdefault(name, []).append(file)
    wrong = sorted(tensor for tensor, file in by_tensor.items() if file not in files_of.get(tensor, ()))
    if wrong:
        first, more = wrong[0], f', and so are {len(wrong) - 1} more' if wrong[1:] else ''
        raise CorruptCheckpointError(
            f'{where}: {first} is in {by_tensor[first]} by the index, and in '
            f'{" and ".join(files_of.get(first, ["no file"]))} by the headers{more}. Copy the directory again; '
            'if the source is the same, write its index again.'
        )
    home = {name: having[0] for name, having in files_of.items() if len(having) == 1} | dict(by_tensor)
    return {
        file: dataclasses.replace(
            header,
            arrays=[(name, array) for name, array in header.arrays if home.get(name) == file],
            unread={name: dtype for name, dtype in header.unread.items() if home.get(name) == file},
        )
        for file, header in files.items()
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


def _header(files: CheckpointFiles, file: str, where: str) -> Header:
    """The header of a file."""
    try:
        with files.opened(file, whole=False) as opened:
            size = opened.size
            begin = bytes(opened.read(0, 8 if size is None else min(8, size)))
            length = header_bytes(begin, 2**62 if size is None else size, where)
            return parse_header(bytes(opened.read(8, 8 + length)), size, file, where)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f'{where} is missing. Copy the directory again.') from error


def decode_tensors(data: bytes) -> Manifest:
    """The tree of the tensors; a '/' in a name begins a level of it."""
    table: dict[Path, Any] = {}
    for name, file, shape, dtype, place in json.loads(data):
        table[path_of(name)] = StoredArray(file, tuple(shape), DTYPES[dtype], DTYPES[dtype], place, 'bytes')
    return Manifest(3, table)

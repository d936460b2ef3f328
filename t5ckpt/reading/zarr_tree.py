"""Reads a directory tree of zarr arrays, v2 or v3, without a manifest: Levanter's steps, and groups that zarr-python wrote.

The path of an array below the directory is the name of its leaf. The arrays may be in an OCDBT database, as in newer steps of
Levanter. Groups and their attributes are not read.
"""

from __future__ import annotations

import json
import logging
import re

import tensorstore as ts

from t5ckpt.catalog.layouts import LEVANTER
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.text import printable, some_of
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from t5ckpt.format.array_spec import METADATA_FILES
from t5ckpt.format.facts import NO_FACTS, Facts
from t5ckpt.format.manifest import Manifest
from t5ckpt.format.orbax import OCDBT_MANIFEST
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.orbax import OrbaxContents, array_leaves
from t5ckpt.storage import foreign_errors
from t5ckpt.tree.leaf_table import MAX_DEPTH, LeafTable

_log = logging.getLogger('t5ckpt')

_CHUNK = re.compile(r'(?:c/)?[0-9]+(?:[./][0-9]+)*')


def read_zarr_tree(files: CheckpointFiles, *, logs_items: bool) -> OrbaxContents:
    """Reads the metadata of all arrays; no array is read. With ``logs_items`` logs the arrays of unknown dtypes.

    Raises:
      UnsupportedFormatError: there is no array below the directory, or only of unknown dtypes, or one is inside another.
      CorruptCheckpointError: there are chunks of an array without its metadata, so that a leaf would be left out.
    """
    where = files.storage.url(files.directory)
    keys = _keys(files, where)
    by_file = {
        file: {key.removesuffix(f'/{file}') for key in keys if key.endswith(f'/{file}')}
        for file in METADATA_FILES.values()
    }
    # A group of v3 has the same file as an array.
    groups = {name[: end.start()] for name in by_file['zarr.json'] for end in re.finditer('/', name)}
    unread: dict[Path, str] = {}
    leaves: LeafTable = {
        path: leaf
        for driver, file in METADATA_FILES.items()
        for path, leaf in array_leaves(
            files,
            '',
            {tuple(name.split('/')): name for name in sorted(by_file[file] - groups)},
            driver,
            unread=unread,
        ).items()
    }
    paths = leaves.keys() | unread.keys()
    inner = next((path for path in paths if any(path[:length] in paths for length in range(1, len(path)))), None)
    if inner is not None or not paths or max(map(len, paths)) > MAX_DEPTH:
        held = some_of([entry.name for entry in files.storage.entries(files.directory)], 8)
        found = (
            f'has no tree of Orbax and no array of zarr, but {held}'
            if inner is None
            else f'has the array {inner} in another'
        )
        raise UnsupportedFormatError(f'{where} {found}. It is not a checkpoint that t5ckpt reads.')
    names = {'/'.join(path) for path in paths}
    for key in keys:
        parents = [key[: end.start()] for end in re.finditer('/', key)]
        if names.isdisjoint(parents) and any(_CHUNK.fullmatch(key[len(parent) + 1 :]) for parent in parents):
            raise CorruptCheckpointError(
                f'{where}: {key} is a chunk of an array without .zarray or zarr.json. Copy it again.'
            )
    left_out = tuple(f'{leaf_name(path)} ({dtype})' for path, dtype in unread.items())
    text = f'{where}: arrays are left out since t5ckpt does not know their dtypes: {some_of(left_out, 5)}'
    if not leaves:
        raise UnsupportedFormatError(f'{text}. There is no other array: write them in another dtype.')
    if left_out and logs_items:
        _log.warning('t5ckpt: %s', printable(text))
    return OrbaxContents(Manifest(3, leaves), _facts(files), left_out)


def _keys(files: CheckpointFiles, where: str) -> list[str]:
    storage, directory = files.storage, files.directory
    if not storage.is_file(join(directory, OCDBT_MANIFEST)):
        return [key.removeprefix(f'{directory}/') if directory else key for key, _ in storage.walk(directory)]
    files.check('', where)
    with foreign_errors(where):
        spec = {'driver': 'ocdbt', 'base': storage.array_kvstore(directory)}
        store = storage.wait(ts.KvStore.open(spec, context=storage.context()))
        return [key.decode() for key in storage.wait(store.list())]


def _facts(files: CheckpointFiles) -> Facts:
    """The contents of Levanter's ``metadata.json``, as custom metadata."""
    try:
        metadata = json.loads(files.read(LEVANTER, limit=2**20))
    except (CheckpointNotFoundError, CorruptCheckpointError, ValueError, RecursionError):
        return NO_FACTS
    return Facts(knows_tree=False, custom_metadata=metadata if isinstance(metadata, dict) else {})

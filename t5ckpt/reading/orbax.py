"""Reads the directories of Orbax with TensorStore.

Two layouts (orbax/checkpoint/_src/serialization/type_handlers.py, _src/metadata/tree.py; written by orbax 0.12.8 and
by the orbax of 2023):

- ``_METADATA`` is JSON; its ``tree_metadata`` lists every leaf with its keys and type. Arrays are zarr (zarr3 if
  ``use_zarr3`` is set) with the keys joined by '.' as the name, in an OCDBT database in the same directory
  (``manifest.ocdbt``) or in a directory each. Strings are in ``_strings.json``. Typed PRNG keys are their data;
  ``array_metadatas/process_<n>`` names their implementation.
- ``checkpoint`` is Flax msgpack, in which each array is the string ``PLACEHOLDER://<name>``.

A step directory contains the tree itself or directories of items. Its only tree is read. Of several, ``state`` (T5X), ``default``
or ``pytree`` (Orbax) is read, and a warning names the others; without one of these names, all are read as one dict by item.
A template whose keys are names of items, and not of that tree, reads these items as one dict.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorstore as ts

from t5ckpt.catalog.orbax_facts import read_orbax_facts
from t5ckpt.core.keys import is_inside, join
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.text import CURE_OF_DAMAGE, printable, some_of
from t5ckpt.errors import (
    CorruptCheckpointError,
    FormatError,
    StorageError,
    T5CkptError,
    UnsafeSpecError,
    UnsupportedFormatError,
)
from t5ckpt.format.array_spec import METADATA_FILES, StoredArray, shape_of
from t5ckpt.format.decoding import decoding
from t5ckpt.format.dtypes import TYPESTRS
from t5ckpt.format.facts import NO_FACTS, Facts, TreeFacts
from t5ckpt.format.manifest import Manifest
from t5ckpt.format.names import MANIFEST
from t5ckpt.format.orbax import (
    ARRAY_METADATA,
    METRICS,
    OCDBT_MANIFEST,
    OCDBT_OF_PROCESS,
    PLACEHOLDER,
    STEP_METADATA,
    STRINGS,
    TREE_METADATA,
    orbax_object,
)
from t5ckpt.reading.checkpoint_files import CheckpointFiles, check_size
from t5ckpt.storage import Storage, foreign_errors
from t5ckpt.tree.leaf_table import MAX_DEPTH, Empty, LeafTable, unique
from t5ckpt.tree.train_state import BARE_ARRAY

_log = logging.getLogger('t5ckpt')

_METADATA_BYTES = 2**20
# Also the default of an early v1 of Orbax.
_ITEMS = ('', 'state', 'default', 'pytree')
_STRINGS = ('str', 'string')
_ARRAY_HANDLER = '.ArrayCheckpointHandler'
_TREE_HANDLERS = (_ARRAY_HANDLER, '.PyTreeCheckpointHandler', '.StandardCheckpointHandler')
# The path at which ArrayCheckpointHandler stores its array.
_ARRAY: Path = ('checkpoint',)
_NO_ARRAY = {'None': None, 'Dict': Empty('dict'), 'List': Empty('list'), 'Tuple': Empty('tuple')}


@dataclasses.dataclass(frozen=True)
class OrbaxContents:
    """The contents of a directory of Orbax.

    Attributes:
      manifest: with the tree.
      facts: with the metrics and metadata of the step.
      left_out: items of the step that are not read, or arrays of unknown dtypes.
    """

    manifest: Manifest
    facts: Facts
    left_out: tuple[str, ...] = ()


def read_orbax(files: CheckpointFiles, *, logs_items: bool, wanted: Collection[str] = ()) -> OrbaxContents | None:
    """Reads the tree of an Orbax directory, without reading arrays.

    Args:
      files: of the directory.
      logs_items: logs the items that are not read.
      wanted: the keys of the template, which may be items.

    Returns:
      None for a directory without a tree of Orbax.
    """
    trees = _trees(files.storage, files.directory)
    if not trees:
        return None
    read = {item: _read_tree(files, item) for item in trees}
    by_item = len(trees) > 1
    if trees[0] in _ITEMS[1:] and not {path[0] for path in read[trees[0]] if path}.issuperset(wanted):
        items = _items(files.storage, files.directory, ())
        if all(name in items and files.storage.is_file(join(files.directory, name, TREE_METADATA)) for name in wanted):
            read, by_item = {item: _read_tree(files, item) for item in wanted}, True
    left_out = () if trees == [''] else _items(files.storage, files.directory, read)
    if logs_items:
        _log_items(files.storage, files.directory, [*read], left_out)
    state: LeafTable = {}
    keys: dict[Path, str] = {}
    for item, table in read.items():
        prefix = (item,) if by_item else ()
        state |= {(*prefix, *path) or BARE_ARRAY: leaf for path, leaf in table.items()}
        impls = _key_impls(files, item, table)
        keys |= {(*prefix, *path) or BARE_ARRAY: impl for path, impl in impls.items()}
    facts = dataclasses.replace(_facts(files), tree=TreeFacts(keys=keys))
    return OrbaxContents(Manifest(3, state), facts, left_out)


def _key_impls(files: CheckpointFiles, item: str, table: LeafTable) -> dict[Path, str]:
    """The implementations of the typed keys of a tree, by path. Orbax records them since 0.12."""
    names = {
        '.'.join(path): path
        for path, leaf in table.items()
        if isinstance(leaf, StoredArray) and leaf.dtype.name == 'uint32'
    }
    directory = join(item, ARRAY_METADATA)
    # All processes of a job record the same.
    record = next(iter(files.storage.entries(join(files.directory, directory))), None) if names else None
    if record is None:
        return {}
    where = join(directory, record.name)
    arrays = orbax_object(files.read(where), where).get('array_metadatas')
    with decoding(where):
        described = [array['array_metadata'] for array in arrays or ()]
        impls = {array['param_name']: (array.get('ext_metadata') or {}).get('random_key_impl') for array in described}
    return {names[name]: str(impl) for name, impl in impls.items() if name in names and impl is not None}


def _facts(files: CheckpointFiles) -> Facts:
    """The metrics and metadata of a step; the arrays are also read without them."""
    try:
        return read_orbax_facts(files.storage, files.directory, of_run=True)
    except (FormatError, StorageError) as error:
        _log.warning('t5ckpt: the metrics and metadata of the step are not read: %s', error)
        return NO_FACTS


def _trees(storage: Storage, directory: str) -> list[str]:
    """The items whose trees are read, or '' for a tree in the directory itself."""
    for item in _ITEMS:
        if storage.is_file(join(directory, item, TREE_METADATA)):
            return [item]
    items = sorted(entry.name for entry in storage.entries(directory) if entry.is_dir)
    trees = [name for name in items if storage.is_file(join(directory, name, TREE_METADATA))]
    # A user may have deleted one of several trees, but not only its metadata.
    handlers = {} if trees else _handlers(storage, directory)
    lost = [item for item in {'', *items, *handlers} - {*trees} if _is_tree(storage, directory, item, handlers)]
    if lost:
        raise CorruptCheckpointError(
            f'{storage.url(join(directory, min(lost), TREE_METADATA))} is missing. {CURE_OF_DAMAGE}'
        )
    return trees


def _handlers(storage: Storage, directory: str) -> dict[str, str]:
    """The class that wrote each item of a step, and the item '' that is the directory itself."""
    above, _, name = directory.rpartition('/')
    return {'': _recorded_handlers(storage, above).get(name, ''), **_recorded_handlers(storage, directory)}


def _recorded_handlers(storage: Storage, directory: str) -> dict[str, str]:
    try:
        recorded = orbax_object(storage.read(join(directory, STEP_METADATA)), directory).get('item_handlers')
    except T5CkptError:
        return {}
    by_item = recorded if isinstance(recorded, dict) else {'': recorded}
    return {item: str(handler) for item, handler in by_item.items()}


def _is_tree(storage: Storage, directory: str, item: str, handlers: Mapping[str, str]) -> bool:
    """Whether Orbax wrote a tree of arrays as an item, by the item's database or by the record of the step.

    Not a tree of the older layout, which has a manifest of msgpack and may have no metadata.
    """
    if storage.is_file(join(directory, item, MANIFEST)):
        return False
    return handlers.get(item, '').endswith(_TREE_HANDLERS) or storage.is_file(join(directory, item, OCDBT_MANIFEST))


def _items(storage: Storage, directory: str, read: Collection[str]) -> tuple[str, ...]:
    """The items of a step that are not among those that are read, nor its metrics."""
    directories = [entry.name for entry in storage.entries(directory) if entry.is_dir]
    return tuple(sorted(name for name in directories if name not in read and name != METRICS.partition('/')[0]))


def _log_items(storage: Storage, directory: str, read: Sequence[str], names: Sequence[str]) -> None:
    """Logs the items of a step that are not read: a warning if one of them is a tree of arrays."""
    trees = [name for name in names if storage.is_file(join(directory, name, TREE_METADATA))]
    where = storage.url(directory)
    if trees:
        text = (
            f'{where} has several items of Orbax: {some_of(read, 8)} is read, {some_of(names, 8)} is not. To read another tree, '
            f'pass its path: {storage.url(join(directory, trees[0]))}.'
        )
        _log.warning('t5ckpt: %s', printable(text))
    elif names:
        _log.info(
            't5ckpt: %s', printable(f'{where}: these items of Orbax are not trees of arrays: {some_of(names, 8)}.')
        )


def _read_tree(files: CheckpointFiles, item: str) -> LeafTable:
    """The leaves of an item; a bare array has the path ()."""
    storage, base = files.storage, join(files.directory, item)
    where = storage.url(join(base, TREE_METADATA))
    data = files.read(join(item, TREE_METADATA))
    texts = files.read(join(item, STRINGS)) if storage.is_file(join(base, STRINGS)) else b'{}'
    with decoding(where):
        metadata = json.loads(data)
        tree = metadata['tree_metadata']
        leaves = [(_keys_of(entry), str(entry['value_metadata']['value_type'])) for entry in tree.values()]
        unique(leaves)
    with decoding(join(item, STRINGS)):
        strings = {str(name): str(text) for name, text in json.loads(texts).items()}
    table: dict[Path, Any] = {path: _NO_ARRAY[kind] for path, kind in leaves if kind in _NO_ARRAY}
    table |= {path: strings.get('.'.join(path), '') for path, kind in leaves if kind in _STRINGS}
    names = {path: '.'.join(path) for path, _ in leaves if path not in table}
    # Versions before the flag left out the chunks of zarr3 that equal the fill value.
    stores_all = bool(metadata.get('store_array_data_equal_to_fill_value'))
    driver = 'zarr3' if metadata.get('use_zarr3') else 'zarr'
    arrays = array_leaves(files, item, names, driver, stores_all=stores_all)
    table = {path: arrays.get(path, table.get(path)) for path, _ in leaves}
    if set(table) == {_ARRAY} and _handlers(storage, files.directory).get(item, '').endswith(_ARRAY_HANDLER):
        return {(): table[_ARRAY]}
    return table


def _keys_of(entry: Mapping[str, Any]) -> Path:
    path = tuple(str(key['key']) for key in entry['key_metadata'])
    if len(path) > MAX_DEPTH:
        raise ValueError(f'a leaf {len(path)} levels deep')
    return path


def resolve_placeholders(files: CheckpointFiles, manifest: Manifest) -> OrbaxContents | None:
    """A manifest with the array for each ``PLACEHOLDER://<name>``; None if there is no placeholder."""
    names = {
        path: leaf.removeprefix(PLACEHOLDER)
        for path, leaf in manifest.leaves.items()
        if isinstance(leaf, str) and leaf.startswith(PLACEHOLDER)
    }
    if not names:
        return None
    leaves = manifest.leaves | array_leaves(files, '', names, 'zarr')
    return OrbaxContents(dataclasses.replace(manifest, leaves=leaves), _facts(files))


def array_leaves(
    files: CheckpointFiles,
    item: str,
    names: Mapping[Path, str],
    driver: str,
    *,
    stores_all: bool = False,
    unread: dict[Path, str] | None = None,
) -> dict[Path, StoredArray]:
    """Opens the metadata of all arrays of an item concurrently.

    Args:
      files: of the checkpoint.
      item: in whose directory the arrays are.
      names: of the arrays, by path.
      driver: ``'zarr'`` or ``'zarr3'``.
      stores_all: see :class:`StoredArray`.
      unread: gets the arrays of unknown dtypes, with the name of the dtype. Without it, such an array is an error.

    Raises:
      UnsupportedFormatError: t5ckpt does not know the dtype of an array.
    """
    storage, base = files.storage, join(files.directory, item)
    ocdbt = storage.is_file(join(base, OCDBT_MANIFEST))
    kvstore: dict[str, Any] = storage.array_kvstore(base)
    if ocdbt:
        kvstore = {'driver': 'ocdbt', 'base': kvstore}
    # The names in a database are keys, which lead nowhere.
    outside = [] if ocdbt else [name for name in names.values() if name and not is_inside(name)]
    if outside:
        raise UnsafeSpecError(f'array name {outside[0]!r:.120} leads outside the checkpoint.')
    file = METADATA_FILES[driver]
    where = storage.url(base)
    # TensorStore follows every link, and ends the process at a file that no memory holds.
    for name in [item] if ocdbt else [join(item, name, file) for name in names.values()]:
        files.check(name, where)
        if storage.is_file_system and not ocdbt:
            key = join(files.directory, name)
            check_size(storage.size(key) or 0, _METADATA_BYTES, storage.url(key))
    with foreign_errors(where):
        store = storage.wait(ts.KvStore.open(kvstore, context=storage.context()))
        futures = {path: store.read(f'{name}/{file}' if name else file) for path, name in names.items()}
        contents = {path: storage.wait(future) for path, future in futures.items()}
    leaves: dict[Path, StoredArray] = {}
    for path, result in contents.items():
        name = names[path]
        if result.state != 'value':
            # In a database that was copied without its manifest, arrays have no directories.
            of_database = any(entry.name.startswith(OCDBT_OF_PROCESS) for entry in storage.entries(base))
            lost = OCDBT_MANIFEST if of_database and not ocdbt else f'{name}/{file}'
            raise CorruptCheckpointError(f'{storage.url(join(base, lost))} is missing. {CURE_OF_DAMAGE}')
        location = f'{item}//{name}' if ocdbt else join(item, name)
        array = _array(bytes(result.value), location, driver, f'{where}: {name}', stores_all=stores_all)
        if isinstance(array, str):
            if unread is None:
                raise UnsupportedFormatError(
                    f'{where}: {name}: array of the dtype {array!r}, which t5ckpt does not know.'
                )
            unread[path] = array
        elif array is not None:
            leaves[path] = array
    return leaves


def _array(data: bytes, location: str, driver: str, where: str, *, stores_all: bool) -> StoredArray | str | None:
    """The array of this metadata, the name of its dtype if it is unknown, or None for a group."""
    with decoding(f'{where}: array metadata'):
        metadata = json.loads(data)
        if metadata.get('node_type') == 'group':
            return None
        claimed, stores_all = metadata['shape'], stores_all or metadata.get('fill_value') is None
        name = str(metadata['data_type'] if driver == 'zarr3' else metadata['dtype'])
    shape = shape_of(claimed, where)
    dtype = TYPESTRS.get(name)
    if dtype is None:
        return f'{name:.40}'
    return StoredArray(location, shape, dtype, dtype, driver=driver, stores_all=stores_all)

"""Writes a checkpoint as a step of Orbax's ``CheckpointManager``, without Orbax.

    <step>/_CHECKPOINT_METADATA         the handlers of the items, times, custom metadata
    <step>/metrics/metrics              JSON, if the step has metrics
    <step>/default/_METADATA            the keys of every leaf, and its type
    <step>/default/<keys joined by '.'>/{.zarray,0.0,...}
    <step>/default/_strings.json        the leaves that are text
    <step>/default/{array_metadatas/process_0,_sharding}   the implementations and devices of typed PRNG keys

Orbax 0.12.8 writes the same with ``use_ocdbt=False`` (``_src/serialization/type_handlers.py``, ``_src/metadata/tree.py``).
"""

from __future__ import annotations

import base64
import glob
import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from t5ckpt.commit.output_files import check_output, local_output, output
from t5ckpt.convert.options import ConvertOptions, ConvertReport
from t5ckpt.convert.source import open_export, plan_zarr, write_zarr
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.errors import UnsupportedFormatError, UnsupportedLeafError
from t5ckpt.format.dtypes import STORED_AS, is_storable
from t5ckpt.format.facts import Facts
from t5ckpt.format.names import PINNED, TRAIN_DS_PREFIX
from t5ckpt.format.orbax import ARRAY_METADATA, METRICS, STEP_METADATA, STRINGS, TREE_METADATA, is_orbax_entry
from t5ckpt.planning.casts import leaves_after_cast
from t5ckpt.reading.contents import Contents
from t5ckpt.storage import open_storage
from t5ckpt.tree.leaves import LeafToSave, leaves_to_save

# The item of the tree.
_ITEM = 'default'
_HANDLERS = 'orbax.checkpoint._src.handlers'
_TYPES = {'array': 'np.ndarray', 'scalar': 'scalar', 'key': 'jax.Array', 'text': 'string', 'none': 'None'}
# TensorStore has no names for these.
_LACKING = STORED_AS.keys() - {'uint16'}


def convert_to_orbax(
    source: str | os.PathLike[str], directory: str | os.PathLike[str], options: ConvertOptions
) -> ConvertReport:
    """Writes a checkpoint with its metrics and custom metadata to a directory such as ``run/12`` on a local file system.

    Raises:
      OutputExistsError: the directory exists, and ``options.overwrite`` is not set.
      UnsupportedLeafError: leaves that Orbax cannot hold, or would store under one name.
      UnsupportedFormatError: there are typed PRNG keys, and Orbax would take the directory's name for a pattern.
    """
    started, target = time.monotonic(), local_output(directory)
    contents, selected = open_export(source, target, options)
    check_output(target, options.overwrite, is_orbax_entry)
    leaves = leaves_after_cast(leaves_to_save(selected.table, is_storable), options.cast)
    names = {leaf.path: '.'.join(leaf.path) for leaf in leaves if leaf.kind not in ('none', 'empty')}
    _check_names(names)
    if glob.has_magic(target) and any(leaf.kind == 'key' for leaf in leaves):
        raise UnsupportedFormatError(
            f'{target}: Orbax would take the *, ? or [ in this path for a pattern, not find the implementations of the PRNG keys '
            'there, and read the keys as plain numbers. Convert to another directory.'
        )
    arrays = [leaf for leaf in leaves if leaf.dtype is not None]
    writes = plan_zarr(arrays, names, lambda dtype: dtype.name not in _LACKING, 'Orbax')
    nbytes = 0
    if not options.dry_run:
        with contents.identity.reading(), output(target, options.overwrite, is_orbax_entry) as temporary:
            storage = open_storage(temporary)
            for name, value in _texts(leaves, names, contents.facts).items():
                storage.make_dir(name.rpartition('/')[0])
                storage.write(name, json.dumps(value).encode())
            write_zarr(storage, _ITEM, writes, options)
        nbytes = sum(size or 0 for _, size in open_storage(target).walk(''))
    seconds = time.monotonic() - started
    return ConvertReport(
        selected.step or 0,
        target,
        nbytes,
        seconds,
        selected.mapped,
        dropped=selected.dropped,
        left_out=_left_out(contents),
    )


def _check_names(names: Mapping[Path, str]) -> None:
    """Raises UnsupportedLeafError for leaves whose values Orbax would store under one name."""
    by_name: dict[str, Path] = {}
    for path, name in names.items():
        other = by_name.setdefault(name, path)
        if other != path:
            raise UnsupportedLeafError(
                f'{leaf_name(other)} and {leaf_name(path)}: Orbax would store both as {name}, so one would overwrite the other. '
                'Rename one of them with t5ckpt cp.'
            )


def _left_out(contents: Contents) -> tuple[str, ...]:
    """The parts of a step that Orbax cannot hold: positions in the data, the pin."""
    located = contents.located
    names = [entry.name for entry in located.storage.entries(located.directory)]
    return tuple(sorted(name for name in names if name == PINNED or name.startswith(TRAIN_DS_PREFIX)))


def _texts(leaves: Sequence[LeafToSave], names: Mapping[Path, str], facts: Facts) -> dict[str, Any]:
    """The contents of the files of JSON, by name."""
    lists = _lists([leaf.path for leaf in leaves])
    handlers = {_ITEM: f'{_HANDLERS}.pytree_checkpoint_handler.PyTreeCheckpointHandler'}
    keys = {names[leaf.path]: leaf for leaf in leaves if leaf.kind == 'key'}
    tree = {
        'tree_metadata': {str(leaf.path): _leaf_metadata(leaf, lists) for leaf in leaves},
        'use_ocdbt': False,
        'use_zarr3': False,
        'store_array_data_equal_to_fill_value': True,
        'custom_metadata': None,
    }
    texts: dict[str, Any] = {
        join(_ITEM, TREE_METADATA): tree,
        join(_ITEM, STRINGS): {names[leaf.path]: leaf.note for leaf in leaves if leaf.kind == 'text'},
    }
    if keys:
        described = [_key_metadata(name, leaf) for name, leaf in keys.items()]
        texts[join(_ITEM, ARRAY_METADATA, 'process_0')] = {'array_metadatas': described}
        texts[join(_ITEM, '_sharding')] = _shardings(keys)
    if facts.metrics:
        handlers['metrics'] = f'{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler'
        texts[METRICS] = dict(facts.metrics)
    nanoseconds = int((facts.created_unix or time.time()) * 10**9)
    texts[STEP_METADATA] = {
        'item_handlers': handlers,
        'metrics': {},
        'performance_metrics': {},
        'init_timestamp_nsecs': nanoseconds,
        'commit_timestamp_nsecs': nanoseconds,
        'custom_metadata': dict(facts.custom_metadata),
    }
    return texts


def _lists(paths: Collection[Path]) -> set[Path]:
    """The nodes with the keys '0', '1', ..., as T5X's format holds sequences."""
    children: dict[Path, set[str]] = {}
    for path in paths:
        for depth, key in enumerate(path):
            children.setdefault(path[:depth], set()).add(key)
    return {node for node, keys in children.items() if keys == set(map(str, range(len(keys))))}


def _leaf_metadata(leaf: LeafToSave, lists: Collection[Path]) -> Mapping[str, Any]:
    """The keys of a leaf, of a sequence (1) or a dict (2), and its type."""
    path = leaf.path
    keys = [{'key': key, 'key_type': 1 if path[:depth] in lists else 2} for depth, key in enumerate(path)]
    has_value = leaf.kind not in ('none', 'empty')
    value_type = _TYPES.get(leaf.kind, leaf.note.title())
    return {'key_metadata': keys, 'value_metadata': {'value_type': value_type, 'skip_deserialize': not has_value}}


def _key_metadata(name: str, leaf: LeafToSave) -> Mapping[str, Any]:
    shape = list(leaf.shape)
    extended = {'random_key_impl': leaf.note}
    return {
        'array_metadata': {'param_name': name, 'write_shape': shape, 'chunk_shape': shape, 'ext_metadata': extended}
    }


def _shardings(names: Collection[str]) -> Mapping[str, str]:
    """The device of each array of typed keys, in which Orbax restores them unless it is told another."""
    import jax

    sharding = json.dumps({'sharding_type': 'SingleDeviceSharding', 'device_str': str(jax.local_devices()[0])})
    return {base64.urlsafe_b64encode(name.encode()).decode(): sharding for name in names}

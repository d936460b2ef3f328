"""Imports and exports seqax's checkpoints (seqax, docs/pytree-zarr-checkpoint.md).

    <dir>/<step, 10 digits>/           a zarr v2 group, complete when it has the attribute ``write_completed``
        .zgroup .zattrs
        .weights.embed/{.zarray,0.0}   one array per leaf, named by ``jax.tree_util.keystr`` of its path

The names ``.weights.embed`` and ``['weights']['embed']`` both become the leaf ``weights/embed``, since a checkpoint of T5X does
not distinguish attributes from keys. For an export, ``like=`` distinguishes them; without it, all names become attributes, as in
seqax's own states.

Notes: one process. Arrays are read and written chunk by chunk. Without a fill value, a missing chunk is an error; seqax would
read uninitialized memory. Needs neither pickle nor the zarr library.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.catalog.locate import Located, not_of_format, open_target
from t5ckpt.commit.transaction import CommittedCheckpoint
from t5ckpt.core.keys import is_inside, join
from t5ckpt.core.leaf_path import Path, leaf_name, path_of
from t5ckpt.core.protocols import TrainState
from t5ckpt.core.text import counted
from t5ckpt.core.thread_pool import Pool
from t5ckpt.distributed.processes import jax_processes
from t5ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    TreeMismatchError,
    UnsupportedFormatError,
    UnsupportedLeafError,
    UnsupportedTopologyError,
)
from t5ckpt.format.chunk_grid import ChunkGrid
from t5ckpt.format.dtypes import TYPESTRS
from t5ckpt.format.facts import Facts
from t5ckpt.inspection.view import open_checkpoint
from t5ckpt.lazy import LazyArray
from t5ckpt.planning.chunk_shape import choose_chunks
from t5ckpt.planning.save_plan import SaveOptions
from t5ckpt.reading.array_reader import ArrayReader, lazy_leaf
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.orbax import array_leaves
from t5ckpt.save.prepare import write_stream
from t5ckpt.save.request import STREAM_BYTES, SaveContext, SaveRequest
from t5ckpt.storage import Storage, foreign_errors, open_storage, split_path
from t5ckpt.tree.leaf_table import Empty, LeafTable
from t5ckpt.tree.leaves import is_jax_array
from t5ckpt.tree.train_state import flatten_state

__all__ = ['export_seqax', 'import_seqax', 'read_seqax', 'seqax_steps', 'write_seqax']

_STEP = re.compile(r'[0-9]{10}')
_DONE = 'write_completed'
_METADATA_BYTES = 2**20
_CHUNKS_UNDER_WAY = 4
# One component of jax.tree_util.keystr: an attribute, or the repr of a key or index in brackets.
_COMPONENT = re.compile(
    r"""\.(?P<name>[^.\[]+) | \[(?P<key>'(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" | -?[0-9]+)\]""", re.VERBOSE
)


# --- reading ---------------------------------------------------------------------------------------------------------


def seqax_steps(directory: str | os.PathLike[str]) -> list[int]:
    """The complete steps of a seqax run, ascending."""
    return _steps_in(open_storage(directory))


def _steps_in(storage: Storage) -> list[int]:
    names = [entry.name for entry in storage.entries() if entry.is_dir and _STEP.fullmatch(entry.name)]
    return sorted(int(name) for name in names if _is_done(storage, name))


def _is_done(storage: Storage, directory: str) -> bool:
    """Whether seqax has set the attribute that it sets after all hosts have written; its value does not matter, as in seqax."""
    if storage.kind(join(directory, '.zattrs')) != 'file':
        return False
    try:
        attributes = json.loads(CheckpointFiles.at(storage, directory).read('.zattrs', limit=_METADATA_BYTES))
    except (FormatError, ValueError, RecursionError):
        return False
    return isinstance(attributes, dict) and _DONE in attributes


def read_seqax(path: str | os.PathLike[str], step: int | None = None) -> tuple[LeafTable, int]:
    """Returns a checkpoint's leaves as LazyArrays by path, and its step; reads no values.

    Args:
      path: a run's directory, or a step's.
      step: which step of a run; None takes the latest complete one.

    Raises:
      CheckpointNotFoundError: no complete checkpoint; the message lists the complete steps.
      FormatError: an array cannot be read, or its name is not one of ``keystr``.
    """
    storage, directory = _found(path, step)
    reader = ArrayReader(Located(storage, directory, '', int(directory)))
    names: dict[Path, str] = {}
    for name in _array_names(storage, directory):
        leaf_path = _path_of(name, storage.url(directory))
        if names.setdefault(leaf_path, name) != name:
            raise UnsupportedFormatError(
                f'{storage.url(directory)}: {name} and another array would both become the leaf {leaf_name(leaf_path)}.'
            )
    if not names:
        raise UnsupportedFormatError(f'{storage.url(directory)} holds no arrays.')
    arrays = array_leaves(CheckpointFiles.at(storage, directory), '', names, 'zarr')
    return {path: lazy_leaf(reader, array, leaf_name(path)) for path, array in arrays.items()}, int(directory)


def _found(path: str | os.PathLike[str], step: int | None) -> tuple[Storage, str]:
    parent, name = split_path(path)
    if step is None and _STEP.fullmatch(name):
        storage, directory = open_storage(parent), name
    else:
        storage = open_storage(path)
        steps = _steps_in(storage)
        if not steps or (step is not None and step not in steps):
            if step is None:
                raise not_of_format(os.fspath(path), f'{path} has no complete checkpoint of seqax')
            raise CheckpointNotFoundError(
                f'{storage.url()}: no complete step {step} of seqax; complete steps: {", ".join(map(str, steps[-5:])) or "none"}.'
            )
        directory = f'{steps[-1] if step is None else step:010}'
    if not _is_done(storage, directory):
        raise CheckpointNotFoundError(
            f'{storage.url(directory)} has no attribute {_DONE} (.zattrs): it is incomplete, or not a checkpoint of seqax. Pass '
            'another step.'
        )
    return storage, directory


def _array_names(storage: Storage, directory: str, below: str = '') -> list[str]:
    """The arrays of a group and of the groups in it, which zarr makes of a '/' in a name.

    Raises:
      CorruptCheckpointError: a directory holds chunks, or nothing, but no ``.zarray``, so that an array would be left out.
    """
    names: list[str] = []
    entries = storage.entries(join(directory, below))
    chunks = [entry.name for entry in entries if not entry.is_dir and not entry.name.startswith('.')]
    if below and (chunks or not entries or any(entry.name == '.zarray' for entry in entries)):
        held = f'{counted(len(chunks), "other file")} ({chunks[0]})' if chunks else 'nothing else'
        raise CorruptCheckpointError(
            f'{storage.url(join(directory, below))} has no regular file .zarray, but {held}. Copy the checkpoint again.'
        )
    for entry in entries:
        if entry.is_dir:
            name = join(below, entry.name)
            is_array = storage.kind(join(directory, name, '.zarray')) == 'file'
            names += [name] if is_array else _array_names(storage, directory, name)
    return names


def _path_of(name: str, where: str) -> Path:
    """The inverse of ``jax.tree_util.keystr``."""
    path: list[str] = []
    position = 0
    while position < len(name):
        match = _COMPONENT.match(name, position)
        if match is None:
            raise UnsupportedFormatError(
                f'{where}: the array {name!r:.120} is not named as jax.tree_util.keystr names leaves, at {name[position:]!r:.40}.'
            )
        path.append(str(ast.literal_eval(match['key'])) if match['name'] is None else match['name'])
        position = match.end()
    return tuple(path)


def import_seqax(
    path: str | os.PathLike[str],
    checkpoints_dir: str | os.PathLike[str],
    *,
    step: int | None = None,
    overwrite: bool = False,
) -> CommittedCheckpoint:
    """Converts a checkpoint of seqax to T5X's format, with the same step.

    seqax's states have no step, so pass ``step=`` to ``Checkpointer.save``.

    Args:
      path: a run's directory of seqax, or a step's.
      checkpoints_dir: the run's directory to write to.
      step: which step; None takes the latest.
      overwrite: replaces a checkpoint of that step.
    """
    table, source_step = read_seqax(path, step)
    source = {'format': 'seqax', 'path': os.fspath(path), 'step': source_step}
    context = SaveContext(open_target(checkpoints_dir), SaveOptions())
    return write_stream(table, SaveRequest(context, source_step, STREAM_BYTES, overwrite, Facts(source=source)))


# --- writing ---------------------------------------------------------------------------------------------------------


def export_seqax(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    like: Any = None,
    overwrite: bool = False,
) -> str:
    """Converts a checkpoint in T5X's format to seqax's.

    Args:
      path: as for ``open_checkpoint``.
      directory: seqax's ``checkpoint_dir``.
      step: which step of a run; None takes the latest.
      like: the state that seqax will load into, with the same leaves, which may be jax.ShapeDtypeStruct. It determines which
        parts of a name are attributes and which are keys of dicts.
      overwrite: replaces a checkpoint of that step.

    Returns:
      The directory that was written.

    Raises:
      TreeMismatchError: ``like`` has other leaves.
      UnsupportedLeafError: seqax does not support a leaf's dtype or, without ``like``, its name.
    """
    view = open_checkpoint(path, step)
    if view.step is None:
        raise UnsupportedFormatError(
            f'{view.path} has no step in its name, but seqax needs one. Rename the directory to checkpoint_<step>.'
        )
    if like is None:
        names = {name: ''.join(f'.{part}' for part in path_of(name)) for name in view}
        # A '.' in a key begins a level in seqax, where two leaves may then have one name.
        changed = next((name for name in view if any(part == '' or {*'.['} & {*part} for part in path_of(name))), None)
        if changed is not None:
            raise UnsupportedLeafError(
                f'{changed}: seqax would read the name {names[changed]} as another path. Pass like=, the state that seqax will '
                'load into.'
            )
    else:
        names = {leaf_name(path): name for path, name in _keystr_names(like).items()}
        if set(names) != set(view):
            only = [sorted(set(view) - set(names))[:5], sorted(set(names) - set(view))[:5]]
            raise TreeMismatchError(
                f'{view.path} and `like` have different leaves: only in the checkpoint {only[0]}, only in `like` {only[1]}.'
            )
    return _write(directory, view.step, {names[name]: view[name] for name in view}, overwrite)


def write_seqax(directory: str | os.PathLike[str], step: int, state: Any, *, overwrite: bool = False) -> str:
    """Writes a state in seqax's format.

    Args:
      directory: seqax's ``checkpoint_dir``.
      step: at most ten digits.
      state: any pytree of jax.Arrays, NumPy arrays, numbers and LazyArrays.
      overwrite: replaces a checkpoint of that step.

    Returns:
      The directory that was written.
    """
    table = flatten_state(state).table
    return _write(directory, step, {name: table[path] for path, name in _keystr_names(state).items()}, overwrite)


def _keystr_names(state: Any) -> dict[Path, str]:
    """Seqax's name of each leaf; None and empty containers are not leaves in seqax."""
    import jax

    tree = state.state_dict() if isinstance(state, TrainState) else state
    paths = [
        path for path, leaf in flatten_state(tree).table.items() if leaf is not None and not isinstance(leaf, Empty)
    ]
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path: jax.tree_util.keystr(keys) for path, (keys, _) in zip(paths, flat, strict=True)}


def _write(directory: str | os.PathLike[str], step: int, leaves: Mapping[str, Any], overwrite: bool) -> str:
    if jax_processes().count > 1:
        raise UnsupportedTopologyError("only one process can write seqax's format: convert a checkpoint after the run.")
    name = f'{step:010}'
    if not _STEP.fullmatch(name):
        raise ValueError(f'step={step} must be between 0 and 9999999999, since seqax uses ten digits.')
    arrays = {key: _checked(key, leaf) for key, leaf in leaves.items()}
    storage = open_storage(directory)
    _check_room(storage, name, overwrite)
    # seqax ignores names that are not numbers. On a storage without rename, .zattrs makes the checkpoint complete.
    work = f'{name}.tmp' if storage.commits_by_rename else name
    _remove(storage, work)
    storage.make_dir(work)
    storage.write(join(work, '.zgroup'), b'{"zarr_format": 2}')
    for key, array in arrays.items():
        _write_array(storage, join(work, key), array)
    storage.sync_tree(work, sorted(arrays))
    storage.write(join(work, '.zattrs'), json.dumps({_DONE: True}).encode())
    if work != name:
        _remove(storage, name)
        storage.publish(work, name)
    return storage.url(name)


def _check_room(storage: Storage, name: str, overwrite: bool) -> None:
    if _is_done(storage, name) and not overwrite:
        raise CheckpointExistsError(f'{storage.url(name)} exists. Write to another directory, or pass overwrite=True.')
    names = {entry.name for entry in storage.entries(name)}
    if names and '.zgroup' not in names:
        raise CheckpointExistsError(f'{storage.url(name)} exists and is not a checkpoint of seqax. Move it away.')


def _remove(storage: Storage, name: str) -> None:
    """Removes a checkpoint, the file that makes it complete first, so that seqax never loads a part of it."""
    storage.delete_file(join(name, '.zattrs'))
    storage.delete_tree(name)


def _checked(name: str, leaf: Any) -> Any:
    array = leaf if is_jax_array(leaf) or isinstance(leaf, LazyArray) else np.asarray(leaf)
    if TYPESTRS.get(np.dtype(array.dtype).str) != array.dtype:
        raise UnsupportedLeafError(
            f'{name}: seqax does not support the dtype {array.dtype}. Convert the leaf to float32 first.'
        )
    if not is_inside(name):
        raise UnsupportedLeafError(
            f'{name}: zarr changes this name, so seqax would not find the array. Rename the leaf.'
        )
    return array


def _write_array(storage: Storage, key: str, array: Any) -> None:
    shape = tuple(int(size) for size in array.shape)
    shard = array.sharding.shard_shape(shape) if is_jax_array(array) else shape
    # zarr needs chunks of at least one element, even in an empty array.
    chunks = [max(1, size) for size in choose_chunks(shard, array.dtype.itemsize)]
    metadata = {
        'zarr_format': 2,
        'shape': list(shape),
        'chunks': chunks,
        'dtype': np.dtype(array.dtype).str,
        'compressor': None,
        'fill_value': None,
        'filters': None,
        'order': 'C',
        'dimension_separator': '.',
    }
    values = np.asarray(array) if is_jax_array(array) else array
    grid = ChunkGrid(tuple(shape), tuple(chunks))

    def write(chunk_index: tuple[int, ...]) -> None:
        # A chunk at the end of an axis is stored in full.
        chunk, box = np.zeros(chunks, array.dtype), grid.box(chunk_index)
        chunk[box.relative_to(box).slices] = values[box.slices]
        storage.write_chunk(join(key, grid.key(chunk_index)), chunk.reshape(-1).view(np.uint8))

    with foreign_errors(storage.url(key), writing=True), Pool(_CHUNKS_UNDER_WAY) as pool:
        storage.write_chunk(join(key, '.zarray'), json.dumps(metadata).encode())
        for future in [pool.submit(write, chunk_index) for chunk_index in grid]:
            future.result()

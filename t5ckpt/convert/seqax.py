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
import time
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.catalog.locate import Located, not_of_format
from t5ckpt.convert.options import ConvertOptions, ConvertReport
from t5ckpt.convert.source import open_export, plan_zarr, write_zarr
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.protocols import TrainState
from t5ckpt.core.text import some_of
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
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.dtypes import TYPESTRS, is_storable
from t5ckpt.format.facts import NO_FACTS
from t5ckpt.format.manifest import Manifest
from t5ckpt.planning.casts import leaves_after_cast
from t5ckpt.planning.save_plan import ArrayWrite
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.contents import Contents
from t5ckpt.reading.zarr_tree import read_zarr_tree
from t5ckpt.save.linked_arrays import linked_leaves
from t5ckpt.storage import Storage, open_storage, split_path
from t5ckpt.tree.leaf_table import Empty, LeafTable
from t5ckpt.tree.leaves import leaves_to_save
from t5ckpt.tree.train_state import flatten_state

__all__ = ['read_seqax', 'seqax_steps', 'write_seqax']

_STEP = re.compile(r'[0-9]{10}')
_DONE = 'write_completed'
_METADATA_BYTES = 2**20
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
    contents = open_seqax(path, step)
    return linked_leaves(contents), contents.located.step_to_write()


def open_seqax(path: str | os.PathLike[str], step: int | None = None) -> Contents:
    """Opens a checkpoint; see :func:`read_seqax`."""
    storage, directory = _found(path, step)
    where = storage.url(directory)
    tree = read_zarr_tree(CheckpointFiles.at(storage, directory), logs_items=False)
    if tree.left_out:
        raise UnsupportedFormatError(f'{where}: t5ckpt does not know the dtypes of {some_of(tree.left_out, 5)}.')
    arrays: dict[Path, StoredArray] = {}
    for parts, array in tree.manifest.leaves.items():
        # zarr makes groups of a '/' in a name.
        leaf_path = _path_of('/'.join(parts), where)
        if leaf_path in arrays:
            raise UnsupportedFormatError(
                f'{where}: {"/".join(parts)} and another array would both become the leaf {leaf_name(leaf_path)}.'
            )
        arrays[leaf_path] = array
    of_arrays = {parts[0] for parts in tree.manifest.leaves}
    empty = [entry.name for entry in storage.entries(directory) if entry.is_dir and entry.name not in of_arrays]
    if empty:
        raise CorruptCheckpointError(f'{where}: {empty[0]} has no regular file .zarray. Copy the checkpoint again.')
    return Contents(Located(storage, directory, '', int(directory)), Manifest(3, arrays), NO_FACTS)


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


# --- writing ---------------------------------------------------------------------------------------------------------


def export_seqax(
    checkpoint: str | os.PathLike[str], directory: str | os.PathLike[str], options: ConvertOptions
) -> ConvertReport:
    """Writes a checkpoint in seqax's format.

    Raises:
      TreeMismatchError: ``options.like`` has other leaves.
      UnsupportedLeafError: seqax does not support a leaf's dtype or, without ``like``, its name.
    """
    started = time.monotonic()
    contents, source = open_export(checkpoint, os.fspath(directory), options, typed=False)
    where, step = contents.located.url, contents.located.step_to_write()
    if options.like is None:
        names = {path: ''.join(f'.{part}' for part in path) for path in source.table}
        # A '.' in a key begins a level in seqax, where two leaves may then have one name.
        changed = next((path for path in names if any(part == '' or {*'.['} & {*part} for part in path)), None)
        if changed is not None:
            raise UnsupportedLeafError(
                f'{leaf_name(changed)}: seqax would read the name {names[changed]} as another path. Pass like=, the state that '
                'seqax will load into.'
            )
    else:
        names = _keystr_names(options.like)
        if names.keys() != source.table.keys():
            here, there = names.keys(), source.table.keys()
            only = [sorted(map(leaf_name, paths))[:5] for paths in (there - here, here - there)]
            raise TreeMismatchError(
                f'{where} and `like` have different leaves: only in the checkpoint {only[0]}, only in `like` {only[1]}.'
            )
    path, writes = _write(directory, step, source.table, names, options)
    nbytes, seconds = sum(write.array.nbytes for write in writes), time.monotonic() - started
    mapped = {names[path]: leaf_name(path) for path in source.table}
    return ConvertReport(step, path, nbytes, seconds, mapped, dropped=source.dropped)


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
    table, names = flatten_state(state).table, _keystr_names(state)
    leaves = {path: table[path] for path in names}
    return _write(directory, step, leaves, names, ConvertOptions(overwrite=overwrite))[0]


def _keystr_names(state: Any) -> dict[Path, str]:
    """Seqax's name of each leaf; None and empty containers are not leaves in seqax."""
    import jax

    tree = state.state_dict() if isinstance(state, TrainState) else state
    paths = [
        path for path, leaf in flatten_state(tree).table.items() if leaf is not None and not isinstance(leaf, Empty)
    ]
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path: jax.tree_util.keystr(keys) for path, (keys, _) in zip(paths, flat, strict=True)}


def _write(
    directory: str | os.PathLike[str], step: int, table: LeafTable, names: Mapping[Path, str], options: ConvertOptions
) -> tuple[str, Sequence[ArrayWrite]]:
    """Writes the leaves under seqax's names; returns the directory and the arrays."""
    if jax_processes().count > 1:
        raise UnsupportedTopologyError("only one process can write seqax's format: convert a checkpoint after the run.")
    name = f'{step:010}'
    if not _STEP.fullmatch(name):
        raise ValueError(f'step={step} must be between 0 and 9999999999, since seqax uses ten digits.')
    leaves = leaves_after_cast(leaves_to_save(table, is_storable), options.cast)
    writes = plan_zarr(leaves, names, lambda dtype: TYPESTRS.get(dtype.str) == dtype, 'seqax')
    storage = open_storage(directory)
    _check_room(storage, name, options.overwrite)
    if options.dry_run:
        return storage.url(name), writes
    # seqax ignores names that are not numbers. On a storage without rename, .zattrs makes the checkpoint complete.
    work = f'{name}.tmp' if storage.commits_by_rename else name
    _remove(storage, work)
    storage.make_dir(work)
    storage.write(join(work, '.zgroup'), b'{"zarr_format": 2}')
    write_zarr(storage, work, writes, options)
    storage.write(join(work, '.zattrs'), json.dumps({_DONE: True}).encode())
    if work != name and storage.kind(name) is not None and storage.exchange(work, name):
        _remove(storage, work)
    elif work != name:
        _remove(storage, name)
        storage.publish(work, name)
    return storage.url(name), writes


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

"""Reads checkpoints for a conversion: Orbax, Flax, seqax, zarr, safetensors.

The leaves keep their names; ``copy.py`` renames. Arrays of Orbax are read in parts; the msgpack files of Flax are held
completely.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from t5ckpt.catalog.layouts import is_orbax
from t5ckpt.catalog.locate import Located, locate, log_newer, no_checkpoint, not_of_format
from t5ckpt.convert.options import ConvertOptions
from t5ckpt.convert.safetensors import open_tensors
from t5ckpt.convert.seqax import open_seqax
from t5ckpt.convert.source import Source, carried_facts, chosen_source
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import path_of
from t5ckpt.core.text import printable, some_of
from t5ckpt.errors import (
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from t5ckpt.format.facts import NO_FACTS
from t5ckpt.format.manifest import Manifest, decode_manifest
from t5ckpt.format.orbax import TREE_METADATA
from t5ckpt.format.safetensors import FLAX_INDEX, FLAX_WHOLE, MAX_HEADER
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.contents import Contents, read_contents
from t5ckpt.reading.safetensors import weight_map
from t5ckpt.save.linked_arrays import linked_leaves
from t5ckpt.storage import Storage, open_storage, split_path
from t5ckpt.tree.leaf_table import LeafTable

_log = logging.getLogger('t5ckpt')


def open_tree(kind: str, source: str | os.PathLike[str], options: ConvertOptions) -> Source:
    """Reads the names, shapes and dtypes of a checkpoint of another JAX program.

    Args:
      kind: 'orbax', 'flax', 'seqax', 'zarr' or 'safetensors'.
      source: orbax: a run's directory, a step's, or an item's. flax: a file of ``flax.training.checkpoints`` or ``to_bytes``, a
        directory of such files, of which the latest is taken, or Flax weights of transformers. seqax: a run's directory, or a
        step's. zarr: a run or a step of Levanter, or any directory tree of zarr arrays. safetensors: a file, the index of
        several, or the directory of a model; a '/' in a name begins a level of the tree.
      options: ``take`` and ``leave``.

    Raises:
      T5CkptError: the source cannot be read.
    """
    contents = _OPENERS[kind](os.fspath(source))
    located = contents.located
    if contents.left_out:
        _log_left_out(kind, located, contents.left_out)
    table, facts = linked_leaves(contents), carried_facts(contents.facts)
    return chosen_source(table, located, options, facts=facts, left_out=contents.left_out)


def _log_left_out(kind: str, located: Located, left_out: Sequence[str]) -> None:
    """Logs the items of a step of Orbax, or the arrays of a tree of zarr, that a conversion leaves out."""
    paths = [join(located.directory, name) for name in left_out]
    trees = [located.storage.url(path) for path in paths if located.storage.is_file(join(path, TREE_METADATA))]
    cure = f' To convert another tree, pass its path: {trees[0]}.' if trees else ''
    what = 'arrays of unknown dtypes' if kind == 'zarr' else 'items of Orbax'
    text = f'{located.url}: {what} that are not converted: {some_of(left_out, 8)}.{cure}'
    _log.warning('t5ckpt: %s', printable(text))


def _open_orbax(source: str) -> Contents:
    located = locate(source)
    if located.manifest and not is_orbax(located.storage, located.directory):
        contents = read_contents(located, logs_items=False)
        if contents.facts.knows_tree or contents.manifest.version > 0:
            raise UnsupportedFormatError(f"{located.url} is in T5X's format. Copy it with t5ckpt cp.")
        return contents
    if located.step is None:
        # In Orbax, the number is the name of the step's directory, which may contain the directory of an item.
        parent, name = split_path(located.url)
        number = split_path(parent)[1] if is_orbax(located.storage, '') else name
        located = dataclasses.replace(located, step=int(number) if re.fullmatch('[0-9]{1,18}', number) else None)
    return read_contents(located, logs_items=False)


def _open_flax(source: str) -> Contents:
    storage = open_storage(source)
    if source.endswith(f'/{FLAX_INDEX}') or source == FLAX_INDEX:
        return _open_flax_shards(source)
    if storage.kind('') != 'dir':
        located = locate(source)
    else:
        names = [entry.name for entry in storage.entries() if not entry.is_dir]
        whole = FLAX_WHOLE if FLAX_WHOLE in names else _latest_of_flax(storage, names)
        if whole is None and FLAX_INDEX in names:
            return _open_flax_shards(f'{source.rstrip("/")}/{FLAX_INDEX}')
        if whole is None:
            raise not_of_format(source, f'{source} has no file of Flax such as checkpoint_100')
        located = locate(f'{source.rstrip("/")}/{whole}')
    return read_contents(dataclasses.replace(located, step=_number(split_path(located.url)[1])))


def _open_flax_shards(index: str) -> Contents:
    """The leaves of all files that an index of transformers names."""
    parent, name = split_path(index)
    storage = open_storage(parent)
    files = CheckpointFiles.at(storage, '')
    by_leaf = weight_map(files.read(name, limit=MAX_HEADER), index)
    table: LeafTable = {}
    named = {*map(path_of, by_leaf)}
    for file in sorted(set(by_leaf.values())):
        # Of a leaf that two files have, the index names one.
        own = {path_of(leaf) for leaf, home in by_leaf.items() if home == file}
        leaves = decode_manifest(files.read(file), storage.url(file)).leaves
        table |= {path: leaf for path, leaf in leaves.items() if path in own or path not in named}
    absent = [f'{leaf} in {file}' for leaf, file in by_leaf.items() if path_of(leaf) not in table]
    if absent:
        raise CorruptCheckpointError(f'{index}: the files lack {some_of(absent, 5)}. Copy the directory again.')
    return Contents(Located(storage, '', name, None), Manifest(0, table), NO_FACTS)


def _latest_of_flax(storage: Storage, names: Iterable[str]) -> str | None:
    """The file with the largest number, or the only one if it has none; None if there is no file of Flax.

    Raises:
      CheckpointNotFoundError: there are several without an integer in their names.
    """
    names = [name for name in names if name.startswith('checkpoint') and name != 'checkpoint_tmp']
    steps = {step: name for name in names if (step := _number(name)) is not None}
    if steps:
        log_newer(storage, max(steps))
        return steps[max(steps)]
    if len(names) > 1:
        raise no_checkpoint(storage)
    return next(iter(names), None)


def _number(name: str) -> int | None:
    match = re.search(r'_(\d{1,18})(?:\.msgpack)?$', name)
    return None if match is None else int(match[1])


def _open_safetensors(source: str) -> Contents:
    """The tensors; the step is the value of ``state/step`` or ``step``, or 0."""
    contents, _ = open_tensors(source)
    if not contents.manifest.leaves:
        raise UnsupportedFormatError(f'{source} contains no array, but a checkpoint has at least one.')
    arrays = linked_leaves(contents)
    held = [arrays[path] for path in (('state', 'step'), ('step',)) if path in arrays]
    steps = [int(step) for step in held if step.shape == () and step.dtype.kind in 'iu']
    located = dataclasses.replace(contents.located, step=next(iter(steps), 0))
    return dataclasses.replace(contents, located=located)


_OPENERS: Mapping[str, Callable[[str], Contents]] = {
    'orbax': _open_orbax,
    'flax': _open_flax,
    'seqax': open_seqax,
    'zarr': _open_orbax,
    'safetensors': _open_safetensors,
}

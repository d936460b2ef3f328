"""Writes a checkpoint in Orbax's layout with Orbax itself (extra ``orbax``), one array after another.

The files are those of ``orbax.checkpoint.PyTreeCheckpointer`` or, for a step of a run, ``CheckpointManager``; both restore them.
Orbax takes all arrays at once. A handler for LazyArrays reads each array and waits until it is written, so that one is in memory
at a time. The leaves are read back and compared before the directory gets its name.
"""

from __future__ import annotations

import glob
import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from t5ckpt.catalog.locate import locate
from t5ckpt.commit.output_files import check_output, local_output, output
from t5ckpt.convert.options import ConvertOptions, ConvertReport
from t5ckpt.convert.source import cast_leaf, open_export
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.text import some_of, without_cure_of_damage
from t5ckpt.errors import (
    MissingDependencyError,
    SaveFailedError,
    T5CkptError,
    UnsupportedFormatError,
    UnsupportedLeafError,
)
from t5ckpt.format.checksum import digest
from t5ckpt.format.facts import Facts
from t5ckpt.format.names import PINNED, TRAIN_DS_PREFIX
from t5ckpt.format.orbax import CONVERTED_FROM, is_orbax_entry
from t5ckpt.lazy import LazyArray
from t5ckpt.planning.casts import Cast, check_cast
from t5ckpt.progress import Meter
from t5ckpt.reading.contents import Contents, read_contents
from t5ckpt.save.linked_arrays import linked_leaves
from t5ckpt.storage import open_storage
from t5ckpt.tree.leaf_table import Empty, LeafTable, unflatten
from t5ckpt.tree.leaves import KeyData

# The item of the tree in a step of CheckpointManager.
_ITEM = 'default'
_CURE = 'Nothing was kept. Convert it again, to another disk if it fails again.'


def convert_to_orbax(
    source: str | os.PathLike[str], directory: str | os.PathLike[str], options: ConvertOptions, *, is_step: bool = False
) -> ConvertReport:
    """Writes a checkpoint in Orbax's layout, to a directory such as ``run/12`` on a local file system.

    With ``is_step`` as a step of a run of ``CheckpointManager``, with its metrics and custom metadata.

    Raises:
      OutputExistsError: the directory exists, and ``options.overwrite`` is not set.
      UnsupportedLeafError: leaves that Orbax cannot hold, or would store under one name.
      UnsupportedFormatError: Orbax would take the directory's name for a pattern.
    """
    started, target = time.monotonic(), local_output(directory)
    contents, selected = open_export(source, target, options)
    check_output(target, options.overwrite, is_orbax_entry)
    if glob.has_magic(target):
        # Orbax merges the files of its processes by glob.glob, and finds none, or those of another step.
        raise UnsupportedFormatError(
            f'{target}: Orbax would take the *, ? or [ in this path for a pattern, and the step would be unreadable. Convert to '
            'another directory, and move the step afterwards.'
        )
    check_cast(options.cast, selected.table)
    empty = [leaf_name(path) for path, leaf in selected.table.items() if 0 in getattr(leaf, 'shape', ())]
    if empty:
        raise UnsupportedLeafError(
            f'{some_of(empty, 5)}: Orbax cannot hold arrays without values. Leave them out (leave=, or --leave).'
        )
    leaves = {path: _orbax_leaf(path, leaf, options.cast) for path, leaf in selected.table.items()}
    _check_names(leaves)
    nbytes = 0
    if not options.dry_run:
        with contents.identity.reading(), output(target, options.overwrite, is_orbax_entry) as temporary:
            total = sum(leaf.nbytes for leaf in leaves.values() if isinstance(leaf, LazyArray))
            facts = contents.facts if is_step else None
            digests = _save(_with_lists(unflatten(leaves)), temporary, Meter(options.progress, total), facts)
            _compare_with_written(leaves, digests, temporary, target)
            if is_step:
                source_and_options = {**selected.identity, **options.recorded}
                pathlib.Path(temporary, CONVERTED_FROM).write_text(json.dumps(source_and_options), encoding='utf-8')
        nbytes = sum(size or 0 for _, size in open_storage(target).walk(''))
    seconds, left_out = time.monotonic() - started, _left_out(contents, is_step=is_step)
    return ConvertReport(
        selected.step or 0, target, nbytes, seconds, selected.mapped, dropped=selected.dropped, left_out=left_out
    )


def _check_names(leaves: Mapping[Path, Any]) -> None:
    """Raises UnsupportedLeafError for leaves whose values Orbax would store under one name, their keys joined by '.'."""
    by_name: dict[str, Path] = {}
    for path, leaf in leaves.items():
        if leaf is None or isinstance(leaf, (dict, list, tuple)):
            continue
        other = by_name.setdefault('.'.join(path), path)
        if other != path:
            raise UnsupportedLeafError(
                f'{leaf_name(other)} and {leaf_name(path)}: Orbax would store both as {".".join(path)}, so one would overwrite '
                'the other. Rename one of them with t5ckpt cp.'
            )


def _left_out(contents: Contents, *, is_step: bool) -> tuple[str, ...]:
    """The parts of a step that Orbax cannot hold: positions in the data, the pin; in a bare tree, metrics and custom metadata."""
    located = contents.located
    names = [entry.name for entry in located.storage.entries(located.directory)]
    files = [name for name in names if name == PINNED or name.startswith(TRAIN_DS_PREFIX)]
    recorded = [name for name in ('metrics', 'custom_metadata') if getattr(contents.facts, name) and not is_step]
    return tuple(sorted(files + recorded))


def recorded_source(directory: str) -> Mapping[str, Any]:
    """The identity of the source and the options that a step was converted with; {} for a step that Orbax saved."""
    try:
        record = json.loads(pathlib.Path(local_output(directory), CONVERTED_FROM).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _orbax_leaf(path: Path, leaf: Any, cast: Cast | None) -> Any:
    if isinstance(leaf, Empty):
        return leaf.build()
    if leaf is None or isinstance(leaf, (str, bool, int, float)):
        return leaf
    if not isinstance(getattr(leaf, 'dtype', None), np.dtype) or isinstance(leaf, complex):
        raise UnsupportedLeafError(
            f'{leaf_name(path)} is {type(leaf).__name__}, but Orbax can only hold arrays and numbers. Leave it '
            'out (leave=, or --leave).'
        )
    if isinstance(leaf, KeyData):
        return _keys(path, leaf)
    array = cast_leaf(path, leaf, cast)
    try:
        ts.dtype(array.dtype.name)
    except (TypeError, ValueError) as error:
        raise UnsupportedLeafError(
            f'{leaf_name(path)}: Orbax cannot hold {array.dtype.name}. Leave it out (leave=, or --leave).'
        ) from error
    return array


def _keys(path: Path, leaf: KeyData) -> Any:
    import jax

    try:
        return jax.random.wrap_key_data(jax.device_put(np.asarray(leaf.data)), impl=leaf.impl)
    except ValueError as error:
        raise UnsupportedLeafError(
            f'{leaf_name(path)}: Orbax cannot hold PRNG keys of {leaf.impl}, which JAX does not have here. Leave it '
            'out (leave=, or --leave).'
        ) from error


def _compare_with_written(leaves: LeafTable, digests: Mapping[str, str], temporary: str, target: str) -> None:
    """Reads back what Orbax wrote, one array at a time.

    Raises:
      SaveFailedError: it cannot be read, or it differs from the leaves.
    """
    try:
        written = linked_leaves(read_contents(locate(temporary), logs_items=False))
        differing = [
            path for path in leaves if not _is_same(leaves[path], written.get(path), digests.get('.'.join(path)))
        ]
    except T5CkptError as error:
        text = f'{target}: Orbax wrote a step that cannot be read: {without_cure_of_damage(str(error))}. {_CURE}'
        raise SaveFailedError(text) from error
    differing += written.keys() - leaves.keys()
    if differing:
        names = some_of([leaf_name(path) for path in differing], 5)
        raise SaveFailedError(f'{target}: Orbax wrote other values of {names} than those of the checkpoint. {_CURE}')


def _is_same(leaf: Any, written: Any, expected: str | None) -> bool:
    """Whether a leaf was written; ``expected`` is the checksum of its values if it is a LazyArray."""
    if isinstance(written, Empty):
        return leaf == written.build()
    if isinstance(written, KeyData):
        import jax

        return str(jax.random.key_impl(leaf)) == written.impl and np.array_equal(
            jax.random.key_data(leaf), written.data
        )
    if not isinstance(written, LazyArray):
        return type(leaf) is type(written) and leaf == written
    values = written.get()
    if expected is None:
        return np.array_equal(values, np.asarray(leaf), equal_nan=True)
    return (written.shape, written.dtype) == (leaf.shape, leaf.dtype) and digest(
        np.ascontiguousarray(values)
    ) == expected


def _with_lists(node: Any) -> Any:
    """The tree in which dicts with the keys '0', '1', ..., as T5X's format holds sequences, are lists, as Orbax holds them."""
    if not isinstance(node, dict):
        return node
    children = {key: _with_lists(child) for key, child in node.items()}
    indices = list(map(str, range(len(node))))
    return [children[index] for index in indices] if node and node.keys() == {*indices} else children


def _save(tree: Any, target: str, meter: Meter, step: Facts | None) -> Mapping[str, str]:
    """Writes a tree or, with the facts of a step, an item with the tree beside its metrics.

    Returns:
      The checksums of the values of LazyArrays, by Orbax's names.
    """
    try:
        import jax
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise MissingDependencyError(
            "writing Orbax's layout needs Orbax: pip install orbax-checkpoint, or pip install 't5ckpt[orbax]'"
        ) from error

    digests: dict[str, str] = {}
    handlers = ocp.type_handlers

    class LazyHandler(handlers.NumpyHandler):
        """Reads and writes one array after another; NumpyHandler would hold all of them at once."""

        async def _background_serialize(self, values: Sequence[Any], infos: Any, args: Any = None) -> None:
            for value, info, arg in zip(values, infos, args, strict=True):
                array = np.ascontiguousarray(value.get()).reshape(value.shape)
                digests[info.name] = digest(array)
                await super()._background_serialize([array], [info], [arg])
                meter.add(value.nbytes)

    registry = handlers.create_type_handler_registry(
        (LazyArray, LazyHandler(deepcopy_host_arrays=False)),
        (int, handlers.ScalarHandler()),
        (float, handlers.ScalarHandler()),
        (str, handlers.StringHandler()),
        # Typed keys are the only jax.Arrays. Orbax's own handler records their implementation.
        (jax.Array, handlers.get_type_handler(jax.Array)),
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    args: Any = ocp.args.PyTreeSave(tree)
    custom = None
    if step is not None:
        items = {_ITEM: args}
        if step.metrics:
            items['metrics'] = ocp.args.JsonSave(dict(step.metrics))
        handlers_of: dict[str, Any] = {_ITEM: handler, 'metrics': ocp.JsonCheckpointHandler(filename='metrics')}
        handler, args = ocp.CompositeCheckpointHandler(**handlers_of), ocp.args.Composite(**items)
        custom = dict(step.custom_metadata) or None
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            # The empty directory exists, and Orbax replaces it by a rename.
            checkpointer.save(target, args=args, force=True, custom_metadata=custom)
    except T5CkptError:
        # The source is damaged, or was deleted.
        raise
    except (ValueError, OSError, RuntimeError) as error:
        raise SaveFailedError(f'{target}: Orbax did not write it ({type(error).__name__}: {error!s:.300}).') from error
    return digests

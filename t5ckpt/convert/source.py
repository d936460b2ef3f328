"""The source of a conversion, which are leaves under their new names, not yet read, and its writing in T5X's format."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.catalog.locate import Located, locate, open_target
from t5ckpt.convert.options import ConvertOptions, ConvertReport
from t5ckpt.core.keys import is_inside, join
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.errors import OutputExistsError, UnsupportedLeafError
from t5ckpt.format.chunk_grid import Box
from t5ckpt.format.facts import Facts, TreeFacts
from t5ckpt.format.names import step_dir
from t5ckpt.planning.save_plan import ArrayWrite, SaveOptions, SavePlan, plan_array
from t5ckpt.planning.write_assignment import WriteAssignment
from t5ckpt.reading.contents import Contents, read_contents
from t5ckpt.save.linked_arrays import LinkedArray, linked_leaves
from t5ckpt.save.prepare import rehearse, write_stream
from t5ckpt.save.request import SaveContext, SaveRequest
from t5ckpt.save.stage import Staging
from t5ckpt.save.write import write_arrays
from t5ckpt.storage import PathOrStorage, Storage
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.leaves import LeafToSave


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of a conversion: names, shapes and dtypes, without values.

    Attributes:
      table: the leaves to write.
      step: the source's, or None.
      path: of the source, for errors.
      mapped, added, dropped, left_out: see :class:`ConvertReport`.
      files: other files of the step, by name in its directory: the state of a data iterator.
      facts: those to copy: metrics, the keep policy.
      inline: whether each leaf is in the source's manifest. It stays where it is, whatever its size: T5X cannot restore a stored
        leaf without mesh axes. None decides by the size.
    """

    table: LeafTable
    step: int | None
    path: str
    mapped: Mapping[str, str]
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict[str, bytes])
    facts: Facts = dataclasses.field(default_factory=Facts)
    inline: Mapping[Path, bool] | None = None


def chosen_source(table: LeafTable, located: Located, options: ConvertOptions, **others: Any) -> Source:
    """The leaves of a checkpoint that ``take`` and ``leave`` choose, under their names; ``others`` are fields of the source.

    Raises:
      UnmatchedPattern: a pattern matches no leaf.
    """
    taken = options.taken(map(leaf_name, table))
    chosen = {path: leaf for path, leaf in table.items() if leaf_name(path) in taken}
    names = list(map(leaf_name, chosen))
    dropped = tuple(leaf_name(path) for path in table if path not in chosen)
    mapped = dict(zip(names, names, strict=True))
    return Source(chosen, located.step, located.url, mapped, dropped=dropped, **others)


def carried_facts(facts: Facts) -> Facts:
    """The facts of a source that are also those of its copy."""
    return Facts(
        knows_tree=facts.knows_tree,
        created_unix=facts.created_unix,
        metrics=facts.metrics,
        custom_metadata=facts.custom_metadata,
        keep=facts.keep,
    )


def write_source(source: Source, directory: PathOrStorage, options: ConvertOptions) -> ConvertReport:
    """Writes a source as ``checkpoint_<step>`` in a run's directory.

    Raises:
      ValueError: neither the source nor the options have a step.
      CheckpointExistsError, UnsupportedLeafError, StorageError: see ``write_stream``.
    """
    step = source.step if options.step is None else options.step
    if step is None:
        raise ValueError('the path of the source names no step. Pass ConvertOptions(step=...).')
    storage = open_target(directory)
    save_options = SaveOptions(options.cast, options.compression)
    if source.inline is not None:
        save_options = dataclasses.replace(save_options, inline_bytes=0)
    context = SaveContext(storage, save_options, progress=options.progress)
    request = SaveRequest(context, step, options.budget_bytes, options.overwrite, source.facts, source.files)
    names = (source.mapped, source.added, source.dropped, source.left_out)
    if options.dry_run:
        rehearse(source.table, request, source.inline)
        return ConvertReport(step, storage.url(step_dir(step)), 0, 0.0, *names)
    done = write_stream(source.table, request, source.inline)
    return ConvertReport(step, done.path, done.nbytes, done.seconds, *names)


# --- exports ---------------------------------------------------------------------------------------------------------


def open_export(
    path: str | os.PathLike[str], output: str, options: ConvertOptions, *, typed: bool = True
) -> tuple[Contents, Source]:
    """Opens a checkpoint to export, in any format that t5ckpt reads; no array is read.

    Args:
      path: a run's directory, a step's, or a file.
      output: the path to write, which must not contain the checkpoint.
      options: ``step``, ``take`` and ``leave``.
      typed: typed keys and Python numbers are leaves of their own kind; else only arrays are chosen.

    Raises:
      OutputExistsError: the output would replace the checkpoint.
      CheckpointNotFoundError, FormatError: see ``t5ckpt.open_checkpoint``.
    """
    located = locate(path, options.step, tensors=True)
    inside = located.storage.local_path(join(located.directory, located.manifest))
    outer = os.path.realpath(output)
    if inside is not None and os.path.commonpath([os.path.realpath(inside), outer]) == outer:
        raise OutputExistsError(f'{output} contains the checkpoint to export, {inside}. Pass another output.')
    contents = read_contents(located)
    table = linked_leaves(contents, typed=typed)
    others = () if typed else tuple(leaf_name(path) for path, leaf in table.items() if not hasattr(leaf, 'dtype'))
    table = table if typed else {path: leaf for path, leaf in table.items() if hasattr(leaf, 'dtype')}
    source = chosen_source(table, located, options)
    return contents, dataclasses.replace(source, dropped=source.dropped + others)


def plan_zarr(
    leaves: Iterable[LeafToSave], names: Mapping[Path, str], has_dtype: Callable[[np.dtype], bool], program: str
) -> tuple[ArrayWrite, ...]:
    """Plans leaves as arrays of zarr for another program, each in the directory with the program's name of it.

    Raises:
      UnsupportedLeafError: the program does not have a leaf's dtype, or its name leads out of the directory.
    """
    assignment = WriteAssignment()
    writes: list[ArrayWrite] = []
    for leaf in leaves:
        name, dtype = names[leaf.path], leaf.dtype
        if dtype is None or not has_dtype(dtype):
            raise UnsupportedLeafError(
                f'{leaf.name}: {program} cannot hold {dtype or "text"}. Leave it out (leave=, or --leave), or cast it.'
            )
        if not is_inside(name):
            raise UnsupportedLeafError(
                f'{leaf.name}: {program} would not find the array under the name {name}. Rename the leaf with t5ckpt cp.'
            )
        write = plan_array(leaf, name, SaveOptions(), assignment)
        # Facts, which record other dtypes on disk, are only in T5X's format.
        writes.append(dataclasses.replace(write, array=dataclasses.replace(write.array, disk_dtype=dtype)))
    return tuple(writes)


def write_zarr(storage: Storage, directory: str, writes: Sequence[ArrayWrite], options: ConvertOptions) -> None:
    """Writes planned arrays durably into a directory."""
    context = SaveContext(storage, SaveOptions(), progress=options.progress)
    write_arrays(context, directory, Staging(SavePlan(tuple(writes), (), TreeFacts()), options.budget_bytes))
    storage.sync_tree(directory, sorted(write.array.location for write in writes))


def boxes_of(array: Any, axis: int, box_bytes: int) -> Iterator[Box]:
    """Yields boxes that cover an array, divided along one axis, each of whole chunks and of about ``box_bytes``.

    Chunks are always read completely, so a chunk in which a box ended would be read twice. If the chunks of one box have more
    than eight times ``box_bytes``, the box is smaller than a chunk, to limit memory.
    """
    whole = Box.whole(array.shape)
    if not array.shape or array.nbytes <= box_bytes or array.shape[axis] <= 1:
        yield whole
        return
    size = array.shape[axis]
    rows = max(1, box_bytes * size // array.nbytes)
    source = array.source if isinstance(array, LinkedArray) else None
    chunks = array.shape if source is None else source.leaf.metadata.get('chunks', array.shape)
    chunk = min(size, max(1, chunks[axis]))
    step = rows // chunk * chunk or (chunk if chunk <= 8 * rows else rows)
    for start in range(0, size, step):
        yield Box([*whole[:axis], (start, min(size, start + step)), *whole[axis + 1 :]])

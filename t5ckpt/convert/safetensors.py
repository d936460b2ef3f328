"""Exports any tree to a safetensors file, and imports these files, with the names of the leaves.

An array has the name of its leaf, ``target/encoder/layers_0/mlp/wi/kernel``. The format does not hold other leaves (None, text,
empty containers); the report lists them.

Notes: holds one array or a part of one in memory at a time.
"""

from __future__ import annotations

import os
import time

from t5ckpt.commit.output_files import check_output, local_output, output
from t5ckpt.convert.conversion import write_import
from t5ckpt.convert.export_options import (
    ExportOptions,
    ExportReport,
    ImportOptions,
    refuse_inside,
    refuse_options,
    stamp,
)
from t5ckpt.convert.files.safetensors import TensorReader, TensorSpec, TensorWriter, check_dtype, lazy_copy
from t5ckpt.convert.source_arrays import boxes_of, open_sources
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import leaf_name, path_of
from t5ckpt.errors import UnsupportedFormatError
from t5ckpt.format.dtypes import cast
from t5ckpt.planning.casts import cast_dtype, check_cast
from t5ckpt.progress import Meter
from t5ckpt.tree.leaf_table import LeafTable


def export_safetensors(
    checkpoint: str | os.PathLike[str],
    file: str | os.PathLike[str],
    options: ExportOptions = ExportOptions(),  # noqa: B008 - frozen
) -> ExportReport:
    """Writes arrays of a checkpoint to one safetensors file, under the names of their leaves.

    Args:
      checkpoint: a run's directory, a step's directory, or the manifest file.
      file: on a local file system.
      options: see :class:`ExportOptions`; ``select`` chooses the arrays, ``dtype`` casts the arrays under ``target``.

    Raises:
      UnsupportedLeafError: safetensors does not have the dtype, or a cast would make a finite value infinite.
      OutputExistsError: the file exists, and ``options.force`` is not set.
      CheckpointNotFoundError: there is no such checkpoint; FormatError and StorageError if it cannot be read.
      ValueError: ``select`` is not a regular expression, or matches no name.
    """
    started = time.monotonic()
    refuse_options(options, ('max_shard_bytes',), 'one file')
    target, casting = local_output(file), options.cast
    check_output(target, options.force)
    sources = open_sources(checkpoint, options.step)
    located = sources.located
    refuse_inside(target, located.storage.local_path(join(located.directory, located.manifest)))
    chosen = sources.select(options.select)
    check_cast(casting, {source.path: source for source in chosen.values()})
    specs: list[TensorSpec] = []
    for name, source in chosen.items():
        specs.append(TensorSpec(name, cast_dtype(source.path, source.dtype, casting), source.shape))
        check_dtype(name, specs[-1].dtype)
    total = sum(spec.nbytes for spec in specs)
    if not options.dry_run:
        meter = Meter(options.progress, total)
        with sources.identity.reading(), output(target, options.force) as temporary:
            writer = TensorWriter(temporary, specs, {'format': 'np'})
            try:
                for spec in specs:
                    source = chosen[spec.name]
                    for box in boxes_of(source, 0, options.piece_bytes):
                        values = cast(source.read(box.slices), spec.dtype, source.name)
                        writer.write(spec.name, box[0][0] if box else 0, values)
                        meter.add(values.nbytes)
                writer.close()
            finally:
                writer.abort()
    mapped = {name: (name,) for name in chosen}
    dropped = (*(name for name in sources.arrays if name not in chosen), *sources.others)
    seconds, name = time.monotonic() - started, os.path.basename(target)
    return ExportReport(target, 'safetensors', (name,), total, mapped, dropped, seconds, options.dry_run)


def import_safetensors(
    file: str | os.PathLike[str],
    checkpoints_dir: str | os.PathLike[str],
    options: ImportOptions = ImportOptions(),  # noqa: B008 - frozen
) -> ExportReport:
    """Writes the tensors of a safetensors model as a checkpoint; a '/' in a name begins a level of the tree.

    Args:
      file: on a local file system: one file, the index of several, or the directory of a model.
      checkpoints_dir: a run's directory.
      options: see :class:`ImportOptions`. Without a step, ``state/step`` or ``step`` of the file names it, else it is 0.

    Raises:
      CorruptCheckpointError: not a safetensors file, or damaged.
      CheckpointExistsError: the step exists, and ``options.force`` is not set.
      UnsupportedFormatError: two names have one place in a tree, where a '/' begins a level; or there is no array.
    """
    started, path = time.monotonic(), os.fspath(file)
    refuse_options(options, ('scanned', 'split_heads'), 'a file, which keeps its names')
    reader = TensorReader(path)
    if not reader.tensors:
        raise UnsupportedFormatError(f'{path} contains no array, but a checkpoint has at least one.')
    table: LeafTable = {}
    mapped: dict[str, tuple[str, ...]] = {}
    for name, tensor in reader.tensors.items():
        table[path_of(name)] = lazy_copy(tensor.shape, tensor.dtype, tensor.__getitem__, reader.forget)
        mapped[leaf_name(path_of(name))] = (name,)
    step = _step(table) if options.step is None else options.step
    source = {'format': '.safetensors', 'files': [stamp(file) for file in reader.files]}
    url = write_import(table, step, checkpoints_dir, options, source)
    total = sum(array.nbytes for array in table.values())
    return ExportReport(url, 'safetensors', (), total, mapped, (), time.monotonic() - started, options.dry_run)


def _step(table: LeafTable) -> int:
    """The value of ``state/step`` or ``step``, or 0."""
    for path in (('state', 'step'), ('step',)):
        array = table.get(path)
        if array is not None and array.shape == () and array.dtype.kind in 'iu':
            return int(array.get())
    return 0

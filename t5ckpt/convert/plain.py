"""Exports any tree to a safetensors or npz file, and imports these files, with the names of the leaves.

An array has the name of its leaf, ``target/encoder/layers_0/mlp/wi/kernel``. Neither format can hold other leaves (None, text,
empty containers); the report lists them. For dtypes that npz lacks see ``reading/npz.py``.

Notes: holds one array or a part of one in memory at a time; an import from npz holds complete arrays. npz files are not
compressed.
"""

from __future__ import annotations

import contextlib
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO

import numpy as np

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
from t5ckpt.convert.source_arrays import Source, boxes_of, open_sources
from t5ckpt.core.argument_kinds import checks_kinds
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import leaf_name, path_of
from t5ckpt.core.text import some_of
from t5ckpt.errors import UnsupportedFormatError, UnsupportedLeafError
from t5ckpt.format.dtypes import cast
from t5ckpt.lazy import LazyArray, LazyThreadPoolArray
from t5ckpt.planning.casts import cast_dtype, check_cast
from t5ckpt.progress import Meter
from t5ckpt.reading.checkpoint_files import open_source
from t5ckpt.reading.npz import BITS, NpzArray, extended_dtype, is_extended, npz_arrays, npz_errors
from t5ckpt.storage import foreign_errors
from t5ckpt.tree.leaf_table import LeafTable, unflatten

_Rows = tuple[int, np.ndarray]
"""The index of the first row, and consecutive rows of an array."""
_Item = tuple[TensorSpec, Iterator[_Rows]]


# --- out -------------------------------------------------------------------------------------------------------------


@checks_kinds
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
    return _export(checkpoint, file, options, _write_safetensors)


@checks_kinds
def export_npz(
    checkpoint: str | os.PathLike[str],
    file: str | os.PathLike[str],
    options: ExportOptions = ExportOptions(),  # noqa: B008 - frozen
) -> ExportReport:
    """Writes arrays of a checkpoint to one npz file, which ``numpy.load`` reads.

    Args:
      checkpoint: path or URL of a checkpoint or a run.
      file: local path of the file to write.
      options: which arrays, and how; ``max_shard_bytes`` is refused, since npz is one file.

    Raises the errors of :func:`export_safetensors`, except that npz files hold all dtypes.
    """
    return _export(checkpoint, file, options, _write_npz)


def _export(
    checkpoint: str | os.PathLike[str],
    file: str | os.PathLike[str],
    options: ExportOptions,
    write: Callable[[str, list[_Item]], None],
) -> ExportReport:
    started = time.monotonic()
    refuse_options(options, ('max_shard_bytes',), 'one file')
    target, casting = local_output(file), options.cast
    check_output(target, options.force)
    sources = open_sources(checkpoint, options.step)
    located = sources.located
    refuse_inside(target, located.storage.local_path(join(located.directory, located.manifest)))
    chosen = sources.select(options.select)
    check_cast(casting, {source.path: source for source in chosen.values()})
    kind = 'npz' if write is _write_npz else 'safetensors'
    specs: dict[str, TensorSpec] = {}
    for name, source in chosen.items():
        dtype = cast_dtype(source.path, source.dtype, casting)
        bits = f'{name}::{dtype.name}' if kind == 'npz' and is_extended(dtype) else name
        specs[name] = TensorSpec(bits, dtype, source.shape)
    total = sum(spec.nbytes for spec in specs.values())
    for name, spec in specs.items():
        if kind == 'safetensors':
            check_dtype(spec.name, spec.dtype)
        elif '\0' in name:
            # zipfile would truncate the name there without an error.
            raise UnsupportedLeafError(
                f'{name!r:.120}: names in an npz file cannot contain a NUL character. Rename the leaf.'
            )
        elif name.endswith('.npy') and name.removesuffix('.npy') in specs:
            raise UnsupportedLeafError(
                f'{name}: numpy.load would read {name.removesuffix(".npy")} for this name. Rename the leaf.'
            )
        elif spec.name == name and extended_dtype(name.rpartition('::')[2], spec.dtype) is not None:
            raise UnsupportedLeafError(
                f'{name}: in an npz file, the end of this name would be read as the dtype of the array. Rename the leaf.'
            )
    if not options.dry_run:
        meter = Meter(options.progress, total)
        items = [(spec, _read_rows(chosen[name], spec, options, meter)) for name, spec in specs.items()]
        with sources.identity.reading(), output(target, options.force) as temporary:
            write(temporary, items)
    mapped = {name: (spec.name,) for name, spec in specs.items()}
    dropped = (*(name for name in sources.arrays if name not in chosen), *sources.others)
    seconds = time.monotonic() - started
    return ExportReport(target, kind, (os.path.basename(target),), total, mapped, dropped, seconds, options.dry_run)


def _read_rows(source: Source, spec: TensorSpec, options: ExportOptions, meter: Meter) -> Iterator[_Rows]:
    """Yields the array along its first axis; an array without dimensions at once."""
    for box in boxes_of(source, 0, options.piece_bytes):
        values = source.read(box.slices)
        yield box[0][0] if box else 0, cast(values, spec.dtype, source.name)
        meter.add(values.size * spec.dtype.itemsize)


def _write_safetensors(path: str, items: Iterable[_Item]) -> None:
    items = list(items)
    writer = TensorWriter(path, [spec for spec, _ in items], {'format': 'np'})
    try:
        for spec, rows in items:
            for first_row, values in rows:
                writer.write(spec.name, first_row, values)
        writer.close()
    finally:
        writer.abort()


def _write_npz(path: str, items: Iterable[_Item]) -> None:
    """Writes a zip file of npy files, one after the other."""
    with foreign_errors(path, writing=True), open(path, 'xb') as file:
        with zipfile.ZipFile(file, 'w') as archive:
            for spec, rows in items:
                with archive.open(zipfile.ZipInfo(f'{spec.name}.npy'), 'w', force_zip64=True) as member:
                    _write_npy(member, spec, rows)
        file.flush()
        os.fsync(file.fileno())


def _write_npy(member: IO[bytes], spec: TensorSpec, rows: Iterator[_Rows]) -> None:
    dtype = BITS[spec.dtype.itemsize] if is_extended(spec.dtype) else spec.dtype
    header = {'descr': np.lib.format.dtype_to_descr(dtype), 'fortran_order': False, 'shape': spec.shape}
    np.lib.format.write_array_header_1_0(member, header)
    for _, values in rows:
        # Flat bytes, because a zip member takes len() of its argument.
        member.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


# --- in --------------------------------------------------------------------------------------------------------------


@checks_kinds
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
      UnsupportedLeafError: one name is a prefix of another, so it would be both an array and a subtree.
    """
    path = os.fspath(file)
    reader = TensorReader(path)
    arrays = {
        name: (name, lazy_copy(tensor.shape, tensor.dtype, tensor.__getitem__, reader.forget))
        for name, tensor in reader.tensors.items()
    }
    return _import(path, checkpoints_dir, options, arrays, reader.files)


@checks_kinds
def import_npz(
    file: str | os.PathLike[str],
    checkpoints_dir: str | os.PathLike[str],
    options: ImportOptions = ImportOptions(),  # noqa: B008 - frozen
) -> ExportReport:
    """Writes the arrays of one npz file as a checkpoint; a '/' in a name begins a level of the tree.

    Args:
      file: local path of the file to read.
      checkpoints_dir: path or URL of the run that gets the checkpoint.
      options: step, dtype and layout of the checkpoint.

    Raises the errors of :func:`import_safetensors`. Pickles in the file are not read.
    """
    path = os.fspath(file)
    with contextlib.ExitStack() as opened:
        with npz_errors(path):
            archive = opened.enter_context(zipfile.ZipFile(opened.enter_context(open_source(path))))
        headers, unread = npz_arrays(archive, path)
        if unread:
            raise UnsupportedFormatError(
                f'{path}: t5ckpt does not read the dtypes of {some_of([f"{name} ({unread[name]})" for name in unread], 5)}. '
                'Save the file without them, or load it as the init_fn of restore_or_init (docs/migration.md).'
            )
        arrays = {array.member: (array.name, _npy(archive, array, path)) for array in headers}
        return _import(path, checkpoints_dir, options, arrays, [path])


def _import(
    path: str,
    checkpoints_dir: str | os.PathLike[str],
    options: ImportOptions,
    arrays: Mapping[str, tuple[str, LazyArray]],
    files: Iterable[str],
) -> ExportReport:
    started = time.monotonic()
    refuse_options(options, ('scanned', 'split_heads'), 'a file, which keeps its names')
    if not arrays:
        raise UnsupportedFormatError(f'{path} contains no array, but a checkpoint has at least one.')
    table: LeafTable = {}
    mapped: dict[str, tuple[str, ...]] = {}
    for member, (name, array) in arrays.items():
        path_of_leaf = path_of(name)
        # The same path may be spelled in several ways.
        leaf = leaf_name(path_of_leaf)
        if leaf in mapped:
            raise UnsupportedLeafError(f'{member}: {mapped[leaf][0]} has the same name, {leaf}. Rename one of them.')
        table[path_of_leaf] = array
        mapped[leaf] = (member,)
    unflatten(table)
    step = _step(table) if options.step is None else options.step
    kind = 'npz' if path.endswith('.npz') else 'safetensors'
    source = {'format': f'.{kind}', 'files': [stamp(file) for file in files]}
    url = write_import(table, step, checkpoints_dir, options, source)
    total = sum(array.nbytes for _, array in arrays.values())
    return ExportReport(url, kind, (), total, mapped, (), time.monotonic() - started, options.dry_run)


def _npy(archive: zipfile.ZipFile, array: NpzArray, path: str) -> LazyThreadPoolArray:
    def get() -> np.ndarray:
        with npz_errors(f'{path}: {array.member}'), archive.open(array.member) as file:
            values = np.lib.format.read_array(file, allow_pickle=False)
            return values if array.dtype == array.stored else values.view(array.dtype)

    return LazyThreadPoolArray(array.shape, array.dtype, get)


def _step(table: LeafTable) -> int:
    """The value of ``state/step`` or ``step``, or 0."""
    for path in (('state', 'step'), ('step',)):
        array = table.get(path)
        if array is not None and array.shape == () and array.dtype.kind in 'iu':
            return int(array.get())
    return 0

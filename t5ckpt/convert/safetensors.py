"""Writes safetensors files; exports any tree to one, with the names of the leaves.

An array has the name of its leaf, ``target/encoder/layers_0/mlp/wi/kernel``. The format does not hold other leaves (None, text,
empty containers); the report lists them. ``format/safetensors.py`` describes the format, and ``reading/safetensors.py`` reads it.

The ``safetensors`` package writes all tensors at once. This module writes the header first, since all shapes are known, and then
the rows of the tensors in any order. Tests read every file with the package.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from t5ckpt.catalog.locate import locate
from t5ckpt.commit.output_files import check_output, local_output, output
from t5ckpt.convert.options import ConvertOptions, ConvertReport
from t5ckpt.convert.source import boxes_of, open_export
from t5ckpt.core.leaf_path import Path, leaf_name, path_of
from t5ckpt.errors import UnsupportedFormatError, UnsupportedLeafError
from t5ckpt.format.dtypes import cast, kind
from t5ckpt.format.facts import NO_FACTS
from t5ckpt.format.manifest import Manifest
from t5ckpt.format.safetensors import DTYPE_NAMES, MAX_HEADER, METADATA, is_tensor_file
from t5ckpt.planning.casts import cast_dtype, check_cast
from t5ckpt.progress import Meter
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.contents import Contents, RawFiles
from t5ckpt.reading.safetensors import read_headers
from t5ckpt.storage import foreign_errors


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The name, dtype and shape of a tensor to write."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_dtype(name: str, dtype: np.dtype) -> None:
    """Raises UnsupportedLeafError for a dtype that the format lacks, and for the name of the metadata."""
    if name == METADATA:
        raise UnsupportedLeafError(f'{name}: this name is reserved in safetensors files. Leave the array out.')
    if dtype.name not in DTYPE_NAMES:
        # Only floating leaves can be cast.
        cure = ', or cast it' if kind(dtype) == 'float' else ''
        raise UnsupportedLeafError(
            f'{name}: safetensors has no {dtype.name}, only {", ".join(DTYPE_NAMES)}. Leave it out with a selection{cure}.'
        )


class TensorWriter:
    """Writes one file, which is durable at the end of the context. Not safe from several threads."""

    def __init__(self, path: str, tensors: Sequence[TensorSpec], metadata: Mapping[str, str]):
        """Creates the file, with its header.

        Args:
          path: must not exist.
          tensors: in any order. In the file, wide dtypes come first, as the package writes them, so that all are aligned.
          metadata: of the file.
        """
        header: dict[str, Any] = {METADATA: dict(metadata)}
        self._places: dict[str, tuple[int, TensorSpec]] = {}
        end = 0
        for spec in sorted(tensors, key=lambda spec: -spec.dtype.itemsize):
            start, end = end, end + spec.nbytes
            dtype, offsets = DTYPE_NAMES[spec.dtype.name], [start, end]
            header[spec.name] = {'dtype': dtype, 'shape': list(spec.shape), 'data_offsets': offsets}
            self._places[spec.name] = (start, spec)
        text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
        text += b' ' * (-len(text) % 8)
        if len(text) > MAX_HEADER:
            raise UnsupportedLeafError(
                f'{path}: the names of {len(tensors)} tensors do not fit into one header. Select fewer.'
            )
        self._path = path
        self._data = 8 + len(text)
        with foreign_errors(path, writing=True):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._write(len(text).to_bytes(8, 'little') + text, 0)
            os.ftruncate(self._file, self._data + end)

    def write(self, name: str, row: int, values: np.ndarray) -> None:
        """Writes the rows of a tensor from ``row`` on; for a tensor without dimensions, its value."""
        start, spec = self._places[name]
        data = np.ascontiguousarray(values, values.dtype.newbyteorder('<'))
        row_bytes = math.prod(spec.shape[1:]) * spec.dtype.itemsize
        with foreign_errors(self._path, writing=True):
            self._write(data.reshape(-1).view(np.uint8), self._data + start + row * row_bytes)

    def _write(self, data: Any, offset: int) -> None:
        view = memoryview(data)
        while len(view) > 0:
            # Linux writes at most 2 GiB in one call.
            done = os.pwrite(self._file, view[: 2**30], offset)
            view, offset = view[done:], offset + done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                with foreign_errors(self._path, writing=True):
                    os.fsync(self._file)
        finally:
            os.close(self._file)


def open_tensors(path: str | os.PathLike[str]) -> tuple[Contents, Mapping[str, str]]:
    """The tensors of a file, of an index of several or of a model's directory, as leaves; and the metadata of all files.

    Raises:
      CheckpointNotFoundError: there is no such file, or the directory has no model.
      FormatError: see ``reading/safetensors.read_headers``.
    """
    # In a cache of Hugging Face, the files of a model are links.
    located = dataclasses.replace(locate(path, tensors=True), follow_links=True)
    if not is_tensor_file(located.manifest):
        raise UnsupportedFormatError(
            f'{path} is not a safetensors file, nor a directory with model.safetensors. Check the path; '
            't5ckpt convert flax reads Flax weights.'
        )
    headers, versions = read_headers(CheckpointFiles.of(located), located.manifest)
    leaves = {path_of(name): array for header in headers.values() for name, array in header.arrays}
    metadata = {name: text for header in headers.values() for name, text in header.metadata.items()}
    return Contents(located, Manifest(3, leaves), NO_FACTS, raw=RawFiles(versions=versions)), metadata


def export_safetensors(
    checkpoint: str | os.PathLike[str], file: str | os.PathLike[str], options: ConvertOptions
) -> ConvertReport:
    """Writes arrays of a checkpoint to one safetensors file on a local file system, under the names of their leaves.

    Raises:
      UnsupportedLeafError: safetensors does not have the dtype, or a cast would make a finite value infinite.
      OutputExistsError: the file exists, and ``options.overwrite`` is not set.
    """
    started = time.monotonic()
    target, casting = local_output(file), options.cast
    check_output(target, options.overwrite)
    contents, source = open_export(checkpoint, target, options, typed=False)
    check_cast(casting, source.table)
    specs: dict[Path, TensorSpec] = {}
    for path, array in source.table.items():
        specs[path] = TensorSpec(leaf_name(path), cast_dtype(path, np.dtype(array.dtype), casting), array.shape)
        check_dtype(specs[path].name, specs[path].dtype)
    total = sum(spec.nbytes for spec in specs.values())
    if not options.dry_run:
        meter = Meter(options.progress, total)
        with (
            contents.identity.reading(),
            output(target, options.overwrite) as temporary,
            TensorWriter(temporary, list(specs.values()), {'format': 'np'}) as writer,
        ):
            for path, spec in specs.items():
                array = source.table[path]
                for box in boxes_of(array, 0, options.piece_bytes):
                    values = cast(np.asarray(array[box.slices]), spec.dtype, spec.name)
                    writer.write(spec.name, box[0][0] if box else 0, values)
                    meter.add(values.nbytes)
    seconds, name = time.monotonic() - started, os.path.basename(target)
    return ConvertReport(
        contents.located.step, target, total, seconds, source.mapped, dropped=source.dropped, files=(name,)
    )

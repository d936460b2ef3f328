"""The ``.zarray`` file of an array: its metadata by the zarr v2 storage specification."""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from t5ckpt.format.array_spec import StoredArray, is_list_of_sizes, layout_of
from t5ckpt.format.chunk_grid import ChunkGrid
from t5ckpt.format.codecs import codec_text, is_decodable
from t5ckpt.format.decoding import decoding
from t5ckpt.format.dtypes import TYPESTRS, name_of, zarr_typestr
from t5ckpt.format.file_checksums import FileEntry, entry_of

ZARRAY = '.zarray'
_OTHER_TOOL = 'Read the array with the program that wrote it, or with zarr.open_array.'


def zarray_of(array: StoredArray) -> dict[str, Any]:
    """The contents of an array's ``.zarray`` (zarr v2 storage specification)."""
    return {
        **layout_of(array),
        'dimension_separator': '.',
        'dtype': zarr_typestr(array.disk_dtype),
        'fill_value': None,
        'filters': None,
        'order': 'C',
        'zarr_format': 2,
    }


def zarray_bytes(array: StoredArray) -> bytes:
    """The ``.zarray`` of an array."""
    return json.dumps(zarray_of(array), separators=(',', ':'), sort_keys=True).encode()


def zarray_file(array: StoredArray) -> str:
    """The name of an array's ``.zarray``, relative to the checkpoint's directory."""
    return f'{array.location}/{ZARRAY}'


def implied_metadata(array: StoredArray, checksums: Mapping[str, FileEntry]) -> dict[str, bytes]:
    """The ``.zarray`` of an array by its name, if its recorded checksum is that of the manifest's metadata; else empty.

    The file need not be read.
    """
    if not array.is_zarr_directory or not {'chunks', 'compressor'} <= array.metadata.keys():
        return {}
    file, data = zarray_file(array), zarray_bytes(array)
    return {file: data} if checksums.get(file) == entry_of(data) else {}


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """The chunk grid of an array, and the meaning of the bytes of a chunk.

    Attributes:
      grid: of the chunks.
      dtype: of the elements, with their byte order.
      is_fortran: whether the first axis varies fastest.
      codecs: in the order of decoding.
      fill: the value of the elements of absent chunks; None if no chunk may be absent.
      offset: of the chunk in its file, in bytes.
      file_bytes: of the file of each chunk; None if the chunks are encoded.
    """

    grid: ChunkGrid
    dtype: np.dtype
    is_fortran: bool = False
    codecs: Sequence[Mapping[str, Any]] = ()
    fill: Any = None
    offset: int = 0
    file_bytes: int | None = None

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded chunk; chunks at the end of an axis are stored in full."""
        return math.prod(self.grid.chunk_shape) * self.dtype.itemsize


def layout_of_range(array: StoredArray) -> ChunkLayout:
    """The layout of an array that is a range of bytes of a file: one chunk."""
    grid = ChunkGrid(array.shape, tuple(max(1, size) for size in array.shape))
    place = array.metadata
    return ChunkLayout(grid, array.disk_dtype, offset=place['offset'], file_bytes=place['file_bytes'])


def layout_in_manifest(array: StoredArray, where: str) -> ChunkLayout:
    """The layout of an array without ``.zarray``, by the metadata in the manifest; raises as :func:`decode_zarray`."""
    dtype = zarr_typestr(array.disk_dtype)
    fields = {'zarr_format': 2, 'shape': array.shape, 'dtype': dtype} | dict(array.metadata)
    with decoding(where):
        return _parsed(fields, array.shape, array.disk_dtype)


def decode_zarray(data: bytes, array: StoredArray, where: str) -> ChunkLayout:
    """Decodes the ``.zarray`` of an array that the manifest describes.

    An opaque dtype ('<V2', as zarr-python names what it does not know) is that of the manifest, if the sizes agree.

    Raises:
      CorruptCheckpointError: it is not metadata of zarr v2, or contradicts the shape in the manifest.
      UnsupportedFormatError: the dtype or a codec is not read here, or the manifest has another dtype.
    """
    with decoding(where):
        layout = _decoded(data, array.shape, array.disk_dtype)
    return dataclasses.replace(layout, fill=None) if array.stores_all else layout


@functools.lru_cache(1024)
def _decoded(data: bytes, shape: tuple[int, ...], dtype: np.dtype) -> ChunkLayout:
    # Many arrays of a model have the same.
    return _parsed(json.loads(data), shape, dtype)


def _parsed(fields: Any, shape: tuple[int, ...], dtype: np.dtype) -> ChunkLayout:
    chunks, typestr, codecs = tuple(fields['chunks']), str(fields['dtype']), fields.get('filters') or ()
    codecs = [codec for codec in (fields.get('compressor'), *reversed(codecs)) if codec is not None]
    order, separator = fields.get('order', 'C'), fields.get('dimension_separator', '.')
    if fields['zarr_format'] != 2:
        raise CorruptCheckpointError(f'its zarr_format is {fields["zarr_format"]!r:.40}, expected 2.')
    if tuple(fields['shape']) != shape or len(chunks) != len(shape) or not is_list_of_sizes(chunks) or 0 in chunks:
        raise CorruptCheckpointError(
            f'the manifest has shape {shape}, and .zarray shape {fields["shape"]!r:.80} in chunks of {chunks!r:.80}.'
        )
    is_opaque = typestr[1:] == f'V{dtype.itemsize}'
    if not is_opaque and TYPESTRS.get(typestr) != dtype:
        raise UnsupportedFormatError(
            f'.zarray has the dtype {typestr!r:.80}, and the manifest {name_of(dtype)}. {_OTHER_TOOL}'
        )
    known = {'order': order in ('C', 'F'), 'dimension_separator': separator in ('.', '/')}
    refused = [f'codec {codec_text(codec)!r:.40}' for codec in codecs if not is_decodable(codec)]
    refused += [f'{key} {fields[key]!r:.40}' for key, is_known in known.items() if not is_known]
    if refused:
        raise UnsupportedFormatError(f'.zarray has the {refused[0]}, which is not read here. {_OTHER_TOOL}')
    layout = ChunkLayout(
        ChunkGrid(shape, chunks, separator),
        dtype.newbyteorder('>' if typestr.startswith('>') else '='),
        order == 'F',
        codecs,
        _fill(fields.get('fill_value'), dtype, is_opaque=is_opaque),
    )
    return layout if codecs else dataclasses.replace(layout, file_bytes=layout.chunk_bytes)


def _fill(value: Any, dtype: np.dtype, *, is_opaque: bool) -> np.ndarray | None:
    """The fill value; JSON has texts for NaN and infinities, a list for a complex number, and base64 for opaque bytes."""
    if value is None:
        return None
    with decoding('the fill value in .zarray'):
        if is_opaque and isinstance(value, str):
            return np.frombuffer(base64.b64decode(value), dtype).reshape(())
        number = complex(*map(float, value)) if isinstance(value, list) else value
        if isinstance(number, str) and dtype.kind not in 'iu':
            number = float(number)
        return np.array(number, dtype)

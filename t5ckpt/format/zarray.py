"""The ``.zarray`` file of an array: its metadata by the zarr v2 storage specification."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import separator_of
from t5ckpt.format.codecs import is_in_numcodecs
from t5ckpt.format.dtypes import dtype_from_typestr, name_of, zarr_typestr

ZARRAY = '.zarray'
# Of zarr v2; TensorStore 0.1.86 reads no filters, and of zstd no member ``checksum``.
_IN_TENSORSTORE = ('blosc', 'bz2', 'gzip', 'zlib', 'zstd')
_OTHER_TOOL = 'Read the array with the program that wrote it, or with zarr.open_array.'


def zarray_of(array: StoredArray) -> dict[str, Any]:
    """The contents of an array's ``.zarray`` (zarr v2 storage specification)."""
    return {
        'chunks': list(array.metadata['chunks']),
        'compressor': array.metadata['compressor'],
        'dimension_separator': '.',
        'dtype': zarr_typestr(array.dtype),
        'fill_value': None,
        'filters': None,
        'order': 'C',
        'shape': list(array.shape),
        'zarr_format': 2,
    }


def zarray_bytes(array: StoredArray) -> bytes:
    """The ``.zarray`` of an array."""
    return json.dumps(zarray_of(array), separators=(',', ':'), sort_keys=True).encode()


def rebuilt_zarray(array: StoredArray) -> bytes | None:
    """The ``.zarray`` of an array as its save wrote it, from the manifest alone; None if another program may have written it."""
    metadata = array.metadata
    standard = array.layout.has_chunk_files and (separator_of(metadata), metadata.get('order', 'C')) == ('.', 'C')
    return zarray_bytes(array) if standard and {'chunks', 'compressor'} <= set(metadata) else None


@dataclasses.dataclass(frozen=True)
class OtherZarray:
    """A ``.zarray`` that TensorStore refuses, although it describes the array.

    Attributes:
      metadata: complete, with the name of the dtype that TensorStore has.
      codecs: of numcodecs, in the order of decoding; None for chunks that TensorStore reads by the metadata.
    """

    metadata: Mapping[str, Any]
    codecs: tuple[Mapping[str, Any], ...] | None

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype of the decoded bytes, with their order."""
        typestr = str(self.metadata['dtype'])
        dtype = dtype_from_typestr(typestr)
        if dtype is None:
            raise ValueError(typestr)
        return dtype.newbyteorder('>') if typestr[0] == '>' else dtype


def other_zarray(data: bytes, array: StoredArray, where: str) -> OtherZarray | None:
    """The metadata of an array whose ``.zarray`` TensorStore refuses; None if the file itself is damaged.

    An opaque dtype ('<V2', as zarr-python names what it does not know) is that of the manifest, if the sizes agree.

    Raises:
      CorruptCheckpointError: it contradicts the shape in the manifest.
      UnsupportedFormatError: no reader here knows the dtype or a codec, or the manifest has another dtype.
    """
    try:
        fields = json.loads(data)
        shape, chunks = tuple(fields['shape']), tuple(fields['chunks'])
        typestr, codecs = fields['dtype'], [*(fields.get('filters') or ()), fields.get('compressor')]
        chosen = [codec for codec in codecs if codec is not None]
        unknown = [codec.get('id') for codec in chosen if not is_in_numcodecs(codec)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if fields.get('zarr_format') != 2:
        return None
    if shape != array.shape or len(chunks) != len(shape) or not all(type(size) is int and size > 0 for size in chunks):
        raise CorruptCheckpointError(
            f'{where}: the manifest has shape {array.shape}, and .zarray shape {shape!r:.80} in chunks of {chunks!r:.80}.'
        )
    opaque = f'V{array.dtype.itemsize}'
    dtype = dtype_from_typestr(typestr) if isinstance(typestr, str) else None
    if dtype is None and isinstance(typestr, str) and typestr[1:] == opaque:
        dtype = array.dtype
    name = typestr if str(typestr).startswith('>') else zarr_typestr(array.dtype)
    if dtype != array.dtype:
        raise UnsupportedFormatError(
            f'{where}: .zarray has the dtype {typestr!r:.80}, and the manifest {name_of(array.dtype)}. {_OTHER_TOOL}'
        )
    if unknown or fields.get('order', 'C') not in ('C', 'F'):
        found = f'the codec {unknown[0]!r:.40}' if unknown else f'the order {fields["order"]!r:.40}'
        raise UnsupportedFormatError(f'{where}: .zarray has {found}, which is not read here. {_OTHER_TOOL}')
    defaults = {'order': 'C', 'dimension_separator': '.'}
    fill_value = fields.get('fill_value')
    if isinstance(fill_value, str) and fields['dtype'] != name:
        # By the specification, that of an opaque dtype is its bytes.
        fill_value = np.frombuffer(base64.b64decode(fill_value), array.dtype)[0].astype(np.float32).item()
    metadata = {**defaults, **fields, 'dtype': name, 'filters': None, 'fill_value': fill_value}
    refused = bool(fields.get('filters')) or any(codec.get('id') not in _IN_TENSORSTORE for codec in chosen)
    refused = refused or any('checksum' in codec for codec in chosen)
    return OtherZarray(metadata, tuple(reversed(chosen)) if refused else None)

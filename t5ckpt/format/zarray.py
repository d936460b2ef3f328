"""The ``.zarray`` file of an array: its metadata by the zarr v2 storage specification."""

from __future__ import annotations

import json
from typing import Any

from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import separator_of
from t5ckpt.format.dtypes import zarr_typestr

ZARRAY = '.zarray'


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

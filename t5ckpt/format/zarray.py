"""The ``.zarray`` file of an array: its metadata by the zarr v2 storage specification."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from t5ckpt.format.array_spec import StoredArray, is_list_of_sizes, layout_of
from t5ckpt.format.codecs import is_in_numcodecs
from t5ckpt.format.decoding import decoding
from t5ckpt.format.dtypes import TYPESTRS, name_of, zarr_typestr

ZARRAY = '.zarray'
_KNOWN = {'order': ('C', 'F'), 'dimension_separator': ('.', '/')}
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


@dataclasses.dataclass(frozen=True)
class OtherZarray:
    """A ``.zarray`` that TensorStore refuses, although it describes the array.

    Attributes:
      metadata: with all members that chunks are read by.
      value_dtype: the dtype of the decoded bytes, with their order.
      codecs: of numcodecs, in the order of decoding.
    """

    metadata: Mapping[str, Any]
    value_dtype: np.dtype
    codecs: Sequence[Mapping[str, Any]]


def other_zarray(data: bytes, array: StoredArray, where: str) -> OtherZarray | None:
    """The metadata of an array whose ``.zarray`` TensorStore refuses; None if the file itself is damaged.

    An opaque dtype ('<V2', as zarr-python names what it does not know) is that of the manifest, if the sizes agree.

    Raises:
      CorruptCheckpointError: it contradicts the shape in the manifest.
      UnsupportedFormatError: no reader here knows the dtype or a codec, or the manifest has another dtype.
    """
    try:
        fields: dict[str, Any] = {'order': 'C', 'dimension_separator': '.', 'fill_value': None, **json.loads(data)}
        shape, chunks, typestr = tuple(fields['shape']), tuple(fields['chunks']), str(fields['dtype'])
        filters, compressor = fields.get('filters') or (), fields.get('compressor')
        codecs = [*filters, *([] if compressor is None else [compressor])]
        refused = [('codec', codec.get('id')) for codec in codecs if not is_in_numcodecs(codec)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if fields.get('zarr_format') != 2:
        return None
    if shape != array.shape or len(chunks) != len(shape) or not is_list_of_sizes(chunks) or 0 in chunks:
        raise CorruptCheckpointError(
            f'{where}: the manifest has shape {array.shape}, and .zarray shape {shape!r:.80} in chunks of {chunks!r:.80}.'
        )
    is_opaque = typestr[1:] == f'V{array.disk_dtype.itemsize}'
    if not is_opaque and TYPESTRS.get(typestr) != array.disk_dtype:
        raise UnsupportedFormatError(
            f'{where}: .zarray has the dtype {typestr!r:.80}, and the manifest {name_of(array.disk_dtype)}. {_OTHER_TOOL}'
        )
    refused += [(key, fields[key]) for key, known in _KNOWN.items() if fields[key] not in known]
    if refused:
        key, value = refused[0]
        raise UnsupportedFormatError(
            f'{where}: .zarray has the {key} {value!r:.40}, which is not read here. {_OTHER_TOOL}'
        )
    if is_opaque and isinstance(fields['fill_value'], str):
        # By the specification, that of an opaque dtype is its bytes.
        with decoding(f'{where}: the fill value in .zarray'):
            (value,) = np.frombuffer(base64.b64decode(fields['fill_value']), array.disk_dtype)
        fields['fill_value'] = value.astype(np.float32).item()
    order = '>' if typestr.startswith('>') else '='
    return OtherZarray(fields, array.disk_dtype.newbyteorder(order), codecs[::-1])

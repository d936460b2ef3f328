"""Parses the header of a safetensors file (github.com/huggingface/safetensors, "Format").

8 bytes   n, the header's length, little endian
n bytes   JSON: {"__metadata__": {text: text}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...},
padded with spaces to a multiple of 8
the rest  the tensors, C order, little endian, without gaps; offsets count from here
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence

from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.array_spec import StoredArray, is_list_of_sizes
from t5ckpt.format.decoding import decoding
from t5ckpt.format.dtypes import DTYPES
from t5ckpt.format.manifest import refuse_pointer
from t5ckpt.tree.leaf_table import MAX_RANK, unique

WHOLE_NAMES = ('model.safetensors', 'model.safetensors.index.json')
"""The files that make a directory a checkpoint in this format, in transformers' order of precedence."""
INDEX = re.compile(r'.*\.safetensors\.index(\.\w+)?\.json')
"""An index of several files; transformers and diffusers put the name of a variant, such as fp16, into that of its index."""
FLAX_WHOLE, FLAX_INDEX = 'flax_model.msgpack', 'flax_model.msgpack.index.json'
"""The same for a model that transformers saved from Flax."""
SHARD = re.compile(r'.+-\d{5}-of-(\d{5})\.(?:safetensors|msgpack)')
"""One of several files of a model, as transformers names them in all its formats."""

DTYPE_NAMES = {
    'bool': 'BOOL',
    'int8': 'I8',
    'int16': 'I16',
    'int32': 'I32',
    'int64': 'I64',
    'uint8': 'U8',
    'uint16': 'U16',
    'uint32': 'U32',
    'uint64': 'U64',
    'float16': 'F16',
    'bfloat16': 'BF16',
    'float32': 'F32',
    'float64': 'F64',
    'complex64': 'C64',
    'float8_e4m3fn': 'F8_E4M3',
    'float8_e4m3fnuz': 'F8_E4M3FNUZ',
    'float8_e5m2': 'F8_E5M2',
    'float8_e5m2fnuz': 'F8_E5M2FNUZ',
    'float8_e8m0fnu': 'F8_E8M0',
}
"""The format's names of dtypes whose elements have whole bytes in NumPy."""
_DTYPES = {text: DTYPES[name] for name, text in DTYPE_NAMES.items()}
METADATA = '__metadata__'
MAX_HEADER = 100_000_000
"""The ``safetensors`` package refuses longer headers."""


@dataclasses.dataclass(frozen=True)
class Header:
    """The contents of a header.

    Attributes:
      arrays: the tensors with their names, in the order of their bytes.
      size: of the file, in bytes.
      unread: the dtypes, by name, of the tensors whose dtype NumPy lacks.
      metadata: of the file.
    """

    arrays: Sequence[tuple[str, StoredArray]]
    size: int
    unread: Mapping[str, str]
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


def is_tensor_file(name: str) -> bool:
    """Whether a file is a safetensors file, or an index of several, by its name."""
    return name.endswith('.safetensors') or INDEX.fullmatch(name) is not None


def header_bytes(first: bytes, size: int, where: str) -> int:
    """The length of the header in bytes, from the first 8 bytes of a file of ``size`` bytes.

    Raises:
      CorruptCheckpointError: the file is truncated, or is not a safetensors file.
    """
    if size < 8 or len(first) < 8:
        raise CorruptCheckpointError(f'{where} has {size} bytes, too few for a safetensors file. Copy it again.')
    length = int.from_bytes(first[:8], 'little')
    if length > min(MAX_HEADER, size - 8):
        refuse_pointer(first, where)
        raise CorruptCheckpointError(
            f'{where}: a header of {length} bytes in a file of {size} bytes: the file is truncated, or not a safetensors file. '
            'Copy it again.'
        )
    return length


def parse_header(text: bytes, size: int | None, file: str, where: str) -> Header:
    """Parses the header of a file and checks its offsets against the size of the file, if that is known.

    Raises:
      CorruptCheckpointError: the header is malformed, or does not match the file.
    """
    data, end = 8 + len(text), 0
    arrays: list[tuple[str, StoredArray]] = []
    unread: dict[str, str] = {}
    with decoding(f'{where}: the header', 'Copy the file again.'):
        header = json.loads(text, object_pairs_hook=unique)
        # The package takes null for absent.
        metadata = {str(key): str(value) for key, value in (header.pop(METADATA, None) or {}).items()}
        for name, entry in sorted(header.items(), key=lambda item: item[1]['data_offsets']):
            shape, text_of_dtype, (start, stop) = tuple(entry['shape']), entry['dtype'], entry['data_offsets']
            dtype = _DTYPES.get(text_of_dtype)
            if (
                not isinstance(text_of_dtype, str)
                or len(shape) > MAX_RANK
                or not is_list_of_sizes((*shape, start, stop))
                or not start == end <= stop
                or (dtype is not None and math.prod(shape) * dtype.itemsize != stop - start)
            ):
                raise ValueError(
                    f'{name:.80}: its shape is {shape!r:.80} of {text_of_dtype!r:.40}, its offsets are {start!r:.40} to '
                    f'{stop!r:.40}, and the tensor before it ends at {end:,}'
                )
            end = stop
            if dtype is None:
                unread[name] = text_of_dtype
            else:
                place = {'offset': data + start, 'file_bytes': size}
                arrays.append((name, StoredArray(file, shape, dtype, dtype, place, 'bytes')))
    if size not in (None, data + end):
        raise CorruptCheckpointError(
            f'{where}: the tensors end at byte {data + end:,} of {size:,}. Copy the file again.'
        )
    return Header(arrays, data + end, unread, metadata)

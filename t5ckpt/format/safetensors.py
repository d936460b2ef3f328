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
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.dtypes import dtype_from_name
from t5ckpt.format.manifest import refuse_pointer
from t5ckpt.tree.leaf_table import unique

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
_DTYPES = {text: dtype_from_name(name) for name, text in DTYPE_NAMES.items()}
_BITS = {'F4': 4, 'F6_E2M3': 6, 'F6_E3M2': 6} | {text: 8 * dtype.itemsize for text, dtype in _DTYPES.items()}
METADATA = '__metadata__'
MAX_HEADER = 100_000_000
"""The ``safetensors`` package refuses longer headers."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file; ``offset`` is in bytes from the beginning of the file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


@dataclasses.dataclass(frozen=True)
class Header:
    """The contents of a header; ``unread`` has the dtypes, by name, of the tensors whose dtype NumPy lacks."""

    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    unread: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


def is_tensor_file(name: str) -> bool:
    """Whether a file is a safetensors file, an index of several, or an npz file, by its name."""
    return name.endswith('.safetensors') or INDEX.fullmatch(name) is not None or is_npz(name)


def is_npz(name: str) -> bool:
    """Whether a file is an npz file, by its name."""
    return name.endswith('.npz')


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


def data_bytes(text: bytes) -> int:
    """The end of the last tensor, in bytes after the header; 0 for a header that :func:`parse_header` refuses."""
    try:
        header = json.loads(text)
        return max((int(entry['data_offsets'][1]) for name, entry in header.items() if name != METADATA), default=0)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError, OverflowError):
        return 0


def parse_header(text: bytes, size: int, where: str) -> Header:
    """Parses a header and checks its offsets against the size of the file.

    Raises:
      CorruptCheckpointError: the header is malformed, or does not match the file.
    """
    try:
        header = json.loads(text, object_pairs_hook=unique)
        # The package takes null for absent.
        metadata = {str(key): str(value) for key, value in (header.pop(METADATA, None) or {}).items()}
        tensors, unread = _tensors(header, 8 + len(text), size)
        return Header(tensors, metadata, unread)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, OverflowError) as error:
        raise CorruptCheckpointError(
            f'{where}: the header does not decode ({error!s:.300}). Copy the file again.'
        ) from error


def _tensors(header: dict[str, Any], data: int, size: int) -> tuple[tuple[Tensor, ...], dict[str, str]]:
    """The tensors, and the dtypes of those whose dtype NumPy lacks."""
    tensors: list[Tensor] = []
    unread: dict[str, str] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        text = entry['dtype']
        if not isinstance(text, str):
            raise TypeError(f'{name:.80} has the dtype {text!r:.40}')
        shape = tuple(_size(value, name) for value in entry['shape'])
        start, end = (_size(value, name) for value in entry['data_offsets'])
        needed = (math.prod(shape) * _BITS[text] + 7) // 8 if text in _BITS else end - start
        if len(shape) > 32 or needed != end - start or end < start or data + end > size:
            raise ValueError(
                f'{name:.80}: {len(shape)} dimensions of {text:.40} need {needed:,} bytes, but its offsets are {start:,} to '
                f'{end:,} of {size - data:,}'
            )
        spans.append((start, end, name))
        if text in _DTYPES:
            tensors.append(Tensor(name, _DTYPES[text], shape, data + start))
        else:
            unread[name] = text
    _check_no_gaps(sorted(spans), size - data)
    return tuple(tensors), unread


def _check_no_gaps(spans: list[tuple[int, int, str]], size: int) -> None:
    """Checks that each tensor begins where the previous one ends, and that the last one ends at ``size``."""
    previous_end = 0
    for start, end, name in spans:
        if start != previous_end:
            raise ValueError(f'{name:.80} begins at byte {start:,}, but the tensor before it ends at {previous_end:,}')
        previous_end = end
    if previous_end != size:
        raise ValueError(f'the tensors end at byte {previous_end:,} of {size:,}')


def _size(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise ValueError(f'{name:.80}: {value!r:.40} is not a size, expected an integer from 0 to 2**62')
    return value

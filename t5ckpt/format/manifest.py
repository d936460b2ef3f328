"""Decodes and encodes the msgpack manifest, in all versions. No files are read or written here.

Format (flax/serialization.py, t5x/checkpoints.py): one msgpack map ``{'version': 3, 'optimizer': <nested maps>}``, in which
t5ckpt puts before ``optimizer`` the facts that T5X has no place for, as the text ``t5ckpt`` (``format/facts.py``). T5X ignores
it.
A leaf is an array or scalar in an extension type, nil, or a map that holds a TensorStore spec. Extension 1 is an
array, extension 3 a NumPy scalar, both packed as ``(shape, dtype name, C-order bytes)``; extension 2 is a complex number,
packed as ``(real, imag)``. Arrays above 2^30 bytes are split into ``{'__msgpack_chunked_array__': True, ...}``.

Version 2 stores bfloat16 as uint16 arrays: ``array_spec.checkpoint_leaves`` finds them, and ``dtypes.from_stored`` views them as
bfloat16. Without a version, the map is the state itself (Flax).

A manifest of unknown origin is checked: an array's byte count must match its shape, dtype names come from a fixed list, and a
spec is parsed against an allow-list (``format/array_spec.py``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgpack
import numpy as np

from t5ckpt.core.leaf_path import Path
from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from t5ckpt.format.array_spec import is_list_of_sizes, is_spec
from t5ckpt.format.decoding import decoding
from t5ckpt.format.dtypes import DTYPES, name_of
from t5ckpt.tree.leaf_table import MAX_DEPTH, MAX_RANK, Empty, LeafTable, unique

VERSION = 3
_EXT_ARRAY, _EXT_COMPLEX, _EXT_SCALAR = 1, 2, 3
_CHUNKED = '__msgpack_chunked_array__'
_FACTS_BEGIN = '{\n "checksum": "'
# A map and its first key.
_STATE = re.compile(rb'(?s)(?:[\x81-\x8f]|\xde..|\xdf.{4})[\xa0-\xbf\xd9-\xdb]')
# A manifest that begins with its version, and then the header of the facts: the length of their text follows its type.
_HEAD = re.compile(
    rb'(?s)[\x81-\x8f]\xa7version[\x00-\x7f]'
    rb'(?:\xa6t5ckpt[\xd9-\xdb]?(?P<length>(?<=\xd9).|(?<=\xda)..|(?<=\xdb).{4}|))?'
)
# Up to the version.
_HEAD_BYTES = 10
_TENSORFLOW = (b'model_checkpoint_path', b'all_model_checkpoint_paths')
# The decoder allocates a list of the length in its header before it decodes the first item, at each level of nesting.
_MAX_LIST = 2**14


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A decoded manifest.

    Attributes:
      version: 3, 2, 1, or 0 if the file has none.
      leaves: arrays, numpy scalars, None, text, specs, :class:`StoredArray`, or :class:`Empty`, by path.
    """

    version: int
    leaves: LeafTable


# --- bytes -> tree ---------------------------------------------------------------------------------------------------


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Decodes the bytes of a ``checkpoint`` file.

    Args:
      data: the file's bytes.
      where: its path, for messages.

    Returns:
      The manifest.

    Raises:
      UnsupportedFormatError: a TensorFlow state file, a newer version, or msgpack of another structure.
      CorruptCheckpointError: truncated, or not msgpack.
    """
    if is_tensorflow_state(data):
        raise UnsupportedFormatError(
            f'{where} is the state file of a TensorFlow checkpoint, not a T5X manifest. '
            'Convert that checkpoint: t5ckpt convert tf, or Checkpointer.convert_from_tf_checkpoint. In a run of CLU, pass '
            'one of its files .flax instead.'
        )
    contents = unpack(data, where, _decode_ext)
    if contents == {}:
        raise CorruptCheckpointError(f'{where} is an empty map, which no program saves. Restore an older step.')
    if not isinstance(contents, dict):
        raise UnsupportedFormatError(
            f'{where} is msgpack of {type(contents).__name__}, but a T5X manifest is a map with "version" and "optimizer".'
        )
    version = contents.get('version') if 'optimizer' in contents else 0
    if type(version) is not int or version == 0:
        return Manifest(0, _leaves(contents, where))
    if not 0 < version <= VERSION:
        raise UnsupportedFormatError(
            f'{where} has manifest version {version}; this version of t5ckpt reads versions up to {VERSION}. Update t5ckpt.'
        )
    state = contents['optimizer']
    if any(
        isinstance(value, str) and value.startswith(_FACTS_BEGIN) and name != 't5ckpt'
        for name, value in contents.items()
    ):
        raise CorruptCheckpointError(f'{where} has facts of t5ckpt under a damaged name. {CURE_OF_DAMAGE}')
    if not isinstance(state, dict):
        raise UnsupportedFormatError(f'{where}: "optimizer" is {type(state).__name__}, expected a map of the state.')
    return Manifest(version, _leaves(state, where))


def unpack(
    data: bytes,
    where: str,
    ext_hook: Callable[[int, bytes], Any],
    map_hook: Callable[[list[tuple[Any, Any]]], Any] = unique,
) -> Any:
    """The contents of a manifest, as msgpack.

    Args:
      data: the file's bytes.
      where: its path, for messages.
      ext_hook: makes the value of an extension.
      map_hook: makes the value of a map, from its items.

    Raises:
      FormatError: as :func:`decode_manifest`.
    """
    cure = f'It has {len(data)} bytes: it is truncated, or not a T5X manifest, which is msgpack. {CURE_OF_DAMAGE}'
    with decoding(where, cure):
        return msgpack.unpackb(
            data,
            object_pairs_hook=map_hook,
            ext_hook=ext_hook,
            strict_map_key=False,
            max_array_len=min(_MAX_LIST, len(data)),
        )


def begins_state(head: bytes) -> bool:
    """Whether a file begins with a msgpack map with text keys, as a state of Flax."""
    return _STATE.match(head) is not None


def is_tensorflow_state(data: bytes) -> bool:
    """Whether a file called ``checkpoint`` that begins with ``data`` is the state file of a TensorFlow checkpoint."""
    return data.startswith(_TENSORFLOW)


def is_whole(data: bytes) -> bool:
    """Whether bytes are exactly one complete msgpack map with text keys that is not empty; nothing is decoded."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data) + 1)
    unpacker.feed(data)
    try:
        unpacker.skip()
    except (ValueError, msgpack.UnpackException, RecursionError):
        return False
    return begins_state(data) and unpacker.tell() == len(data)


# github.com/git-lfs/git-lfs/blob/main/docs/spec.md, "The Pointer".
_GIT_LFS = b'version https://git-lfs'


def refuse_pointer(data: bytes, where: str) -> None:
    """Raises UnsupportedFormatError for the text that Git LFS puts in the place of a file, by its first 8 bytes or more."""
    head = data[: len(_GIT_LFS)]
    if len(head) >= 8 and _GIT_LFS.startswith(head):
        raise UnsupportedFormatError(f'{where} is a pointer of Git LFS. Fetch the file itself with git lfs pull.')


def version_of(head: bytes) -> int | None:
    """The version with which a manifest begins; None for one of Flax, which sorts the keys, and for other files."""
    return None if _HEAD.match(head) is None else head[_HEAD_BYTES - 1]


def facts_range(head: bytes) -> tuple[int, int] | None:
    """The range of the facts' text in a file, from its first bytes; None if it has none. A damaged file may be shorter."""
    match = _HEAD.match(head)
    if match is None or match['length'] is None:
        return None
    return match.end(), match.end() + int.from_bytes(match['length'], 'big')


def file_with_facts(manifest: bytes, facts: bytes | None) -> bytes:
    """The file with a manifest that begins with its version, as T5X and t5ckpt encode it, and with the facts if there are any."""
    if facts is None:
        return manifest
    if version_of(manifest) is None:
        raise ValueError('the manifest does not begin with its version')
    begin = bytes([manifest[0] + 1]) + manifest[1:_HEAD_BYTES]
    return b''.join((begin, facts_entry(facts), manifest[_HEAD_BYTES:]))


def facts_entry(facts: bytes) -> bytes:
    """The bytes that the facts are in the file."""
    return _packed('t5ckpt') + _packed(facts.decode())


def split_facts(data: bytes) -> tuple[bytes, bytes | None]:
    """The manifest as T5X would have written it, and the facts, or None without facts: undoes :func:`file_with_facts`."""
    found = facts_range(data)
    if found is None:
        return data, None
    return bytes([data[0] - 1]) + data[1:_HEAD_BYTES] + data[found[1] :], data[slice(*found)]


def _leaves(tree: Mapping[Any, Any], where: str, prefix: Path = ()) -> LeafTable:
    """The leaves of a tree: specs as they are, chunked arrays joined, Python numbers as scalars, keys as text."""
    if len(prefix) > MAX_DEPTH:
        raise CorruptCheckpointError(f'{where}: nested more than {MAX_DEPTH} deep, deeper than any model.')
    table: LeafTable = {}
    raw_keys: dict[str, Any] = {}
    for raw_key, value in tree.items():
        key = raw_key.decode('utf-8', 'replace') if isinstance(raw_key, bytes) else str(raw_key)
        path = (*prefix, key)
        first = raw_keys.setdefault(key, raw_key)
        if first is not raw_key:
            raise UnsupportedFormatError(
                f'{where}: {"/".join(path)} occurs twice, with the keys {first!r:.60} and {raw_key!r:.60}, because a '
                'checkpoint holds keys as text. Save it again with another key.'
            )
        # First, because most leaves are arrays and the other tests are slow.
        if isinstance(value, (np.ndarray, np.generic, str, bytes)) or value is None or is_spec(value):
            table[path] = value
        elif isinstance(value, Mapping) and _CHUNKED in value:
            table[path] = _join_chunked(value, f'{where}: leaf {"/".join(path)}')
        elif isinstance(value, (Mapping, list)):
            items = value if isinstance(value, Mapping) else dict(enumerate(value))
            table |= _leaves(items, where, path) or {path: Empty('dict')}
        elif isinstance(value, (bool, int, float, complex)):
            table[path] = np.asarray(value)[()]
        else:
            raise UnsupportedFormatError(
                f'{where}: leaf {"/".join(path)} is {type(value).__name__}, but a manifest holds arrays, scalars and '
                'specs.'
            )
    return table


def _join_chunked(value: Mapping[Any, Any], name: str) -> np.ndarray:
    """Joins an array that Flax split, because msgpack limits lengths to 2^32."""
    with decoding(f'{name}: its array of chunks, which have one dtype and fill its shape,'):
        shape, parts = ([value[field][str(i)] for i in range(len(value[field]))] for field in ('shape', 'chunks'))
        flat = [part.reshape(-1) for part in parts]
        if min(shape, default=0) < 0:
            raise ValueError(f'its shape {shape} has a negative size')
        return np.concatenate(flat, dtype=flat[0].dtype, casting='no').reshape(shape)


def _decode_ext(code: int, data: bytes) -> Any:
    """The value of a msgpack extension; called by the decoder."""
    if code in (_EXT_ARRAY, _EXT_SCALAR):
        array = _decode_array(data)
        return array[()] if code == _EXT_SCALAR else array
    if code == _EXT_COMPLEX:
        return complex(*msgpack.unpackb(data, max_array_len=2))
    raise CorruptCheckpointError(f'unknown msgpack extension type {code}')


def _decode_array(data: bytes) -> np.ndarray:
    shape, name, values = msgpack.unpackb(data, raw=True, max_array_len=MAX_RANK)
    name = str(name, 'ascii', 'replace')
    dtype = DTYPES.get(name)
    if dtype is None:
        raise UnsupportedFormatError(f'an array has the dtype {name!r:.60}, which t5ckpt does not know')
    if not is_list_of_sizes(shape):
        raise CorruptCheckpointError(f'an array has the shape {shape!r:.80}, expected a list of sizes')
    if math.prod(shape) * dtype.itemsize != len(values):
        raise CorruptCheckpointError(
            f'an array of shape {tuple(shape)} and dtype {name} has {len(values)} bytes of data'
        )
    return np.ndarray(shape, dtype, values)


# --- tree -> bytes ---------------------------------------------------------------------------------------------------


def encode_manifest(state: Mapping[str, Any], *, split_bytes: int = 2**30) -> bytes:
    """Encodes a nested state whose leaves are NumPy arrays and scalars in native byte order, None or spec dicts.

    Callers have to leave out Python numbers and empty maps, which real T5X cannot read.
    """
    contents = {'version': VERSION, 'optimizer': state}
    return _packed(contents, functools.partial(_encode_leaf, split_bytes=split_bytes))


def _encode_leaf(value: Any, split_bytes: int) -> Any:
    if isinstance(value, np.ndarray) and value.nbytes > split_bytes:
        # As Flax does, because msgpack limits lengths to 2^32.
        size = max(1, split_bytes // value.itemsize)
        parts = np.split(value.reshape(-1), range(size, value.size, size))
        return {_CHUNKED: True, 'shape': _numbered(value.shape), 'chunks': _numbered(parts)}
    if isinstance(value, (np.ndarray, np.generic)):
        packed = _packed([list(value.shape), name_of(value.dtype), value.tobytes()])
        return msgpack.ExtType(_EXT_SCALAR if isinstance(value, np.generic) else _EXT_ARRAY, packed)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f'a manifest cannot hold {type(value).__name__}')


def _numbered(items: Iterable[Any]) -> dict[str, Any]:
    return {str(number): item for number, item in enumerate(items)}


def _packed(value: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    return msgpack.packb(value, default=default, strict_types=True) or b''

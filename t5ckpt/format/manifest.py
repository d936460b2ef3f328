"""Decodes and encodes the msgpack manifest, in all versions. No files are read or written here.

Format (flax/serialization.py, t5x/checkpoints.py): one msgpack map ``{'version': 3, 'optimizer': <nested maps>}``, in which
t5ckpt puts before ``optimizer`` the facts that T5X has no place for, as the text ``t5ckpt`` (``format/facts.py``). T5X ignores
it.
A leaf is an array or scalar in an extension type, nil, or a map that holds a TensorStore spec. Extension 1 is an
array, extension 3 a NumPy scalar, both packed as ``(shape, dtype name, C-order bytes)``; extension 2 is a complex number,
packed as ``(real, imag)``. Arrays above 2^30 bytes are split into ``{'__msgpack_chunked_array__': True, ...}``.

Version 2 stores bfloat16 as uint16 arrays: ``array_spec.parse_spec`` marks them (``bits_of``), and ``dtypes.from_stored`` views
them as bfloat16. Without a version, the map is the state itself (Flax).

A manifest of unknown origin is checked: an array's byte count must match its shape, dtype names come from a fixed list, and a
spec is parsed against an allow-list (``format/array_spec.py``).

EasyLM's files (checkpoint.py, StreamingCheckpointer) have no map: they are a stream of ``[keys, msgpack bytes of the leaf]``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np

from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import CorruptCheckpointError, FormatError, UnsupportedFormatError
from t5ckpt.format.array_spec import is_spec
from t5ckpt.format.dtypes import dtype_from_name, name_of
from t5ckpt.tree.leaf_table import MAX_DEPTH, MAX_RANK, LeafTable, unflatten, unique

VERSION = 3
_EXT_ARRAY, _EXT_COMPLEX, _EXT_SCALAR = 1, 2, 3
_CHUNKED = '__msgpack_chunked_array__'
_FACTS_KEY = b'\xa6t5ckpt'
FACTS_BEGIN = '{\n "checksum": "'
STREAM_ITEM = b'\x92'
"""The first byte of a list of two, with which each item of a stream of EasyLM begins."""
_TENSORFLOW = (b'model_checkpoint_path', b'all_model_checkpoint_paths')
# Up to this size, packing an array's header takes longer than copying its values.
_SMALL_BYTES = 2**16
# The decoder allocates a list of the length in its header before it decodes the first item, at each level of nesting.
_MAX_LIST = 2**14
_DAMAGED = (
    *(ValueError, TypeError, KeyError, RecursionError, UnicodeDecodeError, msgpack.UnpackException),
    *(MemoryError, OverflowError),
)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A decoded manifest.

    Attributes:
      version: 3, 2, 1, or 0 if the file has none.
      state: nested dicts; leaves are arrays, numpy scalars, None, specs, :class:`StoredArray`, or an empty dict.
    """

    version: int
    state: dict[str, Any]


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
    if not data:
        raise CorruptCheckpointError(f'{where} is empty. {CURE_OF_DAMAGE}')
    return manifest_of(unpack(data, where), where)


def unpack(data: bytes, where: str, ext_hook: Callable[[int, bytes], Any] | None = None) -> Any:
    """The contents of a manifest, as msgpack; ``ext_hook`` makes the value of an extension, by default as a leaf.

    Raises:
      FormatError: as :func:`decode_manifest`.
    """
    try:
        return _decode_stream(data) if data.startswith(STREAM_ITEM) else _unpack(data, ext_hook or decode_ext)
    except FormatError as error:
        raise type(error)(f'{where}: {error}') from error
    except _DAMAGED as error:
        raise CorruptCheckpointError(
            f'{where} does not decode as msgpack ({_brief(error)}; {len(data)} bytes): it is truncated, or not a T5X '
            f'manifest. {CURE_OF_DAMAGE}'
        ) from error


def _unpack(data: bytes, ext_hook: Callable[[int, bytes], Any]) -> Any:
    return msgpack.unpackb(
        data,
        object_pairs_hook=unique,
        ext_hook=ext_hook,
        raw=False,
        strict_map_key=False,
        max_array_len=min(_MAX_LIST, len(data)),
    )


def _decode_stream(data: bytes) -> Any:
    unpacker = msgpack.Unpacker(max_buffer_size=len(data) + 1, max_array_len=min(_MAX_LIST, len(data)))
    unpacker.feed(data)
    table: LeafTable = {}
    end = 0
    for item in unpacker:
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[1], bytes):
            raise ValueError('an item of the stream is not (keys, bytes)')
        path = stream_path(item[0], table)
        table[path] = _unpack(item[1], decode_ext)
        end = unpacker.tell()
    if end != len(data):
        raise ValueError(f'the last item of the stream is truncated at byte {len(data):,}')
    return unflatten(table)


def stream_path(keys: Any, table: LeafTable) -> Path:
    """The path of an item of a stream; raises ValueError for keys that are none, or that ``table`` has."""
    if not isinstance(keys, list) or not keys or not all(isinstance(key, (str, int)) for key in keys):
        raise ValueError(f'the keys {keys!r:.80} in the stream are no path')
    path = tuple(map(str, keys))
    if path in table:
        raise ValueError(f'{leaf_name(path)} is twice in the stream')
    return path


def is_whole(data: bytes) -> bool:
    """Whether bytes are exactly one complete msgpack map; nothing is decoded."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data) + 1)
    unpacker.feed(data)
    try:
        is_map = len(data) > 1 and (0x81 <= data[0] <= 0x8F or data[0] in (0xDE, 0xDF))
        unpacker.skip()
        return is_map and unpacker.tell() == len(data)
    except (ValueError, msgpack.UnpackException, RecursionError):
        return False


def begins_state(head: bytes) -> bool:
    """Whether a file begins with a msgpack map with text keys, as a state of Flax, or with an item of EasyLM's stream."""
    # Files of one or two bytes do not count. An item of a stream begins with the list of its keys.
    of_stream = head[:1] == STREAM_ITEM and 0x91 <= head[1] <= 0x9F if len(head) > 2 else False
    before_map = {0xDE: 3, 0xDF: 5}.get(head[0], 1 if 0x81 <= head[0] <= 0x8F else None) if len(head) > 2 else None
    before_key = 2 if of_stream else before_map
    key = None if before_key is None else head[before_key : before_key + 1]
    return bool(key) and (0xA0 <= key[0] <= 0xBF or 0xD9 <= key[0] <= 0xDB)


def is_tensorflow_state(data: bytes) -> bool:
    """Whether a file called ``checkpoint`` that begins with ``data`` is the state file of a TensorFlow checkpoint."""
    return data.startswith(_TENSORFLOW)


def is_of_others(data: bytes) -> bool:
    """Whether a file called ``checkpoint`` belongs to another program: TensorFlow's state file, or msgpack other than a map.

    Files of one or two bytes do not count.
    """
    if is_tensorflow_state(data):
        return True
    if len(data) <= 2 or 0x80 <= data[0] <= 0x8F or data[0] in (0xDE, 0xDF):
        return False
    unpacker = msgpack.Unpacker(max_buffer_size=len(data) + 1)
    unpacker.feed(data)
    try:
        unpacker.skip()
    except (ValueError, msgpack.UnpackException, RecursionError):
        return False
    return unpacker.tell() == len(data)


# github.com/git-lfs/git-lfs/blob/main/docs/spec.md, "The Pointer".
_GIT_LFS = b'version https://git-lfs'


def refuse_pointer(data: bytes, where: str) -> None:
    """Raises UnsupportedFormatError for the text that Git LFS puts in the place of a file, by its first 8 bytes or more."""
    head = data[: len(_GIT_LFS)]
    if len(head) >= 8 and _GIT_LFS.startswith(head):
        raise UnsupportedFormatError(f'{where} is a pointer of Git LFS. Fetch the file itself with git lfs pull.')


def facts_range(head: bytes) -> tuple[int, int] | None:
    """The range of the facts' text in a file, from its first 64 bytes; None if it has none.

    A damaged file may be shorter.
    """
    entry = _version_entry(head)
    if entry is None or not head.startswith(_FACTS_KEY, entry[2]):
        return None
    begin = entry[2] + len(_FACTS_KEY)
    num_digits = {0xD9: 1, 0xDA: 2, 0xDB: 4}.get(head[begin], 0) if begin < len(head) else 0
    begin += 1 + num_digits
    return begin, begin + int.from_bytes(head[begin - num_digits : begin], 'big')


def _version_entry(head: bytes) -> tuple[int, int, int] | None:
    """The length of a map that begins with the version, and where this entry begins and ends."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(head[:64])
    try:
        length, begin = unpacker.read_map_header(), unpacker.tell()
        return (length, begin, unpacker.tell()) if [unpacker.unpack(), unpacker.skip()][0] == 'version' else None
    except (ValueError, msgpack.UnpackException, RecursionError):
        return None


def takes_facts(manifest: bytes) -> bool:
    """Whether a manifest begins with its version; Flax's files without a version are the state itself."""
    return _version_entry(manifest) is not None


def file_with_facts(manifest: bytes, facts: bytes | None) -> bytes:
    """The file with a manifest that begins with its version, as T5X and t5ckpt encode it, and with the facts if there are any."""
    if facts is None:
        return manifest
    entry = _version_entry(manifest)
    if entry is None:
        raise ValueError('the manifest does not begin with its version')
    length, begin, end = entry
    return b''.join((_map_header(length + 1), manifest[begin:end], facts_entry(facts), manifest[end:]))


def facts_entry(facts: bytes) -> bytes:
    """The bytes that the facts are in the file."""
    return _FACTS_KEY + _packed(facts.decode())


def split_facts(data: bytes) -> tuple[bytes, bytes | None]:
    """The manifest as T5X would have written it, and the facts, or None without facts: undoes :func:`file_with_facts`."""
    entry, found = _version_entry(data), facts_range(data[:64])
    if entry is None or found is None:
        return data, None
    length, begin, end = entry
    return _map_header(length - 1) + data[begin:end] + data[found[1] :], data[slice(*found)]


def _map_header(length: int) -> bytes:
    return msgpack.Packer().pack_map_header(length) or b''


def version_of(data: bytes) -> int | None:
    """The version of a manifest, from all or the first of its bytes; None if these do not contain it."""
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(data)
    fields: dict[Any, Any] = {}
    try:
        for _ in range(unpacker.read_map_header()):
            key = unpacker.unpack()
            fields[key] = unpacker.unpack() if key == 'version' else None
            if not fields.keys().isdisjoint({'optimizer', 't5ckpt'}) and isinstance(fields.get('version'), int):
                return fields['version']
            if key != 'version':
                unpacker.skip()
    except (*_DAMAGED, CorruptCheckpointError):
        pass
    return None


def manifest_of(contents: Any, where: str) -> Manifest:
    """Parses decoded msgpack as a manifest.

    Raises:
      FormatError: it is not one.
    """
    if contents == {}:
        raise CorruptCheckpointError(f'{where} is an empty map, which no program saves. Restore an older step.')
    if not isinstance(contents, dict):
        raise UnsupportedFormatError(
            f'{where} is msgpack of {type(contents).__name__}, but a T5X manifest is a map with "version" and "optimizer".'
        )
    version = contents.get('version', 0)
    if 'optimizer' not in contents or isinstance(version, bool) or not isinstance(version, int):
        version = 0
    if version == 0:
        return Manifest(0, _normalise(contents, where, ()))
    if version > VERSION or version < 0:
        raise UnsupportedFormatError(
            f'{where} has manifest version {version}; this version of t5ckpt reads versions up to {VERSION}. Update t5ckpt.'
        )
    state = contents['optimizer']
    if any(
        isinstance(value, str) and value.startswith(FACTS_BEGIN) and name != 't5ckpt'
        for name, value in contents.items()
    ):
        raise CorruptCheckpointError(f'{where} has facts of t5ckpt under a damaged name. {CURE_OF_DAMAGE}')
    if not isinstance(state, dict):
        raise UnsupportedFormatError(f'{where}: "optimizer" is {type(state).__name__}, expected a map of the state.')
    return Manifest(version, _normalise(state, where, ()))


def _normalise(tree: Mapping[Any, Any], where: str, path: Path) -> dict[str, Any]:
    """Copies a tree with string keys, specs as they are and chunked arrays joined."""
    if len(path) > MAX_DEPTH:
        raise CorruptCheckpointError(f'{where}: nested more than {MAX_DEPTH} deep, deeper than any model.')
    result: dict[str, Any] = {}
    for raw_key, value in tree.items():
        key = _text_of(raw_key)
        if key in result:
            first = next(other for other in tree if _text_of(other) == key)
            raise UnsupportedFormatError(
                f'{where}: {"/".join((*path, key))} occurs twice, with the keys {first!r:.60} and {raw_key!r:.60}, because a '
                'checkpoint holds keys as text. Save it again with another key.'
            )
        if isinstance(value, np.ndarray):
            # First, because most leaves are arrays and the other tests are slow.
            result[key] = value
        elif is_spec(value):
            result[key] = dict(value)
        elif isinstance(value, Mapping) and _CHUNKED in value:
            result[key] = _join_chunked(value, where, (*path, key))
        elif isinstance(value, Mapping):
            result[key] = _normalise(value, where, (*path, key))
        elif isinstance(value, (list, tuple)):
            result[key] = _normalise({str(i): item for i, item in enumerate(value)}, where, (*path, key))
        else:
            result[key] = _scalar(value, where, (*path, key))
    return result


def _text_of(key: Any) -> str:
    return key.decode('utf-8', 'replace') if isinstance(key, bytes) else str(key)


def _scalar(value: Any, where: str, path: Path) -> Any:
    """A leaf as a NumPy value; strings and bytes, which Flax files of other programs contain, stay as they are."""
    if value is None or isinstance(value, (np.ndarray, np.generic, str, bytes)):
        return value
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        return np.asarray(value)[()]
    if isinstance(value, float):
        return np.float64(value)
    if isinstance(value, complex):
        return np.complex128(value)
    raise UnsupportedFormatError(
        f'{where}: leaf {"/".join(path)} is {type(value).__name__}, but a manifest holds arrays, scalars and specs.'
    )


def _join_chunked(value: Mapping[Any, Any], where: str, path: Path) -> np.ndarray:
    """Joins an array that Flax split, because msgpack limits lengths to 2^32."""
    name = '/'.join(path)
    try:
        shape = tuple(value['shape'][str(i)] for i in range(len(value['shape'])))
        parts = [value['chunks'][str(i)] for i in range(len(value['chunks']))]
    except (KeyError, TypeError) as error:
        raise CorruptCheckpointError(f'{where}: leaf {name}: bad chunked array ({_brief(error)}).') from error
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    sizes = [int(size) for size in shape if isinstance(size, (int, np.integer)) and size >= 0]
    if not arrays or len(arrays) != len(parts) or len({array.dtype for array in arrays}) != 1:
        raise CorruptCheckpointError(f'{where}: leaf {name}: the chunks of its array are not arrays of one dtype.')
    if len(sizes) != len(shape) or len(sizes) > MAX_RANK or math.prod(sizes) != sum(array.size for array in arrays):
        raise CorruptCheckpointError(f'{where}: leaf {name}: its chunks do not fill an array of shape {shape!r:.80}.')
    return np.concatenate([array.reshape(-1) for array in arrays]).reshape(sizes)


def decode_ext(code: int, data: bytes) -> Any:
    """The value of a msgpack extension; called by the decoder."""
    if code in (_EXT_ARRAY, _EXT_SCALAR):
        array = _decode_array(data)
        return array[()] if code == _EXT_SCALAR else array
    if code == _EXT_COMPLEX:
        real, imag = msgpack.unpackb(data, max_array_len=2)
        return complex(real, imag)
    raise CorruptCheckpointError(f'unknown msgpack extension type {code}')


def _decode_array(data: bytes) -> np.ndarray:
    shape, name, raw = msgpack.unpackb(data, raw=True, use_list=False, max_array_len=MAX_RANK)
    try:
        dims, dtype = _known_header(shape, name, len(raw))
    except TypeError:
        # The header is not hashable, so not one of the cache's keys.
        dims, dtype = array_header(shape, name, len(raw))
    return np.ndarray(dims, dtype, raw)


@functools.lru_cache(1024)
def _known_header(shape: Any, name: Any, nbytes: int) -> tuple[tuple[int, ...], np.dtype]:
    """Caches :func:`array_header`, since most of ten thousand leaves have one of a few shapes."""
    return array_header(shape, name, nbytes)


def array_header(shape: Any, name: Any, nbytes: int) -> tuple[tuple[int, ...], np.dtype]:
    """Parses the shape and the dtype of an array's extension with ``nbytes`` bytes of data.

    Raises:
      CorruptCheckpointError: they are malformed, or do not match the number of bytes.
      UnsupportedFormatError: the dtype is unknown.
    """
    name = name.decode('ascii', 'replace') if isinstance(name, bytes) else str(name)
    try:
        dtype = dtype_from_name(name)
    except KeyError:
        raise UnsupportedFormatError(f'an array has the dtype {name!r:.60}, which t5ckpt does not know') from None
    if not isinstance(shape, (list, tuple)) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise CorruptCheckpointError(f'an array has the shape {shape!r:.80}, expected a list of sizes')
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise CorruptCheckpointError(f'an array of shape {tuple(shape)} and dtype {name} has {nbytes} bytes of data')
    return tuple(shape), dtype


# --- tree -> bytes ---------------------------------------------------------------------------------------------------


def encode_manifest(state: Mapping[str, Any], *, split_bytes: int = 2**30) -> bytes:
    """Encodes a nested state whose leaves are NumPy arrays, NumPy scalars, None or spec dicts.

    Callers have to leave out Python numbers and empty maps, which real T5X cannot read.
    """
    return _packed({'version': VERSION, 'optimizer': _split(state, split_bytes)})


def _split(state: Mapping[str, Any], limit: int) -> Mapping[str, Any]:
    """Splits arrays of more than ``limit`` bytes as Flax does, because msgpack limits lengths to 2^32."""
    changed: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, np.ndarray):
            if value.nbytes <= limit:
                continue
            flat = value.reshape(-1)
            step = max(1, limit // value.itemsize)
            parts = [flat[start : start + step] for start in range(0, flat.size, step)]
            changed[key] = {
                _CHUNKED: True,
                'shape': {str(axis): size for axis, size in enumerate(value.shape)},
                'chunks': {str(index): part for index, part in enumerate(parts)},
            }
        elif not is_spec(value) and isinstance(value, Mapping) and (inner := _split(value, limit)) is not value:
            changed[key] = inner
    return {**state, **changed} if changed else state


def _encode_ext(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_EXT_ARRAY, _encode_array(value))
    if isinstance(value, np.generic):
        return msgpack.ExtType(_EXT_SCALAR, _encode_array(np.asarray(value)))
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f'a manifest cannot hold {type(value).__name__}')


def _encode_array(array: np.ndarray) -> bytes:
    little = array.astype(array.dtype.newbyteorder('<')) if array.dtype.byteorder == '>' else array
    if little.nbytes <= _SMALL_BYTES:
        return _packed_header(array.shape, array.dtype) + little.tobytes('C')
    return _packed([list(array.shape), name_of(array.dtype), little.tobytes('C')])


@functools.lru_cache(1024)
def _packed_header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """The bytes before the values of an array, cached: most of ten thousand leaves have one of a few shapes."""
    nbytes = math.prod(shape) * dtype.itemsize
    packed = _packed([list(shape), name_of(dtype), bytes(nbytes)])
    return packed[: len(packed) - nbytes]


def _packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value, default=_encode_ext, strict_types=True, use_bin_type=True) or b'')


def _brief(error: BaseException) -> str:
    return f'{type(error).__name__}: {error}'[:200].rstrip(': ')

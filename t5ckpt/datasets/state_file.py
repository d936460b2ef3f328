"""Encodes and decodes the state of iterators that return a state object.

A file is msgpack: ``{format, iterator, digest, state}``. ``iterator`` is the name of the class, ``state`` is msgpack again, and
``digest`` its xxh3, because a wrong bit in a position would skip or repeat data without an error. In addition to msgpack's types,
a state may hold tuples, integers of any size (the state of a PCG64 generator has 128 bits), NumPy scalars and arrays, and torch
tensors. Pickle is not used, because unpickling a file can run any code.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from t5ckpt.core.loaded import loaded
from t5ckpt.errors import CorruptCheckpointError, DatasetStateError, MissingDependencyError
from t5ckpt.format.checksum import digest

FORMAT = 1
SUFFIX = '.msgpack'
# Extension codes of types that msgpack lacks.
_TUPLE, _INTEGER, _ARRAY, _SCALAR, _TENSOR = range(1, 6)
_MSGPACK_INTEGERS = range(-(2**63), 2**64)


def encode_state(state: Any, iterator: str) -> bytes:
    """Encodes a state as the bytes of a file.

    Args:
      state: numbers, text, bytes, None, lists, tuples, dicts, arrays. A subclass of dict or list is decoded as a plain one.
      iterator: the name of the iterator's class, for messages.

    Raises:
      DatasetStateError: the state contains a value of another type, whose position the message names, or has 4 GiB.
    """
    try:
        payload = _pack(_plain(state, 'state'))
        return _pack({'format': FORMAT, 'iterator': iterator, 'digest': digest(payload), 'state': payload})
    except UnicodeEncodeError as error:
        raise DatasetStateError(
            f'dataset_iterator: the state of {iterator} has text that is not valid Unicode ({error.object!r:.99}: '
            f'{error.reason}). '
            'Give it as bytes (os.fsencode), or rename the file.'
        ) from error
    except (RecursionError, ValueError) as error:
        raise DatasetStateError(
            f'dataset_iterator: the state of {iterator} cannot be written: it is nested too deeply, contains itself, or has '
            f'4 GiB ({error}). Large arrays, such as those of a replay buffer, can be leaves of the train state.'
        ) from error


def decode_state(data: bytes, where: str) -> tuple[Any, str]:
    """Decodes a file; returns the state and the name of the iterator's class.

    Raises:
      CorruptCheckpointError: the file is damaged, or has another format.
    """
    try:
        contents = _unpack(data)
        state, name = contents['state'], str(contents['iterator'])
        is_whole = contents['format'] == FORMAT and digest(state) == contents['digest']
        if is_whole:
            return _unpack(state), name
        detail = f'format {contents["format"]}, checksum {contents["digest"]}'
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        detail = f'{type(error).__name__}: {error!s:.120}'
    raise CorruptCheckpointError(
        f'{where} is damaged, or is not the state of a data iterator ({detail}). Restore another step, or restore without '
        'dataset_iterator to start the data afresh.'
    )


def _pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True) or b'')


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False, ext_hook=_from_extension)


def _plain(value: Any, where: str) -> Any:
    """Converts a value to msgpack's types."""
    match value:
        case None | bool() | str() | bytes():
            plain = value
        case np.generic():
            plain = msgpack.ExtType(_SCALAR, _array_bytes(np.asarray(value), where))
        case int():
            number = int(value)
            plain = number if number in _MSGPACK_INTEGERS else msgpack.ExtType(_INTEGER, str(number).encode())
        case float():
            plain = float(value)
        case Mapping():
            keys = [_plain(key, f'the key {key!r} of {where}') for key in value]
            plain = dict(zip(keys, (_plain(item, f'{where}[{key!r}]') for key, item in value.items()), strict=True))
        case list() | tuple():
            plain = [_plain(item, f'{where}[{index}]') for index, item in enumerate(value)]
            plain = plain if isinstance(value, list) else msgpack.ExtType(_TUPLE, _pack(plain))
        case np.ndarray():
            plain = msgpack.ExtType(_ARRAY, _array_bytes(value, where))
        case _:
            plain = msgpack.ExtType(_TENSOR, _array_bytes(_tensor_values(value, where), where))
    return plain


def _tensor_values(value: Any, where: str) -> np.ndarray:
    torch = loaded('torch')
    if torch is None or not isinstance(value, torch.Tensor):
        raise DatasetStateError(
            f'dataset_iterator: {where} is of type {type(value).__module__}.{type(value).__qualname__}, which cannot be written '
            'without pickle. The state may contain numbers, text, bytes, lists, tuples, dicts and arrays.'
        )
    try:
        return value.detach().cpu().numpy()
    except TypeError as error:
        # A sparse tensor, or a dtype that NumPy lacks.
        raise DatasetStateError(f'dataset_iterator: {where} is a tensor of {value.dtype}: {error}') from error


def _array_bytes(array: np.ndarray, where: str) -> bytes:
    # Objects need pickle, and NumPy cannot parse the names of records and of ml_dtypes' dtypes.
    if array.dtype.hasobject or np.dtype(array.dtype.str) != array.dtype:
        raise DatasetStateError(
            f"dataset_iterator: {where} has the dtype {array.dtype}, which a data iterator's state file cannot hold. "
            'Convert it to a plain number type in get_state or state_dict.'
        )
    return _pack([array.dtype.str, list(array.shape), array.tobytes()])


def _array(data: bytes) -> np.ndarray:
    name, shape, values = _unpack(data)
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError(f'an array of dtype {name!r}')
    # A copy, because the iterator may write to its arrays.
    return np.ndarray(tuple(shape), dtype, values).copy()


def _tensor(data: bytes) -> Any:
    try:
        torch = importlib.import_module('torch')
    except ImportError as error:
        raise MissingDependencyError(
            "the data iterator's state contains torch tensors, but torch is not installed: pip install torch"
        ) from error
    return torch.from_numpy(_array(data))


def _from_extension(code: int, data: bytes) -> Any:
    readers = {
        _TUPLE: lambda data: tuple(_unpack(data)),
        _INTEGER: lambda data: int(data.decode('ascii')),
        _ARRAY: _array,
        _SCALAR: lambda data: _array(data)[()],
        _TENSOR: _tensor,
    }
    if code not in readers:
        raise ValueError(f'extension type {code}')
    return readers[code](data)

"""What is fuzzed: every decoder that takes bytes from a stranger.

A target takes bytes and may raise nothing but errors of ``t5ckpt.errors``. ``SEEDS`` gives each valid inputs to begin with;
``corpus/`` holds inputs that were a problem once, or look as if they could be.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import shutil
import struct
import tempfile
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

import t5ckpt
from t5ckpt.convert.tf.bundle import read_bundle
from t5ckpt.errors import T5CkptError
from t5ckpt.format.array_dirs import array_dirs
from t5ckpt.format.array_spec import StoredArray, checkpoint_leaves, parse_spec, spec_of
from t5ckpt.format.checksum import digest
from t5ckpt.format.chunk_grid import Box
from t5ckpt.format.facts import Facts, TreeFacts, decode_facts, encode_facts
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.manifest import decode_manifest, encode_manifest, version_of
from t5ckpt.format.names import parse_marker, parse_step_dir
from t5ckpt.format.zarray import decode_zarray
from t5ckpt.metrics import TensorBoardMetrics
from t5ckpt.metrics.event_file import masked_crc32c
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.chunks import blocks_of
from t5ckpt.reading.orbax import read_orbax
from t5ckpt.storage import open_storage
from t5ckpt.tree.leaf_table import LeafTable, unflatten

__all__ = ['RUNS', 'SEEDS', 'TARGETS', 'corpus']

_ARRAY = StoredArray('a.b', (8, 4), np.dtype(np.float32), np.dtype(np.float32), {'chunks': [4, 4], 'compressor': None})
_SPEC = spec_of(_ARRAY, 'file')
_ZARRAY: dict[str, Any] = {
    'chunks': [4, 4],
    'compressor': None,
    'dimension_separator': '.',
    'dtype': '<f4',
    'fill_value': None,
    'filters': None,
    'order': 'C',
    'shape': [8, 4],
    'zarr_format': 2,
}
_STATE: dict[str, Any] = {
    'target': {'w': _SPEC, 'b': np.arange(3, dtype=np.float32), 's': np.int32(3), 'n': None},
    'state': {'step': np.int32(1), 'h': np.zeros((2, 0), np.float16)},
}
_FACTS = TreeFacts({('e',): 'dict'}, {('p',): 'int'}, {('k',): 'fry'}, {('t', 'u'): 'text'}, {'a.b': 'uint4'})
_METADATA = {
    'tree_metadata': {
        "('a',)": {'key_metadata': [{'key': 'a', 'key_type': 2}], 'value_metadata': {'value_type': 'np.ndarray'}},
        "('n',)": {'key_metadata': [{'key': 'n', 'key_type': 2}], 'value_metadata': {'value_type': 'None'}},
    },
    'use_zarr3': False,
}


def _leaves(leaves: LeafTable, version: int, facts: TreeFacts) -> None:
    """As a restore makes the leaves of a manifest and its facts, and the tree of them."""
    unflatten(checkpoint_leaves(leaves, version, facts))


def manifest(data: bytes) -> None:
    """A manifest's bytes, up to the parsed leaves."""
    version_of(data)
    decoded = decode_manifest(data, 'fuzzed')
    _leaves(decoded.leaves, decoded.version, TreeFacts())


def spec(data: bytes) -> None:
    """Fields of a spec, in JSON, over a valid one."""
    fields = _json(data)
    if isinstance(fields, dict):
        parse_spec({**_SPEC, **fields}, 'leaf')
        parse_spec({**_SPEC, 'metadata': {**_SPEC['metadata'], **fields}}, 'leaf')
        parse_spec({**_SPEC, 'kvstore': {**_SPEC['kvstore'], **fields}}, 'leaf')


def facts(data: bytes) -> None:
    """Facts with a checksum that fits."""
    body = b'{\n' + data
    decoded = decode_facts(b'{\n "checksum": "%s",\n%s' % (digest(body).encode(), data), 'fuzzed')
    _leaves({('target', 'w'): _SPEC}, 3, decoded.tree)


def file_checksums(data: bytes) -> None:
    """The file checksums of a process."""
    FileChecksums.decode(data, 'fuzzed')


def zarray(data: bytes) -> None:
    """A ``.zarray``, up to the blocks that a chunk is read in."""
    layout = decode_zarray(data, _ARRAY, 'fuzzed')
    shape = layout.grid.chunk_shape
    for block in itertools.islice(blocks_of(shape, Box.whole(shape), layout.dtype.itemsize, 2**20, 0), 10):
        assert not block.intersect(Box.whole(shape)).is_empty


def names(data: bytes) -> None:
    """Names of leaves and directories."""
    text = data.decode('utf-8', 'replace')
    parse_step_dir(text)
    parse_marker(text)
    for directory in array_dirs({text, text[:5], text.upper(), f'{text}/a'}).values():
        assert 0 < len(directory) < 256, directory
        assert '/' not in directory, directory
        assert not directory.startswith('.'), directory


class _Directory:
    """A checkpoint in a directory, one file of which is replaced."""

    def __init__(self, files: dict[str, bytes]):
        memory = pathlib.Path('/dev/shm')
        self.path = pathlib.Path(tempfile.mkdtemp(prefix='t5ckpt-fuzz-', dir=memory if memory.is_dir() else None))
        self._files = files
        for name, contents in files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(contents)

    def replaced(self, data: bytes) -> _Replaced:
        """With another file for as long as the block lasts; the first byte says which."""
        ordered = list(self._files)
        name = ordered[data[0] % len(ordered)] if data else ordered[0]
        return _Replaced(self.path / name, data[1:], self._files[name])

    def __del__(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class _Replaced:
    def __init__(self, path: pathlib.Path, data: bytes, before: bytes):
        self._path, self._data, self._before = path, data, before

    def __enter__(self) -> None:
        self._path.write_bytes(self._data)

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._before)


_CHECKPOINT = _Directory(
    {
        'checkpoint': encode_manifest({'target': {'w': _SPEC}}),
        'a.b/.zarray': json.dumps({**_ZARRAY, 'compressor': {'id': 'zlib', 'level': 1}}).encode(),
        'a.b/0.0': bytes.fromhex('789c636060b0a724000000ffff030000400001'),
        'a.b/1.0': bytes.fromhex('789c636060b0a724000000ffff030000400001'),
    }
)
_ORBAX = _Directory({'_METADATA': json.dumps(_METADATA).encode(), 'a/.zarray': json.dumps(_ZARRAY).encode()})


def checkpoint(data: bytes) -> None:
    """A whole checkpoint with one file replaced: read in both ways, and verified, which raises nothing at all."""
    with _CHECKPOINT.replaced(data):
        assert t5ckpt.verify(_CHECKPOINT.path, full=True).damages is not None
        for mmap in (False, True):
            with contextlib.suppress(T5CkptError):
                t5ckpt.load_t5x_checkpoint(_CHECKPOINT.path, options=t5ckpt.CheckpointerOptions(mmap=mmap))


def orbax(data: bytes) -> None:
    """Orbax's metadata."""
    with _ORBAX.replaced(data):
        read_orbax(CheckpointFiles.at(open_storage(_ORBAX.path), ''), logs_items=True)


def _record(data: bytes) -> bytes:
    """A record with the checksums that fit."""
    length = struct.pack('<Q', len(data))
    sums = [struct.pack('<I', masked_crc32c(part)) for part in (length, data)]
    return length + sums[0] + data + sums[1]


def _field(number: int, value: bytes | int) -> bytes:
    """A field of a protocol buffer, short enough for one byte of length."""
    return bytes([number << 3 | 2, len(value)]) + value if isinstance(value, bytes) else bytes([number << 3, value])


_EVENTS = _Directory({'eval/events.out.tfevents.1': b''})


def events(data: bytes) -> None:
    """An event file: as it comes, and the same bytes as an event with good checksums."""
    for contents in (data, _record(data + b'loss') + _record(data)):
        with _EVENTS.replaced(b'\0' + contents):
            for value in TensorBoardMetrics(_EVENTS.path).by_step('eval/loss', range(20)).values():
                assert isinstance(value, float)


# tensorflow/core/lib/io/format.h: the last eight bytes of a table.
_BUNDLE_MAGIC = 0xDB4775248B80FB57
_BUNDLE = _Directory({'model.index': b'', 'model.data-00000-of-00001': bytes(64)})


def _block(data: bytes) -> bytes:
    """A block of a table with the checksum that fits."""
    return data + b'\0' + struct.pack('<I', masked_crc32c(data + b'\0'))


def _table_of(data: bytes) -> bytes:
    """A table whose one block holds some bytes."""
    handle = _long(0) + _long(len(data))
    index = bytes([0, 1, len(handle)]) + b'a' + handle + struct.pack('<II', 0, 1)
    footer = (_long(0) + _long(0) + _long(len(data) + 5) + _long(len(index))).ljust(40, b'\0')
    return _block(data) + _block(index) + footer + struct.pack('<Q', _BUNDLE_MAGIC)


def _long(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _pair(key: bytes, value: bytes) -> bytes:
    return bytes([0, len(key), len(value)]) + key + value


def tf_index(data: bytes) -> None:
    """The index of a TensorFlow checkpoint: as it comes, and the same bytes as a block with a good checksum."""
    for contents in (data, _table_of(data)):
        with _BUNDLE.replaced(b'\0' + contents), contextlib.suppress(T5CkptError):
            for tensor in read_bundle(str(_BUNDLE.path / 'model')).values():
                with contextlib.suppress(T5CkptError):
                    tensor.get()


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        manifest,
        spec,
        facts,
        file_checksums,
        zarray,
        names,
        events,
        tf_index,
        checkpoint,
        orbax,
    )
}
"""By name."""

RUNS = {
    'manifest': 350_000,
    'spec': 200_000,
    'facts': 150_000,
    'file_checksums': 150_000,
    'zarray': 100_000,
    'names': 50_000,
    'events': 50_000,
    'tf_index': 50_000,
    'checkpoint': 10_000,
    'orbax': 10_000,
}
"""How often ``make fuzz`` runs each."""

_MANIFEST = encode_manifest(_STATE)
_CHUNKED = {'__msgpack_chunked_array__': True, 'shape': {'0': 3}, 'chunks': {'0': np.arange(3)}}
_ENCODED_FACTS = encode_facts(Facts(_FACTS, step=1, digests=FileChecksums({'checkpoint': (3, '0' * 16)})))
_SCALAR = _field(1, b'loss') + bytes([2 << 3 | 5]) + struct.pack('<f', 0.5)
_EVENT = _field(2, 7) + _field(5, _field(1, _SCALAR))
_TENSOR = _field(8, _field(1, 1) + _field(2, _field(2, _field(1, 1))) + _field(4, struct.pack('<f', 0.5)))
_SHAPED = (
    _field(1, 1) + _field(2, _field(2, _field(1, 4))) + _field(4, 8) + _field(5, 16) + bytes([6 << 3 | 5]) + bytes(4)
)
_ENTRIES = _pair(b'', _field(1, 1)) + _pair(b'w', _SHAPED) + _pair(b'x/y', _field(1, 3)) + struct.pack('<II', 0, 1)
SEEDS: dict[str, list[bytes]] = {
    'manifest': [
        *(_MANIFEST, encode_manifest({'c': _CHUNKED}), msgpack.packb({'a': {'b': [1, 2.0, b'x', 'y', None, True]}})),
        msgpack.packb({'version': 2, 'optimizer': {'w': {**_SPEC, 'dtype': 'uint16', 'path': 'x'}}}),
    ],
    'spec': [json.dumps(_SPEC).encode(), b'{"path": "../x", "driver": "http", "shape": [4], "chunks": [1]}'],
    'facts': [_ENCODED_FACTS.split(b'\n', 2)[2]],
    'file_checksums': [FileChecksums({'a/0.0': (3, '0' * 16), 'b': (0, 'f' * 16)}).encode()],
    'zarray': [json.dumps(_ZARRAY).encode()],
    'names': [b'target/encoder/layers_0', b'checkpoint_5.tmp-17', b'../..', b'CHECKPOINT'],
    'events': [
        _EVENT,
        _record(_EVENT),
        _field(1, 1) + _field(2, 3) + _field(5, _field(1, _field(1, b'loss') + _TENSOR)),
    ],
    'tf_index': [_ENTRIES, _table_of(_ENTRIES)],
    'checkpoint': [bytes([0]) + _MANIFEST, bytes([1]) + json.dumps(_ZARRAY).encode(), bytes([2]) + bytes(64)],
    'orbax': [bytes([0]) + json.dumps(_METADATA).encode(), bytes([1]) + json.dumps(_ZARRAY).encode()],
}
"""Valid inputs, or nearly."""


def corpus(target: str) -> list[bytes]:
    """The seeds of a target and the inputs that are kept for it."""
    kept = sorted((pathlib.Path(__file__).parent / 'corpus' / target).glob('*'))
    return [*SEEDS[target], *(path.read_bytes() for path in kept)]

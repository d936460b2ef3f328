"""Arrays and trees of other writers of zarr: each is read to the bit, or refused as unsupported, which is not damage."""

import gzip
import itertools
import json
import pathlib
import pickle
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from typing import Any

import jax
import ml_dtypes
import numcodecs
import numpy as np
import pytest
import tensorstore as ts
from flax import serialization
from jax.experimental.array_serialization import serialization as jax_serialization
from support.bits import assert_same

import t5ckpt
from t5ckpt import Checkpointer
from t5ckpt.convert import convert_checkpoint
from t5ckpt.errors import CorruptCheckpointError, UnsupportedFormatError

W = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)


def write_array(directory: pathlib.Path, values: np.ndarray, codecs: Any = (), chunks: Any = (4, 3), **fields: Any):
    """A zarr v2 array, encoded by numcodecs with filters and, last, a compressor; ``fields`` replace those of ``.zarray``."""
    directory.mkdir(parents=True)
    order = 'F' if fields.get('order') == 'F' else 'C'
    metadata = {
        'zarr_format': 2,
        'shape': values.shape,
        'chunks': chunks,
        'dtype': values.dtype.str,
        'fill_value': None,
    }
    *filters, compressor = [codec.get_config() for codec in codecs] or [None]
    metadata |= {'filters': filters or None, 'compressor': compressor, 'order': 'C'} | fields
    (directory / '.zarray').write_text(json.dumps({key: value for key, value in metadata.items() if value is not ...}))
    for index in itertools.product(
        *(range(-(-size // chunk)) for size, chunk in zip(values.shape, chunks, strict=True))
    ):
        whole = np.zeros(chunks, values.dtype)
        part = values[tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in zip(index, chunks, strict=True))]
        whole[tuple(map(slice, part.shape))] = part
        data: Any = np.frombuffer(whole.tobytes(order), np.uint8 if whole.dtype.kind == 'V' else whole.dtype)
        for codec in codecs:
            data = codec.encode(data)
        (directory / '.'.join(map(str, index))).write_bytes(bytes(memoryview(data).cast('B')))


def write_step(
    run: pathlib.Path, values: np.ndarray, *args: Any, in_manifest: Any = None, step: int = 2, **fields: Any
):
    """A step as T5X writes it, whose array another program has rewritten."""
    directory = run / f'checkpoint_{step}'
    write_array(directory / 'target.w', values, *args, **fields)
    metadata = json.loads((directory / 'target.w' / '.zarray').read_text())
    spec = {
        'driver': 'zarr',
        'dtype': in_manifest or values.dtype.name,
        'kvstore': {'driver': 'file', 'path': 'target.w'},
    }
    spec['metadata'] = {key: metadata[key] for key in ('shape', 'chunks', 'compressor')}
    state = {'target': {'w': spec}, 'state': {'step': np.int32(step)}}
    (directory / 'checkpoint').write_bytes(serialization.msgpack_serialize({'version': 3, 'optimizer': state}))


def reads(run: pathlib.Path, values: np.ndarray) -> dict[str, Any]:
    template = {'target': {'w': np.zeros(values.shape, values.dtype)}, 'state': {'step': np.int32(0)}}
    abstract = template | {'target': {'w': jax.ShapeDtypeStruct(values.shape, values.dtype)}}
    return {
        'view': lambda: t5ckpt.open_checkpoint(run)['target/w'][...],
        'load': lambda: t5ckpt.load_t5x_checkpoint(run)['target']['w'],
        'restore': lambda: Checkpointer(template, checkpoints_dir=run).restore()['target']['w'],
        'to devices': lambda: Checkpointer(abstract, checkpoints_dir=run).restore()['target']['w'],
        'mapped': lambda: Checkpointer(
            template, checkpoints_dir=run, options=t5ckpt.CheckpointerOptions(mmap=True)
        ).restore()['target']['w'],
    }


BF16, F8, I4 = (np.dtype(getattr(ml_dtypes, name)) for name in ('bfloat16', 'float8_e4m3fn', 'int4'))
READ: dict[str, tuple[np.ndarray, Any, dict[str, Any]]] = {
    'lz4': (W, [numcodecs.LZ4()], {}),
    'lzma': (W, [numcodecs.LZMA()], {}),
    'zstd with a checksum': (W, [numcodecs.Zstd(3, checksum=True)], {}),
    'shuffle': (W, [numcodecs.Shuffle(4), numcodecs.Zlib(1)], {}),
    'delta': (W.astype(np.int32), [numcodecs.Delta('<i4'), numcodecs.Zstd(1)], {}),
    'shuffle alone, order F': (W, [numcodecs.Shuffle(4), numcodecs.LZ4()], {'order': 'F'}),
    'lz4, big-endian': (W.astype('>f4'), [numcodecs.LZ4()], {}),
    'lz4 of bfloat16': (W.astype(BF16), [numcodecs.LZ4()], {'dtype': '<V2'}),
    'no order': (W, (), {'order': ...}),
    'no filters': (W, (), {'filters': ...}),
    'bfloat16 as <V2': (W.astype(BF16), (), {'dtype': '<V2'}),
    'bfloat16 as |V2': (W.astype(BF16), (), {'dtype': '|V2', 'fill_value': 'AAA='}),
    'float8 as |V1': (W.astype(F8), (), {'dtype': '|V1'}),
    'int4 as |V1': (W.astype(I4), (), {'dtype': '|V1'}),
    'a name for <f4': (W, (), {'dtype': 'float32'}),
}


@pytest.mark.parametrize('name', READ)
def test_what_another_writer_encodes_is_read(tmp_path, name):
    values, codecs, fields = READ[name]
    wanted = values.astype(values.dtype.newbyteorder('='))
    write_step(tmp_path, values, codecs, in_manifest=wanted.dtype.name, **{'zarr_format': 2, **fields})
    for how, read in reads(tmp_path, wanted).items():
        assert_same(read(), wanted, how)
    assert_same(t5ckpt.open_checkpoint(tmp_path)['target/w'][1:5, 2], wanted[1:5, 2])
    assert t5ckpt.verify(tmp_path, full=True).ok
    url = f'memory://zarr-arrays-{name}'
    t5ckpt.copy_checkpoint(tmp_path, url)
    assert_same(t5ckpt.open_checkpoint(url)['target/w'][...], wanted)


UNSUPPORTED: dict[str, tuple[np.ndarray, str, dict[str, Any], str]] = {
    'a codec': (W, 'float32', {'compressor': {'id': 'vlen-utf8'}}, "the codec 'vlen-utf8'"),
    'a separator': (W, 'float32', {'dimension_separator': '|'}, 'dimension_separator'),
    'pickle': (W, 'float32', {'filters': [{'id': 'pickle', 'protocol': 5}]}, "the codec 'pickle'"),
    'a codec of another package': (W, 'float32', {'filters': [{'id': 'crc32c'}]}, "the codec 'crc32c'"),
    'a parameter of a newer numcodecs': (
        W,
        'float32',
        {'filters': [{'id': 'shuffle', 'elementsize': 4, 'lanes': 2}]},
        "the codec 'shuffle'",
    ),
    'a dtype': (W, 'float32', {'dtype': '<M8[ns]'}, "'<M8\\[ns\\]'"),
    'objects': (W, 'float32', {'dtype': '|O'}, "'|O'"),
    'fields': (W, 'float32', {'dtype': [['a', '<f4'], ['b', '<i4']]}, "'a', '<f4'"),
    'text': (W, 'float32', {'dtype': '<U2'}, "'<U2'"),
    'dimensions': (
        W.reshape((1,) * 31 + W.shape),
        'float32',
        {'chunks': (1,) * 31 + W.shape},
        '33 dimensions.*32.*zarr-python',
    ),
    'another dtype': (W.astype(np.float16), 'bfloat16', {}, "'<f2', and the manifest bfloat16"),
    'an unknown dtype in the manifest': (W, 'float128', {}, "'float128'"),
}


@pytest.mark.parametrize('name', UNSUPPORTED)
def test_unsupported_is_not_damaged(tmp_path, name, caplog):
    values, dtype, fields, found = UNSUPPORTED[name]
    template = {'target': {'w': W}, 'state': {'step': np.int32(1)}}
    with Checkpointer(template, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save(template, step=1)
    write_step(tmp_path, values, in_manifest=dtype, **fields)
    before = sorted(path.name for path in tmp_path.iterdir())
    every = reads(tmp_path, W) | {'verify': lambda: t5ckpt.verify(tmp_path)}
    every['restore_or_init'] = lambda: t5ckpt.restore_or_init(
        Checkpointer(template, checkpoints_dir=tmp_path), lambda: pytest.fail('a new run')
    )
    for read in every.values():
        with pytest.raises(UnsupportedFormatError, match=found) as caught:
            read()
        assert 'copy' not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert 'looking for an older one' not in caplog.text


def test_absent_chunks_are_found_by_one_listing(tmp_path):
    """A task for each takes 800 bytes, for a file of a hundred bytes."""
    write_step(tmp_path, np.arange(1, 4, dtype=np.float32), fill_value=2.5, chunks=(1,))
    zarray = next(tmp_path.rglob('.zarray'))
    zarray.write_text(json.dumps(json.loads(zarray.read_text()) | {'shape': [200_000]}))
    manifest = tmp_path / 'checkpoint_2' / 'checkpoint'
    state = serialization.msgpack_restore(manifest.read_bytes())
    state['optimizer']['target']['w']['metadata']['shape'] = [200_000]
    manifest.write_bytes(serialization.msgpack_serialize(state))
    tracemalloc.start()
    try:
        values = t5ckpt.load_t5x_checkpoint(tmp_path)['target']['w']
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert_same(values, np.array([1, 2, 3] + [2.5] * 199_997, np.float32))


def test_a_fill_value_in_text_is_exact(tmp_path):
    values = np.array([2**53 + 1, 5], np.int64)
    write_step(tmp_path, values, in_manifest='int64', fill_value=str(2**53 + 1), chunks=(1,))
    next(tmp_path.rglob('0')).unlink()
    assert_same(t5ckpt.load_t5x_checkpoint(tmp_path)['target']['w'], values)


@pytest.mark.parametrize('value', ['', 'AA==', 'not base64!'])
def test_a_fill_value_that_is_not_one_is_damage(tmp_path, value):
    write_step(tmp_path, W.astype(BF16), in_manifest='bfloat16', dtype='|V2', fill_value=value)
    with pytest.raises(CorruptCheckpointError, match=r'target/w.*: the fill value in \.zarray does not decode'):
        t5ckpt.load_t5x_checkpoint(tmp_path)


@pytest.mark.parametrize('codecs', [[numcodecs.LZ4()], [numcodecs.Shuffle(4), numcodecs.Zlib(1)], [numcodecs.LZMA()]])
def test_a_damaged_chunk_of_numcodecs_is_damage(tmp_path, codecs):
    write_step(tmp_path, W, codecs)
    chunk = tmp_path / 'checkpoint_2' / 'target.w' / '0.0'
    for data in (b'', chunk.read_bytes()[:-3], b'\xff' * 40, None):
        chunk.unlink() if data is None else chunk.write_bytes(data)
        for read in reads(tmp_path, W).values():
            with pytest.raises(CorruptCheckpointError, match=r'target/w.*0\.0'):
                read()
        assert [damage.leaf for damage in t5ckpt.verify(tmp_path, full=True).damages] == ['target/w']
    shutil.rmtree(chunk.parent)
    with pytest.raises(CorruptCheckpointError):
        t5ckpt.open_checkpoint(tmp_path)['target/w'][...]


@pytest.mark.parametrize(
    'fields',
    [
        {'filters': [{'id': 'jenkins_lookup3', 'initval': 10**30}]},
        {'filters': [{'id': 'fixedscaleoffset', 'offset': 0, 'scale': 10**400, 'dtype': '<f4', 'astype': '<f4'}]},
        {'compressor': {'id': 'lzma', 'format': 2**40}},
    ],
)
def test_a_number_that_no_codec_takes_is_damage(tmp_path, fields):
    write_step(tmp_path, W, **fields)
    for read in reads(tmp_path, W).values():
        with pytest.raises(CorruptCheckpointError, match=r'target/w.*0\.0'):
            read()


def _zstd_bomb(count):
    """A frame of so many zeros: blocks that say how often their byte is repeated (RFC 8878, 3.1.1.2)."""
    blocks = [
        (2**17 << 3 | 2 | (number == count // 2**17 - 1)).to_bytes(3, 'little') + b'\0'
        for number in range(count // 2**17)
    ]
    return b'\x28\xb5\x2f\xfd\xc0\x58' + count.to_bytes(8, 'little') + b''.join(blocks)


BOMBS: dict[str, tuple[bytes, dict[str, Any]]] = {
    'zstd': (_zstd_bomb(2**30), {'compressor': {'id': 'zstd'}, 'filters': [{'id': 'shuffle', 'elementsize': 4}]}),
    'lz4': (
        (2**30).to_bytes(4, 'little') + b'\x1f\0\1\0' + b'\xff' * 2**22,
        {'compressor': {'id': 'lz4'}, 'filters': [{'id': 'shuffle'}]},
    ),
    'gzip': (
        gzip.compress(bytes(2**29)),
        {'compressor': {'id': 'gzip'}, 'filters': [{'id': 'shuffle', 'elementsize': 4}]},
    ),
    'astype': (bytes(64), {'filters': [{'id': 'astype', 'encode_dtype': '|u1', 'decode_dtype': 'S20000000'}]}),
    'filters': (bytes(300), {'filters': [{'id': 'packbits'}] * 8}),
}

_IN_LITTLE_MEMORY = """
import pathlib, resource, sys
import t5ckpt
view = t5ckpt.open_checkpoint(sys.argv[1])
view['good'][...]
pages = int(pathlib.Path('/proc/self/statm').read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**27, resource.RLIM_INFINITY))
try:
    view['bad'][...]
except t5ckpt.errors.FormatError as error:
    print(type(error).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize('name', BOMBS)
def test_decoding_ends_at_the_size_of_the_chunk(tmp_path, name):
    data, fields = BOMBS[name]
    array = {'zarr_format': 2, 'shape': [1024], 'chunks': [1024], 'dtype': '|u1', 'fill_value': None, 'order': 'C'}
    (tmp_path / '.zgroup').write_text('{"zarr_format": 2}')
    for leaf, chunk, codecs in (('good', bytes(1024), {}), ('bad', data, fields)):
        (tmp_path / leaf).mkdir()
        (tmp_path / leaf / '0').write_bytes(chunk)
        (tmp_path / leaf / '.zarray').write_text(json.dumps(array | {'compressor': None, 'filters': None} | codecs))
    words = [sys.executable, '-c', _IN_LITTLE_MEMORY, tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ('UnsupportedFormatError' if name == 'astype' else 'CorruptCheckpointError')


def test_a_step_over_many_chunks_looks_at_those_that_are_wanted(tmp_path):
    array = {'zarr_format': 2, 'shape': [2**50], 'chunks': [1], 'dtype': '|u1', 'fill_value': 7, 'order': 'C'}
    (tmp_path / '.zgroup').write_text('{"zarr_format": 2}')
    (tmp_path / 'w').mkdir()
    (tmp_path / 'w' / '.zarray').write_text(json.dumps(array | {'compressor': None, 'filters': None}))
    assert t5ckpt.open_checkpoint(tmp_path)['w'][:: 2**48].tolist() == [7] * 4


def test_streams_that_follow_each_other(tmp_path):
    """RFC 1952 permits it, and tools that compress in parallel write it."""
    write_step(tmp_path, W, [numcodecs.GZip()])
    chunk = tmp_path / 'checkpoint_2' / 'target.w' / '0.0'
    data = gzip.decompress(chunk.read_bytes())
    chunk.write_bytes(gzip.compress(data[:20]) + gzip.compress(data[20:]) + bytes(512))
    for read in reads(tmp_path, W).values():
        np.testing.assert_array_equal(read(), W)


def test_a_frame_of_zstd_without_a_size_is_not_damaged(tmp_path):
    write_step(tmp_path, W, [numcodecs.Zstd()])
    chunk = tmp_path / 'checkpoint_2' / 'target.w' / '0.0'
    data = numcodecs.Zstd().decode(chunk.read_bytes())
    blocks = [data[start : start + 2**16] for start in range(0, len(data), 2**16)]
    frame = b''.join(
        (len(block) << 3 | (number == len(blocks) - 1)).to_bytes(3, 'little') + block
        for number, block in enumerate(blocks)
    )
    chunk.write_bytes(b'\x28\xb5\x2f\xfd\x00\x58' + frame)
    for read in reads(tmp_path, W).values():
        with pytest.raises(UnsupportedFormatError, match=r'target/w.*0\.0.*zstd frame'):
            read()


# --- trees ------------------------------------------------------------------------------------------------------------

TREE = {
    'model/embed/weight': np.arange(128 * 64, dtype=np.float32).reshape(128, 64),
    'model/blocks/0/w': np.ones((64, 64), BF16),
    'optimizer_state/0/mu/w': np.full((64, 64), 0.5, np.float32),
    'training_key': np.asarray([0, 7], np.uint32),
    'step': np.int32(10),
}


def levanter_step(directory: pathlib.Path, *, ocdbt: bool = False):
    """A step as Levanter writes it: JAX's serialization of each leaf, then ``metadata.json``."""
    manager = jax_serialization.GlobalAsyncCheckpointManager()
    paths = [str(directory / name) for name in TREE]
    specs = [jax_serialization.get_tensorstore_spec(path, ocdbt=ocdbt) for path in paths]
    if ocdbt:
        for spec, name in zip(specs, TREE, strict=True):
            spec['kvstore'] = {'driver': 'ocdbt', 'base': f'file://{directory}/', 'path': f'{name}/'}
    facts = {'step': 10, 'timestamp': '2026-01-01T00:00:00', 'is_temporary': False}
    directory.mkdir(parents=True)
    manager.serialize(
        [*map(jax.numpy.asarray, TREE.values())],
        specs,
        on_commit_callback=lambda: (directory / 'metadata.json').write_text(json.dumps(facts)),
    )
    manager.wait_until_finished()


def nested(values: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in values.items():
        *above, last = name.split('/')
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


@pytest.mark.parametrize('ocdbt', [False, True])
def test_steps_of_levanter_open_restore_and_convert(tmp_path, ocdbt):
    run, step = tmp_path / 'lev', tmp_path / 'lev' / 'step-10'
    levanter_step(step, ocdbt=ocdbt)
    (run / 'step-20' / 'model').mkdir(parents=True)
    assert t5ckpt.latest_step(run) == 10
    for path in (run, step):
        view = t5ckpt.open_checkpoint(path)
        assert sorted(view) == sorted(TREE)
        for name, values in TREE.items():
            assert_same(view[name][...], np.asarray(values), name)
        assert t5ckpt.verify(path, full=True).ok
    template = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.asarray(leaf).dtype), nested(TREE))
    with Checkpointer(template, checkpoints_dir=run) as checkpointer:
        state = t5ckpt.restore_or_init(checkpointer, lambda: pytest.fail('a new run'))
        assert_same(state['model']['blocks']['0']['w'], TREE['model/blocks/0/w'])
        assert checkpointer.restored_step == 10
        later = jax.tree.map(jax.numpy.zeros_like, state) | {'step': jax.numpy.int32(30)}
        checkpointer.save(later, step=30)
    assert t5ckpt.latest_step(run) == 30
    with pytest.raises(t5ckpt.errors.CheckpointNotFoundError, match='is a checkpoint, not a run'):
        Checkpointer(template, checkpoints_dir=step).restore()
    convert_checkpoint('zarr', step, tmp_path / 'out')
    assert t5ckpt.verify(tmp_path / 'out', step=10, full=True).ok
    for name, values in TREE.items():
        assert_same(t5ckpt.open_checkpoint(tmp_path / 'out', step=10)[name][...], np.asarray(values), name)


def test_a_copy_of_a_tree_of_zarr_is_a_checkpoint(tmp_path):
    levanter_step(tmp_path / 'lev' / 'step-10')
    t5ckpt.copy_checkpoint(tmp_path / 'lev', tmp_path / 'copy')
    for name, values in TREE.items():
        assert_same(t5ckpt.open_checkpoint(tmp_path / 'copy', step=10)[name][...], np.asarray(values), name)


def test_every_step_of_levanter_converts(tmp_path):
    levanter_step(tmp_path / 'lev' / 'step-10')
    shutil.copytree(tmp_path / 'lev' / 'step-10', tmp_path / 'lev' / 'step-20')
    for step in t5ckpt.all_steps(tmp_path / 'lev'):
        assert t5ckpt.convert_checkpoint('zarr', tmp_path / f'lev/step-{step}', tmp_path / 'out').step == step
    assert t5ckpt.all_steps(tmp_path / 'out') == [10, 20]


V3: dict[str, Any] = {
    'gzip': [{'name': 'bytes', 'configuration': {'endian': 'little'}}, {'name': 'gzip', 'configuration': {'level': 3}}],
    'big-endian, crc32c': [{'name': 'bytes', 'configuration': {'endian': 'big'}}, {'name': 'crc32c'}],
    'transposed': [
        {'name': 'transpose', 'configuration': {'order': [1, 0]}},
        {'name': 'bytes', 'configuration': {'endian': 'little'}},
    ],
    'in/shards': [
        {
            'name': 'sharding_indexed',
            'configuration': {
                'chunk_shape': [1, 1],
                'codecs': [{'name': 'bytes', 'configuration': {'endian': 'little'}}],
                'index_codecs': [{'name': 'bytes', 'configuration': {'endian': 'little'}}, {'name': 'crc32c'}],
            },
        }
    ],
}


def test_groups_of_zarr_open_and_convert(tmp_path):
    """Version 2 and 3 in one tree, with groups, and more chunks in a shard than a directory may have files."""
    values = np.arange(1, 130 * 130 + 1, dtype=np.float32).reshape(130, 130)
    root = tmp_path / 'group'
    group = json.dumps({'zarr_format': 3, 'node_type': 'group', 'attributes': {}})
    for name, codecs in V3.items():
        metadata = {'shape': values.shape, 'data_type': 'float32', 'codecs': codecs}
        metadata['chunk_grid'] = {'name': 'regular', 'configuration': {'chunk_shape': values.shape}}
        spec = {'driver': 'zarr3', 'kvstore': {'driver': 'file', 'path': f'{root / name}/'}, 'metadata': metadata}
        ts.open(spec, create=True).result().write(values).result()
    for directory in (root, root / 'in', root / 'empty'):
        directory.mkdir(exist_ok=True)
        (directory / 'zarr.json').write_text(group)
    write_array(root / 'v2' / 'w', values, [numcodecs.Shuffle(4), numcodecs.LZ4()], chunks=(100, 60))
    (root / 'v2' / '.zgroup').write_text('{"zarr_format": 2}')
    view = t5ckpt.open_checkpoint(root)
    assert sorted(view) == sorted([*V3, 'v2/w'])
    for name in view:
        assert_same(view[name][...], values, name)
        assert_same(view[name][3:120, 7], values[3:120, 7], name)
    assert t5ckpt.verify(root, full=True).ok
    convert_checkpoint('zarr', root, tmp_path / 'out', t5ckpt.ConvertOptions(step=3))
    assert_same(t5ckpt.open_checkpoint(tmp_path / 'out')['v2/w'][...], values)
    template = {'v2': {'w': np.zeros_like(values)}}
    with Checkpointer(template) as checkpointer:
        assert_same(checkpointer.restore(path=root, strict='contains')['v2']['w'], values)


@pytest.mark.parametrize(
    'change',
    [
        {'storage_transformers': [{'name': 'indexed'}]},
        {'chunk_grid': {'name': 'rectangular', 'configuration': {'kind': 'inline', 'chunk_shapes': [[2, 4], [5]]}}},
        {'chunk_key_encoding': {'name': 'suffix'}},
        {'codecs': [{'name': 'zfp'}]},
        {
            'codecs': [
                {'name': 'bytes', 'configuration': {'endian': 'little'}},
                {'name': 'blosc', 'configuration': {'cname': 'new', 'clevel': 1, 'shuffle': 'noshuffle'}},
            ]
        },
        {'extension': {'must_understand': True}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_version_3_may_have_and_tensorstore_does_not_read(tmp_path, change):
    metadata = {
        'zarr_format': 3,
        'node_type': 'array',
        'shape': W.shape,
        'data_type': 'float32',
        'chunk_grid': {'name': 'regular', 'configuration': {'chunk_shape': W.shape}},
        'chunk_key_encoding': {'name': 'default'},
        'fill_value': 0,
        'codecs': [{'name': 'bytes', 'configuration': {'endian': 'little'}}],
    }
    directory = tmp_path / 'tree' / 'w'
    (directory / 'c' / '0').mkdir(parents=True)
    (directory / 'zarr.json').write_text(json.dumps(metadata | change))
    (directory / 'c' / '0' / '0').write_bytes(W.tobytes())
    with pytest.raises(UnsupportedFormatError, match='It is not damaged'):
        t5ckpt.open_checkpoint(tmp_path / 'tree')['w'][...]


def test_a_tree_is_read_whole_or_not_at_all(tmp_path):
    root = tmp_path / 'group'
    write_array(root / 'a', W)
    write_array(root / 'b', W)
    (root / 'b' / '.zarray').unlink()
    with pytest.raises(CorruptCheckpointError, match=r'b/.* is a chunk of an array without \.zarray'):
        t5ckpt.open_checkpoint(root)


UNREAD = {'<U2': (2, '<U2'), '<M8[ns]': (2, '<M8[ns]'), '|O': (2, '|O'), 'records': (2, [['a', '<f4'], ['b', '<i4']])}
UNREAD |= {name: (3, name) for name in ('string', 'numpy.datetime64', 'a new one')}
UNREAD['text'] = (3, {'name': 'fixed_length_utf32', 'configuration': {'length_bytes': 8}})


@pytest.mark.parametrize('name', UNREAD)
def test_a_leaf_whose_dtype_cannot_be_read_is_left_out_and_said(tmp_path, caplog, name):
    version, dtype = UNREAD[name]
    for below in ('a', 'in/w'):
        write_array(tmp_path / 'tree' / below, W)
    unread = tmp_path / 'tree' / 'in' / 'text'
    if version == 2:
        write_array(unread, W, dtype=dtype)
    else:
        (unread / 'c' / '0').mkdir(parents=True)
        (unread / 'zarr.json').write_text(
            json.dumps({'zarr_format': 3, 'node_type': 'array', 'shape': [6, 5], 'data_type': dtype})
        )
        (unread / 'c' / '0' / '0').write_bytes(bytes(120))
    found = str(dtype)[:20]

    def warnings() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
        caplog.clear()
        return [text for text in texts if f'in/text ({found}' in text]

    view = t5ckpt.open_checkpoint(tmp_path / 'tree')
    assert sorted(view) == ['a', 'in/w']
    assert_same(view['in/w'][...], W)
    assert len(warnings()) == 1
    done = convert_checkpoint('zarr', tmp_path / 'tree', tmp_path / 'out', t5ckpt.ConvertOptions(step=3))
    assert [text.startswith(f'in/text ({found}') for text in done.left_out] == [True]
    assert sorted(t5ckpt.open_checkpoint(tmp_path / 'out')) == ['a', 'in/w']
    assert len(warnings()) == 1
    report = t5ckpt.verify(tmp_path / 'tree', full=True)
    assert report.ok
    assert any(f'in/text ({found}' in note for note in report.notes)
    template = {'a': W, 'in': {'w': W}}
    with Checkpointer(template) as checkpointer:
        assert_same(checkpointer.restore(path=tmp_path / 'tree')['in']['w'], W)
    asks = {'a': W, 'in': {'w': W, 'text': W}}
    with Checkpointer(asks) as checkpointer:
        caplog.clear()
        with pytest.raises(t5ckpt.errors.TreeMismatchError, match='in/text'):
            checkpointer.restore(path=tmp_path / 'tree')
        assert len(warnings()) == 1
        assert 'a' in checkpointer.restore(path=tmp_path / 'tree', fallback_state={'in': {'text': W}})
    with Checkpointer({'a': W, 'in': {'w': W, 'text': ...}}) as checkpointer:
        assert checkpointer.restore(path=tmp_path / 'tree')['in']['text'] is ...
    for below in ('a', 'in/w'):
        shutil.rmtree(tmp_path / 'tree' / below)
    with pytest.raises(UnsupportedFormatError, match=r'in/text .*no other array'):
        t5ckpt.open_checkpoint(tmp_path / 'tree')


def test_what_another_program_has_not_finished_is_no_tree(tmp_path):
    """A step of T5X without its manifest, a run of such steps, a step of Levanter without metadata.json, a parent of runs."""
    for name in ('checkpoint_7', 'checkpoint_7.tmp-123', 'run/checkpoint_7', 'lev/step-10/model'):
        write_array(tmp_path / name / 'target.w', W)
    for name in ('checkpoint_7', 'checkpoint_7.tmp-123', 'run', 'lev', '.'):
        with pytest.raises(t5ckpt.errors.CheckpointNotFoundError):
            t5ckpt.open_checkpoint(tmp_path / name)
    with pytest.raises(t5ckpt.errors.CheckpointNotFoundError, match='one array of zarr'):
        t5ckpt.open_checkpoint(tmp_path / 'lev' / 'step-10' / 'model' / 'target.w')


def test_files_of_equinox_and_zip_stores_are_named(tmp_path):
    named = {
        'model.eqx': r'Equinox.*tree_deserialise_leaves.*init_fn',
        'model.weights.h5': r'HDF5.*init_fn',
        'model.keras': r'Keras.*load_model.*init_fn',
        'params.pkl': r'pickle.*init_fn',
        'tree.zip': 'unpack it',
        'run.tar.gz': 'an archive or a compressed file.*unpack it',
    }
    for name, found in named.items():
        (tmp_path / name).write_bytes(b'PK')
        with pytest.raises(UnsupportedFormatError, match=found):
            t5ckpt.open_checkpoint(tmp_path / name)
        if name != 'model.eqx':
            (tmp_path / name).unlink()
    with pytest.raises(t5ckpt.errors.CheckpointNotFoundError, match='is a file of Equinox'):
        t5ckpt.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ('write', 'named'),
    [
        (lambda path: path.write_bytes(pickle.dumps({'w': np.ones(3)})), r'pickle, which can run any code.*init_fn'),
        (lambda path: path.write_bytes(gzip.compress(b'\x81\xa1w\x01')), 'compressed.*unpack it'),
        (lambda path: zipfile.ZipFile(path, 'w').writestr('model/data.pkl', b''), 'PyTorch file.*save safetensors'),
    ],
)
def test_files_without_their_usual_name_are_named_by_their_first_bytes(tmp_path, write, named):
    write(tmp_path / 'model.ckpt')
    with pytest.raises(UnsupportedFormatError, match=named):
        t5ckpt.open_checkpoint(tmp_path / 'model.ckpt')


@pytest.mark.parametrize('keys', [2, 20])
@pytest.mark.parametrize('name', ['ckpt_5', 'ckpt-5.flax'])
def test_a_truncated_file_of_flax_is_damaged_whatever_its_name(tmp_path, name, keys):
    data = serialization.to_bytes({f'w{i}': np.ones(3, np.float32) for i in range(keys)})
    (tmp_path / name).write_bytes(data)
    assert len(t5ckpt.open_checkpoint(tmp_path / name)) == keys
    (tmp_path / name).write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(CorruptCheckpointError, match=rf'{name} .*truncated.*copy the checkpoint again'):
        t5ckpt.open_checkpoint(tmp_path / name)
    (tmp_path / name).write_text('a note')
    with pytest.raises(UnsupportedFormatError, match=r'not a checkpoint\. Check the path'):
        t5ckpt.open_checkpoint(tmp_path / name)


@pytest.mark.parametrize('name', ['run/checkpoint_1/checkpoint', 'model.safetensors', 'model.msgpack', 'model.ckpt'])
def test_a_pointer_of_git_lfs_is_not_damaged(tmp_path, name):
    with Checkpointer({'w': np.ones(3)}, checkpoints_dir=tmp_path / 'run') as checkpointer:
        checkpointer.save({'w': np.ones(3)}, step=1)
    pointer = b'version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 12345\n' % (b'4d7a' * 16)
    (tmp_path / name).write_bytes(pointer)
    with pytest.raises(UnsupportedFormatError, match=r'Git LFS.*git lfs pull'):
        t5ckpt.open_checkpoint(tmp_path / name)


def test_a_directory_of_n5_is_named(tmp_path):
    spec = {'driver': 'n5', 'kvstore': {'driver': 'file', 'path': str(tmp_path / 'a.n5')}}
    ts.open(spec, create=True, dtype=ts.float32, shape=[10]).result().write(1).result()
    with pytest.raises(t5ckpt.errors.CheckpointNotFoundError, match=r'N5 arrays.* TensorStore reads them'):
        t5ckpt.open_checkpoint(tmp_path / 'a.n5')

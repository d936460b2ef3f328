"""Every dtype, codec, order, separator and byte order that others write as zarr v2 is read to the bit."""

import itertools
import json
import math
import pathlib

import jax
import numcodecs
import numpy as np
import pytest
import tensorstore as ts
from flax import serialization
from hypothesis import given, strategies as st
from support.bits import assert_same, random_bits
from support.options import with_options
from support.states import np_dtype

import t5ckpt

PLAIN = (
    'bool',
    'int8',
    'int16',
    'int32',
    'int64',
    'uint8',
    'uint16',
    'uint32',
    'uint64',
    'float16',
    'float32',
    'float64',
)
PLAIN += ('complex64', 'complex128')
SUB_BYTE = ('int2', 'int4', 'float4_e2m1fn')
EXTENDED = (
    'bfloat16',
    'float8_e3m4',
    'float8_e4m3b11fnuz',
    'float8_e4m3fn',
    'float8_e4m3fnuz',
    'float8_e5m2',
    'float8_e5m2fnuz',
)
EXTENDED += ('float8_e8m0fnu', *SUB_BYTE)
#: What TensorStore writes of zarr v2 (0.1.86).
COMPRESSORS = [
    None,
    *({'id': name, 'level': 1} for name in ('zlib', 'gzip', 'bz2', 'zstd')),
    *(
        {'id': 'blosc', 'cname': name, 'clevel': 5, 'shuffle': shuffle}
        for name in ('lz4', 'lz4hc', 'blosclz', 'zstd', 'zlib', 'snappy')
        for shuffle in (-1, 0, 1, 2)
    ),
]


def chains(dtype):
    """Codecs of numcodecs that lose nothing of a dtype: filters, then a compressor, in the order of encoding."""
    yield from (
        [codec] for codec in (numcodecs.LZ4(), numcodecs.LZMA(), numcodecs.Zstd(3, checksum=True), numcodecs.BZ2(1))
    )
    yield from ([numcodecs.Blosc('zstd', 3, shuffle)] for shuffle in range(-1, 3))
    yield from (
        [codec, numcodecs.Zlib(1)] for codec in (numcodecs.CRC32(), numcodecs.Adler32(), numcodecs.Fletcher32())
    )
    yield [numcodecs.GZip(1), numcodecs.LZ4()]
    yield [numcodecs.Shuffle(dtype.itemsize), numcodecs.LZ4()]
    if dtype.kind in 'iu':
        yield [numcodecs.Delta(dtype.str), numcodecs.Zstd(1)]
        yield [numcodecs.Delta(dtype.str), numcodecs.Shuffle(dtype.itemsize), numcodecs.Zlib(1)]
    if dtype.kind in 'iu' and dtype.itemsize < 8:
        yield [numcodecs.AsType(f'<{dtype.kind}8', dtype.str), numcodecs.LZ4()]
    if dtype.kind == 'b':
        yield [numcodecs.PackBits(), numcodecs.LZ4()]


LAYOUTS = [
    *itertools.product([((6, 5), (4, 3)), ((7,), (3,)), ((3, 4, 5), (2, 4, 2)), ((5, 4), (5, 4))], 'CF', './'),
    (((1, 1), (2, 3)), 'C', '.'),
    (((), ()), 'C', '.'),
]


def by_tensorstore(directory, values, chunks, order, separator, compressor, typestr):
    # TensorStore has one order for fewer than two dimensions.
    order = order if values.ndim > 1 else 'C'
    metadata = {'chunks': chunks, 'order': order, 'dimension_separator': separator, 'compressor': compressor}
    metadata |= {'shape': values.shape} | ({'dtype': typestr} if typestr else {})
    kvstore = {'driver': 'file', 'path': f'{directory}/', 'file_io_sync': False}
    spec = {'driver': 'zarr', 'kvstore': kvstore, 'metadata': metadata}
    ts.open(spec, create=True, dtype=ts.dtype(values.dtype.name)).result().write(values).result()


def by_numcodecs(directory, values, chunks, order, separator, codecs, typestr):
    *filters, compressor = [codec.get_config() for codec in codecs]
    metadata = {'zarr_format': 2, 'shape': values.shape, 'chunks': chunks, 'dtype': typestr, 'fill_value': None}
    metadata |= {'filters': filters or None, 'compressor': compressor, 'order': order, 'dimension_separator': separator}
    directory.mkdir(parents=True)
    (directory / '.zarray').write_text(json.dumps(metadata))
    dtype = np.dtype(typestr) if values.dtype.name in PLAIN else values.dtype
    grid = [range(math.ceil(size / chunk)) for size, chunk in zip(values.shape, chunks, strict=True)]
    for index in itertools.product(*grid):
        whole = np.zeros(chunks, dtype)
        part = values[tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in zip(index, chunks, strict=True))]
        whole[tuple(map(slice, part.shape))] = part
        data = np.frombuffer(whole.tobytes(order), dtype if dtype.name in PLAIN else np.uint8)
        for codec in codecs:
            data = codec.encode(data)
        path = directory / (separator.join(map(str, index)) or '0')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(memoryview(data).cast('B')))


def arrays():
    """Name, writer, dtype, type in ``.zarray`` and codecs of each array."""
    for name, compressor in itertools.product((*PLAIN, *EXTENDED), COMPRESSORS):
        label = '-'.join(map(str, compressor.values())) if compressor else 'plain'
        big = np_dtype(name).newbyteorder('>').str if name in PLAIN else None
        for typestr in dict.fromkeys([None, big]) if label in ('plain', 'zlib-1', 'blosc-lz4-5-1') else [None]:
            yield f'{name}-{label}-{typestr}', by_tensorstore, name, typestr, compressor
    for name in (*PLAIN, 'bfloat16', 'float8_e4m3fn'):
        dtype = np_dtype(name)
        typestrs = [f'|V{dtype.itemsize}'] if name not in PLAIN else [dtype.str]
        if name in ('int32', 'float32', 'complex64'):
            typestrs.append(dtype.newbyteorder('>').str)
        for typestr in typestrs:
            for number, codecs in enumerate(chains(np.dtype(typestr))):
                yield f'{name}-numcodecs-{number}-{typestr}', by_numcodecs, name, typestr, codecs


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """A run whose only step has them all, and their values."""
    run, values, tree = tmp_path_factory.mktemp('codecs'), {}, {}
    rng = np.random.default_rng(0)
    for (name, write, dtype, typestr, codecs), layout in zip(arrays(), itertools.cycle(LAYOUTS)):
        (shape, chunks), order, separator = layout
        values[name] = random_bits(rng, shape, np_dtype(dtype))
        directory = pathlib.Path(run, 'checkpoint_1', f'target.{len(values)}')
        write(directory, values[name], chunks, order, separator, codecs, typestr)
        metadata = json.loads((directory / '.zarray').read_text())
        tree[name] = {
            'driver': 'zarr',
            'dtype': dtype,
            'kvstore': {'driver': 'file', 'path': directory.name},
            'metadata': {key: metadata[key] for key in ('shape', 'chunks', 'compressor')},
        }
    data = serialization.msgpack_serialize({'version': 3, 'optimizer': {'target': tree}})
    (run / 'checkpoint_1' / 'checkpoint').write_bytes(data)
    return run, values


def check(found, values):
    assert found.keys() == values.keys()
    for name, wanted in values.items():
        assert_same(found[name], wanted, name)


@pytest.mark.slow
@pytest.mark.parametrize('options', [{}, {'mmap': True}, {'verify': 'full'}])
def test_restore(written, options):
    run, values = written
    template = {'target': {name: np.zeros_like(leaf) for name, leaf in values.items()}}
    with t5ckpt.Checkpointer(template, checkpoints_dir=run, **with_options(**options)) as ck:
        check(ck.restore()['target'], values)


def test_restore_to_devices(written):
    run, values = written
    values = {name: leaf for name, leaf in values.items() if jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype}
    template = {'target': {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in values.items()}}
    with t5ckpt.Checkpointer(template, checkpoints_dir=run) as ck:
        check(ck.restore(strict='contains')['target'], values)


@pytest.mark.parametrize('mmap', [False, True])
def test_load(written, mmap):
    run, values = written
    check(t5ckpt.load_t5x_checkpoint(run, options=t5ckpt.CheckpointerOptions(mmap=mmap))['target'], values)


def test_verify(written):
    run, _ = written
    assert t5ckpt.verify(run, full=True).ok


@pytest.fixture(scope='module')
def view(written):
    return t5ckpt.open_checkpoint(written[0])


# Of an axis: where it begins as a part of the size, how many, and each of how many; or one index.
AXIS = st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 5), st.integers(1, 3), st.booleans())


@given(parts=st.lists(st.tuples(st.integers(0, 10_000), st.tuples(AXIS, AXIS, AXIS)), min_size=1, max_size=8))
def test_slices(written, view, parts):
    _, values = written
    for number, axes in parts:
        name = sorted(values)[number % len(values)]
        index = []
        for size, (begin, count, step, is_one) in zip(values[name].shape, axes, strict=False):
            start = int(begin * size)
            index.append(start if is_one else slice(start, start + count, step))
        assert_same(view[f'target/{name}'][tuple(index)], values[name][tuple(index)], f'{name}{index}')


@pytest.mark.slow
def test_in_a_bucket(written, bucket):
    """Of each dtype and of each codec some."""
    run, values = written
    url = bucket.url()
    kept = {name: leaf for number, (name, leaf) in enumerate(values.items()) if number % 19 == 0}
    template = {'target': {name: np.zeros_like(leaf) for name, leaf in kept.items()}}
    directories = {f'target.{number + 1}' for number, name in enumerate(values) if name in kept}
    for path in (run / 'checkpoint_1').rglob('*'):
        key = path.relative_to(run).as_posix()
        if path.is_file() and (path.name == 'checkpoint' or key.split('/')[1] in directories):
            bucket.put(f'{url}/{key}', path.read_bytes())
    with t5ckpt.Checkpointer(template, checkpoints_dir=url) as ck:
        check(ck.restore(strict='contains')['target'], kept)
    view = t5ckpt.open_checkpoint(url)
    for name, leaf in kept.items():
        assert_same(view[f'target/{name}'][...], leaf, name)
        if leaf.ndim:
            assert_same(view[f'target/{name}'][1:], leaf[1:], name)


@pytest.mark.parametrize('compression', [None, 'auto', 'lz4', 'zstd', 'gzip', 'blosc'])
def test_tensorstore_reads_what_we_write(tmp_path, compression):
    """Every dtype that it knows, in chunks that the array does not fill."""
    rng = np.random.default_rng(0)
    state = {name: random_bits(rng, (50, 33), np_dtype(name)) for name in (*PLAIN, *EXTENDED)}
    state['order F'] = np.asfortranarray(random_bits(rng, (50, 33), np.float32))
    options = {'compression': compression, 'inline_bytes': 0, 'chunk_bytes': 1000}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, **with_options(**options)) as ck:
        ck.save(state, step=1)
        check(ck.restore(), state)
    optimizer = serialization.msgpack_restore((tmp_path / 'checkpoint_1' / 'checkpoint').read_bytes())['optimizer']
    for name, values in state.items():
        path = tmp_path / 'checkpoint_1' / optimizer[name]['kvstore']['path']
        found = ts.open({'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': f'{path}/'}}).result().read().result()
        # T5X reads uint16 as bfloat16.
        assert_same(found, values.astype(np.uint32) if name == 'uint16' else values, name)


def test_sub_byte_values_have_one_form_on_disk(tmp_path):
    """A byte each, with the bits that TensorStore writes."""
    for name in SUB_BYTE:
        dtype = np_dtype(name)
        values = np.arange(4 if name == 'int2' else 16, dtype=np.uint8)
        values = (
            values.view(dtype) if name == 'float4_e2m1fn' else (values.astype(np.int8) - values.size // 2).astype(dtype)
        )
        by_tensorstore(tmp_path / name, values, values.shape, 'C', '.', None, None)
        with t5ckpt.Checkpointer(
            {'w': values}, checkpoints_dir=tmp_path / f'{name}-run', options=t5ckpt.CheckpointerOptions(inline_bytes=0)
        ) as ck:
            ck.save({'w': values}, step=1)
        assert (tmp_path / f'{name}-run/checkpoint_1/w/0').read_bytes() == (tmp_path / name / '0').read_bytes()

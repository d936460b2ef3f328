"""Chunks read into buffers: the same bits as TensorStore's, each byte once, verified at one fetch, clear words for damage."""

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import resource

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from support import partitioner
from support.bits import assert_same, random_bits
from support.facts import as_t5x_writes
from support.options import with_options

import t5ckpt
from t5ckpt import errors, steps
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box
from t5ckpt.format.dtypes import zarr_typestr
from t5ckpt.format.file_checksums import FileChecksums, entry_of
from t5ckpt.reading.array_reader import open_array
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.identity import Identity
from t5ckpt.storage import open_storage

DTYPES = ('float32', 'uint8', 'complex128', 'bool', 'bfloat16', 'float8_e4m3fn', 'int64')


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def store(root: pathlib.Path, values: np.ndarray, chunks, **metadata) -> StoredArray:
    """Writes an array with TensorStore, which this code shares nothing with."""
    spec = {
        'driver': 'zarr',
        'kvstore': {'driver': 'file', 'path': f'{root}/a/'},
        'metadata': {'shape': list(values.shape), 'chunks': list(chunks), 'dtype': zarr_typestr(values.dtype)}
        | {'compressor': None}
        | metadata,
        'store_data_equal_to_fill_value': True,
    }
    ts.open(spec, create=True, delete_existing=True).result()[...].write(values).result()
    metadata = {'chunks': list(chunks), 'compressor': spec['metadata']['compressor']}
    return StoredArray('a', values.shape, values.dtype, values.dtype, metadata)


def read(root, array: StoredArray, boxes, dtype=None, block=None, gap=None, verified=False) -> dict:
    """Reads boxes from a directory or a URL, with blocks and gaps of these sizes."""
    wanted = array.dtype if dtype is None else dtype
    buffers = {box: np.empty(box.shape, wanted) for box in boxes}
    storage = open_storage(root)
    keys = [key for key, _ in storage.walk('')]
    checksums = FileChecksums({key: entry_of(storage.read(key)) for key in keys}) if verified else None
    files = CheckpointFiles.at(storage, '', checksums)
    if block is not None:
        files.block_bytes, files.gap_bytes, files.task_bytes = block, gap, 4 * block
    for task in reversed(open_array(files, array, 'a').tasks(buffers)):
        task()
    return buffers


@st.composite
def cases(draw):
    rank = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=rank, max_size=rank)))
    chunks = tuple(draw(st.integers(1, size + 2)) for size in shape)
    cuts = [sorted(draw(st.sets(st.integers(1, max(1, size - 1)), max_size=2)) - {size}) for size in shape]
    edges = [list(zip((0, *cut), (*cut, size), strict=True)) for cut, size in zip(cuts, shape, strict=True)]
    boxes = [Box()]
    for axis in edges:
        boxes = [Box((*box, ends)) for box in boxes for ends in axis]
    kept = draw(st.sets(st.sampled_from(boxes), min_size=1))
    separator = draw(st.sampled_from('./'))
    return shape, chunks, sorted(kept), draw(st.sampled_from(DTYPES)), separator


@given(
    case=cases(),
    gap=st.sampled_from([0, 16, 512]),
    block=st.sampled_from([16, 64, 2**20]),
    verified=st.booleans(),
    order=st.sampled_from('CF'),
    swapped=st.booleans(),
    place=st.sampled_from(['disk', 'memory']),
)
def test_any_boxes_of_any_grid(tmp_path_factory, case, gap, block, verified, order, swapped, place):
    """Blocks and gaps of every size give what TensorStore wrote, also for parts of the array, in either order of bytes."""
    shape, chunks, boxes, name, separator = case
    root = tmp_path_factory.mktemp('chunks')
    values = random_bits(np.random.default_rng(math.prod(shape)), shape, dtype_of(name))
    # TensorStore writes C for an array whose orders are the same.
    fields = {'order': order if len(shape) > 1 else 'C', 'dimension_separator': separator}
    if swapped and values.dtype.isbuiltin == 1 and values.dtype.kind != 'b':
        fields['dtype'] = values.dtype.newbyteorder('>').str
    array = store(root, values, chunks, **fields)
    if place == 'memory':
        target = open_storage(f'memory://{root.name}')
        for file in root.rglob('*'):
            if file.is_file():
                target.write(str(file.relative_to(root)), file.read_bytes())
    where = str(root) if place == 'disk' else f'memory://{root.name}'
    for box, buffer in read(where, array, boxes, block=block, gap=gap, verified=verified).items():
        assert_same(buffer, values[box.slices])


@given(case=cases(), data=st.data(), codec=st.sampled_from([None, {'id': 'zstd', 'level': 1}]))
def test_any_slices(tmp_path_factory, case, data, codec):
    shape, chunks, _, name, _ = case
    root = tmp_path_factory.mktemp('chunks')
    values = random_bits(np.random.default_rng(math.prod(shape)), shape, dtype_of(name))
    array = store(root, values, chunks, compressor=codec)
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    picked = [range(*each, data.draw(st.integers(1, 4))) for each in bounds]
    opened = open_array(CheckpointFiles.at(open_storage(str(root)), ''), array, 'a')
    assert_same(opened.read(picked), values[tuple(slice(each.start, each.stop, each.step) for each in picked)])


BLOSC = [
    {'id': 'blosc', 'cname': cname, 'clevel': level, 'shuffle': shuffle, 'blocksize': 0}
    for cname, level, shuffle in [
        ('lz4', 3, 2),
        ('zstd', 3, 2),
        ('lz4', 5, -1),
        ('blosclz', 9, 1),
        ('zlib', 1, 0),
        ('lz4', 0, 2),
    ]
]


@given(case=cases(), codec=st.sampled_from(BLOSC), casts=st.booleans())
def test_any_boxes_of_chunks_of_blosc(tmp_path_factory, case, codec, casts):
    """Decoded into the buffers, or through memory, and cast on the way."""
    shape, chunks, boxes, name, separator = case
    root = tmp_path_factory.mktemp('chunks')
    values = random_bits(np.random.default_rng(math.prod(shape)), shape, dtype_of(name))
    if casts:
        values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    array = store(root, values, chunks, dimension_separator=separator, compressor=codec)
    wanted = dtype_of('bfloat16') if casts else None
    for box, buffer in read(str(root), array, boxes, wanted).items():
        assert_same(buffer, values[box.slices] if wanted is None else values[box.slices].astype(wanted))


LZ4 = {'id': 'blosc', 'cname': 'lz4', 'clevel': 3, 'shuffle': 2, 'blocksize': 0}


def test_chunks_of_blosc_are_used_whatever_the_order_of_threads(tmp_path):
    """More chunks than cores, read by many threads, none twice."""
    values = np.arange(64 * 4096, dtype=np.int32).reshape(64, 4096)
    array = store(tmp_path, values, (1, 4096), compressor=LZ4)
    buffers = {Box.whole((64, 4096)): np.zeros((64, 4096), np.int32)}
    files = CheckpointFiles.at(open_storage(str(tmp_path)), '')
    files.task_bytes = 1
    tasks = open_array(files, array, 'a').tasks(buffers)
    assert len(tasks) == 64
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for future in [pool.submit(task) for task in tasks]:
            future.result()
    assert_same(buffers[Box.whole((64, 4096))], values)


@pytest.mark.parametrize(
    'change',
    [
        lambda data: b'',
        lambda data: data[:15],
        lambda data: data[:-1],
        lambda data: data + b'x',
        lambda data: data + bytes(10**6),
        lambda data: data[:4] + b'\xff\xff\xff\x7f' + data[8:],
        lambda data: data[:4] + bytes(4) + data[8:],
        lambda data: data[:12] + b'\xff\xff\xff\x7f' + data[16:],
        lambda data: data[:8] + b'\xff\xff\xff\x7f' + data[12:],
        lambda data: b'\x07' + data[1:],
        lambda data: data[:16] + bytes([byte ^ 0xFF for byte in data[16:]]),
    ],
)
def test_a_damaged_chunk_of_blosc(tmp_path, change):
    """Whatever the header claims, the error says that the chunk is damaged, and no memory is allocated for it."""
    values = np.zeros((256, 256), np.float32)
    array = store(tmp_path, values, (256, 256), compressor=LZ4)
    chunk = tmp_path / 'a' / '0.0'
    chunk.write_bytes(change(chunk.read_bytes()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(errors.CorruptCheckpointError, match=r'a: .*0\.0'):
        read(str(tmp_path), array, [Box.whole((256, 256))])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@given(case=cases())
def test_casting_on_the_way(tmp_path_factory, case):
    shape, chunks, boxes, _, _ = case
    root = tmp_path_factory.mktemp('chunks')
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    array = store(root, values, chunks)
    for box, buffer in read(str(root), array, boxes, dtype_of('bfloat16')).items():
        assert_same(buffer, values[box.slices].astype(ml_dtypes.bfloat16))


def test_gaps_between_rows_are_not_read(tmp_path):
    """Of a fourth of the columns, few more bytes than of these are read."""
    values = np.arange(100 * 65536, dtype=np.float32).reshape(100, 65536)
    array = store(tmp_path, values, values.shape)
    boxes = [Box(((0, 100), (0, 8192))), Box(((0, 100), (32768, 40960)))]
    before = bytes_read()
    found = read(str(tmp_path), array, boxes)
    assert bytes_read() - before < 1.1 * values.nbytes / 4
    for box, buffer in found.items():
        assert_same(buffer, values[box.slices])


# --- through the public interface --------------------------------------------------------------------------------------


def columns(shape, dtype=np.float32):
    sharding = NamedSharding(partitioner.mesh((8,), ('x',)), PartitionSpec(None, 'x'))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@pytest.fixture
def run(tmp_path):
    """A directory with one step: one leaf, saved by rows over eight devices."""
    values = np.random.default_rng(2).standard_normal((64, 2048)).astype(np.float32)
    by_rows = NamedSharding(partitioner.mesh((8,), ('x',)), PartitionSpec('x'))
    tree = {'target': {'w': jax.device_put(values, by_rows)}}
    with t5ckpt.Checkpointer(tree, checkpoints_dir=str(tmp_path)) as ck:
        ck.save(tree, step=1)
    return tmp_path, values


def restore(directory, template, **options):
    with t5ckpt.Checkpointer(
        {'target': {'w': template}}, checkpoints_dir=str(directory), **with_options(**options)
    ) as ck:
        return ck.restore()['target']['w']


def test_to_another_sharding_and_dtype(run):
    directory, values = run
    assert_same(np.asarray(restore(directory, columns(values.shape))), values)
    half = restore(directory, columns(values.shape, ml_dtypes.bfloat16), restore_dtype='bfloat16')
    assert_same(np.asarray(half), values.astype(ml_dtypes.bfloat16))


def bytes_read() -> int:
    """What this process has asked the kernel for so far."""
    return int(pathlib.Path('/proc/self/io').read_text().splitlines()[0].split()[1])


def test_each_byte_is_read_once(run):
    """However many devices want a part of each chunk."""
    directory, values = run
    restore(directory, columns(values.shape))
    before = bytes_read()
    restore(directory, columns(values.shape))
    assert values.nbytes < bytes_read() - before < 1.05 * values.nbytes


def open_below(directory):
    """The files there which this process has open."""
    links = []
    for fd in os.listdir('/proc/self/fd'):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f'/proc/self/fd/{fd}'))
    return [link for link in links if link.startswith(f'{directory}/')]


@pytest.mark.parametrize(
    ('damage', 'words'),
    [
        (lambda file: file.unlink(), r'target/w: .*2\.0 is missing'),
        (lambda file: os.truncate(file, 100), r'target/w: .*2\.0 has 100 bytes, expected 65,536'),
        (lambda file: (file.unlink(), os.mkfifo(file)), r'target/w: .*2\.0 is not a regular file'),
        (lambda file: (file.unlink(), file.mkdir()), r'target/w: .*2\.0 is not a regular file'),
    ],
)
def test_damage_is_named(run, damage, words):
    """Nor does it leave files open, those before it and those that were asked for ahead."""
    directory, values = run
    damage(directory / 'checkpoint_1' / 'target.w' / '2.0')
    with pytest.raises(errors.CorruptCheckpointError, match=words):
        restore(directory, columns(values.shape))
    assert open_below(directory) == []


def test_a_task_of_thousands_of_files_keeps_few_open(tmp_path):
    values = np.arange(2000, dtype=np.int64).reshape(2000, 1)
    array, box = store(tmp_path, values, (1, 1)), Box(((0, 2000), (0, 1)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is for the number of a descriptor.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir('/proc/self/fd'))) + 12, hard))
    try:
        assert_same(read(str(tmp_path), array, [box])[box], values)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_below(tmp_path) == []


def test_deleted_while_it_is_read(run):
    """Retention of another process: not damage."""
    directory, values = run

    tree = {'target': {'w': columns(values.shape)}}
    (directory / 'checkpoint_1' / 'target.w' / '2.0').unlink()
    ck = t5ckpt.Checkpointer(tree, checkpoints_dir=directory)
    with pytest.raises(errors.CorruptCheckpointError, match='missing'):
        ck.restore()
    identity = Identity.now(steps.locate(directory))
    (directory / 'checkpoint_1').rename(directory / 'checkpoint_1.deleted-1')
    with (
        pytest.raises(errors.CheckpointNotFoundError, match='was deleted while it was being read'),
        identity.reading(),
    ):
        raise errors.CorruptCheckpointError('target/w: the chunk is missing')


def test_a_fifo_for_metadata_does_not_block(run):
    directory, values = run
    as_t5x_writes(directory / 'checkpoint_1')
    metadata = directory / 'checkpoint_1' / 'target.w' / '.zarray'
    metadata.unlink()
    os.mkfifo(metadata)
    with pytest.raises(errors.CorruptCheckpointError, match='not a regular file'):
        restore(directory, columns(values.shape))


@pytest.mark.parametrize('chunks', ['[1000000000000, 2048]', '[4611686018427387904, 2048]', '[64, 1e30]', '[' * 5000])
def test_metadata_with_wrong_values(run, chunks):
    """An error at once, not a walk over the blocks of a chunk of petabytes."""
    directory, values = run
    as_t5x_writes(directory / 'checkpoint_1')
    metadata = directory / 'checkpoint_1' / 'target.w' / '.zarray'
    text = json.loads(metadata.read_text())
    metadata.write_text(json.dumps(text | {'chunks': 'CHUNKS'}).replace('"CHUNKS"', chunks))
    with pytest.raises(errors.CorruptCheckpointError):
        restore(directory, columns(values.shape))


def test_a_file_cut_off_while_it_is_read(tmp_path):
    values = np.zeros((2, 1024), np.float32)
    files = CheckpointFiles.at(open_storage(str(tmp_path)), '')
    array = open_array(files, store(tmp_path, values, values.shape), 'w')

    def cut_off():
        with files.opened('a/0.0', 'w') as opened:
            os.truncate(tmp_path / 'a' / '0.0', 4096)
            opened.read(0, 8192)

    with pytest.raises(errors.CorruptCheckpointError, match=r'w: .*0\.0 became shorter while it was read'):
        cut_off()
    with pytest.raises(errors.CorruptCheckpointError, match='has 4,096 bytes, expected 8,192'):
        array.read([range(2), range(1024)])


def test_a_grid_of_millions_needs_files(tmp_path):
    """A forged grid is an error before a list of its chunks is made; a box of it is read."""
    array = StoredArray('a', (2**20, 4), np.dtype(np.float32), np.dtype(np.float32), {'chunks': [1, 4]})
    (tmp_path / 'a').mkdir()
    text = {'zarr_format': 2, 'shape': [2**20, 4], 'chunks': [1, 4], 'dtype': '<f4', 'order': 'C', 'compressor': None}
    (tmp_path / 'a' / '.zarray').write_text(json.dumps(text | {'filters': None, 'fill_value': None}))
    with pytest.raises(errors.CorruptCheckpointError, match='1,048,576 chunks, and there are 1 files'):
        read(str(tmp_path), array, [Box(((0, 2**10), (0, 4)))])


@pytest.mark.parametrize('codec', [None, {'id': 'zstd', 'level': 1}, LZ4])
@pytest.mark.parametrize('fill', [1.5, 'NaN', '-Infinity'])
def test_absent_chunks_of_other_writers_are_their_fill_value(tmp_path, codec, fill):
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    array = store(tmp_path, values, (4, 4), fill_value=fill, compressor=codec)
    (tmp_path / 'a' / '1.0').unlink()
    wanted = values.copy()
    wanted[4:, :4] = float(fill)
    box = Box(((2, 8), (0, 8)))
    assert_same(read(str(tmp_path), array, [box])[box], wanted[2:])
    half = dtype_of('bfloat16')
    assert_same(read(str(tmp_path), array, [box], half)[box], wanted[2:].astype(half))
    with pytest.raises(errors.CorruptCheckpointError, match=r'a/1\.0 is missing'):
        read(str(tmp_path), dataclasses.replace(array, stores_all=True), [box])

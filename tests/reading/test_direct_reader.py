"""Chunk files read straight into buffers: the same bits as TensorStore's, each byte once, and clear words for damage."""

import concurrent.futures
import contextlib
import ctypes
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

import t5ckpt
from t5ckpt import errors, steps
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box
from t5ckpt.format.dtypes import zarr_typestr
from t5ckpt.reading.identity import Identity
from t5ckpt.reading.local.chunk_file import ChunkFile, Limits, read_runs
from t5ckpt.reading.local.direct_reader import DirectReader
from t5ckpt.reading.local.native_chunks import is_read_natively

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


def read(root: pathlib.Path, array: StoredArray, boxes, dtype=None, limits=None) -> dict:
    wanted = array.dtype if dtype is None else dtype
    buffers = {box: np.empty(box.shape, wanted) for box in boxes}
    opened = DirectReader(str(root), limits).open(array, 'a', 'a', boxes)
    assert opened is not None
    for task in reversed(opened.tasks(buffers)):
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


@given(case=cases(), least_run=st.sampled_from([1, 16, 512]), block=st.sampled_from([16, 64, 2**20]))
def test_any_boxes_of_any_grid(tmp_path_factory, case, least_run, block):
    """Runs, scratch and blocks of every size give what TensorStore wrote, also for parts of the array."""
    shape, chunks, boxes, name, separator = case
    root = tmp_path_factory.mktemp('direct')
    values = random_bits(np.random.default_rng(math.prod(shape)), shape, dtype_of(name))
    array = store(root, values, chunks, dimension_separator=separator)
    limits = Limits(task=4 * block, scratch=block, scatter=block, min_run=least_run)
    for box, buffer in read(root, array, boxes, limits=limits).items():
        assert_same(buffer, values[box.slices])


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
    root = tmp_path_factory.mktemp('direct')
    values = random_bits(np.random.default_rng(math.prod(shape)), shape, dtype_of(name))
    if casts:
        values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    array = store(root, values, chunks, dimension_separator=separator, compressor=codec)
    wanted = dtype_of('bfloat16') if casts else None
    for box, buffer in read(root, array, boxes, wanted).items():
        assert_same(buffer, values[box.slices] if wanted is None else values[box.slices].astype(wanted))


LZ4 = {'id': 'blosc', 'cname': 'lz4', 'clevel': 3, 'shuffle': 2, 'blocksize': 0}


def test_chunks_of_blosc_are_used_whatever_the_order_of_threads(tmp_path):
    """More chunks than cores, read by many threads, none twice."""
    values = np.arange(64 * 4096, dtype=np.int32).reshape(64, 4096)
    array = store(tmp_path, values, (1, 4096), compressor=LZ4)
    buffers = {Box.whole((64, 4096)): np.zeros((64, 4096), np.int32)}
    opened = DirectReader(str(tmp_path), Limits(task=1)).open(array, 'a', 'a', buffers)
    assert opened is not None
    tasks = opened.tasks(buffers)
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
        read(tmp_path, array, [Box.whole((256, 256))])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@given(case=cases())
def test_casting_on_the_way(tmp_path_factory, case):
    shape, chunks, boxes, _, _ = case
    root = tmp_path_factory.mktemp('direct')
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    array = store(root, values, chunks)
    for box, buffer in read(root, array, boxes, dtype_of('bfloat16')).items():
        assert_same(buffer, values[box.slices].astype(ml_dtypes.bfloat16))


def test_rows_longer_than_a_system_call_takes(tmp_path):
    """2,500 rows a buffer are more places than one preadv has room for; gaps between them are not read."""
    values = np.arange(2500 * 512, dtype=np.float32).reshape(2500, 512)
    array = store(tmp_path, values, values.shape)
    boxes = [Box(((0, 2500), (0, 128))), Box(((0, 2500), (256, 512)))]
    for box, buffer in read(tmp_path, array, boxes).items():
        assert_same(buffer, values[box.slices])


def test_short_reads_are_continued(tmp_path):
    """A system call may stop anywhere, also within a place."""
    (tmp_path / 'f').write_bytes(bytes(range(200)))

    def short(fd, vector, count, offset):
        del count
        address, length = (ctypes.c_int64 * 2).from_address(vector)
        return os.preadv(fd, [(ctypes.c_char * min(length, 7)).from_address(address)], offset)

    out = np.zeros(100, np.uint8)
    lengths = np.array([30, 20, 50])
    places = out.ctypes.data + np.array([70, 0, 20])
    fd = os.open(tmp_path / 'f', os.O_RDONLY)
    read_runs(fd, 50, places, lengths, short)
    assert bytes(out[70:100]) + bytes(out[:70]) == bytes(range(50, 150))
    with pytest.raises(EOFError):
        read_runs(fd, 150, places, lengths, short)
    os.close(fd)


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
    with t5ckpt.Checkpointer({'target': {'w': template}}, checkpoints_dir=str(directory), **options) as ck:
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
        (lambda file: file.unlink(), r'target/w: the chunk .*2\.0 is missing'),
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
        assert_same(read(tmp_path, array, [box])[box], values)
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
    metadata = directory / 'checkpoint_1' / 'target.w' / '.zarray'
    metadata.unlink()
    os.mkfifo(metadata)
    with pytest.raises(errors.CorruptCheckpointError, match='not a regular file'):
        restore(directory, columns(values.shape))


@pytest.mark.parametrize('chunks', ['[1000000000000, 2048]', '[4611686018427387904, 2048]', '[64, 1e30]', '[' * 5000])
def test_metadata_with_wrong_values(run, chunks):
    """An error at once, not a walk over the blocks of a chunk of petabytes."""
    directory, values = run
    metadata = directory / 'checkpoint_1' / 'target.w' / '.zarray'
    text = json.loads(metadata.read_text())
    metadata.write_text(json.dumps(text | {'chunks': 'CHUNKS'}).replace('"CHUNKS"', chunks))
    with pytest.raises(errors.CorruptCheckpointError):
        restore(directory, columns(values.shape))


def test_a_file_cut_off_while_it_is_read(tmp_path):
    path = tmp_path / '0.0'
    path.write_bytes(bytes(8192))
    fd = os.open(path, os.O_RDONLY)
    os.truncate(path, 4096)
    file, out = ChunkFile(fd, str(path), 'w'), np.empty(8192, np.uint8)
    for read in (
        lambda: file.read(out.data, 0),
        lambda: file.read_runs(0, out.ctypes.data + np.array([0, 4096]), np.array([4096, 4096])),
    ):
        with pytest.raises(errors.CorruptCheckpointError, match=r'w: .*became shorter while it was read'):
            read()
    file.close()


def test_a_grid_of_millions_goes_to_tensorstore(tmp_path):
    array = StoredArray('a', (2**20, 4), np.dtype(np.float32), np.dtype(np.float32), {'chunks': [1, 4]})
    (tmp_path / 'a').mkdir()
    text = {'zarr_format': 2, 'shape': [2**20, 4], 'chunks': [1, 4], 'dtype': '<f4', 'order': 'C', 'compressor': None}
    (tmp_path / 'a' / '.zarray').write_text(json.dumps(text | {'filters': None, 'fill_value': None}))
    reader = DirectReader(str(tmp_path))
    assert reader.open(array, 'a', 'a', [Box(((0, 2**20), (0, 4)))]) is None
    assert reader.open(array, 'a', 'a', [Box(((0, 2**10), (0, 4)))]) is not None
    assert not is_read_natively(dataclasses.replace(array, metadata={'compressor': {'id': 'zstd'}}))

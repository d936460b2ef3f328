"""Mapped restore: no copy, the right values, nothing reaches the files, and everything else is read as ever."""

import functools
import gc
import json
import os
import pathlib
import signal
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from flax import serialization
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from support import forked, independent_reader, partitioner, states
from support.bits import assert_same, random_bits
from support.facts import as_t5x_writes
from support.options import with_options

import t5ckpt
from t5ckpt import errors
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box
from t5ckpt.reading.array_reader import open_array
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.chunks import ChunkedArray
from t5ckpt.reading.mapped import FileMap, max_maps
from t5ckpt.storage import open_storage

pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='looks into /proc')

PAGE = 4096
W = np.arange(512 * 256, dtype=np.float32).reshape(512, 256)
# So tall that only its first axis is divided into chunks.
TALL = W.reshape(4096, 32)


def sharded(*spec, kind=None):
    mesh = partitioner.mesh((8,), ('x',))
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind)


def save(run_dir, tree, **options) -> pathlib.Path:
    with t5ckpt.Checkpointer(tree, checkpoints_dir=str(run_dir), **with_options(inline_bytes=0, **options)) as ck:
        ck.save(tree, step=1)
    return run_dir / 'checkpoint_1'


def restore(run_dir, template, mmap=True, **options):
    with t5ckpt.Checkpointer(template, checkpoints_dir=str(run_dir), **with_options(mmap=mmap, **options)) as ck:
        return ck.restore()


def like(shape, sharding, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def maps() -> list[tuple[int, int, str]]:
    """The process's maps of files: (start, stop, path)."""
    found = []
    for line in pathlib.Path('/proc/self/maps').read_text().splitlines():
        span, _, _, _, _, *path = line.split(maxsplit=5)
        start, stop = (int(end, 16) for end in span.split('-'))
        found.append((start, stop, path[0] if path else ''))
    return found


def file_at(address: int) -> str:
    """The file that is mapped at an address, or ''."""
    return next((path for start, stop, path in maps() if start <= address < stop), '')


def address(array) -> int:
    return array.unsafe_buffer_pointer() if isinstance(array, jax.Array) else array.ctypes.data


def is_mapped(array) -> bool:
    return '/checkpoint_1/' in file_at(address(array))


def maps_below(run_dir) -> int:
    gc.collect()
    return sum(path.startswith(str(run_dir)) for _, _, path in maps())


def files_of(step_dir) -> dict[str, bytes]:
    return {str(p.relative_to(step_dir)): p.read_bytes() for p in step_dir.rglob('*') if p.is_file()}


def rewrite(step_dir, leaf, values, **metadata) -> None:
    """Replaces a stored leaf by one with other zarr metadata, in a step as T5X writes it."""
    as_t5x_writes(step_dir)
    directory = step_dir / leaf
    spec = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': f'{directory}/'}}
    spec |= {'metadata': {'shape': list(values.shape), 'compressor': None, 'dtype': '<f4'} | metadata}
    store = ts.open(spec | {'store_data_equal_to_fill_value': True}, create=True, delete_existing=True).result()
    store.write(values).result()


# ---- without a copy ----


@pytest.mark.parametrize('spec', [('x', None), (None, 'x'), (None, None)], ids=['rows', 'columns', 'replicated'])
def test_each_shard_is_its_chunk_file(run_dir, spec):
    step_dir = save(run_dir, {'w': jax.device_put(W, sharded(*spec))})
    restored = restore(run_dir, {'w': like(W.shape, sharded(*spec))})['w']
    assert_same(restored, W)
    assert restored.sharding == sharded(*spec)
    for index, shard in enumerate(restored.addressable_shards):
        cell = {('x', None): f'{index}.0', (None, 'x'): f'0.{index}', (None, None): '0.0'}[spec]
        start = shard.data.unsafe_buffer_pointer()
        assert file_at(start) == str(step_dir / 'w' / cell)
        assert any(start == begin for begin, _, _ in maps())


def test_an_array_without_a_sharding(run_dir):
    save(run_dir, {'w': W})
    restored = restore(run_dir, {'w': jax.numpy.zeros(W.shape)})['w']
    assert not restored.committed
    assert is_mapped(restored)
    assert_same(restored, W)


def test_numpy(run_dir):
    save(run_dir, {'w': W})
    restored = restore(run_dir, {'w': np.zeros(W.shape, np.float32)})['w']
    assert is_mapped(restored)
    assert_same(restored, W)


def test_not_without_being_asked(run_dir):
    save(run_dir, {'w': W})
    assert not is_mapped(restore(run_dir, {'w': W}, mmap=False)['w'])
    with t5ckpt.Checkpointer({'w': W}, checkpoints_dir=str(run_dir)) as ck:
        assert not is_mapped(ck.restore()['w'])
    assert not is_mapped(t5ckpt.load_t5x_checkpoint(run_dir)['w'])
    assert not is_mapped(t5ckpt.open_checkpoint(run_dir)['w'].get())


def test_shards_of_other_shapes_than_the_chunks(run_dir):
    """Rows of one file: half of it, several of them, and rows that begin where XLA takes no buffer; rows of several are read."""
    odd = np.arange(24, dtype=np.float32).reshape(8, 3)
    save(run_dir, {'w': W, 'by_rows': jax.device_put(W, sharded('x')), 'odd': odd})
    two = NamedSharding(partitioner.mesh((2,), ('x',)), PartitionSpec('x'))
    goal = {'w': like(W.shape, two), 'by_rows': like(W.shape, two), 'odd': like((8, 3), sharded('x'))}
    restored = restore(run_dir, goal)
    assert all(is_mapped(shard.data) for shard in restored['w'].addressable_shards)
    assert not any(is_mapped(shard.data) for shard in restored['by_rows'].addressable_shards)
    assert_same(restored['w'], W)
    assert_same(restored['by_rows'], W)
    assert_same(restored['odd'], odd)
    save(run_dir / 'whole', {'w': W})
    restored = restore(run_dir / 'whole', {'w': like(W.shape, sharded('x'))})['w']
    assert len({file_at(address(shard.data)) for shard in restored.addressable_shards}) == 1
    assert_same(restored, W)


@pytest.mark.parametrize('name', [*states.JAX_DTYPES, *states.WIDE_DTYPES])
def test_every_dtype(run_dir, name):
    values = random_bits(np.random.default_rng(0), (64, 128), states.np_dtype(name))
    save(run_dir, {'w': values})
    goals = [np.zeros_like(values)]
    if name in states.JAX_DTYPES:
        goals.append(like(values.shape, sharded('x'), values.dtype))
    for goal in goals:
        assert_same(restore(run_dir, {'w': goal})['w'], values)
    assert_same(t5ckpt.load_t5x_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(mmap=True))['w'], values)
    assert_same(
        t5ckpt.open_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(mmap=True))['w'][3:9, ::-2],
        values[3:9, ::-2],
    )
    assert is_mapped(t5ckpt.load_t5x_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(mmap=True))['w']) == (
        name not in {'uint2', 'uint4', 'uint16'}
    )


def test_keys(run_dir):
    keys = jax.random.split(jax.random.key(7), 1000)
    save(run_dir, {'keys': keys})
    restored = restore(run_dir, {'keys': jax.ShapeDtypeStruct(keys.shape, keys.dtype)})['keys']
    assert_same(jax.random.key_data(restored), jax.random.key_data(keys))


def test_bfloat16_of_version_2(run_dir):
    """Stored as uint16."""
    values = W.astype(ml_dtypes.bfloat16)
    step_dir = save(run_dir, {'w': values})
    contents = independent_reader.manifest(step_dir)
    contents['version'] = 2
    contents['optimizer']['w']['dtype'] = 'uint16'
    del contents['t5ckpt']
    (step_dir / 'checkpoint').write_bytes(serialization.msgpack_serialize(contents))
    (step_dir / 'integrity.0.json').unlink()
    path = step_dir / 'w' / '.zarray'
    path.write_text(json.dumps({**json.loads(path.read_text()), 'dtype': '<u2'}))
    restored = restore(run_dir, {'w': like(W.shape, sharded('x'), values.dtype)})['w']
    assert is_mapped(restored.addressable_shards[0].data)
    assert_same(restored, values)


# ---- nothing reaches the files ----


@pytest.mark.parametrize('spec', [('x', None), (None, None)], ids=['sharded', 'replicated'])
def test_donated_arrays(run_dir, spec):
    state = {'w': jax.device_put(W, sharded(*spec)), 'b': W[0], 'tall': TALL}
    step_dir = save(run_dir, state, chunk_bytes=64 * 1024)
    before = files_of(step_dir)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        return jax.tree.map(lambda x: x * 2 + 1, state)

    goal = {'w': like(W.shape, sharded(*spec)), 'b': like((256,), sharded()), 'tall': like(TALL.shape, sharded('x'))}
    state = restore(run_dir, goal)
    assert all(is_mapped(leaf.addressable_shards[3].data) for leaf in (state['b'], state['tall']))
    for _ in range(3):
        state = step(state)
    assert_same(state['w'], ((W * 2 + 1) * 2 + 1) * 2 + 1)
    assert_same(state['b'], ((W[0] * 2 + 1) * 2 + 1) * 2 + 1)
    assert files_of(step_dir) == before
    assert_same(state['tall'], ((TALL * 2 + 1) * 2 + 1) * 2 + 1)
    assert_same(restore(run_dir, {'w': W, 'b': W[0], 'tall': TALL})['w'], W)


def test_donated_and_saved_again(run_dir):
    """A restored state is trained on and saved while it is donated."""
    goal = {'w': like(W.shape, sharded('x')), 'v': like(W.shape, sharded(None, 'x'))}
    step_dir = save(run_dir, {name: jax.device_put(W, leaf.sharding) for name, leaf in goal.items()})
    before = files_of(step_dir)
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    with t5ckpt.Checkpointer(goal, checkpoints_dir=str(run_dir), options=t5ckpt.CheckpointerOptions(mmap=True)) as ck:
        state = ck.restore()
        for number in range(2, 6):
            ck.save_async(state, step=number)
            state = step(state)
        ck.wait_until_finished()
        for number in range(2, 6):
            assert_same(ck.restore(number)['w'], W + (number - 2))
    assert files_of(step_dir) == before


def test_loaded_arrays_are_writable_and_private(run_dir):
    step_dir = save(run_dir, {'w': TALL})
    before = files_of(step_dir)
    first, second = (
        t5ckpt.load_t5x_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(mmap=True))['w'] for _ in range(2)
    )
    lazy = t5ckpt.open_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(mmap=True))['w'].get()
    for array in (first, lazy):
        assert is_mapped(array)
        np.add(array, 1, out=array)
        array.sort(axis=0)
    assert_same(first, TALL + 1)
    assert_same(second, TALL)
    assert files_of(step_dir) == before


@pytest.mark.slow
@pytest.mark.parametrize('chunks', [[512, 256], [64, 256], [512, 64], [100, 100]], ids=str)
def test_slices_of_a_view_are_copies(run_dir, chunks):
    step_dir = save(run_dir, {'w': W})
    rewrite(step_dir, 'w', W, chunks=chunks)
    lazy = t5ckpt.open_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(mmap=True))['w']
    for index in [
        np.s_[3],
        np.s_[:, 5:9],
        np.s_[60:70],
        np.s_[::-7, None],
        np.s_[:],
        np.s_[5, 7],
        np.s_[:0],
        np.s_[..., -1],
        np.s_[[3, 500, 3]],
        np.s_[W[:, 0] > 100_000],
    ]:
        part = lazy[index]
        assert_same(part, W[index])
        if np.ndim(part):
            assert not is_mapped(part)
            part[...] = 0
    assert maps_below(run_dir) == 0
    assert_same(lazy.get(), W)


def test_lazy_parameters(run_dir):
    save(run_dir, {'w': W})
    lazy = t5ckpt.load_t5x_checkpoint(run_dir, lazy_parameters=True, options=t5ckpt.CheckpointerOptions(mmap=True))['w']
    assert is_mapped(lazy.get())
    assert_same(lazy.get(), W)
    assert_same(lazy.astype('bfloat16').get(), W.astype(ml_dtypes.bfloat16))


# ---- what cannot be mapped is read ----


@pytest.mark.parametrize(
    ('metadata', 'mapped'),
    [
        ({'chunks': [512, 256]}, True),
        ({'chunks': [512, 256], 'dimension_separator': '/'}, True),
        ({'chunks': [64, 256]}, False),
        ({'chunks': [600, 256]}, True),
        ({'chunks': [100, 256]}, False),
        ({'chunks': [512, 300]}, False),
        ({'chunks': [3, 256]}, False),
        ({'chunks': [512, 128]}, False),
        ({'chunks': [512, 256], 'order': 'F'}, False),
        ({'chunks': [512, 256], 'dtype': '>f4'}, False),
        ({'chunks': [512, 256], 'compressor': {'id': 'zstd', 'level': 1}}, False),
    ],
    ids=str,
)
def test_metadata(run_dir, metadata, mapped):
    step_dir = save(run_dir, {'w': W})
    rewrite(step_dir, 'w', W, **metadata)
    restored = restore(run_dir, {'w': np.zeros_like(W)})['w']
    assert is_mapped(restored) == mapped
    assert_same(restored, W)
    restored = restore(run_dir, {'w': like(W.shape, sharded('x'))})['w']
    assert_same(restored, W)
    assert_same(
        t5ckpt.open_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(mmap=True))['w'][97:203, 100:200],
        W[97:203, 100:200],
    )


def test_no_zarray(run_dir):
    step_dir = save(run_dir, {'w': W})
    (step_dir / 'w' / '.zarray').unlink()
    assert_same(restore(run_dir, {'w': W * 0})['w'], W)


def test_a_cast_is_read(run_dir):
    save(run_dir, {'target': {'w': W}})
    goal = {'target': {'w': like(W.shape, sharded('x'))}}
    restored = restore(run_dir, goal, restore_dtype='bfloat16')['target']['w']
    assert_same(restored, W.astype(ml_dtypes.bfloat16))
    loaded = t5ckpt.load_t5x_checkpoint(
        run_dir, restore_dtype='bfloat16', options=t5ckpt.CheckpointerOptions(mmap=True)
    )['target']['w']
    assert_same(loaded, W.astype(ml_dtypes.bfloat16))


def test_another_memory(run_dir):
    save(run_dir, {'w': jax.device_put(W, sharded('x'))})
    restored = restore(run_dir, {'w': like(W.shape, sharded('x', kind='pinned_host'))})['w']
    assert restored.sharding.memory_kind == 'pinned_host'
    assert_same(restored, W)
    assert maps_below(run_dir) == 0


def test_other_storages():
    where = 'memory://mapped/run'
    with t5ckpt.Checkpointer({'w': W}, checkpoints_dir=where, options=t5ckpt.CheckpointerOptions(mmap=True)) as ck:
        ck.save({'w': W}, step=1)
        with pytest.warns(t5ckpt.errors.NoEffectWarning, match='mmap has no effect'):
            assert_same(ck.restore()['w'], W)
    assert_same(t5ckpt.load_t5x_checkpoint(where, options=t5ckpt.CheckpointerOptions(mmap=True))['w'], W)
    assert_same(t5ckpt.open_checkpoint(where, options=t5ckpt.CheckpointerOptions(mmap=True))['w'][:3], W[:3])


def test_when_too_many_maps_are_taken(run_dir):
    save(run_dir, {'w': TALL})
    FileMap.count += max_maps()
    restored = restore(run_dir, {'w': TALL * 0})['w']
    FileMap.count -= max_maps()
    assert not is_mapped(restored)
    assert_same(restored, TALL)
    assert is_mapped(restore(run_dir, {'w': TALL * 0})['w'])


def test_progress(run_dir):
    """Mapped leaves are done at once; the sum is the same."""
    step_dir = save(run_dir, {'a': W, 'b': W + 1})
    rewrite(step_dir, 'b', W + 1, chunks=[512, 128])
    seen: list[tuple[int, int]] = []
    restored = restore(run_dir, {'a': W, 'b': W}, progress=lambda done, total: seen.append((done, total)))
    assert_same(restored['b'], W + 1)
    assert seen == [(W.nbytes, 2 * W.nbytes), (2 * W.nbytes, 2 * W.nbytes)]


def write_chunks(directory, values, chunks, separator) -> None:
    """A zarr array of float32, written by hand; what lies beyond the array's edge is -1."""
    names = {'chunks': chunks, 'dimension_separator': separator, 'shape': values.shape, 'zarr_format': 2}
    directory.mkdir()
    metadata = {'compressor': None, 'dtype': '<f4', 'fill_value': None, 'filters': None, 'order': 'C'}
    (directory / '.zarray').write_text(json.dumps(names | metadata))
    counts = [-(-size // chunk) for size, chunk in zip(values.shape, chunks, strict=True)]
    padded = np.full([n * chunk for n, chunk in zip(counts, chunks, strict=True)], -1, np.float32)
    padded[tuple(map(slice, values.shape))] = values
    for cell in np.ndindex(*counts):
        path = directory / (separator.join(map(str, cell)) or '0')
        path.parent.mkdir(parents=True, exist_ok=True)
        part = tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in zip(cell, chunks, strict=True))
        path.write_bytes(padded[part].tobytes())


@st.composite
def boxes_in_arrays(draw):
    """A shape, a chunk shape, a box and a separator."""
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=rank, max_size=rank)))
    # Four bytes an element: a chunk of 1024 is a page.
    if draw(st.booleans()) and rank:
        shape = (*shape[:-1], 1024 * draw(st.integers(1, 2)))
    chunks = [draw(st.sampled_from([1024, size] if size >= 1024 else [1, 2, 3, size])) for size in shape]
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    box = Box((start, draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True))
    whole = Box.whole(shape)
    return shape, chunks, draw(st.sampled_from([box, whole])), draw(st.sampled_from('./'))


@given(boxes_in_arrays())
def test_any_box_of_any_grid(tmp_path_factory, case):
    shape, chunks, box, separator = case
    root = tmp_path_factory.mktemp('grid')
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    write_chunks(root / 'w', values, chunks, separator)
    array = StoredArray('w', shape, np.dtype(np.float32), np.dtype(np.float32))
    expected = values[box.slices]
    opened = open_array(CheckpointFiles.at(open_storage(str(root)), ''), array, 'w')
    assert isinstance(opened, ChunkedArray)
    mapped = opened.map_boxes([box])
    if mapped is not None:
        assert_same(mapped[box], expected)
        assert mapped[box].flags.c_contiguous
        assert mapped[box].ctypes.data % 64 == 0
    if tuple(chunks) == shape and box == Box.whole(shape):
        assert mapped is not None
    assert_same(opened.read([range(*bounds) for bounds in box]), expected)


# ---- damage and malice ----


def each_reader(run_dir):
    return [
        lambda: restore(run_dir, {'w': np.zeros_like(W)}),
        lambda: restore(run_dir, {'w': like(W.shape, sharded('x'))}),
        lambda: t5ckpt.load_t5x_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(mmap=True)),
        t5ckpt.open_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(mmap=True))['w'].get,
        lambda: t5ckpt.open_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(mmap=True))['w'][100:101],
    ]


@pytest.mark.parametrize('change', [-1, 1, -PAGE, PAGE])
def test_a_chunk_of_the_wrong_size(run_dir, change):
    step_dir = save(run_dir, {'w': W})
    chunk = step_dir / 'w' / '0.0'
    os.truncate(chunk, W.nbytes + change)
    for read in each_reader(run_dir):
        with pytest.raises(errors.CorruptCheckpointError) as error:
            read()
        for words in ('w:', str(chunk), f'{W.nbytes:,}', f'{W.nbytes + change:,}'):
            assert words in str(error.value)


@pytest.mark.parametrize('what', ['missing chunk', 'missing array', 'fifo', 'directory'])
def test_no_chunk(run_dir, what):
    step_dir = save(run_dir, {'w': W})
    chunk = step_dir / 'w' / '0.0'
    chunk.unlink()
    if what == 'missing array':
        (step_dir / 'w' / '.zarray').unlink()
        (step_dir / 'w').rmdir()
    elif what == 'fifo':
        os.mkfifo(chunk)
    elif what == 'directory':
        chunk.mkdir()
    for read in each_reader(run_dir):
        with pytest.raises(errors.CorruptCheckpointError, match=r'w\b.*checkpoint_1'):
            read()


@pytest.mark.parametrize(
    'change', [{'shape': [256, 512]}, {'dtype': '<i4'}, {'zarr_format': 3}, {'chunks': [512]}, {'chunks': [0, 256]}]
)
def test_metadata_that_contradicts_the_manifest(run_dir, change):
    step_dir = save(run_dir, {'w': W})
    as_t5x_writes(step_dir)
    path = step_dir / 'w' / '.zarray'
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    # Another dtype says nothing about the bytes.
    error = errors.UnsupportedFormatError if 'dtype' in change else errors.CorruptCheckpointError
    for read in each_reader(run_dir):
        with pytest.raises(error, match='w: '):
            read()


@pytest.mark.parametrize('text', ['', '{', '[]', 'null', '{"zarr_format": 2}', '\udcff'])
def test_broken_metadata(run_dir, text):
    step_dir = save(run_dir, {'w': W})
    as_t5x_writes(step_dir)
    (step_dir / 'w' / '.zarray').write_text(text, errors='surrogateescape')
    for read in each_reader(run_dir):
        with pytest.raises(errors.FormatError, match='w: '):
            read()


@pytest.mark.parametrize('what', ['w', 'w/0.0', 'w/.zarray'])
def test_links_that_lead_out(run_dir, tmp_path, what):
    step_dir = save(run_dir, {'w': W})
    if what == 'w/.zarray':
        # The reader of a step with checksums does not open it.
        as_t5x_writes(step_dir)
    outside = tmp_path / 'outside'
    (step_dir / what).rename(outside)
    (step_dir / what).symlink_to(outside)
    for read in each_reader(run_dir):
        with pytest.raises(errors.UnsafeSpecError) as error:
            read()
        for words in ('w:', str(step_dir / what), str(outside), 'follow_links=True'):
            assert words in str(error.value)
    assert_same(
        t5ckpt.load_t5x_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(mmap=True, follow_links=True))['w'], W
    )


def test_links_of_a_directory_above_a_chunk(run_dir, tmp_path):
    step_dir = save(run_dir, {'w': W})
    rewrite(step_dir, 'w', W, chunks=[512, 256], dimension_separator='/')
    (step_dir / 'w' / '0').rename(tmp_path / 'outside')
    (step_dir / 'w' / '0').symlink_to(tmp_path / 'outside')
    for read in each_reader(run_dir):
        with pytest.raises(errors.UnsafeSpecError, match='outside'):
            read()


def test_links_that_stay_inside(run_dir, tmp_path):
    step_dir = save(run_dir, {'w': W})
    (step_dir / 'w').rename(step_dir / 'elsewhere')
    (step_dir / 'w').symlink_to('elsewhere')
    (step_dir / 'elsewhere' / '0.0').rename(step_dir / 'chunk')
    (step_dir / 'elsewhere' / '0.0').symlink_to('../chunk')
    assert is_mapped(restore(run_dir, {'w': W * 0})['w'])
    # The way to the checkpoint is the caller's business.
    (tmp_path / 'link').symlink_to(run_dir)
    restored = restore(tmp_path / 'link', {'w': W * 0})['w']
    assert is_mapped(restored)
    assert_same(restored, W)


# ---- lifetime ----


def test_deleted_files_stay_readable(run_dir):
    step_dir = save(run_dir, {'w': jax.device_put(W, sharded('x'))})
    restored = restore(run_dir, {'w': like(W.shape, sharded('x'))})['w']
    for path in (step_dir / 'w').iterdir():
        path.unlink()
    assert_same(restored, W)
    assert_same(restored + 1, W + 1)


_TRUNCATED = """
import os, sys, t5ckpt
array = t5ckpt.load_t5x_checkpoint(sys.argv[1], options=t5ckpt.CheckpointerOptions(mmap=True))['w']
os.truncate(sys.argv[2], 0)
print(array.sum())
"""


def test_a_file_truncated_under_a_map_kills(run_dir):
    """As docs/mapped-restore.md says; a save of ours never does that."""
    step_dir = save(run_dir, {'w': W})
    done = forked.run(_TRUNCATED, run_dir, step_dir / 'w' / '0.0')
    assert done.returncode == -signal.SIGBUS, done.stderr


def test_maps_go_with_their_arrays_and_descriptors_at_once(run_dir):
    goal = {f'w{i}': like(W.shape, sharded('x')) for i in range(4)}
    save(run_dir, {name: W + i for i, name in enumerate(goal)})
    descriptors = len(os.listdir('/proc/self/fd'))
    restored = restore(run_dir, goal)
    loaded = t5ckpt.load_t5x_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(mmap=True))
    assert len(os.listdir('/proc/self/fd')) == descriptors
    assert maps_below(run_dir) == 2 * 4
    part = loaded['w0'][3:5]
    del loaded
    assert maps_below(run_dir) == 4 + 1
    assert_same(part, W[3:5])
    shards = [shard.data for shard in restored['w1'].addressable_shards]
    del part, restored
    assert maps_below(run_dir) == 1
    assert_same(np.concatenate(shards), W + 1)
    del shards
    jax.block_until_ready(jax.numpy.zeros(1) + 1)
    assert maps_below(run_dir) == 0


def test_no_descriptor_or_map_is_left_by_errors(run_dir):
    step_dir = save(run_dir, {'w': W})
    rewrite(step_dir, 'w', W, chunks=[64, 256])
    os.truncate(step_dir / 'w' / '7.0', 5)
    before = len(os.listdir('/proc/self/fd'))
    for read in each_reader(run_dir)[:-1]:
        with pytest.raises(errors.CorruptCheckpointError):
            read()
    assert len(os.listdir('/proc/self/fd')) == before
    assert maps_below(run_dir) == 0


def test_a_checkpoint_larger_than_memory(run_dir):
    """100 GB in sparse files: 100 arrays of 8 chunks."""
    one = np.zeros((16, 1024, 1024), np.float32)
    step_dir = save(run_dir, {f'w{i}': one[:1, :1, :1024] for i in range(100)})
    shape, chunks = [16, 16 * 1024, 1024], [2, 16 * 1024, 1024]
    contents = independent_reader.manifest(step_dir)
    for i in range(100):
        spec = contents['optimizer'][f'w{i}']
        spec['metadata'] |= {'shape': shape, 'chunks': chunks}
        path = step_dir / f'w{i}' / '.zarray'
        path.write_text(json.dumps({**json.loads(path.read_text()), 'shape': shape, 'chunks': chunks}))
        (path.parent / '0.0.0').unlink()
        for cell in range(8):
            with open(path.parent / f'{cell}.0.0', 'wb') as file:
                file.truncate(8 * 16 * 1024 * 1024)
    with open(step_dir / 'w99' / '7.0.0', 'r+b') as file:
        file.seek(-4, os.SEEK_END)
        file.write(np.float32(7).tobytes())
    del contents['t5ckpt']
    (step_dir / 'checkpoint').write_bytes(serialization.msgpack_serialize(contents))
    (step_dir / 'integrity.0.json').unlink()
    restored = restore(run_dir, {f'w{i}': like(shape, sharded('x')) for i in range(100)})
    assert sum(array.nbytes for array in restored.values()) > 10**11
    assert restored['w99'].addressable_shards[7].data[-1, -1, -1] == 7
    assert t5ckpt.open_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(mmap=True))['w99'][
        15, -1, -3:
    ].tolist() == [0, 0, 7]

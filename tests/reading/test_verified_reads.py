"""What is read is what was written, or an error: checksums during restores, loads and slices."""

import asyncio
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import partitioner
from support.bits import assert_same
from support.cli import t5ckpt_cli
from support.damage import Iterator, files_of, flip, save, some_file, state_of
from support.facts import as_t5x_writes, put_facts
from support.options import with_options

import t5ckpt
from t5ckpt import errors
from t5ckpt.storage.memory_limit import memory_limit


def restore(run_dir, template, **options):
    with t5ckpt.Checkpointer(template, checkpoints_dir=str(run_dir), **with_options(**options)) as ck:
        return ck.restore()


def load(run_dir, **options):
    return t5ckpt.load_t5x_checkpoint(run_dir, **with_options(**options))


def leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def readers(run_dir):
    """Every way to read all of a checkpoint with checksums; each returns a nested dict."""
    state = state_of()
    return {
        'restore': lambda: restore(run_dir, state),
        'mapped restore': lambda: restore(run_dir, state, mmap=True, verify='full'),
        'load': lambda: load(run_dir),
        'mapped load': lambda: load(run_dir, mmap=True, verify='full'),
        'lazy load': lambda: jax.tree.map(
            lambda leaf: leaf.get() if isinstance(leaf, t5ckpt.LazyArray) else leaf,
            load(run_dir, lazy_parameters=True),
        ),
    }


@pytest.mark.parametrize(
    'read',
    [
        t5ckpt.load_t5x_checkpoint,
        lambda run: np.asarray(t5ckpt.load_t5x_checkpoint(run, lazy_parameters=True)['w']),
        lambda run: t5ckpt.open_checkpoint(run)['w'][...],
        lambda run: t5ckpt.open_checkpoint(run)['w'][:],
        lambda run: np.asarray(t5ckpt.open_checkpoint(run)['w']),
        lambda run: t5ckpt.open_checkpoint(run)['w'] * 2,
    ],
)
def test_how_a_whole_array_is_written_does_not_matter(tmp_path, read):
    state = {'w': np.arange(2**14, dtype=np.float32)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as ck:
        ck.save(state, step=1)
    flip(tmp_path / 'checkpoint_1' / 'w' / '0', random.Random(0))
    with pytest.raises(errors.CorruptCheckpointError, match=r'w.*is damaged: it has 65,536 bytes with xxh3-64'):
        read(tmp_path)


def same(a, b):
    """Whether two states hold the same bits."""
    one, other = leaves(a), leaves(b)
    return len(one) == len(other) and all(
        path == there and np.asarray(data(x)).tobytes() == np.asarray(data(y)).tobytes()
        for (path, x), (there, y) in zip(one, other, strict=True)
    )


def data(leaf):
    is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


@pytest.mark.parametrize('compression', [None, 'zstd', 'gzip'])
@pytest.mark.parametrize('flips', [20, pytest.param(334, marks=pytest.mark.slow)])
def test_no_flipped_bit_comes_through(run_dir, compression, flips):
    """Every flip is an error; in files that are not read (the iterator's, and .zarray), the values are right."""
    step_dir = save(run_dir, compression=compression)
    right = {name: read() for name, read in readers(run_dir).items()}
    rng = random.Random(flips)
    for _ in range(flips):
        path = some_file(step_dir, rng)
        before = flip(path, rng)
        name = rng.choice(list(right))
        if path.name.startswith(('.zarray', 'train_ds-')):
            assert same(readers(run_dir)[name](), right[name])
        else:
            with pytest.raises(errors.T5CkptError):
                readers(run_dir)[name]()
        path.write_bytes(before)
    for name, read in readers(run_dir).items():
        assert same(read(), right[name])


@pytest.mark.parametrize('how', ['missing', 'truncated', 'zeros'])
def test_no_damaged_file_comes_through(run_dir, how):
    step_dir = save(run_dir)
    state = state_of()
    right = restore(run_dir, state)
    for path in files_of(step_dir):
        before = path.read_bytes()
        if how == 'missing':
            path.unlink()
        else:
            path.write_bytes(before[: len(before) // 2] if how == 'truncated' else bytes(len(before)))
        try:
            restored = restore(run_dir, state)
        except errors.T5CkptError:
            pass
        else:
            # What the manifest says, too, or files that were not requested.
            assert path.name == '.zarray' or path.name.startswith('train_ds-'), path
            assert same(restored, right)
        path.write_bytes(before)


def test_the_cure_for_a_lost_array_works(run_dir, tmp_path):
    """A copy that was cut off; the error names the step, and its cure copies the rest."""
    step_dir = save(run_dir)
    shutil.rmtree(step_dir / 'params.w')
    state = state_of()
    cure = rf'params/w: {step_dir}/params.w/.* is missing. Restore an older step.*"t5ckpt cp --leave"'
    with pytest.raises(errors.CorruptCheckpointError, match=cure) as caught:
        restore(run_dir, state)
    assert 'quick' not in str(caught.value)
    t5ckpt_cli('cp', step_dir, tmp_path / 'mended', '--leave', 'params/w')
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'mended') as ck:
        restored = ck.restore(fallback_state={'params': {'w': state['params']['w'] + 1}})
    assert_same(restored['params']['w'], state['params']['w'] + 1)
    assert_same(restored['params']['edge'], state['params']['edge'])


@pytest.mark.parametrize('swap', ['chunks', 'steps'])
def test_files_in_the_wrong_place(run_dir, swap):
    step_dir, other = save(run_dir, 1), save(run_dir, 2, seed=7)
    source = step_dir / 'params.w' / '1.0' if swap == 'chunks' else other / 'params.w' / '0.0'
    shutil.copyfile(source, step_dir / 'params.w' / '0.0')
    shutil.rmtree(other)
    for read in readers(run_dir).values():
        with pytest.raises(errors.CorruptCheckpointError, match=r'params/w.*params.w/0.0 is damaged.*verify'):
            read()
    assert load(run_dir, verify='quick')['params']['w'].shape == (96, 64), 'quick does not look at bytes'


def test_the_iterators_state(run_dir):
    step_dir = save(run_dir, 3)
    iterator = Iterator()
    with t5ckpt.Checkpointer(state_of(), None, str(run_dir), iterator) as ck:
        ck.restore()
        assert iterator.position == 3
        flip(step_dir / 'train_ds-000-of-001.txt', random.Random(0))
        with pytest.raises(errors.CorruptCheckpointError, match='train_ds-000-of-001'):
            ck.restore()


def test_slices_check_the_chunks_they_touch(run_dir):
    step_dir = save(run_dir)
    flip(step_dir / 'params.w' / '2.1', random.Random(0))
    view = t5ckpt.open_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(verify='full'))
    w = state_of()['params']['w']
    assert_same(view['params/w'][:10], w[:10])
    with pytest.raises(errors.CorruptCheckpointError, match=r'params.w/2.1'):
        view['params/w'][90:, 60:]
    with pytest.raises(errors.CorruptCheckpointError, match=r'params.w/2.1'):
        asyncio.run(view['params/w'].get_async())


@pytest.mark.parametrize('spec', [('data', 'model'), (None, 'data'), ('model', None), ()])
def test_other_shardings(run_dir, spec):
    """A chunk is hashed whole, though devices want parts of it, in several ways."""
    step_dir = save(run_dir)
    sharding = NamedSharding(partitioner.mesh(), PartitionSpec(*spec))
    state = state_of()
    model = state | {'params': dict(state['params'])}
    for name in ('w', 'embed', 'bits'):
        array = state['params'][name]
        model['params'][name] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    restored = restore(run_dir, model, verify='full')
    for name in ('w', 'embed', 'bits'):
        assert_same(np.asarray(restored['params'][name]), state['params'][name])
    flip(step_dir / 'params.embed' / '1.0', random.Random(1))
    with pytest.raises(errors.CorruptCheckpointError, match='embed'):
        restore(run_dir, model, verify='full')


def test_casts_are_of_checked_bytes(run_dir):
    state = {'params': {'w': np.arange(2.0**16, dtype=np.float32)}}
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=str(run_dir), options=t5ckpt.CheckpointerOptions(inline_bytes=0)
    ) as ck:
        ck.save(state, step=1)
    assert restore(run_dir, state, restore_dtype='bfloat16')['params']['w'].dtype.name == 'bfloat16'
    flip(run_dir / 'checkpoint_1' / 'params.w' / '0', random.Random(1))
    with pytest.raises(errors.CorruptCheckpointError):
        restore(run_dir, state, restore_dtype='bfloat16')


def test_by_default_a_chunk_of_which_less_than_half_is_wanted_is_not_compared(run_dir):
    """Rows of a chunk are read alone; on request the whole chunk is, as for devices that together hold half of it."""
    devices = np.array(jax.devices()[:4])
    rows = NamedSharding(jax.sharding.Mesh(devices, ('x',)), PartitionSpec('x'))
    whole = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
    with t5ckpt.Checkpointer(
        {'w': whole}, checkpoints_dir=run_dir, options=t5ckpt.CheckpointerOptions(inline_bytes=0)
    ) as ck:
        ck.save({'w': whole}, step=1)
    chunk = run_dir / 'checkpoint_1' / 'w' / '0.0'
    data = bytearray(chunk.read_bytes())
    data[0] ^= 1
    chunk.write_bytes(data)
    view = t5ckpt.open_checkpoint(run_dir)['w']
    got = view[:31]
    assert (got.view(np.uint32) != whole[:31].view(np.uint32)).sum() == 1
    template = {'w': jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=rows)}
    for read in (
        lambda: view[:32],
        lambda: view[32:],
        lambda: t5ckpt.open_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(verify='full'))['w'][:31],
        lambda: restore(run_dir, template),
        lambda: restore(run_dir, template, verify='full'),
        lambda: restore(run_dir, {'w': whole}),
        lambda: load(run_dir, mmap=False),
    ):
        with pytest.raises(errors.CorruptCheckpointError, match=r'w/0\.0 is damaged'):
            read()


def test_quick_is_on_request(run_dir):
    step_dir = save(run_dir)
    chunk = step_dir / 'params.w' / '0.0'
    chunk.write_bytes(bytes(chunk.stat().st_size))
    assert not np.asarray(restore(run_dir, state_of(), verify='quick')['params']['w'])[:32, :32].any()
    with pytest.raises(ValueError, match='verify'):
        restore(run_dir, state_of(), verify='no')


def test_without_our_files_a_checkpoint_is_t5xs(run_dir):
    step_dir = save(run_dir)
    put_facts(step_dir, None)
    with pytest.raises(errors.CorruptCheckpointError, match=r'checkpoint has no facts of t5ckpt.*quick'):
        load(run_dir, mmap=False)
    (step_dir / 'integrity.0.json').unlink()
    assert_same(load(run_dir, mmap=False)['params']['w'], state_of()['params']['w'])


# ---- nothing outside the checkpoint ----


def cached(run_dir, tmp_path, step_dir):
    """The checkpoint as a Hugging Face cache lays it out: links to blobs beside the snapshot."""
    blobs = tmp_path / 'blobs'
    blobs.mkdir()
    for number, path in enumerate(files_of(step_dir)):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))
    return run_dir


def test_a_cache_of_links_needs_the_callers_word(run_dir, tmp_path):
    cached(run_dir, tmp_path, save(run_dir))
    for read in readers(run_dir).values():
        with pytest.raises(errors.UnsafeSpecError, match='follow_links=True'):
            read()
    with pytest.raises(errors.UnsafeSpecError, match='follow_links=True'):
        t5ckpt.open_checkpoint(run_dir)
    assert {damage.kind for damage in t5ckpt.verify(run_dir, full=True).damages} == {'unsafe'}
    assert t5ckpt.verify(run_dir, full=True, follow_links=True).ok
    state = state_of()
    assert same(restore(run_dir, state, follow_links=True), restore(run_dir, state, follow_links=True, mmap=True))
    assert_same(load(run_dir, follow_links=True)['params']['w'], state['params']['w'])
    assert_same(
        t5ckpt.open_checkpoint(run_dir, options=t5ckpt.CheckpointerOptions(follow_links=True))['params/w'][3],
        state['params']['w'][3],
    )


@pytest.mark.parametrize('what', ['checkpoint', 'params.w', 'params.w/.zarray', 'params.w/0.0'])
@pytest.mark.parametrize('compression', [None, 'zstd'])
def test_links_that_lead_out(run_dir, tmp_path, what, compression):
    step_dir = save(run_dir, compression=compression)
    (step_dir / what).rename(tmp_path / 'outside')
    (step_dir / what).symlink_to(tmp_path / 'outside')
    ways = [
        lambda: restore(run_dir, state_of(), verify='quick'),
        lambda: load(run_dir, mmap=False, verify='quick'),
    ]
    if what != 'params.w/.zarray':
        # With checksums, it is not opened.
        ways += [
            lambda: restore(run_dir, state_of()),
            lambda: load(run_dir)['params']['w'],
            lambda: t5ckpt.open_checkpoint(run_dir)['params/w'][3],
        ]
    for way in ways:
        with pytest.raises(errors.UnsafeSpecError, match='outside'):
            way()


def test_an_iterators_state_that_leads_out(run_dir, tmp_path):
    step_dir = save(run_dir)
    (tmp_path / 'secret').write_text('position 5')
    (step_dir / 'train_ds-000-of-001.txt').unlink()
    (step_dir / 'train_ds-000-of-001.txt').symlink_to(tmp_path / 'secret')
    with (
        t5ckpt.Checkpointer(
            state_of(), None, str(run_dir), Iterator(), options=t5ckpt.CheckpointerOptions(verify='quick')
        ) as ck,
        pytest.raises(errors.UnsafeSpecError),
    ):
        ck.restore()


@pytest.mark.parametrize('what', ['checkpoint', 'integrity.0.json', 'params.w/.zarray', 'params.w/0.0'])
@pytest.mark.parametrize('compression', [None, 'zstd'])
def test_a_fifo_does_not_block(run_dir, what, compression):
    step_dir = save(run_dir, compression=compression)
    (step_dir / what).unlink()
    os.mkfifo(step_dir / what)
    assert not t5ckpt.verify(step_dir, full=True).ok
    # With checksums, a .zarray is not opened.
    options = {'verify': 'quick'} if what == 'params.w/.zarray' else {}
    for way in [lambda: restore(run_dir, state_of(), **options), lambda: load(step_dir, mmap=False, **options)]:
        with pytest.raises(errors.T5CkptError):
            way()


def test_orbax_links_that_lead_out(tmp_path):
    import orbax.checkpoint as ocp

    tree = {'a': {'w': np.arange(6000.0).reshape(60, 100)}}
    for ocdbt in (True, False):
        path = pathlib.Path(tmp_path / f'c{ocdbt}')
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as checkpointer:
            checkpointer.save(path, tree)
        largest = max(files_of(path), key=lambda file: file.stat().st_size)
        largest.rename(tmp_path / f'outside{ocdbt}')
        largest.symlink_to(tmp_path / f'outside{ocdbt}')
        with pytest.raises(errors.UnsafeSpecError, match='follow_links'):
            load(path, mmap=False)
        assert_same(load(path, mmap=False, follow_links=True)['a']['w'], tree['a']['w'])


@pytest.mark.parametrize('mmap', [True, False])
def test_metadata_of_an_array_with_a_huge_shape(tmp_path, mmap):
    """TensorStore ends the process if it cannot allocate the size of a file."""
    state = {'w': np.ones((600, 700), np.float32)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(inline_bytes=0)) as ck:
        ck.save(state, step=1)
    as_t5x_writes(tmp_path / 'checkpoint_1')
    os.truncate(tmp_path / 'checkpoint_1' / 'w' / '.zarray', 2**40)
    with pytest.raises(t5ckpt.errors.CorruptCheckpointError, match=r'has [0-9,]+ bytes'):
        t5ckpt.load_t5x_checkpoint(tmp_path, 1, options=t5ckpt.CheckpointerOptions(mmap=mmap))


def test_files_that_are_larger_than_the_memory(tmp_path):
    """A pin's text is read to its limit, and a copy compares the size of a file before it reads it."""
    state = {'w': np.ones((600, 700), np.float32)}
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=tmp_path / 'run', options=t5ckpt.CheckpointerOptions(inline_bytes=0)
    ) as ck:
        ck.save(state, step=1)
    step = tmp_path / 'run' / 'checkpoint_1'
    (step / 'PINNED').write_bytes(b'')
    os.truncate(step / 'PINNED', 2**43)
    assert 'pinned' in str(t5ckpt.open_run(tmp_path / 'run'))
    (step / 'PINNED').unlink()
    os.truncate(step / 'w' / '0.0', 2**43)
    with pytest.raises(errors.CorruptCheckpointError, match='8,796,093,022,208 bytes'):
        t5ckpt.copy_checkpoint(step, tmp_path / 'other')


@pytest.mark.parametrize('name', ['checkpoint', 'integrity.0.json'])
def test_a_file_that_is_read_whole_and_is_larger_than_the_memory(tmp_path, name):
    """It is an error that names the file, and no listing of the run reads it."""
    state = {'w': np.ones((600, 700), np.float32)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(inline_bytes=0)) as ck:
        ck.save(state, step=1)
        ck.save(state, step=2)
    os.truncate(tmp_path / 'checkpoint_2' / name, 2**43)
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as ck:
        with pytest.raises(errors.NotEnoughMemoryError, match=rf'{name} has 8,796,093,022,208 bytes'):
            ck.restore(2)
        np.testing.assert_array_equal(ck.restore(1)['w'], state['w'])
    assert 1 in t5ckpt.open_run(tmp_path).steps


def sparse_halves(file, count):
    """A file of safetensors with so many zeros in float16, which take no room."""
    header = json.dumps({'w': {'dtype': 'F16', 'shape': [count], 'data_offsets': [0, 2 * count]}}).encode()
    file.write_bytes(len(header).to_bytes(8, 'little') + header)
    os.truncate(file, 8 + len(header) + 2 * count)


def test_a_leaf_that_is_larger_than_the_memory_after_its_cast(tmp_path):
    """The dtype of the template counts, which is allocated."""
    count = memory_limit() * 3 // 8 // 128 * 128
    sparse_halves(tmp_path / 'w.safetensors', count)
    state = {'w': jax.ShapeDtypeStruct((count,), np.float32)}
    ck = t5ckpt.Checkpointer(
        state, checkpoints_dir='', restore_dtype='float32', options=t5ckpt.CheckpointerOptions(cast_leaves='w')
    )
    with ck, pytest.raises(errors.NotEnoughMemoryError, match=f'{4 * count:,} bytes are needed'):
        ck.restore(path=tmp_path / 'w.safetensors')


_WITH_A_LIMIT = """
import pathlib, resource, sys
import t5ckpt
leaf = t5ckpt.open_checkpoint(sys.argv[1])['w']
pages = int(pathlib.Path('/proc/self/statm').read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, resource.RLIM_INFINITY))
try:
    leaf[...]
except t5ckpt.errors.NotEnoughMemoryError as error:
    print(error)
"""


def test_memory_that_a_process_does_not_get_is_not_damage(tmp_path):
    """As in a job whose memory is limited by ulimit: the step is intact, and no start may rename it."""
    sparse_halves(tmp_path / 'w.safetensors', 2**29)
    words = [sys.executable, '-c', _WITH_A_LIMIT, tmp_path / 'w.safetensors']
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert 'which cannot be allocated' in done.stdout


_WITH_GROWING_LIMITS = """
import pathlib, resource, sys
import t5ckpt
leaf = t5ckpt.open_checkpoint(sys.argv[1])['w']
leaf[:10]
for megabytes in range(40, 300, 16):
    pages = int(pathlib.Path('/proc/self/statm').read_text().split()[0])
    limit = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        leaf[...]
        print('read')
    except t5ckpt.errors.T5CkptError as error:
        print(type(error).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize('compression', ['gzip', 'zstd', 'blosc'])
def test_a_decoder_that_does_not_get_memory_finds_no_damage(tmp_path, compression):
    state = {'w': np.arange(2.0**24, dtype=np.float32)}
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(compression=compression)
    ) as ck:
        ck.save(state, step=1)
    words = [sys.executable, '-c', _WITH_GROWING_LIMITS, tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert {*done.stdout.split()} == {'NotEnoughMemoryError', 'read'}

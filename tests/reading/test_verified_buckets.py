"""Every chunk that is read whole from a bucket is verified, and fetched once: the requests are counted at a proxy."""

import asyncio
import collections
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.bits import assert_same
from support.options import with_options

import t5ckpt
from t5ckpt.errors import AccessDeniedError, CorruptCheckpointError
from t5ckpt.storage import open_storage

W = np.random.default_rng(0).standard_normal((1024, 64)).astype(np.float32)
STATE = {'params': {'w': W, 'other': W[::-1].astype(jax.numpy.bfloat16)}, 'step': 3}
# In a chunk.
ROWS = 256
CHUNKS = 4


def on_devices(count, *axes):
    return NamedSharding(Mesh(np.array(jax.devices()[:count]), ('x',)), PartitionSpec(*axes))


def restore(url, sharding=None, **options):
    template = STATE
    if sharding is not None:
        leaf = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=sharding)
        template = STATE | {'params': STATE['params'] | {'w': leaf}}
    with t5ckpt.Checkpointer(template, checkpoints_dir=url, **with_options(**options)) as ck:
        return ck.restore()['params']['w']


def lazily(url):
    return t5ckpt.load_t5x_checkpoint(url, lazy_parameters=True)['params']['w']


# A device's part is a chunk, several chunks or half of one; each chunk is wanted whole by the process.
WHOLE = {
    'restore': restore,
    'restore in waves': lambda url: restore(url, restore_concurrent_gb=0.0002),
    'restore rows to four devices': lambda url: restore(url, on_devices(4, 'x')),
    'restore rows to eight devices': lambda url: restore(url, on_devices(8, 'x')),
    'restore columns to eight devices': lambda url: restore(url, on_devices(8, None, 'x')),
    'restore to every device': lambda url: restore(url, on_devices(8)),
    'restore with a cast': lambda url: restore(url, restore_dtype='bfloat16'),
    'load': lambda url: t5ckpt.load_t5x_checkpoint(url)['params']['w'],
    'lazy load': lambda url: lazily(url).get(),
    'lazy load, awaited': lambda url: asyncio.run(lazily(url).get_async()),
    'view': lambda url: t5ckpt.open_checkpoint(url)['params/w'][...],
}


@pytest.fixture(scope='module', params=[None, 'lz4', 'zstd'])
def compression(request):
    return request.param


@pytest.fixture
def url(bucket, compression):
    url = bucket.url()
    options = {'compression': compression, 'chunk_bytes': W[:ROWS].nbytes, 'inline_bytes': 64}
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=url, **with_options(**options)) as ck:
        ck.save(STATE, step=3)
    bucket.proxy.clear()
    return url


def chunks_of(url):
    """The keys of the chunks of params/w, in the order of their rows."""
    keys = [key for key, _ in open_storage(url).walk('checkpoint_3') if '/params.w/' in key and '.zarray' not in key]
    assert len(keys) == CHUNKS
    return sorted(keys)


def flip(bucket, url, key):
    """Flips one bit in the middle of an object."""
    data = bytearray(bucket.raw(f'{url}/{key}'))
    data[len(data) // 2] ^= 4
    bucket.put(f'{url}/{key}', bytes(data))
    bucket.proxy.clear()


def fetches(bucket):
    """How often each chunk of params/w was fetched."""
    passed = bucket.proxy.clear()
    return collections.Counter(
        request.key.rpartition('/')[2]
        for request in passed
        if request.kind == 'read' and '/params.w/' in request.key and '.zarray' not in request.key
    )


@pytest.mark.slow
def test_every_chunk_is_fetched_once(bucket, url):
    names = {key.rpartition('/')[2] for key in chunks_of(url)}
    bucket.proxy.clear()
    for how, read in WHOLE.items():
        assert_same(read(url), W.astype(jax.numpy.bfloat16) if 'cast' in how else W, how)
        assert fetches(bucket) == dict.fromkeys(names, 1), how


@pytest.mark.slow
def test_a_flipped_bit_is_found_with_one_fetch_of_a_chunk(bucket, url):
    damaged = chunks_of(url)[2]
    flip(bucket, url, damaged)
    missed = []
    for how, read in WHOLE.items():
        try:
            read(url)
        except CorruptCheckpointError as error:
            text = str(error)
        else:
            text = ''
        if not re.search(f'params/w.*{damaged}', text):
            missed.append((how, text))
        found = fetches(bucket)
        assert set(found.values()) == {1}, how
        assert damaged.rpartition('/')[2] in found, how
    assert not missed


@pytest.mark.slow
def test_slices_verify_the_chunks_that_they_cover(bucket, url):
    keys = chunks_of(url)
    first, second, third, last = (key.rpartition('/')[2] for key in keys)
    w = t5ckpt.open_checkpoint(url)['params/w']
    bucket.proxy.clear()
    assert_same(w[ROWS : 2 * ROWS], W[ROWS : 2 * ROWS])
    assert fetches(bucket) == {second: 1}
    assert_same(w[5 : 3 * ROWS + 5], W[5 : 3 * ROWS + 5])
    assert fetches(bucket).keys() == {first, second, third, last}
    flip(bucket, url, keys[1])
    for rows in (slice(ROWS, 2 * ROWS), slice(5, 3 * ROWS), slice(None)):
        with pytest.raises(CorruptCheckpointError, match=rf'params/w.*{keys[1]}'):
            t5ckpt.open_checkpoint(url)['params/w'][rows]
        assert fetches(bucket)[second] == 1
    assert_same(w[2 * ROWS :], W[2 * ROWS :])


@pytest.mark.slow
def test_full_verifies_chunks_of_which_a_part_is_wanted(bucket, url):
    keys = chunks_of(url)
    flip(bucket, url, keys[0])
    w = t5ckpt.open_checkpoint(url, options=t5ckpt.CheckpointerOptions(verify='full'))['params/w']
    bucket.proxy.clear()
    with pytest.raises(CorruptCheckpointError, match=rf'params/w.*{keys[0]}'):
        w[3]
    assert fetches(bucket) == {keys[0].rpartition('/')[2]: 1}


def test_rows_of_a_large_plain_chunk_are_fetched_alone(bucket):
    large = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)
    url = bucket.url()
    with t5ckpt.Checkpointer(
        {'w': large}, checkpoints_dir=url, options=t5ckpt.CheckpointerOptions(compression=None)
    ) as ck:
        ck.save({'w': large}, step=3)
    w = t5ckpt.open_checkpoint(url)['w']
    bucket.proxy.clear()
    assert_same(w[700:710], large[700:710])
    [request] = [request for request in bucket.proxy.clear() if request.key.endswith('/w/0.0')]
    assert request.received < large.nbytes / 4


@pytest.mark.slow
def test_quick_compares_nothing(bucket, url, compression):
    keys = chunks_of(url)
    flip(bucket, url, keys[0])
    try:
        found = np.asarray(restore(url, verify='quick'))
    except CorruptCheckpointError:
        # Of the decoder.
        assert compression is not None
        return
    assert (found.view(np.uint32) != W.view(np.uint32)).any()
    assert not [request for request in bucket.proxy.clear() if 'integrity.' in request.key]


@pytest.mark.slow
def test_a_copy_that_may_not_read_a_chunk_does_not_call_it_damaged(bucket, url, tmp_path):
    bucket.proxy.choose = lambda kind, key: '403' if kind == 'read' and '.w/0' in key else None
    with pytest.raises(AccessDeniedError, match=r'w/0'):
        t5ckpt.copy_checkpoint(url, tmp_path / 'copy')
    assert t5ckpt.all_steps(tmp_path / 'copy') == []

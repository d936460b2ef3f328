"""A bucket serves a run as a disk does: real servers behind a proxy that counts what passes."""

import concurrent.futures
import itertools
import os
import pathlib
import re
import subprocess
import sys

import jax
import msgpack
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import independent_reader, t5x_rules
from support.filled import write_filled
from support.options import with_options
from support.states import key_of

import t5ckpt
from t5ckpt import errors
from t5ckpt.storage import open_storage
from t5ckpt.testing import StorageConformance, mixed_state, t5x_state

CHUNK = 2**16


class TestGcs(StorageConformance):
    @pytest.fixture(autouse=True)
    def _server(self, gs):
        self.bucket = gs

    def make(self, tmp_path):
        return open_storage(self.bucket.url())

    def raw(self, storage, key):
        return self.bucket.raw(storage.url(key))


class TestAzure(TestGcs):
    @pytest.fixture(autouse=True)
    def _server(self, az):
        self.bucket = az


class TestS3(TestGcs):
    @pytest.fixture(autouse=True)
    def _server(self, s3):
        self.bucket = s3


def mesh(*shape):
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), ('x', 'y')[: len(shape)])


def rows(values, devices=4):
    return jax.device_put(values, NamedSharding(mesh(devices), PartitionSpec('x')))


def state(seed=0, size=(256, 512)):
    values = np.random.default_rng(seed).standard_normal(size, dtype=np.float32)
    return {'w': rows(values), 'bias': np.arange(300, dtype=np.float32) + seed, 'step': np.int32(seed)}


def at(step):
    """The same weights at another step."""
    return state() | {'step': np.int32(step)}


def checkpointer(url, tree=None, **options):
    options = {'chunk_bytes': CHUNK, 'inline_bytes': 256} | options
    return t5ckpt.Checkpointer(state() if tree is None else tree, checkpoints_dir=url, **with_options(**options))


def counts(bucket):
    """Requests by kind since the last call."""
    kinds = [request.kind for request in bucket.proxy.clear()]
    return {kind: kinds.count(kind) for kind in set(kinds)}


def copy_to_disk(bucket, url, path):
    """What a copying tool does: every object below a URL, by plain HTTP, in no order of ours."""
    storage = open_storage(url)
    for key, _ in storage.walk(''):
        file = path / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bucket.raw(storage.url(key)))


def test_save_restore_and_slices(bucket):
    url, tree = bucket.url(), state(7)
    with checkpointer(url) as ck:
        assert ck.latest_step() is None
        done = ck.save(tree, step=7)
        assert done.path == f'{url}/checkpoint_7'
        assert ck.save_async(state(8), step=8).result().step == 8
        assert ck.save(tree, step=7) is None
        assert ck.all_steps() == [7, 8]
        back = ck.restore(step=7)
    assert np.asarray(back['w']).tobytes() == np.asarray(tree['w']).tobytes()
    assert back['w'].sharding == tree['w'].sharding
    view = t5ckpt.open_checkpoint(url, 7)
    assert np.array_equal(view['w'][3:5, 100:], np.asarray(tree['w'])[3:5, 100:])
    loaded = t5ckpt.load_t5x_checkpoint(f'{url}/checkpoint_7/checkpoint')
    assert np.array_equal(loaded['bias'], tree['bias'])
    assert t5ckpt.find_checkpoint(url) == f'{url}/checkpoint_8/checkpoint'
    assert t5ckpt.latest_step(url) == 8


@pytest.mark.parametrize('compression', ['zstd', 'auto'])
def test_every_kind_of_leaf(bucket, compression):
    url = bucket.url()
    with t5ckpt.Checkpointer(
        mixed_state(), checkpoints_dir=url, options=t5ckpt.CheckpointerOptions(compression=compression, inline_bytes=16)
    ) as ck:
        ck.save(mixed_state(3))
        back = ck.restore()
    assert back['list'][1] == ()
    assert back['note'] == 'text'
    assert back['count'] == 3
    assert np.array_equal(back['params']['w'], mixed_state(3)['params']['w'])


@pytest.mark.slow
def test_saves_are_compressed_by_default(bucket):
    """Also on a bucket, what T5X and other readers of zarr read; ``compression=None`` writes plain chunks."""
    url = bucket.url()
    weights = np.random.default_rng(0).standard_normal((512, 1024), dtype=np.float32)
    short = weights.astype(jax.numpy.bfloat16)
    tree = {'f32': weights, 'bf16': short, 'master': short.astype(np.float32)}
    with t5ckpt.Checkpointer(tree, checkpoints_dir=url) as ck:
        ck.save(tree, step=1)
        assert all(np.array_equal(ck.restore()[name], tree[name]) for name in tree)
    storage = open_storage(url)
    sizes = {name: len(storage.read(key_of(storage, f'/{name}/0.0'))) / tree[name].nbytes for name in tree}
    assert sizes['f32'] <= 0.9
    assert sizes['bf16'] <= 0.8
    assert sizes['master'] <= 0.42
    with t5ckpt.Checkpointer(tree, checkpoints_dir=url, options=t5ckpt.CheckpointerOptions(compression=None)) as ck:
        ck.save(tree, step=2)
    assert len(storage.read(key_of(storage, '/f32/0.0', 'checkpoint_2'))) == weights.nbytes


def test_no_encoded_chunk_is_read_back(bucket):
    """Its checksum comes from memory."""
    values = np.zeros((8, 4096), np.float32)
    with t5ckpt.Checkpointer(
        {'w': values}, checkpoints_dir=bucket.url(), options=t5ckpt.CheckpointerOptions(compression='lz4')
    ) as ck:
        ck.save({'w': values}, step=1)
    assert not [each.key for each in bucket.proxy.requests if each.kind == 'read' and each.key.endswith('/w/0.0')]


def test_a_bucket_itself_is_a_run(bucket):
    url = bucket.url()
    root = url.removesuffix('/run')
    checkpointer(root).save(at(0))
    assert t5ckpt.all_steps(root) == [0]


def test_verify_finds_damage(bucket):
    url = bucket.url()
    checkpointer(url).save(at(1))
    assert t5ckpt.verify(f'{url}/checkpoint_1', full=True).ok
    storage = open_storage(url)
    key = key_of(storage, '/w/0.0')
    chunk = bytearray(storage.read(key))
    chunk[5] ^= 1
    storage.write(key, bytes(chunk))
    assert not t5ckpt.verify(f'{url}/checkpoint_1', full=True).ok


def test_retention_and_pins(bucket):
    url = bucket.url()
    with checkpointer(url, keep=2) as ck:
        ck.save(state(0), step=0)
        t5ckpt.pin_checkpoint(f'{url}/checkpoint_0')
        for step in (1, 2, 3):
            ck.save(state(step), step=step)
        assert ck.all_steps() == [0, 2, 3]
    names = {key.split('/')[0] for key, _ in open_storage(url).walk('') if not key.startswith('.')}
    assert names == {'checkpoint_0', 'checkpoint_2', 'checkpoint_3'}
    assert t5ckpt.is_pinned_checkpoint(f'{url}/checkpoint_0')
    t5ckpt.unpin_checkpoint(f'{url}/checkpoint_0')
    checkpointer(url, keep=1).save(state(4), step=4)
    assert t5ckpt.all_steps(url) == [4]


def test_t5x_reads_a_copy(bucket, tmp_path):
    """Also of its own state; and what the manifest says of the place is what T5X writes."""
    url, tree = bucket.url(), t5x_state(5, width=256)
    t5ckpt.Checkpointer(tree, checkpoints_dir=url).save(tree)
    copy_to_disk(bucket, url, tmp_path)
    t5x_rules.check(tmp_path / 'checkpoint_5')
    found = independent_reader.read(tmp_path / 'checkpoint_5')
    assert np.array_equal(found['target/mlp/kernel'], tree.state_dict()['target']['mlp']['kernel'])
    text = (tmp_path / 'checkpoint_5' / 'checkpoint').read_bytes()
    assert (b't5x-dummy-bucket' in text) == (bucket.scheme == 'gs')
    assert b'test-bucket' not in text


def test_from_disk_to_a_bucket_to_the_other_and_back(gs, s3, tmp_path):
    """Any tool may have copied; arrays are found wherever the checkpoint is."""
    tree = state(3)
    checkpointer(tmp_path / 'disk').save(tree, step=3)
    places = [open_storage(tmp_path / 'disk'), open_storage(gs.url()), open_storage(s3.url())]
    places.append(open_storage(tmp_path / 'again'))
    for source, target in itertools.pairwise(places):
        for key, _ in source.walk(''):
            target.make_dir(key.rpartition('/')[0])
            target.write(key, source.read(key))
        assert t5ckpt.all_steps(target.url()) == [3]
        back = checkpointer(target.url()).restore()
        assert np.array_equal(back['w'], tree['w'])


def test_a_data_iterator(bucket):
    class Counter:
        position = 0

        def save(self, filename):
            pathlib.Path(filename).write_text(str(self.position))
            pathlib.Path(f'{filename}.more').mkdir()
            pathlib.Path(f'{filename}.more/part').write_text('x')

        def load(self, filename):
            assert pathlib.Path(f'{filename}.more/part').read_text() == 'x'
            self.position = int(pathlib.Path(filename).read_text())

    url, data = bucket.url(), Counter()
    with checkpointer(url, dataset_iterator=data, keep_dataset_checkpoints=1) as ck:
        for step in (1, 2):
            data.position = step
            ck.save(at(step))
        data.position = 0
        ck.restore(step=2)
        assert data.position == 2
        assert ck.all_dataset_checkpoint_steps()[-1] == 2


# --- bytes and requests ------------------------------------------------------------------------------------------------


def test_a_slice_and_a_shard_read_only_their_chunks(bucket):
    url, tree = bucket.url(), state()
    checkpointer(url, compression=None).save(tree, step=0)
    view = t5ckpt.open_checkpoint(url)
    bucket.proxy.clear()
    _ = view['w'][0, 0]
    requests = bucket.proxy.clear()
    # A look whether the step is still the one that was opened.
    assert requests[-1].key.endswith('/checkpoint')
    passed = [request for request in requests[:-1] if request.kind == 'read']
    # The list of checksums has that of ``.zarray``, whose contents are in the manifest.
    assert [request.key.rpartition('/')[2] for request in passed] == ['integrity.0.json', '0.0']
    assert sum(request.received for request in passed) < CHUNK + 2000
    _ = view['w'][0, 0]
    passed = [request for request in bucket.proxy.clear()[:-1] if request.kind == 'read']
    assert [request.key.rpartition('/')[2] for request in passed] == ['0.0']
    half = jax.ShapeDtypeStruct((256, 512), np.float32, sharding=tree['w'].sharding)
    t5ckpt.Checkpointer({'w': half, 'bias': tree['bias'], 'step': tree['step']}, checkpoints_dir=url).restore()
    passed = [request for request in bucket.proxy.clear() if re.search(r'/w/[0-9.]+$', request.key)]
    assert sorted(request.received for request in passed) == [CHUNK] * (256 * 512 * 4 // CHUNK)


def test_a_save_writes_each_byte_once(bucket):
    url, tree = bucket.url(), state()
    with checkpointer(url, compression=None) as ck:
        ck.save(state(9) | {'step': np.int32(0)}, step=0)
        bucket.proxy.clear()
        ck.save(at(1))
    passed = bucket.proxy.clear()
    written = [request for request in passed if request.kind == 'write' and 'checkpoint_1/' in request.key]
    assert len(written) == len({request.key for request in written})
    nbytes = sum(request.sent for request in written)
    assert tree['w'].nbytes + tree['bias'].nbytes <= nbytes < tree['w'].nbytes + tree['bias'].nbytes + 10_000
    # What is read are small things, no chunk.
    assert sum(request.received for request in passed) < 50_000
    assert written[-1].key.endswith('checkpoint_1/checkpoint')


@pytest.mark.slow
def test_a_listing_asks_for_manifests_not_for_chunks(bucket):
    url = bucket.url()
    tree = {f'leaf{i}': np.full(300, i, np.float32) for i in range(50)}
    with checkpointer(url, tree) as ck:
        for step in range(5):
            ck.save(tree, step=step)
        bucket.proxy.clear()
        assert ck.all_steps() == [0, 1, 2, 3, 4]
    passed = counts(bucket)
    assert passed.pop('list') == 1
    assert sum(passed.values()) == 5
    assert t5ckpt.latest_step(url) == 4
    # The newest manifest alone.
    assert sum(counts(bucket).values()) == 2


@pytest.mark.slow
def test_more_names_than_one_page_of_a_listing(bucket):
    """1,100 directories without a manifest, and names that a listing encodes, around two steps."""
    url = bucket.url()
    storage = open_storage(url)
    with checkpointer(url) as ck:
        ck.save(at(1))
        ck.save(at(5000))
    names = ['a&b <c>', 'd+e', 'ä/ö', *(f'step_{number}/x' for number in range(1100))]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: storage.write(name, b''), names))
    assert {'a&b <c>', 'd+e', 'ä'} <= set(storage.names('', ''))
    assert [entry.is_dir for entry in storage.entries() if entry.name in ('d+e', 'ä')] == [False, True]
    assert len(storage.names('', 'step_')) == 1100
    assert [name for name in storage.names('', '') if name.startswith('checkpoint_')] == [
        'checkpoint_1',
        'checkpoint_5000',
    ]


def test_a_listing_without_botocore_lists_all_keys(s3, monkeypatch):
    """Then TensorStore sends all requests, and its listings have no delimiter."""
    url = s3.url()
    with checkpointer(url) as ck:
        ck.save(at(1))
        ck.save(at(2))
    monkeypatch.setitem(sys.modules, 'botocore.session', None)
    storage = open_storage(url)
    assert not storage.copies
    assert t5ckpt.all_steps(storage) == [1, 2]
    assert t5ckpt.latest_step(storage) == 2
    assert storage.names('', '') == ['checkpoint_1', 'checkpoint_2']


@pytest.mark.slow
def test_retention_never_deletes_a_step_of_orbax_that_begins_like_one_of_t5x(bucket, caplog):
    url = bucket.url()
    state_dict = {'target': {'w': 'PLACEHOLDER://target.w'}}
    manifest = msgpack.packb({'version': 3, 'optimizer': state_dict})
    bucket.put(f'{url}/checkpoint_1/checkpoint', manifest)
    with checkpointer(url, keep=1) as ck:
        for step in (2, 3, 4):
            ck.save(at(step))
    assert bucket.raw(f'{url}/checkpoint_1/checkpoint') == manifest
    assert 4 in t5ckpt.all_steps(url)


@pytest.mark.slow
def test_steps_that_others_add_and_take_away(bucket):
    url = bucket.url()
    with checkpointer(url) as ck:
        for step in (1, 2, 30):
            ck.save(at(step))
    storage = open_storage(url)
    storage.delete_tree('checkpoint_2')
    for key, _ in storage.walk('checkpoint_1'):
        storage.write(key.replace('checkpoint_1/', 'checkpoint_100/'), storage.read(key))
    assert t5ckpt.all_steps(url) == [1, 30, 100]
    assert np.array_equal(checkpointer(url).restore(step=100)['bias'], state()['bias'])


# --- options and errors ------------------------------------------------------------------------------------------------


def test_options_are_checked(bucket, tmp_path):
    url = bucket.url()
    with pytest.raises(ValueError, match='has no option endpont'):
        t5ckpt.all_steps(url, storage_options={'endpont': 'x'})
    with pytest.raises(ValueError, match='retry_seconds=0'):
        t5ckpt.Checkpointer({}, checkpoints_dir=url, storage_options={'retry_seconds': 0})
    with pytest.raises(ValueError, match="direct_bytes='x' is not an integer"):
        t5ckpt.open_checkpoint(str(tmp_path), storage_options={'direct_bytes': 'x'})
    with pytest.raises(ValueError, match='no bucket'):
        t5ckpt.all_steps(f'{bucket.scheme}://')


def test_s3_options_instead_of_the_environment(s3, monkeypatch):
    url = s3.url()
    checkpointer(url).save(at(1))
    for name in ('AWS_ENDPOINT_URL_S3', 'AWS_REGION', 'AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY'):
        monkeypatch.delenv(name)
    s3.proxy.clear()
    options = {'endpoint': s3.proxy.url, 'region': 'us-east-1', 'anonymous': True}
    assert t5ckpt.all_steps(url, storage_options=options) == [1]
    assert list(t5ckpt.checkpoints_iterator(url, timeout=0, storage_options=options)) == [1]
    _ = t5ckpt.open_checkpoint(url, storage_options=options)['w'][0]
    passed = s3.proxy.clear()
    assert passed
    assert not any('authorization' in request.headers for request in passed)
    with checkpointer(f'{url}-next', storage_options=options) as ck:
        warm = t5ckpt.WarmStart(url, step=1)
        assert np.array_equal(t5ckpt.restore_or_init(ck, state, initial_checkpoint=warm)['w'], state()['w'])


@pytest.mark.parametrize('environ', [{'AWS_REGION': '', 'AWS_DEFAULT_REGION': ''}, {'AWS_PROFILE': 'none'}], ids=str)
def test_an_environment_of_s3_that_names_no_region_or_a_profile_that_is_none(s3, monkeypatch, environ):
    """The keys in the environment sign, and a region that is empty is none."""
    url = s3.url()
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    s3.proxy.clear()
    checkpointer(url).save(at(1))
    assert t5ckpt.all_steps(url) == [1]
    signed = [request.headers['authorization'] for request in s3.proxy.clear()]
    assert signed
    assert all('/us-east-1/s3/aws4_request' in text for text in signed)


def test_a_range_beyond_the_end_of_an_object_reads_no_more_than_the_rest(bucket):
    storage = open_storage(bucket.url())
    storage.write('f', b'0123456789')
    assert [storage.read('f', *part) for part in ((8, 64), (20, 64), (10,), (0, 64))] == [
        b'89',
        b'',
        b'',
        b'0123456789',
    ]


@pytest.mark.slow
def test_google_without_credentials_is_anonymous(gs, tmp_path):
    url = gs.url()
    checkpointer(url).save(at(1))
    gs.proxy.clear()
    # TensorStore looks for credentials once per process.
    environ = {name: value for name, value in os.environ.items() if not name.startswith('GOOGLE_')}
    program = f'import t5ckpt; print(t5ckpt.open_checkpoint({url!r})["w"][0].sum())'
    command = [sys.executable, '-c', program]
    environ |= {'HOME': str(tmp_path), 'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(float(np.asarray(state()['w'])[0].sum()), rel=1e-5)
    passed = gs.proxy.clear()
    assert passed
    assert not any('authorization' in request.headers for request in passed)


def test_a_refused_request_names_bucket_key_and_status(bucket):
    url = bucket.url()
    checkpointer(url).save(at(1))
    bucket.proxy.choose = lambda kind, key: '403'
    for attempt in (
        lambda: t5ckpt.all_steps(url),
        lambda: t5ckpt.open_checkpoint(url),
        lambda: checkpointer(url).save(at(2)),
        lambda: checkpointer(url).restore(step=1),
    ):
        with pytest.raises(errors.AccessDeniedError, match=f'{url}.*403'):
            attempt()
    bucket.proxy.choose = lambda kind, key: '403' if '/w/' in key else None
    with pytest.raises(errors.AccessDeniedError, match=r'w: .*/checkpoint_1/.*/w.*403'):
        checkpointer(url).restore(step=1)
    with pytest.raises(errors.AccessDeniedError, match=r'w in .*/checkpoint_2.*403'):
        checkpointer(url).save(at(2))
    assert t5ckpt.all_steps(url) == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('kinds', 'action', 'attempt'),
    [
        (['write'], 'writing', lambda url: checkpointer(url).save(at(2))),
        (['read', 'head'], 'reading', t5ckpt.open_checkpoint),
        (['list', 'head', 'read'], 'listing', t5ckpt.all_steps),
        (['delete'], 'deleting', lambda url: checkpointer(url).delete(1)),
    ],
)
def test_a_refused_request_names_what_the_credentials_must_permit(bucket, kinds, action, attempt):
    url = bucket.url()
    checkpointer(url).save(at(1))
    bucket.proxy.choose = lambda kind, key: '403' if kind in kinds else None
    with pytest.raises(errors.AccessDeniedError, match=rf'{url}.*403.*permit {action} there'):
        attempt(url)


@pytest.mark.slow
def test_a_server_that_fails_ends_the_wait_in_time(bucket):
    url = bucket.url()
    checkpointer(url).save(at(1))
    bucket.proxy.choose = lambda kind, key: '503'
    options = {'retry_seconds': 3}
    with pytest.raises(errors.StorageError, match=f'{url.removesuffix("/run")}.*503'):
        t5ckpt.load_t5x_checkpoint(url, storage_options=options)


def test_absent_chunks_of_an_array_with_a_fill_value(bucket, tmp_path):
    values = np.repeat(np.arange(4, dtype=np.float32), 16).reshape(16, 4)
    write_filled(tmp_path / 'run', 0, values, '<f4')
    url = bucket.url()
    t5ckpt.copy_checkpoint(tmp_path / 'run', url)
    view = t5ckpt.open_checkpoint(url)
    assert view['target/w'].get().tobytes() == values.tobytes()
    assert view['target/w'][2:6].tobytes() == values[2:6].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize('compression', [None, 'zstd'])
def test_a_flipped_bit_is_found_at_one_request_a_chunk(bucket, compression):
    """By restores, loads and slices of half a chunk; without a comparison no list is read."""
    url = bucket.url()
    checkpointer(url, compression=compression).save(at(1))
    reads = {
        'restore': lambda **options: checkpointer(url, **options).restore()['w'],
        'lazy': lambda **options: checkpointer(url, **options).restore(lazy_parameters=True)['w'].get(),
        'load': lambda **options: t5ckpt.load_t5x_checkpoint(url, **with_options(**options))['w'],
        'view': lambda **options: t5ckpt.open_checkpoint(url, **with_options(**options))['w'][:],
    }
    keys: list[str] = []
    for read in reads.values():
        bucket.proxy.clear()
        assert np.array_equal(read(), state()['w'])
        keys = [request.key for request in bucket.proxy.clear() if re.search(r'/w/[0-9.]+$', request.key)]
        assert len(set(keys)) == len(keys) > 1
        assert np.array_equal(read(verify='quick'), state()['w'])
        assert not [request for request in bucket.proxy.clear() if 'integrity.' in request.key]
    storage = open_storage(url)
    key = key_of(storage, '/w/0.0')
    data = bytearray(storage.read(key))
    data[len(data) // 2] ^= 1
    storage.write(key, bytes(data))
    for read in reads.values():
        with pytest.raises(errors.CorruptCheckpointError, match=r'w: .*/w/0\.0 is damaged'):
            read()


def test_damage_is_an_error(bucket):
    url = bucket.url()
    checkpointer(url).save(at(1))
    storage = open_storage(url)
    storage.delete_file(key_of(storage, '/w/0.0'))
    with pytest.raises(errors.CorruptCheckpointError, match=r'checkpoint_1/.*/w'):
        checkpointer(url).restore()


# What docs/storage.md says: requests of a save of two chunks, of one that also deletes a step, and of a restore of one of three.
REQUESTS = {
    'az': [
        {'write': 6, 'list': 2, 'delete': 1},
        {'write': 8, 'read': 4, 'list': 4, 'head': 4, 'delete': 3},
        {'read': 5, 'list': 2, 'head': 1},
    ],
    's3': [
        {'write': 6, 'list': 2, 'delete': 1},
        {'write': 8, 'read': 4, 'list': 4, 'head': 4, 'delete': 3},
        {'read': 5, 'list': 2, 'head': 1},
    ],
    'gs': [
        {'write': 6, 'read': 1, 'list': 3, 'delete': 1},
        {'write': 8, 'read': 9, 'list': 5, 'delete': 6},
        {'read': 6, 'list': 2},
    ],
}


@pytest.mark.slow
def test_the_requests_of_a_save_and_a_restore(bucket):
    """By kind. The page has the same numbers, so whoever changes one changes both."""
    tree = {'w': np.arange(2**16, dtype=np.float32).reshape(256, 256), 'step': 1}
    found, listings = [], []
    for keep in (None, 2):
        url = bucket.url()
        with checkpointer(url, tree, chunk_bytes=2**17, keep=keep) as ck:
            bucket.proxy.clear()
            for step in (1, 2, 3):
                listings.append(counts(bucket).get('list'))
                ck.save({**tree, 'w': tree['w'] + step, 'step': np.int32(step)})
        found.append(counts(bucket))
    bucket.proxy.clear()
    checkpointer(url, tree).restore()
    found.append(counts(bucket))
    assert found == REQUESTS[bucket.scheme]
    page = pathlib.Path(__file__).parents[2].joinpath('docs', 'storage.md').read_text()
    for what, requests in zip(('a save of two chunks', 'and a step that is deleted', 'a restore'), found, strict=True):
        row = next(line for line in page.splitlines() if line.startswith(f'| {what}'))
        total, _, kinds = row.split('|')[3 if bucket.scheme == 'gs' else 2].partition(':')
        assert int(total) == sum(requests.values())
        names = {'write': 'PUT', 'read': 'GET', 'list': 'LIST', 'head': 'HEAD', 'delete': 'DELETE'}
        shown = ', '.join(f'{requests[kind]} {name}' for kind, name in names.items() if kind in requests)
        assert kinds.strip() == shown
    place = "Google's storage" if bucket.scheme == 'gs' else 'S3 and Azure'
    assert f'{listings[1] - listings[2]} LIST more on {place}' in page


def test_a_checkpoint_of_others_survives_a_save_of_its_step(bucket):
    """The save is skipped, and leaves no marker by which the step would be collected."""
    url = bucket.url()
    bucket.put(f'{url}/checkpoint_1/_METADATA', b'{}')
    assert checkpointer(url).save(at(1)) is None
    checkpointer(url).save(at(2))
    assert bucket.raw(f'{url}/checkpoint_1/_METADATA') == b'{}'


@pytest.mark.slow
def test_retention_asks_whether_the_steps_that_stay_are_there(bucket):
    """Another tool may remove a checkpoint, also while the next save is under way."""
    url = bucket.url()
    with checkpointer(url, keep=2) as ck:
        ck.save(at(1))
        ck.save(at(2))
        open_storage(url).delete_tree('checkpoint_2')
        ck.save(at(3))
        assert ck.all_steps() == [1, 3]
        ck.save(at(4))
        assert ck.all_steps() == [3, 4]

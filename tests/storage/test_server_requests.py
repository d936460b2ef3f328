"""Requests that TensorStore does not send: copies of unchanged arrays inside the store, and deletions of many keys."""

import datetime
import http.server
import threading
import time
import urllib.parse

import jax
import numpy as np
import pytest

import t5ckpt
from t5ckpt.storage import open_storage
from t5ckpt.storage.s3_requests import AccessKeys, S3Requests
from t5ckpt.storage.server_requests import RefusedError


def state(step=0, size=2**20):
    """4 MB that stay as they are, and little that changes."""
    frozen = np.random.default_rng(1).standard_normal(size, dtype=np.float32).reshape(-1, 1024)
    return {'frozen': frozen, 'half': frozen.astype(jax.numpy.bfloat16), 'new': np.full(2048, step, np.float32)}


def checkpointer(url, **options):
    return t5ckpt.Checkpointer(state(), checkpoints_dir=url, chunk_bytes=2**20, **options)


def sent(bucket):
    """Bytes of chunks that were sent, and the kinds of all requests, since the last call."""
    passed = bucket.proxy.clear()
    return sum(request.sent for request in passed), [request.kind for request in passed]


def is_state(url, step):
    found = t5ckpt.load_t5x_checkpoint(url, step, verify='full')
    return all(np.array_equal(found[name], value) for name, value in state(step).items())


@pytest.mark.parametrize('compression', ['default', None, 'zstd'])
def test_a_second_save_sends_less_than_a_twentieth(bucket, compression):
    """And a third one, whose source is a copy. Each checkpoint has its files, and stays when the others are deleted."""
    url = bucket.url()
    with checkpointer(url, compression=compression) as ck:
        ck.save(state(0), step=0)
        first, _ = sent(bucket)
        for step in (1, 2):
            ck.save(state(step), step=step)
            again, kinds = sent(bucket)
            assert again < first / 20
            assert kinds.count('copy') == 6
        ck.delete(0)
        ck.delete(1)
        assert is_state(url, 2)
    assert t5ckpt.verify(url, 2, full=True).ok


def test_a_device_array_that_is_saved_again(bucket, caplog):
    """Also in the background. The log says how much was copied."""
    caplog.set_level('INFO', 't5ckpt')
    url, tree = bucket.url(), jax.device_put(state(0))
    with checkpointer(url) as ck:
        ck.save(tree, step=0)
        first, _ = sent(bucket)
        ck.save_async(tree, step=1).result()
        assert sent(bucket)[0] < first / 20
    assert f'{6 * 2**20} bytes of arrays copied in the store' in caplog.text
    assert np.array_equal(t5ckpt.load_t5x_checkpoint(url, 1)['frozen'], state()['frozen'])


def test_many_files_are_copied_at_once(bucket):
    """Also those of arrays that are not staged, since they are the objects of the previous save; nothing is read for them."""
    url, tree, in_flight, at_once = bucket.url(), jax.device_put(state(0)), set(), []

    def choose(kind, key):
        if kind == 'copy':
            in_flight.add(key)
            at_once.append(len(in_flight))
            time.sleep(0.2)
            in_flight.discard(key)

    with checkpointer(url) as ck:
        ck.save(tree, step=0)
        sent(bucket)
        bucket.proxy.choose = choose
        ck.save(tree, step=1)
    assert max(at_once) > 4
    assert 'read' not in [request.kind for request in bucket.proxy.clear() if request.key.endswith('.zarray')]
    found = t5ckpt.load_t5x_checkpoint(url, 1, verify='full')
    assert all(np.array_equal(found[name], tree[name]) for name in tree)


def test_what_was_replaced_or_removed_is_uploaded(bucket):
    """The server compares the version of each object."""
    url = bucket.url()
    with checkpointer(url, compression=None) as ck:
        ck.save(state(0), step=0)
        storage = open_storage(url)
        chunks = sorted(key for key, _ in storage.walk('checkpoint_0') if '/frozen/' in key and 'zarray' not in key)
        storage.write(chunks[0], b'x' * 2**20)
        storage.delete_file(chunks[1])
        sent(bucket)
        ck.save(state(1), step=1)
        uploaded, _ = sent(bucket)
        assert 2 * 2**20 < uploaded < 2.1 * 2**20
    assert is_state(url, 1)


@pytest.mark.parametrize('fault', ['501', '403', '400', 'empty', 'html', 'InternalError', '412', '404'])
def test_a_copy_that_fails_is_an_upload(bucket, fault):
    url = bucket.url()
    with checkpointer(url, storage_options={'retry_seconds': 2}) as ck:
        ck.save(state(0), step=0)
        bucket.proxy.choose = lambda kind, key: fault if kind == 'copy' else None
        ck.save(state(1), step=1)
        assert is_state(url, 1)
        bucket.proxy.choose = lambda kind, key: None
        ck.save(state(2), step=2)
        assert is_state(url, 2)


@pytest.mark.parametrize('fault', ['SlowDown', 'lost', 'dropped', 'truncated'])
def test_a_copy_is_tried_again(bucket, fault):
    """A throttling server slows the save down; a copy whose reply was lost is made twice."""
    url, failed = bucket.url(), set()

    def choose(kind, key):
        if kind != 'copy' or key in failed:
            return None
        failed.add(key)
        return fault

    with checkpointer(url) as ck:
        ck.save(state(0), step=0)
        first, _ = sent(bucket)
        bucket.proxy.choose = choose
        ck.save(state(1), step=1)
        assert len(failed) == 6
        assert sent(bucket)[0] < first / 20
    assert is_state(url, 1)


def test_copies_are_sent_again_some_time_after_the_server_has_failed_them(bucket):
    """An outage does not end them for the rest of a training."""
    url = bucket.url()
    with checkpointer(url, storage_options={'retry_seconds': 1}) as ck:
        ck.save(state(0), step=0)
        bucket.proxy.choose = lambda kind, key: '503' if kind == 'copy' else None
        ck.save(state(1), step=1)
        bucket.proxy.choose = lambda kind, key: None
        for step in range(2, 50):
            time.sleep(0.1)
            sent(bucket)
            ck.save(state(step), step=step)
            if sent(bucket)[1].count('copy') == 6:
                break
        else:
            pytest.fail('nothing was copied')
    assert is_state(url, 1)
    assert is_state(url, step)


def test_other_values_of_the_same_shape_are_uploaded(bucket):
    url = bucket.url()
    with checkpointer(url, compression=None) as ck:
        ck.save(state(0), step=0)
        sent(bucket)
        other = {**state(1), 'frozen': state(1)['frozen'] + 1}
        ck.save(other, step=1)
        assert 4 * 2**20 < sent(bucket)[0] < 4.1 * 2**20
    assert np.array_equal(t5ckpt.load_t5x_checkpoint(url, 1)['frozen'], other['frozen'])


def test_without_reuse_everything_is_uploaded(bucket):
    url = bucket.url()
    with checkpointer(url, reuse_unchanged=False) as ck:
        ck.save(state(0), step=0)
        first, _ = sent(bucket)
        ck.save(state(1), step=1)
        again, kinds = sent(bucket)
        assert again > first * 0.9
        assert 'copy' not in kinds


# --- deletions ---------------------------------------------------------------------------------------------------------


def test_a_request_deletes_a_thousand_keys(s3):
    url = s3.url()
    storage = open_storage(url)
    keys = [f'a/{number} & <{number}>' for number in range(1100)]
    for key in keys:
        s3.put(f'{url}/{key}', b'')
    s3.proxy.clear()
    storage.delete_files(keys)
    assert [request.kind for request in s3.proxy.clear()] == ['delete', 'delete']
    assert not list(storage.walk('a'))


@pytest.mark.parametrize('fault', ['501', '403', '400', 'empty', 'html', 'InternalError'])
def test_without_bulk_deletions_keys_are_deleted_one_by_one(s3, fault):
    url = s3.url()
    storage = open_storage(url)
    for key in 'abc':
        storage.write(key, b'')
    failed = []

    def choose(kind, key):
        if kind == 'delete' and not failed:
            failed.append(key)
            return fault
        return None

    s3.proxy.choose = choose
    storage.delete_files(['a', 'b', 'none'])
    assert failed
    assert [key for key, _ in storage.walk('')] == ['c']


# --- conditions and connections ----------------------------------------------------------------------------------------


def test_connections_that_the_server_has_closed_take_no_attempts(s3):
    """It closes those that are idle between two saves. There are as many as there were copies at once."""
    url = s3.url()
    with checkpointer(url, storage_options={'retry_seconds': 1}) as ck:
        ck.save(state(0), step=0)
        s3.proxy.choose = lambda kind, key: 'slow' if kind == 'copy' else None
        ck.save(state(1), step=1)
        s3.proxy.hang_up()
        ck.delete(0)
    assert t5ckpt.all_steps(url) == [1]


def test_a_request_is_sent_again_while_another_one_to_its_key_is_under_way(s3):
    """S3 answers with 409: neither is the manifest there, nor does the server not know the condition."""
    url, failed = s3.url(), set()

    def choose(kind, key):
        if not key.endswith('/checkpoint') or kind not in ('write', 'delete') or (kind, key) in failed:
            return None
        failed.add((kind, key))
        return 'ConditionalRequestConflict'

    with checkpointer(url, storage_options={'retry_seconds': 5}) as ck:
        s3.proxy.choose = choose
        assert ck.save(state(0), step=0) is not None
        assert ck.save(state(1), step=0, overwrite=True) is not None
        s3.proxy.clear()
        ck.delete(0)
        assert {kind for kind, _ in failed} == {'write', 'delete'}
    assert [request.status for request in conditional_deletions(s3)] == [409, 204]


def conditional_deletions(bucket):
    return [request for request in bucket.proxy.clear() if request.kind == 'delete' and 'if-match' in request.headers]


def test_a_deletion_that_is_refused_keeps_its_condition(s3):
    """The clock of the machine was wrong for a while."""
    url = s3.url()
    with checkpointer(url, storage_options={'retry_seconds': 1}) as ck:
        ck.save(state(0), step=0)
        s3.proxy.choose = lambda kind, key: 'RequestTimeTooSkewed' if kind == 'delete' else None
        with pytest.raises(t5ckpt.errors.AccessDeniedError, match='The clock of this machine'):
            ck.delete(0)
        s3.proxy.choose = lambda kind, key: None
        s3.proxy.clear()
        ck.delete(0)
    assert conditional_deletions(s3)
    assert t5ckpt.all_steps(url) == []


def test_credentials_that_expire_for_a_while_turn_nothing_off(s3):
    """S3 answers with 400. Copies, conditions and deletions of many keys are sent again with the new credentials."""
    url = s3.url()
    with checkpointer(url, storage_options={'retry_seconds': 1}) as ck:
        ck.save(state(0), step=0)
        s3.proxy.choose = lambda kind, key: 'ExpiredToken' if kind == 'copy' else None
        ck.save(state(1), step=1)
        s3.proxy.choose = lambda kind, key: 'ExpiredToken' if kind == 'delete' else None
        with pytest.raises(t5ckpt.errors.AccessDeniedError, match=r'ExpiredToken.*renew them'):
            ck.delete(0)
        with pytest.raises(t5ckpt.errors.AccessDeniedError, match=r'ExpiredToken.*renew them'):
            open_storage(url).delete_files(['a', 'b'])
        s3.proxy.choose = lambda kind, key: None
        # The pause after a copy that failed.
        time.sleep(1)
        sent(s3)
        ck.save(state(2), step=2)
        assert sent(s3)[1].count('copy') == 6
        ck.delete(1)
        passed = s3.proxy.clear()
    assert any('if-match' in request.headers for request in passed if request.kind == 'delete')
    assert any('\n' in request.key for request in passed if request.kind == 'delete')
    assert t5ckpt.all_steps(url) == [0, 2]


# --- signatures --------------------------------------------------------------------------------------------------------

# Of "Signature Calculations for the Authorization Header" in Amazon's documentation of S3.
EXAMPLES = [
    ('/test.txt', {'Range': 'bytes=0-9'}, 'f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41'),
    ('/?lifecycle=', {}, 'fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543'),
    ('/?max-keys=2&prefix=J', {}, '34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7'),
]


@pytest.mark.parametrize(('target', 'headers', 'signature'), EXAMPLES)
def test_the_signature_is_amazons(target, headers, signature):
    keys = AccessKeys('AKIAIOSFODNN7EXAMPLE', 'wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY')
    requests = S3Requests('', 'https://examplebucket.s3.amazonaws.com', 'us-east-1', 1, lambda: keys)
    requests.clock = lambda: datetime.datetime(2013, 5, 24, tzinfo=datetime.UTC)
    assert requests.signed('GET', target, headers, b'')['Authorization'].endswith(f'Signature={signature}')


def test_keys_of_a_profile_sign_and_no_keys_do_not(s3, monkeypatch, tmp_path):
    """An anonymous storage copies without a signature; a profile without keys in its file copies nothing."""
    file = tmp_path / 'credentials'
    file.write_text('[mine]\naws_access_key_id = one\naws_secret_access_key = two\n')
    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(file))
    for options, starts in (({'profile': 'mine'}, 'AWS4-HMAC-SHA256 Credential=one/'), ({'anonymous': True}, '')):
        url = s3.url()
        storage = open_storage(url)
        storage.write('a', b'1')
        s3.proxy.clear()
        copy = open_storage(url, options).copy_unchanged('a', 'b', storage.version('a'))
        assert copy == storage.version('b')
        [copied] = [request for request in s3.proxy.clear() if request.kind == 'copy']
        assert copied.headers.get('authorization', '').startswith(starts)
        assert bool(starts) == ('authorization' in copied.headers)
    assert not open_storage(s3.url(), {'profile': 'none'}).copies


@pytest.mark.parametrize('bucket', ['gs', 's3'], indirect=True)
def test_through_an_http_proxy_nothing_is_copied(bucket, monkeypatch):
    monkeypatch.setenv('http_proxy', 'http://127.0.0.1:9')
    monkeypatch.setenv('no_proxy', '')
    assert not open_storage(bucket.url()).copies


PAGES = {
    '': b'<Contents><Key>run/a+b%2Bc</Key></Contents><IsTruncated>true</IsTruncated>'
    b'<NextContinuationToken>x&amp;/=</NextContinuationToken>',
    'x&/=': b'<CommonPrefixes><Prefix>run/checkpoint_%31/</Prefix></CommonPrefixes><IsTruncated>false</IsTruncated>',
}


@pytest.mark.parametrize('has_token', [True, False])
def test_the_pages_of_a_listing_as_amazon_encodes_them(has_token):
    """A space is a plus. A page without the token of the next one is not taken for the last."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            page = PAGES[query.get('continuation-token', [''])[0]]
            page = page if has_token else page.partition(b'<NextContinuationToken>')[0]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'<ListBucketResult><EncodingType>url</EncodingType>%s</ListBucketResult>' % page)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            requests = S3Requests('b', f'http://127.0.0.1:{server.server_address[1]}', 'r', 5.0, lambda: None)
            if has_token:
                assert requests.children('run/') == ['run/a b+c', 'run/checkpoint_1/']
            else:
                with pytest.raises(RefusedError, match='no token'):
                    requests.children('run/')
        finally:
            server.shutdown()

"""Requests that TensorStore does not send: copies of unchanged arrays inside the store, and deletions of many keys."""

import base64
import hashlib
import hmac
import http.server
import json
import subprocess
import sys
import threading
import time
import urllib.parse

import jax
import numpy as np
import pytest
from support.options import with_options

import t5ckpt
from t5ckpt.storage import open_storage
from t5ckpt.storage.s3 import S3Requests
from t5ckpt.storage.server_requests import RefusedError


def state(step=0, size=2**20):
    """4 MB that stay as they are, and little that changes."""
    frozen = np.random.default_rng(1).standard_normal(size, dtype=np.float32).reshape(-1, 1024)
    return {'frozen': frozen, 'half': frozen.astype(jax.numpy.bfloat16), 'new': np.full(2048, step, np.float32)}


def checkpointer(url, **options):
    return t5ckpt.Checkpointer(state(), checkpoints_dir=url, **with_options(chunk_bytes=2**20, **options))


def sent(bucket):
    """Bytes of chunks that were sent, and the kinds of all requests, since the last call."""
    passed = bucket.proxy.clear()
    return sum(request.sent for request in passed), [request.kind for request in passed]


def is_state(url, step):
    found = t5ckpt.load_t5x_checkpoint(url, step, options=t5ckpt.CheckpointerOptions(verify='full'))
    return all(np.array_equal(found[name], value) for name, value in state(step).items())


@pytest.mark.slow
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
    found = t5ckpt.load_t5x_checkpoint(url, 1, options=t5ckpt.CheckpointerOptions(verify='full'))
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
        time.sleep(4)
        sent(s3)
        ck.save(state(2), step=2)
        assert sent(s3)[1].count('copy') == 6
        ck.delete(1)
        passed = s3.proxy.clear()
    assert any('if-match' in request.headers for request in passed if request.kind == 'delete')
    assert any('\n' in request.key for request in passed if request.kind == 'delete')
    assert t5ckpt.all_steps(url) == [0, 2]


# --- signatures --------------------------------------------------------------------------------------------------------


def signature_of(request, secret):
    """What Amazon computes of a request that has arrived (Signature Version 4)."""
    named = dict(part.split('=', 1) for part in request.headers['Authorization'].split(' ', 1)[1].split(', '))
    _, *scope = named['Credential'].split('/')
    names = named['SignedHeaders'].split(';')
    path, _, query = request.path.partition('?')
    hashed = request.headers['x-amz-content-sha256']
    values = [f'{name}:{request.headers[name]}' for name in names]
    query = '&'.join(sorted(part if '=' in part else f'{part}=' for part in filter(None, query.split('&'))))
    lines = [request.command, path, query, *values, '', ';'.join(names), hashed]
    canonical = hashlib.sha256('\n'.join(lines).encode()).hexdigest()
    text = '\n'.join(['AWS4-HMAC-SHA256', request.headers['X-Amz-Date'], '/'.join(scope), canonical])
    key = f'AWS4{secret}'.encode()
    for part in (*scope, text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    assert {'host', 'x-amz-date', 'x-amz-security-token'} <= {*names}
    return key.hex(), named['Signature']


def test_what_arrives_is_what_was_signed(monkeypatch):
    """Names with spaces, signs and letters of other languages, and the conditions."""
    arrived = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            arrived.append(signature_of(self, 'secret'))
            body = {
                'PUT': b'<CopyObjectResult><ETag>&quot;e&quot;</ETag></CopyObjectResult>',
                'GET': b'<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>',
                'POST': b'<DeleteResult><Deleted><Key>a</Key></Deleted><Deleted><Key>b</Key></Deleted></DeleteResult>',
            }.get(self.command, b'')
            self.send_response(200)
            self.send_header('Content-Length', str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

        def log_message(self, *_):
            pass

    for name, value in (('ACCESS_KEY_ID', 'one'), ('SECRET_ACCESS_KEY', 'secret'), ('SESSION_TOKEN', 'token')):
        monkeypatch.setenv(f'AWS_{name}', value)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            requests = S3Requests(
                'box', f'http://127.0.0.1:{server.server_address[1]}', 'eu-west-1', 5.0, {'type': 'environment'}
            )
            assert requests.copy('a b+c/ä~', 'd=e&f//g', b'\0"x"') == b'\0"e"'
            assert requests.children('run/a b+') == []
            assert requests.delete_unchanged('k?#%', b'\0"x"')
            assert requests.delete_many(['a', 'b & <c>'])
        finally:
            server.shutdown()
    assert len(arrived) == 4
    assert all(expected == sent for expected, sent in arrived)


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


@pytest.mark.slow
@pytest.mark.parametrize('line', ['s3 =\n  use_accelerate_endpoint = true', 'defaults_mode = bogus'])
def test_the_profile_does_not_say_how_requests_are_sent(s3, tmp_path, monkeypatch, line):
    """Each of them was repeated as in an outage, and no step was deleted."""
    (tmp_path / 'config').write_text(f'[default]\n{line}\n')
    monkeypatch.setenv('AWS_CONFIG_FILE', str(tmp_path / 'config'))
    with checkpointer(s3.url(), keep=1) as ck:
        ck.save(state(0), step=0)
        ck.save(state(1), step=1)
        assert ck.all_steps() == [1]


def test_tokens_of_a_service_account(gs, tmp_path, monkeypatch):
    """google-auth gets them from the server that the file names; a copy, a listing and a deletion have one."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers['Content-Length']))
            self.send_response(200)
            self.send_header('Content-Type', 'application/json')
            self.end_headers()
            self.wfile.write(b'{"access_token": "of-the-account", "expires_in": 3600, "token_type": "Bearer"}')

        def log_message(self, *_):
            pass

    key = rsa.generate_private_key(65537, 2048)
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            file = tmp_path / 'account.json'
            facts = {'type': 'service_account', 'client_email': 'me@test', 'private_key_id': 'x', 'project_id': 'test'}
            facts |= {'private_key': key.private_bytes(*kinds).decode(), 'client_id': '1'}
            file.write_text(json.dumps(facts | {'token_uri': f'http://127.0.0.1:{server.server_address[1]}/token'}))
            url = gs.url()
            # TensorStore looks for credentials once per process, and knows no other server of tokens.
            open_storage(url).write('a', b'1')
            monkeypatch.setenv('GOOGLE_APPLICATION_CREDENTIALS', str(file))
            monkeypatch.delenv('GOOGLE_AUTH_TOKEN_FOR_TESTING')
            (tmp_path / 'netrc').write_text('default login me password secret')
            monkeypatch.setenv('NETRC', str(tmp_path / 'netrc'))
            storage = open_storage(url)
            gs.proxy.clear()
            assert storage.copy_unchanged('a', 'b', storage.version('a')) == storage.version('b')
            assert storage.names('', '') == ['a', 'b']
        finally:
            server.shutdown()
    tokens = {request.kind: request.headers.get('authorization') for request in gs.proxy.clear()}
    assert tokens['copy'] == tokens['list'] == 'Bearer of-the-account'


@pytest.mark.parametrize('bucket', ['gs', 's3'], indirect=True)
def test_all_requests_go_through_an_http_proxy(bucket, monkeypatch):
    """With the name and the password in its address; ``no_proxy`` excepts a server."""
    monkeypatch.setenv('http_proxy', bucket.proxy.url.replace('//', '//me:p%40ss@'))
    monkeypatch.setenv('no_proxy', '')
    url = bucket.url()
    with bucket.served_by(bucket.server), checkpointer(url, keep=1) as ck:
        ck.save(state(0), step=0)
        ck.save(state(1), step=1)
        ck.wait_until_finished()
    passed = bucket.proxy.clear()
    assert {'copy', 'delete', 'list', 'write'} <= {request.kind for request in passed}
    basic = 'Basic ' + base64.b64encode(b'me:p@ss').decode()
    assert all(request.headers.get('proxy-authorization') == basic for request in passed)
    assert t5ckpt.all_steps(url) == [1]
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    bucket.proxy.clear()
    with bucket.served_by(bucket.server):
        assert t5ckpt.all_steps(url) == [1]
    assert not bucket.proxy.clear()


WITHOUT_BOTOCORE = """
import sys
sys.modules['botocore'] = None
import numpy as np, t5ckpt

def state(step):
    return {'w': np.full(2**16, step, np.float32)}

with t5ckpt.Checkpointer(state(0), checkpoints_dir=sys.argv[1], keep=1) as ck:
    for step in (1, 2, 3):
        ck.save(state(step), step=step)
    ck.save(state(4), step=3, overwrite=True)
    assert np.array_equal(ck.restore(3)['w'], state(4)['w'])
    try:
        ck.delete(2)
    except t5ckpt.errors.AccessDeniedError as error:
        print(error)
assert t5ckpt.all_steps(sys.argv[1]) == [1, 2, 3]
"""


@pytest.mark.slow
def test_without_botocore_no_manifest_is_deleted(s3):
    """TensorStore deletes without a condition, which may hide a step that was saved again. All else works."""
    url = s3.url()
    done = subprocess.run([sys.executable, '-c', WITHOUT_BOTOCORE, url], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cure = "its version would not be compared: botocore is not installed: pip install botocore, or pip install 't5ckpt[s3]'"
    assert done.stdout.endswith(f'{url}/checkpoint_2/checkpoint is not deleted, since {cure}\n')
    # Once for each of the last two saves of a new step, and for the one that replaces it.
    kept = f'the save is complete: [Errno 1] {url}/checkpoint_1/checkpoint is not deleted'
    assert done.stderr.count(kept) == 3, done.stderr
    deleted = {request.key for request in s3.proxy.clear() if request.kind == 'delete'}
    assert not any(key.endswith('/checkpoint') for key in deleted)
    # The markers of these deletions are gone, so that a reader can hold the steps.
    assert not open_storage(url).names('.t5ckpt/busy', ('1.', '2.'))
    with checkpointer(url, keep=1) as ck:
        ck.save(state(5), step=5)
    assert t5ckpt.all_steps(url) == [5]


def test_without_a_region_no_manifest_is_deleted(monkeypatch):
    """Amazon's servers tell it to TensorStore alone."""
    for name in ('AWS_REGION', 'AWS_DEFAULT_REGION', 'AWS_ENDPOINT_URL', 'AWS_ENDPOINT_URL_S3'):
        monkeypatch.delenv(name, raising=False)
    storage = open_storage('s3://box/run', {'anonymous': True})
    with pytest.raises(
        t5ckpt.errors.AccessDeniedError, match=r's3://box/run/k is not deleted.*option region, or set AWS_REGION'
    ):
        storage.delete_unchanged('k', b'1')


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
            address = f'http://127.0.0.1:{server.server_address[1]}'
            requests = S3Requests('b', address, 'eu-west-1', 5.0, {'type': 'anonymous'})
            if has_token:
                assert requests.children('run/') == ['run/a b+c', 'run/checkpoint_1/']
            else:
                with pytest.raises(RefusedError, match='no token'):
                    requests.children('run/')
        finally:
            server.shutdown()

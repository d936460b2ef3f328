"""Azure Blob Storage, where it differs from the other object stores; real requests to Azurite."""

import concurrent.futures
import itertools
import os
import subprocess
import sys
import traceback

import azure.storage.blob
import numpy as np
import pytest
from support import libraries, servers

import t5ckpt
from t5ckpt import errors
from t5ckpt.storage import open_storage
from t5ckpt.storage.azure import blob_service
from t5ckpt.storage.options import AzureOptions

STATE = {'w': np.arange(2**14, dtype=np.float32).reshape(128, 128)}
TEXT = f'DefaultEndpointsProtocol=https;AccountName=one;AccountKey={servers.AZURE_KEY};EndpointSuffix=core.windows.net'
KEY, BLOB = {'AZURE_STORAGE_KEY': 'a2V5'}, 'blob.core.windows.net'
ONE = ('one', 'https://one.blob.core.windows.net')
TWO = ('two', 'https://two.blob.core.windows.net')


def service(server):
    credential = {'account_name': servers.AZURE_ACCOUNT, 'account_key': servers.AZURE_KEY}
    return azure.storage.blob.BlobServiceClient(f'{server}/{servers.AZURE_ACCOUNT}', credential)


@pytest.mark.parametrize(
    ('options', 'environ', 'found', 'kind'),
    [
        ({}, {'AZURE_STORAGE_CONNECTION_STRING': TEXT}, ONE, 'key'),
        ({'account': 'two'}, {'AZURE_STORAGE_CONNECTION_STRING': TEXT}, TWO, None),
        ({'account': 'two'}, {'AZURE_STORAGE_KEY': 'a2V5'}, TWO, 'key'),
        ({}, {'AZURE_STORAGE_ACCOUNT': 'one', 'AZURE_STORAGE_SAS_TOKEN': '?sv=1&sig=x'}, ONE, 'signature'),
        (
            {},
            {'AZURE_STORAGE_CONNECTION_STRING': TEXT.replace('windows.net', 'chinacloudapi.cn')},
            ('one', 'https://one.blob.core.chinacloudapi.cn'),
            'key',
        ),
        (
            {'endpoint': 'https://one.blob.core.chinacloudapi.cn/'},
            {},
            ('one', 'https://one.blob.core.chinacloudapi.cn'),
            None,
        ),
        ({'endpoint': 'http://127.0.0.1:1/dev'}, {}, ('dev', 'http://127.0.0.1:1/dev'), None),
        ({'endpoint': 'http://azurite:1/dev'}, KEY, ('dev', 'http://azurite:1/dev'), 'key'),
        ({'endpoint': f'https://one.z01.{BLOB}'}, KEY, ('one', f'https://one.z01.{BLOB}'), 'key'),
        ({'endpoint': f'https://one.privatelink.{BLOB}'}, KEY, ('one', f'https://one.privatelink.{BLOB}'), 'key'),
        (
            {'account': 'one'},
            {
                'AZURE_STORAGE_CONNECTION_STRING': 'AccountName=one;BlobEndpoint=https://x.org;SharedAccessSignature=sig=x'
            },
            ('one', 'https://x.org'),
            'signature',
        ),
        ({'anonymous': True}, {'AZURE_STORAGE_CONNECTION_STRING': TEXT}, ONE, None),
        ({}, {'AZURE_STORAGE_CONNECTION_STRING': f' {TEXT.replace(";", " ;; ")};\n'}, ONE, 'key'),
        (
            {},
            {
                'AZURE_STORAGE_CONNECTION_STRING': 'blobendpoint=https://x.org;accountname=one;sharedaccesssignature=sig=x'
            },
            ('one', 'https://x.org'),
            'signature',
        ),
    ],
)
def test_the_account_is_that_of_the_options_or_of_the_environment(options, environ, found, kind):
    service = blob_service(AzureOptions(**options), environ, 'az://container/run')
    url, signed, _ = service.url.partition('?')
    assert (service.account_name, url.rstrip('/')) == found
    has = {'key': hasattr(service.credential, 'account_key'), 'signature': bool(signed)}
    assert [name for name in has if has[name]] == ([] if kind is None else [kind])


def test_without_an_account_the_error_names_the_option(monkeypatch):
    for name in ('AZURE_STORAGE_ACCOUNT', 'AZURE_STORAGE_CONNECTION_STRING'):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r'az://container/run: no storage account.*option account'):
        open_storage('az://container/run')


@pytest.mark.parametrize(
    'text',
    [
        'nonsense',
        'AccountKey=SECRET',
        'AccountKey=SECRET;AccountName',
        '"AccountName=one;AccountKey=SECRET"',
        'AccountName="one";AccountKey=SECRET',
        "AccountName=one;AccountKey='SECRET'",
    ],
)
def test_a_malformed_connection_string_is_refused_and_not_shown(text, monkeypatch):
    """Docker keeps the quotation marks in a file of variables."""
    monkeypatch.setenv('AZURE_STORAGE_CONNECTION_STRING', text)
    with pytest.raises(ValueError, match=r'CONNECTION_STRING .*AccountName=\.\.\.;AccountKey=') as caught:
        open_storage('az://container/run')
    assert 'SECRET' not in ''.join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    'url',
    [
        'abfss://box@mine.dfs.core.windows.net/a/run',
        'wasbs://box@mine.blob.core.windows.net/a/run',
        'abfs://box@mine.dfs.core.windows.net/a/run?comp=list',
    ],
)
def test_urls_of_other_tools_are_answered_with_ours(url):
    with pytest.raises(
        errors.UnsupportedFormatError, match=r'write az://box/a/run, with the storage option account=mine\.$'
    ):
        open_storage(url)
    with pytest.raises(errors.UnsupportedFormatError, match=r'write az://box/run\.$'):
        open_storage('abfs://box/run')


@pytest.mark.parametrize(
    'url',
    [
        'https://mine.blob.core.windows.net/box/a/run',
        'wasbs://box@mine.blob.core.windows.net/a/run',
        'az://box/a/run',
        'az:/box/a/run',
        'https:/mine.blob.core.windows.net/box/a/run',
    ],
)
def test_a_signature_in_a_url_is_refused_and_not_shown(url, tmp_path, monkeypatch):
    """azcopy and the portal give URLs with a shared access signature in them."""
    monkeypatch.chdir(tmp_path)
    signed = f'{url}?sv=2024-11-04&sr=c&sig=SECRET%3D&se=2030'
    for act in (
        lambda: open_storage(signed),
        lambda: t5ckpt.all_steps(signed),
        lambda: t5ckpt.Checkpointer(STATE, checkpoints_dir=signed),
        lambda: t5ckpt.open_checkpoint(f'{signed}\0'),
        lambda: t5ckpt.copy_checkpoint(signed, tmp_path / 'copy'),
    ):
        with pytest.raises(
            errors.InvalidPathError, match=f'{url}: .*Write az://.*option account.*AZURE_STORAGE_SAS_TOKEN to the query'
        ) as caught:
            act()
        assert 'SECRET' not in ''.join(traceback.format_exception(caught.value))
    assert not [*tmp_path.iterdir()]


def test_a_signature_in_the_endpoint_is_refused_and_not_shown():
    for given in ({'endpoint': 'https://one.blob.core.windows.net/?sv=1&sig=SECRET'}, {}):
        environ = {} if given else {'AZURE_STORAGE_ENDPOINT': 'https://one.blob.core.windows.net?sig=SECRET'}
        with pytest.raises(ValueError, match='AZURE_STORAGE_SAS_TOKEN') as caught:
            blob_service(AzureOptions(**given), environ, 'az://box/run')
        assert 'SECRET' not in str(caught.value)


@pytest.mark.parametrize('name', ['Box', 'bo', 'a--b', 'my_box', 'box.x'])
def test_a_name_that_no_container_can_have(az, name):
    with pytest.raises(errors.InvalidPathError, match='a bucket cannot have the name'):
        open_storage(f'az://{name}/run')


def test_without_the_library_the_error_names_the_extra():
    program = (
        "import sys; sys.modules['azure.storage.blob'] = None\n"
        'import t5ckpt\n'
        "try: t5ckpt.all_steps('az://box/run', storage_options={'account': 'x'})\n"
        'except t5ckpt.errors.MissingDependencyError as error: print(error)'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert "pip install 't5ckpt[azure]'" in done.stdout


def test_a_wrong_key_is_refused_with_what_to_check(az, monkeypatch):
    monkeypatch.setenv('AZURE_STORAGE_CONNECTION_STRING', f'AccountName={servers.AZURE_ACCOUNT};AccountKey=AAAA')
    with pytest.raises(errors.AccessDeniedError, match=r'test-bucket.*clock of this machine'):
        t5ckpt.all_steps(az.url())


def test_no_error_contains_a_signature(az):
    url = az.url()
    t5ckpt.Checkpointer(STATE, checkpoints_dir=url, options=t5ckpt.CheckpointerOptions(inline_bytes=16)).save(
        STATE, step=1
    )
    for fault in ('403', '404', '400', 'html', '503'):
        az.proxy.choose = lambda kind, key, fault=fault: fault if '/w/' in key else None
        options = {'retry_seconds': 1}
        with pytest.raises(errors.T5CkptError, match='az://test-bucket') as caught:
            t5ckpt.load_t5x_checkpoint(url, storage_options=options)
        assert 'sig=' not in ''.join(traceback.format_exception(caught.value))


@pytest.mark.parametrize('kind', ['signature', 'anonymous'])
def test_other_credentials(az, kind, monkeypatch):
    """A shared access signature saves and deletes, and a public container is read without one."""
    url = az.url()
    ends = servers.azure_path('test-bucket', '').partition('?')[2]
    monkeypatch.delenv('AZURE_STORAGE_CONNECTION_STRING')
    monkeypatch.setenv('AZURE_STORAGE_SAS_TOKEN', ends)
    with t5ckpt.Checkpointer(
        STATE, checkpoints_dir=url, keep=1, options=t5ckpt.CheckpointerOptions(inline_bytes=16)
    ) as ck:
        for step in (1, 2):
            ck.save(STATE, step=step)
        assert np.array_equal(ck.restore()['w'], STATE['w'])
        assert ck.all_steps() == [2]
    monkeypatch.delenv('AZURE_STORAGE_SAS_TOKEN')
    if kind == 'signature':
        with pytest.raises(errors.AccessDeniedError):
            t5ckpt.all_steps(url)
        return
    container = service(az.server).get_container_client('test-bucket')
    container.set_container_access_policy({}, public_access='container')
    try:
        options = {'anonymous': True}
        assert np.array_equal(t5ckpt.open_checkpoint(url, storage_options=options)['w'][5], STATE['w'][5])
    finally:
        container.set_container_access_policy({})


ROLE = """
import os, azure.identity, azure.storage.blob, numpy as np, t5ckpt
endpoint = os.environ['AZURE_STORAGE_ENDPOINT']
azure.storage.blob.BlobServiceClient(endpoint, azure.identity.DefaultAzureCredential()).create_container('test-bucket')
state = {'w': np.arange(2**14, dtype=np.float32)}
options = t5ckpt.CheckpointerOptions(inline_bytes=16)
with t5ckpt.Checkpointer(state, checkpoints_dir='az://test-bucket/run', keep=1, options=options) as ck:
    for step in (1, 2):
        ck.save(state, step=step)
    assert np.array_equal(ck.restore()['w'], state['w'])
    assert ck.all_steps() == [2]
assert np.array_equal(t5ckpt.open_checkpoint('az://test-bucket/run')['w'][5:9], state['w'][5:9])
"""


@pytest.mark.slow
def test_a_managed_identity_saves_and_restores(tmp_path):
    """azure-identity has the token, and chunks are read with a signature that is made with a user delegation key."""
    certificate = tmp_path / 'server.pem'
    servers.make_certificate(certificate)
    environ = {name: value for name, value in os.environ.items() if not name.startswith('AZURE_')}
    environ |= {'PYTHONPATH': libraries.path_of('azure-identity'), 'JAX_PLATFORMS': 'cpu'}
    environ |= {'REQUESTS_CA_BUNDLE': str(certificate), 'TENSORSTORE_CA_BUNDLE': str(certificate)}
    with servers.azure_server(tmp_path, certificate) as server, servers.azure_identity() as identity:
        environ |= {**identity, 'AZURE_STORAGE_ENDPOINT': f'{server}/{servers.AZURE_ACCOUNT}'}
        done = subprocess.run([sys.executable, '-c', ROLE], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_request_deletes_256_keys(az):
    storage = open_storage(az.url())
    keys = [f'many/{number:03} <&>' for number in range(300)]
    for key in keys:
        storage.write(key, b'')
    storage.write('stays', b'x')
    az.proxy.clear()
    storage.delete_files([*keys, 'was never there'])
    assert [request.kind for request in az.proxy.clear()] == ['delete'] * 2
    assert [key for key, _ in storage.walk('')] == ['stays']


@pytest.mark.parametrize('fault', ['501', '400', 'empty', 'html'])
def test_without_bulk_deletions_keys_are_deleted_one_by_one(az, fault):
    storage = open_storage(az.url())
    for key in ('a', 'b'):
        storage.write(key, b'')
    az.proxy.choose = lambda kind, key: fault if kind == 'delete' and not key else None
    storage.delete_files(['a', 'b'])
    assert list(storage.walk('')) == []


def test_a_copy_that_the_service_makes_in_the_background_is_given_up(az):
    """The chunk is uploaded."""
    url = az.url()
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=url, options=t5ckpt.CheckpointerOptions(inline_bytes=16)) as ck:
        ck.save(STATE, step=1)
        az.proxy.choose = lambda kind, key: 'pending' if kind in ('copy', 'head') and '/w/' in key else None
        az.proxy.clear()
        ck.save(STATE, step=2)
        chunks = [each.kind for each in az.proxy.clear() if each.key.endswith('/w/0.0') and each.status == 201]
        assert chunks.count('write') == 1
        assert t5ckpt.verify(url, 2, full=True).ok


def test_listings_have_no_directories(az):
    """In an account with a hierarchical namespace, directories are blobs, too."""
    url = az.url()
    storage = open_storage(url)
    storage.write('a/b/c', b'123')
    container = service(az.server).get_container_client('test-bucket')
    prefix = url.removeprefix('az://test-bucket/')
    for directory in ('a', 'a/b'):
        container.upload_blob(f'{prefix}/{directory}', b'', metadata={'hdi_isfolder': 'true'})
    container.upload_blob(f'{prefix}/console/', b'')
    assert list(storage.walk('')) == [('a/b/c', None)]
    assert [(entry.name, entry.is_dir) for entry in storage.entries()] == [('a', True), ('console', True)]
    [entry] = storage.entries('a/b')
    assert (entry.name, entry.is_dir) == ('c', False)


@pytest.mark.slow
def test_a_large_blob_is_written_and_read_in_parts(az):
    with az.served_by(az.server):
        storage = open_storage(az.url())
        data = os.urandom(2**20) * 257
        storage.write('large', data)
        assert storage.read('large') == data
        assert storage.read('large', 2**28 - 1, 2**28 + 5) == data[2**28 - 1 : 2**28 + 5]


@pytest.mark.slow
def test_each_page_of_a_listing_is_asked_for_again(az):
    """5,000 keys a page; a page that is refused is an error."""
    url = az.url()
    container = service(az.server).get_container_client('test-bucket')
    names = [f'{url.removeprefix("az://test-bucket/")}/{number:04}' for number in range(5001)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: container.upload_blob(name, b''), names))
    storage = open_storage(url)
    for fault in ('503', 'dropped', '403', '404', 'html', 'empty'):
        seen = itertools.count()
        az.proxy.choose = lambda kind, key, fault=fault, seen=seen: fault if next(seen) == 1 else None
        if fault in ('503', 'dropped'):
            assert len(list(storage.walk(''))) == 5001
            # A slow server is probed, too.
            assert next(seen) >= 3
        else:
            with pytest.raises(errors.StorageError, match='test-bucket'):
                list(storage.walk(''))

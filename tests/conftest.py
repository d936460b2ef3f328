"""Eight CPU devices for every test, and the golden cases unpacked once a run."""

import os
import pathlib
import sys

# Before jax is imported: both are read once, when its backend starts.
os.environ['JAX_PLATFORMS'] = 'cpu'
_FLAG = '--xla_force_host_platform_device_count'
if _FLAG not in os.environ.get('XLA_FLAGS', ''):
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_FLAG}=8'.strip()
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import gc  # noqa: E402
import uuid  # noqa: E402
from collections.abc import Generator  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# No deadline: a save waits for the disk, and a test must not depend on the time it takes.
hypothesis.settings.register_profile(
    't5ckpt',
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile('t5ckpt')

# Files that take longest, slow tests included: a worker takes a whole file, so the last files that are begun must be short.
_LONGEST = (
    *('test_every_call', 'test_example_kills', 'test_tiers', 'test_chaos', 'test_stores', 'test_interrupt'),
    *(
        'test_newcomer',
        'test_examples',
        'test_benchmarks',
        'test_readme',
        'test_site',
        'test_store_faults',
        'test_hostile',
    ),
    *('test_dataset_libraries', 'test_notebooks', 'test_hf_logits', 'test_tf_peer', 'test_async'),
    *('test_faults', 'test_holds', 'test_copy', 'test_hf', 'test_report', 'test_golden', 'test_roundtrip'),
    *('test_layouts', 'test_t5x_rules', 'test_faults_by_operation', 'test_object_stores'),
    *(
        'test_mmap_reader',
        'test_maybe_save',
        'test_rewrite',
        'test_stream',
        'test_cli',
        'test_integrity',
        'test_flax_file',
    ),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long files first."""
    ranks = {name: rank for rank, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


def pytest_collection_finish() -> None:
    """What has been imported stays until the end, so no garbage collection need look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope='session')
def golden(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The golden cases, unpacked. Shared by all tests: copy what you change."""
    from support import golden as cases

    root = tmp_path_factory.mktemp('golden')
    cases.unpack(root)
    return root


@pytest.fixture(scope='session')
def tf_golden(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The TensorFlow checkpoints among the golden cases, unpacked."""
    from support import golden as cases

    root = tmp_path_factory.mktemp('tf_golden')
    cases.unpack(root, 'tf_')
    return root


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    """Where a test saves its checkpoints; not there yet."""
    return tmp_path / 'run'


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket of a real server, as the test's user sees it.

    Attributes:
      scheme: 'az', 'gs' or 's3'.
      proxy: what all requests of the test pass through; see ``support/proxy.py``.
      server: the address behind it, for who looks from outside.
    """

    scheme: str
    proxy: object
    server: str

    def url(self) -> str:
        """A directory that no test has used yet."""
        return f'{self.scheme}://test-bucket/{uuid.uuid4().hex}/run'

    def environment(self) -> dict[str, str]:
        """The variables that a user of it sets."""
        if self.scheme == 'az':
            from support import servers

            text = f'AccountName={servers.AZURE_ACCOUNT};AccountKey={servers.AZURE_KEY}'
            return {
                'AZURE_STORAGE_CONNECTION_STRING': text,
                'AZURE_STORAGE_ENDPOINT': f'{self.proxy.url}/{servers.AZURE_ACCOUNT}',
            }
        if self.scheme == 'gs':
            return {'TENSORSTORE_GCS_HTTP_URL': self.proxy.url, 'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'token'}
        keys = {'AWS_ACCESS_KEY_ID': 'test', 'AWS_SECRET_ACCESS_KEY': 'test', 'AWS_REGION': 'us-east-1'}
        return keys | {'AWS_ENDPOINT_URL_S3': self.proxy.url}

    @contextlib.contextmanager
    def served_by(self, address: str) -> Generator[None]:
        """Has the requests sent to another server."""
        names = {'az': 'AZURE_STORAGE_ENDPOINT', 'gs': 'TENSORSTORE_GCS_HTTP_URL', 's3': 'AWS_ENDPOINT_URL_S3'}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(names[self.scheme], f'{address}/devstoreaccount1' if self.scheme == 'az' else address)
            yield

    def put(self, url: str, data: bytes) -> None:
        """Writes an object, by plain HTTP."""
        from support import servers

        put = {'az': servers.put_azure_blob, 'gs': servers.put_gcs_object, 's3': servers.put_s3_object}[self.scheme]
        put(self.server, 'test-bucket', url.removeprefix(f'{self.scheme}://test-bucket/'), data)

    def raw(self, url: str) -> bytes | None:
        """An object's bytes, by plain HTTP."""
        from support import servers

        path = {'az': servers.azure_path, 'gs': servers.gcs_path, 's3': servers.s3_path}[self.scheme]
        key = url.removeprefix(f'{self.scheme}://test-bucket/')
        status, data = servers.ask(self.server, 'GET', path('test-bucket', key))
        assert status in (200, 404)
        return data if status == 200 else None


def _bucket(scheme: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[Bucket]:
    from support import proxy, servers

    start, make = {
        'az': (servers.azure_server, servers.make_azure_container),
        'gs': (servers.gcs_server, servers.make_gcs_bucket),
        's3': (servers.s3_server, servers.make_s3_bucket),
    }[scheme]
    with start(tmp_path_factory.mktemp(scheme)) as server:
        make(server, 'test-bucket')
        front = proxy.Proxy(server)
        yield Bucket(scheme, front, server)
        front.close()


@pytest.fixture(scope='session')
def _az(tmp_path_factory: pytest.TempPathFactory) -> Generator[Bucket]:
    yield from _bucket('az', tmp_path_factory)


@pytest.fixture(scope='session')
def _gs(tmp_path_factory: pytest.TempPathFactory) -> Generator[Bucket]:
    yield from _bucket('gs', tmp_path_factory)


@pytest.fixture(scope='session')
def _s3(tmp_path_factory: pytest.TempPathFactory) -> Generator[Bucket]:
    yield from _bucket('s3', tmp_path_factory)


def _with_variables(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    bucket.proxy.reset()
    return bucket


@pytest.fixture
def az(_az: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Azure's store, with the variables that a user of it sets."""
    return _with_variables(_az, monkeypatch)


@pytest.fixture
def gs(_gs: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Google's store, with the variables that a user of it sets."""
    return _with_variables(_gs, monkeypatch)


@pytest.fixture
def s3(_s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An S3 server, with the variables that a user of it sets."""
    return _with_variables(_s3, monkeypatch)


@pytest.fixture(params=['az', 'gs', 's3'])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """Each of them in turn."""
    return request.getfixturevalue(request.param)

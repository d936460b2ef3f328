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


@pytest.fixture(scope='session')
def golden(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The golden cases, unpacked. Shared by all tests: copy what you change."""
    from support import golden as cases

    root = tmp_path_factory.mktemp('golden')
    cases.unpack(root)
    return root


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    """Where a test saves its checkpoints; not there yet."""
    return tmp_path / 'run'

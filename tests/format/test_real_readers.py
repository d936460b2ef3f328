"""Other readers of zarr return what ``compression='auto'`` wrote."""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from support.libraries import needs, path_of

import t5ckpt
from t5ckpt.format.codecs import BIT_LZ4, BIT_ZSTD, ZSTD

SCRIPT = pathlib.Path(__file__).parents[1] / 'support/with_zarr.py'


def state():
    rng = np.random.default_rng(0)
    weights = 0.02 * rng.standard_normal((600, 250), dtype=np.float32)
    half = weights.astype(jnp.bfloat16)
    return {
        'float32': weights,
        'bfloat16': half,
        'master': half.astype(np.float32),
        'float64': 1.1 * weights.astype(np.float64),
        'int32': rng.integers(0, 1000, 150_000, np.int32),
        'bool': weights > 0,
        'zeros': np.zeros((7, 30_000), np.float32),
        # A shuffle of bits destroys the period.
        'periodic': np.tile(rng.integers(0, 256, 30_011, np.uint8), 8),
        'noise': rng.integers(0, 256, 300_000, np.uint8),
    }


CODECS = dict.fromkeys(state(), BIT_LZ4) | {'float64': BIT_ZSTD, 'periodic': ZSTD, 'noise': None}


@pytest.fixture(scope='module')
def arrays(tmp_path_factory) -> pathlib.Path:
    """A directory with an array for each leaf: a save in memory, where 'auto' compresses as in a bucket, and its copy."""
    root, url = tmp_path_factory.mktemp('readers'), 'memory://real-readers'
    with t5ckpt.Checkpointer(
        state(), checkpoints_dir=url, options=t5ckpt.CheckpointerOptions(compression='auto', chunk_bytes=2**18)
    ) as ck:
        ck.save(state(), step=1)
    t5ckpt.copy_checkpoint(url, root / 'run')
    [directory] = {path.parents[1] for path in (root / 'run').rglob('.zarray')}
    found = {name: json.loads((directory / name / '.zarray').read_text())['compressor'] for name in CODECS}
    # 'auto' measures times: on a busy machine lz4 may be nearly as good, or save less time than it takes.
    assert found.pop('float64') in (BIT_LZ4, BIT_ZSTD)
    assert found.pop('float32') in (BIT_LZ4, None)
    assert found == {name: codec for name, codec in CODECS.items() if name not in ('float64', 'float32')}
    assert len(list((directory / 'float32').iterdir())) > 2, 'several chunks'
    return directory


def test_tensorstore(arrays):
    for name, values in state().items():
        spec = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': f'{arrays / name}/'}}
        found = ts.open(spec, open=True, read=True, recheck_cached=False).result()
        assert found.fill_value is None
        assert np.asarray(found.read().result()).tobytes() == values.tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize('version', [pytest.param('installed', marks=needs('zarr', 'zarr-python')), '3'])
def test_zarr_python(version, arrays, tmp_path):
    """The extra `peers` installs version 2; version 3 is in a directory of its own, and has no bfloat16."""
    major = importlib.metadata.version('zarr')[0] if version == 'installed' else version
    names = [name for name in CODECS if major == '2' or name != 'bfloat16']
    done = subprocess.run(
        [sys.executable, SCRIPT, arrays, tmp_path, *names],
        env=os.environ | ({'PYTHONPATH': path_of('zarr-3')} if version == '3' else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(major)
    for name in names:
        assert (tmp_path / name).read_bytes() == state()[name].tobytes(), name

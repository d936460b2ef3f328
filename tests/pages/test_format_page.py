"""docs/format.md is enough to write another reader from: the one that is printed there reads T5X's checkpoints and ours."""

import json
import pathlib
import re
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import partitioner
from support.bits import assert_same
from support.facts import facts_of
from support.golden import CASES, flatten
from support.options import with_options

import t5ckpt

PAGE = pathlib.Path(__file__).resolve().parents[2] / 'docs' / 'format.md'
# The first python block of the last section.
READER = re.search(r'## A reader\n.*?```python\n(.*?)```', PAGE.read_text(encoding='utf-8'), re.DOTALL).group(1)
FOREIGN = ('flax', 'jax', 'orbax', 't5ckpt', 'tensorstore', 'zarr')


@pytest.fixture(scope='module')
def reader(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp('reader') / 'reader.py'
    path.write_text(READER, encoding='utf-8')
    return runpy.run_path(str(path))


def codecs(step_dir: pathlib.Path) -> set[str | None]:
    found = [json.loads(path.read_text())['compressor'] for path in step_dir.rglob('.zarray')]
    return {codec and codec['id'] for codec in found}


def test_it_is_short_and_uses_no_library_of_ours_or_theirs():
    assert len(READER.splitlines()) <= 60
    code = f'{READER}\nimport sys\nprint(sorted(set({FOREIGN!r}) & set(sys.modules)))'
    done = subprocess.run([sys.executable, '-W', 'error', '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '[]'


@pytest.mark.parametrize('compression', [None, 'gzip'])
def test_it_reads_what_we_write(reader, run_dir, compression):
    """Sharded, replicated, odd sizes, many chunks, no dimensions, every kind of leaf."""
    mesh = partitioner.mesh()
    rows = NamedSharding(mesh, PartitionSpec('data', 'model'))
    names = ('float32', 'bfloat16', 'int4', 'float8_e4m3fn', 'complex64', 'bool', 'int8')
    arrays = {name: np.arange(300 * 7).reshape(300, 7).astype(jnp.dtype(name)) for name in names}
    state = {
        'target': {
            'sharded': jax.device_put(np.arange(2.0**14, dtype=np.float32).reshape(128, 128), rows),
            'odd': np.arange(13 * 17 * 3, dtype=np.float32).reshape(13, 17, 3),
            **arrays,
        },
        'zero': np.zeros((64, 64), np.float32),
        'none': None,
        'step': jnp.int32(5),
        'python': 3,
    }
    options = {'compression': compression, 'inline_bytes': 0, 'chunk_bytes': 1024}
    with t5ckpt.Checkpointer(state, checkpoints_dir=str(run_dir), **with_options(**options)) as checkpointer:
        checkpointer.save(state, step=5)
    assert codecs(run_dir / 'checkpoint_5') == {compression}
    found, expected = reader['read'](run_dir / 'checkpoint_5'), flatten(state)
    assert set(found) == set(expected)
    assert found.pop('none') is expected.pop('none') is None
    for name, value in expected.items():
        assert_same(found[name], np.asarray(value), name)


@pytest.mark.parametrize('case', [case for case in CASES if not case.orbax], ids=lambda case: case.name)
def test_it_reads_what_t5x_wrote(reader, golden, case):
    """Where a codec is needed that the standard library lacks, it says which."""
    step_dir = case.step_dir(golden)
    unknown = codecs(step_dir) - set(reader['DECODE'])
    if unknown:
        with pytest.raises(KeyError, match='optimizer' if case.name.endswith('version_absent') else '|'.join(unknown)):
            reader['read'](step_dir)
        return
    expected = case.expected(golden)
    found = reader['read'](step_dir)
    assert {name for name, value in found.items() if value is None} == set(expected.none_keys)
    assert {name for name, value in found.items() if value is not None} == set(expected.arrays)
    for name, array in expected.arrays.items():
        assert_same(found[name], array, name)


def test_the_golden_cases_that_it_reads(golden):
    """So that the test above cannot come to expect nothing but errors."""
    plain = [case.name for case in CASES if not case.orbax and codecs(case.step_dir(golden)) <= {None, 'gzip'}]
    assert {name.partition('_')[0] for name in plain} >= {'case05b', 'case06', 'case11', 'case14'}


def test_a_path_that_leads_out_is_refused(reader, tmp_path):
    for path in ('../secret/', '/etc/'):
        spec = {'driver': 'zarr', 'kvstore': {'path': path}, 'metadata': {}}
        with pytest.raises(AssertionError):
            dict(reader['leaves'](spec, tmp_path, 3))


def test_the_page_names_every_file_and_field_of_ours(run_dir):
    state = {
        'w': np.ones((64, 64)),
        'text': 'a',
        'empty': {},
        'key': jax.random.key(0),
        'n': 1,
        'u': np.ones(9, np.uint16),
    }
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=str(run_dir), options=t5ckpt.CheckpointerOptions(inline_bytes=0)
    ) as checkpointer:
        checkpointer.save(state, step=1)
    page = PAGE.read_text(encoding='utf-8')
    for path in (run_dir / 'checkpoint_1').iterdir():
        assert re.sub(r'\.0\.', '.<process>.', path.name) in page or (path / '.zarray').exists()
    facts = json.loads(facts_of(run_dir / 'checkpoint_1'))
    names = [*facts, *(f'tree.{name}' for name in facts['tree'])]
    assert [name for name in names if f'`{name}`' not in page and name != 'tree'] == []

"""Plain exports: any tree as one safetensors file, and back; read by the package whose format it is."""

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax import serialization as flax_serialization
from support import forked

import t5ckpt
from t5ckpt import ConvertOptions
from t5ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OutputExistsError,
    UnsupportedFormatError,
    UnsupportedLeafError,
)


def tree() -> dict[str, Any]:
    """All kinds of dtypes and shapes; what is large enough is stored, the rest inline."""
    rng = np.random.default_rng(0)
    return {
        'target': {
            'big': rng.standard_normal((300, 257)).astype(np.float32),
            'half': rng.standard_normal((130, 80)).astype(ml_dtypes.bfloat16),
            'eighth': rng.standard_normal((5, 3)).astype(ml_dtypes.float8_e4m3fn),
            'f16': np.float16([1.5, np.inf, np.nan]),
        },
        'state': {
            'step': np.int32(41),
            'count': np.arange(6, dtype=np.uint16).reshape(2, 3),
            'wide': np.arange(3, dtype=np.float64),
            'flags': np.array([True, False]),
            'none': np.empty((0, 4), np.int64),
        },
        'a/b': {'c': np.ones(2, np.int8)},
    }


def table(nested: Any, prefix: str = '') -> dict[str, np.ndarray]:
    """By name, with a '/' inside a key as t5ckpt writes it."""
    found: dict[str, np.ndarray] = {}
    for key, value in nested.items():
        name = prefix + key.replace('/', '\\/')
        found |= table(value, f'{name}/') if isinstance(value, dict) else {name: np.asarray(value)}
    return found


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape), name
        assert found[name].tobytes() == values.tobytes(), name


@pytest.fixture
def run(tmp_path: pathlib.Path) -> str:
    """A checkpoint of all kinds of leaves."""
    everything = {**tree(), 'nothing': None, 'empty': {}, 'text': 'hello'}
    with t5ckpt.Checkpointer(everything, checkpoints_dir=str(tmp_path / 'run')) as checkpointer:
        checkpointer.save(everything, step=41)
    return str(tmp_path / 'run')


def test_safetensors_reads_every_array(run: str, tmp_path: pathlib.Path):
    report = t5ckpt.convert_checkpoint('to-safetensors', run, tmp_path / 'out.safetensors')
    expected = table(tree())
    with safetensors.safe_open(tmp_path / 'out.safetensors', 'flax') as file:
        assert set(file.keys()) == set(expected)
        np.testing.assert_array_equal(file.get_tensor('target/half'), jnp.asarray(expected['target/half']))
    raw = safetensors.deserialize((tmp_path / 'out.safetensors').read_bytes())
    for name, entry in raw:
        assert bytes(entry['data']) == expected[name].tobytes(), name
        assert tuple(entry['shape']) == expected[name].shape
    assert sorted(report.dropped) == ['empty', 'nothing', 'text']
    assert report.nbytes == sum(values.nbytes for values in expected.values())


def test_there_and_back(run: str, tmp_path: pathlib.Path):
    t5ckpt.convert_checkpoint('to-safetensors', run, tmp_path / 'out.safetensors')
    report = t5ckpt.convert_checkpoint('safetensors', tmp_path / 'out.safetensors', tmp_path / 'back')
    assert report.path.endswith('checkpoint_41')
    assert_same(table(t5ckpt.load_t5x_checkpoint(tmp_path / 'back')), table(tree()))


def test_weights_of_other_programs(tmp_path: pathlib.Path):
    """An index of several files, and a directory with Flax's file."""
    weights = {'v': np.ones(3, np.float32), 'w': np.arange(6, dtype=np.int16).reshape(2, 3)}
    flax, shards = tmp_path / 'flax', tmp_path / 'shards'
    flax.mkdir()
    shards.mkdir()
    (flax / 'flax_model.msgpack').write_bytes(flax_serialization.msgpack_serialize(weights))
    for number, (name, values) in enumerate(weights.items(), 1):
        safetensors.numpy.save_file({name: values}, shards / f'model-{number:05}-of-00002.safetensors')
    names = {name: f'model-{number:05}-of-00002.safetensors' for number, name in enumerate(weights, 1)}
    index = shards / 'model.safetensors.index.json'
    index.write_text(json.dumps({'metadata': {}, 'weight_map': names}))
    for source in (flax, shards, index):
        t5ckpt.convert_checkpoint(
            'to-safetensors', source, tmp_path / 'out.safetensors', ConvertOptions(overwrite=True)
        )
        t5ckpt.convert_checkpoint(
            'safetensors', tmp_path / 'out.safetensors', tmp_path / 'back', ConvertOptions(overwrite=True)
        )
        assert_same(table(t5ckpt.load_t5x_checkpoint(tmp_path / 'back')), weights)
    before = index.read_bytes()
    with pytest.raises(OutputExistsError, match='contains the checkpoint to export'):
        t5ckpt.convert_checkpoint('to-safetensors', shards, index, ConvertOptions(overwrite=True))
    assert index.read_bytes() == before


def test_pieces_make_the_same_file(run: str, tmp_path: pathlib.Path):
    t5ckpt.convert_checkpoint('to-safetensors', run, tmp_path / 'whole.safetensors')
    calls: list[tuple[int, int]] = []
    options = ConvertOptions(concurrent_gb=2e-5, progress=lambda done, total: calls.append((done, total)))
    report = t5ckpt.convert_checkpoint('to-safetensors', run, tmp_path / 'pieces.safetensors', options)
    assert (tmp_path / 'whole.safetensors').read_bytes() == (tmp_path / 'pieces.safetensors').read_bytes()
    assert len(calls) > 60
    assert calls[-1] == (report.nbytes, report.nbytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_a_selection_and_a_cast(run: str, tmp_path: pathlib.Path):
    options = ConvertOptions(take='target/(big|half)|.*wide', save_dtype='float32')
    report = t5ckpt.convert_checkpoint('to-safetensors', run, tmp_path / 'out.safetensors', options)
    assert sorted(report.mapped) == ['state/wide', 'target/big', 'target/half']
    assert 'target/f16' in report.dropped
    t5ckpt.convert_checkpoint('safetensors', tmp_path / 'out.safetensors', tmp_path / 'back', ConvertOptions(step=3))
    found = table(t5ckpt.load_t5x_checkpoint(tmp_path / 'back', step=3))
    assert {name: values.dtype.name for name, values in found.items()} == {
        'state/wide': 'float64',  # a cast touches the parameters alone
        'target/big': 'float32',
        'target/half': 'float32',
    }
    np.testing.assert_array_equal(found['target/half'], table(tree())['target/half'].astype(np.float32))
    for pattern, words in (('(', 'not a regular expression'), ('xyz', 'matches no leaf')):
        with pytest.raises(ValueError, match=words):
            t5ckpt.convert_checkpoint('to-safetensors', run, tmp_path / 'no', ConvertOptions(take=pattern))


@pytest.mark.parametrize('force', [False, True])
def test_nothing_is_written_into_a_step(run: str, tmp_path: pathlib.Path, force: bool):
    """With force, the manifest of the very checkpoint was replaced by the export of it."""
    step = pathlib.Path(t5ckpt.find_checkpoint(run)).parent
    (tmp_path / 'link').symlink_to(step)
    before = sorted(step.rglob('*'))
    for place in (step / 'checkpoint', step / 'new', step / 'target.big' / 'new', tmp_path / 'link' / 'new'):
        with pytest.raises(OutputExistsError, match=r'which is a checkpoint. Pass a path outside it'):
            t5ckpt.convert_checkpoint('to-safetensors', run, place, ConvertOptions(overwrite=force))
    assert sorted(step.rglob('*')) == before
    assert t5ckpt.verify(step, full=True).ok


def test_a_dtype_that_safetensors_has_not_is_refused_before_anything_is_written(tmp_path: pathlib.Path):
    state = {'target': {'w': jnp.ones((4, 4), jnp.int4), 'v': np.ones(3)}}
    with t5ckpt.Checkpointer(state, checkpoints_dir=str(tmp_path / 'run')) as checkpointer:
        checkpointer.save(state, step=1)
    with pytest.raises(UnsupportedLeafError, match=r'target/w: safetensors has no int4.*selection\.$'):
        t5ckpt.convert_checkpoint('to-safetensors', tmp_path / 'run', tmp_path / 'out')
    t5ckpt.convert_checkpoint('to-safetensors', tmp_path / 'run', tmp_path / 'out', ConvertOptions(take='.*/v'))


def test_nothing_is_overwritten_unless_asked(run: str, tmp_path: pathlib.Path):
    out = tmp_path / 'out.safetensors'
    out.write_text('mine')
    with pytest.raises(OutputExistsError, match=r'exists\. Choose'):
        t5ckpt.convert_checkpoint('to-safetensors', run, out)
    assert out.read_text() == 'mine'
    with pytest.raises(OutputExistsError, match='is a directory'):
        t5ckpt.convert_checkpoint('to-safetensors', run, tmp_path, ConvertOptions(overwrite=True))
    t5ckpt.convert_checkpoint('to-safetensors', run, tmp_path / 'dry', ConvertOptions(dry_run=True))
    assert not (tmp_path / 'dry').exists()
    t5ckpt.convert_checkpoint('to-safetensors', run, out, ConvertOptions(overwrite=True))
    t5ckpt.convert_checkpoint('safetensors', out, tmp_path / 'back', ConvertOptions(dry_run=True))
    assert not (tmp_path / 'back').exists()
    t5ckpt.convert_checkpoint('safetensors', out, tmp_path / 'back')
    with pytest.raises(CheckpointExistsError):
        t5ckpt.convert_checkpoint('safetensors', out, tmp_path / 'back')
    t5ckpt.convert_checkpoint('safetensors', out, tmp_path / 'back', ConvertOptions(overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ['back', out.name, 'run']


def test_a_checkpoint_that_is_damaged_leaves_no_file(run: str, tmp_path: pathlib.Path):
    chunk = next(path for path in pathlib.Path(run).rglob('target.big/*') if path.name != '.zarray')
    chunk.write_bytes(chunk.read_bytes()[:-100])
    with pytest.raises(CorruptCheckpointError, match='target/big'):
        t5ckpt.convert_checkpoint('to-safetensors', run, tmp_path / 'out')
    assert [path.name for path in tmp_path.iterdir()] == ['run']


def test_a_file_that_cannot_be_written_to_its_end_is_removed(run: str, tmp_path: pathlib.Path):
    code = f"""
import resource, signal, t5ckpt
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    t5ckpt.convert_checkpoint('to-safetensors', {run!r}, {str(tmp_path / 'out')!r})
except t5ckpt.errors.StorageError as error:
    print('said:', error)
"""
    done = forked.run(code)
    assert 'said:' in done.stdout, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ['run']


# --- what others wrote -----------------------------------------------------------------------------------------------


def test_files_of_the_packages_are_read(tmp_path: pathlib.Path):
    arrays = {'a/w': np.arange(12, dtype=np.float32).reshape(3, 4), 'a/b': np.float64(2.5), 'n': np.int64([1])}
    safetensors.numpy.save_file({k: np.asarray(v) for k, v in arrays.items()}, tmp_path / 'x.safetensors')
    t5ckpt.convert_checkpoint('safetensors', tmp_path / 'x.safetensors', tmp_path / 'one')
    assert_same(table(t5ckpt.load_t5x_checkpoint(tmp_path / 'one')), {k: np.asarray(v) for k, v in arrays.items()})


def test_arrays_of_numpy_are_loaded_with_numpy(tmp_path: pathlib.Path):
    """Also nested dicts, as users of Haiku save them: each is a pickle."""
    jnp.savez(tmp_path / 'y.npz', params={'mlp/~/linear_0': {'w': np.ones(3, np.float32)}})
    for read in (t5ckpt.open_checkpoint, t5ckpt.verify):
        with pytest.raises(UnsupportedFormatError, match=r'y\.npz is a file of NumPy, .*load it with numpy\.load'):
            read(tmp_path / 'y.npz')

    def init_fn():
        with np.load(tmp_path / 'y.npz', allow_pickle=True) as file:
            return {'params': file['params'].item(), 'step': 1}

    with t5ckpt.Checkpointer(init_fn(), checkpoints_dir=tmp_path / 'run') as checkpointer:
        checkpointer.save(t5ckpt.restore_or_init(checkpointer, init_fn))
    assert_same(table(t5ckpt.load_t5x_checkpoint(tmp_path / 'run')), table(init_fn()))


def header(**entries: Any) -> bytes:
    """A safetensors file of four bytes of data."""
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, 'little') + text + b'\0' * 4


def entry(dtype: Any = 'F32', shape: Any = (1,), span: Any = (0, 4)) -> dict[str, Any]:
    """One tensor of a header."""
    return {'dtype': dtype, 'shape': shape, 'data_offsets': span}


@pytest.mark.parametrize(
    'data',
    [
        b'',
        b'1234567',
        b'\xff' * 20,
        (4).to_bytes(8, 'little') + b'null',
        (2).to_bytes(8, 'little') + b'[]',
        (4).to_bytes(8, 'little') + b'{"a"',
        header(w=entry(dtype=7)),
        header(w=entry(shape=[2])),
        header(w=entry(shape=[-1])),
        header(w=entry(shape=[True])),
        header(w=entry(shape=['1'])),
        header(w=entry(shape=3)),
        header(w=entry(shape=[2**40, 2**40])),
        header(w=entry(shape=[1] * 40)),
        header(w=entry(span=[0, 8], shape=[2])),
        header(w=entry(span=[-4, 0])),
        header(w=entry(span=[4, 8])),
        header(w=entry(span=[0])),
        header(w=entry(dtype='I8', span=[0, 1])),
        header(w=entry(), v=entry()),
        header(w=[]),
        header(w={'dtype': 'F32'}),
        header(__metadata__=3, w=entry()),
        header(),
    ],
)
def test_a_header_that_lies_is_found_out(tmp_path: pathlib.Path, data: bytes):
    (tmp_path / 'x.safetensors').write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r'x\.safetensors'):
        t5ckpt.convert_checkpoint('safetensors', tmp_path / 'x.safetensors', tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_what_is_not_there_or_not_to_be_had(tmp_path: pathlib.Path):
    for path in (tmp_path / 'none.safetensors', tmp_path):
        with pytest.raises(CheckpointNotFoundError):
            t5ckpt.convert_checkpoint('safetensors', path, tmp_path / 'run')
    with pytest.raises(CheckpointNotFoundError):
        t5ckpt.convert_checkpoint('to-safetensors', tmp_path / 'none', tmp_path / 'out.safetensors')
    safetensors.numpy.save_file({}, tmp_path / 'empty.safetensors')
    with pytest.raises(UnsupportedFormatError, match='no array'):
        t5ckpt.convert_checkpoint('safetensors', tmp_path / 'empty.safetensors', tmp_path / 'run')
    safetensors.numpy.save_file({name: np.ones(1) for name in ('a', 'a/b')}, tmp_path / 'clash.safetensors')
    with pytest.raises(UnsupportedFormatError, match='clash'):
        t5ckpt.convert_checkpoint('safetensors', tmp_path / 'clash.safetensors', tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_exports_go_to_local_disks(run: str):
    with pytest.raises(UnsupportedFormatError, match='local file system'):
        t5ckpt.convert_checkpoint('to-safetensors', run, 'memory://exports/x.safetensors')

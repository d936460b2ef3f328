"""Every leaf of a state is saved exactly, or refused at once by its name."""

import array
import copy
import datetime
import decimal
import enum
import fractions
import pickle

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.libraries import needs
from support.options import with_options

import t5ckpt
from t5ckpt import errors
from t5ckpt.commit.transaction import Transaction
from t5ckpt.format.facts import Facts, TreeFacts, encode_facts
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.manifest import encode_manifest
from t5ckpt.storage import open_storage


class Phase(enum.IntEnum):
    WARM = 1
    COLD = 2


class Flags(enum.IntFlag):
    A = 1
    B = 2


class Mode(enum.StrEnum):
    TRAIN = 'train'


class Old(str, enum.Enum):  # noqa: UP042 - the way before StrEnum
    TRAIN = 'train'


class Metres(float):
    def __repr__(self):
        return f'{float(self)} m'


class Text(str):
    __slots__ = ()


class Count(int):
    pass


class Wave(complex):
    pass


SUBCLASSES = {
    'enum': (Phase.COLD, 2, Phase.WARM),
    'flag': (Flags.A | Flags.B, 3, Flags.A),
    'text enum': (Mode.TRAIN, 'train', Mode.TRAIN),
    'old text enum': (Old.TRAIN, 'train', Old.TRAIN),
    'text': (Text('a'), 'a', Text('b')),
    'numpy text': (np.str_('a'), 'a', np.str_('b')),
    'float': (Metres(2.5), 2.5, Metres(0)),
    'nan': (Metres('nan'), float('nan'), Metres(0)),
    'int': (Count(2**63), 2**63, Count(0)),
    'complex': (Wave(1 + 2j), 1 + 2j, Wave(0)),
    'bool': (True, True, False),
}


@pytest.mark.parametrize('case', SUBCLASSES)
def test_a_subclass_of_a_number_or_of_text(tmp_path, case):
    """Stored as its base type, which every reader knows; back as the template's, where that holds the value."""
    value, plain, template = SUBCLASSES[case]
    with t5ckpt.Checkpointer({'x': template, 'w': jnp.ones(2)}, checkpoints_dir=tmp_path) as ck:
        ck.save({'x': value, 'w': jnp.ones(2)}, step=1)
        restored = ck.restore()['x']
    loaded = t5ckpt.load_t5x_checkpoint(tmp_path)['x']
    assert type(restored) is type(template)
    assert type(loaded) is type(plain)
    np.testing.assert_equal(restored, value)
    np.testing.assert_equal(loaded, plain)


def test_a_value_that_the_templates_enum_no_longer_has(tmp_path):
    with t5ckpt.Checkpointer({'x': Phase.WARM, 's': Mode.TRAIN}, checkpoints_dir=tmp_path) as ck:
        ck.save({'x': 7, 's': 'other'}, step=1)
        restored = ck.restore()
    assert (type(restored['x']), restored['x'], type(restored['s']), restored['s']) == (int, 7, str, 'other')


# --- what is committed opens ------------------------------------------------------------------------------------------

GOOD = encode_manifest({'w': np.ones(2, np.float32)})


def with_spec(path):
    metadata = {'shape': [2], 'chunks': [2], 'compressor': None}
    spec = {'driver': 'zarr', 'dtype': 'uint8', 'kvstore': {'driver': 'file', 'path': path}, 'metadata': metadata}
    return encode_manifest({'w': spec})


UNREADABLE = {
    'a Python type that no reader knows': (GOOD, Facts(TreeFacts(python={('w',): 'IntEnum'}))),
    'text that is not a string': (GOOD, Facts(TreeFacts(text={('w',): 3}))),
    'a dtype that nothing is stored as': (with_spec('w/'), Facts(TreeFacts(stored={'w': 'float64'}))),
    'a spec that leads elsewhere': (with_spec('../w/'), None),
    'a truncated manifest': (GOOD[:-1], None),
    'another checksum of the manifest': (GOOD, Facts(digests=FileChecksums({'checkpoint': (1, '0' * 16)}))),
}


@pytest.mark.parametrize('where', ['file', 'memory'])
@pytest.mark.parametrize('case', UNREADABLE)
def test_what_no_reader_could_open_is_not_committed(tmp_path, case, where):
    """All writers (saves, conversions, copies) commit through the one function that decodes it first."""
    manifest, facts = UNREADABLE[case]
    storage = open_storage(tmp_path if where == 'file' else f'memory://{tmp_path.name}')
    with (
        pytest.raises(errors.SaveFailedError, match='nothing is committed'),
        Transaction(storage, 3, lambda: 1e9) as work,
    ):
        work.commit(manifest, None if facts is None else encode_facts(facts), ())
    assert t5ckpt.all_steps(storage) == []


def plain_values():
    return np.arange(3)


@pytest.mark.parametrize('kind', ['a dict in itself', 'a list in itself', 'deep'])
def test_a_state_without_an_end_is_refused_and_the_process_goes_on(tmp_path, kind):
    state = {'w': np.zeros(3)}
    if kind == 'a dict in itself':
        state['again'] = {'first': state, 'second': state}
    elif kind == 'a list in itself':
        state['again'] = [[], [state['w']]]
        state['again'][0].append(state['again'])
    else:
        for _ in range(5000):
            state = {'deeper': state}
    for _ in range(3):
        with pytest.raises(errors.UnsupportedLeafError, match='contains itself'):
            t5ckpt.Checkpointer(None, checkpoints_dir=tmp_path / 'run').save(state, step=1)
    assert len(jax.tree_util.tree_leaves([[[1]], [2]], is_leaf=lambda node: node is None)) == 2
    with t5ckpt.Checkpointer(None, checkpoints_dir=tmp_path / 'run') as ck:
        assert ck.save({'w': np.zeros(3)}, step=1) is not None


def test_what_does_not_pickle_says_so(tmp_path):
    state = {'a': {'w': np.ones(10_000, np.float32), 'b': np.ones(3)}}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as ck:
        pending = ck.save_async(state, step=1)
        pending.result()
        view = t5ckpt.open_checkpoint(tmp_path)
        lazy = t5ckpt.load_t5x_checkpoint(tmp_path, lazy_parameters=True)['a']['w']
        for held in (view, view['a'], view['a/w'], lazy, pending, ck):
            with pytest.raises(TypeError, match='cannot be pickled'):
                pickle.dumps(held)
        for held in (pending, ck):
            with pytest.raises(TypeError, match=r'cannot be pickled or copied.*\. '):
                copy.deepcopy(held)
        for held in (view, view['a/w'], lazy):
            assert copy.copy(held) is held
            assert copy.deepcopy({'x': held})['x'] is held
    own = pickle.loads(pickle.dumps(t5ckpt.LazyThreadPoolArray((3,), np.int64, plain_values)))
    np.testing.assert_array_equal(own.get(), [0, 1, 2])
    assert pickle.loads(pickle.dumps(t5ckpt.all_steps(tmp_path))) == [1]


# --- odd leaves -------------------------------------------------------------------------------------------------------


class Looks:
    """Has the attributes of an array and nothing else; taken apart item by item it would never end."""

    shape = (10**9,)
    dtype = np.dtype(np.float32)

    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        return 0.0


class Liar(Looks):
    def __array__(self, dtype=None, copy=None):
        return np.zeros(3, np.float32)


class Broken(Looks):
    def __array__(self, dtype=None, copy=None):
        raise RuntimeError('not now')


class Raises:
    @property
    def shape(self):
        raise RuntimeError('no shape')


def deleted():
    array = jnp.ones(3)
    array.delete()
    return array


def ref(value):
    return jax.new_ref(value)


def pandas_series():
    import pandas as pd

    return pd.Series([1.0, 2.0], index=['a', 'b'])


def pandas_index():
    import pandas as pd

    return pd.Index([1, 2])


def scipy_sparse():
    import scipy.sparse

    return scipy.sparse.eye(3).tocsr()


def torch_tensor():
    import torch

    return torch.ones(3)


def torch_bfloat16():
    import torch

    return torch.ones(3, dtype=torch.bfloat16, requires_grad=True)


def tf_tensor():
    import tensorflow as tf

    return tf.ones(3)


def tf_variable():
    import tensorflow as tf

    return tf.Variable([1.0])


def memmap():
    import tempfile

    with tempfile.TemporaryFile() as file:
        values = np.memmap(file, np.int16, 'w+', shape=(2, 3))
    values[:] = 7
    return values


# What is saved, as what it comes back.
SAVED = {
    'a Ref': (lambda: ref(jnp.arange(3.0)), lambda: np.arange(3, dtype=np.float32)),
    'a large Ref': (lambda: ref(jnp.arange(20_000)), lambda: np.arange(20_000, dtype=np.int32)),
    'memmap': (memmap, lambda: np.full((2, 3), 7, np.int16)),
    'big-endian': (lambda: np.arange(3, dtype='>i4'), lambda: np.arange(3, dtype=np.int32)),
    'Fortran order': (lambda: np.asfortranarray(np.arange(6).reshape(2, 3)), lambda: np.arange(6).reshape(2, 3)),
    'negative strides': (lambda: np.arange(6)[::-2], lambda: np.array([5, 3, 1])),
    'broadcast': (lambda: np.broadcast_to(np.int8(3), (2, 2)), lambda: np.full((2, 2), 3, np.int8)),
    'no dimensions': (lambda: np.array(2.5, np.float16), lambda: np.array(2.5, np.float16)),
    'no elements': (lambda: np.zeros((3, 0, 2), np.complex64), lambda: np.zeros((3, 0, 2), np.complex64)),
    'rank 32': (lambda: np.ones((1,) * 32, bool), lambda: np.ones((1,) * 32, bool)),
    'read-only': (lambda: np.frombuffer(b'abcd', np.uint8), lambda: np.array([97, 98, 99, 100], np.uint8)),
}

LIBRARIES = {
    'torch': needs('torch', 'torch'),
    'torch bfloat16': needs('torch', 'torch'),
    'TensorFlow': needs('tensorflow', 'tensorflow-cpu'),
    'a TensorFlow variable': needs('tensorflow', 'tensorflow-cpu'),
}

REFUSED = {
    'bytes': lambda: b'abc',
    'bytearray': lambda: bytearray(3),
    'memoryview': lambda: memoryview(b'abc'),
    'array.array': lambda: array.array('f', [1]),
    'Fraction': lambda: fractions.Fraction(1, 3),
    'Decimal': lambda: decimal.Decimal('0.1'),
    'date': lambda: datetime.date(2000, 1, 1),
    'a function': lambda: len,
    'a class': lambda: int,
    'a module': lambda: np,
    'a set': lambda: {1, 2},
    'an int of 65 bits': lambda: 2**64,
    'objects': lambda: np.array([{}, None], object),
    'numpy bytes': lambda: np.bytes_(b'ab'),
    'numpy text': lambda: np.array(['ab']),
    'numpy datetime64': lambda: np.datetime64('2000-01-01'),
    'timedelta64': lambda: np.array([1], 'm8[s]'),
    'structured': lambda: np.zeros(2, [('a', 'i4'), ('b', 'f4')]),
    'recarray': lambda: np.rec.array([(1, 2.0)]),
    'void': lambda: np.void(b'ab'),
    'longdouble': lambda: np.longdouble(1),
    'masked': lambda: np.ma.masked_array([1, 2], [True, False]),
    'a ShapeDtypeStruct': lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
    'a deleted array': deleted,
    'only looks': Looks,
    'another shape': Liar,
    'a broken __array__': Broken,
    'a property that raises': Raises,
    'rank 33': lambda: np.ones((1,) * 33),
    'pandas Series': pandas_series,
    'pandas Index': pandas_index,
    'scipy sparse': scipy_sparse,
    'torch': torch_tensor,
    'torch bfloat16': torch_bfloat16,
    'TensorFlow': tf_tensor,
    'a TensorFlow variable': tf_variable,
    'a device': lambda: jax.devices()[0],
    'a dtype': lambda: np.dtype(np.int8),
    'a sharding': lambda: jnp.ones(1).sharding,
}


def tf_iterator():
    import tensorflow

    return iter(tensorflow.data.Dataset.range(3))


def torch_device():
    import torch

    return torch.device('cpu')


DATASET = r'dataset_iterator='
# What the error says to give instead of the leaf.
CURES = {
    'a tf.data iterator': (tf_iterator, DATASET),
    'a Grain iterator': (lambda: iter(grain.MapDataset.range(3).to_iter_dataset()), DATASET),
    'a device of torch': (torch_device, 'values as arrays'),
    'masked': (lambda: np.ma.masked_array([1, 2], [True, False]), r'x\.data and x\.mask'),
    'the masked constant': (lambda: np.ma.masked, r'x\.data and x\.mask'),
    'a spec': (lambda: PartitionSpec('x'), r'ShapeDtypeStruct\(.*sharding=jax\.NamedSharding\(mesh, x\)'),
    'an empty spec': (PartitionSpec, r'ShapeDtypeStruct\(.*sharding=jax\.NamedSharding\(mesh, x\)'),
    'a sharding': (lambda: jnp.ones(1).sharding, r'ShapeDtypeStruct\(.*sharding=x\)'),
    'a range': (lambda: range(3), r'numpy\.asarray'),
}
CURE_MARKS = {
    'a tf.data iterator': needs('tensorflow', 'tensorflow-cpu'),
    'a device of torch': needs('torch', 'torch'),
}


@pytest.mark.parametrize('case', SAVED)
@pytest.mark.parametrize('inline', [True, False])
def test_an_odd_leaf_is_saved_exactly(tmp_path, case, inline):
    make, wanted = SAVED[case]
    inline_bytes = 2**20 if inline else 0
    with t5ckpt.Checkpointer(
        {'x': wanted()}, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(inline_bytes=inline_bytes)
    ) as ck:
        ck.save({'x': make()}, step=1)
        ck.save_async({'x': make()}, step=2).result()
    for step in (1, 2):
        found = t5ckpt.load_t5x_checkpoint(tmp_path, step=step)['x']
        assert found.dtype == wanted().dtype
        np.testing.assert_array_equal(found, wanted(), strict=True)


@pytest.mark.filterwarnings('ignore::t5ckpt.errors.TemplateMismatchWarning')
@pytest.mark.parametrize('case', [pytest.param(case, marks=LIBRARIES.get(case, ())) for case in REFUSED])
def test_another_leaf_is_refused_by_its_name(tmp_path, case):
    with (
        t5ckpt.Checkpointer({'x': np.ones(1)}, checkpoints_dir=tmp_path) as ck,
        pytest.raises(
            errors.UnsupportedLeafError, match=r'a/the leaf: .+\. |a/the leaf: .+ (instead|arrays)'
        ) as caught,
    ):
        ck.save({'a': {'the leaf': REFUSED[case](), 'fine': np.ones(2)}}, step=1)
    assert 'fine' not in str(caught.value)
    assert t5ckpt.all_steps(tmp_path) == []


@pytest.mark.parametrize('case', [pytest.param(case, marks=CURE_MARKS.get(case, ())) for case in CURES])
def test_the_cure_for_a_leaf_is_one_for_its_kind(tmp_path, case):
    make, cure = CURES[case]
    with (
        t5ckpt.Checkpointer({'x': np.ones(1)}, checkpoints_dir=tmp_path) as ck,
        pytest.raises(errors.UnsupportedLeafError, match=f'the leaf: .*{cure}'),
    ):
        ck.save({'the leaf': make()}, step=1)


def test_a_template_of_leaves_that_are_read(tmp_path):
    """A Ref in the template asks for the array that it holds."""
    state = {'r': ref(jnp.arange(3.0))}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as ck:
        ck.save(state, step=1)
        assert isinstance(ck.restore()['r'], jax.Array)


def test_a_ref_in_the_background_is_read_at_the_call(tmp_path):
    held = ref(jnp.zeros(20_000))
    with t5ckpt.Checkpointer({'r': jnp.zeros(20_000)}, checkpoints_dir=tmp_path) as ck:
        for step in range(2):
            pending = ck.save_async({'r': held}, step=step)
            held[...] = held[...] + 1
            pending.result()
            np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(tmp_path, step)['r'], np.full(20_000, step))


@pytest.mark.filterwarnings('ignore::t5ckpt.errors.NoEffectWarning')
@pytest.mark.parametrize('key', ['train_ds-000-of-001', 'TRAIN_DS-1', 'integrity.0.json', 'checkpoint', 'PINNED'])
def test_a_leaf_with_the_name_of_a_file_of_t5ckpt_is_not_that_file(tmp_path, key):
    """It keeps its array when the data iterators' files go, and is not taken for one."""
    state = {key: np.ones(20_000), 'w': np.zeros(2)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, keep_dataset_checkpoints=1) as ck:
        for step in range(3):
            ck.save(state, step=step)
    assert t5ckpt.all_dataset_checkpoint_steps(tmp_path) == []
    for step in range(3):
        np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(tmp_path, step)[key], np.ones(20_000))


WEAK = {'float': jnp.asarray(0.1), 'int': jnp.asarray(3), 'nan': jnp.asarray(float('nan')), 'complex': jnp.asarray(1j)}


@pytest.mark.parametrize('template', ['arrays', 'abstract', 'replicated'])
@pytest.mark.parametrize('inline', [True, False])
def test_a_weakly_typed_scalar_stays_weakly_typed(tmp_path, template, inline):
    """A strongly typed one would turn the bfloat16 weights that it is multiplied with into float32 after a resume."""
    everywhere = NamedSharding(jax.make_mesh((jax.device_count(),), ('all',)), PartitionSpec())
    state = jax.device_put(WEAK, everywhere) if template == 'replicated' else WEAK
    given = jax.eval_shape(lambda: WEAK) if template == 'abstract' else state
    options = {} if inline else {'inline_bytes': 0}
    with t5ckpt.Checkpointer(given, checkpoints_dir=tmp_path, **with_options(**options)) as checkpointer:
        checkpointer.save(state, step=1)
        restored = checkpointer.restore()
    for name, leaf in restored.items():
        assert leaf.weak_type, name
        assert np.asarray(leaf).tobytes() == np.asarray(WEAK[name]).tobytes(), name
        assert leaf.sharding == state[name].sharding, name
    assert (restored['float'] * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_number_whose_bits_weak_typing_would_change_stays_strong(tmp_path):
    nan = np.uint32(0x7FA00001).view(np.float32)
    with t5ckpt.Checkpointer({'x': jnp.asarray(0.0)}, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save({'x': nan}, step=1)
        restored = checkpointer.restore()
    assert np.asarray(restored['x']).tobytes() == nan.tobytes()

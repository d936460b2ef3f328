"""What is wrong gets one clear error, of the tree in `t5ckpt.errors`; a save that fails changes nothing."""

import ast
import collections
import contextlib
import datetime
import decimal
import functools
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import time
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest
from flax import serialization
from jax.sharding import NamedSharding, PartitionSpec
from support import independent_reader, partitioner, states, t5x_rules
from support.bits import assert_same
from support.cli import t5ckpt_cli
from support.facts import as_t5x_writes
from support.filled import write_filled
from support.golden import flatten, nest
from support.options import with_options

import t5ckpt
from t5ckpt import errors
from t5ckpt.commit.holds import hold
from t5ckpt.format.dtypes import is_storable
from t5ckpt.storage import open_storage

W = np.arange(512 * 256, dtype=np.float32).reshape(512, 256)
FLAT = {
    'target/decoder/w': W,
    'target/decoder/bias': np.arange(4, dtype=np.float32),
    'state/step': np.asarray(3, np.int32),
}


def state_of(changes=(), without=()):
    flat = {key: leaf for key, leaf in {**FLAT, **dict(changes)}.items() if key not in without}
    return partitioner.T5XState(nest(flat))


@pytest.fixture
def saved(run_dir) -> pathlib.Path:
    """A run directory with step 3."""
    with t5ckpt.Checkpointer(state_of(), checkpoints_dir=str(run_dir)) as ck:
        ck.save(state_of())
    return run_dir


def restore(run_dir, template, **options):
    with t5ckpt.Checkpointer(template, checkpoints_dir=str(run_dir)) as ck:
        return ck.restore(**options)


def listing(root: pathlib.Path) -> dict[str, bytes]:
    """Every file below, with its contents."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob('*') if p.is_file()}


def without_checksums(step_dir: pathlib.Path) -> None:
    """Makes a checkpoint of ours one of T5X's, which may hold what it likes."""
    as_t5x_writes(step_dir)


def assert_says(error: pytest.ExceptionInfo, *words: str) -> None:
    for word in words:
        assert word in str(error.value), f'{word!r} is not in: {error.value}'


# ---- the checkpoint does not fit the template ----


@pytest.mark.parametrize('where', ['numpy', 'sharded', 'partitioner'])
def test_wrong_shape(saved, where):
    parts = None
    new = np.zeros((256, 512), np.float32)
    if where == 'sharded':
        new = jax.device_put(new, NamedSharding(partitioner.mesh(), PartitionSpec('data')))
    model = state_of({'target/decoder/w': new})
    if where == 'partitioner':
        parts = partitioner.Partitioner(partitioner.mesh(), partitioner.t5x_rules)
        model = states.shapes_of(model)
    with pytest.raises(errors.ShapeMismatch) as error, t5ckpt.Checkpointer(model, parts, str(saved)) as ck:
        ck.restore()
    assert_says(error, 'target/decoder/w', '(512, 256)', '(256, 512)', 'resize=', 'leave=')
    (problem,) = error.value.problems
    assert (problem.leaf, problem.kind) == ('target/decoder/w', 'shape')
    assert problem.template == '(256, 512)'
    assert isinstance(error.value, ValueError)


def test_wrong_shape_of_an_inline_leaf(saved):
    """T5X checks only leaves on disk."""
    with pytest.raises(errors.ShapeMismatch) as error:
        restore(saved, state_of({'target/decoder/bias': np.zeros(5, np.float32)}))
    assert_says(error, 'target/decoder/bias', '(4,)', '(5,)')
    with pytest.raises(errors.ShapeMismatch, match='state/step'):
        restore(saved, state_of({'state/step': np.zeros((1,), np.int32)}))


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [
        ('target/decoder/w', 'int32'),
        ('target/decoder/bias', 'uint8'),
        ('target/decoder/bias', 'bool'),
        ('target/decoder/w', 'int4'),
        ('state/step', 'float32'),
        ('target/decoder/w', 'complex64'),
    ],
)
def test_wrong_kind_of_dtype(saved, name, dtype):
    with pytest.raises(errors.DtypeMismatch) as error:
        restore(saved, state_of({name: np.zeros(FLAT[name].shape, states.np_dtype(dtype))}))
    assert_says(error, name, FLAT[name].dtype.name, dtype, 'leave=')


EXTENDED = [name for name, value in vars(ml_dtypes).items() if isinstance(value, type) and is_storable(np.dtype(value))]


@pytest.mark.parametrize('size', [3, 40_000])
@pytest.mark.parametrize('name', EXTENDED)
def test_a_dtype_that_no_device_has_is_refused_before_anything_is_read(run_dir, name, size):
    """Inline and stored. JAX 0.10 has no float6 on devices, JAX 0.12 does."""
    state = {'w': np.arange(size).astype(states.np_dtype(name)), 'b': np.float32([1])}
    with t5ckpt.Checkpointer(state, checkpoints_dir=str(run_dir)) as ck:
        ck.save(state, step=1)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wider = np.float32 if 'float' in name else name
    on_device = [state | {'w': jax.ShapeDtypeStruct((size,), dtype, sharding=sharding)} for dtype in (name, wider)]
    try:
        expected = jax.device_put(state['w'])
    except RuntimeError:
        for template in on_device:
            with pytest.raises(errors.DtypeMismatch, match='NumPy array') as error:
                restore(run_dir, template)
            assert_says(error, 'w', name, 'device')
    else:
        assert_same(restore(run_dir, on_device[0])['w'], expected)
    assert restore(run_dir, state)['w'].tobytes() == state['w'].tobytes()
    with t5ckpt.Checkpointer(on_device[1], checkpoints_dir=str(run_dir), restore_dtype='template') as ck:
        assert ck.restore()['w'].dtype == wider


def test_a_key_is_not_an_array(run_dir):
    """Typed PRNG keys and plain integers are not confused, in either direction."""
    key, raw = {'key': jax.random.key(0)}, {'key': np.zeros(2, np.uint32)}
    for n, (have, want) in enumerate([(key, raw), (raw, key)]):
        with t5ckpt.Checkpointer(have, checkpoints_dir=str(run_dir)) as ck:
            ck.save(have, step=n)
        with pytest.raises(errors.TreeMismatchError, match='key'):
            restore(run_dir, want)


@pytest.mark.parametrize('impls', [('rbg', 'threefry2x32'), ('rbg', 'unsafe_rbg'), ('unsafe_rbg', 'rbg')])
def test_another_kind_of_key(run_dir, impls):
    """The last two have the same shape."""
    have, want = ({'key': jax.random.key(0, impl=impl)} for impl in impls)
    with t5ckpt.Checkpointer(have, checkpoints_dir=str(run_dir)) as ck:
        ck.save(have, step=1)
    with pytest.raises(errors.TreeMismatchError) as error:
        restore(run_dir, want)
    assert_says(error, 'key', *(name[:6] for name in impls))


KEYS = {
    'raw data': (lambda: jax.random.key_data(jax.random.key(7)), lambda: jax.random.key(0), ('uint32', 'threefry2x32')),
    'NumPy': (lambda: np.zeros(2, np.uint32), lambda: jax.random.key(0), ('uint32', "impl='threefry2x32'")),
    'another implementation': (
        lambda: jax.random.key(7, impl='rbg'),
        lambda: jax.random.key(0, impl='unsafe_rbg'),
        ('keys of rbg', 'keys of unsafe_rbg'),
    ),
    'another shape': (lambda: jax.random.split(jax.random.key(7), 3), lambda: jax.random.key(0), ('(3, 2)', '(2,)')),
    'keys for integers': (lambda: jax.random.key(7), lambda: np.zeros(2, np.uint32), ('threefry2x32', 'uint32')),
    'keys for floats': (lambda: jax.random.key(7), lambda: jnp.zeros(2), ('threefry2x32', 'float32')),
    'floats': (lambda: jnp.zeros(2), lambda: jax.random.key(0), ('float32', 'threefry2x32')),
}


@pytest.mark.parametrize('case', KEYS)
@pytest.mark.parametrize('giver', ['fallback_state', 'transform', 'WarmStart'])
def test_keys_that_a_caller_gives_are_checked_like_those_of_a_checkpoint(run_dir, giver, case):
    have, want, texts = KEYS[case]
    saved = {'w': W[0]} if giver != 'WarmStart' else {'w': W[0], 'key': have()}
    with t5ckpt.Checkpointer(saved, checkpoints_dir=str(run_dir)) as ck:
        ck.save(saved, step=1)
    template = {'w': W[0], 'key': want()}
    options = {
        'fallback_state': {'fallback_state': {'key': have()}},
        'transform': {'state_transformation_fns': [lambda state, _: {**state, 'key': have()}]},
        'WarmStart': {},
    }[giver]
    with t5ckpt.Checkpointer(template, checkpoints_dir=run_dir / 'new') as ck:
        warm = functools.partial(t5ckpt.restore_or_init, ck, None, initial_checkpoint=run_dir)
        with pytest.raises(errors.TreeMismatchError) as error:
            warm() if giver == 'WarmStart' else ck.restore(path=run_dir, **options)
    assert_says(error, 'key', *texts)


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg', 'unsafe_rbg'])
def test_raw_keys_become_typed_as_the_error_says(run_dir, impl):
    key = jax.random.key(7, impl=impl)
    raw = {'key': jax.random.key_data(key)}
    with t5ckpt.Checkpointer(raw, checkpoints_dir=str(run_dir)) as ck:
        ck.save(raw, step=1)
    with pytest.raises(errors.DtypeMismatch) as error:
        restore(run_dir, {'key': key})
    cure = re.search(r'(jax\.random\.wrap_key_data\(.*?\)) makes keys', str(error.value))
    assert cure

    def typed(state, _):
        return {'key': eval(cure[1], {'jax': jax, 'x': state['key']})}  # noqa: S307 - a text of ours

    restored = restore(run_dir, jax.eval_shape(lambda: {'key': key}), state_transformation_fns=[typed])['key']
    assert restored == key
    loaded = t5ckpt.load_t5x_checkpoint(run_dir, state_transformation_fns=[typed], lazy_parameters=True)
    assert_same(loaded['key'].get(), raw['key'])


def test_missing_leaves(saved):
    model = state_of({'target/decoder/weight': W, 'target/decoder/extra': W[:2]})
    with pytest.raises(errors.TreeMismatchError) as error:
        restore(saved, state_of({'target/decoder/extra': W[:2]}))
    assert isinstance(error.value, errors.MissingLeaves)
    assert_says(error, 'target/decoder/extra', '(2, 256)', 'float32', "missing='init'")
    with pytest.raises(errors.MissingLeaves) as error:
        restore(saved, model)
    assert {p.leaf for p in error.value.problems} == {'target/decoder/weight', 'target/decoder/extra'}


def test_other_objects_are_not_put_into_a_tree(tmp_path):
    class Arguments:
        def __init__(self, item):
            self.item = item

    with t5ckpt.Checkpointer({'w': W}, checkpoints_dir=tmp_path) as checkpointer:
        for value, cure in (
            (Arguments({'w': W}), 'a single Arguments, .* It is not a pytree: pass the tree of arrays itself'),
            (np.float32(1), 'Pass a dict: {"x": x}'),
        ):
            with pytest.raises(errors.UnsupportedLeafError, match=cure):
                checkpointer.save(value, step=1)


@pytest.mark.parametrize(
    ('value', 'text', 'cured'),
    [
        (b'\x00\xff', r'numpy.frombuffer\(x, numpy.uint8\)', lambda x: np.frombuffer(x, np.uint8)),
        (bytearray(b'ab'), 'numpy.asarray', np.asarray),
        (range(3), 'numpy.asarray', np.asarray),
        (memoryview(b'ab'), 'numpy.asarray', np.asarray),
        (decimal.Decimal('1.1'), 'as arrays, numbers or text', str),
        (datetime.date(2020, 1, 1), 'as arrays, numbers or text', str),
        ({1, 2}, 'as arrays, numbers or text', lambda x: np.asarray(sorted(x))),
        (pathlib.Path('/x'), 'as arrays, numbers or text', str),
        (2**64, 'the int 18446744073709551616 does not fit in 64 bits.* as text .*dataset_iterator=', str),
        (-(2**63) - 1, 'the int -9223372036854775809 does not fit in 64 bits.* as text', str),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_that_cannot_be_saved_can_be_by_the_cure_that_its_error_names(tmp_path, value, text, cured):
    with t5ckpt.Checkpointer({'x': cured(value)}, checkpoints_dir=tmp_path) as checkpointer:
        with (
            warnings.catch_warnings(record=True, action='always') as warned,
            pytest.raises(errors.UnsupportedLeafError) as error,
        ):
            checkpointer.save({'x': value}, step=1)
        assert re.search(text, str(error.value))
        assert 'asarray' in text or 'asarray' not in str(error.value)
        assert not [each for each in warned if 'is saved' in str(each.message)]
        checkpointer.save({'x': cured(value)}, step=1)
        np.testing.assert_array_equal(checkpointer.restore()['x'], cured(value))


def test_near_names_are_suggested(saved):
    model = state_of({'target/decoder/biases': FLAT['target/decoder/bias']}, ['target/decoder/bias'])
    with pytest.raises(errors.TreeMismatchError) as error:
        restore(saved, model, strict='up_to_dtype')
    problems = {problem.leaf: problem for problem in error.value.problems}
    assert problems['target/decoder/biases'].near == ('target/decoder/bias',)
    assert problems['target/decoder/bias'].near == ('target/decoder/biases',)
    assert_says(error, 'target/decoder/biases', 'target/decoder/bias', '(4,)')


def test_a_renamed_leaf_is_to_be_renamed(saved):
    """The first cure is the rename, ready to be pasted; it works, and what takes its place was never in question."""
    model = state_of({'target/decoder/b-(ias)': FLAT['target/decoder/bias']}, ['target/decoder/bias'])
    with pytest.raises(errors.TreeMismatchError) as error:
        restore(saved, model, strict='up_to_dtype')
    text = str(error.value)
    assert text.index('rename=') < text.index("missing='init'") < text.index("strict='contains'")
    rules = ast.literal_eval(re.search(r'rename=(.*)$', text, re.MULTILINE)[1])
    restored = restore(saved, model, rename=rules)
    assert_same(flatten(restored.state_dict())['target/decoder/b-(ias)'], FLAT['target/decoder/bias'])


def test_a_name_that_has_a_partner_is_not_suggested(saved):
    with pytest.raises(errors.MissingLeaves) as error:
        restore(saved, state_of({'target/decoder/bias2': FLAT['target/decoder/bias']}))
    assert error.value.problems[0].near == ()
    assert 'rename=' not in str(error.value)


def test_what_a_restore_transform_may_put_in_the_place_of_a_leaf(saved):
    def put(value):
        return [lambda checkpoint, _: {**checkpoint, 'state': {'step': value}}]

    for number in (7, np.int64(7), np.asarray(7, np.int32), jax.numpy.int32(7)):
        restored = restore(saved, state_of(), state_transformation_fns=put(number))
        assert restored.state_dict()['state']['step'] == 7
    for value, held in ((7.5, 'float64'), ('seven', 'text'), ((), 'empty')):
        with pytest.raises(errors.TreeMismatchError, match='state/step') as error:
            restore(saved, state_of(), state_transformation_fns=put(value))
        assert_says(error, held)
    with pytest.raises(
        errors.UnsupportedLeafError, match='state/step: a state transformation put a value of type list'
    ):
        restore(saved, state_of(), state_transformation_fns=put([7]))


def test_leaves_too_many_are_left_out_as_the_error_says(saved):
    model = state_of((), ['target/decoder/bias'])
    with pytest.raises(errors.UnexpectedLeaves, match=r"strict='contains' leaves out"):
        restore(saved, model, strict='up_to_dtype')
    restored = restore(saved, model, strict='contains')
    assert set(flatten(restored.state_dict())) == {'target/decoder/w', 'state/step'}


def test_all_mismatches_are_in_one_error(saved):
    model = state_of(
        {
            'target/decoder/w': np.zeros((8, 8), np.float32),
            'target/decoder/bias': np.zeros(4, np.int32),
            'target/decoder/new': np.zeros(1, np.float32),
        }
    )
    with pytest.raises(errors.TreeMismatchError) as error:
        restore(saved, model)
    assert {(p.leaf, p.kind) for p in error.value.problems} == {
        ('target/decoder/w', 'shape'),
        ('target/decoder/bias', 'dtype'),
        ('target/decoder/new', 'missing'),
    }
    assert_says(error, 'target/decoder/w', '(8, 8)', 'target/decoder/bias', 'int32', 'target/decoder/new')


def test_a_leaf_where_the_model_has_a_subtree(saved):
    model = state_of({'target/decoder/w/kernel': W}, ['target/decoder/w'])
    with pytest.raises(errors.TreeMismatchError) as error:
        restore(saved, model)
    assert_says(error, 'target/decoder/w')
    model = partitioner.T5XState({'target': W, 'state': {'step': FLAT['state/step']}})
    with pytest.raises(errors.TreeMismatchError) as error:
        restore(saved, model)
    assert_says(error, 'target')


def test_a_mismatch_is_found_before_anything_is_read(saved):
    """Though no chunk is left."""
    shutil.rmtree(saved / 'checkpoint_3' / 'target.decoder.w')
    with pytest.raises(errors.ShapeMismatch, match='target/decoder/w'):
        restore(saved, state_of({'target/decoder/w': np.zeros((1, 1), np.float32)}))


# ---- other files in place of a checkpoint ----


def foreign(tmp_path: pathlib.Path, contents: bytes) -> pathlib.Path:
    step_dir = tmp_path / 'foreign' / 'checkpoint_3'
    step_dir.mkdir(parents=True)
    (step_dir / 'checkpoint').write_bytes(contents)
    return step_dir


def each_reader():
    """Every way to read one, from a step directory."""
    return [
        lambda d: t5ckpt.load_t5x_checkpoint(str(d)),
        lambda d: t5ckpt.open_checkpoint(str(d)),
        lambda d: restore(d.parent, state_of(), step=3),
        lambda d: restore(d.parent, state_of(), path=str(d / 'checkpoint')),
    ]


def assert_not_taken(step_dir: pathlib.Path) -> None:
    """A step that cannot be read is not passed over."""
    with pytest.raises((errors.CheckpointNotFoundError, errors.FormatError), match='checkpoint_3'):
        restore(step_dir.parent, state_of())


@pytest.mark.parametrize(
    ('contents', 'kind', 'says'),
    [
        (b'', errors.CorruptCheckpointError, 'empty'),
        (np.random.default_rng(0).bytes(5000), errors.FormatError, ''),
        (np.random.default_rng(1).bytes(5000), errors.FormatError, ''),
        (b'model_checkpoint_path: "model.ckpt-7"\n', errors.UnsupportedFormatError, 'convert_from_tf_checkpoint'),
        (json.dumps({'target': [1, 2]}).encode(), errors.FormatError, ''),
        (msgpack.packb([1, 2, 3]), errors.UnsupportedFormatError, 'list'),
        (msgpack.packb('hello'), errors.UnsupportedFormatError, 'str'),
        (msgpack.packb({'version': 3, 'optimizer': 7}), errors.UnsupportedFormatError, 'optimizer'),
        (msgpack.packb({'version': 99, 'optimizer': {}}), errors.UnsupportedFormatError, '99'),
        (b'\x80' * 10, errors.FormatError, ''),
        (b'\x81' * 100_000, errors.FormatError, ''),
        (b'PK\x03\x04' + bytes(100), errors.FormatError, ''),
    ],
    ids=[
        'empty',
        'random 0',
        'random 1',
        'tensorflow',
        'json',
        'msgpack list',
        'msgpack str',
        'optimizer is a number',
        'version 99',
        'trailing',
        'deep',
        'zip',
    ],
)
def test_foreign_manifests(tmp_path, contents, kind, says):
    step_dir = foreign(tmp_path, contents)
    for read in each_reader():
        with pytest.raises(kind) as error:
            read(step_dir)
        assert_says(error, says, 'checkpoint_3')
        assert isinstance(error.value, ValueError)
    assert_not_taken(step_dir)


def packed_map(*items):
    """A msgpack map of these entries, in which a key may occur twice."""
    packer = msgpack.Packer()
    return packer.pack_map_header(len(items)) + b''.join(
        packer.pack(key) + (value if isinstance(value, bytes) else packer.pack(value)) for key, value in items
    )


ONES, ZEROS = (serialization.msgpack_serialize(np.full(2, value)) for value in (1.0, 0.0))


@pytest.mark.parametrize(
    ('keys', 'says'),
    [
        ((0, '0'), r"w/0 occurs twice, with the keys 0 and '0'"),
        ((True, 'True'), "w/True occurs twice, with the keys True and 'True'"),
        (('a', 'a'), "a map has the key 'a' twice"),
        ((b'a', 'a'), "w/a occurs twice, with the keys b'a' and 'a'"),
        ((b'a', b'a'), "a map has the key b'a' twice"),
        ((7, 7), 'a map has the key 7 twice'),
    ],
)
def test_two_leaves_of_msgpack_with_one_key(tmp_path, keys, says):
    inner = packed_map((keys[0], ONES), (keys[1], ZEROS))
    file = tmp_path / 'f.msgpack'
    kind = errors.CorruptCheckpointError if keys[0] == keys[1] else errors.UnsupportedFormatError
    file.write_bytes(packed_map(('w', inner)))
    with pytest.raises(kind, match=f'f.msgpack: {re.escape(says)}'):
        t5ckpt.open_checkpoint(file)
    step = foreign(tmp_path, packed_map(('version', 3), ('optimizer', packed_map(('w', inner)))))
    for read in each_reader():
        with pytest.raises(kind, match=re.escape(says)):
            read(step)


def test_keys_of_bytes_are_text(tmp_path):
    """As msgpack packed text before it had a type of its own."""
    state = packed_map((b'w', packed_map((b'a', ONES), ('\xe9'.encode(), ZEROS), (b'\xff', ZEROS))))
    file = tmp_path / 'f.msgpack'
    file.write_bytes(state)
    step = foreign(tmp_path, packed_map(('version', 3), ('optimizer', state)))
    for path in (step, file):
        found = t5ckpt.load_t5x_checkpoint(path)
        assert {name: leaf[0] for name, leaf in found['w'].items()} == {'a': 1.0, '\xe9': 0.0, '\ufffd': 0.0}


@pytest.mark.parametrize('shape', [[-1], [-3], [3, -1], [-1, -3]])
@pytest.mark.parametrize('how', ['spec', 'in parts', 'inline'])
def test_a_negative_size(tmp_path, how, shape):
    """NumPy takes one for a size that is to be found out."""
    array, sizes = np.arange(3.0), {str(i): size for i, size in enumerate(shape)}
    metadata = {'shape': shape, 'chunks': [1] * len(shape), 'compressor': None}
    w = {
        'spec': {
            'driver': 'zarr',
            'dtype': 'float64',
            'kvstore': {'driver': 'file', 'path': 'w/'},
            'metadata': metadata,
        },
        'in parts': {'__msgpack_chunked_array__': True, 'shape': sizes, 'chunks': {'0': array}},
        'inline': msgpack.ExtType(1, msgpack.packb((shape, 'float64', array.tobytes()))),
    }[how]
    packed = msgpack.ExtType(1, msgpack.packb(([3], 'float64', array.tobytes())))
    contents = {'version': 3, 'optimizer': {'w': w}}
    step = foreign(tmp_path, msgpack.packb(contents, default=lambda _: packed))
    for read in each_reader():
        with pytest.raises(errors.CorruptCheckpointError, match=r'shape \[-?[0-9]|fill its shape'):
            read(step)


def test_two_tensors_with_one_name(tmp_path):
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f'{{"w":{entry},"w":{entry}}}'.encode()
    (tmp_path / 'm.safetensors').write_bytes(len(header).to_bytes(8, 'little') + header + bytes(4))
    with pytest.raises(errors.CorruptCheckpointError, match="the key 'w' twice"):
        t5ckpt.open_checkpoint(tmp_path / 'm.safetensors')


@pytest.mark.parametrize('keep', [1, 7, 0.25, 0.5, 0.9, -1])
def test_truncated_manifests(saved, keep):
    manifest = saved / 'checkpoint_3' / 'checkpoint'
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    for read in each_reader():
        with pytest.raises(errors.CorruptCheckpointError) as error:
            read(manifest.parent)
        assert_says(error, str(manifest), 'older step')
    assert_not_taken(manifest.parent)
    whole_step = shutil.copytree(manifest.parent, saved / 'checkpoint_2')
    (whole_step / 'checkpoint').write_bytes(whole)
    # One byte of a manifest is none.
    assert t5ckpt.latest_step(str(saved)) == (2 if keep == 1 else 3)
    with t5ckpt.Checkpointer(state_of(), checkpoints_dir=str(saved)) as ck:
        restored = t5ckpt.restore_or_init(ck, lambda: pytest.fail('a new state'))
    assert_same(restored.state_dict()['target']['decoder']['w'], W)
    assert t5ckpt.latest_step(str(saved)) == 2


@pytest.mark.parametrize(
    ('edit', 'kind', 'says'),
    [
        (lambda s: s['kvstore'].update(path='../../secret/'), errors.UnsafeSpecError, 'outside'),
        (lambda s: s['kvstore'].update(path='/etc/'), errors.UnsafeSpecError, 'outside'),
        (lambda s: s['kvstore'].update(driver='http'), errors.UnsafeSpecError, 'http'),
        (lambda s: s.update(driver='json'), errors.UnsafeSpecError, 'json'),
        (lambda s: s['metadata'].update(shape=[-1, 4]), errors.CorruptCheckpointError, 'shape'),
        (lambda s: s['metadata'].pop('shape'), errors.CorruptCheckpointError, 'shape'),
        (lambda s: s.update(dtype='float7'), errors.UnsupportedFormatError, 'float7'),
        (lambda s: s['kvstore'].pop('path'), errors.CorruptCheckpointError, 'path'),
    ],
)
def test_specs_that_are_not_what_t5x_writes(saved, edit, kind, says):
    step_dir = saved / 'checkpoint_3'
    contents = independent_reader.manifest(step_dir)
    edit(contents['optimizer']['target']['decoder']['w'])
    (step_dir / 'checkpoint').write_bytes(serialization.msgpack_serialize(contents))
    without_checksums(step_dir)
    for read in each_reader():
        with pytest.raises(kind) as error:
            np.asarray(read(step_dir)['target/decoder/w'])
        assert_says(error, 'target/decoder/w', says)


@pytest.mark.slow
def test_damaged_manifests_raise_nothing_but_format_errors(golden, tmp_path):
    """Bytes flipped, dropped and put in, wherever; also those that still decode must not be followed out of there."""
    rng = random.Random(0)
    originals = [path.read_bytes() for path in sorted(golden.glob('case0[1-6]*/checkpoint_*/checkpoint'))]
    step_dir = foreign(tmp_path, b'')
    outcomes = collections.Counter()
    for _ in range(1500):
        data = bytearray(rng.choice(originals))
        for _ in range(rng.choice([1, 1, 2, 5, 20])):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    data[at] ^= 1 << rng.randrange(8)
                case 2:
                    del data[at : at + rng.randrange(1, 9)]
                case _:
                    data[at:at] = rng.randbytes(rng.randrange(1, 9))
        (step_dir / 'checkpoint').write_bytes(data)
        try:
            t5ckpt.open_checkpoint(step_dir)
            outcomes['opened'] += 1
        except errors.FormatError as error:
            outcomes[type(error)] += 1
    assert outcomes['opened'] > 50
    assert outcomes[errors.CorruptCheckpointError] > 500


def test_nothing_there(tmp_path):
    (tmp_path / 'empty').mkdir()
    for path in (tmp_path / 'empty', tmp_path / 'absent', tmp_path / 'absent' / 'checkpoint_3'):
        for read in (t5ckpt.load_t5x_checkpoint, t5ckpt.open_checkpoint, t5ckpt.find_checkpoint):
            with pytest.raises(errors.CheckpointNotFoundError) as error:
                read(str(path))
            # Of a step of a run that is absent, the run.
            assert_says(error, str(path).removesuffix('/checkpoint_3'))
            assert isinstance(error.value, ValueError)
            assert isinstance(error.value, FileNotFoundError)
    with pytest.raises(errors.CheckpointNotFoundError, match='empty'):
        restore(tmp_path / 'empty', state_of())
    assert t5ckpt.latest_step(str(tmp_path / 'absent')) is None
    assert list(t5ckpt.all_steps(str(tmp_path / 'absent'))) == []
    assert not (tmp_path / 'absent').exists()


def test_the_steps_there_are_named(saved):
    with pytest.raises(errors.CheckpointNotFoundError) as error:
        restore(saved, state_of(), step=4)
    assert_says(error, 'checkpoint_4', 'complete steps are: 3')


@pytest.mark.parametrize('step', ['3', 'latest', 3.0, True, -1])
@pytest.mark.parametrize(
    'read',
    [
        t5ckpt.load_t5x_checkpoint,
        t5ckpt.open_checkpoint,
        t5ckpt.find_checkpoint,
        t5ckpt.get_checkpoint_dir,
        t5ckpt.verify,
        lambda run, step: t5ckpt.open_run(run)[step],
        lambda run, step: restore(run, state_of(), step=step),
        lambda run, step: t5ckpt.WarmStart(run, step=step),
        lambda run, step: t5ckpt.checkpoints_iterator(run, after=-2 if step == -1 else step),
        lambda run, step: t5ckpt.ConvertOptions(step=step),
        lambda run, step: t5ckpt.convert_checkpoint(
            'to-safetensors', run, run.with_name('a.safetensors'), t5ckpt.ConvertOptions(step=step)
        ),
    ],
)
def test_a_step_that_is_not_an_integer(saved, read, step):
    with pytest.raises(ValueError, match=r'(step|after) must be an integer.*, got '):
        read(saved, step)


def test_a_directory_named_checkpoint(tmp_path):
    """No manifest: the step is not complete, so it is not there."""
    (tmp_path / 'checkpoint_3' / 'checkpoint').mkdir(parents=True)
    assert list(t5ckpt.all_steps(str(tmp_path))) == []
    for read in each_reader():
        with pytest.raises(errors.CheckpointNotFoundError):
            read(tmp_path / 'checkpoint_3')


def test_a_file_where_the_step_should_be(tmp_path):
    (tmp_path / 'checkpoint_3').write_text('')
    assert list(t5ckpt.all_steps(str(tmp_path))) == []
    with pytest.raises(errors.T5CkptError, match='checkpoint_3'):
        restore(tmp_path, state_of(), step=3)


@pytest.mark.parametrize('name', ['checkpoint_', 'checkpoint_-1', 'checkpoint_03', 'checkpoint_3.tmp-1', 'ckpt_3'])
def test_other_names_are_no_steps(saved, name):
    shutil.copytree(saved / 'checkpoint_3', saved / name)
    assert list(t5ckpt.all_steps(str(saved))) == [3]


# ---- arrays that are damaged ----


def stored(step_dir: pathlib.Path) -> pathlib.Path:
    """A chunk file of target/decoder/w."""
    return min(p for p in (step_dir / 'target.decoder.w').iterdir() if p.name != '.zarray')


@pytest.mark.parametrize('sharded', [False, True])
def test_a_missing_chunk_is_an_error_and_not_zeros(saved, sharded):
    gone = stored(saved / 'checkpoint_3')
    gone.unlink()
    model = state_of()
    if sharded:
        sharding = NamedSharding(partitioner.mesh(), PartitionSpec('data', 'model'))
        model = state_of({'target/decoder/w': jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=sharding)})
    reads = [
        lambda: restore(saved, model),
        lambda: t5ckpt.load_t5x_checkpoint(str(saved)),
        t5ckpt.open_checkpoint(str(saved))['target/decoder/w'].get,
        t5ckpt.load_t5x_checkpoint(str(saved), lazy_parameters=True)['target']['decoder']['w'].get,
    ]
    for read in reads:
        with pytest.raises(errors.CorruptCheckpointError) as error:
            read()
        assert_says(error, 'target/decoder/w', 'checkpoint_3')


def test_a_missing_chunk_of_t5x(golden, tmp_path):
    """Whose manifest has no facts of ours."""
    step_dir = shutil.copytree(golden / 'case01_adafactor' / 'checkpoint_42', tmp_path / 'checkpoint_42')
    (step_dir / 'target.token_embedder.embedding' / '2.0').unlink()
    with pytest.raises(errors.CorruptCheckpointError) as error:
        t5ckpt.load_t5x_checkpoint(step_dir)
    assert_says(error, 'target/token_embedder/embedding')


@pytest.mark.parametrize(
    ('fill', 'typestr', 'dtype', 'compressor'),
    [
        (0, '<f4', np.float32, None),
        (1.0, '<f4', np.float32, {'id': 'zlib'}),
        ('NaN', '<f4', np.float32, None),
        (-7, '<i4', np.int32, {'id': 'blosc', 'cname': 'lz4', 'clevel': 5, 'shuffle': 1, 'blocksize': 0}),
        (0, 'bfloat16', jnp.bfloat16, None),
        (False, '|b1', np.bool_, None),
    ],
)
def test_an_absent_chunk_of_an_array_with_a_fill_value(tmp_path, fill, typestr, dtype, compressor):
    values = np.full((64, 8), float(fill)).astype(dtype)
    values[20:] = np.arange(44 * 8).reshape(44, 8) % 2 + 1
    array = write_filled(tmp_path / 'run', fill, values, typestr, compressor)
    if dtype is not np.bool_:
        assert not (array / '0.0').exists()
    run = str(tmp_path / 'run')
    view = t5ckpt.open_checkpoint(run)
    assert_same(view['target/w'].get(), values)
    assert_same(view['target/w'][10:22:3, 5:], values[10:22:3, 5:])
    assert_same(t5ckpt.open_checkpoint(run, options=t5ckpt.CheckpointerOptions(mmap=True))['target/w'].get(), values)
    assert_same(t5ckpt.load_t5x_checkpoint(run)['target']['w'], values)
    sharding = NamedSharding(jax.make_mesh((4,), ('x',), devices=jax.devices()[:4]), PartitionSpec('x'))
    template = {'target': {'w': jax.ShapeDtypeStruct(values.shape, dtype, sharding=sharding)}, 'state': {'step': 0}}
    for mmap in (False, True):
        with t5ckpt.Checkpointer(template, checkpoints_dir=run, options=t5ckpt.CheckpointerOptions(mmap=mmap)) as ck:
            assert_same(np.asarray(ck.restore()['target']['w']), values)
    assert t5ckpt.verify(run, full=True).ok
    t5ckpt.copy_checkpoint(run, tmp_path / 'copy')
    t5ckpt.copy_checkpoint(run, tmp_path / 'rewritten', t5ckpt.ConvertOptions(leave=['state/step']))
    for copy in (tmp_path / 'copy', tmp_path / 'rewritten'):
        assert_same(t5ckpt.open_checkpoint(copy)['target/w'].get(), values)
        assert t5ckpt.verify(copy, full=True).ok


def test_an_array_of_which_every_chunk_is_absent(tmp_path):
    values = np.zeros((2**16, 2), np.float32)
    array = write_filled(tmp_path, 0, values, '<f4')
    assert [path.name for path in array.iterdir()] == ['.zarray']
    zarray = json.loads((array / '.zarray').read_text()) | {'chunks': [1, 1]}
    (array / '.zarray').write_text(json.dumps(zarray))
    assert_same(t5ckpt.open_checkpoint(tmp_path)['target/w'].get(), values)
    (array / '9999999.0').write_bytes(b'outside of the array')
    assert t5ckpt.verify(tmp_path, full=True).ok


def test_a_truncated_chunk_of_an_array_with_a_fill_value(tmp_path):
    array = write_filled(tmp_path, 0, np.arange(512, dtype=np.float32).reshape(64, 8), '<f4')
    (array / '1.0').write_bytes(bytes(100))
    with pytest.raises(errors.CorruptCheckpointError, match='target/w'):
        t5ckpt.open_checkpoint(tmp_path)['target/w'].get()
    (damage,) = t5ckpt.verify(tmp_path).damages
    assert (damage.kind, damage.file) == ('size', 'target.w/1.0')


def test_a_truncated_chunk(saved):
    chunk = stored(saved / 'checkpoint_3')
    chunk.write_bytes(chunk.read_bytes()[:-5])
    for read in (lambda: restore(saved, state_of()), lambda: t5ckpt.load_t5x_checkpoint(str(saved))):
        with pytest.raises(errors.CorruptCheckpointError) as error:
            read()
        assert_says(error, 'target/decoder/w')


@pytest.mark.parametrize('text', ['', '{', '[]', '{"zarr_format": 3}'])
def test_a_broken_zarray(saved, text):
    without_checksums(saved / 'checkpoint_3')
    (saved / 'checkpoint_3' / 'target.decoder.w' / '.zarray').write_text(text)
    for read in (lambda: restore(saved, state_of()), lambda: t5ckpt.load_t5x_checkpoint(str(saved))):
        with pytest.raises(errors.FormatError) as error:
            read()
        assert_says(error, 'target/decoder/w')


def test_a_zarray_that_contradicts_the_manifest(saved):
    path = saved / 'checkpoint_3' / 'target.decoder.w' / '.zarray'
    path.write_text(json.dumps({**json.loads(path.read_text()), 'shape': [256, 256]}))
    without_checksums(path.parents[1])
    for read in (lambda: restore(saved, state_of()), lambda: t5ckpt.load_t5x_checkpoint(str(saved))):
        with pytest.raises(errors.CorruptCheckpointError) as error:
            read()
        assert_says(error, 'target/decoder/w', '256')


# ---- saves that fail change nothing ----


needs_root = pytest.mark.skipif(
    not hasattr(os, 'geteuid') or os.geteuid() != 0, reason='only root can mount a file system to fill'
)


@contextlib.contextmanager
def mounted(directory: pathlib.Path, options: str):
    """A tmpfs: only root may, and in CI root we are."""
    directory.mkdir(exist_ok=True)
    done = subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', str(directory)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = f'cannot mount a tmpfs: {done.stderr.strip()}'
        if os.environ.get('CI') == 'true' and os.geteuid() == 0:
            pytest.fail(reason)
        pytest.skip(reason)
    try:
        yield directory
    finally:
        subprocess.run(['umount', '-l', str(directory)], check=True)


def assert_unchanged(run_dir: pathlib.Path, before: dict[str, bytes]) -> None:
    """The same files with the same contents, and no empty directory left."""
    assert listing(run_dir) == before
    t5x_rules.check_run_dir(run_dir)


@needs_root
@pytest.mark.filterwarnings('ignore::t5ckpt.errors.TemplateMismatchWarning')
@pytest.mark.parametrize('how', ['save', 'save_async'])
def test_no_space_left(tmp_path, how):
    with mounted(tmp_path / 'small', 'size=2m') as root:
        run_dir = root / 'run'
        rng = np.random.default_rng(0)
        with t5ckpt.Checkpointer(state_of(), checkpoints_dir=str(run_dir)) as ck:
            ck.save(state_of())
            before = listing(run_dir)
            big = state_of(
                {'state/step': np.asarray(4, np.int32)}
                | {f'target/big/w{i}': rng.standard_normal((256, 512)).astype(np.float32) for i in range(8)}
            )
            if how == 'save':
                with pytest.raises(errors.NoSpaceError) as error:
                    ck.save(big)
            else:
                pending = ck.save_async(big)
                with pytest.raises(errors.T5CkptError) as error:
                    pending.result()
                assert any(isinstance(e, errors.NoSpaceError) for e in _causes(error.value))
            assert isinstance(error.value, errors.NoSpaceError | errors.SaveFailedError)
            assert_says(error, str(run_dir))
            assert_unchanged(run_dir, before)
            assert list(ck.all_steps()) == [3]
            # The checkpointer goes on: a smaller step still fits.
            assert ck.save(state_of({'state/step': np.asarray(5, np.int32)}, ['target/decoder/w'])).step == 5


@needs_root
def test_wherever_the_space_ends_nothing_is_left(tmp_path):
    """One more file fits each time, so that every file of a save is once the one that does not."""
    failed = 0
    for inodes in range(1, 40):
        with mounted(tmp_path / 'small', f'size=8m,nr_inodes={inodes}') as root:
            ck = t5ckpt.Checkpointer(state_of(), checkpoints_dir=str(root))
            committed, said = None, ''
            try:
                committed = ck.save(state_of())
            except errors.NoSpaceError as error:
                said = str(error)
            if committed is not None:
                t5x_rules.check(pathlib.Path(committed.path))
                break
            failed += 1
            assert str(root) in said
            assert not list(root.iterdir()), inodes
            assert list(ck.all_steps()) == []
    assert failed >= 6


@needs_root
def test_a_full_disk_is_emptied_by_deletions(tmp_path):
    """Not one byte of a marker fits."""
    state = {'w': W[:64]}
    with mounted(tmp_path / 'small', 'size=4m') as root:
        run_dir, filler = root / 'run', root / 'filler'
        with t5ckpt.Checkpointer(
            state, checkpoints_dir=run_dir, options=t5ckpt.CheckpointerOptions(inline_bytes=0)
        ) as ck:
            for step in range(6):
                ck.save(state, step=step)

            def fill():
                with filler.open('ab', buffering=0) as file, contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(4096))
                with pytest.raises(OSError, match='No space left'):
                    (root / 'more').write_bytes(b'1')
                (root / 'more').unlink()

            fill()
            t5ckpt_cli('rm', f'{run_dir}@0', '--yes')
            fill()
            t5ckpt_cli('prune', run_dir, '--keep', 4, '--yes')
            fill()
            ck.delete(2)
            fill()
            with hold(open_storage(run_dir), 3, 60.0, time.time) as is_there:
                assert is_there
                with pytest.raises(errors.StepKeptError, match='held by a reader'):
                    ck.delete(3)
            filler.unlink()
            assert ck.all_steps() == [3, 4, 5]
            assert sorted(os.listdir(run_dir)) == ['checkpoint_3', 'checkpoint_4', 'checkpoint_5']
            assert ck.save(state, step=6).step == 6


def _causes(error):
    while error is not None:
        yield error
        error = error.__cause__


def test_no_permission(tmp_path):
    """A read-only mount for root, to whom permissions mean nothing; a read-only directory for others."""
    root = tmp_path / 'locked'
    with contextlib.ExitStack() as stack:
        if hasattr(os, 'geteuid') and os.geteuid() == 0:
            stack.enter_context(mounted(root, 'size=8m'))
        run_dir = root / 'run'
        with t5ckpt.Checkpointer(state_of(), checkpoints_dir=str(run_dir)) as ck:
            ck.save(state_of())
        before = listing(run_dir)
        if os.path.ismount(root):
            subprocess.run(['mount', '-o', 'remount,ro', str(root)], check=True)
        else:
            run_dir.chmod(0o555)
            stack.callback(run_dir.chmod, 0o755)
        with t5ckpt.Checkpointer(state_of(), checkpoints_dir=str(run_dir)) as ck:
            with pytest.raises(errors.AccessDeniedError) as error:
                ck.save(state_of({'state/step': np.asarray(4, np.int32)}))
            assert_says(error, str(run_dir))
            assert isinstance(error.value, PermissionError)
            assert_same(ck.restore().state_dict()['target']['decoder']['w'], W)
            if os.path.ismount(root):
                with pytest.raises(errors.AccessDeniedError, match='Read-only file system'):
                    ck.delete(ck.latest_step())
        assert listing(run_dir) == before


@pytest.mark.parametrize('deep', [False, True])
def test_a_file_where_the_run_directory_should_be(tmp_path, deep):
    (tmp_path / 'file').write_text('mine')
    run_dir = tmp_path / 'file' / 'run' if deep else tmp_path / 'file'
    with (
        pytest.raises(errors.NotADirectoryStorageError) as error,
        t5ckpt.Checkpointer(state_of(), checkpoints_dir=str(run_dir)) as ck,
    ):
        ck.save(state_of())
    assert_says(error, str(tmp_path / 'file'))
    assert isinstance(error.value, NotADirectoryError)
    assert (tmp_path / 'file').read_text() == 'mine'


@pytest.mark.parametrize(
    'leaf',
    [object(), b'bytes', np.array(['a', 'b']), np.array([object()]), np.datetime64('2026-01-01'), {1, 2}],
    ids=lambda leaf: type(leaf).__name__,
)
def test_leaves_that_cannot_be_saved(saved, leaf):
    before = listing(saved)
    bad = state_of({'state/step': np.asarray(4, np.int32), 'target/decoder/odd': leaf})
    with (
        pytest.raises(errors.UnsupportedLeafError) as error,
        t5ckpt.Checkpointer(bad, checkpoints_dir=str(saved)) as ck,
    ):
        ck.save(bad)
    assert_says(error, 'target/decoder/odd')
    assert_unchanged(saved, before)


def test_a_leaf_that_fails_while_it_is_written(saved):
    """A lazy leaf whose values cannot be had; among others that can."""
    before = listing(saved)

    def broken():
        raise RuntimeError('the disk it came from is gone')

    flat = {f'target/w{i}': W + i for i in range(4)} | {'state/step': np.asarray(4, np.int32)}
    flat['target/w2'] = t5ckpt.LazyThreadPoolArray(W.shape, W.dtype, broken)
    bad = partitioner.T5XState(nest(flat))
    ck = t5ckpt.Checkpointer(bad, checkpoints_dir=str(saved))
    with ck, pytest.raises(RuntimeError, match='the disk it came from is gone'):
        ck.save(bad)
    assert_unchanged(saved, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('said', 'shape'),
    [
        ((512, 256), (256, 512)),
        ((512, 256), (512, 128)),
        ((512, 256), (512, 256, 1)),
        ((512, 256), (1024, 256)),
        ((512, 256), ()),
        ((4,), (5,)),
        ((4, 1), (4,)),
    ],
)
def test_a_lazy_leaf_that_has_another_shape_than_it_said(saved, said, shape):
    before = listing(saved)
    flat = {'target/w': t5ckpt.LazyThreadPoolArray(said, np.float32, lambda: np.zeros(shape, np.float32))}
    bad = partitioner.T5XState(nest(flat | {'state/step': np.asarray(4, np.int32)}))
    ck = t5ckpt.Checkpointer(bad, checkpoints_dir=str(saved))
    with ck, pytest.raises(errors.T5CkptError) as error:
        ck.save(bad)
    assert_says(error, 'target/w', str(said), str(shape))
    assert_unchanged(saved, before)


def test_a_donated_array(saved):
    before = listing(saved)
    array = jax.device_put(W)
    array.delete()
    bad = state_of({'target/decoder/w': array, 'state/step': np.asarray(4, np.int32)})
    with t5ckpt.Checkpointer(state_of(), checkpoints_dir=str(saved)) as ck:
        for save in (ck.save, ck.save_async):
            with pytest.raises(errors.UnsupportedLeafError) as error:
                save(bad)
            assert_says(error, 'target/decoder/w', 'donated')
    assert_unchanged(saved, before)


def test_a_donated_step(saved):
    """Of which the step's number would be asked first: every state that a jitted step counts up."""
    before = listing(saved)
    array = jnp.int32(4)
    array.delete()
    bad = state_of({'state/step': array})
    with t5ckpt.Checkpointer(state_of(), checkpoints_dir=str(saved)) as ck:
        for save in (ck.save, ck.save_async):
            with pytest.raises(errors.UnsupportedLeafError, match='step: its buffer was donated'):
                save(bad)
        with pytest.raises(errors.UnsupportedLeafError, match=r'step: is a tracer'):
            jax.jit(lambda step: ck.save(state_of({'state/step': step})))(np.int32(4))
    assert_unchanged(saved, before)


@pytest.mark.parametrize('transform', [jax.jit, jax.vmap, jax.grad, jax.checkpoint])
@pytest.mark.parametrize('inside', [{'target/decoder/bias': 4}, {'target/decoder/new': 4}, {'state/step': 4}])
def test_a_tracer_in_a_state_that_differs_from_the_template(saved, transform, inside):
    (name,) = inside
    ck = t5ckpt.Checkpointer(state_of(), checkpoints_dir=str(saved), save_policy=t5ckpt.SaveEvery(1))

    def step(x, call):
        call(state_of({name: x, 'target/decoder/list': [x, (x,)]}))
        return x.sum()

    before = listing(saved)
    calls = (
        lambda state: ck.save(state, step=4),
        lambda state: ck.save_async(state, step=4),
        lambda state: ck.maybe_save(4, state),
        lambda state: t5ckpt.Checkpointer(state, checkpoints_dir=str(saved)).restore(),
    )
    for call in calls:
        with pytest.raises(
            errors.UnsupportedLeafError, match=r'is a tracer\. Call the checkpointer outside of jit, grad'
        ):
            transform(functools.partial(step, call=call))(jnp.arange(4.0))
    assert_unchanged(saved, before)
    with pytest.raises(ValueError, match=r'step must be an integer'):
        jax.jit(lambda number: ck.maybe_save(number, state_of()))(4)
    ck.close()


def test_terms_of_a_sum_are_not_an_array(saved):
    mesh = jax.make_mesh((8,), ('d',), axis_types=(jax.sharding.AxisType.Explicit,))
    rows, columns = (
        jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, spec))
        for spec in (PartitionSpec('d'), PartitionSpec(None, 'd'))
    )
    terms = NamedSharding(mesh, PartitionSpec(unreduced={'d'}))
    x = jax.jit(lambda x, y: jnp.einsum('ij,jk->ik', x, y, out_sharding=terms))(columns, rows)
    run = saved / 'sums'
    with t5ckpt.Checkpointer({'x': x}, checkpoints_dir=run) as ck:
        with pytest.raises(
            errors.UnsupportedLeafError, match=r'x: is unreduced over the mesh axes d: .*adds them up'
        ) as error:
            ck.save({'x': x}, step=1)
        cure = re.search(r'(jax\.reshard\(.*)\, which', str(error.value))
        assert cure
        summed = eval(cure[1], {'jax': jax, 'x': x})  # noqa: S307 - a text of ours
        ck.save({'x': summed}, step=1)
        with pytest.raises(errors.ShardingMismatch, match=r'x: .* is unreduced over d, and a checkpoint holds sums'):
            ck.restore()
    with pytest.raises(errors.UnsupportedLeafError, match='y: is unreduced'):
        restore(run, {'x': summed, 'y': summed}, fallback_state={'y': x})
    assert_same(restore(run, {'x': summed})['x'], np.full((8, 8), 8, np.float32))


def test_a_tracer(saved):
    ck = t5ckpt.Checkpointer(state_of(), checkpoints_dir=str(saved))
    with ck, pytest.raises(errors.UnsupportedLeafError, match='target/decoder/bias'):
        jax.jit(lambda bias: ck.save(state_of({'target/decoder/bias': bias}), step=4))(np.zeros(4))


def test_shapes_instead_of_arrays(saved):
    shapes = states.shapes_of(state_of({'state/step': np.asarray(4, np.int32)}))
    with t5ckpt.Checkpointer(shapes, checkpoints_dir=str(saved)) as ck:
        with pytest.raises(errors.UnsupportedLeafError) as error:
            ck.save(shapes, step=4)
        assert_says(error, 'target/decoder/w', 'target/decoder/bias')


def test_a_transform_that_fails(saved):
    before = listing(saved)

    def broken(state_dict, parameter_infos):
        raise KeyError('no such layer')

    four = state_of({'state/step': np.asarray(4, np.int32)})
    with t5ckpt.Checkpointer(four, checkpoints_dir=str(saved)) as ck:
        with pytest.raises(KeyError, match='no such layer'):
            ck.save(four, state_transformation_fns=[broken])
        assert_unchanged(saved, before)
        assert ck.save(four).step == 4


def test_errors_of_async_saves_are_raised_once_they_are_known(saved):
    before = listing(saved)

    def broken():
        raise RuntimeError('the disk it came from is gone')

    flat = {'target/w': t5ckpt.LazyThreadPoolArray(W.shape, W.dtype, broken), 'state/step': np.asarray(4, np.int32)}
    bad = partitioner.T5XState(nest(flat))
    ck = t5ckpt.Checkpointer(bad, checkpoints_dir=str(saved))
    with pytest.raises((errors.T5CkptError, RuntimeError)) as error:
        # The call itself may already know, or the result does.
        ck.save_async(bad).result()
    assert any('the disk it came from is gone' in str(e) for e in _causes(error.value))
    with contextlib.suppress(errors.SaveFailedError, RuntimeError):
        ck.close()
    assert_unchanged(saved, before)


@pytest.mark.parametrize('how', ['with', 'close'])
def test_a_save_after_the_end(saved, how):
    before = listing(saved)
    ck = t5ckpt.Checkpointer(state_of(), checkpoints_dir=str(saved))
    if how == 'close':
        ck.close()
    else:
        with ck:
            pass
    for save in (ck.save, ck.save_async):
        with pytest.raises(errors.ClosedError, match='is closed'):
            save(state_of(), step=4)
    assert_same(ck.restore().state_dict()['target']['decoder']['w'], W)
    ck.close()
    assert listing(saved) == before


@pytest.mark.parametrize('place', ['/proc/t5ckpt', '/sys/t5ckpt/run'])
def test_a_directory_in_which_nothing_can_be_created(place):
    with pytest.raises(errors.StorageError) as error, t5ckpt.Checkpointer(state_of(), checkpoints_dir=place) as ck:
        ck.save(state_of())
    assert_says(error, place, 'permissions' if isinstance(error.value, PermissionError) else 'mounted and writable')


def test_two_leaves_with_one_name(run_dir):
    tree = {'a': collections.OrderedDict({1: np.arange(3), '1': np.arange(4)})}
    with pytest.raises(errors.UnsupportedLeafError, match='a/1'):
        t5ckpt.Checkpointer(tree, checkpoints_dir=str(run_dir)).save(tree, step=1)


@pytest.mark.parametrize('step', [-1, 1.5, 'seven', None])
def test_steps_that_are_none(run_dir, step):
    tree = {'w': np.arange(3)}
    with (
        pytest.raises((ValueError, TypeError), match='step'),
        t5ckpt.Checkpointer(tree, checkpoints_dir=str(run_dir)) as ck,
    ):
        ck.save(tree, step=step)
    assert not run_dir.exists() or not list(run_dir.iterdir())


@pytest.mark.parametrize('keep', [0, -1])
def test_keep_nothing_is_refused(run_dir, keep):
    """T5X takes keep=0 for keep everything."""
    with pytest.raises(ValueError, match='keep'):
        t5ckpt.Checkpointer(state_of(), checkpoints_dir=str(run_dir), keep=keep)


# ---- keep, overwrite, pins ----


def steps_after(run_dir, steps, **options) -> list[int]:
    state = state_of()
    with t5ckpt.Checkpointer(state, checkpoints_dir=str(run_dir), **with_options(**options)) as ck:
        for step in steps:
            committed = ck.save(state_of({'state/step': np.asarray(step, np.int32)}))
            assert committed.step == step
            assert step in ck.all_steps()
        found = list(ck.all_steps())
    t5x_rules.check_run_dir(run_dir)
    return found


def test_keep_everything(run_dir):
    assert steps_after(run_dir, [1, 2, 3, 0]) == [0, 1, 2, 3]


def test_keep_the_newest(run_dir):
    assert steps_after(run_dir, [1, 2, 3, 4, 5], keep=2) == [4, 5]


def test_numbers_and_not_names_are_ordered(run_dir):
    assert steps_after(run_dir, [8, 9, 10, 11], keep=2) == [10, 11]


def test_the_step_just_saved_stays_though_it_is_the_lowest(run_dir):
    """T5X deletes it. steps_after checks it after every save."""
    steps_after(run_dir, [10, 20, 30])
    assert 5 in steps_after(run_dir, [5], keep=2)
    assert 4 in steps_after(run_dir, [4], keep=1)


def test_pins(run_dir):
    steps_after(run_dir, [1, 2, 3])
    for step in (1, 2):
        t5ckpt.pin_checkpoint(str(run_dir / f'checkpoint_{step}'))
        assert t5ckpt.is_pinned_checkpoint(str(run_dir / f'checkpoint_{step}'))
        assert (run_dir / f'checkpoint_{step}' / 'PINNED').is_file()
        t5x_rules.check(run_dir / f'checkpoint_{step}')
    assert not t5ckpt.is_pinned_checkpoint(str(run_dir / 'checkpoint_3'))
    assert steps_after(run_dir, [4, 5, 6], keep=2) == [1, 2, 5, 6]
    t5ckpt.unpin_checkpoint(str(run_dir / 'checkpoint_1'))
    assert not t5ckpt.is_pinned_checkpoint(str(run_dir / 'checkpoint_1'))
    assert steps_after(run_dir, [7], keep=2) == [2, 6, 7]
    with pytest.raises(errors.CheckpointNotFoundError):
        t5ckpt.pin_checkpoint(str(run_dir / 'checkpoint_1'))


def test_pins_take_no_slots(run_dir):
    steps_after(run_dir, [1, 2, 3])
    t5ckpt.pin_checkpoint(str(run_dir / 'checkpoint_3'))
    assert steps_after(run_dir, [4], keep=2) == [2, 3, 4]


def test_pins_of_t5x_are_honoured(run_dir):
    """T5X writes a file PINNED with any contents."""
    steps_after(run_dir, [1, 2])
    (run_dir / 'checkpoint_1' / 'PINNED').write_text('')
    assert steps_after(run_dir, [3], keep=1) == [1, 3]


def test_a_complete_step_is_not_saved_again(run_dir):
    first, second = state_of(), state_of({'target/decoder/w': W + 1})
    with t5ckpt.Checkpointer(first, checkpoints_dir=str(run_dir)) as ck:
        assert ck.save(first).step == 3
        before = listing(run_dir)
        assert ck.save(second) is None
        assert ck.save_async(second).result() is None
        assert_unchanged(run_dir, before)
        assert_same(ck.restore().state_dict()['target']['decoder']['w'], W)


@pytest.mark.parametrize('what', ['no manifest', 'truncated manifest', 'empty directory'])
def test_a_broken_step_is_replaced(saved, what):
    step_dir = saved / 'checkpoint_3'
    if what == 'empty directory':
        shutil.rmtree(step_dir)
        step_dir.mkdir()
    elif what == 'no manifest':
        (step_dir / 'checkpoint').unlink()
    else:
        (step_dir / 'checkpoint').write_bytes((step_dir / 'checkpoint').read_bytes()[:50])
    new = state_of({'target/decoder/w': W + 1})
    with t5ckpt.Checkpointer(new, checkpoints_dir=str(saved)) as ck:
        assert ck.save(new).step == 3
        assert_same(ck.restore().state_dict()['target']['decoder']['w'], W + 1)
    t5x_rules.check(step_dir)
    t5x_rules.check_run_dir(saved)


def test_what_others_have_left_stays(saved):
    """T5X removes none of its temporary directories; nothing says whether their writer is alive."""
    others = {'checkpoint_5.tmp-1600000000', 'checkpoint_3.tmp-1600000000', 'checkpoint_9.tmp-1', 'checkpoint_notes'}
    for name in others:
        shutil.copytree(saved / 'checkpoint_3', saved / name)
    (saved / 'events.out.tfevents.1').write_text('mine')
    with t5ckpt.Checkpointer(state_of(), checkpoints_dir=str(saved)) as ck:
        ck.save(state_of({'state/step': np.asarray(6, np.int32)}))
    assert {p.name for p in saved.iterdir()} == {'checkpoint_3', 'checkpoint_6', 'events.out.tfevents.1', *others}


def test_unfinished_steps_are_not_listed(saved):
    shutil.copytree(saved / 'checkpoint_3', saved / 'checkpoint_7.tmp-1600000000')
    (saved / 'checkpoint_8').mkdir()
    assert t5ckpt.latest_step(str(saved)) == 3
    flat = flatten(t5ckpt.load_t5x_checkpoint(str(saved)))
    assert_same(flat['state/step'], np.asarray(3, np.int32))


@pytest.mark.parametrize('value', [0, -(2**63), 2**63 + 5, 2**64 - 1])
def test_python_ints_of_64_bits_come_back(run_dir, value):
    ck = t5ckpt.Checkpointer({'x': 1}, checkpoints_dir=run_dir)
    ck.save({'x': value}, step=1)
    assert ck.restore() == {'x': value}
    with pytest.raises(errors.UnsupportedLeafError, match=r'x: the int .*64 bits'):
        ck.save({'x': 2**64}, step=2)

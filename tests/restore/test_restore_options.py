"""What a restore may be asked for: leaves left out, shardings that do not divide, dtypes, sizes, memory."""

import ast
import functools
import itertools
import json
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from support import independent_reader, partitioner
from support.bits import bits
from support.facts import facts_of
from support.options import with_options
from support.partitioner import Partitioner, T5XState

import t5ckpt
from t5ckpt import Checkpointer
from t5ckpt.errors import (
    CheckpointNotFoundError,
    DtypeMismatch,
    MissingLeaves,
    ShapeMismatch,
    ShardingMismatch,
    TreeMismatchError,
    UnexpectedLeaves,
    UnshardedTemplateWarning,
    UnsupportedLeafError,
)


def save(directory, state, step=1, **options):
    with Checkpointer(state, checkpoints_dir=directory, **with_options(**options)) as checkpointer:
        checkpointer.save(state, step=step)


def restore(directory, template, *, options=None, **arguments):
    with Checkpointer(template, checkpoints_dir=directory, **with_options(**options or {})) as checkpointer:
        return checkpointer.restore(**arguments)


def sharded(shape, *spec, dtype=jnp.float32):
    """An abstract leaf on a mesh of four devices."""
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(partitioner.mesh((4,), ('x',)), PartitionSpec(*spec))
    )


# --- shardings that do not divide -------------------------------------------------------------------------------------

UNEVEN = {'small': np.zeros(7, np.float32), 'rows': np.zeros((6, 5), np.float32), 'even': np.zeros((8, 3), np.float32)}


@pytest.mark.parametrize('inline_bytes', [0, 16 * 1024])
def test_all_leaves_that_do_not_divide_are_in_one_error(tmp_path, inline_bytes):
    save(tmp_path, UNEVEN, inline_bytes=inline_bytes)
    template = {'small': sharded((7,), 'x'), 'rows': sharded((6, 5), None, 'x'), 'even': sharded((8, 3), 'x')}
    with pytest.raises(ShardingMismatch, match='Use None for such a dimension') as caught:
        restore(tmp_path, template)
    assert [problem.leaf for problem in caught.value.problems] == ['rows', 'small']
    texts = {problem.leaf: str(problem) for problem in caught.value.problems}
    assert 'axis 0 is partitioned 4 times, but the dimension size is 7 (full shape: (7,)' in texts['small']
    assert 'axis 1 is partitioned 4 times, but the dimension size is 5 (full shape: (6, 5)' in texts['rows']
    assert 'docs/changed-models.md' not in str(caught.value)


def test_they_stand_beside_the_other_differences(tmp_path):
    save(tmp_path, UNEVEN)
    template = {'small': sharded((7,), 'x'), 'rows': sharded((6, 4), 'x'), 'even': sharded((9,), 'x'), 'new': 1.0}
    with pytest.raises(TreeMismatchError) as caught:
        restore(tmp_path, template)
    kinds = sorted((problem.leaf, problem.kind) for problem in caught.value.problems)
    assert kinds == [
        ('even', 'shape'),
        ('even', 'sharding'),
        ('new', 'missing'),
        ('rows', 'shape'),
        ('rows', 'sharding'),
        ('small', 'sharding'),
    ]


def test_through_a_partitioner(tmp_path):
    state = T5XState({'target': {'w': np.zeros((6, 4), np.float32)}, 'state': {'step': np.int32(1)}})
    save(tmp_path, state)
    rules = Partitioner(
        partitioner.mesh((4,), ('x',)), lambda key, _: PartitionSpec('x') if key == 'target/w' else None
    )
    with pytest.raises(ShardingMismatch, match=r'target/w: .*but the dimension size is 6 \(full shape: \(6, 4\)'):
        restore(tmp_path, state, options={'partitioner': rules})
    rules = Partitioner(rules.mesh, lambda key, _: PartitionSpec(None, None, 'x') if key == 'target/w' else None)
    with pytest.raises(ShardingMismatch, match=r'target/w: .* has 3 entries, the leaf has 2 dimensions \(6, 4\)'):
        restore(tmp_path, state, options={'partitioner': rules})
    # Nothing goes to a device, so nothing has to divide.
    rules.params_on_devices = False
    lazy = restore(tmp_path, state, options={'partitioner': rules}, lazy_parameters=True)
    assert lazy.state_dict()['target']['w'].shape == (6, 4)


# --- shardings that a template has lost ------------------------------------------------------------------------------


def init():
    return {'w': jnp.ones((8, 64)), 'step': jnp.int32(1)}


ROWS = NamedSharding(partitioner.mesh((4,), ('x',)), PartitionSpec('x'))
SHARDINGS = {'w': ROWS, 'step': NamedSharding(ROWS.mesh, PartitionSpec())}


def test_a_template_without_shardings_gives_one_warning_at_a_restore(tmp_path):
    sharded_init = jax.jit(init, out_shardings=SHARDINGS)
    state = sharded_init()
    told = 'names no sharding, so each is restored to one device'
    with Checkpointer(jax.eval_shape(init), checkpoints_dir=tmp_path) as ck:
        ck.save(state)
    with Checkpointer(jax.eval_shape(init), checkpoints_dir=tmp_path) as ck:
        with pytest.warns(
            UnshardedTemplateWarning, match=f'^w: the template {told}.* saved from 4 devices.*NumPy'
        ) as caught:
            assert len(ck.restore()['w'].sharding.device_set) == 1
        assert (len(caught), caught[0].filename) == (1, __file__)
        ck.restore()
        ck.restore(lazy_parameters=True)
    # The cures that it names.
    for template, devices in (
        (jax.eval_shape(sharded_init), 4),
        ({**jax.eval_shape(init), 'w': sharded((8, 64), 'x')}, 4),
        ({**init(), 'w': one_device((8, 64))}, 1),
    ):
        with Checkpointer(template, checkpoints_dir=tmp_path) as ck:
            restored = ck.restore()
            assert len(restored['w'].sharding.device_set) == devices
            ck.save({**state, 'step': jnp.int32(5)}, overwrite=True)


def one_device(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def test_a_template_without_shardings_is_accepted_for_one_device_or_the_host(tmp_path):
    """Checkpoints of one device, arrays of NumPy, arrays in the place of shapes, scalars, lazy leaves."""
    save(tmp_path / 'one', init())
    restore(tmp_path / 'one', jax.eval_shape(init))
    state = jax.jit(init, out_shardings=SHARDINGS)()
    save(tmp_path / 'four', state)
    host = restore(tmp_path / 'four', {'w': np.zeros((8, 64), np.float32), 'step': 0})
    # Belongs to no device, so a program of several devices takes it.
    assert (jax.pmap(lambda row: row + 1)(host['w'][:4]) == 2).all()
    restore(tmp_path / 'four', init())
    restore(tmp_path / 'four', {**jax.eval_shape(init), 'w': ...})
    restore(tmp_path / 'four', jax.eval_shape(init), lazy_parameters=True)
    assert open_facts(tmp_path / 'four')['devices'] == 4
    assert 'devices' not in open_facts(tmp_path / 'one')


def open_facts(run):
    return json.loads(facts_of(run / 'checkpoint_1'))


def test_a_mesh_without_devices_is_an_error_whose_cure_works(tmp_path):
    save(tmp_path, init())
    with jax.set_mesh(jax.make_mesh((4,), ('x',), devices=jax.devices()[:4])):
        template = jax.eval_shape(init)
        mesh = jax.sharding.get_mesh()
    with pytest.raises(ShardingMismatch, match=r"w: .* over an AbstractMesh .*'x': 4") as caught:
        restore(tmp_path, template)
    assert {(problem.leaf, problem.kind) for problem in caught.value.problems} == {('w', 'mesh')}
    cure = 'jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.sharding.spec))'
    assert cure in str(caught.value)
    names = {'jax': jax, 'NamedSharding': NamedSharding, 'mesh': mesh}
    cured = eval(cure, names | {'leaf': template['w']})  # noqa: S307 - a text of ours
    assert restore(tmp_path, {**template, 'w': cured})['w'].sharding.mesh == mesh
    restore(tmp_path, template, lazy_parameters=True)


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 4)), out_sharding=('x', None))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


@pytest.mark.slow
@pytest.mark.parametrize('kind', [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_an_abstract_template_takes_the_mesh_of_the_context(tmp_path, kind):
    mesh = jax.make_mesh((4,), ('x',), axis_types=(kind,), devices=jax.devices()[:4])
    other = jax.make_mesh((2,), ('x',), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        state = nnx.state(Dense(nnx.Rngs(0)))
        template = nnx.state(nnx.eval_shape(lambda: Dense(nnx.Rngs(0))))
        save(tmp_path, state)
        restored = restore(tmp_path, template)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, state)
    assert restored['w'][...].sharding.mesh == mesh
    with (
        jax.set_mesh(other),
        pytest.raises(ShardingMismatch, match=r'Restore inside jax\.set_mesh\(mesh\)'),
    ):
        restore(tmp_path, template)


@pytest.mark.parametrize('giver', ['fallback_state', 'transform'])
def test_what_a_caller_gives_is_put_where_the_template_says(tmp_path, giver):
    save(tmp_path, {'w': jnp.ones(3)})
    rows = sharded((8, 4), 'x').sharding
    keys = jax.random.split(jax.random.key(7), 8)
    given = {'rows': jnp.arange(32.0).reshape(8, 4), 'keys': keys, 'host': jnp.ones(2), 'number': jnp.float32(0.5)}
    template = {
        'w': jnp.ones(3),
        'rows': sharded((8, 4), 'x'),
        'keys': jax.device_put(jax.random.split(jax.random.key(0), 8), rows),
        'host': np.zeros(2, np.float32),
        'number': 0.0,
    }
    arguments = {'fallback_state': given}
    if giver == 'transform':
        arguments = {'state_transformation_fns': [lambda state, _: {**state, **given}]}
    restored = restore(tmp_path, template, **arguments)
    assert restored['rows'].sharding == rows
    assert restored['keys'].sharding == template['keys'].sharding
    assert (restored['keys'] == keys).all()
    assert restored['number'] == 0.5
    assert [type(restored[name]) for name in ('host', 'number')] == [np.ndarray, float]
    np.testing.assert_array_equal(restored['rows'], given['rows'])


# --- None, {} and ... in the template ---------------------------------------------------------------------------------

FULL = {'a': np.arange(3.0), 'b': {'c': np.arange(4.0), 'd': np.arange(5.0)}, 'text': 'x'}


@pytest.mark.parametrize('nothing', [None, {}, (), []])
def test_an_array_without_a_leaf_in_the_template_is_an_error(tmp_path, nothing):
    save(tmp_path, FULL)
    for template, names in (({**FULL, 'a': nothing}, ['a']), ({**FULL, 'b': nothing}, ['b/c', 'b/d'])):
        with pytest.raises(UnexpectedLeaves, match=r'None|an empty container') as caught:
            restore(tmp_path, template)
        assert [(problem.leaf, problem.near) for problem in caught.value.problems] == [(name, ()) for name in names]
        assert 'only a name has changed' not in str(caught.value)
        assert ': ... leaves it out, its subtree restores it' in str(caught.value)
        assert "strict='contains' leaves out" in str(caught.value)
        for arguments in ({'strict': 'contains'}, {'state_transformation_fns': [t5ckpt.intersect_state]}):
            restored = restore(tmp_path, template, **arguments)
            assert [restored[name] for name, leaf in template.items() if leaf is nothing] == [nothing]


def test_a_leaf_above_another_is_not_another_name_of_it(tmp_path):
    save(tmp_path, {'params': {'d': {'k': np.ones(3)}}, 'w': np.ones(2)})
    with pytest.raises(TreeMismatchError) as caught:
        restore(tmp_path, {'params': 0, 'w': np.ones(2)})
    assert [problem.near for problem in caught.value.problems] == [(), ()]


def test_an_ellipsis_leaves_a_leaf_out_unread(tmp_path, caplog):
    save(tmp_path, FULL, inline_bytes=0)
    # What is not read may be gone.
    for name in ('a', 'b.c', 'b.d'):
        chunk = tmp_path / 'checkpoint_1' / name / '0'
        assert chunk.exists() is True
        chunk.rename(tmp_path / name)
    caplog.set_level(logging.INFO, 't5ckpt')
    assert restore(tmp_path, {'a': ..., 'b': {'c': ..., 'd': ...}, 'text': 'y'}) == {
        'a': ...,
        'b': {'c': ..., 'd': ...},
        'text': 'x',
    }
    assert 'left out, the template has ... there: a, b/c, b/d' in caplog.text
    assert restore(tmp_path, {'a': ..., 'b': ..., 'text': ...}) == {'a': ..., 'b': ..., 'text': ...}
    (tmp_path / 'b.c').rename(tmp_path / 'checkpoint_1' / 'b.c' / '0')
    restored = restore(tmp_path, {'a': ..., 'b': {'c': np.zeros(4), 'd': ...}, 'text': ''})
    np.testing.assert_array_equal(restored['b'].pop('c'), np.arange(4.0))
    assert restored == {'a': ..., 'b': {'d': ...}, 'text': 'x'}


def test_an_ellipsis_for_what_is_not_there_is_logged(tmp_path, caplog):
    save(tmp_path, {'a': np.arange(3.0)})
    assert restore(tmp_path, {'a': ..., 'gone': ...}) == {'a': ..., 'gone': ...}
    assert "not in the checkpoint, so the template's text or ... stays: gone" in caplog.text


@pytest.mark.parametrize(('kept', 'warns'), [({'params': {'a': 0}}, True), ({'ema_params': {'a': 0}}, False)])
def test_contains_warns_of_some_parameters_but_not_of_an_average_in_their_place(tmp_path, caplog, kept, warns):
    save(tmp_path, {'params': {'a': 1, 'b': 2}, 'ema_params': {'a': 3}})
    caplog.clear()
    restore(tmp_path, kept, strict='contains')
    warnings = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
    assert ['params/b' in text for text in warnings] == [True] * warns


def test_text_that_one_side_lacks_is_not_called_restored(tmp_path, caplog):
    save(tmp_path, {'a': np.arange(3.0), 'old': 'x'})
    caplog.clear()
    assert list(restore(tmp_path, {'a': np.zeros(3), 'new': 'y'})) == ['a', 'new']
    assert [record.getMessage() for record in caplog.records if record.levelname == 'WARNING'] == [
        't5ckpt: left out 1 leaf that the template does not have: old',
        "t5ckpt: not in the checkpoint, so the template's text or ... stays: new",
    ]


def test_the_log_names_the_leaves_that_fallback_state_filled(tmp_path, caplog):
    save(tmp_path, {'a': np.arange(3.0)})
    caplog.set_level(logging.INFO, 't5ckpt')
    new = {'a': np.zeros(3), **{f'x{i}': np.zeros(1) for i in range(30)}}
    restore(tmp_path, new, fallback_state=new)
    (line,) = [text for text in caplog.messages if 'fallback_state' in text]
    assert line.startswith('t5ckpt: 30 leaves as given (fallback_state, init_fn), not from the checkpoint: x0, x1')
    caplog.clear()
    with Checkpointer(new, checkpoints_dir=tmp_path / 'other') as checkpointer:
        t5ckpt.restore_or_init(checkpointer, lambda: new, initial_checkpoint=t5ckpt.WarmStart(tmp_path, missing='init'))
    assert any('30 leaves as given (fallback_state, init_fn)' in text for text in caplog.messages)


def test_an_ellipsis_is_not_saved(tmp_path):
    with pytest.raises(UnsupportedLeafError, match=r'b: is \.\.\., which stands for a leaf that a restore left out'):
        save(tmp_path, {'a': 1, 'b': ...})


# --- dtypes of the template -------------------------------------------------------------------------------------------


def test_floating_leaves_in_the_dtype_of_the_template(tmp_path, caplog):
    state = {
        'model': {'w': jnp.arange(4096.0), 'b': jnp.arange(3.0), 'n': jnp.arange(3)},
        'mu': jnp.ones(2, jnp.bfloat16),
        'lr': 0.5,
    }
    save(tmp_path, state, inline_bytes=64)
    template = {
        'model': {
            'w': sharded((4096,), 'x', dtype=jnp.bfloat16),
            'b': np.zeros(3, np.float16),
            'n': jnp.zeros(3, jnp.int32),
        },
        'mu': jnp.ones(2),
        'lr': 0.0,
        'new': jnp.zeros(2, jnp.bfloat16),
        'host': np.zeros(2, np.float16),
    }
    options = {'restore_dtype': 'template'}
    fallback = {'new': jnp.ones(2), 'host': np.ones(2, np.float32)}
    for lazy in (False, True):
        restored = restore(
            tmp_path, template, options=options, fallback_state=fallback, lazy_parameters=lazy, strict='exact'
        )
        dtypes = jax.tree.map(lambda leaf: str(leaf.dtype) if hasattr(leaf, 'dtype') else type(leaf), restored)
        assert dtypes == {
            'model': {'w': 'bfloat16', 'b': 'float16', 'n': 'int32'},
            'mu': 'float32',
            'lr': float,
            'new': 'bfloat16',
            'host': 'float16',
        }
        np.testing.assert_array_equal(np.asarray(restored['model']['w']), np.arange(4096.0, dtype=jnp.bfloat16))
    assert 'restored as in the checkpoint' not in caplog.text


def test_a_cast_that_leaves_a_dtype_as_it_is_does_not_advise_a_cast(tmp_path, caplog):
    save(tmp_path, {'w': jnp.ones(4, jnp.bfloat16)})
    restore(tmp_path, {'w': jnp.ones(4)}, options={'restore_dtype': 'bfloat16', 'cast_leaves': 'w'})
    assert 'restored as in the checkpoint, since restore_dtype and cast_leaves do not change them' in caplog.text
    assert 'restore_dtype casts' not in caplog.text


def test_a_directory_that_is_not_there_is_said_to_be_missing(tmp_path):
    with Checkpointer({'w': 0}, checkpoints_dir=tmp_path / 'nowhere') as checkpointer:
        with pytest.raises(CheckpointNotFoundError, match='nowhere: there is no such file or directory'):
            checkpointer.restore(step=43)
        (tmp_path / 'nowhere').mkdir()
        with pytest.raises(CheckpointNotFoundError, match='step 43 does not exist, complete steps are: none'):
            checkpointer.restore(step=43)


def test_the_dtype_is_the_checkpoints_unless_asked(tmp_path, caplog):
    save(tmp_path, {'w': jnp.ones(4)})
    with Checkpointer({'w': jnp.ones(4, jnp.bfloat16)}, checkpoints_dir=tmp_path) as checkpointer:
        assert checkpointer.restore()['w'].dtype == jnp.float32
        assert 'w: checkpoint float32, template bfloat16' in caplog.text
        assert '(restore_dtype casts floating leaves)' in caplog.text
        checkpointer.restore_dtype = 'template'
        assert checkpointer.restore()['w'].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match='restore_dtype'):
        Checkpointer({'w': jnp.ones(4)}, checkpoints_dir=tmp_path, restore_dtype='model')


@pytest.mark.parametrize('options', [{}, {'cast_leaves': '.*'}])
def test_a_cast_that_was_asked_for_is_not_a_warning(tmp_path, caplog, options):
    state = {'params': {'w': jnp.ones(4)}}
    save(tmp_path, state)
    with Checkpointer(
        state, checkpoints_dir=tmp_path, restore_dtype='bfloat16', **with_options(**options)
    ) as checkpointer:
        assert checkpointer.restore()['params']['w'].dtype == jnp.bfloat16
    assert not [record for record in caplog.records if record.levelname == 'WARNING']


# --- host memory in flight --------------------------------------------------------------------------------------------


def peak(caplog):
    record = next(record for record in reversed(caplog.records) if 'in flight at once' in record.msg)
    return record.args[0]


@pytest.mark.parametrize('compression', [None, 'zstd'])
def test_a_restore_keeps_within_its_bytes(tmp_path, caplog, compression):
    caplog.set_level(logging.DEBUG, 't5ckpt')
    state = {f'w{i}': np.full(50_000, i, np.float32) for i in range(20)}
    save(tmp_path, state, compression=compression)
    template = {name: sharded((50_000,), 'x') for name in state}
    restore(tmp_path, template)
    assert peak(caplog) == 20 * 200_000
    restored = restore(tmp_path, template, options={'restore_concurrent_gb': 0.0005})
    assert peak(caplog) == 2 * 200_000
    # A leaf that is larger than all of it is read alone.
    restore(tmp_path, template, options={'restore_concurrent_gb': 0.0001})
    assert peak(caplog) == 200_000
    assert all((restored[name] == state[name]).all() for name in state)
    with pytest.raises(ValueError, match='restore_concurrent_gb'):
        Checkpointer(template, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(restore_concurrent_gb=0))


# --- other sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'options', [{'inline_bytes': 0}, {}, {'compression': 'zstd', 'inline_bytes': 0}, {'chunk_bytes': 60}]
)
@pytest.mark.parametrize('shape', [(8, 12), (4, 4), (12, 3), (20, 20)])
def test_padded_and_truncated_as_jax_does(tmp_path, options, shape, caplog):
    values = np.arange(10 * 8, dtype=np.float32).reshape(10, 8) + 1
    save(tmp_path, {'emb': values, 'w': np.ones(3)}, **options)
    expected = np.zeros(shape, np.float32)
    rows, columns = min(10, shape[0]), min(8, shape[1])
    expected[:rows, :columns] = values[:rows, :columns]
    w = np.zeros(3)
    for leaf in (np.zeros(shape, np.float32), sharded(shape, 'x'), jnp.zeros(shape)):
        for lazy, resize in ((False, 'em.'), (True, re.compile('EM.', re.IGNORECASE))):
            restored = restore(tmp_path, {'emb': leaf, 'w': w}, resize=resize, lazy_parameters=lazy)
            assert restored['emb'].shape == shape
            np.testing.assert_array_equal(np.asarray(restored['emb']), expected)
    assert f'padded with zeros or truncated: emb: (10, 8) to {shape}' in caplog.text


def test_a_resize_with_a_cast_and_a_map(tmp_path):
    save(tmp_path, {'emb': np.arange(40, dtype=np.float32).reshape(10, 4)}, inline_bytes=0)
    options = {'restore_dtype': 'template', 'mmap': True}
    restored = restore(tmp_path, {'emb': sharded((12, 4), 'x', dtype=jnp.bfloat16)}, resize=['emb'], options=options)[
        'emb'
    ]
    assert restored.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(restored[:10], np.float32), np.arange(40).reshape(10, 4))
    assert not restored[10:].any()


def test_nothing_is_resized_unasked(tmp_path, caplog):
    save(tmp_path, {'a': np.ones((4, 4)), 'b': np.ones((4, 4))})
    template = {'a': np.ones((5, 4)), 'b': np.ones((5, 4))}
    with pytest.raises(ShapeMismatch) as caught:
        restore(tmp_path, template, resize='a')
    assert [problem.leaf for problem in caught.value.problems] == ['b']
    with pytest.raises(ShapeMismatch):
        restore(tmp_path, {'a': np.ones((4, 4, 1)), 'b': np.ones((4, 4))}, resize='a')
    with pytest.raises(ValueError, match="resize='c' matches no leaf, such as a, b"):
        restore(tmp_path, template, resize=['a', 'c'])
    with pytest.raises(ValueError, match=r'resize.* a regular expression'):
        restore(tmp_path, template, resize='[')
    for wrong in (5, ['a', None]):
        with pytest.raises(TypeError):
            restore(tmp_path, template, resize=wrong)
    caplog.set_level(logging.INFO, 't5ckpt')
    restore(tmp_path, {'a': np.ones((4, 4)), 'b': np.ones((4, 4))}, resize=(re.compile('a'),))
    assert 'every leaf has the shape of the template' in caplog.text


def test_keys_are_not_resized_and_the_cures_work_in_one_step(tmp_path):
    """Zeros as keys would all be one key, and so one stream of random numbers."""

    def state_of(count):
        return {'w': np.ones(3), 'rng': jax.random.split(jax.random.key(count), count), 'step': np.int32(1)}

    save(tmp_path / 'run', state_of(4))
    template = state_of(8)
    with pytest.raises(
        ShapeMismatch, match=r'take new keys from the initial state \(leave= of restore and WarmStart\)'
    ) as caught:
        restore(tmp_path / 'run', template, resize='rng')
    assert 'resize=' not in str(caught.value)

    new = {'rng': jax.random.split(jax.random.key(9), 8)}
    for given, keys in (({}, template['rng']), ({'fallback_state': new}, new['rng'])):
        assert (restore(tmp_path / 'run', template, leave='rng', **given)['rng'] == keys).all()

    def start(**options):
        with Checkpointer(template, checkpoints_dir=tmp_path / 'new') as checkpointer:
            return t5ckpt.restore_or_init(
                checkpointer,
                lambda: template,
                initial_checkpoint=t5ckpt.WarmStart(tmp_path / 'run', **options),
            )

    with pytest.raises(ShapeMismatch, match=r'leave= of restore and WarmStart') as caught:
        start(resize='rng')
    assert 'resize=' not in str(caught.value)
    assert (start(leave='rng')['rng'] == template['rng']).all()


def test_only_what_is_in_both_is_read(tmp_path):
    """Rows that the template lacks may be gone, and rows that the checkpoint lacks are not requested."""
    save(tmp_path, {'w': np.arange(64, dtype=np.float32).reshape(16, 4)}, inline_bytes=0, chunk_bytes=4 * 4 * 4)
    for chunk in ('2.0', '3.0'):
        (tmp_path / 'checkpoint_1' / 'w' / chunk).unlink()
    restored = restore(tmp_path, {'w': sharded((8, 4), 'x')}, resize='w')
    np.testing.assert_array_equal(restored['w'], np.arange(32.0).reshape(8, 4))


def test_a_pattern_for_the_dtypes_of_the_template(tmp_path):
    save(tmp_path, {'a': jnp.ones(4), 'b': jnp.ones(4)})
    template = {'a': jnp.ones(4, jnp.bfloat16), 'b': jnp.ones(4, jnp.bfloat16)}
    restored = restore(tmp_path, template, options={'restore_dtype': 'template', 'cast_leaves': 'a'})
    assert (restored['a'].dtype, restored['b'].dtype) == (jnp.bfloat16, jnp.float32)
    with pytest.raises(ValueError, match='restore_dtype=template would have no effect'):
        restore(tmp_path, template, options={'restore_dtype': 'template', 'cast_leaves': 'c'})


# --- a bare array, and parts with a state of their own ----------------------------------------------------------------


@pytest.mark.parametrize('inline_bytes', [0, 16 * 1024])
def test_a_state_that_is_an_array(tmp_path, inline_bytes):
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    save(tmp_path, jnp.asarray(values), inline_bytes=inline_bytes)
    for template in (sharded((8, 8), 'x'), np.zeros((8, 8), np.float32)):
        restored = restore(tmp_path, template)
        assert isinstance(restored, np.ndarray if isinstance(template, np.ndarray) else jax.Array)
        np.testing.assert_array_equal(restored, values)
    assert restore(tmp_path, sharded((8, 8), 'x')).sharding == sharded((8, 8), 'x').sharding
    np.testing.assert_array_equal(t5ckpt.open_checkpoint(tmp_path)['array'][:2], values[:2])
    np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(tmp_path)['array'], values)
    assert {name: value.tobytes() for name, value in independent_reader.read(tmp_path / 'checkpoint_1').items()} == {
        'array': values.tobytes()
    }
    with pytest.raises(t5ckpt.errors.ShapeMismatch, match='array: checkpoint'):
        restore(tmp_path, np.zeros(3, np.float32))


def test_a_bare_array_through_a_partitioner(tmp_path):
    class Columns:
        mesh = partitioner.mesh((4,), ('x',))
        params_on_devices = True

        def get_mesh_axes(self, _):
            return PartitionSpec(None, 'x')

        def get_data_layout(self):
            return partitioner.DataLayout()

    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    save(tmp_path, values)
    restored = restore(tmp_path, jax.ShapeDtypeStruct((8, 8), np.float32), options={'partitioner': Columns()})
    assert restored.sharding.spec == PartitionSpec(None, 'x')


class Schedule:
    """What torchtitan calls Stateful."""

    def state_dict(self):
        return {'position': 1}

    def load_state_dict(self, state):
        raise AssertionError(state)


def test_an_object_with_a_state_dict_is_no_leaf(tmp_path):
    with pytest.raises(UnsupportedLeafError, match=r'loader: .*Schedule .*dataset_iterator=.* put its state_dict\(\)'):
        save(tmp_path, {'loader': Schedule(), 'w': np.ones(3)})


def test_patterns_match_names_with_line_breaks(tmp_path):
    state = {'params': {'a\nb': np.ones(4, np.float32), 'c': np.ones(4, np.float32)}}
    save(tmp_path / 'run', state, cast_leaves='params/a.*', save_dtype='bfloat16')
    view = t5ckpt.open_checkpoint(tmp_path / 'run')
    assert {str(view[name].dtype) for name in view if 'a' in name.split('/')[1]} == {'bfloat16'}
    wide = {'params': {'a\nb': np.ones(6, jnp.bfloat16), 'c': np.ones(4, np.float32)}}
    assert restore(tmp_path / 'run', wide, resize='params/a.b')['params']['a\nb'].shape == (6,)
    warm = t5ckpt.WarmStart(tmp_path / 'run', take='.*', leave='.*a.b')
    assert (warm.takes('params/a\nb'), warm.takes('params/c')) == (False, True)
    assert warm.takes('params/x\ny')


def test_an_empty_wide_array_is_not_narrowed(tmp_path):
    state = {'none': np.zeros((0, 3), np.int64), 'reals': np.zeros(0), 'w': np.ones(2, np.float32)}
    save(tmp_path, state)
    restored = restore(
        tmp_path, {name: jnp.asarray(leaf, np.dtype(leaf.dtype.str.replace('8', '4'))) for name, leaf in state.items()}
    )
    assert {name: leaf.shape for name, leaf in restored.items()} == {'none': (0, 3), 'reals': (0,), 'w': (2,)}


# --- Flax NNX ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('nested', [False, True])
@pytest.mark.parametrize('saved', ['state', 'pure'])
def test_the_hint_for_the_value_suffix_of_nnx_works(tmp_path, saved, nested):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 3, rngs=rngs)
            self.out = nnx.Linear(3, 2, rngs=rngs)

    state = nnx.state(Net(nnx.Rngs(0)))
    forms = {'state': state, 'pure': nnx.to_pure_dict(state)}
    if nested:
        forms = {name: {'model': form, 'step': 1} for name, form in forms.items()}
    template = forms['pure' if saved == 'state' else 'state']
    save(tmp_path, forms[saved])
    with pytest.raises(TreeMismatchError) as raised:
        restore(tmp_path, template)
    restored = restore(tmp_path, template, rename=raised.value.rename)
    assert jax.tree.structure(restored) == jax.tree.structure(template)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(restored), jax.tree.leaves(template))


A, B = np.full((4, 4), 1, np.float32), np.full(4, 2, np.float32)
RENAMED = {
    'one of two has the suffix': ({'d': {'kernel': {'value': A}, 'bias': B}}, {'d': {'kernel': A, 'bias': B}}),
    'one layer has the suffix': ({'d': {'k': {'value': A}}, 'e': {'k': A}}, {'d': {'k': A}, 'e': {'k': A}}),
    'a scope more': ({'p': {'d': A, 'e': B}, 'n': 1}, {'p': {'model': {'d': A, 'e': B}}, 'n': 1}),
    'a scope less': ({'p': {'model': {'d': A, 'e': B}}, 'n': 1}, {'p': {'d': A, 'e': B}, 'n': 1}),
    'the root': ({'target': {'w': A, 'v': B}, 'n': 1}, {'params': {'w': A, 'v': B}, 'n': 1}),
    'a leaf of all layers': (
        {'layer': {'w': A, 'b': B}, 'other': {'w': A}},
        {'layer': {'weight': A, 'b': B}, 'other': {'weight': A}},
    ),
    'a leaf of one layer': ({'layer': {'w': A}, 'other': {'w': A}}, {'layer': {'weight': A}, 'other': {'w': A}}),
    'two names at once': ({'enc': {'w': A}, 'head': {'b': B}}, {'encoder': {'w': A}, 'heads': {'b': B}}),
    'names swapped': ({'p': {'a': {'x': A}, 'b': {'y': B}}}, {'p': {'a': {'y': B}, 'b': {'x': A}}}),
    'characters of patterns': ({'a.b\\1': {'x/y': A}, 'c': B}, {'a+b(1)': {'x/y': A}, 'c': B}),
}


@pytest.mark.parametrize('kind', RENAMED)
def test_the_rules_that_the_error_prints_restore_every_leaf(tmp_path, kind):
    saved, template = RENAMED[kind]
    save(tmp_path, saved)
    with pytest.raises(TreeMismatchError) as raised:
        restore(tmp_path, template)
    rules = ast.literal_eval(re.search(r'rename=(\[.*\])', str(raised.value))[1])
    assert tuple(rules) == raised.value.rename
    fresh = jax.tree.map(np.zeros_like, template)
    jax.tree.map(np.testing.assert_array_equal, restore(tmp_path, fresh, rename=rules), template)
    with Checkpointer(fresh, checkpoints_dir=tmp_path / 'new') as checkpointer:
        warm = t5ckpt.WarmStart(tmp_path, rename=rules)
        started = t5ckpt.restore_or_init(checkpointer, lambda: fresh, initial_checkpoint=warm)
    jax.tree.map(np.testing.assert_array_equal, started, template)
    # The state is saved under its new names, and the rules may stay.
    with Checkpointer(fresh, checkpoints_dir=tmp_path) as checkpointer:
        for _ in range(2):
            started = t5ckpt.restore_or_init(checkpointer, None, rename=rules)
            jax.tree.map(np.testing.assert_array_equal, started, template)
            checkpointer.save(started, step=2)
    assert checkpointer.restored_step == 2


def test_no_rule_is_printed_for_a_new_leaf_or_one_of_other_values(tmp_path):
    save(tmp_path, {'dense': {'kernel': A}, 'e': {'w': B}})
    for dense in ({'kernel': A, 'kernels': A}, {'kernels': B}, {'kernels': A.astype(int)}):
        with pytest.raises(TreeMismatchError) as raised:
            restore(tmp_path, {'dense': dense, 'e': {'w': B}})
        assert 'rename=' not in str(raised.value)


def test_with_other_changes_the_rule_is_printed_and_the_places_that_remain_are_counted(tmp_path):
    save(tmp_path, {'dense': {'kernel': A}, 'e': {'w': B}})
    template = {'dense': {'kernels': A * 0}, 'e': {'w': B * 0, 'new': A}}
    with pytest.raises(TreeMismatchError, match=r'too \(1 place will remain\), map them') as raised:
        restore(tmp_path, template)
    restored = restore(tmp_path, template, rename=raised.value.rename, fallback_state={'e': {'new': A}})
    np.testing.assert_array_equal(restored['dense']['kernels'], A)


def test_a_rule_takes_the_boxes_off_the_kernels_of_a_model(tmp_path):
    """With linen's nn.with_partitioning each kernel is an nn.Partitioned, but a scale without one is not; Adam's are alike."""
    layers = [f'block_{i}' for i in range(6)]
    boxed = {layer: {'mlp': {'kernel': {'value': A * i}}, 'scale': B} for i, layer in enumerate(layers)}
    plain = {layer: {'mlp': {'kernel': A * i}, 'scale': B} for i, layer in enumerate(layers)}
    save(tmp_path, {'params': boxed, 'mu': boxed, 'nu': boxed})
    fresh = jax.tree.map(np.zeros_like, {'params': plain})
    with pytest.raises(TreeMismatchError, match='If only names have changed') as raised:
        restore(tmp_path, fresh, strict='contains')
    assert raised.value.rename == ((r'(.*/kernel)', r'\1/value'),)
    restored = restore(tmp_path, fresh, rename=raised.value.rename, strict='contains')
    jax.tree.map(np.testing.assert_array_equal, restored, {'params': plain})


def test_no_rule_maps_a_layer_to_one_of_another_number(tmp_path):
    save(tmp_path, {f'layer_{i}': {'w': A * i} for i in range(3)})
    with pytest.raises(TreeMismatchError) as raised:
        restore(tmp_path, {f'layer_{i + 1}': {'w': A} for i in range(3)})
    assert 'rename=' not in str(raised.value)


def test_the_rules_for_another_optimizer_do_not_guess(tmp_path):
    params = {'a': {'w': jnp.ones((4, 3))}, 'b': {'w': jnp.ones((4, 3))}}
    _, adam = optax.adam(1e-2).update(params, optax.adam(1e-2).init(params))
    save(tmp_path, {'opt_state': adam})
    # The momentum may be the first moments or the second.
    with pytest.raises(TreeMismatchError) as raised:
        restore(tmp_path, {'opt_state': optax.sgd(1e-2, momentum=0.9).init(params)})
    assert 'rename=' not in str(raised.value)


@pytest.mark.parametrize('scope', ['opt', 'optimizer', 'optim', 'state/opt', 'trainer/optimizer_state', 'tx'])
def test_the_rules_for_another_optimizer_do_not_guess_below_any_scope(tmp_path, scope):
    """The second moments would become the momentum, since the names are as near as the shapes are equal."""
    *above, last = scope.split('/')

    def state(name):
        nested = {last: {name: {'a': {'w': jnp.ones((4, 3))}}}}
        for key in reversed(above):
            nested = {key: nested}
        return {'params': {'a': {'w': jnp.ones((4, 3))}}, **nested}

    save(tmp_path, state('nu'))
    with pytest.raises(TreeMismatchError) as raised:
        restore(tmp_path, state('trace'))
    assert 'rename=' not in str(raised.value)


def _chain(*transforms):
    return optax.chain(*transforms, optax.scale_by_adam(), optax.scale_by_schedule(lambda _: 1.0))


OPTIMIZERS = {
    'accumulation of gradients': (optax.adam(1e-2), optax.MultiSteps(optax.adam(1e-2), 4)),
    'accumulation around a chain': (_chain(), optax.MultiSteps(_chain(), 4)),
    'a mask': (optax.adam(1e-2), optax.masked(optax.adam(1e-2), lambda params: jax.tree.map(lambda _: True, params))),
    'hyperparameters': (optax.adam(1e-2), optax.inject_hyperparams(optax.adam)(1e-2)),
}


@pytest.mark.parametrize('is_removed', [False, True])
@pytest.mark.parametrize('kind', OPTIMIZERS)
def test_the_rules_for_a_wrapped_optimizer_keep_its_state(tmp_path, kind, is_removed):
    params = {'a': {'w': jnp.ones((4, 3))}, 'b': {'w': jnp.ones((4, 3))}}
    old, new = OPTIMIZERS[kind][:: -1 if is_removed else 1]

    def values(state):
        """The moments of Adam and its counter, and the counter of the schedule."""
        is_kept = ('ScaleByAdamState', 'ScaleByScheduleState')
        leaves = jax.tree.leaves(state, is_leaf=lambda node: type(node).__name__ in is_kept)
        return [leaf for leaf in leaves if type(leaf).__name__ in is_kept]

    state = jax.tree.map(lambda leaf: jnp.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype), old.init(params))
    save(tmp_path, {'opt_state': state, 'params': params})
    fresh = {'opt_state': new.init(params), 'params': params}
    with pytest.raises(TreeMismatchError) as raised:
        restore(tmp_path, fresh)
    restored = restore(tmp_path, fresh, rename=raised.value.rename, missing='init', strict='contains')
    assert len(values(state)) == len(values(restored['opt_state'])) > 0
    jax.tree.map(np.testing.assert_array_equal, values(restored['opt_state']), values(state))


def test_a_new_leaf_is_not_taken_for_a_renamed_one_of_another_shape_or_kind(tmp_path):
    key = jax.random.key(0)
    saved = {
        'params': {
            'out': {'kernel': np.ones((4, 8), np.float32)},
            'dropout': {'kernel': np.zeros(2, np.uint32), 'key': key},
        }
    }
    t5ckpt.Checkpointer(saved, checkpoints_dir=tmp_path).save(saved, step=1)
    template = {'params': {'out': saved['params']['out'], 'extra': {'kernel': np.ones((8, 2), np.float32)}}}
    with pytest.raises(t5ckpt.errors.TreeMismatchError) as caught:
        t5ckpt.Checkpointer(template, checkpoints_dir=tmp_path).restore()
    assert 'If only names have changed' not in str(caught.value)
    # A leaf of the same shape and kind is named.
    del template['params']['extra']
    template['params']['output'] = template['params'].pop('out')
    with pytest.raises(t5ckpt.errors.TreeMismatchError, match='If names have changed, too'):
        t5ckpt.Checkpointer(template, checkpoints_dir=tmp_path).restore()


# --- casts -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ('dtype', 'lost'),
    [
        ('bfloat16', 3.4e38),
        ('float16', 70000.0),
        ('float8_e5m2', 70000.0),
        ('float8_e4m3', 500.0),
        ('float8_e4m3fn', 500.0),
        ('float8_e4m3b11fnuz', -40.0),
        ('float8_e8m0fnu', -1.0),
        ('float8_e8m0fnu', 0.0),
        ('float4_e2m1fn', 7.0),
        ('float6_e3m2fn', float('nan')),
    ],
)
@pytest.mark.parametrize('inline_bytes', [0, 16 * 1024])
def test_no_cast_loses_a_finite_value_in_silence(tmp_path, dtype, lost, inline_bytes):
    run = tmp_path / 'run'
    good, bad = np.array([1, 2, 0.5, 4], np.float32), np.array([1, 2, lost, 4], np.float32)
    state = {'params': {'w': bad, 'v': good}}
    save(run, state, inline_bytes=inline_bytes)
    save(run, {'params': {'v': good}}, 2)
    on_device = {'params': {'w': jnp.asarray(bad), 'v': jnp.asarray(good)}}
    abstract = {'params': {name: jax.ShapeDtypeStruct((4,), jnp.float32) for name in 'vw'}}
    lazily = t5ckpt.load_t5x_checkpoint(run, 1, restore_dtype=dtype, lazy_parameters=True)
    paths = {
        'save_dtype': lambda: save(tmp_path / 'saved', state, inline_bytes=inline_bytes, save_dtype=dtype),
        'save_dtype of a jax.Array': lambda: save(
            tmp_path / 'saved', on_device, inline_bytes=inline_bytes, save_dtype=dtype
        ),
        'cp': lambda: t5ckpt.copy_checkpoint(
            run / 'checkpoint_1', tmp_path / 'copy', t5ckpt.ConvertOptions(save_dtype=dtype)
        ),
        'restore_dtype': lambda: restore(run, state, options={'restore_dtype': dtype}, step=1),
        'restore_dtype to devices': lambda: restore(run, abstract, options={'restore_dtype': dtype}, step=1),
        'lazy': lambda: np.asarray(
            restore(run, state, options={'restore_dtype': dtype}, step=1, lazy_parameters=True)['params']['w']
        ),
        'load': lambda: t5ckpt.load_t5x_checkpoint(run, 1, restore_dtype=dtype),
        'load lazily': lambda: np.asarray(lazily['params']['w']),
        'export': lambda: t5ckpt.convert_checkpoint(
            'to-safetensors', run, tmp_path / 'x.safetensors', t5ckpt.ConvertOptions(step=1, save_dtype=dtype)
        ),
    }
    if dtype.startswith('float6'):
        del paths['restore_dtype to devices']  # JAX has no such arrays
    if dtype in ('float8_e4m3', 'float8_e4m3b11fnuz', 'float4_e2m1fn', 'float6_e3m2fn'):
        del paths['export']  # safetensors has no such arrays
    for name, refused in paths.items():
        with pytest.raises(UnsupportedLeafError, match=f'params/w.* that {dtype} cannot hold') as caught:
            pytest.fail(f'{name}: {refused()}')
        assert 'params/v' not in str(caught.value)
    assert not list((tmp_path / 'saved').glob('checkpoint_*'))
    assert bits(restore(run, {'params': {'v': good}}, options={'restore_dtype': dtype}, step=2)['params']['v']) == bits(
        good.astype(dtype)
    )


@jax.tree_util.register_pytree_node_class
class OnlyFloat32:
    """Checks its leaf, which JAX may also replace by an object without a dtype."""

    def __init__(self, w):
        assert getattr(w, 'dtype', 'float32') == 'float32'
        self.w = w

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_an_error_of_a_class_of_the_template_names_the_leaves_that_changed(tmp_path):
    state = {'a': np.zeros(2, np.float32), 'n': np.int32(1), 'params': OnlyFloat32(np.ones(3, np.float32))}
    Checkpointer(state, checkpoints_dir=tmp_path).save(state, step=1)
    with (
        Checkpointer(
            state,
            checkpoints_dir=tmp_path,
            restore_dtype='bfloat16',
            options=t5ckpt.CheckpointerOptions(cast_leaves='params/.*'),
        ) as checkpointer,
        pytest.raises(AssertionError) as caught,
    ):
        checkpointer.restore()
    (note,) = caught.value.__notes__
    assert note.endswith('differ: params/0: float32(3,) in the template, bfloat16(3,) restored')
    restored = Checkpointer(state, checkpoints_dir=tmp_path).restore()
    np.testing.assert_array_equal(restored['params'].w, state['params'].w)


def test_the_cure_for_another_shape_or_kind_of_dtype(tmp_path):
    old = {'params': {'w': np.arange(6e4, dtype=np.float32).reshape(300, 200)}}
    t5ckpt.Checkpointer(old, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(inline_bytes=0)).save(
        old, step=1
    )
    stored = t5ckpt.open_checkpoint(tmp_path)['params/w']
    for wanted, error in (
        (old['params']['w'].reshape(200, 300), ShapeMismatch),
        (old['params']['w'].astype(np.int32), DtypeMismatch),
    ):
        new = {'params': {'w': np.zeros_like(wanted)}}
        reader = t5ckpt.Checkpointer(new, checkpoints_dir=tmp_path)
        with pytest.raises(error, match=re.escape('t5ckpt.open_checkpoint(path)[leaf][...] reads the old values')):
            reader.restore()

        def replace(state, template, wanted=wanted):
            return {'params': {'w': stored[...].reshape(wanted.shape).astype(wanted.dtype)}}

        np.testing.assert_array_equal(reader.restore(state_transformation_fns=[replace])['params']['w'], wanted)

    for compute in (
        lambda w: w[:150], lambda w: w * 2, lambda w: 1 - w, np.asarray, jnp.asarray, np.sum, list, float,
        lambda w: w.astype(np.int32), lambda w: w.mean(),
    ):  # fmt: skip

        def computed(state, template, compute=compute):
            assert state['params']['w'].shape == stored.shape
            assert bool(state['params']['w'])
            return {'params': {'w': compute(state['params']['w'])}}

        with pytest.raises(
            (TypeError, AttributeError), match=r'params.w: a state transformation runs before.*fallback_state'
        ):
            reader.restore(state_transformation_fns=[computed])
    rename = functools.partial(t5ckpt.apply_assignment_map, assignment_map=[('params/w', 'params/old')])
    with pytest.raises(MissingLeaves) as missing:
        reader.restore(state_transformation_fns=[rename])
    assert not getattr(missing.value, '__notes__', []), 'an error of t5ckpt has its own cure'


@pytest.mark.parametrize(('value', 'named'), [('7', 'text'), (None, 'None'), ({}, 'an empty container')])
def test_what_fallback_state_holds_in_the_place_of_an_array_is_named(tmp_path, value, named):
    with Checkpointer({'w': np.ones(3)}, checkpoints_dir=tmp_path) as ck:
        ck.save({'w': np.ones(3)}, step=1)
    ck = Checkpointer({'w': np.ones(3), 'new': np.ones(2)}, checkpoints_dir=tmp_path)
    with ck, pytest.raises(MissingLeaves, match=f'fallback_state holds {named} there'):
        ck.restore(fallback_state={'new': value})


def test_an_empty_fallback_state_is_none(tmp_path):
    t5ckpt.Checkpointer({'w': np.ones(3)}, checkpoints_dir=tmp_path).save({'w': np.ones(3)}, step=1)
    wanted = t5ckpt.Checkpointer({'w': np.zeros(3), 'ema': np.zeros(3)}, checkpoints_dir=tmp_path)
    with pytest.raises(MissingLeaves, match='ema: not in the checkpoint'):
        wanted.restore(fallback_state={})


def _filled(optimizer, sign=1):
    numbers = itertools.count(1)
    state = optimizer.init({'w': jnp.ones(4)})
    return {
        'params': {'w': jnp.ones(4)},
        'opt_state': jax.tree.map(lambda x: jnp.full_like(x, sign * next(numbers)), state),
    }


ADAM, CLIP, TRACE, SCHEDULE = (
    optax.scale_by_adam(), optax.clip(1.0), optax.trace(0.9), optax.scale_by_schedule(lambda count: 1.0)
)  # fmt: skip


@pytest.mark.parametrize(
    ('old', 'new'),
    [
        (optax.chain(ADAM), optax.chain(CLIP, optax.scale_by_lion())),
        (optax.chain(CLIP, TRACE), optax.chain(CLIP, ADAM)),
        (optax.chain(TRACE, TRACE, ADAM), optax.chain(TRACE, ADAM)),
        (
            optax.chain(optax.scale_by_rms(), optax.scale_by_lion()),
            optax.chain(optax.scale_by_lion(), optax.scale_by_rms()),
        ),
        (optax.chain(optax.scale_by_rms(), optax.ema(0.9)), optax.chain(TRACE, optax.scale_by_rms())),
        (optax.chain(ADAM, SCHEDULE), optax.apply_if_finite(optax.chain(ADAM), 3)),
        (optax.chain(optax.chain(ADAM, CLIP, TRACE), SCHEDULE), optax.chain(ADAM, CLIP, TRACE)),
    ],
)
def test_no_rule_maps_what_one_optimizer_computes_to_what_another_computes(tmp_path, old, new):
    """A momentum as the second moment of Adam is a NaN at the first update."""
    saved, template = _filled(old), _filled(new, -1)
    save(tmp_path, saved)
    with pytest.raises(TreeMismatchError) as caught:
        restore(tmp_path, template)
    if not caught.value.rename:
        return
    renamed = restore(tmp_path, template, rename=caught.value.rename, strict='contains', missing='init')
    saved_names, names = (
        {
            int(leaf.ravel()[0]): jax.tree_util.keystr(path)
            for path, leaf in jax.tree_util.tree_leaves_with_path(state['opt_state'])
        }
        for state in (saved, renamed)
    )
    for value, name in names.items():
        field = re.findall(r'\.([a-z_]+)', name)[-1]
        assert value < 0 or f'.{field}' in saved_names[value], (name, saved_names[value])


def test_no_rule_takes_a_layer_from_two_layers(tmp_path):
    """Their kernels have one shape, and only the bias tells which is which."""
    kernel, bias = np.ones((4, 4)), np.ones(4)
    save(tmp_path, {'attn': {'kernel': kernel, 'bias': bias}, 'ffn': {'kernel': kernel}})
    with pytest.raises(TreeMismatchError) as caught:
        restore(tmp_path, {'up': {'kernel': kernel, 'bias': bias}, 'out': {'kernel': kernel}})
    assert caught.value.rename == ()

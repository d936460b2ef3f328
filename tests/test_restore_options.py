"""What a restore may be asked for: leaves left out, shardings that do not divide, dtypes, sizes, memory."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import partitioner
from support.partitioner import Partitioner, T5XState

import t5ckpt
from t5ckpt import Checkpointer
from t5ckpt.errors import ShardingMismatch, TreeMismatchError, UnexpectedLeaves, UnsupportedLeafError


def save(directory, state, step=1, **options):
    with Checkpointer(state, checkpoints_dir=directory, **options) as checkpointer:
        checkpointer.save(state, step=step)


def restore(directory, template, *, options=None, **arguments):
    with Checkpointer(template, checkpoints_dir=directory, **(options or {})) as checkpointer:
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
    with pytest.raises(ShardingMismatch, match='Leave such a dimension whole') as caught:
        restore(tmp_path, template)
    assert [problem.leaf for problem in caught.value.problems] == ['rows', 'small']
    assert "small: dimension 0 of (7,) does not divide by the 4 devices of mesh axis 'x'" in str(caught.value)
    assert 'rows: dimension 1 of (6, 5)' in str(caught.value)


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
    with pytest.raises(ShardingMismatch, match=r'target/w: dimension 0 of \(6, 4\)'):
        restore(tmp_path, state, options={'partitioner': rules})
    rules = Partitioner(rules.mesh, lambda key, _: PartitionSpec(None, None, 'x') if key == 'target/w' else None)
    with pytest.raises(ShardingMismatch, match=r'target/w: .* has 3 entries, the leaf has 2 dimensions \(6, 4\)'):
        restore(tmp_path, state, options={'partitioner': rules})
    # Nothing goes to a device, so nothing has to divide.
    rules.params_on_devices = False
    lazy = restore(tmp_path, state, options={'partitioner': rules}, lazy_parameters=True)
    assert lazy.state_dict()['target']['w'].shape == (6, 4)


# --- None, {} and ... in the template ---------------------------------------------------------------------------------

FULL = {'a': np.arange(3.0), 'b': {'c': np.arange(4.0), 'd': np.arange(5.0)}, 'text': 'x'}


@pytest.mark.parametrize('nothing', [None, {}, (), []])
def test_nothing_in_the_template_is_no_place_for_an_array(tmp_path, nothing):
    save(tmp_path, FULL)
    for template, names in (({**FULL, 'a': nothing}, ['a']), ({**FULL, 'b': nothing}, ['b/c', 'b/d'])):
        with pytest.raises(UnexpectedLeaves, match=r'None|an empty container') as caught:
            restore(tmp_path, template)
        assert [problem.leaf for problem in caught.value.problems] == names
        # The two cures that the error names.
        for arguments in ({'strict': 'contains'}, {'state_transformation_fns': [t5ckpt.intersect_state]}):
            restored = restore(tmp_path, template, **arguments)
            assert [restored[name] for name, leaf in template.items() if leaf is nothing] == [nothing]


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
    assert 'left out, the model has ... there: a, b/c, b/d' in caplog.text
    assert restore(tmp_path, {'a': ..., 'b': ..., 'text': ...}) == {'a': ..., 'b': ..., 'text': ...}
    (tmp_path / 'b.c').rename(tmp_path / 'checkpoint_1' / 'b.c' / '0')
    restored = restore(tmp_path, {'a': ..., 'b': {'c': np.zeros(4), 'd': ...}, 'text': ''})
    np.testing.assert_array_equal(restored['b'].pop('c'), np.arange(4.0))
    assert restored == {'a': ..., 'b': {'d': ...}, 'text': 'x'}


def test_an_ellipsis_for_what_is_not_there_is_logged(tmp_path, caplog):
    save(tmp_path, {'a': np.arange(3.0)})
    assert restore(tmp_path, {'a': ..., 'gone': ...}) == {'a': ..., 'gone': ...}
    assert 'gone: ... in the model, and nothing in the checkpoint' in caplog.text


def test_an_ellipsis_is_not_saved(tmp_path):
    with pytest.raises(UnsupportedLeafError, match=r'b: is \.\.\., which stands for a leaf that a restore left out'):
        save(tmp_path, {'a': 1, 'b': ...})

"""T5X's programs, call by call: a comment beside each call names the file and function of T5X's that makes it.

None of T5X's code runs here. The state and the partitioner have T5X's protocols (support/partitioner.py).
"""

import logging
import pathlib
import re

import jax
import numpy as np
import pytest
from support import partitioner, states
from support.bits import assert_same
from support.golden import flatten, nest

import t5ckpt

pytestmark = pytest.mark.filterwarnings('error')


def parts(**options):
    return partitioner.Partitioner(partitioner.mesh(), partitioner.t5x_rules, **options)


def trained(step: int):
    return states.t5x_state(states.adafactor_arrays(step, seed=step), partitioner.mesh())


def assert_state(found, wanted):
    found, wanted = flatten(found.state_dict()), flatten(wanted.state_dict())
    assert set(found) == set(wanted)
    for key, leaf in wanted.items():
        assert_same(np.asarray(found[key]), np.asarray(leaf), key)


# ---- restorers: t5x/utils.py passes checkpoints_dir='' ("unused for restore") and a path ----


@pytest.mark.parametrize('make', [t5ckpt.Checkpointer, t5ckpt.SaveBestCheckpointer], ids=lambda make: make.__name__)
@pytest.mark.parametrize('by_position', [True, False])
def test_a_restorer_needs_no_directory(run_dir, make, by_position, monkeypatch):
    """LegacyCheckpointManager.__init__ and TrainStateInitializer.from_checkpoints."""
    state = trained(5)
    t5ckpt.Checkpointer(state, parts(), str(run_dir)).save(state)
    elsewhere = run_dir.parent / 'elsewhere'
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    template = states.shapes_of(state)
    given = (template, parts(), '', None)
    names = ('train_state', 'partitioner', 'checkpoints_dir', 'dataset_iterator')
    arguments = (given, {}) if by_position else ((), dict(zip(names, given, strict=True)))
    restorer = make(*arguments[0], **arguments[1], restore_dtype=np.dtype('float32'))
    assert restorer.checkpoints_dir == ''
    assert repr(restorer) == f"{make.__name__}('', latest_step=None)"
    assert_state(restorer.restore(path=f'{run_dir}/checkpoint_5'), state)
    for needs_it in (
        lambda: restorer.save(state),
        lambda: restorer.save_async(state),
        restorer.all_steps,
        restorer.latest_step,
        restorer.all_dataset_checkpoint_steps,
        restorer.restore,
        lambda: restorer.restore(5),
        lambda: restorer.restore(path=''),
        lambda: restorer.convert_from_tf_checkpoint('nowhere'),
        lambda: t5ckpt.restore_or_init(restorer, lambda: state),
    ):
        with pytest.raises(ValueError, match=r'checkpoints_dir is empty.*restore\(path=\.\.\.\).*checkpoints_dir='):
            needs_it()
    restorer.close()
    assert list(elsewhere.iterdir()) == []


def test_a_directory_in_the_partitioners_place_is_refused():
    for directory in ('run', pathlib.Path('run')):
        with pytest.raises(ValueError, match=r'partitioner.*run.*checkpoints_dir='):
            t5ckpt.Checkpointer({'w': jax.numpy.ones(2)}, directory)


# ---- InferenceState: t5x/infer.py and t5x/eval.py restore a train state's checkpoint without its optimizer ----


def inference(state):
    """T5X's InferenceState: target, step and mutables, no optimizer state."""
    flat = {key: leaf for key, leaf in flatten(state.state_dict()).items() if not key.startswith('state/param_states')}
    return partitioner.T5XState(nest(flat))


@pytest.mark.parametrize('partitioned', [True, False])
def test_what_the_template_lacks_is_left_out_in_one_line(run_dir, caplog, partitioned):
    state = trained(5)
    t5ckpt.Checkpointer(state, parts(), run_dir).save(state)
    template = inference(state)
    restorer = t5ckpt.Checkpointer(template, parts() if partitioned else None, '')
    caplog.set_level(logging.INFO, 't5ckpt')
    restored = restorer.restore(path=run_dir)
    assert_state(restored, template)
    lines = [record for record in caplog.records if 'left out' in record.getMessage()]
    assert [record.levelname for record in lines] == ['INFO']
    assert re.search(r'28 leaves .* state/param_states/.* and 8 more', lines[0].getMessage())
    # A word of the caller's wins, and weights that nobody takes are a warning.
    for strict in ('up_to_dtype', 'exact'):
        with pytest.raises(t5ckpt.errors.UnexpectedLeaves, match='state/param_states'):
            restorer.restore(path=run_dir, strict=strict)
    less = partitioner.T5XState({**template.tree, 'target': {'encoder': template.tree['target']['encoder']}})
    caplog.clear()
    t5ckpt.Checkpointer(less, parts() if partitioned else None, '').restore(path=run_dir)
    assert [r.levelname for r in caplog.records if 'target/token_embedder' in r.getMessage()] == ['WARNING']


def test_a_partitioner_says_that_any_tree_is_t5xs(run_dir):
    """And without one, of another tree what is too much stays an error."""
    state = trained(5)
    t5ckpt.Checkpointer(state, None, run_dir).save(state)
    tree = inference(state).tree

    class Parts(partitioner.Partitioner):
        def get_mesh_axes(self, train_state):
            return super().get_mesh_axes(partitioner.T5XState(train_state)).tree

    own = Parts(partitioner.mesh(), partitioner.t5x_rules)
    assert set(t5ckpt.Checkpointer(tree, own, '').restore(path=run_dir)['target']) == set(tree['target'])
    with pytest.raises(t5ckpt.errors.UnexpectedLeaves, match='state/param_states'):
        t5ckpt.Checkpointer(tree, None, '').restore(path=run_dir)
    assert_state(
        t5ckpt.restore_or_init(t5ckpt.Checkpointer(inference(state), parts(), run_dir), None), inference(state)
    )

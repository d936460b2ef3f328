"""T5X's programs, call by call: a comment beside each call names the file and function of T5X's that makes it.

None of T5X's code runs here. The state and the partitioner have T5X's protocols (support/partitioner.py).
"""

import pathlib

import jax
import numpy as np
import pytest
from support import partitioner, states
from support.bits import assert_same
from support.golden import flatten

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

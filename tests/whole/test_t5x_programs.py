"""T5X's programs, call by call: a comment beside each call names the file and function of T5X's that makes it.

None of T5X's code runs here. The state and the partitioner have T5X's protocols (support/partitioner.py).
"""

import dataclasses
import functools
import logging
import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import partitioner, states, t5x_rules
from support.bits import assert_same
from support.golden import flatten, load_npz, nest
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2

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
    # The caller's argument takes precedence, and unused weights cause a warning.
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
        t5ckpt.restore_or_init(t5ckpt.Checkpointer(inference(state), parts(), run_dir), dict), inference(state)
    )


# ---- t5x/train.py, t5x/utils.py: a run, its restart, and the programs that read it ----


@dataclasses.dataclass
class SaveConfig:
    """utils.SaveCheckpointConfig, as far as a checkpointer sees it."""

    checkpointer_cls: Any = t5ckpt.Checkpointer
    dtype: Any = 'float32'
    keep: Any = None
    keep_dataset_checkpoints: Any = None
    save_dataset: bool = True
    state_transformation_fns: Any = ()


@dataclasses.dataclass
class RestoreConfig:
    """utils.RestoreCheckpointConfig; mode 'specific' where ``path`` is a step's."""

    path: str
    checkpointer_cls: Any = t5ckpt.Checkpointer
    dtype: Any = None
    restore_dataset: bool = True
    strict: bool = True
    state_transformation_fns: Any = ()
    fallback: bool = False


class Positions:
    """clu.data.DatasetIterator: save(filename), load(filename)."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        return self.position

    def save(self, filename):
        pathlib.Path(f'{filename}.index').write_text(str(self.position), encoding='utf-8')

    def load(self, filename):
        self.position = int(pathlib.Path(f'{filename}.index').read_text(encoding='utf-8'))


class Manager:
    """utils.LegacyCheckpointManager and utils.LegacyCheckpointer: the calls that they make of a checkpointer."""

    def __init__(self, *, save_cfg, restore_cfg, train_state_shape, partitioner, ds_iter=None, model_dir=None):
        self.saver = self.restorer = None
        if save_cfg is not None:
            # LegacyCheckpointManager.__init__, by keyword
            self.saver = save_cfg.checkpointer_cls(
                train_state=train_state_shape,
                partitioner=partitioner,
                checkpoints_dir=model_dir,
                dataset_iterator=ds_iter if save_cfg.save_dataset else None,
                save_dtype=save_cfg.dtype,
                keep=save_cfg.keep,
                keep_dataset_checkpoints=save_cfg.keep_dataset_checkpoints,
            )
        if restore_cfg:
            # LegacyCheckpointManager.__init__: restore_cfg.checkpointer_cls(...), 'unused for restore'
            self.restorer = restore_cfg.checkpointer_cls(
                train_state=train_state_shape,
                partitioner=partitioner,
                checkpoints_dir='',
                dataset_iterator=ds_iter if restore_cfg.restore_dataset else None,
                restore_dtype=jnp.dtype(restore_cfg.dtype) if restore_cfg.dtype else None,
            )

    def save(self, train_state, state_transformation_fns=()):
        # LegacyCheckpointer.save: positional transforms, concurrent_gb by keyword
        self.saver.save(train_state, state_transformation_fns, concurrent_gb=128)

    def restore(self, paths, restore_cfg=None, fallback_state=None):
        # LegacyCheckpointManager.restore, LegacyCheckpointer.restore
        if restore_cfg is None:
            return None
        (path,) = paths
        # LegacyCheckpointer.restore: from_tensorflow = gfile.exists(path + '.index'), which takes no transforms
        if pathlib.Path(f'{path}.index').exists():
            assert not restore_cfg.state_transformation_fns
            return self.restorer.restore_from_tf_checkpoint(path, strict=restore_cfg.strict)
        return self.restorer.restore(
            path=path,
            state_transformation_fns=restore_cfg.state_transformation_fns,
            fallback_state=fallback_state,
            lazy_parameters=False,
        )

    def wait_until_finished(self):
        """LegacyCheckpointManager.wait_until_finished, which calls nothing: a save is durable when it returns."""

    def close(self):
        """LegacyCheckpointManager.close, likewise."""


class PreemptionError(Exception):
    """trainer.PreemptionError: what a trainer raises where the job is to end."""


@dataclasses.dataclass
class Trainer:
    """trainer.BaseTrainer, as far as train() sees it: it asks for an end at a step, or is preempted before one."""

    train_state: Any
    stop_at: int | None = None
    preempted_at: int | None = None
    stop_training: bool = False

    def train(self, batch_iter, num_steps, start_step):
        # BaseTrainer.train: donating steps, after which the new state takes the place of the old one
        for step in range(start_step, start_step + num_steps):
            if step == self.preempted_at:
                raise PreemptionError
            next(batch_iter)
            self.train_state = STEP(self.train_state)
        # train.py, run_actions(ActionMode.TRAIN, ...), after trainer.train
        self.stop_training = start_step + num_steps == self.stop_at


def train(model_dir, save_cfg, total_steps, period=2, restore_cfg=None, **ends):
    """t5x/train.py, train(): restore or start, save, loop, save; returns the state, the iterator, where it began.

    ``ends`` are a Trainer's; a step of 1 for ``stats_period`` has it looked at after each.
    """
    partitioned, ds_iter = parts(), Positions()
    # train.py: restore_cfgs = [RestoreCheckpointConfig(path=model_dir, mode='latest', ...), checkpoint_cfg.restore]
    own = RestoreConfig(str(model_dir), save_cfg.checkpointer_cls, save_cfg.dtype, save_cfg.save_dataset)
    # utils.get_first_valid_restore_config_and_paths: checkpoints.all_steps(ckpt_dir), then ckpt_paths[-1:]
    paths = [f'{model_dir}/checkpoint_{step}' for step in t5ckpt.all_steps(str(model_dir))][-1:]
    valid = own if paths else restore_cfg
    paths = paths or ([restore_cfg.path] if restore_cfg else [])
    # utils.TrainStateInitializer.__init__, whose global_train_state_shape comes from jax.eval_shape
    shape = states.shapes_of(trained(0))
    # utils.get_fallback_state, the state dict of from_scratch
    fallback = trained(0).state_dict() if valid and valid.fallback else None
    # utils.create_checkpoint_manager_and_restore
    manager = Manager(
        save_cfg=save_cfg,
        restore_cfg=valid,
        train_state_shape=shape,
        partitioner=partitioned,
        ds_iter=ds_iter,
        model_dir=str(model_dir),
    )
    restored = manager.restore(paths, valid, fallback)
    # train.py, 'If no checkpoint to restore, init from scratch'
    state = restored or trained(0)
    # train.py, host_step, through utils.get_local_data
    first = host_step = int(state.step.addressable_data(0))
    # train.py: 'Saving checkpoint before the training loop starts.', also of the step just restored
    manager.save(state, save_cfg.state_transformation_fns)
    trainer = Trainer(state, **ends)
    # train.py: steps_per_epoch, first_epoch, num_epochs, from the checkpoint period
    steps_per_epoch = min(period, total_steps)
    first_epoch = first // steps_per_epoch
    num_epochs = first_epoch + math.ceil((total_steps - first) / steps_per_epoch)
    # 'Main Loop over "epochs".' of train.py
    for epoch in range(first_epoch, num_epochs):
        final_epoch = epoch == num_epochs - 1
        # '`stop_training` is requested, break out the main loop immediately.' of train.py
        if trainer.stop_training:
            break
        try:
            epoch_end_step = min(total_steps, first + steps_per_epoch * (epoch - first_epoch + 1))
            while host_step < epoch_end_step:
                # 'Saving a checkpoint before early stopping...' of train.py
                if trainer.stop_training:
                    manager.save(trainer.train_state, save_cfg.state_transformation_fns)
                    break
                trainer.train(ds_iter, 1, start_step=host_step)
                host_step += 1
        except PreemptionError:
            # train.py: 'Saving emergency checkpoint.', and the error goes on
            manager.save(trainer.train_state, save_cfg.state_transformation_fns)
            manager.wait_until_finished()
            raise
        # train.py: 'Saving checkpoint.', at the period and in the last epoch, also after an early stop in it
        if final_epoch or (host_step - first) % period == 0:
            manager.save(trainer.train_state, save_cfg.state_transformation_fns)
            manager.wait_until_finished()
    # train.py, after the loop: 'if checkpoint_manager: checkpoint_manager.close()'
    manager.close()
    return trainer.train_state, ds_iter, first


jax.tree_util.register_pytree_node(
    partitioner.T5XState, lambda state: ((state.tree,), None), lambda _, children: partitioner.T5XState(*children)
)
STEP = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)


def accuracy_of(step):
    """Step 2 is the best."""
    return 10.0 - abs(step - 2)


def write_metrics(directory):
    """trainer.MetricsManager: the summaries of every step, in <model_dir>/train."""
    (directory / 'train').mkdir(parents=True)
    writer = EventsWriter(str(directory / 'train' / 'events'), '')
    for step in range(9):
        shown = [summary_pb2.Summary.Value(tag='accuracy', simple_value=accuracy_of(step))]
        writer.write_event(event_pb2.Event(step=step, wall_time=1.0, summary=summary_pb2.Summary(value=shown)))
    writer.close()


@pytest.mark.parametrize(
    ('make', 'before', 'after'),
    [
        (t5ckpt.Checkpointer, [4, 5], [7, 8]),
        # gin: SaveBestCheckpointer.metric_name_to_monitor = ..., which T5X's programs bind with functools.partial
        (functools.partial(t5ckpt.SaveBestCheckpointer, metric_name_to_monitor='train/accuracy'), [2, 4, 5], [2, 4, 8]),
    ],
    ids=['Checkpointer', 'SaveBestCheckpointer'],
)
def test_a_run_and_its_restart(run_dir, make, before, after, caplog):
    """Losing the job after step 5 changes nothing of the final state or of the position in the data."""
    for name in ('never', 'lost'):
        write_metrics(run_dir / name)
    save_cfg = SaveConfig(make, keep=2, keep_dataset_checkpoints=1)
    whole, whole_iter, _ = train(run_dir / 'never', save_cfg, 8)
    train(run_dir / 'lost', save_cfg, 5)
    assert t5ckpt.all_steps(run_dir / 'lost') == before
    caplog.set_level(logging.WARNING, 't5ckpt')
    state, ds_iter, first = train(run_dir / 'lost', save_cfg, 8)
    assert first == 5
    # The save of the restored step was skipped, in T5X's words.
    assert 'Skipping save checkpoint for step 5' in caplog.text
    assert_state(state, whole)
    assert ds_iter.position == whole_iter.position == 8
    assert t5ckpt.all_steps(run_dir / 'lost') == after
    assert t5ckpt.all_dataset_checkpoint_steps(run_dir / 'lost') == [8]
    for step in t5ckpt.all_steps(run_dir / 'lost'):
        t5x_rules.check_axes(run_dir / 'lost' / f'checkpoint_{step}', partitioner.t5x_rules)


@pytest.mark.parametrize(
    ('ends', 'saved', 'skipped'),
    [
        # In the middle of an epoch, before its end (which the period saves), in the last epoch (which saves once more).
        ({'stop_at': 3}, [0, 2, 3], []),
        ({'stop_at': 4}, [0, 2, 4], []),
        ({'stop_at': 7}, [0, 2, 4, 6, 7], [7]),
        ({'preempted_at': 3}, [0, 2, 3], []),
        # Before the first step of an epoch the state has just been saved.
        ({'preempted_at': 4}, [0, 2, 4], [4]),
    ],
    ids=str,
)
def test_a_run_that_ends_early_and_goes_on(run_dir, ends, saved, skipped, caplog):
    """stop_training and PreemptionError: the state of the moment is saved with its iterator, or is there already."""
    whole, whole_iter, _ = train(run_dir / 'whole', SaveConfig(), 8)
    caplog.set_level(logging.WARNING, 't5ckpt')
    if 'preempted_at' in ends:
        with pytest.raises(PreemptionError):
            train(run_dir / 'ended', SaveConfig(), 8, **ends)
    else:
        train(run_dir / 'ended', SaveConfig(), 8, **ends)
    assert t5ckpt.all_steps(run_dir / 'ended') == t5ckpt.all_dataset_checkpoint_steps(run_dir / 'ended') == saved
    assert re.findall(r'Skipping save checkpoint for step (\d+)', caplog.text) == list(map(str, skipped))
    state, ds_iter, first = train(run_dir / 'ended', SaveConfig(), 8)
    assert (first, ds_iter.position) == (saved[-1], whole_iter.position)
    assert_state(state, whole)


# ---- TensorFlow: the restore of a fine-tuning run, and t5x/scripts/convert_tf_checkpoint.py ----


def tf_model(expected):
    return partitioner.T5XState(
        nest({key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in expected.items()})
    )


def test_a_tensorflow_checkpoint_is_restored_and_its_run_goes_on(tf_golden, run_dir):
    """RestoreCheckpointConfig.path is the prefix of TensorFlow's files; the run that starts from it saves T5X's format."""
    folder = tf_golden / 'tf_t5_1_1_gated'
    expected = load_npz(folder / 'expected.npz')
    template = tf_model(expected)
    (prefix,) = (str(path.with_suffix('')) for path in folder.glob('model.ckpt-*.index'))
    step = int(expected['state/step'])
    # train.py: restore.strict, with the optimizer; infer.py: strict = False, and an InferenceState
    cfg = RestoreConfig(prefix, restore_dataset=False)
    manager = Manager(
        save_cfg=SaveConfig(save_dataset=False),
        restore_cfg=cfg,
        train_state_shape=template,
        partitioner=parts(),
        model_dir=str(run_dir),
    )
    state = manager.restore([prefix], cfg)
    for key, leaf in flatten(state.state_dict()).items():
        assert isinstance(leaf, jax.Array)
        assert_same(leaf, expected[key], key)
    manager.save(state)
    assert t5ckpt.all_steps(run_dir) == [step]
    # TrainStateInitializer.from_checkpoints, _restore_path: another restorer, of what was saved
    # train.py: dtype=checkpoint_cfg.save.dtype, as which save_dtype wrote it
    own = RestoreConfig(f'{run_dir}/checkpoint_{step}', dtype='float32', restore_dataset=False)
    again = Manager(save_cfg=None, restore_cfg=own, train_state_shape=template, partitioner=parts())
    for key, leaf in flatten(again.restore([own.path], own).state_dict()).items():
        assert_same(leaf, expected[key].astype(np.float32) if key.startswith('target/') else expected[key], key)
    less, cfg = inference(template), RestoreConfig(prefix, dtype='bfloat16', restore_dataset=False, strict=False)
    found = Manager(save_cfg=None, restore_cfg=cfg, train_state_shape=less, partitioner=parts()).restore([prefix], cfg)
    leaves = flatten(found.state_dict())
    assert set(leaves) == set(flatten(less.state_dict()))
    assert {leaf.dtype.name for key, leaf in leaves.items() if key.startswith('target/')} == {'bfloat16'}


def test_the_script_that_converts_tensorflow_checkpoints(tf_golden, run_dir):
    """t5x/scripts/convert_tf_checkpoint.py, convert_checkpoint()."""
    folder = tf_golden / 'tf_t5_1_1_gated'
    template = tf_model(load_npz(folder / 'expected.npz'))
    checkpointer = t5ckpt.Checkpointer(template, parts(), str(run_dir), save_dtype=jnp.dtype(jnp.float32))
    checkpointer.convert_from_tf_checkpoint(str(folder), concurrent_gb=16)
    ours, theirs = (flatten(t5ckpt.load_t5x_checkpoint(path)) for path in (run_dir, folder / 'converted'))
    assert set(ours) == set(theirs)
    for key, array in theirs.items():
        assert_same(ours[key], array, key)


def test_the_programs_that_read_a_run(run_dir):
    """t5x/infer.py and t5x/eval.py: an InferenceState, one after another of all steps; then a fine-tuning run."""
    final, *_ = train(run_dir, SaveConfig(dtype='bfloat16'), 4)
    template = inference(states.shapes_of(trained(0)))
    # eval.py, evaluate(): checkpoints.get_checkpoint_dir(ckpt_dir, step) for step in checkpoints.all_steps(ckpt_dir)
    for step in t5ckpt.all_steps(str(run_dir)):
        path = t5ckpt.get_checkpoint_dir(str(run_dir), step)
        # infer.py, infer(): restore_checkpoint_cfg.strict = False, save_checkpoint_cfg=None
        cfg = RestoreConfig(path, dtype='float32', restore_dataset=False, strict=False)
        manager = Manager(save_cfg=None, restore_cfg=cfg, train_state_shape=template, partitioner=parts())
        restored = manager.restore([path], cfg)
        assert int(restored.step) == step
        leaves = flatten(restored.state_dict())
        assert {leaf.dtype.name for key, leaf in leaves.items() if key.startswith('target/')} == {'float32'}
    assert_same(
        np.asarray(leaves['target/encoder/encoder_norm/scale']),
        np.asarray(final.tree['target']['encoder']['encoder_norm']['scale']).astype('bfloat16').astype(np.float32),
    )
    # utils.RestoreCheckpointConfig.__post_init__: partial(apply_assignment_map, assignment_map=...); train.py passes
    # functools.partial(fn, is_resuming=True) for a run's own checkpoints
    rules = [(re.compile(r'state/param_states/.*'), None)]
    fns = [functools.partial(t5ckpt.apply_assignment_map, assignment_map=rules)]
    cfg = RestoreConfig(
        str(run_dir / 'checkpoint_4'),
        dtype='float32',
        restore_dataset=False,
        fallback=True,
        state_transformation_fns=fns,
    )
    tuned, ds_iter, first = train(run_dir / 'tuned', SaveConfig(), 6, restore_cfg=cfg)
    assert (first, int(tuned.step), ds_iter.position) == (4, 6, 2)
    resumed = [functools.partial(fn, is_resuming=True) for fn in fns]
    own = RestoreConfig(str(run_dir / 'tuned' / 'checkpoint_6'), restore_dataset=True, state_transformation_fns=resumed)
    ds_iter = Positions()
    manager = Manager(
        save_cfg=None, restore_cfg=own, train_state_shape=states.shapes_of(tuned), partitioner=parts(), ds_iter=ds_iter
    )
    assert_state(manager.restore([own.path], own), tuned)
    assert ds_iter.position == 2


def test_what_programs_change_after_construction(run_dir):
    """checkpointer.keep is an attribute in T5X, which _remove_old_checkpoints reads at each save."""
    state, ds_iter = trained(0), Positions()
    # positional, as in t5x/scripts and in tests of T5X's users
    checkpointer = t5ckpt.Checkpointer(states.shapes_of(state), parts(), str(run_dir), ds_iter)
    for step in range(4):
        checkpointer.save(trained(step))
    assert checkpointer.all_steps() == checkpointer.all_dataset_checkpoint_steps() == [0, 1, 2, 3]
    checkpointer.keep, checkpointer.keep_dataset_checkpoints = 2, 1
    checkpointer.save(trained(4))
    checkpointer.close()
    assert checkpointer.all_steps() == [3, 4]
    assert checkpointer.all_dataset_checkpoint_steps() == [4]
    assert int(checkpointer.restore().step) == checkpointer.latest_step() == 4

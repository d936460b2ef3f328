"""What a user meant by a save, and would lose without a word: warnings of our own classes, each once for its cause."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import partitioner, states
from support.golden import nest

import t5ckpt
from t5ckpt import (
    Checkpointer,
    KeepBest,
    KeepLatest,
    SaveBestCheckpointer,
    SaveEvery,
    SaveOnImprovement,
    SaveOnPreemption,
    errors,
)
from t5ckpt.errors import TreeMismatchError

STATE = {'params': {'w': np.zeros((4, 4), np.float32), 'b': np.zeros(4, np.float32)}}
STEPPED = STATE | {'step': 1}


@pytest.fixture
def caught():
    """All warnings, also those of the threads of saves."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        yield found


def same(state_dict, infos):
    return state_dict, infos


# --- the line that a warning points at ---------------------------------------------------------------------------------


def save_with_a_gap(tmp_path):
    with Checkpointer(STEPPED, checkpoints_dir=tmp_path) as ck:
        ck.save_async(STEPPED, step=30).result()  # warns


def save_another_tree(tmp_path):
    with Checkpointer(STATE, checkpoints_dir=tmp_path, save_policy=SaveEvery(1)) as ck:
        ck.maybe_save(1, {'params': {}})  # warns


def restore_unsharded(tmp_path):
    mesh = jax.make_mesh((4,), ('x',), devices=jax.devices()[:4])
    state = {'w': jax.device_put(np.zeros(64), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x')))}
    with Checkpointer(state, checkpoints_dir=tmp_path) as ck:
        ck.save(state, step=1)
    with Checkpointer(jax.eval_shape(lambda: {'w': jnp.zeros(64)}), checkpoints_dir=tmp_path) as ck:
        t5ckpt.restore_or_init(ck, lambda: state)  # warns


def restore_narrowed(tmp_path):
    with Checkpointer({'w': np.zeros(64)}, checkpoints_dir=tmp_path) as ck:
        ck.save({'w': np.zeros(64)}, step=1)
    with Checkpointer({'w': jnp.zeros(64)}, checkpoints_dir=tmp_path) as ck:
        ck.restore()  # warns


def restore_with_a_spare_leaf(tmp_path):
    with Checkpointer(STATE, checkpoints_dir=tmp_path) as ck:
        ck.save(STATE, step=1)
        ck.restore(fallback_state={'spare': np.zeros(1)})  # warns


def lack_a_metric(tmp_path):
    with Checkpointer(STATE, checkpoints_dir=tmp_path, keep_policy=KeepBest(1, 'acc')) as ck:
        ck.save_async(STATE, step=1).result()  # warns


def give_an_obsolete_argument(tmp_path):
    Checkpointer(STATE, None, tmp_path, use_gda=True)  # warns


def leave_the_policy_unused(tmp_path):
    ck = SaveBestCheckpointer(STATE, None, tmp_path, metric_name_to_monitor='a', force_keep_period=3)  # warns
    ck.close()


def keep_the_worst(tmp_path):
    KeepBest(2, 'eval/loss')  # warns


def keep_the_worst_as_t5x_does(tmp_path):
    SaveBestCheckpointer(STATE, None, tmp_path, keep=2, metric_name_to_monitor='train/loss')  # warns


def save_when_it_is_worse(tmp_path):
    t5ckpt.SaveOnImprovement('perplexity')  # warns


WARNED = {
    'MetricModeWarning': [keep_the_worst, keep_the_worst_as_t5x_does, save_when_it_is_worse],
    'StepMismatchWarning': [save_with_a_gap],
    'TemplateMismatchWarning': [save_another_tree],
    'UnshardedTemplateWarning': [restore_unsharded],
    'NarrowedDtypeWarning': [restore_narrowed],
    'NoEffectWarning': [restore_with_a_spare_leaf, leave_the_policy_unused, give_an_obsolete_argument],
    'MissingMetricWarning': [lack_a_metric],
}


@pytest.mark.parametrize(('name', 'program'), [(name, each) for name, programs in WARNED.items() for each in programs])
def test_a_warning_points_at_the_line_that_called(tmp_path, caught, name, program):
    program(tmp_path)
    (warning,) = caught
    lines, first = inspect.getsourcelines(program)
    (marked,) = (first + number for number, line in enumerate(lines) if line.endswith('# warns\n'))
    assert (warning.category.__name__, warning.filename, warning.lineno) == (name, __file__, marked)


def test_every_class_of_warnings_is_among_them():
    classes = {each.__name__ for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, Warning)}
    assert classes - {'T5CkptWarning'} == WARNED.keys()


LOW = (
    'loss',
    'val_loss',
    'valLoss',
    'eval/cross_ent_loss',
    'perplexity',
    'ppl',
    'top1_error',
    'WER',
    'cer',
    'mae',
    'rmse',
    'nll',
)
HIGH = ('accuracy', 'bleu', 'glossary', 'neg_loss', 'loss_scale', 'error_reduction', 'f1', 'term', 'reward', 'step')


@pytest.mark.parametrize('metric', [*LOW, *HIGH])
def test_a_metric_whose_low_values_are_good(tmp_path, caught, metric):
    """The default stays T5X's."""
    assert KeepBest(1, metric).mode == t5ckpt.SaveOnImprovement(metric).mode == 'max'
    assert [warning.category.__name__ for warning in caught] == ['MetricModeWarning'] * 2 * (metric in LOW)
    assert all("mode='min'" in str(warning.message) for warning in caught)
    caught.clear()
    KeepBest(1, metric, 'max') | KeepBest(1, metric, mode='min')
    t5ckpt.SaveOnImprovement(metric, 'max')
    SaveBestCheckpointer(STATE, None, tmp_path, keep=1, metric_name_to_monitor=metric, metric_mode='max').close()
    assert caught == []


# --- the order of arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize('step', [40, np.int64(40), np.array(40), jnp.int32(40)], ids=['int', 'numpy', 'array', 'jax'])
def test_either_order(tmp_path, step):
    with Checkpointer(STATE, checkpoints_dir=tmp_path) as ck:
        for save in (
            lambda: ck.save(STATE, step=step),
            lambda: ck.save(step, STATE),
            lambda: ck.save(STATE, step),
            lambda: ck.save(step=step, train_state=STATE),
            lambda: ck.save(STATE, [same], step=step),
            lambda: ck.save_async(step, STATE).result(),
        ):
            assert save().step == 40
            ck.delete(40)
    # A bare array is a state.
    with Checkpointer(jnp.zeros(3), checkpoints_dir=tmp_path / 'bare') as ck:
        assert ck.save(40, jnp.ones(3)).step == 40
    for number, call in enumerate(
        [
            lambda ck: ck.maybe_save(step, STATE),
            lambda ck: ck.maybe_save(STATE, step),
            lambda ck: ck.maybe_save(train_state=STATE, step=step),
        ]
    ):
        with Checkpointer(STATE, checkpoints_dir=tmp_path / str(number), save_policy=SaveEvery(1)) as ck:
            assert call(ck).result().step == 40


@pytest.mark.parametrize(
    ('call', 'text'),
    [
        (lambda ck: ck.save(40, 41), r'save\(40, 41\): both are integers, so the arguments may be swapped'),
        (lambda ck: ck.save(40, jnp.int32(7)), 'both are integers'),
        (lambda ck: ck.maybe_save(40, 41), 'maybe_save.40, 41.: both are integers'),
        (lambda ck: ck.maybe_save(STATE, STATE), 'neither the dict nor the dict is a step'),
        (lambda ck: ck.save(40), 'received the step 40 in place of the state'),
        (lambda ck: ck.save(40, [same]), 'received the step 40 in place of the state'),
        (lambda ck: ck.save(40, STATE, step=41), 'the step is given twice: 40 and step=41'),
        (lambda ck: ck.save(STATE, 40, step=41), 'the step is given twice: 40 and step=41'),
        (lambda ck: ck.save(STATE, same, step=1), 'is not iterable'),
    ],
)
def test_arguments_that_are_ambiguous(tmp_path, call, text):
    with Checkpointer(STATE, checkpoints_dir=tmp_path, save_policy=SaveEvery(1)) as ck:
        with pytest.raises((ValueError, TypeError), match=text):
            call(ck)
        assert ck.all_steps() == []


# --- a step that is another than the state's -------------------------------------------------------------------------


def test_a_step_that_contradicts_the_states_own(tmp_path, caught):
    with Checkpointer(STEPPED, checkpoints_dir=tmp_path, save_policy=SaveEvery(10)) as ck:
        ck.save(STEPPED, step=1)
        assert caught == []
        for step in (30, 40, 50):
            ck.maybe_save(step, STEPPED)
    (warning,) = caught
    assert warning.category is t5ckpt.errors.StepMismatchWarning
    assert 'saved as step 30, but holds step 1' in str(warning.message)


def test_as_an_error_it_keeps_the_step_from_being_saved(tmp_path):
    with warnings.catch_warnings(), Checkpointer(STEPPED, checkpoints_dir=tmp_path) as ck:
        warnings.simplefilter('error', t5ckpt.errors.T5CkptWarning)
        for _ in range(2):
            with pytest.raises(t5ckpt.errors.StepMismatchWarning):
                ck.save(STEPPED, step=30)
        assert ck.all_steps() == []


# --- a state that the template cannot take back ----------------------------------------------------------------------


def other(**leaves):
    return {'params': STATE['params'] | leaves}


@pytest.mark.parametrize('abstract', [False, True])
def test_a_state_that_does_not_fit_the_template(tmp_path, caught, abstract):
    template = jax.eval_shape(lambda: STATE) if abstract else STATE
    with Checkpointer(template, checkpoints_dir=tmp_path) as ck:
        ck.save(STATE, step=0)
        assert caught == []
        for step in range(1, 3):
            ck.save(other(w=np.zeros((4, 5), np.float32), b=np.zeros(4, np.int32)), step=step)
        (first,) = caught
        assert first.category is t5ckpt.errors.TemplateMismatchWarning
        assert first.filename == __file__
        assert 'params/w: checkpoint (4, 5), template (4, 4)' in str(first.message)
        assert 'params/b: checkpoint int32, template float32' in str(first.message)
        # The old difference, and a new one.
        ck.save({'params': {'w': np.zeros((4, 5), np.float32)}}, step=3)
        _, second = caught
        assert 'params/b: not in the checkpoint' in str(second.message)
        assert 'params/w' not in str(second.message)
        ck.save(STATE, step=4)
        assert len(caught) == 2
        assert ck.all_steps() == [0, 1, 2, 3, 4]


def test_a_leaf_that_grows_gives_one_warning(tmp_path, caught):
    with Checkpointer({'buffer': np.zeros(1)}, checkpoints_dir=tmp_path) as ck:
        for step in range(2, 6):
            ck.save({'buffer': np.zeros(step)}, step=step)
    assert len(caught) == 1


@pytest.mark.parametrize('kind', ['protocol', 'partitioner', 'pytree'])
def test_leaves_that_a_restore_leaves_out_are_no_difference(tmp_path, caught, kind):
    """T5X's rule for T5X's states, with a partitioner and without; for any other tree they are one."""
    flat = {'state/step': np.int32(1), 'target/w': np.zeros(4, np.float32)}
    more = flat | {'state/param_states/w': np.zeros(4, np.float32)}
    make = nest if kind == 'pytree' else states.t5x_state
    parts = partitioner.Partitioner(partitioner.mesh(), partitioner.t5x_rules) if kind == 'partitioner' else None
    with Checkpointer(make(flat), parts, tmp_path) as ck:
        ck.save(make(more), step=1)
        if kind == 'pytree':
            (warning,) = caught
            assert 'state/param_states/w: checkpoint float32 (4,), not in the template' in str(warning.message)
        else:
            ck.restore(step=1)
            assert caught == []


def test_leaves_that_a_restore_accepts_are_not_a_difference(tmp_path):
    """The restore decides: floats of another width, typed keys, numbers, empty containers, text."""
    state = STATE | {'key': jax.random.key(0), 'n': 3, 'empty': {}, 'none': None, 'text': 'a'}
    with Checkpointer(state, checkpoints_dir=tmp_path, save_dtype='bfloat16') as ck:
        ck.save(state | {'n': 4, 'text': 'b', 'key': jax.random.key(1)}, step=1)
        ck.save(state | other(w=jnp.zeros((4, 4), jnp.bfloat16)), step=2)
        ck.restore(step=2)


def test_strict_save(tmp_path):
    with Checkpointer(STATE, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(strict_save=True)) as ck:
        for _ in range(2):
            with pytest.raises(TreeMismatchError, match='step 1 is not saved') as caught:
                ck.save(other(w=np.zeros(3, np.float32)), step=1)
            assert [problem.leaf for problem in caught.value.problems] == ['params/w']
        assert ck.all_steps() == []
        ck.save(STATE, step=1)


def test_transforms_are_not_compared(tmp_path):
    with Checkpointer(STATE, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(strict_save=True)) as ck:
        assert ck.save(other(w=np.zeros(3, np.float32)), [same], step=1).step == 1


def test_an_info_without_its_leaf(tmp_path):
    """As in T5X. Without it the renamed leaf would have another directory than the one that its info names."""

    def rename(state_dict, infos):
        state_dict['params']['v'] = state_dict['params'].pop('w')
        return state_dict, infos

    def moved(state_dict, infos):
        infos['params']['v'] = infos['params'].pop('w')
        return state_dict, infos

    with Checkpointer(STATE, checkpoints_dir=tmp_path) as ck:
        with pytest.raises(t5ckpt.errors.UnsupportedLeafError, match='name leaves that the state dict lacks: params/w'):
            ck.save(STATE, [rename], step=1)
        assert ck.save(STATE, [rename, moved], step=1).step == 1


# --- metrics that do not come ----------------------------------------------------------------------------------------


def test_a_keep_policy_whose_metric_does_not_come(tmp_path, caught):
    policy = KeepLatest(2) | KeepBest(1, 'acc')
    with Checkpointer(STATE, checkpoints_dir=tmp_path, keep_policy=policy) as ck:
        for step in range(6):
            ck.save(STATE, step=step, metrics={'accuracy': step, 'loss': 1})
        assert ck.all_steps() == [4, 5]
    (warning,) = caught
    assert warning.category is t5ckpt.errors.MissingMetricWarning
    assert "no metric 'acc'" in str(warning.message)
    assert 'it has: accuracy, loss' in str(warning.message)


def test_a_metric_of_the_event_files_that_does_not_come(tmp_path, caught):
    """They may be written after the save, so the step before is judged."""
    with SaveBestCheckpointer(STATE, None, tmp_path, keep=1, metric_name_to_monitor='eval/acc') as ck:
        ck.save(STATE, step=0)
        ck.save(STATE, step=1)
        assert caught == []
        ck.save(STATE, step=2)
        ck.save(STATE, step=3)
        assert ck.all_steps() == [0, 1, 2, 3]
    (warning,) = caught
    assert "step 0 has no metric 'eval/acc'" in str(warning.message)
    assert 'metric_source has not returned it for any step so far' in str(warning.message)
    assert 'If no evaluator is about to write it, pass' in str(warning.message)


@pytest.mark.parametrize('metrics', [{'accuracy': 0.5}, None])
def test_a_save_policy_whose_metric_does_not_come(tmp_path, caught, metrics):
    with Checkpointer(STATE, checkpoints_dir=tmp_path, save_policy=SaveOnImprovement('acc')) as ck:
        for step in range(1000):
            ck.maybe_save(step, STATE, metrics=metrics)
        assert len(caught) == (metrics is not None)
        ck.maybe_save(1000, STATE, metrics=metrics)
    (warning,) = caught
    assert warning.category is t5ckpt.errors.MissingMetricWarning
    assert "without the metric 'acc'" in str(warning.message)
    assert warning.filename == __file__


def test_a_metric_of_some_saves_only_is_not_a_mistake(tmp_path, caught):
    with Checkpointer(STATE, checkpoints_dir=tmp_path, save_policy=SaveOnImprovement('acc')) as ck:
        ck.maybe_save(0, STATE, metrics={'acc': 0.5})
        for step in range(1, 5):
            ck.maybe_save(step, STATE, metrics={'loss': 0.5})
    assert caught == []


def test_preemption_without_a_notice_is_refused(tmp_path):
    with pytest.raises(ValueError, match='SaveOnPreemption never saves without preempted='):
        Checkpointer(STATE, checkpoints_dir=tmp_path, save_policy=SaveEvery(10) | SaveOnPreemption())
    policy = SaveEvery(10) | SaveOnPreemption()
    with pytest.raises(ValueError, match='SaveOnPreemption never uploads without preempted='):
        Checkpointer(
            STATE, checkpoints_dir=tmp_path / 'run', local=t5ckpt.LocalTier(tmp_path / 'local', persist=policy)
        )


@pytest.mark.parametrize(
    ('metrics', 'saves', 'given'), [({'loss': 0.5}, 2, 'loss'), (None, 11, 'none in the first 10 steps')]
)
def test_a_metric_that_the_persist_policy_needs_and_no_save_has_is_warned_of_once(
    tmp_path, caught, metrics, saves, given
):
    policy = SaveOnImprovement('acc') | SaveEvery(100)
    with Checkpointer(STATE, None, tmp_path / 'run', local=t5ckpt.LocalTier(tmp_path / 'local', persist=policy)) as ck:
        for step in range(saves):
            assert caught == [] or step > 0
            ck.save(STATE, step=step, metrics=metrics)
        ck.save(STATE, step=saves, metrics=metrics)
    (warning,) = caught
    assert warning.category is t5ckpt.errors.MissingMetricWarning
    assert "comes without the metric 'acc', which persist=" in str(warning.message)
    assert f'the metrics given were: {given}. ' in str(warning.message)
    assert warning.filename == __file__


def test_a_metric_of_some_uploads_only_is_not_a_mistake(tmp_path, caught):
    policy = SaveOnImprovement('acc')
    with Checkpointer(STATE, None, tmp_path / 'run', local=t5ckpt.LocalTier(tmp_path / 'local', persist=policy)) as ck:
        ck.save(STATE, step=0, metrics={'acc': 0.5})
        for step in range(1, 13):
            ck.save(STATE, step=step)
    assert caught == []


@pytest.mark.parametrize(
    ('call', 'text'),
    [
        (lambda ck, state: ck.save(state, state), "'str' object is not callable"),
        (lambda ck, state: ck.save(state, [1]), "'int' object is not callable"),
        (lambda ck, state: ck.save('4', state), "the step must be an integer, got '4'"),
        (lambda ck, state: ck.restore(state), 'step must be an integer of at least 0, got '),
        (
            lambda ck, state: ck.restore('run'),
            "step must be an integer of at least 0, got 'run'. The path comes before",
        ),
        (lambda ck, state: ck.restore(2, 'run/checkpoint_1'), "step=2 and path='run/checkpoint_1' exclude each other"),
        (lambda ck, state: ck.restore(resize=True), "'bool' object is not iterable"),
        (lambda ck, state: ck.save(state, [lambda tree: tree]), 'takes 1 positional argument but 2 were given'),
        (t5ckpt.restore_or_init, "'dict' object is not callable"),
        (lambda ck, state: t5ckpt.Checkpointer('runs/a'), "train_state is 'runs/a', which looks like a directory"),
        (lambda ck, state: t5ckpt.Checkpointer('run', state), "train_state is 'run', which looks like a directory"),
        (lambda ck, state: t5ckpt.Checkpointer(state, checkpoints_dir=5), 'A path is text or a pathlib.Path, got 5'),
        (lambda ck, state: t5ckpt.WarmStart('a', rename=('a', 'b')), r"rename must be a list of .*, got \('a', 'b'\)"),
        (lambda ck, state: t5ckpt.WarmStart('a', rename={'a': 'b'}), "rename must be a list of .*, got {'a': 'b'}"),
    ],
)
def test_arguments_in_the_place_of_others(tmp_path, call, text):
    state = {'params': {'w': np.zeros(3)}, 'step': 1}
    checkpointer = t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run')
    with pytest.raises((ValueError, TypeError), match=text):
        call(checkpointer, state)
    assert not (tmp_path / 'run').exists()

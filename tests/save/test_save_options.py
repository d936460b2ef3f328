"""Options of the save side: of the wrong type or out of range they are errors at once, and set later they count."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.facts import facts_of
from support.options import with_options

import t5ckpt
from t5ckpt import (
    Checkpointer,
    KeepBest,
    KeepEvery,
    KeepEveryHours,
    KeepLatest,
    KeepSteps,
    SaveAt,
    SaveBestCheckpointer,
    SaveEvery,
    SaveEverySeconds,
    SaveLast,
    SaveOnImprovement,
    SaveWhenIdle,
)
from t5ckpt.save_policies import SaveAny

STATE = {'params': {'w': np.zeros((4, 4), np.float32)}}


@pytest.mark.parametrize(
    'options',
    [
        *[{'keep': bad} for bad in ('3', 1.5, 0, -1, True, [3], math.nan)],
        *[{'keep_dataset_checkpoints': bad} for bad in ('3', 1.5, 0, True)],
        *[{'chunk_bytes': bad} for bad in ('64MB', 0, 1e6, None, True)],
        *[{'inline_bytes': bad} for bad in ('16K', -1, 0.5, None)],
        *[{'process_timeout': bad} for bad in ('60', 0, -1, math.inf, math.nan, None, True)],
        *[{'keep_policy': bad} for bad in (3, 'latest', KeepLatest)],
        *[{'save_policy': bad} for bad in (100, SaveEvery)],
        *[{'compression': bad} for bad in ('zip', 1, ['zstd'])],
        *[{'metric_source': bad} for bad in ('run', 1)],
        *[{name: 1} for name in ('preempted', 'progress', 'clock', 'map_positions')],
        *[{name: 'no'} for name in ('reuse_unchanged', 'mmap', 'share_replicated', 'follow_links')],
    ],
    ids=str,
)
def test_constructor_options(options, tmp_path):
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=rf'{name}.*got') as caught:
        Checkpointer(STATE, checkpoints_dir=tmp_path, **with_options(**options))
    assert repr(value)[:80] in str(caught.value)


@pytest.mark.filterwarnings('error')
def test_an_evaluator_reads_a_metric_source_without_a_keep_policy(tmp_path):
    source = t5ckpt.TensorBoardMetrics(tmp_path)
    Checkpointer(STATE, checkpoints_dir=tmp_path, metric_source=source, read_only=True).close()
    with pytest.raises(t5ckpt.errors.NoEffectWarning, match='metric_source has no effect'):
        Checkpointer(STATE, checkpoints_dir=tmp_path, metric_source=source)


def test_a_step_that_is_not_where_it_is_looked_for_is_named(tmp_path):
    state = {'optimizer': {'step': {'value': np.int32(7)}}, **STATE}
    with pytest.raises(ValueError, match=r'no step .*it has optimizer/step/value\): pass step='):
        Checkpointer(state, checkpoints_dir=tmp_path).save(state)


@pytest.mark.skipif(np.dtype(np.longdouble) == np.float64, reason='is float64 here')
@pytest.mark.parametrize('option', ['save_dtype', 'restore_dtype'])
def test_a_cast_to_a_dtype_that_no_checkpoint_has(option, tmp_path):
    with pytest.raises(
        ValueError, match=rf'{option}: neither JAX nor a checkpoint has the dtype {np.longdouble(0).dtype}'
    ):
        Checkpointer(STATE, checkpoints_dir=tmp_path, **with_options(**{option: np.longdouble}))


@pytest.mark.parametrize('compression', ['lz4', 'blosc'])
def test_chunks_that_a_codec_cannot_encode(compression, tmp_path):
    """No byte of the array is read."""
    tree = {'w': np.zeros(2**31, np.uint8)}
    options = {'chunk_bytes': 2**31, 'compression': compression}
    with (
        Checkpointer(tree, checkpoints_dir=tmp_path, **with_options(**options)) as ck,
        pytest.raises(t5ckpt.errors.UnsupportedLeafError, match=r'^w: .* less than 2 GiB.*2,147,483,648 bytes'),
    ):
        ck.save(tree, step=1)


@pytest.mark.parametrize('bad', ['1', 0, -1, math.inf, math.nan, None, True, 10**400], ids=lambda bad: repr(bad)[:9])
def test_concurrent_gb(bad, tmp_path):
    with Checkpointer(STATE, checkpoints_dir=tmp_path) as ck:
        for save in (ck.save, ck.save_async):
            with pytest.raises(ValueError, match='concurrent_gb must be a finite number above 0, got'):
                save(STATE, step=1, concurrent_gb=bad)
        assert ck.all_steps() == []


@pytest.mark.parametrize(
    ('metrics', 'text'),
    [
        ({'a': 10**400}, "'a' is an integer too large"),
        ({1: 0.5}, 'the name of a metric must be a str'),
        ({None: 0.5}, 'the name of a metric must be a str .* got None'),
        ([('a', 1.0)], 'must be a Mapping'),
        (0.5, 'must be a Mapping'),
    ],
    ids=['huge', 'name', 'none', 'pairs', 'number'],
)
def test_bad_metrics(metrics, text, tmp_path):
    policy = SaveEvery(1)
    with Checkpointer(STATE, checkpoints_dir=tmp_path, save_policy=policy) as ck:
        for save in (lambda: ck.save(STATE, step=1, metrics=metrics), lambda: ck.maybe_save(1, STATE, metrics=metrics)):
            with pytest.raises(ValueError, match=text):
                save()
        assert ck.all_steps() == []


def test_metrics_come_back_as_they_were_in_json_that_every_program_reads(tmp_path):
    given = {
        'nan': math.nan,
        'inf': np.float32(math.inf),
        'low': -math.inf,
        'int': 2**53 + 1,
        'np': np.int64(2**53 + 1),
        'jax': jnp.int32(2**24 + 1),
        'huge': 10**30,
        'float': 0.1,
        'half': jnp.bfloat16(1.5),
    }
    expected = {**given, 'inf': math.inf, 'np': 2**53 + 1, 'jax': 2**24 + 1, 'huge': 1e30, 'half': 1.5}
    for save in ('save', 'save_async'):
        with Checkpointer(STATE, checkpoints_dir=tmp_path / save) as ck:
            getattr(ck, save)(STATE, step=1, metrics=given)
            ck.wait_until_finished()
            np.testing.assert_equal(ck.metrics(1), expected)
            assert {name: type(value) for name, value in ck.metrics(1).items()} == {
                name: type(value) for name, value in expected.items()
            }
        text = facts_of(tmp_path / save / 'checkpoint_1')
        assert json.loads(text, parse_constant=pytest.fail)['metrics']['low'] == '-inf'


def test_a_metric_whose_buffer_is_gone_is_named(tmp_path):
    gone = jnp.float32(1)
    gone.delete()
    with (
        Checkpointer(STATE, checkpoints_dir=tmp_path) as ck,
        pytest.raises(ValueError, match="metrics: 'loss' cannot be"),
    ):
        ck.save(STATE, step=1, metrics={'loss': gone})


@pytest.mark.parametrize(
    'make',
    [
        lambda: KeepLatest(1.5),
        lambda: KeepLatest('3'),
        lambda: KeepBest('3', 'a'),
        lambda: KeepBest(3, None),
        lambda: KeepBest(3, 'a', 'largest'),
        lambda: KeepBest(3, 'a', period='1'),
        lambda: KeepEvery(1.5),
        lambda: KeepEveryHours('2'),
        lambda: KeepEveryHours(math.inf),
        lambda: KeepSteps(5),
        lambda: KeepSteps(['5']),
        lambda: KeepSteps('567'),
        lambda: KeepLatest(1) | 3,
        lambda: SaveEvery('10'),
        lambda: SaveEvery(10, min_step=1.5),
        lambda: SaveAt(10),
        lambda: SaveAt([1.5]),
        lambda: SaveEverySeconds('60'),
        lambda: SaveLast('9'),
        lambda: SaveOnImprovement(['a']),
        lambda: SaveOnImprovement('a', least='1'),
        lambda: SaveWhenIdle(-1),
        lambda: SaveAny((SaveEvery(1), 3)),
    ],
)
def test_policies(make):
    with pytest.raises(ValueError, match='got'):
        make()


def test_integers_of_numpy_count(tmp_path):
    """And what a policy was given can be written to the facts."""
    policy = KeepLatest(np.int64(1)) | KeepSteps(np.array([0])) | KeepBest(np.int32(1), 'm', period=np.int64(100))
    with Checkpointer(
        STATE,
        checkpoints_dir=tmp_path,
        keep_policy=policy,
        options=t5ckpt.CheckpointerOptions(chunk_bytes=np.int64(64)),
    ) as ck:
        for step in range(3):
            ck.save(STATE, step=np.int64(step), metrics={'m': np.float32(step)})
        assert ck.all_steps() == [0, 1, 2]
    assert t5ckpt.verify(tmp_path).ok


def test_keep_may_be_set_later(tmp_path):
    """As in T5X, where both are attributes that are read at each save."""
    with Checkpointer(STATE, checkpoints_dir=tmp_path) as ck:
        for step in range(3):
            ck.save(STATE, step=step)
        ck.keep = 1
        assert ck.keep == 1
        ck.save(STATE, step=3)
        assert ck.all_steps() == [3]
        ck.keep = None
        ck.save(STATE, step=4)
        assert ck.all_steps() == [3, 4]
        with pytest.raises(ValueError, match='keep must be'):
            ck.keep = '2'
        with pytest.raises(ValueError, match='keep_dataset_checkpoints must be'):
            ck.keep_dataset_checkpoints = 0
        assert ck.keep is None


def test_keep_beside_a_policy_is_refused(tmp_path):
    with Checkpointer(STATE, checkpoints_dir=tmp_path, keep_policy=KeepEvery(10)) as ck:
        assert ck.keep is None
        with pytest.raises(ValueError, match=r'keep cannot be set to 1: .*KeepEvery\(steps=10\)'):
            ck.keep = 1


def test_keep_of_the_best_may_be_set_later(tmp_path):
    with SaveBestCheckpointer(STATE, None, tmp_path, metric_name_to_monitor='m', metric_mode='min') as ck:
        for step in range(4):
            ck.save(STATE, step=step, metrics={'m': step})
        assert ck.all_steps() == [0, 1, 2, 3]
        ck.keep = 1
        ck.save(STATE, step=4, metrics={'m': 4})
        assert ck.all_steps() == [0, 4]


def in_place(state):
    state['n'] *= 2
    return state


CHANGES = {
    'an array': lambda state: state | {'w': state['w'] * 2},
    'an array of NumPy in place': in_place,
    'a number': lambda state: state | {'i': 4},
    'a leaf more': lambda state: state | {'more': jnp.ones(2)},
    'a leaf less': lambda state: {key: leaf for key, leaf in state.items() if key != 'w'},
    'a key': lambda state: state | {'key': jax.random.key(2)},
}


@pytest.mark.filterwarnings('ignore:.*template')
@pytest.mark.parametrize('method', ['save', 'save_async'])
@pytest.mark.parametrize('change', CHANGES)
def test_the_step_that_was_restored_is_not_skipped_in_silence(tmp_path, method, change, caplog):
    """Its values may have been changed since (orbax#1408)."""
    state = {'w': jnp.ones(3), 'n': np.ones(3), 'i': 3, 'key': jax.random.key(1)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as ck:
        ck.save(state, step=5)
        state = CHANGES[change](ck.restore())
        result = getattr(ck, method)(state, step=5)
        assert (result if method == 'save' else result.result()) is None
    assert 'already exists); save(..., overwrite=True) replaces it' in caplog.text

"""Calls in another library's words, in another order, or with a slip of the pen: the error names what is meant."""

import functools
import inspect
import pickle
import pydoc
import re

import gin
import numpy as np
import pytest

import t5ckpt
from t5ckpt import Checkpointer, KeepBest, KeepEvery, KeepLatest, SaveBestCheckpointer, SaveEvery, SaveOnImprovement
from t5ckpt.core.text import shown
from t5ckpt.errors import MissingLeaves, TreeMismatchError

STATE = {'params': {'w': np.arange(6, dtype=np.float32).reshape(2, 3)}, 'step': np.int32(3)}
BIG = np.zeros(10**6)
LONG = 'x' * 10**6


@pytest.fixture
def run(tmp_path):
    with Checkpointer(STATE, checkpoints_dir=tmp_path / 'run') as checkpointer:
        checkpointer.save(STATE)
    return tmp_path / 'run'


def test_the_repr_of_a_conversion_is_short(tmp_path):
    state = {'params': {f'layer_{i}': {'kernel': np.zeros(2, np.float32)} for i in range(300)}, 'step': np.int32(1)}
    with Checkpointer(state, checkpoints_dir=tmp_path / 'run') as checkpointer:
        checkpointer.save(state)
    done = t5ckpt.copy_checkpoint(tmp_path / 'run', tmp_path / 'new')
    exported = t5ckpt.convert_checkpoint('to-safetensors', tmp_path / 'run', tmp_path / 'x.safetensors')
    for report in (done, exported):
        assert len(repr(report)) < 700
        assert len(report.mapped) == 301
        assert '301' in repr(report)


def test_the_signatures_are_those_that_are_written():
    """For inspect, gin and editors: no ``**others`` is added to catch other words."""
    for function in (Checkpointer, Checkpointer.save, Checkpointer.save_async, Checkpointer.restore):
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, function
    assert list(inspect.signature(Checkpointer).parameters)[:5] == [
        'train_state',
        'partitioner',
        'checkpoints_dir',
        'dataset_iterator',
        'keep',
    ]
    full = inspect.getfullargspec(Checkpointer.__init__)
    assert (full.varkw, full.kwonlydefaults['keep'], 'options' in full.kwonlyargs) == (None, None, True)
    assert inspect.signature(Checkpointer.restore).parameters['strict'].default is None


PUBLIC_FUNCTIONS = sorted(name for name in t5ckpt.__all__ if inspect.isfunction(getattr(t5ckpt, name)))


@pytest.mark.parametrize('name', PUBLIC_FUNCTIONS)
def test_a_function_can_be_bound_by_what_binds_functions(name):
    """gin, functools.partial, pickle and help see the function that is written, with its parameters and no others."""
    function = getattr(t5ckpt, name)
    parameters = inspect.signature(function).parameters
    assert not {each.kind for each in parameters.values()} & {
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    }
    assert pickle.loads(pickle.dumps(function)) is function
    assert list(inspect.signature(functools.partial(function)).parameters) == [*parameters]
    assert re.match(
        rf'[^\n]*\n\n{name}\(\s*{next(iter(parameters))}', pydoc.render_doc(function, renderer=pydoc.plaintext)
    )
    last = next(reversed(parameters))
    configurable = gin.external_configurable(function, f'{name}OfThisTest')
    with gin.unlock_config():
        gin.bind_parameter(f'{name}OfThisTest.{last}', None)
        with pytest.raises(ValueError, match='of_nobody'):
            gin.bind_parameter(f'{name}OfThisTest.of_nobody', None)
    assert [*inspect.signature(configurable).parameters] == [*parameters]
    gin.clear_config()


@pytest.mark.parametrize('kind', [t5ckpt.WarmStart, t5ckpt.TensorBoardMetrics, t5ckpt.CheckpointerOptions])
def test_options_can_be_bound_by_gin(kind):
    name = f'{kind.__name__}OfThisTest'
    first = next(iter(inspect.signature(kind).parameters))
    configurable = gin.external_configurable(kind, name)
    value = {'compression': 'zstd', 'path': 'run', 'directory': 'run'}[first]
    with gin.unlock_config():
        gin.bind_parameter(f'{name}.{first}', value)
    assert isinstance(configurable(), kind)
    gin.clear_config()


def test_gin_configures_the_real_parameters(tmp_path):
    configurable = gin.external_configurable(Checkpointer, 'CheckpointerOfThisTest')
    gin.external_configurable(t5ckpt.CheckpointerOptions, 'OptionsOfThisTest')
    with gin.unlock_config():
        gin.parse_config('CheckpointerOfThisTest.keep = 7')
        gin.parse_config('CheckpointerOfThisTest.options = @OptionsOfThisTest()')
        gin.parse_config('OptionsOfThisTest.strict_save = True')
        with pytest.raises(ValueError, match='max_to_keep'):
            gin.parse_config('CheckpointerOfThisTest.max_to_keep = 7')
    with configurable(STATE, checkpoints_dir=tmp_path) as checkpointer:
        assert checkpointer.keep == 7
        with pytest.raises(TreeMismatchError):
            checkpointer.save({**STATE, 'b': 1})
    assert 'CheckpointerOfThisTest.keep = 7' in gin.operative_config_str()
    gin.clear_config()


# --- another order, another name -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('call', 'text'),
    [
        (lambda run: KeepLatest(0), r'count must be an integer of at least 1, got 0. KeepAll\(\)'),
        (lambda run: KeepBest('acc', 2), "count must be an integer of at least 1, got 'acc'"),
        (lambda run: KeepBest(2, 'acc', 'mxa'), "mode must be one of 'max', 'min', got 'mxa'. Did you mean 'max'"),
        (lambda run: KeepBest(2, 'acc', period=0), 'period must be'),
        (lambda run: KeepEvery(0), 'steps must be'),
        (lambda run: SaveEvery(0), 'steps must be'),
        (lambda run: SaveOnImprovement('min', 'loss'), "mode must be one of 'max', 'min', got 'loss'"),
        (lambda run: Checkpointer(STATE, checkpoints_dir=run, keep=0), 'keep must be .* None keeps all'),
        (lambda run: SaveBestCheckpointer(STATE, checkpoints_dir=run, keep=0), 'keep must be .* None keeps all'),
        (
            lambda run: t5ckpt.load_t5x_checkpoint(3, run),
            'got PosixPath.* The path comes before the step',
        ),
        (lambda run: t5ckpt.open_checkpoint(3, str(run)), 'The path comes before the step'),
        (lambda run: t5ckpt.pin_checkpoint(3, run), 'A path is text .* got 3. The path comes before the step'),
        (lambda run: Checkpointer(None, checkpoints_dir=run).restore(), r'load_t5x_checkpoint\(path\)'),
        (
            lambda run: Checkpointer(STATE, checkpoints_dir=run, storage_options='x'),
            'storage_options must be a Mapping',
        ),
    ],
)
def test_an_argument_is_called_what_it_is_called_there(run, call, text):
    with pytest.raises(ValueError, match=text):
        call(run)


# --- fallback_state ------------------------------------------------------------------------------------------------------


def test_a_misspelt_key_of_fallback_state_is_named(run):
    wider = {**STATE, 'params': {**STATE['params'], 'bias': np.zeros(3, np.float32)}}
    checkpointer = Checkpointer(wider, checkpoints_dir=run)
    with pytest.raises(MissingLeaves, match='fallback_state has params/bais, which the template lacks'):
        checkpointer.restore(fallback_state={'params': {'bais': np.ones(3, np.float32)}})
    given = {'params': {'bias': np.ones(3, np.float32)}, 'parms': {'w': np.ones(3, np.float32)}}
    with pytest.warns(t5ckpt.errors.NoEffectWarning, match='lacks: parms/w. .* the template begins with params, step'):
        restored = checkpointer.restore(fallback_state=given)
    np.testing.assert_array_equal(restored['params']['bias'], 1)


# --- large values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'call',
    [
        lambda ck, value: ck.save(STATE, step=value),
        lambda ck, value: ck.save(STATE, step=9, metrics={'a': value}),
        lambda ck, value: ck.restore(value),
        lambda ck, value: ck.restore(strict=value),
        lambda ck, value: ck.save(STATE, concurrent_gb=value),
        lambda ck, value: Checkpointer(STATE, checkpoints_dir=value),
        lambda ck, value: Checkpointer(STATE, checkpoints_dir='run', keep=value),
        lambda ck, value: Checkpointer(STATE, checkpoints_dir='run', options=t5ckpt.CheckpointerOptions(verify=value)),
        lambda ck, value: Checkpointer(
            STATE, checkpoints_dir='run', options=t5ckpt.CheckpointerOptions(compression=value)
        ),
        lambda ck, value: Checkpointer(
            STATE, checkpoints_dir='run', options=t5ckpt.CheckpointerOptions(chunk_bytes=value)
        ),
        lambda ck, value: Checkpointer(STATE, checkpoints_dir='run', save_dtype=value),
        lambda ck, value: Checkpointer(STATE, checkpoints_dir='run', storage_options=value),
        lambda ck, value: KeepBest(1, 'a', value),
        lambda ck, value: t5ckpt.KeepSteps([value]),
    ],
)
@pytest.mark.parametrize('value', [BIG, LONG, [1.5] * 10**6, np.zeros((1000, 1000)).tolist()])
def test_a_large_value_is_cut_in_the_text(run, call, value):
    checkpointer = Checkpointer(STATE, checkpoints_dir=run)
    with pytest.raises((ValueError, TypeError)) as caught:
        call(checkpointer, value)
    text = str(caught.value)
    assert len(text) < 500, text[:200]
    assert 'ambiguous' not in text, text


@pytest.mark.slow
def test_a_long_name_of_a_leaf_is_cut(run):
    with pytest.raises(KeyError, match='1,000,000 characters: no such leaf') as caught:
        t5ckpt.open_checkpoint(run)[LONG]
    assert len(str(caught.value)) < 500


def test_what_is_cut_says_its_size():
    assert shown(LONG).endswith("x'…, 1,000,000 characters")
    assert shown([1] * 10**6) == 'list of 1, 1, 1, 1, …, 1,000,000 elements'
    assert shown(BIG) == 'ndarray of float64 (1000000,)'
    assert shown({str(i): BIG for i in range(9)}) == "dict of '0', '1', '2', '3', …, 9 elements"
    for value in (3, 'a', None, [1, 2], {'a': 1}, (), np.float32(2), np.arange(3)):
        assert shown(value) == repr(value)
    assert re.fullmatch(r'\[\[.{78}…', shown([[0] * 1000]))

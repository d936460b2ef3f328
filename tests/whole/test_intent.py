"""What a user asks for is done, or refused, or warned of: no option has no effect in silence."""

import inspect
import json
import re
import time
from pathlib import Path

import click
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from flax import serialization
from support import forked, intent_table
from support.options import with_options

import t5ckpt
from t5ckpt import ConvertOptions
from t5ckpt.catalog.listing import steps_in
from t5ckpt.cli.app import app, run as run_verb
from t5ckpt.commit.deletion import delete_step
from t5ckpt.commit.holds import hold
from t5ckpt.convert.tf import TfCheckpoint, tf_leaves
from t5ckpt.errors import (
    CheckpointNotFoundError,
    StepKeptError,
    StorageError,
    UnmatchedPattern,
    UnsupportedFormatError,
)
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage
from t5ckpt.training import MetricWriter, ProfilerWindow

ROOT = Path(__file__).resolve().parents[2]
BF16 = np.dtype(ml_dtypes.bfloat16)
KERNEL = np.arange(48, dtype=np.float32).reshape(6, 8)


def nnx_state(step=1):
    """A state whose weights are where Flax NNX and axlearn have them."""
    return {
        'model': {'dense': {'kernel': KERNEL * step}, 'ids': np.arange(3)},
        'optimizer': {'mu': KERNEL, 'count': np.int32(step)},
        'step': np.int32(step),
    }


@pytest.fixture
def run(tmp_path):
    """Steps 1 and 2."""
    with t5ckpt.Checkpointer(
        nnx_state(), checkpoints_dir=tmp_path / 'run', options=t5ckpt.CheckpointerOptions(inline_bytes=0)
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(nnx_state(step))
    return tmp_path / 'run'


def cli(*words, code=0):
    """Runs a verb in a process of its own; returns standard output and standard error."""
    done = forked.run("import sys; sys.argv[0] = 't5ckpt'; from t5ckpt.cli import main; main()", *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


# --- casts -------------------------------------------------------------------------------------------------------------


def saved(save):
    def call(run, out, dtype, **leaves):
        with t5ckpt.Checkpointer(
            nnx_state(), checkpoints_dir=out, save_dtype=dtype, **with_options(**leaves)
        ) as checkpointer:
            save(checkpointer, nnx_state(2))
        return t5ckpt.load_t5x_checkpoint(out)

    return call


def restored(run, out, dtype, **leaves):
    options = {'lazy_parameters': leaves.pop('lazy', False)}
    with t5ckpt.Checkpointer(
        nnx_state(), checkpoints_dir=run, restore_dtype=dtype, **with_options(**leaves)
    ) as checkpointer:
        return checkpointer.restore(**options)


def exported(run, out, dtype, dry_run=False, **leaves):
    options = ConvertOptions(save_dtype=dtype, dry_run=dry_run, **leaves)
    t5ckpt.convert_checkpoint('to-safetensors', run, out, options)
    return load_safetensors(out)


def imported(run, out, dtype, **leaves):
    source = f'{out}.safetensors'
    t5ckpt.convert_checkpoint('to-safetensors', run, source, ConvertOptions(overwrite=True))
    t5ckpt.convert_checkpoint('safetensors', source, out, ConvertOptions(save_dtype=dtype, step=2, **leaves))
    return t5ckpt.load_t5x_checkpoint(out)


def load_safetensors(path):
    with open(path, 'rb') as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), 'little')))
    kinds = {'F32': np.dtype(np.float32), 'BF16': BF16, 'I64': np.dtype(np.int64), 'I32': np.dtype(np.int32)}
    return {name: np.zeros(0, kinds[entry['dtype']]) for name, entry in header.items() if name != '__metadata__'}


def rewritten(run, out, dtype, dry_run=False, **leaves):
    options = ConvertOptions(save_dtype=dtype, dry_run=dry_run, **leaves)
    t5ckpt.copy_checkpoint(run, out, options)
    return t5ckpt.load_t5x_checkpoint(out)


def converted(run, out, dtype, **leaves):
    Path(f'{out}.flax').write_bytes(serialization.to_bytes(nnx_state(2)))
    t5ckpt.convert_checkpoint('flax', f'{out}.flax', out, ConvertOptions(step=2, save_dtype=dtype, **leaves))
    return t5ckpt.load_t5x_checkpoint(out)


def converted_to_orbax(run, out, dtype, **leaves):
    t5ckpt.convert_checkpoint('to-orbax', run, out, ConvertOptions(save_dtype=dtype, **leaves))
    return t5ckpt.load_t5x_checkpoint(out)


CASTS = {
    'save': saved(lambda checkpointer, state: checkpointer.save(state)),
    'save_async': saved(lambda checkpointer, state: checkpointer.save_async(state).result()),
    'restore': restored,
    'restore lazily': lambda *args, **leaves: restored(*args, **leaves, lazy=True),
    'load': lambda run, out, dtype, **leaves: t5ckpt.load_t5x_checkpoint(
        run, restore_dtype=dtype, **with_options(**leaves)
    ),
    'load lazily': lambda run, out, dtype, **leaves: t5ckpt.load_t5x_checkpoint(
        run, restore_dtype=dtype, lazy_parameters=True, **with_options(**leaves)
    ),
    'rewrite': rewritten,
    'convert': converted,
    'to orbax': converted_to_orbax,
    'export safetensors': exported,
    'import safetensors': imported,
}


def flat(tree, prefix=''):
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    return {name: leaf for key, below in tree.items() for name, leaf in flat(below, f'{prefix}{key}/').items()}


@pytest.mark.parametrize('name', CASTS)
def test_a_cast_that_is_meant_for_no_leaf_is_an_error_that_names_the_roots_and_the_option(name, run, tmp_path):
    with pytest.raises(UnmatchedPattern, match=r"model/, optimizer/.* cast_leaves='model/\.\*'"):
        CASTS[name](run, tmp_path / 'out', 'bfloat16')
    with pytest.raises(UnmatchedPattern, match=r"cast_leaves='modell/\.\*'.*cast_leaves='model/\.\*'"):
        CASTS[name](run, tmp_path / 'out', 'bfloat16', cast_leaves='modell/.*')


@pytest.mark.parametrize('name', CASTS)
def test_cast_leaves_names_what_is_cast(name, run, tmp_path):
    leaves = flat(CASTS[name](run, tmp_path / 'out', 'bfloat16', cast_leaves='model/.*'))
    dtypes = {leaf: np.dtype(value.dtype) for leaf, value in leaves.items()}
    assert dtypes['model/dense/kernel'] == BF16
    assert dtypes['optimizer/mu'] == np.float32
    assert dtypes['model/ids'].kind == dtypes['step'].kind == 'i'
    # Done already is done.
    again = CASTS[name](run, tmp_path / 'again', 'float32', cast_leaves='optimizer/mu')
    assert np.dtype(flat(again)['optimizer/mu'].dtype) == np.float32


@pytest.mark.parametrize('name', CASTS)
@pytest.mark.parametrize('patterns', [['model/.*', 'modell/.*'], ['step', 'model/.*'], []])
def test_each_pattern_of_cast_leaves_is_meant_for_a_floating_leaf(name, patterns, run, tmp_path):
    with pytest.raises(UnmatchedPattern, match=r"cast_leaves='modell/|cast_leaves='step'|cast_leaves=\[\]"):
        CASTS[name](run, tmp_path / 'out', 'bfloat16', cast_leaves=patterns)


def test_the_dtype_of_later_restores_is_checked_when_it_is_set(run):
    with t5ckpt.Checkpointer({'w': np.ones(3)}, checkpoints_dir=run) as checkpointer:
        with pytest.raises(ValueError, match=r"restore_dtype: 'bfloat61' is not a dtype"):
            checkpointer.restore_dtype = 'bfloat61'
        assert checkpointer.restore_dtype is None


def test_the_proposed_pattern_casts_the_parameters_of_several_models_and_not_their_moments(tmp_path):
    model = {'opt_state': {'mu': {'w': np.ones(4, np.float32)}}, 'params': {'w': np.ones(4, np.float32)}}
    state = {'actor': model, 'critic': model, 'step': 1}
    with pytest.raises(UnmatchedPattern) as caught:
        t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, save_dtype='bfloat16').save(state)
    (pattern,) = re.findall(r"cast_leaves='(.*)'", str(caught.value))
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=tmp_path, save_dtype='bfloat16', options=t5ckpt.CheckpointerOptions(cast_leaves=pattern)
    ) as checkpointer:
        checkpointer.save(state)
    leaves = t5ckpt.open_checkpoint(tmp_path)
    assert {leaves[f'{name}/params/w'].dtype for name in ('actor', 'critic')} == {BF16}
    assert {leaves[f'{name}/opt_state/mu/w'].dtype for name in ('actor', 'critic')} == {np.dtype(np.float32)}


@pytest.mark.parametrize('name', ['rewrite', 'export safetensors'])
def test_a_dry_run_says_so_too(name, run, tmp_path):
    with pytest.raises(UnmatchedPattern, match='cast_leaves'):
        CASTS[name](run, tmp_path / 'out', 'bfloat16', dry_run=True)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    'options',
    [
        lambda: t5ckpt.Checkpointer(
            nnx_state(), checkpoints_dir='run', options=t5ckpt.CheckpointerOptions(cast_leaves='model/.*')
        ),
        lambda: t5ckpt.load_t5x_checkpoint('run', options=t5ckpt.CheckpointerOptions(cast_leaves='model/.*')),
        lambda: ConvertOptions(cast_leaves='model/.*'),
    ],
)
def test_cast_leaves_without_a_dtype_is_an_error(options):
    with pytest.raises(ValueError, match=r"cast_leaves='model/\.\*' has no effect without (save_|restore_|)dtype"):
        options()


def test_a_restore_casts_what_the_template_has_although_none_of_it_is_in_the_checkpoint(tmp_path):
    with t5ckpt.Checkpointer({'opt': KERNEL}, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save({'opt': KERNEL}, step=1)
    template = {'params': KERNEL, 'opt': KERNEL}
    with t5ckpt.Checkpointer(template, checkpoints_dir=tmp_path, restore_dtype='bfloat16') as checkpointer:
        assert checkpointer.restore(fallback_state={'params': KERNEL})['opt'].dtype == np.float32


def test_restore_dtype_may_be_set_later_as_in_t5x(run):
    checkpointer = t5ckpt.Checkpointer(
        nnx_state(),
        checkpoints_dir=run,
        restore_dtype='float16',
        options=t5ckpt.CheckpointerOptions(cast_leaves='model/.*'),
    )
    checkpointer.restore_dtype = jnp.bfloat16
    assert checkpointer.restore()['model']['dense']['kernel'].dtype == BF16
    checkpointer.restore_dtype = None
    assert checkpointer.restore()['model']['dense']['kernel'].dtype == np.float32


def without_optimizer(convert):
    def call(run, out):
        (run / 'checkpoint.flax').write_bytes(serialization.to_bytes(nnx_state(2)))
        return convert(run, out, ConvertOptions(leave=t5ckpt.OPTIMIZER, step=2))

    return call


@pytest.mark.parametrize(
    'convert',
    [
        t5ckpt.copy_checkpoint,
        lambda run, out, options: t5ckpt.convert_checkpoint('to-orbax', run, out, options),
        lambda run, out, options: t5ckpt.convert_checkpoint('flax', run / 'checkpoint.flax', out, options),
    ],
    ids=['rewrite', 'orbax', 'flax'],
)
def test_an_optimizer_that_is_not_found_is_an_error(convert, run, tmp_path):
    with pytest.raises(UnmatchedPattern, match=r'leave=.*param_states.*matches no leaf, such as '):
        without_optimizer(convert)(run, tmp_path / 'out')


def test_an_optimizer_that_tensorflow_has_not_is_an_error():
    tensors = {'global_step': np.int32(1), 'decoder/w': KERNEL}
    rules = t5ckpt.CheckpointTranslator()
    rules.add(r'(.*)')(lambda opts, key, value, name: (name, value))
    with pytest.raises(UnmatchedPattern, match=r'leave=.*matches no leaf, such as global_step, decoder/w'):
        tf_leaves(TfCheckpoint('model.ckpt-1', tensors), ConvertOptions(translator=rules, leave=t5ckpt.OPTIMIZER))


def test_the_command_line_casts_the_leaves_of_its_options(run, tmp_path):
    _, error = cli('cp', run, tmp_path / 'a', '--save-dtype', 'bfloat16', code=1)
    assert "the leaves to cast: cast_leaves='model/.*'." in error
    cli('cp', run, tmp_path / 'a', '--save-dtype=bfloat16', '--cast-leaves=model/.*')
    assert t5ckpt.load_t5x_checkpoint(tmp_path / 'a')['model']['dense']['kernel'].dtype == BF16
    _, error = cli('convert', 'to-safetensors', run, tmp_path / 'x.safetensors', '--cast-leaves=model/.*', code=2)
    assert 'has no effect without' in error


def test_cast_leaves_is_a_regular_expression():
    with pytest.raises(ValueError, match=r'cast_leaves.* a regular expression'):
        t5ckpt.Checkpointer(
            nnx_state(),
            checkpoints_dir='run',
            restore_dtype='bfloat16',
            options=t5ckpt.CheckpointerOptions(cast_leaves='('),
        )


# --- which step is meant -----------------------------------------------------------------------------------------------

# By verb: whether --step names the step to work on ('one', 'several', or ''), and whether --as-step names the one to write.
STEP_RULES = {
    'best': ('', False),
    'cat': ('one', False),
    'convert': ('one', True),
    'cp': ('one', True),
    'diff': ('', False),
    'ls': ('', False),
    'pin': ('', False),
    'prune': ('', False),
    'report': ('several', False),
    'rm': ('', False),
    'show': ('one', False),
    'stats': ('one', False),
    'unpin': ('', False),
    'verify': ('one', False),
}


def verbs():
    """Every command by its words, with its options that are shown."""
    for name, command in intent_table.commands():
        shown = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
        yield name, {option: param for param in shown for option in param.opts}


def test_one_rule_says_in_every_verb_which_step_is_meant():
    found = {}
    for name, options in verbs():
        step, as_step = options.get('--step'), options.get('--as-step')
        found[name] = ('' if step is None else 'several' if step.multiple else 'one', as_step is not None)
        assert step is None or step.help.startswith('Step of the run')
        assert as_step is None or as_step.help.startswith('Step to write')
        others = [option for option in options if 'step' in option and option not in ('--step', '--as-step')]
        assert others == (['--keep-step'] if name == 'prune' else [])
    assert found == STEP_RULES


@pytest.mark.parametrize(
    ('words', 'cure'),
    [
        (['prune', 'run', '--step', '1'], '--keep-step'),
        (['convert', 'safetensors', 'x', 'run', '--step', '1'], '--as-step'),
        (['convert', 'hf', 'x', 'run', '--step=1'], '--as-step'),
        (['convert', 'tf', 'x', 'run', '--step', '1'], '--as-step'),
        (['convert', 'to-orbax', 'run', 'x', '--as-step', '1'], '--step'),
        (['rm', 'run'], 't5ckpt rm PATH STEP'),
    ],
)
def test_a_step_that_means_nothing_there_is_an_error_that_says_what_to_write(words, cure):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert cure in ' '.join(done.output.split())


def test_as_step_names_the_step_to_write(files, tmp_path):
    words = ['convert', 'safetensors', str(files / 'x.safetensors'), str(tmp_path / 'run'), '--as-step', '7']
    assert CliRunner().invoke(app, words).exit_code == 0
    assert t5ckpt.all_steps(tmp_path / 'run') == [7]


def rm(*words, code=0):
    done = CliRunner().invoke(app, ['rm', *map(str, words)], standalone_mode=False)
    if done.exception is not None:
        return done.exception
    assert done.return_value == code, done.output
    return done.output


def test_rm_deletes_the_steps_it_is_given_and_says_why_not(run):
    t5ckpt.pin_checkpoint(run / 'checkpoint_1', 'in the paper')
    assert 'delete  requested' in rm(run, 2, '--dry-run')
    text = rm(run, 1, 2, '--yes', code=1)
    assert 'keep    pinned: in the paper' in text
    assert '--pinned' in text
    assert t5ckpt.all_steps(run) == [1, 2], 'one that stays stays with all others'
    assert 'pass --yes' in str(rm(run, 2))
    with hold(open_storage(run), 2, 60, time.time):
        assert 'held by a reader' in rm(run, 2, '--yes', code=1)
    assert json.loads(rm(run / 'checkpoint_2', '--yes', '--json'))['deleted'] == [2]
    assert isinstance(rm(run, 2, '--yes'), CheckpointNotFoundError)
    rm(run, 1, '--pinned', '--yes')
    assert list(run.iterdir()) == []


def test_a_step_that_is_kept_is_an_error_of_the_library(run):
    t5ckpt.pin_checkpoint(run / 'checkpoint_1')
    with pytest.raises(StepKeptError, match=r'checkpoint_1 is pinned, so it was not deleted\. Unpin it first'):
        delete_step(open_storage(run), 1, time.time)


@pytest.mark.parametrize('kind', ['file', 'memory'])
def test_a_deletion_that_the_storage_refuses_leaves_the_step_whole_or_gone(kind, tmp_path):
    fails = 0
    for index in range(40):
        storage = open_storage(tmp_path / str(index) if kind == 'file' else f'memory://rm-{index}')
        with t5ckpt.Checkpointer(
            nnx_state(), checkpoints_dir=storage, options=t5ckpt.CheckpointerOptions(inline_bytes=0)
        ) as checkpointer:
            checkpointer.save(nnx_state(1))
        try:
            delete_step(FaultyStorage(storage, index), 1, time.time)
        except StorageError:
            fails += 1
            assert steps_in(storage) == [] or t5ckpt.verify(storage.url('checkpoint_1')).ok
        else:
            assert steps_in(storage) == []
    assert 0 < fails < 40


# --- what is asked for cannot be done here -----------------------------------------------------------------------------


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """A run with one of each kind of leaf, and what it was exported to."""
    root = tmp_path_factory.mktemp('files')
    state = {'params': {'w': KERNEL}, 'count': 3, 'note': 'text', 'step': np.int32(1)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=root / 'run') as checkpointer:
        checkpointer.save(state)
    t5ckpt.convert_checkpoint('to-safetensors', root / 'run', root / 'x.safetensors')
    np.save(root / 'x.npy', KERNEL)
    (root / 'x.pt').write_bytes(b'PK')
    return root


@pytest.mark.parametrize(
    ('words', 'shown'),
    [
        (['show', '{}'], r'w +float32 +\(6, 8\)'),
        (['show', '{}', '--grep', '.*kernel|.*w', '--json'], '"name": "params/w"'),
        (['cat', '{}', 'params/w[0, :2]'], r'\[0\. 1\.\]'),
        (['stats', '{}'], r'params/w +48'),
        (['diff', '{}', '{}'], '0 leaves differ, 3 the same'),
    ],
    ids=lambda value: value[0],
)
def test_the_command_line_looks_into_a_file_just_exported(words, shown, files, capsys):
    with pytest.raises(SystemExit) as ended:
        run_verb([word.format(files / 'x.safetensors') for word in words])
    assert re.search(shown, capsys.readouterr().out)
    assert ended.value.code == 0


REFUSED = [
    (['cat', '{}/run', 'params/w', '--npy', '--json'], 2, '--npy and --json exclude each other'),
    (['cat', '{}/run', 'note', '--npy'], 2, 'not an array'),
    (['cat', '{}/run', 'note[:2]'], 2, 'not an array'),
    (['convert', 'to-safetensors', '{}/run', '-'], 3, 'not written to standard output'),
    (['convert', 'to-orbax', '{}/run', '-'], 3, 'not written to standard output'),
    *(
        ([verb, '{}/x.safetensors', *more], 3, 'is a safetensors file, not a checkpoint: .* t5ckpt convert safetensors')
        for verb, *more in (
            ['verify'],
            ['cp', '{}/new'],
            ['pin'],
        )
    ),
    (['show', '{}/x.npy'], 3, 'load it with numpy.load'),
    (['show', '{}/x.pt'], 3, 'needs pickle'),
]


@pytest.mark.parametrize(('words', 'code', 'message'), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_done_is_refused(words, code, message, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_verb([word.format(files) for word in words])
    assert ended.value.code == code
    assert re.search(message, ' '.join(capsys.readouterr().err.split()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('directory', ['gs://bucket/run', 's3://bucket/run', 'memory://run'])
def test_event_files_are_local(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedFormatError, match='needs a local file system'):
        MetricWriter(directory)
    assert list(tmp_path.iterdir()) == []


# --- options that have no effect -----------------------------------------------------------------------------------------


def ended_early(options):
    with t5ckpt.Checkpointer(
        nnx_state(), checkpoints_dir='memory://asked-not', **with_options(**options)
    ) as checkpointer:
        checkpointer.save(nnx_state())
        return 1 / 0


def test_a_policy_that_is_asked_causes_no_warning():
    ways = {
        'maybe': lambda checkpointer: checkpointer.maybe_save(1, nnx_state()),
        'should': lambda checkpointer: checkpointer.should_save(1) and checkpointer.save(nnx_state()),
        'reached': lambda checkpointer: checkpointer.reached_preemption(1) or checkpointer.save(nnx_state()),
        'best': lambda checkpointer: checkpointer.save(nnx_state()) and checkpointer.best_step('loss', 'min'),
    }
    for name, way in ways.items():
        place = f'memory://asked-{name}'
        options = {'save_policy': t5ckpt.SaveEvery(1), 'preempted': lambda: False}
        with t5ckpt.Checkpointer(nnx_state(), checkpoints_dir=place, **with_options(**options)) as checkpointer:
            way(checkpointer)
        assert t5ckpt.all_steps(place) == [1]
    # A loop that an error ends may not have come to it.
    with pytest.raises(ZeroDivisionError):
        ended_early(options)


@pytest.mark.parametrize(
    'words',
    [
        ['prune', 'run', '--keep', '1', '--mode', 'min'],
        ['prune', 'run', '--keep', '1', '--keep-best', '2'],
        ['show', 'run', '--depth', '1', '--sort', 'size'],
        ['show', 'run', '--depth', '1', '--json'],
        ['diff', 'run', 'run', '--top', '1', '--no-values'],
    ],
    ids=' '.join,
)
def test_words_that_another_word_needs_are_an_error(words, run, monkeypatch):
    monkeypatch.chdir(run.parent)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert next(word for word in reversed(words) if word.startswith('--')) in done.output
    assert t5ckpt.all_steps(run) == [1, 2]


@pytest.mark.parametrize(
    ('url', 'options', 'name'),
    [
        ('s3://bucket/run', {'anonymous': True, 'profile': 'p'}, 'profile'),
    ],
)
def test_a_storage_option_that_another_one_switches_off_is_an_error(url, options, name):
    with pytest.raises(ValueError, match=f'{name}=.* has no effect with'):
        open_storage(url, options)


def test_a_word_or_a_time_that_means_nothing_is_an_error(run):
    with pytest.raises(ValueError, match=r"what must be one of .*'values'.*, got 'valeus'"):
        t5ckpt.diff(run / 'checkpoint_1', run / 'checkpoint_2').only('valeus')
    for wrong in ({'timeout': -1}, {'poll_seconds': -1}):
        with pytest.raises(ValueError, match=f'{next(iter(wrong))}=-1.* below 0'):
            t5ckpt.checkpoints_iterator(run, **wrong)


def test_a_notice_without_a_signal_is_an_error():
    with pytest.raises(ValueError, match='signals is empty'):
        t5ckpt.PreemptionNotice(())


def test_a_window_that_no_step_came_to_is_logged(tmp_path, caplog):
    caplog.set_level('INFO', 't5ckpt')
    with ProfilerWindow(tmp_path, start=10) as window:
        window.before(9)
    assert caplog.messages == ['t5ckpt: no profile: the run had none of the steps 10 to 12']


# --- what was not done ---------------------------------------------------------------------------------------------------


def verb(*words):
    return CliRunner().invoke(app, [str(word) for word in words], standalone_mode=False)


def test_steps_that_were_not_done_are_reported(run, tmp_path):
    done = verb('show', run, '--grep', 'kernl', '--json')
    assert done.return_value == 1
    assert json.loads(done.stdout)['unmatched'] == ['kernl']
    assert json.loads(verb('show', run, '--json').stdout)['unmatched'] == []
    assert "--grep 'kernl' matches no leaf" in done.stderr
    t5ckpt.pin_checkpoint(run / 'checkpoint_2')
    assert 'left out: PINNED' in verb('cp', run, tmp_path / 'a').output
    assert json.loads(verb('cp', run, tmp_path / 'b', '--json').output)['left_out'] == ['PINNED']


@pytest.mark.parametrize('more', [[], ['--dry-run'], ['--json'], ['--keep', '1'], ['--keep-step', '1']], ids=' '.join)
def test_a_step_to_keep_that_is_not_there_is_refused_and_nothing_is_deleted(run, more):
    with t5ckpt.Checkpointer(nnx_state(), checkpoints_dir=run) as checkpointer:
        checkpointer.save(nnx_state(3))
    words = ['prune', str(run), '--yes', '--keep-step', '9', '--keep-step', '7', *more]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert 'the run has no steps 7, 9; it has 1, 2, 3. Nothing was deleted.' in ' '.join(done.output.split())
    assert t5ckpt.all_steps(run) == [1, 2, 3]


@pytest.mark.parametrize('words', [['rm', '--yes'], ['pin'], ['unpin']], ids=' '.join)
def test_of_a_list_with_a_step_that_is_not_there_nothing_is_done(run, words):
    t5ckpt.pin_checkpoint(run / 'checkpoint_2')
    before = sorted(run.rglob('*'))
    done = verb(words[0], f'{run}@1', f'{run}@9', *words[1:])
    assert isinstance(done.exception, CheckpointNotFoundError)
    assert re.search(r'9.*1, 2', str(done.exception))
    assert sorted(run.rglob('*')) == before


def test_a_step_of_another_layout_that_stays_is_logged_once(tmp_path, caplog):
    caplog.set_level('INFO', 't5ckpt')
    (tmp_path / 'checkpoint_1').write_bytes(serialization.to_bytes(nnx_state(1)))
    with t5ckpt.Checkpointer(nnx_state(), checkpoints_dir=tmp_path, keep=1) as checkpointer:
        for step in (2, 3, 4):
            checkpointer.save(nnx_state(step))
    told = [message for message in caplog.messages if 'regardless of the keep policy' in message]
    assert [message.rpartition(': ')[2] for message in told] == ['in the layout of flax']
    assert t5ckpt.all_steps(tmp_path) == [1, 4]


def test_a_step_that_a_pin_keeps_against_the_policy_is_logged_once(tmp_path, caplog):
    caplog.set_level('INFO', 't5ckpt')
    with t5ckpt.Checkpointer(nnx_state(), checkpoints_dir=tmp_path, keep=1) as checkpointer:
        checkpointer.save(nnx_state(1))
        t5ckpt.pin_checkpoint(tmp_path / 'checkpoint_1')
        for step in (2, 3, 4):
            checkpointer.save(nnx_state(step))
        with hold(open_storage(checkpointer.checkpoints_dir), 4, 60, time.time):
            checkpointer.save(nnx_state(5))
    told = [message for message in caplog.messages if 'regardless of the keep policy' in message]
    assert [message.rpartition(': ')[2] for message in told] == ['pinned', 'held by a reader']
    assert t5ckpt.all_steps(tmp_path) == [1, 4, 5]


# --- every parameter has an answer ---------------------------------------------------------------------------------------


def test_every_public_parameter_has_an_answer():
    common, used, missing = intent_table.rows(intent_table.COMMON), {}, []
    for name, function in intent_table.public_callables():
        own = intent_table.rows(intent_table.PYTHON.get(name, ''))
        parameters = [each for each in inspect.signature(function).parameters if each != 'self']
        missing += [f'{name}: {each}' for each in parameters if each not in own and each not in common]
        used[name] = set(parameters)
    assert not missing, 'say in tests/support/intent_table.py what is said when these have no effect:\n' + '\n'.join(
        missing
    )
    stale = [
        f'{name}: {each}'
        for name, text in intent_table.PYTHON.items()
        for each in intent_table.rows(text)
        if each not in used.get(name, ())
    ]
    assert stale == []


def test_every_option_of_a_verb_has_an_answer():
    common, missing, stale = intent_table.rows(intent_table.COMMON_OPTIONS), [], []
    for name, command in intent_table.commands():
        own = intent_table.rows(intent_table.VERBS.get(name, ''))
        words = {each.opts[0] for each in command.params if not getattr(each, 'hidden', False)}
        missing += [f'{name}: {word}' for word in words - own.keys() - common.keys()]
        stale += [f'{name}: {word}' for word in own.keys() - words]
    assert (missing, stale) == ([], [])

"""A name, a pattern or a word that matches nothing is answered with what is near it."""

import ast
import dataclasses
import re

import numpy as np
import pytest
from click.testing import CliRunner
from support.options import with_options

import t5ckpt
from t5ckpt.cli.app import app, run as run_verb
from t5ckpt.core.leaf_patterns import meant_pattern

KERNEL = np.ones((2, 3), np.float32)
STATE = {
    'params': {'hidden': {'kernel': KERNEL}, 'embed': KERNEL},
    'opt_state': {'mu': {'hidden': {'kernel': KERNEL}}},
    'step': np.int32(1),
}


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp('near') / 'run'
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=place) as checkpointer:
        checkpointer.save(STATE, metrics={'eval/loss': 0.5})
    t5ckpt.convert_checkpoint('to-safetensors', place, place.parent / 'a.safetensors')
    return place


def started(run, **options):
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=run.parent / 'new') as checkpointer:
        return t5ckpt.restore_or_init(checkpointer, lambda: STATE, initial_checkpoint=t5ckpt.WarmStart(run, **options))


def restored(run, **options):
    restores = {name: options.pop(name) for name in ('resize',) if name in options}
    return t5ckpt.Checkpointer(STATE, checkpoints_dir=run, **with_options(**options)).restore(**restores)


@pytest.mark.parametrize(
    ('call', 'meant'),
    [
        (lambda run: t5ckpt.open_checkpoint(run).select('parms/**'), "'params/.*'"),
        (lambda run: t5ckpt.open_checkpoint(run)['parms/hiden/*'], "'params/hidden/[^/]*'"),
        (lambda run: started(run, leave='params/hiden'), "'params/hidden/.*'"),
        (lambda run: started(run, take='parms/.*'), "'params/.*'"),
        (lambda run: started(run, rename=[('parms/(.*)', r'params/\1')]), "'params/(.*)'"),
        (lambda run: restored(run, resize='parms/.*'), "'params/.*'"),
        (lambda run: restored(run, restore_dtype='bfloat16', cast_leaves='opt_stat/.*'), "cast_leaves='opt_state/.*'"),
        (
            lambda run: t5ckpt.copy_checkpoint(run, run.parent / 'x', t5ckpt.ConvertOptions(leave=('optstate/.*',))),
            "'opt_state/.*'",
        ),
        (
            lambda run: t5ckpt.convert_checkpoint(
                'to-safetensors', run, run.parent / 'x', t5ckpt.ConvertOptions(take='parms/hiden/.*')
            ),
            "'params/hidden/.*'",
        ),
        (lambda run: t5ckpt.open_run(run).best_step('eval/los', 'min'), "'eval/loss'"),
        (lambda run: t5ckpt.open_checkpoint(run).parms, "'params'"),
        (lambda run: t5ckpt.open_chekpoint, 'open_checkpoint'),
    ],
)
def test_a_library_call_names_what_is_meant(run, call, meant):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each of its own class
        call(run)
    text = caught.value.args[0]
    assert text.count(f'Did you mean {meant}') == 1, text


@pytest.mark.parametrize('keys', [('enc/cnn0', 'kernel'), ('enc/cnn0/kernel',), ('net/enc/cnn0', 'kernel')])
def test_a_pattern_for_keys_with_slashes_is_corrected(tmp_path, keys):
    """Haiku and ninjax have modules such as 'enc/cnn0', whose names are params/enc\\/cnn0/kernel."""
    state: dict[str, object] = {'params': {keys[0]: dict.fromkeys(keys[1:], KERNEL) or KERNEL}}
    below = 'params/net/enc' if keys[0].startswith('net') else 'params/enc'
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save(state, step=1)
        with pytest.raises(KeyError, match='Did you mean') as caught:
            t5ckpt.open_checkpoint(tmp_path)[f'{below}/**']
        glob = ast.literal_eval(re.search("Did you mean ('.*')", caught.value.args[0])[1])
        assert len(t5ckpt.open_checkpoint(tmp_path)[glob]) == 1
        warm = t5ckpt.WarmStart(tmp_path, take=f'{below}/.*')
        with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'new') as new:
            with pytest.raises(ValueError, match='Did you mean') as caught:
                t5ckpt.restore_or_init(new, lambda: state, initial_checkpoint=warm)
            pattern = ast.literal_eval(re.search("Did you mean ('.*')", caught.value.args[0])[1])
            t5ckpt.restore_or_init(new, None, initial_checkpoint=dataclasses.replace(warm, take=pattern))
    assert CliRunner().invoke(app, ['stats', str(tmp_path), glob]).exit_code == 0


@pytest.mark.parametrize(
    ('words', 'code', 'meant'),
    [
        ('stats {} parms/**', 1, "'params/.*'"),
        ('diff {} {} parms/**', 1, "'params/.*'"),
        ('stats {} opt_stat', 1, "'opt_state/.*'"),
        ('show {} --grep .*kernl', 1, "'.*kernel'"),
        ('cp {} {}.new --leave parms/.*', 1, "'params/.*'"),
        ('cp {} {}.new --save-dtype bfloat16 --cast-leaves parms/.*', 1, "cast_leaves='params/.*'"),
        ('convert to-safetensors {} {}.safetensors --take parms/embed', 1, "'params/embed'"),
        ('best {} eval/los --mode min', 2, "'eval/loss'"),
        ('prune {} --best eval/los --mode min', 2, "'eval/loss'"),
        ('ls {} --jsn', 2, "'--json'"),
        ('lss {}', 2, "'ls'"),
        ('cp {} {}.new --save-dtype bflot16', 2, "'bfloat16'"),
    ],
)
def test_a_verb_names_what_is_meant(run, words, code, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        run_verb([word.format(run) for word in words.split()])
    shown = ' '.join(capsys.readouterr().err.split())
    assert (ended.value.code, shown.count(f'Did you mean {meant}')) == (code, 1), shown


def test_a_correction_matches():
    names = ['params/hidden/kernel', 'step']
    assert meant_pattern('parms/hiden/kernel', names) == " Did you mean 'params/hidden/kernel'?"
    assert meant_pattern('other/bias', names) == meant_pattern('x', []) == ''


@pytest.mark.parametrize(
    ('words', 'text'),
    [
        (
            'show {run}@best:eval/loss:lowest',
            "no step has the metric 'eval/loss:lowest'; there are: eval/loss.",
        ),
        ('show {run}@best:eval/los:min', "no step has the metric 'eval/los'"),
        ('stats {file}@3', '{file}@3 names a step, but {file} is a file, which has no steps. Pass {file}.'),
        (
            'cat {file}@latest step',
            '{file}@latest names a step, but {file} is a file, which has no steps. Pass {file}.',
        ),
    ],
)
def test_the_part_of_a_name_that_is_wrong_is_blamed(run, words, text, capsys):
    places = {'run': run, 'file': run.parent / 'a.safetensors'}
    with pytest.raises(SystemExit) as ended:
        run_verb([word.format(**places) for word in words.split()])
    assert ended.value.code == 2
    assert text.format(**places) in ' '.join(capsys.readouterr().err.split())

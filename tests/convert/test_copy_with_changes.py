"""Copies with changes: what is dropped, cast, renamed; and that what stays is linked."""

import json
import os
import re
import uuid

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden as cases
from support.bits import assert_same, random_bits
from support.facts import facts_of
from support.golden import flatten

import t5ckpt
from t5ckpt import errors
from t5ckpt.convert import ConvertOptions
from t5ckpt.convert.copy import copy_checkpoint as rewrite

RNG = np.random.default_rng(3)
PARAMS = {'dense': {'kernel': RNG.standard_normal((300, 200), np.float32), 'bias': np.ones(200, jnp.bfloat16)}}


def state_of(scale, step):
    params = jax.tree.map(lambda leaf: leaf * np.asarray(scale, leaf.dtype), PARAMS)
    return {
        'params': params | {'steps': np.array([step])},
        'opt_state': [{'mu': jax.tree.map(np.zeros_like, PARAMS), 'ema': jax.tree.map(lambda leaf: leaf * 2, params)}],
        'none': None,
        'count': 5,
        'step': np.int32(step),
    }


@pytest.fixture
def run(tmp_path):
    """Steps 1, 2 and 3 of a run, in chunks."""
    with t5ckpt.Checkpointer(
        state_of(1, 1),
        checkpoints_dir=tmp_path / 'run',
        options=t5ckpt.CheckpointerOptions(chunk_bytes=2**16, inline_bytes=64, reuse_unchanged=False),
    ) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state_of(step, step))
    return tmp_path / 'run'


def loaded(path):
    return flatten(t5ckpt.load_t5x_checkpoint(path))


def links_of(path):
    return {file.stat().st_nlink for file in path.glob('*/[0-9]*')}


def test_a_copy_is_made_of_links(run, tmp_path):
    done = rewrite(run, tmp_path / 'copy')
    assert (done.step, done.dropped) == (3, ())
    before, after = loaded(run), loaded(tmp_path / 'copy')
    assert set(after) == set(before)
    for name, leaf in before.items():
        assert_same(after[name], leaf, name)
    assert type(after['count']) is int
    assert links_of(tmp_path / 'copy' / 'checkpoint_3') == {2}
    assert t5ckpt.verify(tmp_path / 'copy').ok


@pytest.mark.slow
def test_every_golden_checkpoint_is_copied_to_the_bit(golden, tmp_path):
    for number, case in enumerate(cases.CASES):
        rewrite(case.step_dir(golden), tmp_path / str(number), ConvertOptions(step=1))
        flat = loaded(tmp_path / str(number))
        wanted = case.expected(golden)
        assert set(flat) == {*wanted.arrays, *wanted.none_keys, *wanted.empty_keys}, case.name
        for name, leaf in wanted.arrays.items():
            assert_same(flat[name], leaf, f'{case.name} {name}')


def test_the_iterators_state_goes_along(golden, tmp_path):
    case = cases.by_name('case07')
    rewrite(case.step_dir(golden), tmp_path)
    kept = {path.name: path.read_bytes() for path in case.step_dir(golden).glob('train_ds-*')}
    assert kept
    for name, data in kept.items():
        assert (tmp_path / f'checkpoint_{case.step}' / name).read_bytes() == data
        listed = json.loads((tmp_path / f'checkpoint_{case.step}' / 'integrity.0.json').read_text())['files']
        assert listed[name][0] == len(data)


def test_without_the_optimizer_and_in_bfloat16(run, tmp_path):
    done = rewrite(run, tmp_path / 'copy', ConvertOptions(leave=t5ckpt.OPTIMIZER, save_dtype='bfloat16'))
    assert len(done.dropped) == 4
    leaves = loaded(tmp_path / 'copy')
    assert set(leaves) == {'params/dense/kernel', 'params/dense/bias', 'params/steps', 'none', 'count', 'step'}
    assert_same(leaves['params/dense/kernel'], (PARAMS['dense']['kernel'] * np.float32(3)).astype(jnp.bfloat16))
    assert leaves['params/steps'].dtype == np.int64


def test_keys_of_any_implementation_are_copied(tmp_path):
    threefry = jax.extend.random.threefry_prng_impl
    functions = {name: getattr(threefry, name) for name in ('seed', 'split', 'random_bits', 'fold_in', 'key_shape')}
    mine = jax.extend.random.define_prng_impl(**functions, name='mine', tag='mine')
    keys = {'one': jax.random.key(3, impl=mine), 'many': jax.random.split(jax.random.key(3, impl='rbg'), (50, 100))}
    with t5ckpt.Checkpointer(keys, checkpoints_dir=tmp_path / 'run') as ck:
        ck.save(keys, step=1)
    t5ckpt.copy_checkpoint(tmp_path / 'run', tmp_path / 'copy', ConvertOptions(rename=[('(.*)', r'rng/\1')]))
    template = jax.eval_shape(lambda: {'rng': keys})
    restored = t5ckpt.Checkpointer(template, checkpoints_dir=tmp_path / 'copy').restore()['rng']
    assert all((restored[name] == keys[name]).all() for name in keys)
    chunks = [tmp_path / 'run/checkpoint_1/many/0.0.0', tmp_path / 'copy/checkpoint_1/rng.many/0.0.0']
    assert os.path.samefile(*chunks)


def test_renamed_leaves_are_linked(run, tmp_path):
    rename = [(r'params/(.*)', r'target/\1'), ('step', 'state/step'), (re.compile(r'opt_state/0/(.*)'), r'state/\1')]
    done = rewrite(
        run,
        tmp_path / 'copy',
        ConvertOptions(rename=rename, leave=['none', re.compile('opt_state/.*/EMA/.*', re.IGNORECASE)]),
    )
    assert done.mapped['params/dense/kernel'] == 'target/dense/kernel'
    leaves = loaded(tmp_path / 'copy')
    assert set(leaves) == {
        *('target/dense/kernel', 'target/dense/bias', 'target/steps', 'count', 'state/step'),
        *('state/mu/dense/kernel', 'state/mu/dense/bias'),
    }
    assert_same(leaves['target/dense/kernel'], loaded(run)['params/dense/kernel'])
    assert links_of(tmp_path / 'copy' / 'checkpoint_3') == {2}


@pytest.mark.parametrize(
    ('changes', 'says'),
    [
        (ConvertOptions(rename=[('parms/.*', 'x')]), r"'parms/\.\*'.*matches no leaf"),
        (ConvertOptions(leave=['kernel']), 'matches no leaf'),
        (
            ConvertOptions(rename=[('params/dense/.*', 'params/w')]),
            'params/dense/bias and params/dense/kernel would become',
        ),
        (ConvertOptions(rename=[('params/dense/kernel', 'params/dense/bias')]), 'would become'),
        (ConvertOptions(rename=[('params/dense/kernel', '')]), 'would become'),
        (ConvertOptions(leave=['.*']), 'would have no leaves'),
    ],
)
def test_changes_that_cannot_be_made(run, tmp_path, changes, says):
    with pytest.raises(errors.TreeMismatchError, match=says):
        rewrite(run, tmp_path / 'copy', changes)
    assert not (tmp_path / 'copy').exists()


def test_a_leaf_that_becomes_a_scope_of_others(run, tmp_path):
    with pytest.raises(errors.TreeMismatchError, match='below the new name of step'):
        rewrite(run, tmp_path / 'copy', ConvertOptions(rename=[('step', 'params')]))


def test_moving_averages_as_parameters(run, tmp_path):
    scope = 'opt_state/0/ema/'
    rewrite(run, tmp_path / 'ema', ConvertOptions(take=f'{scope}.*', rename=[(f'{scope}(.*)', r'params/\1')]))
    leaves = loaded(tmp_path / 'ema')
    assert set(leaves) == {'params/dense/kernel', 'params/dense/bias'}
    assert_same(leaves['params/dense/kernel'], loaded(run)['opt_state/0/ema/dense/kernel'])
    assert links_of(tmp_path / 'ema' / 'checkpoint_3') == {2}


def test_from_and_to_places_without_links(run, tmp_path):
    place = f'memory://{uuid.uuid4().hex}/run'
    rewrite(run, place, ConvertOptions(step=8))
    back = rewrite(place, tmp_path / 'back')
    assert back.step == 8
    for name, leaf in loaded(run).items():
        assert_same(loaded(tmp_path / 'back')[name], leaf, name)


def test_damage_is_not_copied(run, tmp_path):
    victim = run / 'checkpoint_3' / 'params.dense.kernel' / '0.0'
    data = victim.read_bytes()
    victim.write_bytes(data[:100] + bytes([data[100] ^ 4]) + data[101:])
    with pytest.raises(errors.CorruptCheckpointError, match=r'params/dense/kernel: .*0\.0'):
        rewrite(run, tmp_path / 'copy')
    assert list((tmp_path / 'copy').iterdir()) == []


@pytest.mark.parametrize('compression', [None, 'zstd'])
def test_damage_is_not_cast_or_encoded_into_something_whole(tmp_path, compression):
    state = {'params': {'w': np.arange(6144, dtype=np.float32).reshape(96, 64)}, 'step': np.int32(1)}
    options = t5ckpt.CheckpointerOptions(chunk_bytes=4096, inline_bytes=100, compression=compression)
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'bad', options=options) as ck:
        ck.save(state)
    chunks = sorted((tmp_path / 'bad' / 'checkpoint_1' / 'params.w').glob('[0-9]*'))
    # A whole chunk in another's place: it decodes, and its values are wrong.
    chunks[0].write_bytes(chunks[1].read_bytes())
    bad = tmp_path / 'bad'
    for changes in (ConvertOptions(save_dtype='bfloat16'), ConvertOptions(compression='gzip')):
        with pytest.raises(errors.CorruptCheckpointError, match='params'):
            rewrite(bad, tmp_path / 'copy', changes)
        assert not t5ckpt.all_steps(tmp_path / 'copy')
    with pytest.raises(errors.CorruptCheckpointError):
        t5ckpt.convert_checkpoint('to-safetensors', bad, tmp_path / 'model.safetensors')
    with pytest.raises(errors.CorruptCheckpointError):
        t5ckpt.convert_checkpoint('to-safetensors', bad, tmp_path / 'model.safetensors')
    with pytest.raises(errors.CorruptCheckpointError):
        t5ckpt.convert_checkpoint('to-orbax', bad, tmp_path / 'orbax' / '1')
    assert not (tmp_path / 'orbax' / '1').exists()
    assert not list(tmp_path.glob('model*'))


def test_the_facts_of_the_step_come_along(tmp_path):
    state = {'params': {'w': np.ones((64, 64), np.float32)}}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run', keep=3) as ck:
        ck.save(state, step=1, metrics={'loss': 0.5}, custom_metadata={'commit': 'abc'})
    rewrite(tmp_path / 'run', tmp_path / 'copy', ConvertOptions(step=9, save_dtype='bfloat16'))
    view = t5ckpt.open_checkpoint(tmp_path / 'copy')
    assert (view.metrics, view.custom_metadata) == ({'loss': 0.5}, {'commit': 'abc'})
    before, after = (json.loads(facts_of(tmp_path / name)) for name in ('run/checkpoint_1', 'copy/checkpoint_9'))
    assert all(after[name] == before[name] for name in ('created_unix', 'keep'))


@pytest.mark.parametrize(
    ('rename', 'says'),
    [(('params/(.*)', r'p/\2'), 'does not fit the pattern'), (('params/(.*)', r'\g<bad'), 'does not fit the pattern')],
)
def test_replacements_that_cannot_be_filled_in(rename, says):
    with pytest.raises(ValueError, match=says):
        ConvertOptions(rename=[rename])


def test_a_leaf_below_another(tmp_path):
    state = {'w': np.ones((64, 64), np.float32), 'note': 'text', 'empty': {}, 'x': np.float32(1)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run') as ck:
        ck.save(state, step=1)
    for rename in [('note', 'w/deep'), ('w', 'note/deep'), ('empty', 'w/deep'), ('x', 'w/deep')]:
        with pytest.raises(errors.TreeMismatchError, match='below the new name'):
            rewrite(tmp_path / 'run', tmp_path / 'copy', ConvertOptions(rename=[rename]))
    with pytest.raises(t5ckpt.errors.CheckpointNotFoundError, match='of a step'):
        rewrite(tmp_path / 'run', tmp_path / 'checkpoint_7')


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path):
    """A file of 64 MB is cast in slices: far fewer bytes are in flight."""
    big = {'params': {str(i): random_bits(RNG, (1024, 1024), np.int32).view(np.float32) for i in range(16)}}
    t5ckpt.Checkpointer(
        big, checkpoints_dir=tmp_path / 'run', options=t5ckpt.CheckpointerOptions(chunk_bytes=2**18)
    ).save(big, step=1)
    code = (
        'import resource, sys\n'
        'from t5ckpt import ConvertOptions, copy_checkpoint as rewrite\n'
        'before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n'
        'options = ConvertOptions(save_dtype="float64", concurrent_gb=0.004)\n'
        f'rewrite({str(tmp_path / "run")!r}, {str(tmp_path / "cast")!r}, options)\n'
        'print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n'
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 40
    assert os.path.isdir(tmp_path / 'cast' / 'checkpoint_1')

"""A damaged checkpoint: what is intact is copied, and nothing damaged gets new checksums unless that is asked for."""

import pathlib
import random

import numpy as np
import pytest
from support.cli import t5ckpt_cli
from support.damage import Iterator, flip

import t5ckpt
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError

RNG = random.Random(1)
STATE = {
    'params': {'w': np.arange(20_000, dtype=np.float32)},
    'opt': {'mu': np.ones(20_000, np.float32), 'nu': np.full(20_000, 2, np.float32)},
}


@pytest.fixture
def step(tmp_path):
    with t5ckpt.Checkpointer(STATE, dataset_iterator=Iterator(), checkpoints_dir=tmp_path / 'run') as ck:
        ck.save(STATE, step=1)
    return tmp_path / 'run' / 'checkpoint_1'


def one(step: pathlib.Path, pattern: str) -> pathlib.Path:
    (path,) = step.glob(pattern)
    return path


DAMAGE = {
    'another chunk': (lambda step: flip(one(step, 'opt.mu/0'), RNG), ['opt/mu']),
    'no chunk': (lambda step: one(step, 'opt.mu/0').unlink(), ['opt/mu']),
    'two leaves': (lambda step: [one(step, f'opt.{name}/0').unlink() for name in ('mu', 'nu')], ['opt/.*']),
    'no position': (lambda step: one(step, 'train_ds*').unlink(), ['train_ds.*']),
    'another position': (lambda step: flip(one(step, 'train_ds*'), RNG), ['train_ds.*']),
}


@pytest.mark.parametrize('damage', DAMAGE)
def test_a_copy_without_what_is_damaged(tmp_path, step, damage):
    spoil, dropped = DAMAGE[damage]
    spoil(step)
    assert not t5ckpt.verify(step, full=True).ok
    for changes in (t5ckpt.ConvertOptions(), t5ckpt.ConvertOptions(rename=[('params/(.*)', r'model/\1')])):
        with pytest.raises(CorruptCheckpointError):
            t5ckpt.copy_checkpoint(step, tmp_path / 'out', changes)
        assert t5ckpt.all_steps(tmp_path / 'out') == []
    t5ckpt_cli('cp', step, tmp_path / 'out', *(word for pattern in dropped for word in ('--leave', pattern)))
    assert t5ckpt.verify(tmp_path / 'out', full=True).ok
    loaded = t5ckpt.load_t5x_checkpoint(tmp_path / 'out')
    np.testing.assert_array_equal(loaded['params']['w'], STATE['params']['w'])
    assert [path.name for path in (tmp_path / 'out').glob('*/train_ds*')] == (
        [] if dropped == ['train_ds.*'] else ['train_ds-000-of-001.txt']
    )


@pytest.mark.parametrize('how', ['lost', 'another'])
def test_a_copy_without_the_list_of_checksums(tmp_path, step, how):
    listed = one(step, 'integrity.*.json')
    listed.unlink() if how == 'lost' else flip(listed, RNG)
    said = t5ckpt_cli('cp', step, tmp_path / 'out', '--leave', 'opt/.*', code=3)
    assert {'lost': 't5ckpt cp --trust-files', 'another': 'is damaged'}[how] in said
    t5ckpt_cli('cp', step, tmp_path / 'out', '--trust-files')
    assert t5ckpt.verify(tmp_path / 'out', full=True).ok
    with t5ckpt.Checkpointer(STATE, dataset_iterator=Iterator(), checkpoints_dir=tmp_path / 'out') as ck:
        np.testing.assert_array_equal(ck.restore()['opt']['nu'], STATE['opt']['nu'])


def test_a_damaged_manifest_is_not_trusted(tmp_path, step):
    flip(step / 'checkpoint', RNG)
    with pytest.raises((CorruptCheckpointError, CheckpointNotFoundError)):
        t5ckpt.copy_checkpoint(step, tmp_path / 'out', t5ckpt.ConvertOptions(trust_files=True))
    assert t5ckpt.all_steps(tmp_path / 'out') == []


def test_trusted_files_are_compared_while_the_lists_are_there(tmp_path, step):
    flip(one(step, 'opt.mu/0'), RNG)
    with pytest.raises(CorruptCheckpointError, match='opt/mu'), pytest.warns(t5ckpt.errors.NoEffectWarning):
        t5ckpt.copy_checkpoint(step, tmp_path / 'out', t5ckpt.ConvertOptions(trust_files=True))


def test_a_chunk_of_another_size_is_not_trusted(tmp_path, step):
    """Without its list of checksums."""
    one(step, 'integrity.*.json').unlink()
    one(step, 'opt.mu/0').write_bytes(b'xyz')
    with pytest.raises(CorruptCheckpointError, match=r'opt/mu: .* has 3 bytes, expected 80,000'):
        t5ckpt.copy_checkpoint(step, tmp_path / 'out', t5ckpt.ConvertOptions(trust_files=True))
    assert t5ckpt.all_steps(tmp_path / 'out') == []

"""The id that a run and its local directories share: what happens if the run's storage loses it, or has another one."""

import json
import os
import shutil

import numpy as np
import pytest
from support import forked
from support.options import with_options
from support.tiers import tier_of

import t5ckpt
from t5ckpt.errors import LocalDirError


def state(step):
    return {'w': np.full((16, 16), step, np.float32), 'step': np.int32(step)}


@pytest.fixture
def local(tmp_path):
    return tmp_path / 'local'


def checkpointer(run, local, **options):
    return t5ckpt.Checkpointer(state(0), checkpoints_dir=run, local=tier_of(local), **with_options(**options))


def id_of(local):
    return json.loads((local / '.t5ckpt' / 'tier.json').read_text())['id']


@pytest.mark.parametrize('what', ['the id', 'the whole directory'])
def test_an_id_that_is_lost_during_the_run_is_written_by_the_next_upload(run_dir, local, what):
    with checkpointer(run_dir, local) as ck:
        ck.save(state(1))
        ck.wait_until_persisted()
        if what == 'the id':
            (run_dir / '.t5ckpt' / 'run_id').unlink()
        else:
            # Another directory is mounted in its place.
            os.rename(run_dir, run_dir.with_name('before'))
        ck.save(state(2))
        ck.wait_until_persisted(2)
        assert (run_dir / '.t5ckpt' / 'run_id').read_text() == id_of(local)
    with checkpointer(run_dir, local) as ck:
        assert ck.restore()['step'] == 2


def test_an_id_that_is_lost_between_two_starts_is_written_by_the_next_upload(bucket, local):
    run = bucket.url()
    with checkpointer(run, t5ckpt.LocalTier(local, persist=t5ckpt.SaveAt({1}))) as ck:
        ck.save(state(1))
        ck.save(state(2))
    t5ckpt.storage.open_storage(run).delete_file('.t5ckpt/run_id')
    with checkpointer(run, local) as ck:
        assert ck.restore()['step'] == 2
        ck.save(state(3))
    assert bucket.raw(f'{run}/.t5ckpt/run_id').decode() == id_of(local)


@pytest.mark.parametrize('what', ['deleted', 'of other saves'])
def test_an_emptied_bucket_stops_neither_restart_nor_saves(run_dir, local, what):
    with checkpointer(run_dir, local) as ck:
        ck.save(state(1))
        ck.save(state(2))
    shutil.rmtree(run_dir)
    if what != 'deleted':
        t5ckpt.Checkpointer(state(0), checkpoints_dir=run_dir).save(state(1))
    with checkpointer(run_dir, local) as ck:
        assert ck.all_steps() == [1, 2]
        assert ck.restore()['step'] == 2
        ck.save(state(3))
        ck.wait_until_persisted(3)
        assert (run_dir / '.t5ckpt' / 'run_id').read_text() == id_of(local)


def test_a_save_after_a_listing_is_refused_too(run_dir, local, tmp_path):
    """Nothing of the earlier run is deleted by the retention of saves that would never be uploaded."""
    with checkpointer(run_dir, t5ckpt.LocalTier(local, persist=t5ckpt.SaveEvery(100))) as ck:
        ck.save(state(1))
    with checkpointer(run_dir, tmp_path / 'other') as ck:
        ck.save(state(2))
    with checkpointer(run_dir, t5ckpt.LocalTier(local, keep=1)) as ck:
        for action in (ck.all_steps, lambda: ck.save(state(3)), lambda: ck.save_async(state(4)), ck.latest_step):
            with pytest.raises(LocalDirError, match='another run at'):
                action()
    assert t5ckpt.all_steps(local) == [1]


def test_ls_says_that_the_local_steps_are_of_an_earlier_run(run_dir, local, tmp_path):
    with checkpointer(run_dir, t5ckpt.LocalTier(local, persist=t5ckpt.SaveEvery(100))) as ck:
        ck.save(state(1))
    with checkpointer(run_dir, tmp_path / 'other') as ck:
        ck.save(state(2))
    text = forked.run(None, 'ls', local).stderr
    assert f'the local steps are of another run: their run has the id {id_of(local)}' in text

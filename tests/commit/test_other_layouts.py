"""Steps of Orbax and Flax in a run: no keep policy counts or deletes them, and ``t5ckpt rm`` deletes one by hand."""

import concurrent.futures
import json
import os
import time

import flax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints as flax_checkpoints
from support.cli import t5ckpt_cli
from support.options import with_options

import t5ckpt
from t5ckpt import errors
from t5ckpt.commit.deletion import find_step, hide
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.holds import hold
from t5ckpt.commit.markers import HIDE, Marker
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage

STATE = {'w': np.arange(6000, dtype=np.float32), 'a': {'b': np.ones(2, np.float32)}, 'count': np.int32(0)}


def open_ck(run, **options):
    return t5ckpt.Checkpointer(STATE, checkpoints_dir=run, **with_options(**options))


def tree(run, step, **options):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(run / f'checkpoint_{step}' / 'state', STATE)


def zarr(run, step):
    tree(run, step, use_ocdbt=False)


def zarr3(run, step):
    tree(run, step, use_ocdbt=False, use_zarr3=True)


def items(run, step):
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics['loss'])
    save = ocp.args.Composite(
        state=ocp.args.StandardSave({'w': jnp.ones(3)}),
        config=ocp.args.JsonSave({'layers': 2}),
    )
    with ocp.CheckpointManager(run, options=options) as each:
        each.save(step, args=save, metrics={'loss': 1.0})


def prefixed(run, step):
    options = ocp.CheckpointManagerOptions(step_prefix='ckpt', step_format_fixed_length=8)
    with ocp.CheckpointManager(run, options=options) as each:
        each.save(step, args=ocp.args.StandardSave(STATE))


def placeholders(run, step):
    """The Orbax of 2023."""
    directory = run / f'checkpoint_{step}'
    zarr(run, step)
    for name in ('w', 'count', 'a.b'):
        (directory / 'state' / name).rename(directory / name)
    for path in sorted((directory / 'state').rglob('*'), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (directory / 'state').rmdir()
    (directory / 'checkpoint').write_bytes(msgpack.packb({name: f'PLACEHOLDER://{name}' for name in ('w', 'count')}))


def flax_file(run, step):
    with flax.config.temp_flip_flag('use_orbax_checkpointing', False), pytest.warns(DeprecationWarning, match='Orbax'):
        flax_checkpoints.save_checkpoint(run, STATE, step, keep=9, overwrite=True)


def padded(run, step):
    with open_ck(run) as ck:
        ck.save(STATE, step=step)
    (run / f'checkpoint_{step}').rename(run / f'checkpoint_{step:08}')


MAKERS = [tree, zarr, zarr3, items, prefixed, placeholders, flax_file, padded]


@pytest.fixture
def mixed(run_dir):
    run_dir.mkdir()
    for step in (1, 2, 3):
        tree(run_dir, step)
    return run_dir


def test_keep_policies_neither_count_nor_delete_them(mixed):
    with open_ck(mixed, keep=2) as ck:
        for step in (4, 5, 6):
            ck.save(STATE, step=step)
    assert t5ckpt.all_steps(mixed) == [1, 2, 3, 5, 6]
    words = ('prune', mixed, '--keep', 1)
    plan = json.loads(t5ckpt_cli(*words, '--dry-run', '--json'))
    assert [each['step'] for each in plan['plan'] if not each['keep']] == [5]
    assert [each['reason'] for each in plan['plan'] if each['step'] < 4] == ['in the layout of orbax'] * 3
    t5ckpt_cli(*words, '--yes')
    assert t5ckpt.all_steps(mixed) == [1, 2, 3, 6]


@pytest.mark.slow
@pytest.mark.parametrize('make', MAKERS)
def test_rm_deletes_one_by_hand(run_dir, make):
    run_dir.mkdir()
    make(run_dir, 7)
    with open_ck(run_dir) as ck:
        ck.save(STATE, step=8)
        with pytest.raises(errors.UnsupportedFormatError, match=r'with t5ckpt rm .*@7\.|Rename it to checkpoint_7'):
            ck.delete(7)
    (step,) = (path for path in run_dir.iterdir() if path.name.endswith('7'))
    if step.is_dir():
        (step / 'notes.txt').write_text('mine')
        (step / 'PINNED').write_text('')
        assert t5ckpt_cli('rm', f'{run_dir}@7', '--yes', code=1)
        assert t5ckpt.all_steps(run_dir) == [7, 8]
    t5ckpt_cli('rm', f'{run_dir}@7', '--yes', '--pinned')
    assert [name for name in os.listdir(run_dir) if name not in ('checkpoint_8', 'metadata')] == []


def test_rm_keeps_one_that_is_read(mixed):
    with hold(open_storage(mixed), 2, 60.0, time.time) as is_there:
        assert is_there
        assert 'step 2 must stay' in t5ckpt_cli('rm', f'{mixed}@2', '--yes', code=1)
        storage = open_storage(mixed)
        other = find_step(storage, 2)
        with pytest.raises(errors.StepKeptError):
            delete(storage, other)
    assert t5ckpt.open_checkpoint(mixed, 2)['count'] == 0


def delete(storage, listed):
    hide(storage, listed, time.time)()


class Late(FaultyStorage):
    """Does something once, before a directory is hidden or removed."""

    def __init__(self, inner, name, act):
        super().__init__(inner)
        self.name, self.act = name, act

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if name == self.name and 'deleted' in key and self.act is not None:
            self.act, act = None, self.act
            act()


@pytest.mark.parametrize('make', [tree, prefixed, padded])
def test_a_second_deleter_waits_for_the_first(run_dir, make):
    run_dir.mkdir()
    make(run_dir, 7)
    storage = open_storage(run_dir)
    other = find_step(storage, 7)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        second = []

        def begin():
            second.append(pool.submit(delete, storage, other))
            with pytest.raises(concurrent.futures.TimeoutError):
                second[0].result(0.5)

        delete(Late(storage, 'publish', begin), other)
        with pytest.raises(errors.CheckpointNotFoundError):
            second[0].result()
    assert [name for name in os.listdir(run_dir) if name != 'metadata'] == []


@pytest.mark.parametrize('make', [tree, prefixed, padded])
def test_garbage_collection_leaves_what_a_deleter_removes(run_dir, make):
    run_dir.mkdir()
    make(run_dir, 7)
    storage, left = open_storage(run_dir), []

    def begin():
        collect(storage, time.time)
        left.extend(os.listdir(run_dir))

    late = Late(storage, 'delete_tree', begin)
    delete(late, find_step(storage, 7))
    assert late.act is None
    assert [name for name in left if '.deleted-' in name]
    assert [name for name in os.listdir(run_dir) if name != 'metadata'] == []


@pytest.mark.parametrize('name', ['7', 'checkpoint_007', '00000007'])
def test_a_step_of_another_layout_that_cannot_be_read_is_not_saved_again(run_dir, name):
    """On a file system that fails for it, or with links in a circle; it may be complete."""
    (run_dir / name).mkdir(parents=True)
    (run_dir / name / 'checkpoint').symlink_to('checkpoint')
    with open_ck(run_dir) as ck:
        for call in (lambda: ck.save(STATE, step=7), lambda: ck.restore(7), lambda: ck.delete(7)):
            with pytest.raises(errors.StorageError, match=f'{name}/checkpoint'):
                call()
    assert os.listdir(run_dir) == [name]


def test_a_killed_overwrite_is_not_put_in_the_place_of_a_file_of_flax(run_dir, caplog):
    with open_ck(run_dir) as ck:
        ck.save(STATE, step=1)
        marker = Marker(open_storage(run_dir), 1, time.time, HIDE)
        (run_dir / 'checkpoint_1').rename(run_dir / marker.directory)
        (run_dir / marker.aside).mkdir()
        marker.release()
        flax_file(run_dir, 1)
        written = (run_dir / 'checkpoint_1').read_bytes()
        ck.save(STATE, step=2)
        assert (run_dir / 'checkpoint_1').read_bytes() == written
        assert sorted(os.listdir(run_dir)) == ['checkpoint_1', 'checkpoint_2']
        assert ck.all_steps() == [1, 2]
    assert 'could not collect' not in caplog.text


def test_rm_of_a_bucket_hides_the_step_before_its_files_go(bucket, mixed):
    run = bucket.url()
    for name, _ in open_storage(mixed).walk('checkpoint_1'):
        open_storage(run).write(name, open_storage(mixed).read(name))
    open_storage(run).write('checkpoint_1/commit_success.txt', b'')
    failed = []

    def fail(kind, key):
        failed.append((kind, key)) if kind == 'delete' and '/d/' in key else None
        return '403' if failed else None

    bucket.proxy.choose = fail
    t5ckpt_cli('rm', f'{run}@1', '--yes', code=4)
    bucket.proxy.reset()
    assert failed
    assert t5ckpt.all_steps(run) == []


def test_rm_deletes_one_of_a_bucket(bucket, mixed):
    run = bucket.url()
    for name, _ in open_storage(mixed).walk('checkpoint_1'):
        open_storage(run).write(name, open_storage(mixed).read(name))
    open_storage(run).write('checkpoint_1/commit_success.txt', b'')
    t5ckpt_cli('rm', f'{run}@1', '--yes')
    assert [*open_storage(run).walk('checkpoint_1')] == []

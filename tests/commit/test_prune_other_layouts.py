"""``prune_other_layouts``: a keep policy that counts and deletes steps of Orbax and Flax, where their layout is certain."""

import json
import os
import signal
import textwrap

import flax
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints as flax_checkpoints
from support import forked
from support.cli import t5ckpt_cli

import t5ckpt
from t5ckpt.catalog.layouts import inspect_name
from t5ckpt.catalog.listing import listing
from t5ckpt.commit.other_layouts import hide_other, reason_to_stay
from t5ckpt.commit.read_lease import read_lease
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock

STATE = {'w': np.arange(6000, dtype=np.float32), 'a': {'b': np.ones(2, np.float32)}, 'count': np.int32(0)}


def open_ck(run, **options):
    return t5ckpt.Checkpointer(STATE, checkpoints_dir=run, **options)


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


def test_by_default_they_stay_and_where_asked_they_count_and_go(mixed):
    with open_ck(mixed, keep=2) as ck:
        ck.save(STATE, step=4)
    assert t5ckpt.all_steps(mixed) == [1, 2, 3, 4]
    with open_ck(mixed, keep=4, prune_other_layouts=True) as ck:
        ck.save(STATE, step=5)
        assert ck.all_steps() == [2, 3, 4, 5], 'the oldest went, and the others counted'
        ck.keep = 2
        ck.save(STATE, step=6)
    assert sorted(os.listdir(mixed)) == ['checkpoint_5', 'checkpoint_6']


@pytest.mark.parametrize('make', MAKERS)
def test_what_each_writer_writes_is_known_and_anything_else_is_not(run_dir, make):
    run_dir.mkdir()
    make(run_dir, 7)
    storage = open_storage(run_dir)
    (found,) = listing(storage).steps
    assert reason_to_stay(storage, found) is None
    if found.layout != 'flax':
        inner = next(path for path in sorted((run_dir / found.name).iterdir()) if path.is_dir())
        for path in (run_dir / found.name / 'notes.txt', inner / 'model.safetensors', inner / 'more' / 'metadata'):
            path.parent.mkdir(exist_ok=True)
            path.write_text('mine')
            reason = reason_to_stay(storage, found)
            assert reason is not None
            assert path.relative_to(run_dir / found.name).as_posix() in reason
            assert hide_other(storage, found, FakeClock()) is None
            path.unlink()
    with open_ck(run_dir, keep=1, prune_other_layouts=True) as ck:
        ck.save(STATE, step=8)
    assert [name for name in os.listdir(run_dir) if name not in ('checkpoint_8', 'metadata')] == []
    assert t5ckpt.all_steps(run_dir) == [8]


def test_a_map_that_is_not_flaxs_is_not_deleted(run_dir):
    run_dir.mkdir()
    (run_dir / 'checkpoint_1').write_bytes(msgpack.packb({5: 'ours', 6: 'too'}))
    with open_ck(run_dir, keep=1, prune_other_layouts=True) as ck:
        ck.save(STATE, step=2)
    assert (run_dir / 'checkpoint_1').exists()


def test_files_of_others_keep_a_step_with_one_warning(mixed, caplog):
    (mixed / 'checkpoint_1' / 'notes.txt').write_text('mine')
    with open_ck(mixed, keep=1, prune_other_layouts=True) as ck:
        ck.save(STATE, step=4)
        ck.save(STATE, step=5)
    warned = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
    assert len([text for text in warned if 'checkpoint_1' in text and 'notes.txt' in text]) == 1
    assert t5ckpt.all_steps(mixed) == [1, 5]
    assert (mixed / 'checkpoint_1' / 'state' / '_METADATA').exists()


def test_pins_and_readers_keep_them(mixed):
    (mixed / 'checkpoint_1' / 'PINNED').write_text('1')
    storage, clock = open_storage(mixed), FakeClock()
    with (
        read_lease(storage, 2, 60, clock) as is_there,
        open_ck(mixed, keep=1, prune_other_layouts=True, clock=clock) as ck,
    ):
        assert is_there
        ck.save(STATE, step=4)
    assert t5ckpt.all_steps(mixed) == [1, 2, 4]
    assert hide_other(storage, inspect_name(storage, 'checkpoint_1'), clock) is None


@pytest.mark.multiprocess
def test_a_killed_deletion_leaves_no_listed_step_and_is_completed(mixed):
    with open_ck(mixed) as ck:
        ck.save(STATE, step=4)
    code = textwrap.dedent(
        """
        import os, signal, sys
        from t5ckpt import KeepLatest
        from t5ckpt.commit.retention import Retention
        from t5ckpt.storage.file import FileStorage

        class Killed(FileStorage):
            def delete_tree(self, key):
                if key.startswith('checkpoint_2.'):
                    os.unlink(self.local_path(key) + '/state/_METADATA')
                    os.unlink(self.local_path(key) + '/state/manifest.ocdbt')
                    os.kill(os.getpid(), signal.SIGKILL)
                super().delete_tree(key)

        Retention(Killed(sys.argv[1]), KeepLatest(1), lambda: 1e9, prune_others=True).carry_out()
        """
    )
    assert forked.run(code, mixed).returncode == -signal.SIGKILL
    assert 'checkpoint_2.pruned-1000000000' in os.listdir(mixed)
    assert t5ckpt.all_steps(mixed) == [4]
    with open_ck(mixed) as ck:
        ck.save(STATE, step=5)
    assert sorted(os.listdir(mixed)) == ['checkpoint_4', 'checkpoint_5']


def test_prune_lists_them_and_deletes_them_where_asked(mixed):
    with open_ck(mixed) as ck:
        ck.save(STATE, step=4)
    (mixed / 'checkpoint_1' / 'notes.txt').write_text('mine')
    words = ('prune', mixed, '--keep', 2)
    plan = json.loads(t5ckpt_cli(*words, '--dry-run', '--json'))['plan']
    assert [each['step'] for each in plan if not each['keep']] == []
    plan = json.loads(t5ckpt_cli(*words, '--dry-run', '--other-layouts', '--json'))['plan']
    assert [(each['step'], each['keep']) for each in plan] == [(1, True), (2, False), (3, True), (4, True)]
    assert 'notes.txt' in plan[0]['reason']
    assert t5ckpt.all_steps(mixed) == [1, 2, 3, 4]
    assert json.loads(t5ckpt_cli(*words, '--other-layouts', '--yes', '--json'))['deleted'] == [2]
    assert t5ckpt.all_steps(mixed) == [1, 3, 4]


@pytest.mark.parametrize('options', [{}, {'keep_policy': t5ckpt.KeepAll()}])
def test_where_every_step_is_kept_the_option_has_no_effect_and_says_so(run_dir, options):
    with pytest.warns(t5ckpt.NoEffectWarning, match='prune_other_layouts has no effect: every step is kept'):
        t5ckpt.Checkpointer(STATE, checkpoints_dir=run_dir, prune_other_layouts=True, **options)


def test_object_stores_refuse(bucket):
    with pytest.raises(ValueError, match='prune_other_layouts'):
        open_ck(bucket.url(), prune_other_layouts=True)


def test_random_keys_of_orbax_are_not_certain(run_dir):
    """An item of a handler that this program does not know keeps the step."""
    with ocp.CheckpointManager(run_dir) as each:
        each.save(
            1,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave({'w': jnp.ones(3)}), key=ocp.args.JaxRandomKeySave(jax.random.key(0))
            ),
        )
    storage = open_storage(run_dir)
    assert 'key/jax_random_key' in (reason_to_stay(storage, inspect_name(storage, '1')) or '')

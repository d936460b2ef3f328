"""A copy between any two storages is the same checkpoint, or it is not there."""

import contextlib
import errno
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import uuid

import jax
import numpy as np
import pytest
from flax import serialization
from support import faultshim, forked, powercut
from support.cli import t5ckpt_cli
from support.damage import with_fields
from support.facts import as_t5x_writes, facts_of, put_facts
from support.options import with_options

import t5ckpt
from t5ckpt import errors
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.retention import remove_positions
from t5ckpt.format.names import (
    DATASET_REMOVED,
    TRAIN_DS_PREFIX,
    generation_dir,
    generation_of,
    is_position,
    without_generation,
)
from t5ckpt.format.relocation import relocated_manifest
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage

STATE = {'w': np.arange(96_000, dtype=np.float32).reshape(300, 320), 'b': np.ones(9, np.float32), 'step': np.int32(3)}


def saved(url, step=3):
    with t5ckpt.Checkpointer(
        STATE, checkpoints_dir=url, options=t5ckpt.CheckpointerOptions(chunk_bytes=2**13, inline_bytes=16)
    ) as ck:
        ck.save(STATE | {'step': np.int32(step)})
    return url


def files(url, step=3):
    storage = open_storage(f'{url}/checkpoint_{step}')
    return {key: storage.read(key) for key, _ in storage.walk('')}


def renamed(files):
    """What a copy takes over: all but the manifest and the list, under the names below the directory of a bucket's save."""
    own = {'checkpoint', 'integrity.0.json'}
    return {name: data for key, data in files.items() if (name := without_generation(key)) not in own}


@pytest.mark.slow
def test_between_every_two_storages(gs, s3, tmp_path):
    """The chunks have the same bytes everywhere; a pin stays where it was."""
    first = saved(str(tmp_path / 'run'))
    t5ckpt.pin_checkpoint(f'{first}/checkpoint_3')
    expected = {name: data for name, data in files(first).items() if name != 'PINNED'}
    places = [first, gs.url(), s3.url(), gs.url(), str(tmp_path / 'second'), s3.url(), str(tmp_path / 'third')]
    for source, target in itertools.pairwise(places):
        seen = []
        options = t5ckpt.ConvertOptions(progress=lambda done, total, seen=seen: seen.append((done, total)))
        report = t5ckpt.copy_checkpoint(source, target, options)
        assert report.path == f'{target}/checkpoint_3'
        copied = files(target)
        assert renamed(copied) == renamed(expected)
        assert len({generation_of(name) for name in copied} - {''}) == (
            target not in [first, *map(str, tmp_path.iterdir())]
        )
        assert sum(map(len, renamed(copied).values())) < report.nbytes < sum(map(len, copied.values()))
        assert seen[-1][0] == seen[-1][1]
        assert t5ckpt.all_steps(target) == [3]
        assert t5ckpt.verify(target, full=True).ok
        assert np.array_equal(t5ckpt.load_t5x_checkpoint(target)['w'], STATE['w'])


def same_state(first, second):
    states = [t5ckpt.load_t5x_checkpoint(url) for url in (first, second)]
    return jax.tree.all(jax.tree.map(np.array_equal, *states))


@pytest.mark.parametrize('case', ['case01_adafactor', 'case07_dataset_iterator'])
def test_a_checkpoint_of_t5x(golden, bucket, tmp_path, case):
    """It has neither facts nor checksums, and gets them: in a bucket, its positions have the names of the copy."""
    source = golden / case
    step = t5ckpt.latest_step(source)
    expected = files(str(source), step)
    target = bucket.url()
    t5ckpt.copy_checkpoint(f'{source}/checkpoint_{step}', target)
    copied = files(target, step)
    assert renamed(copied) == renamed(expected)
    assert all(
        generation_of(name) or (is_position(name) and name in expected) for name in copied if name != 'checkpoint'
    )
    assert t5ckpt.verify(target, full=True).ok
    assert same_state(f'{target}/checkpoint_{step}', f'{source}/checkpoint_{step}')
    t5ckpt.copy_checkpoint(target, tmp_path)
    assert renamed(files(str(tmp_path), step)) == renamed(expected)
    t5ckpt.copy_checkpoint(source, tmp_path / 'disk')
    assert renamed(files(str(tmp_path / 'disk'), step)) == renamed(expected)
    assert same_state(f'{tmp_path}/disk/checkpoint_{step}', f'{source}/checkpoint_{step}')


def test_what_is_there_is_not_replaced(tmp_path):
    source, target = saved(str(tmp_path / 'a')), saved(str(tmp_path / 'b'))
    with pytest.raises(errors.CheckpointExistsError, match='checkpoint_3 exists already'):
        t5ckpt.copy_checkpoint(source, target)
    with pytest.raises(errors.CheckpointNotFoundError):
        t5ckpt.copy_checkpoint(f'{source}/checkpoint_7', tmp_path / 'c')
    with pytest.raises(t5ckpt.errors.CheckpointNotFoundError, match='of a step'):
        t5ckpt.copy_checkpoint(source, tmp_path / 'checkpoint_5')
    assert not (tmp_path / 'c').exists()


@pytest.mark.parametrize('how', ['flipped', 'missing'])
def test_damage_is_not_copied(tmp_path, how):
    source = saved(str(tmp_path / 'run'))
    chunk = tmp_path / 'run' / 'checkpoint_3' / 'w' / '1.0'
    data = chunk.read_bytes()
    chunk.unlink()
    if how == 'flipped':
        chunk.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(errors.CorruptCheckpointError, match=r'w/1\.0'):
        t5ckpt.copy_checkpoint(source, tmp_path / 'copy')
    assert t5ckpt.all_steps(tmp_path / 'copy') == []


@pytest.mark.slow
@pytest.mark.parametrize('place', ['file', 'gs', 's3'])
def test_two_copies_to_one_place(tmp_path, place, request):
    """One wins, the other is told, and what the first wrote stays."""
    source = saved(str(tmp_path / 'run'))
    target = str(tmp_path / 'other') if place == 'file' else request.getfixturevalue(place).url()
    outcomes = []

    def attempt(progress=None):
        try:
            t5ckpt.copy_checkpoint(source, target, t5ckpt.ConvertOptions(progress=progress))
            outcomes.append('done')
        except errors.CheckpointExistsError as error:
            outcomes.append('refused' if 'by another' in str(error) else str(error))

    others = [attempt]
    attempt(lambda *_: others and others.pop()())
    assert sorted(outcomes) == ['done', 'refused']
    assert renamed(files(target)) == renamed(files(source))
    assert t5ckpt.all_steps(target) == [3]
    if place == 'file':
        assert [path.name for path in (tmp_path / 'other').iterdir()] == ['checkpoint_3']


@pytest.mark.slow
def test_a_copy_that_failed_leaves_no_files(bucket, tmp_path):
    source, target = saved(str(tmp_path / 'run')), bucket.url()
    written = itertools.count()
    bucket.proxy.choose = lambda kind, key: '403' if kind == 'write' and '/w/' in key and next(written) >= 5 else None
    with pytest.raises(errors.AccessDeniedError):
        t5ckpt.copy_checkpoint(source, target)
    bucket.proxy.reset()
    assert t5ckpt.all_steps(target) == []
    assert [*open_storage(target).walk('checkpoint_3')] == []
    t5ckpt.copy_checkpoint(source, target)
    # A request of the first call may arrive, so its marker is removed two hours later.
    collect(open_storage(target), lambda: time.time() + 7200)
    assert open_storage(target).names('.t5ckpt/busy', '') == []
    assert t5ckpt.verify(target, full=True).ok


def test_a_killed_copy_is_removed_by_the_next(tmp_path):
    """SIGKILL in the middle."""
    source = saved(str(tmp_path / 'run'))
    code = (
        'import os, signal, t5ckpt\n'
        'calls = []\n'
        'def report(done, total):\n'
        '    calls.append(done)\n'
        '    if len(calls) == 9: os.kill(os.getpid(), signal.SIGKILL)\n'
        f't5ckpt.copy_checkpoint({source!r}, {str(tmp_path / "copy")!r}, t5ckpt.ConvertOptions(progress=report))\n'
    )
    assert forked.run(code).returncode == -signal.SIGKILL
    assert t5ckpt.all_steps(tmp_path / 'copy') == []
    assert len([*(tmp_path / 'copy').glob('*/*/*')]) >= 8
    t5ckpt.copy_checkpoint(source, tmp_path / 'copy')
    assert renamed(files(str(tmp_path / 'copy'))) == renamed(files(source))
    assert [path.name for path in (tmp_path / 'copy').iterdir()] == ['checkpoint_3']


# Copies a run as `cp -r` does, without fsync, and then a step of the copy, as t5ckpt does; records all writes.
COPY_TWICE = """
import pathlib, pickle, sys
from support.faultshim import Shim
import t5ckpt
run, disk, record = map(pathlib.Path, sys.argv[1:])
shim = Shim()
shim.arm(disk, record=True)
for path in sorted(run.rglob('*')):
    target = disk / 'run' / path.relative_to(run)
    if path.is_dir():
        target.mkdir(parents=True)
    else:
        target.write_bytes(path.read_bytes())
t5ckpt.copy_checkpoint(disk / 'run', disk / 'copy')
shim.mark()
shim.disarm()
record.write_bytes(pickle.dumps(shim.operations()))
"""


@pytest.mark.slow
def test_the_power_is_cut_after_the_copy_of_files_that_were_not_synchronized(tmp_path):
    state = {'w': np.arange(5000, dtype=np.float32)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run') as ck:
        ck.save(state, step=1)
    (tmp_path / 'disk').mkdir()
    environment = {**os.environ, 'LD_PRELOAD': str(faultshim.build(tmp_path)), 'PYTHONPATH': os.pathsep.join(sys.path)}
    paths = [tmp_path / name for name in ('run', 'disk', 'record')]
    subprocess.run([sys.executable, '-c', COPY_TWICE, *paths], env=environment, check=True, timeout=120)
    recording = powercut.Recording({}, {}, pickle.loads((tmp_path / 'record').read_bytes()))
    returned = [tree for cut, tree in powercut.trees(recording, randoms=3, seed=0) if cut > recording.returned]
    assert len(returned) >= 3
    for number, tree in enumerate(returned):
        disk = tmp_path / str(number)
        powercut.write_tree(disk, tree)
        t5ckpt.verify(disk / 'copy', full=True).raise_if_damaged()
        assert np.array_equal(t5ckpt.load_t5x_checkpoint(disk / 'copy')['w'], state['w'])


@pytest.mark.slow
def test_the_verb(tmp_path, bucket):
    source, target = saved(str(tmp_path / 'run')), bucket.url()
    started = time.monotonic()
    report = json.loads(t5ckpt_cli('cp', source, target, '--json'))
    assert report['path'] == f'{target}/checkpoint_3'
    assert 0 < report['seconds'] < time.monotonic() - started
    again = forked.run(None, 'cp', source, target)
    assert again.returncode != 0
    assert 'exists already' in again.stderr
    assert t5ckpt_cli('ls', target).splitlines()[1].split()[0] == '3'


def test_overwriting_and_dry_runs(tmp_path):
    source, target = saved(str(tmp_path / 'run')), str(tmp_path / 'copy')
    report = t5ckpt.copy_checkpoint(source, target, t5ckpt.ConvertOptions(dry_run=True))
    assert (report.step, set(report.mapped)) == (3, {'w', 'b', 'step'})
    assert not (tmp_path / 'copy').exists()
    other = STATE | {'b': np.zeros(9, np.float32)}
    with t5ckpt.Checkpointer(other, checkpoints_dir=target) as ck:
        ck.save(other)
    with pytest.raises(errors.CheckpointExistsError, match='overwrite=True'):
        t5ckpt.copy_checkpoint(source, target, t5ckpt.ConvertOptions(dry_run=True))
    t5ckpt.pin_checkpoint(f'{target}/checkpoint_3')
    with pytest.raises(errors.CheckpointExistsError, match='pinned'):
        t5ckpt.copy_checkpoint(source, target, t5ckpt.ConvertOptions(overwrite=True))
    t5ckpt.unpin_checkpoint(f'{target}/checkpoint_3')
    t5ckpt.copy_checkpoint(source, target, t5ckpt.ConvertOptions(overwrite=True))
    assert renamed(files(target)) == renamed(files(source))
    assert [path.name for path in (tmp_path / 'copy').iterdir()] == ['checkpoint_3']


@pytest.mark.slow
def test_the_verb_with_changes(tmp_path):
    params = {'w': np.arange(4096, dtype=np.float32).reshape(64, 64)}
    state = {'params': params, 'opt_state': {'ema': {'w': params['w'] + 2}}, 'step': np.int32(0)}
    run = tmp_path / 'run'
    with t5ckpt.Checkpointer(state, checkpoints_dir=run) as ck:
        ck.save({**state, 'step': np.int32(1)})
        ck.save({**state, 'params': {'w': params['w'] + 4}, 'step': np.int32(2)})

    def read(name):
        return t5ckpt.load_t5x_checkpoint(tmp_path / name)

    text = t5ckpt_cli('cp', run, tmp_path / 'weights', '--leave', 'OPTIMIZER', '--save-dtype', 'bfloat16', '--dry-run')
    assert 'would be written' in text
    assert not (tmp_path / 'weights').exists()
    done = json.loads(
        t5ckpt_cli('cp', run, tmp_path / 'weights', '--leave', 'OPTIMIZER', '--save-dtype', 'bfloat16', '--json')
    )
    assert (done['step'], done['dry_run'], done['dropped']) == (2, False, ['opt_state/ema/w'])
    assert read('weights')['params']['w'].dtype == 'bfloat16'
    assert 'exists already' in t5ckpt_cli('cp', run, tmp_path / 'weights', '--leave', 'OPTIMIZER', code=1)
    t5ckpt_cli('cp', run, tmp_path / 'weights', '--leave', 'OPTIMIZER', '--force')
    np.testing.assert_array_equal(read('weights')['params']['w'], params['w'] + 4)
    ema = ['--take', 'opt_state/ema/.*', '--rename', 'opt_state/ema/(.*)', r'params/\1']
    t5ckpt_cli('cp', run, tmp_path / 'ema', *ema, '--step', 1, '--as-step', 0)
    np.testing.assert_array_equal(read('ema/checkpoint_0')['params']['w'], params['w'] + 2)
    t5ckpt_cli('cp', run, tmp_path / 'named', '--rename', 'params/(.*)', r'target/\1', '--leave', 'opt_state/.*')
    assert sorted(read('named')) == ['step', 'target']
    assert 'not a regular expression' in t5ckpt_cli('cp', run, tmp_path / 'x', '--leave', '(', code=2)
    assert 'matches no leaf' in t5ckpt_cli('cp', run, tmp_path / 'x', '--leave', 'nothing', code=1)


def test_a_step_that_has_lost_its_facts_is_copied_as_the_error_says(tmp_path):
    saved(str(tmp_path / 'run'))
    shutil.copytree(tmp_path / 'run', tmp_path / 'intact')
    step_dir = tmp_path / 'run' / 'checkpoint_3'
    put_facts(step_dir, None)
    with pytest.raises(errors.CorruptCheckpointError, match=r'has no facts of t5ckpt.* t5ckpt cp --trust-files'):
        t5ckpt.copy_checkpoint(tmp_path / 'run', tmp_path / 'copy')
    t5ckpt_cli('cp', tmp_path / 'run', tmp_path / 'copy', '--trust-files')
    assert same_state(tmp_path / 'copy', tmp_path / 'intact')
    for path in step_dir.glob('integrity.*.json'):
        path.unlink()
    t5ckpt.copy_checkpoint(tmp_path / 'run', tmp_path / 'plain')
    assert same_state(tmp_path / 'plain', tmp_path / 'intact')


def test_the_files_of_other_programs_are_not_copied(tmp_path):
    """So a copy that was cut off leaves none of them, and a bucket takes the next one."""
    saved(str(tmp_path / 'run'))
    (tmp_path / 'run' / 'checkpoint_3' / 'notes.txt').write_text('of a user')
    (tmp_path / 'run' / 'checkpoint_3' / 'logs').mkdir()
    (tmp_path / 'run' / 'checkpoint_3' / 'logs' / 'a.log').write_text('of a user')
    t5ckpt.pin_checkpoint(tmp_path / 'run' / 'checkpoint_3')
    url = f'memory://{uuid.uuid4().hex}/run'
    storage = open_storage(url)
    reference = FaultyStorage(open_storage(f'memory://{uuid.uuid4().hex}/run'))
    t5ckpt.copy_checkpoint(tmp_path / 'run', reference)
    for fail_at in range(len(reference.operations)):
        with contextlib.suppress(errors.T5CkptError):
            t5ckpt.copy_checkpoint(tmp_path / 'run', FaultyStorage(storage, fail_at, sticky=True))
        if storage.is_file('checkpoint_3/checkpoint'):
            break
    else:
        done = t5ckpt.copy_checkpoint(tmp_path / 'run', url)
        assert done.left_out == ('PINNED', 'logs/a.log', 'notes.txt')
    assert t5ckpt.verify(url, full=True).ok
    assert not [key for key in files(url) if 'notes' in key or 'logs' in key]
    done = t5ckpt.copy_checkpoint(tmp_path / 'run', tmp_path / 'copy')
    assert done.left_out == ('PINNED', 'logs/a.log', 'notes.txt')
    assert renamed(files(str(tmp_path / 'copy'))) == renamed(files(url))


@pytest.mark.slow
@pytest.mark.parametrize('place', ['file', 'gs'])
def test_without_facts_every_array_is_copied(tmp_path, place, request):
    """The arrays of T5X's manifest may be in directories that no name shows, also if it has another name."""
    saved(str(tmp_path / 'run'))
    step_dir = tmp_path / 'run' / 'checkpoint_3'
    put_facts(step_dir, None)
    for file in step_dir.glob('integrity.*.json'):
        file.unlink()
    manifest = serialization.msgpack_restore((step_dir / 'checkpoint').read_bytes())
    spec = manifest['optimizer']['w']['kvstore']
    (step_dir / 'deep').mkdir()
    (step_dir / spec['path']).rename(step_dir / 'deep' / 'w')
    spec['path'] = 'deep/w'
    (step_dir / 'checkpoint').unlink()
    (step_dir / 'other').write_bytes(serialization.msgpack_serialize(manifest))
    target = tmp_path / 'copy' if place == 'file' else request.getfixturevalue(place).url()
    done = t5ckpt.copy_checkpoint(step_dir / 'other', target)
    assert done.left_out == ()
    np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(target)['w'], STATE['w'])
    t5ckpt_cli('rm', target, 3, '--yes')
    assert [*open_storage(target).walk('checkpoint_3')] == []


@pytest.mark.slow
def test_a_copy_replaces_a_step_of_a_bucket_in_one_write(bucket, tmp_path):
    """Nobody finds the step missing, and the files of the old one go."""
    source, target = saved(str(tmp_path / 'run')), bucket.url()
    other = STATE | {'b': np.zeros(9, np.float32)}
    with t5ckpt.Checkpointer(
        other, checkpoints_dir=target, options=t5ckpt.CheckpointerOptions(chunk_bytes=2**12)
    ) as ck:
        ck.save(other)
    seen = []

    def look(*_):
        seen.append(t5ckpt.load_t5x_checkpoint(target, 3)['b'][0])

    t5ckpt.copy_checkpoint(source, target, t5ckpt.ConvertOptions(overwrite=True, progress=look))
    assert {*map(float, seen)} == {0.0}
    assert renamed(files(target)) == renamed(files(source))
    assert t5ckpt.verify(target, full=True).ok


@pytest.mark.slow
def test_a_copy_of_a_checkpoint_of_t5x_replaces_a_step_of_a_bucket(golden, bucket, tmp_path):
    """Nothing of the old step stays, so that later copies have the new one."""
    source = golden / 'case01_adafactor'
    step, target = t5ckpt.latest_step(source), bucket.url()
    for name in ('first', 'second'):
        with t5ckpt.Checkpointer(
            STATE, checkpoints_dir=target, options=t5ckpt.CheckpointerOptions(chunk_bytes=2**12)
        ) as ck:
            ck.save(STATE | {'step': np.int32(step)}, overwrite=True)
        for _ in range(2):
            t5ckpt.copy_checkpoint(source, target, t5ckpt.ConvertOptions(overwrite=True))
            assert renamed(files(target, step)) == renamed(files(str(source), step))
        t5ckpt.copy_checkpoint(target, tmp_path / name)
        assert same_state(f'{tmp_path / name}/checkpoint_{step}', f'{source}/checkpoint_{step}')


class Iterator:
    """Its position is a number."""

    def __init__(self, at=0):
        self.at = at

    def get_state(self):
        return {'at': self.at}

    def set_state(self, state):
        self.at = state['at']


def test_the_position_of_a_replaced_step_is_not_restored(tmp_path):
    """A step without positions, or with removed ones, is restored in a bucket as on a disk."""
    sources = {}
    for name, options in {
        'with': {'keep_dataset_checkpoints': None},
        'removed': {'keep_dataset_checkpoints': 1},
    }.items():
        with t5ckpt.Checkpointer(STATE, None, tmp_path / name, Iterator(7), keep=None, **with_options(**options)) as ck:
            for step in (3, 4):
                ck.save(STATE | {'step': np.int32(step)})
        sources[name] = tmp_path / name
    sources['without'] = tmp_path / 'without'
    saved(str(tmp_path / 'without'))
    for new, old in itertools.product(sources, sources):
        url = f'memory://{uuid.uuid4().hex}/run'
        t5ckpt.copy_checkpoint(sources[old] / 'checkpoint_3', url)
        t5ckpt.copy_checkpoint(sources[new] / 'checkpoint_3', url, t5ckpt.ConvertOptions(overwrite=True))
        iterator = Iterator()
        with t5ckpt.Checkpointer(STATE, None, url, iterator) as ck:
            ck.restore()
        assert iterator.at == (7 if new == 'with' else 0), (new, old)
        assert sum(is_position(name) for name in files(url)) == (2 if new == 'with' else 0)


def test_a_copy_that_is_cut_off_hides_no_lost_position_of_the_step_it_was_to_replace(tmp_path):
    """The source has removed positions, and says so in the directory of the copy."""
    with t5ckpt.Checkpointer(STATE, None, tmp_path, Iterator(7), keep=None, keep_dataset_checkpoints=1) as ck:
        for step in (3, 4):
            ck.save(STATE | {'step': np.int32(step)})
    url = f'memory://{uuid.uuid4().hex}/run'
    storage = open_storage(url)
    with t5ckpt.Checkpointer(STATE, None, storage, Iterator(7)) as ck:
        ck.save(STATE | {'step': np.int32(3)})
    lost = [name for name in files(url) if is_position(name)]

    class Dying(FaultyStorage):
        def before_operation(self, name, key):
            super().before_operation(name, key)
            if key == 'checkpoint_3/checkpoint' and name.startswith(('write', 'replace', 'create')):
                raise errors.StorageError(errno.EIO, 'the process has died')

    with pytest.raises(errors.StorageError):
        t5ckpt.copy_checkpoint(tmp_path / 'checkpoint_3', Dying(storage), t5ckpt.ConvertOptions(overwrite=True))
    for name in lost:
        storage.delete_file(f'checkpoint_3/{name}')
    assert any(damage.kind == 'missing' for damage in t5ckpt.verify(url).damages)


def test_a_save_that_replaces_a_step_and_is_killed_leaves_no_position_of_it(tmp_path):
    """It has none, and T5X's names are still those of the old step."""
    url = f'memory://{uuid.uuid4().hex}/run'
    storage = open_storage(url)
    with t5ckpt.Checkpointer(STATE, None, storage, Iterator(7)) as ck:
        ck.save(STATE)

    class Dying(FaultyStorage):
        def before_operation(self, name, key):
            super().before_operation(name, key)
            if name.startswith('delete'):
                raise errors.StorageError(errno.EIO, 'the process has died')

    with t5ckpt.Checkpointer(STATE, None, Dying(storage)) as ck:
        ck.save(STATE, overwrite=True)
    assert any(name.startswith('train_ds-') for name in files(url))
    iterator = Iterator()
    with t5ckpt.Checkpointer(STATE, None, url, iterator) as ck:
        ck.restore()
    assert iterator.at == 0


@pytest.mark.slow
def test_positions_are_copied_under_the_names_of_the_copy(bucket, tmp_path):
    """t5ckpt reads those of the copy, and T5X finds them under its own names. Deletion takes both."""

    def checkpointer(url):
        return t5ckpt.Checkpointer(STATE, checkpoints_dir=url, dataset_iterator=iterator)

    iterator = Iterator(7)
    with checkpointer(tmp_path / 'run') as ck:
        ck.save(STATE)
    first, second, back = f'{bucket.url()}/a', f'{bucket.url()}/b', str(tmp_path / 'back')
    for source, target in itertools.pairwise([str(tmp_path / 'run'), first, second, back]):
        t5ckpt.copy_checkpoint(source, target)
        iterator.at = 0
        with checkpointer(target) as ck:
            ck.restore()
        assert iterator.at == 7
        positions = [name for name in files(target) if is_position(name)]
        assert len(positions) == (1 if target == back else 2)
        assert len({files(target)[name] for name in positions}) == 1
        assert t5ckpt.verify(target, full=True).ok
    assert renamed(files(back)) == renamed(files(str(tmp_path / 'run')))
    t5ckpt_cli('rm', second, 3, '--yes')
    assert [*open_storage(second).walk('checkpoint_3')] == []


@pytest.mark.parametrize(
    ('kvstore', 'kind', 'says'),
    [
        ('file://w/', errors.UnsafeSpecError, 'store .* is not one of'),
        ({'driver': 'http', 'path': 'w/'}, errors.UnsafeSpecError, 'store .* is not one of'),
        ({'driver': 'file'}, errors.CorruptCheckpointError, 'has no path'),
        ({'driver': 'file', 'path': 7}, errors.CorruptCheckpointError, 'has no path'),
        ({'driver': 'file', 'path': '../w/'}, errors.UnsafeSpecError, "'../w' leads outside"),
    ],
)
def test_a_location_that_is_none_is_not_renamed_for_a_copy(tmp_path, kvstore, kind, says):
    step_dir, url = tmp_path / 'checkpoint_3', f'memory://{uuid.uuid4().hex}/run'
    saved(str(tmp_path))
    as_t5x_writes(step_dir)
    contents = serialization.msgpack_restore((step_dir / 'checkpoint').read_bytes())
    contents['optimizer']['w']['kvstore'] = kvstore
    manifest = serialization.msgpack_serialize(contents)
    (step_dir / 'checkpoint').write_bytes(manifest)
    with pytest.raises(kind, match=f'checkpoint_3/checkpoint: .*{says}'):
        relocated_manifest(manifest, generation_dir('0' * 16), str(step_dir / 'checkpoint'))
    for target in (url, tmp_path / 'copy'):
        with pytest.raises(kind, match=says):
            t5ckpt.copy_checkpoint(step_dir, target)
        assert t5ckpt.all_steps(target) == []


@pytest.mark.parametrize(
    ('entry', 'says'),
    [
        ({'integrity.0.json': [5, 'a']}, r"bad entry 'integrity.0.json': \[5, 'a'\]"),
        ({'../w': [5, 'a' * 16]}, "bad entry '../w'"),
        ({'integrity.0.json': 5}, "bad entry 'integrity.0.json': 5"),
        ({'integrity.0.json': [-1, 'a' * 16]}, "bad entry 'integrity.0.json'"),
        (None, 'not iterable|facts of a leaf are .*5'),
    ],
)
def test_facts_with_a_wrong_entry_are_not_renamed_for_a_copy(tmp_path, entry, says):
    step_dir = tmp_path / 'checkpoint_3'
    saved(str(tmp_path))
    changed = {'tree': {'stored': [[5, 'uint16']]}} if entry is None else {'digests': entry}
    put_facts(step_dir, with_fields(facts_of(step_dir), **changed))
    for target in (f'memory://{uuid.uuid4().hex}/run', tmp_path / 'copy'):
        with pytest.raises(errors.CorruptCheckpointError, match=f'checkpoint_3.*{says}'):
            t5ckpt.copy_checkpoint(step_dir, target)
        assert t5ckpt.all_steps(target) == []


def test_a_step_without_its_positions_is_copied_from_a_bucket_to_a_disk(tmp_path):
    """The copy has no mark of their removal, since none are recorded."""
    url = f'memory://{uuid.uuid4().hex}/run'
    saved(url)
    storage = open_storage(url)
    (generation,) = storage.names('checkpoint_3', 't5ckpt-')
    for parent in ('checkpoint_3', f'checkpoint_3/{generation}'):
        storage.write(f'{parent}/{TRAIN_DS_PREFIX}000-of-001', b'1')
    remove_positions(storage, 3, time.time)
    t5ckpt.copy_checkpoint(f'{url}/checkpoint_3', tmp_path)
    assert not (tmp_path / 'checkpoint_3' / DATASET_REMOVED).exists()
    assert t5ckpt.verify(tmp_path, full=True).ok


def test_a_step_of_t5x_from_before_1970_is_copied_to_a_bucket(tmp_path):
    saved(str(tmp_path))
    as_t5x_writes(tmp_path / 'checkpoint_3')
    os.utime(tmp_path / 'checkpoint_3' / 'checkpoint', (-5, -5))
    url = f'memory://{uuid.uuid4().hex}/run'
    t5ckpt.copy_checkpoint(tmp_path / 'checkpoint_3', url)
    assert t5ckpt.verify(url, full=True).ok


def test_a_step_of_orbax_becomes_a_checkpoint(tmp_path):
    """Its manifest has placeholders, and not the values: a copy of the file alone would be empty."""
    orbax = pytest.importorskip('orbax.checkpoint')
    state = {'params': {'w': np.arange(4096, dtype=np.float32)}, 'b': np.ones(3, np.int32)}
    with orbax.CheckpointManager(tmp_path / 'orbax') as manager:
        manager.save(3, args=orbax.args.StandardSave(state))
    for target in (tmp_path / 'copy', f'memory://{uuid.uuid4().hex}/run'):
        t5ckpt.copy_checkpoint(tmp_path / 'orbax', target)
        assert t5ckpt.verify(target, full=True).ok
        jax.tree.map(np.testing.assert_array_equal, t5ckpt.load_t5x_checkpoint(target, 3), state)


def test_a_manifest_with_placeholders_and_no_arrays_is_no_checkpoint(tmp_path):
    step_dir = tmp_path / 'checkpoint_3'
    step_dir.mkdir()
    state = {'w': 'PLACEHOLDER://w', 'b': np.ones(3, np.float32)}
    (step_dir / 'checkpoint').write_bytes(serialization.msgpack_serialize(state))
    url = f'memory://{uuid.uuid4().hex}/run'
    with pytest.raises(errors.CorruptCheckpointError, match=r'w/\.zarray is missing'):
        t5ckpt.copy_checkpoint(step_dir, url)
    assert t5ckpt.all_steps(url) == []

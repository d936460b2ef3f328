"""`repair`: what follows from the rest is made again, what does not is never made up, the original stays as it is."""

import json
import pathlib
import random
import shutil
import uuid

import jax
import numpy as np
import pytest
from support import golden as cases
from support.cli import t5ckpt_cli
from support.damage import (
    Iterator,
    Meanwhile,
    arrays_of,
    bytes_of,
    copied,
    files_of,
    flip,
    of_two_processes,
    save,
    some_file,
    state_of,
    with_fields,
)
from support.facts import as_t5x_writes, facts_of, put_facts

import t5ckpt
from t5ckpt import errors
from t5ckpt.storage import open_storage

OWN_FILES = ('integrity.0.json',)


def harm(path, how, rng):
    if how == 'missing':
        path.unlink()
    elif how == 'empty':
        path.write_bytes(b'')
    elif how == 'truncated':
        path.write_bytes(path.read_bytes()[:-3])
    else:
        flip(path, rng)


@pytest.mark.parametrize('how', ['missing', 'empty', 'truncated', 'flipped'])
@pytest.mark.parametrize('files', [('params.w/.zarray',), OWN_FILES, ('integrity.0.json', 'params.edge/.zarray')])
def test_what_follows_from_the_rest_is_made_again(run_dir, tmp_path, how, files):
    step_dir = save(run_dir, compression='zstd')
    expected = arrays_of(step_dir)
    for name in files:
        harm(step_dir / name, how, random.Random(7))
    before = bytes_of(step_dir)
    if how == 'flipped' and len(files) == 2:
        # Nothing shows which of the files is damaged where its metadata decodes.
        with pytest.raises(errors.CorruptCheckpointError, match=rf'{files[0]}: lost.*trust_files=True'):
            t5ckpt.repair(step_dir, tmp_path / 'mended')
        assert not (tmp_path / 'mended').exists()
        return
    report = t5ckpt.repair(step_dir, tmp_path / 'mended')
    assert report.changed
    assert set(files) <= set(report.rebuilt)
    assert report.dropped == ()
    assert bytes_of(step_dir) == before
    mended = tmp_path / 'mended' / 'checkpoint_1'
    assert report.path == str(mended)
    assert report.files == len(files_of(mended))
    assert t5ckpt.verify(mended, full=True).ok
    assert t5ckpt.verify(mended).has_checksums
    assert arrays_of(mended) == expected
    assert json.loads(facts_of(mended))['repaired']['rebuilt'] == list(report.rebuilt)


def test_fields_of_a_newer_program_survive_a_repair_and_a_copy(run_dir, tmp_path):
    step_dir = save(run_dir)
    facts = with_fields(facts_of(step_dir), newer={'a': [1]}, metrics={'loss': 0.5}, custom_metadata={'b': 2})
    put_facts(step_dir, facts)
    t5ckpt.copy_checkpoint(step_dir, tmp_path / 'copied')
    assert facts_of(tmp_path / 'copied' / 'checkpoint_1') == facts
    (step_dir / 'params.w/.zarray').unlink()
    t5ckpt.repair(step_dir, tmp_path / 'mended')
    before, after = json.loads(facts), json.loads(facts_of(tmp_path / 'mended/checkpoint_1'))
    changed = {'bytes', 'checksum', 'digests', 'files', 'repaired', 'writer'}
    assert {name: value for name, value in after.items() if name not in changed} == {
        name: value for name, value in before.items() if name not in changed
    }


def test_without_checksums_and_facts_it_is_a_checkpoint_of_t5x(run_dir, tmp_path):
    """Nothing says that there were some; what is left of them says only what is certain."""
    step_dir = save(run_dir)
    as_t5x_writes(step_dir)
    assert not t5ckpt.repair(step_dir, tmp_path / 'mended').changed
    # An earlier version left the first, and nothing verifies the lists without their checksums.
    (step_dir / 't5ckpt.json').write_bytes(b'')
    trust = t5ckpt.RepairOptions(trust_files=True)
    with pytest.raises(errors.CorruptCheckpointError, match=r't5ckpt\.json is damaged'):
        t5ckpt.repair(step_dir, tmp_path / 'mended', options=trust)
    step_dir = save(run_dir, 2)
    put_facts(step_dir, None)
    with pytest.raises(errors.CorruptCheckpointError, match='without these it is read as T5X reads it'):
        t5ckpt.repair(step_dir, tmp_path / 'other', options=trust)
    (step_dir / 'integrity.0.json').unlink()
    assert not t5ckpt.repair(step_dir, tmp_path / 'mended').changed


def test_nothing_to_repair(run_dir, tmp_path):
    save(run_dir)
    report = t5ckpt.repair(run_dir, tmp_path / 'mended')
    assert not report.changed
    assert not (tmp_path / 'mended').exists()


@pytest.mark.parametrize('compression', [None, 'zstd'])
@pytest.mark.parametrize('count', [30, pytest.param(300, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_mended_or_the_repair_refuses(run_dir, tmp_path, compression, count):
    """Never a value that was not saved, whichever bit it is."""
    step_dir = save(run_dir, compression=compression)
    expected = arrays_of(step_dir)
    rng = random.Random(count)
    outcomes = set()
    for number in range(count):
        path = some_file(step_dir, rng)
        undo = flip(path, rng)
        before = bytes_of(step_dir)
        output = tmp_path / f'mended{number}'
        outcome = 'mended'
        try:
            t5ckpt.repair(step_dir, output)
        except errors.CorruptCheckpointError as error:
            outcome = str(error)
        if outcome != 'mended':
            assert path.name in outcome
            assert not list(output.glob('*'))
            outcomes.add('refused')
        else:
            found = arrays_of(output / 'checkpoint_1')
            assert path.name != 'checkpoint'
            assert found == expected
            outcomes.add('mended')
        assert bytes_of(step_dir) == before
        path.write_bytes(undo)
    assert outcomes == {'refused', 'mended'}


def test_a_damaged_list_of_checksums_condemns_no_file(run_dir, tmp_path):
    """One digit of a checksum was flipped: the chunk that it speaks of is whole."""
    step_dir = save(run_dir)
    expected = arrays_of(step_dir)
    listed = step_dir / 'integrity.0.json'
    contents = json.loads(listed.read_text())
    digits = contents['files']['params.w/0.0'][1]
    contents['files']['params.w/0.0'][1] = ('1' if digits[0] == '0' else '0') + digits[1:]
    listed.write_text(json.dumps(contents, separators=(',', ':')))
    assert {damage.file for damage in t5ckpt.verify(step_dir, full=True).damages} == {
        'integrity.0.json',
        'params.w/0.0',
    }
    report = t5ckpt.repair(step_dir, tmp_path / 'mended')
    assert report.rebuilt == ('integrity.0.json',)
    assert arrays_of(tmp_path / 'mended' / 'checkpoint_1') == expected
    # With a chunk that really is damaged beside it, nothing tells the two apart.
    flip(step_dir / 'params.edge' / '0.0', random.Random(1))
    with pytest.raises(errors.CorruptCheckpointError, match=r'params/w(.|\n)*files may have changed'):
        t5ckpt.repair(step_dir, tmp_path / 'other')


@pytest.mark.parametrize('how', ['missing', 'empty', 'truncated', 'flipped'])
@pytest.mark.parametrize('victim', ['params.w/0.0', 'params.edge/1.0', 'iterator'])
@pytest.mark.parametrize('gone', [False, True])
def test_a_lost_list_and_a_changed_file_are_not_made_one(run_dir, tmp_path, how, victim, gone):
    """The facts show that something has changed: new checksums would make it whole."""
    step_dir = save(run_dir)
    harm(step_dir / 'integrity.0.json', how, random.Random(3))
    path = step_dir / victim if victim != 'iterator' else next(step_dir.glob('train_ds*'))
    if gone:
        path.unlink()
    else:
        flip(path, random.Random(1))
    before = bytes_of(step_dir)
    with pytest.raises(errors.CorruptCheckpointError):
        t5ckpt.repair(step_dir, tmp_path / 'mended')
    assert bytes_of(step_dir) == before
    assert not (tmp_path / 'mended').exists()
    if gone and victim != 'iterator':
        return
    report = t5ckpt.repair(step_dir, tmp_path / 'mended', options=t5ckpt.RepairOptions(trust_files=True))
    assert any('no checksum verifies' in note for note in report.notes)
    assert t5ckpt.verify(tmp_path / 'mended', full=True).ok


@pytest.mark.parametrize('what', ['nothing', 'missing', 'truncated', 'flipped'])
@pytest.mark.parametrize('compression', [None, 'zstd'])
def test_one_of_two_lists_is_lost(run_dir, tmp_path, what, compression):
    step_dir = save(run_dir, compression=compression)
    expected = arrays_of(step_dir)
    halves = of_two_processes(step_dir)
    (step_dir / 'integrity.1.json').unlink()
    victim = next(name for name in halves[1] if name.startswith('params.') and not name.endswith('.zarray'))
    if what != 'nothing':
        harm(step_dir / victim, what, random.Random(1))
        with pytest.raises(errors.CorruptCheckpointError):
            t5ckpt.repair(step_dir, tmp_path / 'mended')
        assert not (tmp_path / 'mended').exists()
        if what == 'missing' or (what == 'truncated' and compression is None):
            # A list is gone, and still it is seen that a chunk is not there.
            assert victim in {damage.file for damage in t5ckpt.verify(step_dir, full=True).damages}
        return
    assert t5ckpt.repair(step_dir, tmp_path / 'mended').rebuilt == ('integrity.1.json',)
    assert arrays_of(tmp_path / 'mended' / 'checkpoint_1') == expected
    assert t5ckpt.verify(tmp_path / 'mended', full=True).ok


def test_arrays_that_changed_places_keep_their_metadata(run_dir, tmp_path):
    """A `.zarray` that says something else is no lost file."""
    rng = np.random.default_rng(0)
    state = {'w': rng.standard_normal((96, 64), np.float32), 't': rng.standard_normal((64, 96), np.float32)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=run_dir, chunk_bytes=10**6, inline_bytes=100) as ck:
        ck.save(state, step=1)
    step_dir = run_dir / 'checkpoint_1'
    as_t5x_writes(step_dir)
    (step_dir / 'w').rename(step_dir / 'x')
    (step_dir / 't').rename(step_dir / 'w')
    (step_dir / 'x').rename(step_dir / 't')
    with pytest.raises(errors.CorruptCheckpointError, match='w'):
        t5ckpt.repair(step_dir, tmp_path / 'mended')
    assert not (tmp_path / 'mended').exists()


def test_a_rebuilt_list_does_not_hide_damage_that_another_list_proves(run_dir, tmp_path):
    step_dir = save(run_dir)
    halves = of_two_processes(step_dir)
    (step_dir / 'integrity.1.json').unlink()
    victim = next(name for name in halves[0] if name.startswith('params.w/') and not name.endswith('.zarray'))
    flip(step_dir / victim, random.Random(1))
    with pytest.raises(errors.CorruptCheckpointError, match=r"drop=.'params/w'"):
        t5ckpt.repair(step_dir, tmp_path / 'mended')
    report = t5ckpt.repair(step_dir, tmp_path / 'mended', options=t5ckpt.RepairOptions(drop=['params/w']))
    assert (report.rebuilt, report.dropped) == (('integrity.1.json',), ('params/w',))
    assert t5ckpt.verify(tmp_path / 'mended', full=True).ok


def test_an_unreadable_zarray_without_a_checksum_may_be_left_out(run_dir, tmp_path):
    step_dir = save(run_dir)
    as_t5x_writes(step_dir)
    (step_dir / 'params.w' / '.zarray').write_bytes(b'')
    trust = t5ckpt.RepairOptions(trust_files=True)
    assert t5ckpt.repair(step_dir, tmp_path / 'rebuilt', options=trust).rebuilt == ('params.w/.zarray',)
    (step_dir / 'params.w' / '0.0').unlink()
    with pytest.raises(errors.CorruptCheckpointError, match=r"drop=.'params/w'"):
        t5ckpt.repair(step_dir, tmp_path / 'mended', options=trust)
    for trust_files in (True, False):
        options = t5ckpt.RepairOptions(drop=['params/w'], trust_files=trust_files)
        report = t5ckpt.repair(step_dir, tmp_path / f'mended{trust_files}', options=options)
        assert (report.rebuilt, report.dropped) == ((), ('params/w',))


def test_what_can_be_mended_is_not_left_out(run_dir, tmp_path):
    step_dir = save(run_dir)
    expected = arrays_of(step_dir)
    (step_dir / 'params.w' / '.zarray').unlink()
    everything = t5ckpt.RepairOptions(drop=['.*'])
    report = t5ckpt.repair(step_dir, tmp_path / 'mended', options=everything)
    assert (report.dropped, report.rebuilt) == ((), ('params.w/.zarray',))
    assert arrays_of(tmp_path / 'mended' / 'checkpoint_1') == expected
    as_t5x_writes(step_dir)
    # Without lists a lost chunk behind a lost .zarray comes to light only when that is there again.
    chunk = step_dir / 'params.w' / '0.0'
    chunk.write_bytes(chunk.read_bytes()[:100])
    with pytest.raises(errors.CorruptCheckpointError, match=r'params.w/0\.0'):
        t5ckpt.repair(step_dir, tmp_path / 'other', options=t5ckpt.RepairOptions(trust_files=True))
    assert t5ckpt.repair(step_dir, tmp_path / 'other', options=everything).dropped == ('params/w',)
    assert t5ckpt.verify(tmp_path / 'other', full=True).ok


def test_places_that_a_repair_refuses(run_dir, tmp_path):
    step_dir = save(run_dir)
    (step_dir / 'params.w' / '.zarray').unlink()
    before = bytes_of(step_dir)
    for where in (step_dir / 'params.w', step_dir / 'new'):
        with pytest.raises(ValueError, match=r'is inside .*checkpoint_1'):
            t5ckpt.repair(step_dir, where)
        with pytest.raises(ValueError, match=r'is inside .*checkpoint_1'):
            t5ckpt.copy_checkpoint(step_dir, where)
    assert bytes_of(step_dir) == before
    (tmp_path / 'linked').mkdir()
    (tmp_path / 'linked' / 'checkpoint_1').symlink_to(step_dir)
    with pytest.raises(errors.UnsupportedFormatError, match='symbolic link'):
        t5ckpt.repair(tmp_path / 'linked', in_place=True)
    assert (tmp_path / 'linked' / 'checkpoint_1').is_symlink()
    (step_dir / 'back\\slash').write_text('stray')
    t5ckpt.repair(step_dir, tmp_path / 'mended')
    assert t5ckpt.verify(tmp_path / 'mended', full=True).ok


def test_nothing_would_be_left(run_dir, tmp_path):
    state = {'w': np.ones((64, 64), np.float32)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=run_dir, inline_bytes=100) as ck:
        ck.save(state, step=1)
    next((run_dir / 'checkpoint_1' / 'w').glob('0*')).unlink()
    with pytest.raises(errors.CorruptCheckpointError, match='nothing would be left'):
        t5ckpt.repair(run_dir, tmp_path / 'mended', options=t5ckpt.RepairOptions(drop=['w']))


def test_lost_leaves_are_left_out_on_request(run_dir, tmp_path):
    step_dir = save(run_dir)
    (step_dir / 'params.w' / '0.0').unlink()
    flip(step_dir / 'params.edge' / '0.0', random.Random(1))
    with pytest.raises(errors.CorruptCheckpointError, match='params/edge') as caught:
        t5ckpt.repair(step_dir, tmp_path / 'mended', options=t5ckpt.RepairOptions(drop=['params/w']))
    assert 'drop=' in str(caught.value)
    with pytest.raises(errors.CorruptCheckpointError, match='names nothing that is damaged'):
        t5ckpt.repair(step_dir, tmp_path / 'mended', options=t5ckpt.RepairOptions(drop=['params/.*', 'bias']))
    assert not (tmp_path / 'mended').exists()
    report = t5ckpt.repair(step_dir, tmp_path / 'mended', options=t5ckpt.RepairOptions(drop=['params/.*']))
    assert report.dropped == ('params/edge', 'params/w')
    mended = tmp_path / 'mended'
    assert t5ckpt.verify(mended, full=True).ok
    assert not (mended / 'checkpoint_1' / 'params.w').exists()
    state = state_of()
    with t5ckpt.Checkpointer(state, None, str(mended), Iterator()) as ck:
        with pytest.raises(errors.T5CkptError, match='params/w'):
            ck.restore()
        restored = ck.restore(
            fallback_state={'params': {'w': np.zeros((96, 64), np.float32), 'edge': state['params']['edge']}}
        )
    assert not np.asarray(restored['params']['w']).any()
    np.testing.assert_array_equal(restored['params']['embed'], state['params']['embed'])
    assert restored['count'] == 0
    assert restored['note'] == 'text'


def test_an_iterator_that_is_lost(run_dir, tmp_path):
    step_dir = save(run_dir)
    (file,) = [path for path in files_of(step_dir) if path.name.startswith('train_ds')]
    file.write_bytes(b'x')
    with pytest.raises(errors.CorruptCheckpointError, match='train_ds'):
        t5ckpt.repair(step_dir, tmp_path / 'mended')
    report = t5ckpt.repair(step_dir, tmp_path / 'mended', options=t5ckpt.RepairOptions(drop=['train_ds.*']))
    assert report.dropped == (file.name,)
    assert t5ckpt.verify(tmp_path / 'mended', full=True).ok


def test_in_place(run_dir):
    step_dir = save(run_dir)
    t5ckpt.pin_checkpoint(step_dir)
    expected = arrays_of(step_dir)
    (step_dir / 'params.w' / '.zarray').unlink()
    (step_dir / 'integrity.0.json').unlink()
    report = t5ckpt.repair(run_dir, in_place=True)
    assert report.rebuilt == ('integrity.0.json', 'params.w/.zarray')
    assert t5ckpt.verify(step_dir, full=True).ok
    assert t5ckpt.is_pinned_checkpoint(step_dir)
    assert arrays_of(step_dir) == expected
    assert [path.name for path in run_dir.iterdir()] == ['checkpoint_1']
    with t5ckpt.Checkpointer(state_of(), None, str(run_dir), iterator := Iterator(0)) as ck:
        assert ck.restore()['note'] == 'text'
    assert iterator.position == 1


@pytest.mark.parametrize('in_place', [True, False])
def test_a_step_that_is_deleted_meanwhile_does_not_come_back(run_dir, tmp_path, in_place):
    step_dir = save(run_dir)
    (step_dir / 'params.w' / '.zarray').unlink()
    options = t5ckpt.RepairOptions(clock=Meanwhile(lambda: shutil.rmtree(step_dir)))
    with pytest.raises(errors.CheckpointNotFoundError, match='deleted'):
        t5ckpt.repair(step_dir, None if in_place else tmp_path / 'other', in_place=in_place, options=options)
    assert list(run_dir.iterdir()) == []
    assert not in_place or not (tmp_path / 'other').exists()


def test_a_step_that_is_saved_anew_meanwhile_stays(run_dir):
    step_dir = save(run_dir)
    (step_dir / 'params.w' / '.zarray').unlink()
    state = {'w': np.arange(90_000, dtype=np.float32)}

    def save_again():
        shutil.rmtree(step_dir)
        with t5ckpt.Checkpointer(state, checkpoints_dir=run_dir) as ck:
            ck.save(state, step=1)

    with pytest.raises(errors.CorruptCheckpointError, match='has changed since it was verified'):
        t5ckpt.repair(step_dir, in_place=True, options=t5ckpt.RepairOptions(clock=Meanwhile(save_again)))
    assert t5ckpt.verify(step_dir, full=True).ok
    np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(step_dir)['w'], state['w'])


@pytest.mark.parametrize('place', ['file', 'gs', 's3'])
def test_two_repairs_to_one_place(run_dir, tmp_path, place, request):
    """One wins, the other is told, and what the first wrote stays."""
    url = str(tmp_path / 'other') if place == 'file' else request.getfixturevalue(place).url()
    step_dir = save(run_dir)
    expected = arrays_of(step_dir)
    (step_dir / 'params.w' / '.zarray').unlink()
    outcomes = []

    def attempt(**options):
        try:
            t5ckpt.repair(step_dir, url, options=t5ckpt.RepairOptions(**options))
            outcomes.append('done')
        except errors.CheckpointExistsError as error:
            outcomes.append('refused' if 'to another ' in str(error) else str(error))

    attempt(clock=Meanwhile(attempt))
    assert sorted(outcomes) == ['done', 'refused']
    assert t5ckpt.all_steps(url) == [1]
    assert t5ckpt.verify(url, full=True).ok
    assert arrays_of(f'{url}/checkpoint_1') == expected


@pytest.mark.parametrize('how', ['flipped', 'truncated', 'missing'])
def test_a_damaged_manifest_is_lost(run_dir, tmp_path, how):
    step_dir = save(run_dir)
    harm(step_dir / 'checkpoint', how, random.Random(1))
    before = bytes_of(step_dir)
    with pytest.raises((errors.CorruptCheckpointError, errors.UnsupportedFormatError)):
        t5ckpt.repair(step_dir, tmp_path / 'mended')
    assert bytes_of(step_dir) == before
    assert not (tmp_path / 'mended').exists()


def test_files_of_another_step_are_not_mended(run_dir, tmp_path):
    step_dir = save(run_dir)
    put_facts(step_dir, facts_of(save(run_dir, 2, 1)))
    with pytest.raises(errors.CorruptCheckpointError, match='is of step 2'):
        t5ckpt.repair(step_dir, tmp_path / 'mended')


def test_wrong_calls(run_dir, tmp_path):
    step_dir = save(run_dir)
    (step_dir / 'params.w' / '.zarray').unlink()
    for where in [{}, {'output': tmp_path / 'x', 'in_place': True}]:
        with pytest.raises(ValueError, match='pass either'):
            t5ckpt.repair(run_dir, **where)
    with pytest.raises(errors.CheckpointExistsError, match='already'):
        t5ckpt.repair(run_dir, save(tmp_path / 'other').parent)
    with pytest.raises(errors.CheckpointNotFoundError, match='path of a step'):
        t5ckpt.repair(run_dir, tmp_path / 'checkpoint_3')
    with pytest.raises(ValueError, match='not a regular expression'):
        t5ckpt.RepairOptions(drop=['('])
    with pytest.raises(errors.CheckpointNotFoundError):
        t5ckpt.repair(tmp_path / 'nothing', tmp_path / 'x')


def test_to_memory(run_dir):
    step_dir = save(run_dir)
    (step_dir / 'params.w' / '.zarray').unlink()
    report = t5ckpt.repair(run_dir, 'memory://mended/')
    assert report.rebuilt == ('params.w/.zarray',)
    assert t5ckpt.verify('memory://mended/', full=True).ok
    storage = open_storage('memory://mended/')
    before = {key for key, _ in storage.walk('checkpoint_1')}
    (zarray,) = [key for key in before if key.endswith('/params.w/.zarray')]
    storage.delete_file(zarray)
    report = t5ckpt.repair('memory://mended/', in_place=True)
    assert report.rebuilt == (zarray.removeprefix('checkpoint_1/'),)
    assert t5ckpt.verify('memory://mended/', full=True).ok
    after = {key for key, _ in storage.walk('checkpoint_1')}
    assert before & after == {'checkpoint_1/checkpoint', 'checkpoint_1/train_ds-000-of-001.txt'}, (
        'one write has replaced the damaged step'
    )


@pytest.mark.parametrize('leftover', ['t5ckpt-0000000000000000', 't5ckpt-ffffffffffffffff'])
@pytest.mark.parametrize('place', ['in place', 'disk', 'bucket'])
def test_in_a_bucket_only_the_files_of_the_step_are_taken(tmp_path, place, leftover):
    """Not those of a killed save, of a replaced step of T5X, T5X's copy of the position: their names would become the same."""
    state = {'w': np.arange(100_000, dtype=np.float32), 'step': np.int32(3)}
    iterator = Position(7)
    storage = open_storage(url := f'memory://{uuid.uuid4().hex}/run')
    with t5ckpt.Checkpointer(state, None, storage, iterator) as ck:
        ck.save(state)
    keys = [key for key, _ in storage.walk('checkpoint_3')]
    (own,) = {key.split('/')[1] for key in keys if '/t5ckpt-' in key}
    for key in keys:
        if own in key:
            storage.write(key.replace(own, leftover), b'x' * len(storage.read(key)))
            storage.write(key.replace(f'{own}/', ''), b'x' * len(storage.read(key)))
    storage.write('checkpoint_3/train_ds-000-of-001.msgpack', b'of an older save')
    storage.write('checkpoint_3/notes.txt', b'of a user')
    storage.delete_file(f'checkpoint_3/{own}/w/.zarray')
    target = {'in place': url, 'disk': tmp_path / 'out', 'bucket': f'memory://{uuid.uuid4().hex}/out'}[place]
    report = t5ckpt.repair(url, in_place=True) if place == 'in place' else t5ckpt.repair(url, target)
    assert report.rebuilt == (f'{own}/w/.zarray',)
    assert t5ckpt.verify(target, full=True).ok
    assert np.array_equal(t5ckpt.load_t5x_checkpoint(target)['w'], state['w'])
    iterator.at = 0
    with t5ckpt.Checkpointer(state, None, target, iterator) as ck:
        ck.restore()
    assert iterator.at == 7
    notes = [key for key, _ in open_storage(target).walk('checkpoint_3') if key.endswith('notes.txt')]
    assert notes == ([] if place == 'bucket' else ['checkpoint_3/notes.txt'])


class Position:
    """A data iterator."""

    def __init__(self, at):
        self.at = at

    def get_state(self):
        return {'at': self.at}

    def set_state(self, state):
        self.at = state['at']


@pytest.mark.parametrize('name', ['case01', 'case03', 'case06', 'case15'])
def test_a_checkpoint_of_t5x(golden, tmp_path, name):
    case = cases.by_name(name)
    step_dir = case.step_dir(golden)
    expected = arrays_of(step_dir)
    copy = tmp_path / 'run' / step_dir.name
    for path in files_of(step_dir):
        target = copy / path.relative_to(step_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    zarrays = sorted(copy.rglob('.zarray'))
    assert zarrays
    before = {path: json.loads(path.read_text()) for path in zarrays}
    for path in zarrays:
        path.unlink()
    assert not t5ckpt.repair(step_dir, dry := tmp_path / 'dry', options=t5ckpt.RepairOptions(dry_run=True)).changed
    with pytest.raises(errors.CorruptCheckpointError, match=r'No checksum verifies.*trust_files=True'):
        t5ckpt.repair(copy, in_place=True)
    trust = t5ckpt.RepairOptions(trust_files=True)
    report = t5ckpt.repair(copy, in_place=True, options=trust)
    assert len(report.rebuilt) == len(zarrays)
    assert {path: json.loads(path.read_text()) for path in zarrays} == before
    assert arrays_of(copy) == expected
    # It had no checksums, and nobody knows whether these are the values: it gets none unless that is asked for.
    assert not t5ckpt.verify(copy, full=True).has_checksums
    assert not [path for path in copy.iterdir() if path.name in OWN_FILES]
    # A chunk that is cut off is no chunk.
    zarrays[0].unlink()
    chunk = next(path for path in sorted(zarrays[0].parent.iterdir()) if path.name != '.zarray')
    chunk.write_bytes(chunk.read_bytes()[: chunk.stat().st_size // 2])
    before = bytes_of(copy)
    with pytest.raises(errors.CorruptCheckpointError, match=chunk.name):
        t5ckpt.repair(copy, in_place=True, options=trust)
    assert bytes_of(copy) == before
    assert not dry.exists()


def test_checksums_for_a_checkpoint_that_has_none(golden, tmp_path):
    options = t5ckpt.RepairOptions(add_checksums=True)
    # Copied before: the repaired one shares its files.
    step_dir = copied(golden, tmp_path, 'case01_adafactor')
    report = t5ckpt.repair(step_dir, tmp_path / 'mended', options=options)
    assert report.rebuilt == ('checkpoint', 'integrity.0.json')
    mended = t5ckpt.verify(tmp_path / 'mended', full=True)
    assert mended.ok
    assert mended.has_checksums
    flip(next((tmp_path / 'mended').rglob('0.0')), random.Random(1))
    assert not t5ckpt.verify(tmp_path / 'mended', full=True).ok


def test_the_verb(run_dir, tmp_path):
    step_dir = save(run_dir)
    assert 'nothing to repair' in t5ckpt_cli('repair', run_dir, '--dry-run')
    (step_dir / 'params.w' / '.zarray').unlink()
    out = t5ckpt_cli('repair', run_dir, '--dry-run')
    assert 'can be repaired; nothing was written' in out
    assert 'rebuilt: params.w/.zarray' in out
    assert 'pass either' in t5ckpt_cli('repair', run_dir, code=2)
    assert '--yes' in t5ckpt_cli('repair', run_dir, '--in-place', code=2)
    done = json.loads(t5ckpt_cli('repair', run_dir, tmp_path / 'mended', '--json'))
    assert done['rebuilt'] == ['params.w/.zarray']
    assert not done['dry_run']
    assert not t5ckpt.verify(step_dir).ok
    t5ckpt_cli('repair', run_dir, '--in-place', '--yes')
    assert t5ckpt.verify(step_dir, full=True).ok
    (step_dir / 'params.edge' / '0.0').unlink()
    assert "naming them: --drop 'params/edge'. Nothing" in t5ckpt_cli('repair', run_dir, '--in-place', '--yes', code=3)
    t5ckpt_cli('repair', run_dir, '--in-place', '--yes', '--drop', 'params/edge')
    assert jax.tree.leaves(t5ckpt.load_t5x_checkpoint(run_dir))
    assert pathlib.Path(run_dir, 'checkpoint_1').is_dir()


def test_a_pinned_step_of_a_bucket_is_not_replaced_by_its_repair():
    """On a disk the pin moves with the step; here a pin of the old step would appear before the new one."""
    url = f'memory://{uuid.uuid4().hex}/run'
    state = {'w': np.arange(100_000, dtype=np.float32), 'step': np.int32(3)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=url) as ck:
        ck.save(state)
    storage = open_storage(url)
    (zarray,) = [key for key, _ in storage.walk('checkpoint_3') if key.endswith('/w/.zarray')]
    storage.delete_file(zarray)
    t5ckpt.pin_checkpoint(f'{url}/checkpoint_3')
    with pytest.raises(errors.StepKeptError, match='pinned'):
        t5ckpt.repair(url, in_place=True)
    assert storage.is_file('checkpoint_3/PINNED')

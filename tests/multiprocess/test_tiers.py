"""Four real processes with a local directory each: all back; disks in another order, lost, damaged and full; kills; the bucket's
troubles."""

import contextlib
import json
import os
import shutil
import time

import numpy as np
import pytest
import scenarios
from job import DEAD, HEARTBEAT_SECONDS, Job
from support import t5x_rules
from support.cli import t5ckpt_cli
from support.facts import facts_of, put_facts
from tier_disks import COUNT, Place, restored, saved
from tier_scenarios import ONCE, TWICE

import t5ckpt
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.errors import CorruptCheckpointError, LocalDirError, StepMismatchWarning
from t5ckpt.storage import open_storage

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_all_back(four, place):
    """A restart with intact disks reads nothing of the bucket, and each process only its own disk."""
    saved(four, place, [1, 2, 3], persist=[2])
    assert t5ckpt.all_steps(place.run) == [2]
    t5x_rules.check(place.run / 'checkpoint_2')
    assert t5ckpt.verify(place.run / 'checkpoint_2', full=True).ok
    for disk in range(COUNT):
        assert place.steps_on(disk) == ['checkpoint_2', 'checkpoint_3']
    for answer in restored(four, place, persist=[]):
        own, peers, run = answer['bytes']
        assert (answer['step'], answer['position'], peers, run) == (3, 3, 0, 0)
        assert own > 0
    check_parts(place)


NAMES_PART = (
    'is the part of process 1 of 4: .* in a job of as many processes .* or read the run to which its steps are uploaded'
)


def check_parts(place):
    """What the verbs and the readers of one checkpoint say of the part of one process."""
    for index, disk in enumerate(place.disks):
        report = t5ckpt.verify(disk, 3, full=True)
        assert (report.damages, report.notes, report.part) == ((), (), f'process {index} of {COUNT}')
        for each in json.loads(t5ckpt_cli('ls', disk, '--json')):
            if each['tier'] != 'local':
                continue
            files = (disk / f'checkpoint_{each["step"]}').rglob('*')
            assert (each['state'], each['complete']) == ('part', True)
            assert each['bytes'] == sum(file.stat().st_size for file in files if file.is_file())
    text = t5ckpt_cli('verify', place.disks[1])
    assert f'the part of process 1 of {COUNT}: complete (presence and sizes' in text
    with pytest.raises(CorruptCheckpointError, match=NAMES_PART):
        t5ckpt.load_t5x_checkpoint(place.disks[1])
    with pytest.raises(CorruptCheckpointError, match=NAMES_PART):
        t5ckpt.copy_checkpoint(place.disks[1], place.run.parent / 'copy')
    view = t5ckpt.open_checkpoint(place.disks[1])
    assert np.array_equal(
        view['target/everywhere'][:8], scenarios.full('target/everywhere', (2048, 1024), 'float32', 3)[:8]
    )
    for read in (view['target/rows'].get, lambda: view['target/rows'][:], view.stats):
        with pytest.raises(CorruptCheckpointError, match=rf'target/(rows|bfloat): .* is missing\. .*{NAMES_PART}'):
            read()
    disk, copied = place.disks[1], place.run.parent / 'copy'
    for words in (
        ['stats', disk],
        ['diff', disk, place.run],
        ['cp', disk, copied],
        ['cp', disk, copied, '--leave', 'x'],
    ):
        text = t5ckpt_cli(*words, code=3)
        assert 'is the part of process 1 of 4: ' in text
        assert 'or read the run to which its steps are uploaded' in text
        assert 'older step' not in text
    (chunk, *_) = (place.disks[1] / 'checkpoint_3' / 'target.rows').glob('[0-9]*')
    chunk.unlink()
    (damage,) = t5ckpt.verify(place.disks[1]).damages
    assert (damage.kind, damage.file) == ('missing', f'target.rows/{chunk.name}')


def test_disks_in_another_order(four, place):
    """Each process gets its arrays and its position from the one with its disk, and no byte from the bucket."""
    saved(four, place, [1, 2], persist=[1])
    for _ in range(2):
        answers = restored(four, place, order=[2, 3, 1, 0], persist=[])
        assert [(answer['step'], answer['position'], answer['bytes'][2]) for answer in answers] == [(2, 2, 0)] * COUNT
        # What was received is not written.
        assert all(answer['bytes'][1] > 0 for answer in answers)
    place.begin(four, order=[2, 3, 1, 0], persist=[3])
    assert four.run('tiers_save', 3) == [3] * COUNT
    assert four.run('tiers_wait', 3) == [None] * COUNT
    four.run('tiers_close')
    answers = restored(four, place, order=[2, 3, 1, 0], persist=[])
    assert [(answer['step'], answer['bytes'][1:]) for answer in answers] == [(3, [0, 0])] * COUNT
    assert t5ckpt.verify(place.run / 'checkpoint_3', full=True).ok


@pytest.mark.parametrize('lost', [0, 3])
def test_the_replicas_stand_in_for_a_lost_disk(four, place, lost):
    saved(four, place, [1, 2, 3], persist=[1], chunk_bytes=2**19)
    shutil.rmtree(place.disks[lost])
    for budget in (1.0, 0.008):
        answers = restored(four, place, persist=[], restore_concurrent_gb=budget)
        assert [(answer['step'], answer['position'], answer['bytes'][2]) for answer in answers] == [(3, 3, 0)] * COUNT
        assert [answer['bytes'][1] > 0 for answer in answers] == [index == lost for index in range(COUNT)]
    assert place.steps_on(lost) == []
    place.begin(four, persist=[])
    assert four.run('tiers_save', 4) == [4] * COUNT
    four.run('tiers_close')
    # Another disk may be lost now.
    shutil.rmtree(place.disks[(lost + 2) % COUNT])
    assert [(answer['step'], answer['bytes'][2]) for answer in restored(four, place, persist=[])] == [(4, 0)] * COUNT


def test_each_process_has_a_host_array(four, place):
    """Of the process of its disk in a restart, and of process 0 in the bucket; a process that lost its disk has any of them."""
    four.run('tiers_host_arrays', place.run, 'save', each=[str(disk) for disk in place.disks])
    for order in ([0, 1, 2, 3], [2, 3, 1, 0]):
        disks = [str(place.disks[disk]) for disk in order]
        assert four.run('tiers_host_arrays', place.run, 'restore', each=disks) == [[each, 0] for each in order]
    shutil.rmtree(place.disks[2])
    (*_, third, _) = four.run('tiers_host_arrays', place.run, 'restore', each=[str(disk) for disk in place.disks])
    assert third[0] in (0, 1, 3)
    for disk in place.disks:
        shutil.rmtree(disk, ignore_errors=True)
    disks = [str(disk) for disk in place.disks]
    assert four.run('tiers_host_arrays', place.run, 'restore', each=disks) == [[0, 0]] * COUNT
    assert t5ckpt.verify(place.run / 'checkpoint_1', full=True).ok


def test_a_leaf_on_the_devices_of_each_process(four, place):
    """No process knows what the other ones need. All have the error, and no collective begins."""
    saved(four, place, [1], persist=[], leaves=['target/everywhere', 'state/step'], iterator=False)
    disks = [str(disk) for disk in place.disks]
    four.run('tiers_restore_on_own_devices', place.run, each=disks)
    errors = four.errors('tiers_restore_on_own_devices', place.run, each=[disks[1], disks[0], *disks[2:]], timeout=60)
    assert all('the processes do not plan alike' in text for _, text in errors), errors


def test_lazy_parameters_are_refused_by_all(four, place):
    saved(four, place, [1], persist=[])
    place.begin(four, persist=[])
    errors = four.errors('tiers_restore_lazily')
    assert {kind for kind, _ in errors} == {'UnsupportedTopologyError'}
    assert [answer['step'] for answer in four.run('tiers_restore')] == [1] * COUNT
    four.run('tiers_close')


def test_fewer_processes_and_another_mesh(four, two, place):
    """They restore the step of the bucket; the local steps stay for the job that saved them."""
    saved(four, place, [1, 2], persist=[1], iterator=False)
    check_one_process(place)
    disks = [str(place.disks[disk]) for disk in (3, 0)]
    two.run('tiers', place.run, TWICE, {'persist': [], 'iterator': False, 'shape': [4, 2]}, each=disks)
    answers = two.run('tiers_restore')
    assert [(answer['step'], answer['bytes'][:2], answer['bytes'][2] > 0) for answer in answers] == [
        (1, [0, 0], True)
    ] * 2
    assert 'local step 2 was not restored: 4 processes saved it, and this job has 2' in ' '.join(answers[0]['why'])
    assert two.run('tiers_steps') == [[1]] * 2
    assert two.errors('tiers_restore', 2)[0][0] == 'UnsupportedTopologyError'
    two.run('tiers_close')
    assert [answer['step'] for answer in restored(four, place, persist=[], iterator=False)] == [2] * COUNT
    two.run('tiers', place.run, TWICE, {'iterator': False}, each=disks)
    for step in (2, 3):
        assert two.run('tiers_save', step) == [step] * 2
    assert two.run('tiers_wait') == [None] * 2
    two.run('tiers_close')
    assert t5ckpt.verify(place.run / 'checkpoint_3', full=True).ok
    assert any(name.startswith('checkpoint_2.damaged-') for name in place.steps_on(3))


@pytest.mark.parametrize(('before', 'after'), [(4, 2), (2, 4)])
def test_another_number_of_processes_with_an_iterator(request, place, before, after):
    """Positions of another number of shards raise an error, as without local directories; without them, the training goes on."""
    jobs = {4: request.getfixturevalue('four'), 2: request.getfixturevalue('two')}
    disks = {4: place.disks, 2: place.disks[::3]}

    def begin(count, **options):
        jobs[count].run('tiers', place.run, TWICE, options, each=[str(disk) for disk in disks[count]])

    begin(before)
    for step in (1, 2):
        assert jobs[before].run('tiers_save', step) == [step] * before
        assert jobs[before].run('tiers_wait', step) == [None] * before
    jobs[before].run('tiers_close')
    begin(after)
    for kind, text in jobs[after].errors('tiers_restore'):
        assert kind in ('DatasetStateError', 'RemoteError'), (kind, text)
        assert 'has no iterator state train_ds-00' in text
        assert f'-of-{before:03}' in text
    answers = jobs[after].run('tiers_restore', 2, 2, False)
    assert [(answer['step'], answer['position'], answer['bytes'][:2]) for answer in answers] == [(2, 0, [0, 0])] * after
    assert jobs[after].run('tiers_save', 3) == [3] * after
    assert jobs[after].run('tiers_wait', 3) == [None] * after
    jobs[after].run('tiers_close')
    begin(after)
    answers = jobs[after].run('tiers_restore')
    assert [(answer['step'], answer['position'], *answer['bytes'][1:]) for answer in answers] == [(3, 3, 0, 0)] * after
    jobs[after].run('tiers_close')
    assert t5ckpt.verify(place.run / 'checkpoint_3', full=True).ok


def check_one_process(place):
    """A job of one process has only a part of the newest step: it restores the bucket's, and saves that step again."""
    state, tier = scenarios.state(2, leaves=TWICE), t5ckpt.LocalTier(place.disks[1], persist=t5ckpt.SaveAt([]))
    with t5ckpt.Checkpointer(state, checkpoints_dir=place.run, local=tier) as ck:
        assert ck.all_steps() == [1]
        found = np.asarray(ck.restore()['target']['small'])
        assert np.array_equal(found, scenarios.full('target/small', (64,), 'float32', 1))
        with pytest.warns(StepMismatchWarning):
            assert ck.save(state, step=2).step == 2
    assert t5ckpt.verify(place.disks[1], full=True).part is None
    assert [name[:22] for name in place.steps_on(1)] == ['checkpoint_1', 'checkpoint_2', 'checkpoint_2.damaged-1']


def test_more_processes(four, two, place, tmp_path):
    """They upload the step that waited, since all of its disks are there, and restore it from the bucket."""
    trouble, options = tmp_path / 'trouble', {'iterator': False, 'persist': [2]}
    disks = [str(disk) for disk in place.disks[:2]]
    two.run('tiers', place.run, TWICE, options | {'trouble': str(trouble)}, each=disks)
    trouble.write_text('away')
    two.run('tiers_save', 2)
    two.run('tiers_close')
    assert t5ckpt.all_steps(place.run) == []
    trouble.write_text('held')
    place.begin(four, order=[0, 2, 1, 3], iterator=False, persist=[], trouble=str(trouble))
    errors = four.errors('tiers_restore')
    assert {kind for kind, _ in errors} == {'UnsupportedTopologyError'}
    assert all('step 2: 2 processes saved it, and this job has 4' in text for _, text in errors)
    trouble.unlink()
    assert four.run('tiers_wait', 2) == [None] * COUNT
    assert t5ckpt.verify(place.run / 'checkpoint_2', full=True).ok
    assert [(answer['step'], answer['bytes'][:2]) for answer in four.run('tiers_restore')] == [(2, [0, 0])] * COUNT
    four.run('tiers_close')


def test_both_holders_of_a_position_lost(four, place):
    """The arrays are on the disks, and the position of process 1 is not: the bucket's step, unless no position is wanted."""
    saved(four, place, [1, 2], persist=[1])
    for disk in (1, 3):
        (position,) = (place.disks[disk] / 'checkpoint_2').glob('train_ds-001-of-004*')
        position.unlink()
    place.begin(four, persist=[])
    answers = four.run('tiers_restore', 2, 2, False)
    assert [(answer['position'], answer['bytes'][1:]) for answer in answers] == [(0, [0, 0])] * COUNT
    four.run('tiers_close')
    answers = restored(four, place, persist=[])
    assert [(answer['step'], answer['position']) for answer in answers] == [(1, 1)] * COUNT
    assert 'no disk has 1 position of data iterators' in ' '.join(answers[0]['why'])


def test_both_holders_lost(four, place):
    """A shard that is on no disk: the bucket's step, and the log says why."""
    saved(four, place, [1, 2, 3], persist=[2])
    for disk in (1, 3):
        shutil.rmtree(place.disks[disk])
    answers = restored(four, place, persist=[], iterator=False)
    assert [answer['step'] for answer in answers] == [2] * COUNT
    (of_three,) = [line for line in answers[0]['why'] if 'local step 3 was not restored: a part of target/' in line]
    assert of_three.endswith('is on no disk')
    # Step 2 is on two disks, so all of it comes from the bucket.
    assert [(answer['bytes'][:2], answer['bytes'][2] > 0) for answer in answers] == [([0, 0], True)] * COUNT
    # Step 3 cannot be restored: it is not listed anymore, and is saved again.
    place.begin(four)
    assert all(3 not in steps for steps in four.run('tiers_steps'))
    assert four.run('tiers_save', 3) == [3] * COUNT
    four.run('tiers_close')
    assert [answer['step'] for answer in restored(four, place)] == [3] * COUNT


OTHER = (4, 2)
"""The shape of a mesh for which no disk has all parts of 'both'."""


def test_other_shardings(four, place):
    """The bucket's step. The local one stays, until it is saved again; a job with its shardings restores it."""
    saved(four, place, [1, 2], leaves=ONCE, persist=[1])
    place.begin(four, ONCE, persist=[], shape=OTHER)
    for answer in four.run('tiers_restore'):
        assert (answer['step'], answer['position'], answer['bytes'][:2]) == (1, 1, [0, 0])
    assert four.run('tiers_restore_or_init', 1) == [1] * COUNT
    four.run('tiers_close')
    assert [place.steps_on(disk)[-1] for disk in range(COUNT)] == ['checkpoint_2'] * COUNT
    assert [answer['step'] for answer in restored(four, place, leaves=ONCE, persist=[])] == [2] * COUNT
    place.begin(four, ONCE, persist=[], shape=OTHER)
    assert four.run('tiers_restore_or_init', 1) == [1] * COUNT
    assert four.run('tiers_save', 2) == [2] * COUNT
    four.run('tiers_close')
    for disk in range(COUNT):
        assert [name[:20] for name in place.steps_on(disk)] == ['checkpoint_1', 'checkpoint_2', 'checkpoint_2.damaged']
    assert [answer['step'] for answer in restored(four, place, leaves=ONCE, persist=[], shape=OTHER)] == [2] * COUNT


@pytest.mark.parametrize('start', ['tiers_restore', 'tiers_restore_or_init'])
def test_other_shardings_and_nothing_in_the_bucket(four, place, start):
    saved(four, place, [1, 2], leaves=ONCE, persist=[])
    place.begin(four, ONCE, persist=[], shape=OTHER)
    for kind, text in four.errors(start, 1 if start == 'tiers_restore_or_init' else None):
        assert kind == 'UnsupportedTopologyError'
        assert text.endswith(
            'the shardings are not those of the save. Start as many processes, with the same shardings.'
        )
    four.run('tiers_close')
    assert [answer['step'] for answer in restored(four, place, leaves=ONCE, persist=[])] == [2] * COUNT


def test_all_disks_lost(four, place):
    saved(four, place, [1, 2], leaves=ONCE, persist=[1])
    for disk in place.disks:
        shutil.rmtree(disk)
    answers = restored(four, place, leaves=ONCE, persist=[])
    assert [(answer['step'], answer['position']) for answer in answers] == [(1, 1)] * COUNT
    # Each process reads what its own devices need: a quarter of 'both', one of two rows, and all of the replicated leaves.
    sizes = [64 * 4096 * 4 // 4, 64 * 4096 * 4 // 2, 32 * 2048 * 2 // 2, 2048 * 1024 * 4]
    assert [answer['bytes'] for answer in answers] == [[0, 0, sum(sizes)]] * COUNT


def test_the_log_has_the_reason_for_each_newer_step(four, place):
    """The manifest of step 3 is damaged on all disks, and a part of step 2 is on none."""
    saved(four, place, [1, 2, 3], leaves=ONCE, persist=[1], keep_local=3)
    for disk in place.disks:
        put_facts(disk / 'checkpoint_3', b'{' * 40)
    shutil.rmtree(place.disks[3] / 'checkpoint_2')
    place.begin(four, ONCE, persist=[])
    # Nothing is said of newer steps when a step is asked for.
    assert [(answer['step'], answer['why']) for answer in four.run('tiers_restore', 1)] == [(1, [])] * COUNT
    why = four.run('tiers_restore')[0]['why']
    (of_two,) = [line for line in why if 'local step 2 was not restored: ' in line]
    assert 'a part of target/both is on no disk' in of_two
    (of_three,) = [line for line in why if 'local step 3 was not restored: ' in line]
    assert 'checkpoint_3/checkpoint' in of_three
    four.run('tiers_close')


def test_without_the_bucket_a_lost_shard_is_an_error_and_the_older_step_is_taken(four, place):
    saved(four, place, [1, 2], leaves=ONCE, persist=[])
    # Disk 3 does not have step 2, as after a crash between the commits of the processes.
    shutil.rmtree(place.disks[3] / 'checkpoint_2')
    place.begin(four, ONCE, persist=[])
    errors = four.errors('tiers_restore', 2)
    assert all('a part of target/both is on no disk' in text for _, text in errors)
    four.run('tiers_close')
    answers = restored(four, place, leaves=ONCE, persist=[])
    assert [answer['step'] for answer in answers] == [1] * COUNT
    assert [place.steps_on(disk)[0] for disk in range(COUNT)] == ['checkpoint_1'] * COUNT
    assert all(name.startswith(('checkpoint_1', 'checkpoint_2.damaged-')) for name in place.steps_on(0))
    shutil.rmtree(place.disks[2])
    place.begin(four, ONCE, persist=[])
    errors = four.errors('tiers_restore')
    assert {kind for kind, _ in errors} == {'CorruptCheckpointError'}
    four.run('tiers_close')


@pytest.mark.parametrize('leaf', ['target.rows', 'target.both'])
def test_a_damaged_file_counts_as_absent(four, place, leaf):
    """The replica has the shards of 'rows'; nothing else has those of 'both', but the bucket."""
    saved(four, place, [1, 2], leaves=ONCE, persist=[2])
    chunk = min((place.disks[2] / 'checkpoint_2' / leaf).glob('[0-9]*'))
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    answers = restored(four, place, leaves=ONCE, persist=[])
    assert [answer['step'] for answer in answers] == [2] * COUNT
    is_replicated = leaf == 'target.rows'
    assert [answer['bytes'][1] > 0 for answer in answers] == [is_replicated and index == 2 for index in range(COUNT)]
    assert [answer['bytes'][2] == 0 for answer in answers] == [is_replicated] * COUNT
    assert any(f'{chunk.name} is damaged, and counts as absent' in line for line in answers[2]['why'])
    assert chunk.read_bytes() == data


def test_a_step_that_is_damaged_in_both_tiers_is_saved_and_uploaded_anew(four, place):
    saved(four, place, [1, 2], persist=[1, 2])
    for root in (place.run, *place.disks):
        for chunk in (root / 'checkpoint_2/target.rows').glob('[0-9]*'):
            chunk.write_bytes(chunk.read_bytes()[:-1] + b'?')
    place.begin(four, persist=[2])
    assert four.run('tiers_restore_or_init', 1) == [1] * COUNT
    assert four.run('tiers_save', 2) == [2] * COUNT
    assert four.run('tiers_wait') == [None] * COUNT
    four.run('tiers_close')
    for root in (place.run, *place.disks):
        assert t5ckpt.verify(root, 2, full=True).ok


def test_a_step_that_the_disk_of_process_0_has_lost_is_deleted(four, place):
    place.begin(four, persist=[])
    for step in (1, 2):
        four.run('tiers_save', step)
    shutil.rmtree(place.disks[0] / 'checkpoint_1')
    assert four.run('tiers_delete', 1) == [[2]] * COUNT
    missing = f'{place.disks[0]} and {place.run}: step 1 does not exist, complete steps are: 2. Pass one of them'
    assert all(missing in text for text in four.run('tiers_delete', 1))
    assert all(missing in text for _, text in four.errors('tiers_restore', 1))
    four.run('tiers_close')


def test_a_file_that_cannot_be_read_counts_as_absent(four, place):
    """A damaged chunk, which also fails to be read when the process looks for the damaged ones."""
    saved(four, place, [1, 2], persist=[])
    chunk = min((place.disks[2] / 'checkpoint_2' / 'target.rows').glob('[0-9]*'))
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    answers = restored(four, place, persist=[], local_hook=[2, 'read', f'target.rows/{chunk.name}', 'eio'])
    assert [(answer['step'], answer['bytes'][1] > 0) for answer in answers] == [
        (2, index == 2) for index in range(COUNT)
    ]


def test_a_step_that_is_pinned_on_one_disk_is_deleted_nowhere(four, place):
    saved(four, place, [1, 2], persist=[1])
    t5ckpt.pin_checkpoint(place.disks[2] / 'checkpoint_1', 'a look')
    place.begin(four, persist=[])
    for answer in four.run('tiers_delete', 1):
        assert f'{place.disks[2]}/checkpoint_1 is pinned: a look, so it was not deleted. Unpin it first' in answer
    assert all('checkpoint_1' in place.steps_on(disk) for disk in range(COUNT))
    t5ckpt.unpin_checkpoint(place.disks[2] / 'checkpoint_1')
    assert four.run('tiers_delete', 1) == [[2]] * COUNT
    four.run('tiers_close')


def test_a_trainer_starts_without_process_0s_disk(four, place):
    saved(four, place, [1, 2], persist=[1])
    shutil.rmtree(place.disks[0])
    place.begin(four, persist=[])
    assert four.run('tiers_restore_or_init', 2) == [2] * COUNT
    assert four.run('tiers_delete', 1) == [[], *[[2]] * 3]
    four.run('tiers_close')
    assert [place.steps_on(disk) for disk in range(COUNT)] == [[], *[['checkpoint_2']] * 3]


def test_a_trainer_starts_without_process_0s_disk_and_without_the_bucket(four, place, tmp_path):
    saved(four, place, [1, 2], persist=[1])
    shutil.rmtree(place.disks[0])
    trouble = tmp_path / 'trouble'
    trouble.write_text('away')
    place.begin(four, persist=[], trouble=str(trouble))
    assert four.run('tiers_restore_or_init', 2) == [2] * COUNT
    trouble.unlink()
    four.run('tiers_close')


def test_an_unexpected_error_of_one_process_ends_the_start_of_all(four, place):
    saved(four, place, [1], persist=[])
    place.begin(four, persist=[], local_hook=[2, 'read', 'checkpoint_1/checkpoint', 'bug'], process_timeout=30.0)
    errors = four.errors('tiers_restore_or_init', None)
    assert [kind for kind, _ in errors] == ['RemoteError', 'RemoteError', 'RuntimeError', 'RemoteError']
    assert all('injected: a bug' in text for _, text in errors)


@pytest.mark.parametrize('lost', [None, 0])
def test_a_step_that_cannot_be_restored_is_renamed_on_all_disks(four, place, lost):
    """Else their retention and their lists differ from then on."""
    saved(four, place, [1, 2], leaves=ONCE, persist=[1])
    (chunk, *_) = (place.disks[2] / 'checkpoint_2/target.both').glob('[0-9]*')
    chunk.unlink()
    if lost is not None:
        shutil.rmtree(place.disks[lost])
    place.begin(four, ONCE, persist=[])
    assert four.run('tiers_restore_or_init', 1) == [1] * COUNT
    assert four.run('tiers_steps') == [[1]] * COUNT
    four.run('tiers_close')
    for disk in set(range(COUNT)) - {lost}:
        (name,) = [name for name in place.steps_on(disk) if name != 'checkpoint_1']
        assert name.startswith('checkpoint_2.damaged-')


def test_a_deletion_leaves_the_directory_of_another_run_alone(four, place, tmp_path):
    """Also as the first call of the job."""
    other = Place(tmp_path / 'other')
    for each in (place, other):
        saved(four, each, [1], persist=[])
    place.disks[1] = other.disks[1]
    place.begin(four, persist=[])
    for answer in four.run('tiers_delete', 1):
        assert 'has the local checkpoints of' in answer
    four.run('tiers_close')
    assert other.steps_on(1) == ['checkpoint_1']
    assert place.steps_on(0) == ['checkpoint_1']


def test_the_bucket_is_away_then_full_then_slow(four, place, tmp_path):
    """Saves go on, the newest step is uploaded when it can be, and nothing that waits is deleted."""
    trouble = tmp_path / 'trouble'
    place.begin(four, persist=[1, 2, 3, 4, 5, 6], trouble=str(trouble), keep_local=1)
    assert four.run('tiers_save', 1) == [1] * COUNT
    assert four.run('tiers_wait', 1) == [None] * COUNT
    for kind, steps in (('away', (2, 3)), ('full', (4, 5))):
        trouble.write_text(kind)
        for step in steps:
            assert four.run('tiers_save', step) == [step] * COUNT
        errors = four.run('tiers_wait')
        while kind not in errors[0]:
            # The attempt had begun before.
            errors = four.run('tiers_wait')
        assert all('not in' in text and f'injected: the bucket is {kind}' in text for text in errors)
        assert all(f'checkpoint_{steps[-1]}' in place.steps_on(disk) for disk in range(COUNT))
    trouble.write_text('slow')
    assert four.run('tiers_save', 6) == [6] * COUNT
    assert t5ckpt.all_steps(place.run) == [1], 'the save does not wait for the upload'
    deadline = time.monotonic() + 90
    while four.run('tiers_wait') != [None] * COUNT:
        assert time.monotonic() < deadline
    four.run('tiers_close')
    assert t5ckpt.all_steps(place.run)[-1] == 6
    assert t5ckpt.verify(place.run / 'checkpoint_6', full=True).ok
    assert [place.steps_on(disk) for disk in range(COUNT)] == [['checkpoint_6']] * COUNT


def test_steps_that_are_dropped_during_an_upload_are_deleted_in_all_processes(four, place, tmp_path):
    """Process 0 drops them at once; the disks of the others would fill up until the upload ends."""
    trouble = tmp_path / 'trouble'
    trouble.write_text('held')
    place.begin(four, persist=[1, 2, 3, 4, 5], trouble=str(trouble), keep_local=1)
    for step in range(1, 6):
        assert four.run('tiers_save', step) == [step] * COUNT
    deadline = time.monotonic() + 60
    while any(place.steps_on(disk) != ['checkpoint_1', 'checkpoint_5'] for disk in range(COUNT)):
        assert time.monotonic() < deadline, [place.steps_on(disk) for disk in range(COUNT)]
        time.sleep(0.1)
    trouble.unlink()
    assert four.run('tiers_wait') == [None] * COUNT
    four.run('tiers_close')
    assert t5ckpt.all_steps(place.run) == [1, 5]


def test_a_step_that_waits_is_uploaded_by_the_next_start(four, place, tmp_path):
    """Also from disks in another order."""
    trouble = tmp_path / 'trouble'
    place.begin(four, persist=[1, 2], trouble=str(trouble))
    four.run('tiers_save', 1)
    four.run('tiers_wait')
    trouble.write_text('away')
    four.run('tiers_save', 2)
    four.run('tiers_close')
    trouble.unlink()
    assert t5ckpt.all_steps(place.run) == [1]
    place.begin(four, order=[3, 0, 1, 2], persist=[], trouble=str(trouble))
    assert [answer['step'] for answer in four.run('tiers_restore')] == [2] * COUNT
    assert four.run('tiers_wait', 2) == [None] * COUNT
    assert t5ckpt.verify(place.run / 'checkpoint_2', full=True).ok
    four.run('tiers_close')


@pytest.mark.parametrize('lost', [(0,), (2,), (0, 3)])
def test_a_step_that_waits_and_whose_disk_is_lost_is_dropped(four, place, tmp_path, lost):
    """The next step is uploaded in its place, whatever the policy says. The replicas restore the step."""
    trouble = tmp_path / 'trouble'
    trouble.write_text('away')
    place.begin(four, persist=[1], trouble=str(trouble))
    four.run('tiers_save', 1)
    four.run('tiers_close')
    trouble.unlink()
    for disk in lost:
        shutil.rmtree(place.disks[disk])
    place.begin(four, persist=[])
    answers = four.run('tiers_restore')
    assert [(answer['step'], answer['position'], answer['bytes'][2]) for answer in answers] == [(1, 1, 0)] * COUNT
    four.run('tiers_wait')
    assert four.run('tiers_save', 2) == [2] * COUNT
    assert four.run('tiers_save', 3) == [3] * COUNT
    four.run('tiers_wait')
    four.run('tiers_close')
    assert t5ckpt.all_steps(place.run) == [2]
    t5x_rules.check(place.run / 'checkpoint_2')
    assert t5ckpt.verify(place.run / 'checkpoint_2', full=True).ok


def test_a_step_that_waits_in_a_smaller_job(four, two, place, tmp_path):
    """The disks of two processes are lost, so the next step is uploaded in its place."""
    trouble, options = tmp_path / 'trouble', {'persist': [1], 'iterator': False}
    trouble.write_text('away')
    place.begin(four, trouble=str(trouble), **options)
    four.run('tiers_save', 1)
    four.run('tiers_close')
    two.run('tiers', place.run, TWICE, options, each=[str(disk) for disk in place.disks[::3]])
    assert {kind for kind, _ in two.errors('tiers_restore')} == {'UnsupportedTopologyError'}
    # Also a wait for all steps says that one is lost.
    for wanted in (None, 1):
        errors = two.run('tiers_wait', wanted)
        assert all(
            'step 1 was not uploaded' in text and 'processes 1, 2 of the save are lost' in text for text in errors
        )
    assert [two.run('tiers_save', step) for step in (2, 3)] == [[2] * 2, [3] * 2]
    assert two.run('tiers_wait') == [None] * 2
    two.run('tiers_close')
    assert t5ckpt.all_steps(place.run) == [2]


def test_a_process_that_an_error_ends_does_not_wait_for_the_others(four, place, tmp_path):
    """They may wait for it in a collective, and never end the uploads. The next start uploads the step."""
    trouble = tmp_path / 'trouble'
    trouble.write_text('slow')
    leaves = ['target/bfloat', 'state/step']
    place.begin(four, leaves, trouble=str(trouble))
    four.run('tiers_save', 1)
    assert four.run('tiers_leave', 2, timeout=60) == [False, False, True, False]
    four.run('tiers_close')
    trouble.unlink()
    place.begin(four, leaves)
    assert [answer['step'] for answer in four.run('tiers_restore')] == [1] * COUNT
    assert four.run('tiers_wait', 1) == [None] * COUNT
    four.run('tiers_close')


def test_a_disk_that_fails_while_it_is_listed_fails_the_restore_of_all(four, place):
    """And loses nothing: the next start restores the step."""
    saved(four, place, [1], persist=[])
    place.begin(four, local_hook=[2, 'entries', '', 'eio'])
    errors = four.errors('tiers_restore', timeout=50)
    assert errors[2][0] == 'StorageError', errors
    assert all(kind == 'RemoteError' and 'process 2' in text for kind, text in errors[:2] + errors[3:]), errors
    four.run('tiers_close')
    assert [answer['step'] for answer in restored(four, place, persist=[])] == [1] * COUNT


def test_one_directory_for_two_processes_is_refused_by_all(four, place):
    place.begin(four, order=[0, 1, 2, 2])
    errors = four.errors('tiers_save', 1)
    assert all('is in use by another process' in text for _, text in errors)
    four.run('tiers_close')


def test_another_run_in_the_same_directory_is_refused_by_all(four, place, tmp_path):
    """While it runs, and afterwards; and it is not disturbed."""
    values = {'w': np.arange(8.0), 'step': np.int32(7)}
    with t5ckpt.Checkpointer(values, None, tmp_path / 'other', local=t5ckpt.LocalTier(place.disks[1])) as other:
        other.save(values)
        place.begin(four)
        errors = four.errors('tiers_save', 1)
        assert all('is in use by another process' in text for _, text in errors)
        four.run('tiers_close')
        assert other.restore()['step'] == 7
    place.begin(four)
    errors = four.errors('tiers_save', 1)
    assert all('has the local checkpoints of' in text for _, text in errors)
    # This process is the other run now.
    saved(four, Place(tmp_path / 'mine'), [1], persist=[])
    with (
        pytest.raises(LocalDirError, match='has the local checkpoints of'),
        t5ckpt.Checkpointer(values, None, tmp_path / 'other', local=t5ckpt.LocalTier(tmp_path / 'mine/disk2')) as other,
    ):
        other.save(values)
    assert t5ckpt.all_steps(place.disks[1]) == [7]


# An operation of the local directory of process 2, and the error: for chunks, the list of files, the note that the step waits for
# its upload, and before and in the commit.
FAULTS = [
    ('write_chunk', 'checkpoint_', 'full'),
    ('write', 'integrity.2.json', 'eio'),
    ('write', 'copies.json', 'full'),
    ('write', 'to_persist/', 'full'),
    ('sync_tree', 'checkpoint_', 'eio'),
    ('publish', 'checkpoint_', 'eio'),
]


def test_a_local_disk_is_full_or_fails(four, place):
    """The save fails in all processes and leaves nothing; the steps before it are there, and the next save is uploaded."""
    saved(four, place, [1])
    kinds = {'full': 'NoSpaceError', 'eio': 'StorageError'}
    for number, (operation, key, error) in enumerate(FAULTS):
        step = 2 + number
        before = [place.steps_on(disk) for disk in range(COUNT)]
        place.begin(four, local_hook=[2, operation, key, error])
        errors = four.errors('tiers_save', step)
        assert errors[2][0] == kinds[error], (operation, errors)
        assert all(kind == 'RemoteError' and 'process 2' in text for kind, text in errors[:2] + errors[3:]), errors
        four.run('tiers_close')
        assert [place.steps_on(disk) for disk in range(COUNT)] == before, operation
        assert not any(list((disk / '.t5ckpt/to_persist').iterdir()) for disk in place.disks), operation
        saved(four, place, [step])
        assert t5ckpt.latest_step(place.run) == step
    assert [answer['step'] for answer in restored(four, place)] == [step] * COUNT


@pytest.mark.parametrize('operation', ['sync_tree', 'exchange'])
def test_an_overwrite_that_fails_leaves_the_old_step(four, place, operation):
    """On the disk of process 2, while the others have replaced theirs."""
    saved(four, place, [1], persist=[])
    place.begin(four, persist=[], local_hook=[2, operation, 'checkpoint_1', 'eio'])
    errors = four.errors('tiers_overwrite', 1, 7)
    assert errors[2][0] == 'StorageError'
    four.run('tiers_close')
    assert [place.steps_on(disk) for disk in range(COUNT)] == [['checkpoint_1']] * COUNT
    place.begin(four, persist=[])
    assert [answer['step'] for answer in four.run('tiers_restore', 1)] == [1] * COUNT
    # The next attempt replaces it, and leaves nothing of the old one.
    assert four.run('tiers_overwrite', 1, 7) == [1] * COUNT
    assert [answer['step'] for answer in four.run('tiers_restore', 1, 7)] == [1] * COUNT
    four.run('tiers_close')
    assert [place.steps_on(disk) for disk in range(COUNT)] == [['checkpoint_1']] * COUNT


@pytest.mark.parametrize(
    ('process', 'operation', 'key'), [(2, 'publish', 'checkpoint_2'), (0, 'delete_file', 'to_persist/2')]
)
def test_a_disk_that_becomes_read_only_blocks_no_wait(four, place, process, operation, key):
    """In the commit, or after the upload: the record that the step waits stays, and the next start removes it."""
    saved(four, place, [1])
    place.begin(four, local_hook=[process, operation, key, 'read-only'])
    if operation == 'publish':
        errors = four.errors('tiers_save', 2)
        assert 'read-only' in errors[process][1]
    else:
        four.run('tiers_save', 2)
    assert four.run('tiers_wait', timeout=30) == [None] * COUNT
    four.run('tiers_close', timeout=30)
    assert [path.name for path in (place.disks[process] / '.t5ckpt/to_persist').iterdir()] == ['2']
    saved(four, place, [3])
    assert t5ckpt.all_steps(place.run) == ([1, 3] if operation == 'publish' else [1, 2, 3])
    assert not any(list((disk / '.t5ckpt/to_persist').iterdir()) for disk in place.disks)
    assert [answer['step'] for answer in restored(four, place)] == [3] * COUNT


def test_a_disk_of_another_run_is_refused_by_all(four, place, tmp_path):
    other = Place(tmp_path / 'other')
    saved(four, place, [1], persist=[])
    saved(four, other, [1], persist=[])
    place.disks[1] = other.disks[1]
    place.begin(four)
    errors = four.errors('tiers_restore')
    assert all('has the local checkpoints of' in text for _, text in errors)
    four.run('tiers_close')


@pytest.mark.parametrize('of_earlier_run', [0, 2])
def test_a_disk_of_an_earlier_run_at_the_same_url_is_refused_by_all(four, place, tmp_path, of_earlier_run):
    saved(four, place, [1], persist=[1])
    shutil.rmtree(place.run)
    later = Place(tmp_path / 'later')
    later.run = place.run
    saved(four, later, [1], persist=[1])
    later.disks[of_earlier_run] = place.disks[of_earlier_run]
    for action in ('tiers_restore', 'tiers_save'):
        later.begin(four, persist=[])
        errors = four.errors(action, *([2] if action == 'tiers_save' else []))
        assert all('has the local checkpoints of another run at' in text for _, text in errors), errors
        four.run('tiers_close')
    assert [later.steps_on(disk) for disk in range(COUNT)] == [['checkpoint_1']] * COUNT


def test_a_reader_of_local_directories_writes_nothing(four, place):
    place.begin(four, read_only=True)
    assert {kind for kind, _ in four.errors('tiers_restore')} <= {'CheckpointNotFoundError', 'RemoteError'}
    assert not place.disks[0].exists()
    four.run('tiers_close')
    saved(four, place, [1, 2], persist=[1])
    shutil.rmtree(place.disks[3])
    before = [path for disk in place.disks for path in sorted(disk.rglob('*'))]
    place.begin(four, read_only=True)
    assert four.run('tiers_steps') == [[1, 2]] * 3 + [[1]]
    answers = four.run('tiers_restore')
    assert [(answer['step'], answer['position'], answer['bytes'][2]) for answer in answers] == [(2, 2, 0)] * COUNT
    four.run('tiers_close')
    assert [path for disk in place.disks for path in sorted(disk.rglob('*'))] == before


class Jobs:
    """Starts a job, or continues with one in which nobody was killed: a start takes longer than a test."""

    def __init__(self):
        self._job = None

    @contextlib.contextmanager
    def one(self, *, ends):
        """A job; ``ends`` it afterwards, as an error does."""
        self._job = self._job or Job(COUNT, 2)
        try:
            yield self._job
        except BaseException:
            self.end()
            raise
        if ends:
            self.end()

    def end(self):
        if self._job is not None:
            self._job.close()
        self._job = None


@pytest.fixture(scope='module')
def jobs():
    jobs = Jobs()
    yield jobs
    jobs.end()


# The others wait so long for a process that was killed.
KILLED_TIMEOUT = 3.0
# Where: options of the save of step 2, the process that dies, and the step that is restored.
KILLS = {
    'the local save, process 2': ({'dies': (2, 'write')}, 2, 1),
    'the local save, process 0': ({'dies': (0, 'write')}, 0, 1),
    'the agreement': ({'dies': (0, 2)}, 0, 1),
    'the renames of the commit, process 2': ({'local_hook': (2, 'publish', 'checkpoint_2', 'die')}, 2, 2),
    'local retention, process 1': ({'local_hook': (1, 'delete_tree', 'checkpoint_1', 'die'), 'keep_local': 1}, 1, 2),
    'the upload, process 0': ({'hook': (0, 'write', 'checkpoint_2')}, 0, 2),
    'the upload, process 3': ({'hook': (3, 'write', 'checkpoint_2')}, 3, 2),
    'the commit of the upload': ({'hook': (0, 'publish', 'checkpoint_2')}, 0, 2),
    'after the upload, process 0': ({'local_hook': (0, 'delete_file', 'to_persist/2', 'die')}, 0, 2),
    'after the upload, process 3': ({'local_hook': (3, 'delete_file', 'to_persist/2', 'die')}, 3, 2),
}


@pytest.mark.parametrize('where', KILLS)
def test_sigkill(jobs, place, where):
    """kill -9 of one process; the job ends; all come back with the newest step that was agreed on, and from the disks alone."""
    options, killed, last = KILLS[where]
    with jobs.one(ends=True) as job:
        place.begin(job, process_timeout=KILLED_TIMEOUT, **{name: options[name] for name in options if name != 'dies'})
        assert job.run('tiers_save', 1) == [1] * COUNT
        if 'hook' not in options:
            job.run('tiers_wait')
        job.start('tiers_save', 2, options.get('dies'))
        answers = job.answers(HEARTBEAT_SECONDS + 60)
        if answers[killed] != DEAD:
            # It dies in the background, and then JAX ends the others.
            job.start('tiers_wait')
            assert job.answers(processes=[killed]) == [DEAD]
    # Its directory does not have the step, if it died before its rename.
    lacks = 'renames' in where
    with jobs.one(ends=False) as job:
        place.begin(job)
        answers = job.run('tiers_restore')
        assert [(each['step'], each['position'], each['bytes'][2]) for each in answers] == [(last, last, 0)] * COUNT
        assert [each['bytes'][1] > 0 for each in answers] == [lacks and index == killed for index in range(COUNT)]
        listed = [[1, 2] if last == 2 and not (lacks and index == killed) else [1] for index in range(COUNT)]
        assert job.run('tiers_steps') == listed
        if 'upload' in where:
            # The restart finishes the upload.
            assert job.run('tiers_wait', 2) == [None] * COUNT
            assert t5ckpt.all_steps(place.run)[-1] == 2
            assert t5ckpt.verify(place.run / 'checkpoint_2', full=True).ok
        assert job.run('tiers_save', 3) == [3] * COUNT
        assert job.run('tiers_wait') == [None] * COUNT
        job.run('tiers_close')
    assert 3 in t5ckpt.all_steps(place.run)
    assert [list((disk / '.t5ckpt/to_persist').iterdir()) for disk in place.disks] == [[]] * COUNT
    # What a killed upload has left goes when its other processes cannot write anymore.
    for file in place.run.rglob('*'):
        os.utime(file, (0, 0))
    collect(open_storage(place.run), time.time)
    assert sorted(path.name for path in place.run.glob('checkpoint_*.*')) == []
    assert [[name for name in place.steps_on(disk) if '.' in name] for disk in range(COUNT)] == [[]] * COUNT


@pytest.mark.parametrize(
    ('hook', 'dies'),
    [((1, 'read', 'checkpoint_2/checkpoint'), None), ((1, 'read', 'train_ds-'), None), (None, 2), (None, 3)],
    ids=['the choice', 'the vote', 'the exchange, its receiver', 'the exchange, a sender'],
)
def test_sigkill_in_a_restart(jobs, place, hook, dies):
    """A process is killed while another one, whose disk was lost, receives arrays; the next start does well."""
    with jobs.one(ends=False) as job:
        saved(job, place, [1, 2], persist=[])
    shutil.rmtree(place.disks[2])
    with jobs.one(ends=True) as job:
        options = {} if hook is None else {'local_hook': [*hook, 'die']}
        place.begin(job, process_timeout=KILLED_TIMEOUT, persist=[], **options)
        job.start('tiers_restore_and_die', dies)
        assert job.answers(processes=[1 if dies is None else dies]) == [DEAD]
    with jobs.one(ends=False) as job:
        answers = restored(job, place, persist=[])
        assert [(each['step'], each['position'], each['bytes'][2]) for each in answers] == [(2, 2, 0)] * COUNT
        place.begin(job, persist=[])
        assert job.run('tiers_save', 3) == [3] * COUNT
        job.run('tiers_close')
    assert [[name for name in place.steps_on(disk) if '.' in name] for disk in range(COUNT)] == [[]] * COUNT


def test_an_upload_ends_between_the_commits_of_a_save(jobs, place, tmp_path):
    """And a process is killed before its commit. The step before is not deleted, although process 0 has a newer one."""
    trouble = tmp_path / 'trouble'
    with jobs.one(ends=True) as job:
        place.begin(
            job,
            ONCE,
            persist=[1],
            keep_local=1,
            process_timeout=6.0,
            trouble=str(trouble),
            local_hook=(3, 'publish', 'checkpoint_3', 'end trouble, die'),
        )
        trouble.write_text('held')
        assert job.run('tiers_save', 1) == [1] * COUNT
        assert job.run('tiers_save', 2) == [2] * COUNT
        job.start('tiers_save', 3)
        assert job.answers(HEARTBEAT_SECONDS + 60)[3] == DEAD
    assert t5ckpt.all_steps(place.run) == [1]
    assert 'checkpoint_3' in place.steps_on(0)
    with jobs.one(ends=False) as job:
        assert [each['step'] for each in restored(job, place, leaves=ONCE, persist=[])] == [2] * COUNT


def test_sigkill_in_a_deletion(jobs, place):
    """The others learn that the step is still on a disk, from which the next start would restore it."""
    with jobs.one(ends=True) as job:
        place.begin(
            job, process_timeout=KILLED_TIMEOUT, local_hook=(1, 'publish', 'checkpoint_1.deleted-', 'die'), persist=[]
        )
        job.run('tiers_save', 1)
        job.start('tiers_delete', 1)
        answers = job.answers(HEARTBEAT_SECONDS + 60)
        assert answers[1] == DEAD
        assert not any(isinstance(answer, list) for answer in answers), answers
    assert 'checkpoint_1' in place.steps_on(1)


@pytest.mark.parametrize(('operation', 'key'), [('write', '/checkpoint'), ('exchange', 'checkpoint_1')])
def test_sigkill_between_the_commits_of_an_overwrite(jobs, place, operation, key):
    """The disks have two saves, each without an array: the step of the bucket, until the step is saved again."""
    with jobs.one(ends=False) as job:
        saved(job, place, [1], leaves=ONCE, persist=[1])
    with jobs.one(ends=True) as job:
        place.begin(job, ONCE, persist=[], process_timeout=KILLED_TIMEOUT, local_hook=(2, operation, key, 'die'))
        job.start('tiers_overwrite', 1, 7)
        assert job.answers(HEARTBEAT_SECONDS + 60)[2] == DEAD
    saves = [facts_of(disk / 'checkpoint_1') for disk in place.disks]
    assert len(set(saves)) == 2
    with jobs.one(ends=False) as job:
        answers = restored(job, place, leaves=ONCE, persist=[])
        assert [(answer['step'], answer['bytes'][:2]) for answer in answers] == [(1, [0, 0])] * COUNT
        place.begin(job, ONCE, persist=[])
        assert job.run('tiers_overwrite', 1, 7) == [1] * COUNT
        assert [answer['step'] for answer in job.run('tiers_restore', 1, 7)] == [1] * COUNT
        assert job.run('tiers_save', 2) == [2] * COUNT
        job.run('tiers_close')
    assert [place.steps_on(disk) for disk in range(COUNT)] == [['checkpoint_1', 'checkpoint_2']] * COUNT


def test_a_training_loop_is_killed_and_continues_on_other_disks(jobs, place):
    """Saves in the background, with all that a checkpoint has. One disk is lost, and the others come back in another order."""
    last = 7
    with jobs.one(ends=True) as job:
        job.start('tiers_train', place.run, 20, [1, last], each=[str(disk) for disk in place.disks])
        assert job.answers(processes=[1]) == [DEAD]
    shutil.rmtree(place.disks[1])
    with jobs.one(ends=False) as job:
        answers = job.run('tiers_train', place.run, 10, None, each=[str(place.disks[disk]) for disk in (2, 1, 3, 0)])
        start = answers[0][0]
        # The save of the step before the last one had ended when that of the last one began.
        assert start in (last - 1, last)
        facts = [start, {'loss': 1 / start}, {'git': f'commit {start}'}]
        assert answers == [facts, [start], facts, facts]
    assert t5ckpt.all_steps(place.run)[-1] == 8
    assert t5ckpt.verify(place.run / 'checkpoint_8', full=True).ok
    assert [place.steps_on(disk) for disk in range(COUNT)] == [['checkpoint_10', 'checkpoint_9']] * COUNT


@pytest.mark.parametrize('process', [0, 2])
def test_a_local_directory_that_is_lost_in_use_fails_the_save_in_all_processes(four, place, process):
    place.begin(four, persist=[])
    assert four.run('tiers_save', 1) == [1] * COUNT
    shutil.rmtree(place.disks[process])
    place.disks[process].write_text('a file')
    errors = four.errors('tiers_save', 2)
    assert [kind for kind, _ in errors] == [
        'LocalDirError' if each == process else 'RemoteError' for each in range(COUNT)
    ]
    assert all('is a file. Pass a directory to LocalTier' in text for _, text in errors)


def test_a_closed_checkpointer_restores(four, place):
    """It writes nothing to local directories that it has unlocked."""
    saved(four, place, [1], persist=[])
    place.begin(four, persist=[])
    four.run('tiers_restore')
    assert four.run('tiers_restore_after_close') == [1] * COUNT

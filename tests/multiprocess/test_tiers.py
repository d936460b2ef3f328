"""Four real processes with a local directory each: all back, disks in another order, lost, and damaged; kills; a bucket away."""

import shutil
import time

import pytest
from job import DEAD, HEARTBEAT_SECONDS, Job
from support import t5x_rules

import t5ckpt

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TWICE = ['target/rows', 'target/bfloat', 'target/everywhere', 'target/small', 'state/step']
ONCE = [*TWICE, 'target/both']
COUNT = 4


@pytest.fixture
def place(tmp_path):
    """The run's directory, and the local directories of the four."""
    return Place(tmp_path)


class Place:
    def __init__(self, root):
        self.run = root / 'run'
        self.disks = [root / f'disk{index}' for index in range(COUNT)]

    def begin(self, job, leaves=TWICE, order=range(COUNT), **options):
        """Makes the checkpointers."""
        job.run('tiers', self.run, leaves, options, each=[str(self.disks[disk]) for disk in order])

    def steps_on(self, disk):
        return sorted(path.name for path in self.disks[disk].glob('checkpoint_*'))


def saved(job, place, steps, leaves=TWICE, **options):
    """Saves steps, waits for the uploads, and closes."""
    place.begin(job, leaves, **options)
    for step in steps:
        assert job.run('tiers_save', step) == [step] * COUNT
    assert job.run('tiers_wait') == [None] * COUNT
    job.run('tiers_close')


def restored(job, place, leaves=TWICE, order=range(COUNT), **options):
    """Restores as a new start; the answers."""
    place.begin(job, leaves, order, **options)
    answers = job.run('tiers_restore')
    job.run('tiers_close')
    return answers


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


def test_disks_in_another_order(four, place):
    """What a disk has counts, not which process had it: the files come from the other disks, and no byte from the bucket."""
    saved(four, place, [1, 2], persist=[1])
    for _ in range(2):
        answers = restored(four, place, order=[2, 3, 1, 0], persist=[])
        assert [(answer['step'], answer['position'], answer['bytes'][2]) for answer in answers] == [(2, 2, 0)] * COUNT
    # The disks have what was missing since the first restart.
    assert all(answer['bytes'][1] == 0 for answer in answers)


@pytest.mark.parametrize('lost', [0, 3])
def test_a_lost_disk_is_filled_by_the_replicas(four, place, lost):
    saved(four, place, [1, 2, 3], persist=[1])
    shutil.rmtree(place.disks[lost])
    answers = restored(four, place, persist=[])
    assert [(answer['step'], answer['position'], answer['bytes'][2]) for answer in answers] == [(3, 3, 0)] * COUNT
    assert [answer['bytes'][1] > 0 for answer in answers] == [index == lost for index in range(COUNT)]
    # Another disk may be lost now.
    shutil.rmtree(place.disks[(lost + 2) % COUNT])
    answers = restored(four, place, persist=[])
    assert [(answer['step'], answer['bytes'][2]) for answer in answers] == [(3, 0)] * COUNT


def test_fewer_processes_and_another_mesh(four, two, place):
    """The union of the disks that are left has the step; each process gets what its devices need now."""
    saved(four, place, [1, 2], persist=[1], iterator=False)
    options = {'persist': [], 'iterator': False}
    two.run('tiers', place.run, TWICE, options | {'shape': [4, 2]}, each=[str(place.disks[3]), str(place.disks[0])])
    answers = two.run('tiers_restore')
    assert [(answer['step'], answer['bytes'][2]) for answer in answers] == [(2, 0)] * 2
    two.run('tiers_close')
    two.run('tiers', place.run, TWICE, {'iterator': False}, each=[str(place.disks[disk]) for disk in (0, 3)])
    assert two.run('tiers_save', 3) == [3] * 2
    assert two.run('tiers_wait') == [None] * 2
    two.run('tiers_close')
    assert t5ckpt.verify(place.run / 'checkpoint_3', full=True).ok


def test_both_holders_lost(four, place):
    """A shard that is on no disk: the bucket's step, and the log says why."""
    saved(four, place, [1, 2, 3], persist=[2])
    for disk in (1, 3):
        shutil.rmtree(place.disks[disk])
    answers = restored(four, place, persist=[], iterator=False)
    assert [answer['step'] for answer in answers] == [2] * COUNT
    assert any(
        'local step 3 was not restored:' in line and 'chunks are on no disk' in line for line in answers[0]['why']
    )
    # Step 2 is on two disks; the bucket gives what is on none.
    assert [answer['bytes'][2] > 0 for answer in answers] == [False, True, False, True]
    # Step 3 cannot be restored: it is not listed anymore, and is saved again.
    place.begin(four)
    assert all(3 not in steps for steps in four.run('tiers_steps'))
    assert four.run('tiers_save', 3) == [3] * COUNT
    four.run('tiers_close')
    assert [answer['step'] for answer in restored(four, place)] == [3] * COUNT


def test_all_disks_lost(four, place):
    saved(four, place, [1, 2], leaves=ONCE, persist=[1])
    for disk in place.disks:
        shutil.rmtree(disk)
    answers = restored(four, place, leaves=ONCE, persist=[])
    assert [(answer['step'], answer['position']) for answer in answers] == [(1, 1)] * COUNT
    assert all('nothing from local directories' in answer['line'] for answer in answers)


def test_without_the_bucket_a_lost_shard_is_an_error_and_the_older_step_is_taken(four, place):
    saved(four, place, [1, 2], leaves=ONCE, persist=[])
    # Disk 3 does not have step 2, as after a crash between the commits of the processes.
    shutil.rmtree(place.disks[3] / 'checkpoint_2')
    place.begin(four, ONCE, persist=[])
    errors = four.errors('tiers_restore', 2)
    assert all('chunks are on no disk' in text for _, text in errors)
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
    """The replica has the shard of 'rows'; nothing else has that of 'both', but the bucket."""
    saved(four, place, [1, 2], leaves=ONCE, persist=[2])
    chunk = min((place.disks[2] / 'checkpoint_2' / leaf).glob('[0-9]*'))
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    answers = restored(four, place, leaves=ONCE, persist=[])
    assert [answer['step'] for answer in answers] == [2] * COUNT
    by_run = [answer['bytes'][2] for answer in answers]
    by_peers = [answer['bytes'][1] for answer in answers]
    expected = [0, 0, len(data), 0]
    assert (by_peers, by_run) == (expected, [0] * COUNT) if leaf == 'target.rows' else ([0] * COUNT, expected)
    # The file is whole again.
    assert sum(restored(four, place, leaves=ONCE, persist=[])[2]['bytes'][1:]) == 0


def test_a_trainer_starts_without_process_0s_disk(four, place):
    saved(four, place, [1, 2], persist=[1])
    shutil.rmtree(place.disks[0])
    place.begin(four, persist=[])
    assert four.run('tiers_restore_or_init', 2) == [2] * COUNT
    assert four.run('tiers_delete', 1) == [[2]] * COUNT
    four.run('tiers_close')
    assert [place.steps_on(disk) for disk in range(COUNT)] == [['checkpoint_2']] * COUNT


def test_the_bucket_is_away_for_a_while(four, place, tmp_path):
    """Saves go on, the newest step is uploaded when it is back, and nothing that waits is deleted."""
    away = tmp_path / 'away'
    place.begin(four, persist=[1, 2, 3, 4, 5], away=str(away), local_keep=1)
    assert four.run('tiers_save', 1) == [1] * COUNT
    assert four.run('tiers_wait', 1) == [None] * COUNT
    away.touch()
    for step in (2, 3, 4, 5):
        assert four.run('tiers_save', step) == [step] * COUNT
    errors = four.run('tiers_wait')
    assert all('not in' in text and 'injected: the bucket is away' in text for text in errors)
    away.unlink()
    deadline = time.monotonic() + 90
    while four.run('tiers_wait') != [None] * COUNT:
        assert time.monotonic() < deadline
    four.run('tiers_close')
    assert t5ckpt.all_steps(place.run) == [1, 5]
    assert t5ckpt.verify(place.run / 'checkpoint_5', full=True).ok
    assert [place.steps_on(disk) for disk in range(COUNT)] == [['checkpoint_5']] * COUNT


def test_a_step_that_waits_is_uploaded_by_the_next_start(four, place, tmp_path):
    """Also from disks in another order."""
    away = tmp_path / 'away'
    place.begin(four, persist=[1, 2], away=str(away))
    four.run('tiers_save', 1)
    four.run('tiers_wait')
    away.touch()
    four.run('tiers_save', 2)
    four.run('tiers_close')
    away.unlink()
    assert t5ckpt.all_steps(place.run) == [1]
    place.begin(four, order=[3, 0, 1, 2], persist=[])
    assert [answer['step'] for answer in four.run('tiers_restore')] == [2] * COUNT
    assert four.run('tiers_wait', 2) == [None] * COUNT
    four.run('tiers_close')
    assert t5ckpt.verify(place.run / 'checkpoint_2', full=True).ok


def test_one_directory_for_two_processes_is_refused_by_all(four, place):
    place.begin(four, order=[0, 1, 2, 2])
    errors = four.errors('tiers_save', 1)
    assert all('is in use by another process' in text for _, text in errors)
    four.run('tiers_close')


def test_a_disk_of_another_run_is_refused_by_all(four, place, tmp_path):
    other = Place(tmp_path / 'other')
    saved(four, place, [1], persist=[])
    saved(four, other, [1], persist=[])
    place.disks[1] = other.disks[1]
    place.begin(four)
    errors = four.errors('tiers_restore')
    assert all('has the local checkpoints of' in text for _, text in errors)
    four.run('tiers_close')


def test_local_directories_of_several_processes_are_not_read_only(four, place):
    place.begin(four, read_only=True)
    errors = four.errors('tiers_restore')
    assert {kind for kind, _ in errors} <= {'UnsupportedTopologyError', 'RemoteError'}
    assert all('local_dir with read_only=True is for jobs of one process' in text for _, text in errors)
    assert not place.disks[0].exists()
    four.run('tiers_close')


KILLS = {
    'the local save, process 2': ((2, 'write'), None, 1),
    'the local save, process 0': ((0, 'write'), None, 1),
    'the agreement': ((0, 2), None, 1),
    'the upload, process 0': (None, (0, 'write', 'checkpoint_2'), 2),
    'the upload, process 3': (None, (3, 'write', 'checkpoint_2'), 2),
    'the commit of the upload': (None, (0, 'publish', 'checkpoint_2'), 2),
}


@pytest.mark.parametrize('where', KILLS)
def test_sigkill(place, where):
    """kill -9 of one process; the job ends; all come back with the newest step that was agreed on, and from the disks alone."""
    dies, hook, last = KILLS[where]
    job = Job(COUNT, 2)
    try:
        place.begin(job, hook=hook, process_timeout=5.0)
        assert job.run('tiers_save', 1) == [1] * COUNT
        if hook is None:
            job.run('tiers_wait')
        job.start('tiers_save', 2, dies)
        answers = job.answers(HEARTBEAT_SECONDS + 60)
        if hook is None:
            assert answers[dies[0]] == DEAD
        else:
            job.start('tiers_wait')
            answers = job.answers(HEARTBEAT_SECONDS + 60)
            assert answers[hook[0]] == DEAD
    finally:
        job.close()
    job = Job(COUNT, 2)
    try:
        place.begin(job)
        answers = job.run('tiers_restore')
        assert [(each['step'], each['position'], each['bytes'][1:]) for each in answers] == [
            (last, last, [0, 0])
        ] * COUNT
        assert job.run('tiers_steps') == [[1, 2] if last == 2 else [1]] * COUNT
        assert job.run('tiers_save', 3) == [3] * COUNT
        assert job.run('tiers_wait') == [None] * COUNT
        job.run('tiers_close')
    finally:
        job.close()
    assert 3 in t5ckpt.all_steps(place.run)
    assert sorted(path.name for path in place.run.glob('checkpoint_*.*')) == []
    assert [[name for name in place.steps_on(disk) if '.' in name] for disk in range(COUNT)] == [[]] * COUNT

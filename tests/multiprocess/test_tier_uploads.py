"""The ends of uploads in jobs of two processes: overwrites, failures of process 0, close, and a job of one process in between."""

import shutil
import time

import pytest
from job import Job
from tier_scenarios import TWICE

import t5ckpt

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


class Place:
    """The run's directory, and the local directories of the two."""

    def __init__(self, root):
        self.run, self.trouble = root / 'run', root / 'trouble'
        self.disks = [root / f'disk{index}' for index in range(2)]

    def begin(self, job, **options):
        job.run(
            'tiers',
            self.run,
            TWICE,
            {'trouble': str(self.trouble), **options},
            each=[str(disk) for disk in self.disks[: job.count]],
        )

    def waiting(self):
        return [sorted(path.name for path in (disk / '.t5ckpt/to_persist').iterdir()) for disk in self.disks]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.fixture
def job():
    """Jobs of their own: a process that blocks is killed, and a job of the module would be lost with it."""
    job = Job(2, 4)
    yield job
    job.close()


def test_an_overwrite_that_the_policy_does_not_take_replaces_the_uploaded_step(job, place):
    place.begin(job, persist=[1])
    assert job.run('tiers_save', 1) == [1] * 2
    assert job.run('tiers_wait', 1) == [None] * 2
    job.run('tiers_close')
    place.begin(job, persist=[])
    assert job.run('tiers_overwrite', 1, 7) == [1] * 2
    assert job.run('tiers_wait', 1) == [None] * 2
    job.run('tiers_close')
    for disk in place.disks:
        shutil.rmtree(disk)
    place.begin(job, persist=[])
    assert [answer['step'] for answer in job.run('tiers_restore', 1, 7)] == [1] * 2


def test_a_bucket_that_is_away_before_the_first_upload_blocks_no_process(job, place):
    place.trouble.write_text('away')
    place.begin(job)
    assert job.run('tiers_save', 1) == [1] * 2
    job.start('tiers_wait', 1)
    answers = job.answers(60)
    assert all('step 1 is not in' in text and 'the bucket is away' in text for text in answers), answers
    place.trouble.unlink()
    # The next attempt follows a pause.
    while job.run('tiers_wait', 1) != [None] * 2:
        pass
    job.run('tiers_close')


@pytest.mark.parametrize('process', [0, 1])
def test_a_step_without_the_manifest_of_a_process_is_dropped_by_all(job, place, process):
    place.begin(job)
    job.run('tiers_save', 1)
    job.run('tiers_wait')
    place.trouble.write_text('away')
    job.run('tiers_save', 2)
    # An attempt that reads the manifest before uploads the step; the next one follows a pause.
    job.run('tiers_wait', 2)
    (place.disks[process] / 'checkpoint_2/checkpoint').unlink()
    place.trouble.unlink()
    answers = job.run('tiers_wait', 2, timeout=60)
    while any('the bucket is away' in str(text) for text in answers):
        # An attempt of before that ended; the processes receive its end one after the other.
        answers = job.run('tiers_wait', 2, timeout=60)
    assert all('step 2 was not uploaded' in str(text) for text in answers), answers
    assert place.waiting() == [[], []]
    job.run('tiers_save', 3)
    assert job.run('tiers_wait', 3) == [None] * 2
    job.run('tiers_close')
    assert t5ckpt.all_steps(place.run) == [1, 3]


def test_a_wait_after_close_is_an_error_in_all_processes(job, place):
    place.begin(job)
    job.run('tiers_save', 1)
    job.run('tiers_wait')
    place.trouble.write_text('away')
    job.run('tiers_save', 2)
    job.start('tiers_wait_after_close')
    assert job.answers(60) == ['ClosedError'] * 2
    assert place.waiting() == [['2'], ['2']]


def test_a_job_of_one_process_in_between_leaves_a_step_that_waits(job, place):
    """Its disk has a part, which only a job of both can upload: it drops its own record, and the other disk has one."""
    place.begin(job)
    job.run('tiers_save', 1)
    job.run('tiers_wait')
    place.trouble.write_text('away')
    job.run('tiers_save', 2)
    job.run('tiers_close')
    place.trouble.unlink()
    one = Job(1, 8)
    try:
        place.begin(one)
        one.run('tiers_steps')
        one.run('tiers_close')
    finally:
        one.close()
    assert place.waiting() == [[], ['2']]
    place.begin(job, persist=[])
    assert [answer['step'] for answer in job.run('tiers_restore')] == [2] * 2
    assert job.run('tiers_wait', 2) == [None] * 2
    assert t5ckpt.verify(place.run / 'checkpoint_2', full=True).ok
    job.run('tiers_close')


def test_a_wait_before_the_first_restore_says_that_the_step_waits(job, place):
    """Each process may wait alone: the other ones take no part."""
    place.begin(job)
    place.trouble.write_text('away')
    job.run('tiers_save', 1)
    job.run('tiers_close')
    place.trouble.unlink()
    place.begin(job)
    for words in ((), (1,)):
        for process in range(2):
            text = job.run('tiers_wait_alone', process, *words)[process]
            assert 'step 1 ' in text, text
            assert 'its upload, which begins with the first restore or save' in text, text
    assert [answer['step'] for answer in job.run('tiers_restore')] == [1] * 2
    assert job.run('tiers_wait', 1) == [None] * 2
    assert job.run('tiers_wait') == [None] * 2
    job.run('tiers_close')
    assert t5ckpt.all_steps(place.run) == [1]


@pytest.mark.parametrize('process', [0, 1])
def test_a_step_whose_local_file_cannot_be_read_is_dropped(job, place, process):
    """By the second attempt, a second after the first one, also where several files cannot be read."""
    place.begin(job, local_hook=[process, 'read', 'checkpoint_1/target.', 'eio'], persist=[1])
    job.run('tiers_save', 1)
    deadline = time.monotonic() + 30
    answers = job.run('tiers_wait', 1, timeout=60)
    while any('The upload is repeated' in str(text) for text in answers):
        assert time.monotonic() < deadline
        answers = job.run('tiers_wait', 1, timeout=60)
    assert all('step 1 was not uploaded' in str(text) and 'cannot be read' in str(text) for text in answers), answers
    job.run('tiers_save', 2)
    assert job.run('tiers_wait', 2) == [None] * 2
    job.run('tiers_close')
    assert t5ckpt.all_steps(place.run) == [2]


def test_a_message_that_times_out_and_has_arrived_stops_no_upload(job, place):
    place.begin(job, loses_reply=True)
    job.run('tiers_save', 1)
    answers = job.run('tiers_wait', 1, timeout=60)
    while any('The upload is repeated' in str(text) for text in answers):
        answers = job.run('tiers_wait', 1, timeout=60)
    assert answers == [None] * 2
    job.run('tiers_save', 2)
    assert job.run('tiers_wait', 2, timeout=60) == [None] * 2
    job.run('tiers_close')
    assert t5ckpt.all_steps(place.run) == [1, 2]


def test_no_file_is_sent_if_the_disk_of_a_process_is_lost(job, place):
    """Process 0 would die in its first write of a chunk."""
    place.trouble.write_text('away')
    place.begin(job, hook=[0, 'write', '/target.'])
    job.run('tiers_save', 1)
    job.run('tiers_wait', 1)
    shutil.rmtree(place.disks[1] / 'checkpoint_1')
    place.trouble.unlink()
    answers = job.run('tiers_wait', 1, timeout=60)
    while any('The upload is repeated' in str(text) for text in answers):
        answers = job.run('tiers_wait', 1, timeout=60)
    assert all('the disks of the processes 1 of the save are lost' in text for text in answers), answers
    job.run('tiers_close')


def test_a_step_of_fewer_processes_that_waits_and_is_saved_again(place):
    """Only the disks of the two have a part of it, which is renamed; all of the four forget it."""
    place.trouble.write_text('away')
    two = Job(2, 4)
    try:
        place.begin(two, iterator=False)
        two.run('tiers_save', 1)
        two.run('tiers_close')
    finally:
        two.close()
    place.disks += [place.run.parent / f'disk{index}' for index in (2, 3)]
    four = Job(4, 2)
    try:
        place.begin(four, persist=[], iterator=False)
        assert four.run('tiers_save', 1, timeout=60) == [1] * 4
        place.trouble.unlink()
        answers = four.run('tiers_wait', 1, timeout=60)
        while any('The upload is repeated' in str(text) for text in answers):
            answers = four.run('tiers_wait', 1, timeout=60)
        assert answers == [None] * 4
        four.run('tiers_close')
    finally:
        four.close()
    assert place.waiting() == [[]] * 4
    assert t5ckpt.verify(place.run / 'checkpoint_1', full=True).ok

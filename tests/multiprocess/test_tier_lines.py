"""What a job of four processes logs about steps of which the disks do not have all files, and about saves that are skipped."""

import shutil

import pytest
from tier_disks import COUNT, saved
from tier_scenarios import ONCE, TWICE

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

# Each disk has all of these.
SMALL = ['target/small', 'state/step']


@pytest.fixture
def new_logs(four):
    """Returns what each process has logged since the start of the test."""
    before = [len(four.log(index)) for index in range(COUNT)]
    return lambda: [four.log(index)[start:] for index, start in enumerate(before)]


@pytest.mark.parametrize('lost', [0, 3])
def test_a_step_whose_files_are_lost_is_not_called_damaged(four, place, new_logs, lost):
    """Step 2 was on the disks alone; step 1 is in the bucket. Training then saves step 2 again."""
    saved(four, place, [1], leaves=ONCE, persist=[1])
    saved(four, place, [2], leaves=ONCE, persist=[])
    shutil.rmtree(place.disks[lost])
    place.begin(four, ONCE, persist=[])
    assert four.run('tiers_restore_or_init', 1) == [1] * COUNT
    assert four.run('tiers_save', 2) == [2] * COUNT
    four.run('tiers_close')
    logs = new_logs()
    assert 'chunks are on no disk' in logs[0]
    assert ('checkpoint_2 cannot be restored and was renamed to' in logs[0]) == (lost != 0)
    for log in logs:
        for words in ('damaged:', 'is damaged', 'are damaged', 'could not rename', 'Skipping'):
            assert words not in log


def test_a_save_of_a_step_that_all_disks_have_is_skipped(four, place, new_logs):
    saved(four, place, [1], persist=[])
    place.begin(four, persist=[])
    assert four.run('tiers_save', 1) == [None] * COUNT
    four.run('tiers_close')
    for disk, log in zip(place.disks, new_logs(), strict=True):
        assert f'Skipping save checkpoint for step 1 (directory {disk}/checkpoint_1 already exists)' in log


@pytest.mark.parametrize(
    ('leaves', 'lost', 'why'),
    [
        (TWICE, (0, 3), 'the disks with the files of processes 0, 3 of the save are lost'),
        (ONCE, (3,), 'files that process 3 of the save was to upload are on no disk'),
    ],
)
def test_an_upload_that_is_dropped_names_the_lost_files(four, place, tmp_path, new_logs, leaves, lost, why):
    trouble = tmp_path / 'trouble'
    trouble.write_text('away')
    place.begin(four, leaves, persist=[1], trouble=str(trouble))
    four.run('tiers_save', 1)
    four.run('tiers_close')
    for disk in lost:
        shutil.rmtree(place.disks[disk])
    place.begin(four, leaves, persist=[])
    assert four.run('tiers_save', 2) == [2] * COUNT
    assert four.run('tiers_wait', 2) == [None] * COUNT
    four.run('tiers_close')
    assert f'step 1 was to be uploaded, and is not: {why}. The next save' in new_logs()[0]


@pytest.mark.parametrize('seed', [7, 8, 9])
def test_of_two_saves_of_a_step_the_newer_one_is_restored(four, place, seed):
    """Two disks are replaced by older copies; each save has all arrays. One line names the save that is not taken."""
    saved(four, place, [1], leaves=SMALL, persist=[])
    for disk in (0, 2):
        shutil.copytree(place.disks[disk], place.disks[disk].with_suffix('.old'))
    place.begin(four, SMALL, persist=[])
    four.run('tiers_overwrite', 1, seed)
    four.run('tiers_close')
    for disk in (0, 2):
        shutil.rmtree(place.disks[disk])
        place.disks[disk].with_suffix('.old').rename(place.disks[disk])
    place.begin(four, SMALL, persist=[], iterator=False)
    answers = four.run('tiers_restore', 1, seed, False)
    four.run('tiers_close')
    ((line,), *of_others) = [answer['why'] for answer in answers]
    assert 'step 1: the disks also have the save of ' in line
    assert line.count(' UTC') == 2
    assert of_others == [[]] * (COUNT - 1)


def test_another_save_of_the_run_is_named(four, place):
    """The local save is taken. The bucket has an older one of the step."""
    saved(four, place, [1], persist=[1])
    older = place.run.with_name('older')
    shutil.copytree(place.run / 'checkpoint_1', older)
    place.begin(four, persist=[1])
    four.run('tiers_overwrite', 1, 7)
    four.run('tiers_wait')
    four.run('tiers_close')
    shutil.rmtree(place.run / 'checkpoint_1')
    older.rename(place.run / 'checkpoint_1')
    place.begin(four, persist=[])
    answers = four.run('tiers_restore', 1, 7)
    four.run('tiers_close')
    ((line,), *of_others) = [answer['why'] for answer in answers]
    assert f'step 1: {place.run} also has the save of ' in line
    assert of_others == [[]] * (COUNT - 1)

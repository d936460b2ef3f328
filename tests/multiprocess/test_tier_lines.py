"""What a job of four processes logs about steps of which the disks do not have all files, and about saves that are skipped."""

import shutil

import pytest
from tier_disks import COUNT, saved
from tier_scenarios import ONCE

import t5ckpt

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
    assert 'a part of target/both is on no disk' in logs[0]
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


def test_an_upload_that_is_dropped_names_the_lost_disks(four, place, tmp_path, new_logs):
    """In the log of process 0 alone."""
    trouble = tmp_path / 'trouble'
    trouble.write_text('away')
    place.begin(four, persist=[1], trouble=str(trouble))
    four.run('tiers_save', 1)
    four.run('tiers_close')
    for disk in (0, 3):
        shutil.rmtree(place.disks[disk])
    place.begin(four, persist=[])
    assert four.run('tiers_save', 2) == [2] * COUNT
    assert all('the disks of the processes 0, 3 of the save are lost' in text for text in four.run('tiers_wait', 1))
    assert four.run('tiers_save', 3) == [3] * COUNT
    four.run('tiers_close')
    # The next save in its place: step 2, if process 0 had looked at the disks by then.
    assert t5ckpt.all_steps(place.run) in ([2], [3])
    text = f'step 1 is not uploaded to {place.run}: the disks of the processes 0, 3 of the save are lost. The next save'
    assert [text in log for log in new_logs()] == [True, False, False, False]


@pytest.mark.parametrize('seed', [7, 8, 9])
def test_of_two_saves_of_a_step_the_newer_one_is_restored(four, place, seed):
    """Two disks are replaced by older copies; each save has all arrays."""
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
    assert [answer['step'] for answer in four.run('tiers_restore', 1, seed, False)] == [1] * COUNT
    four.run('tiers_close')

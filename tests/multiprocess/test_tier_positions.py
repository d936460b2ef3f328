"""The positions of data iterators that lost disks had: the step comes from the bucket, or an older step is restored."""

import shutil

import pytest
from tier_disks import COUNT, restored, saved
from tier_scenarios import TWICE

import t5ckpt

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def damage(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def positions_in(directory, step):
    return sorted(path.name for path in (directory / f'checkpoint_{step}').glob('train_ds-*'))


def test_a_step_whose_positions_are_on_no_disk_comes_from_the_bucket(four, place):
    """Positions 1 and 3 were on disks 1 and 3 alone."""
    saved(four, place, [1, 2], persist=[2])
    for disk in (1, 3):
        shutil.rmtree(place.disks[disk])
    answers = restored(four, place, persist=[])
    assert [(answer['step'], answer['position']) for answer in answers] == [(2, 2)] * COUNT


def test_a_step_whose_only_copy_of_a_position_is_damaged_comes_from_the_bucket(four, place):
    saved(four, place, [1, 2], persist=[2])
    shutil.rmtree(place.disks[1])
    damage(place.disks[3] / 'checkpoint_2' / 'train_ds-001-of-004.msgpack')
    answers = restored(four, place, persist=[])
    assert [(answer['step'], answer['position']) for answer in answers] == [(2, 2)] * COUNT


@pytest.mark.parametrize('how', ['damaged', 'gone'])
@pytest.mark.parametrize('process', [0, 3])
def test_a_position_that_is_damaged_on_its_own_disk_comes_from_the_other(four, place, process, how):
    saved(four, place, [1, 2], persist=[1])
    file = place.disks[process] / 'checkpoint_2' / f'train_ds-00{process}-of-004.msgpack'
    if how == 'damaged':
        damage(file)
    else:
        file.unlink()
    answers = restored(four, place, persist=[])
    assert [(answer['step'], answer['position']) for answer in answers] == [(2, 2)] * COUNT
    assert place.steps_on(process) == ['checkpoint_1', 'checkpoint_2']


def test_a_disk_without_the_checksums_of_its_copies(four, place):
    """What it has of the files of other processes is not verified, so the step comes from the bucket."""
    saved(four, place, [1, 2], persist=[2])
    (place.disks[1] / 'checkpoint_2' / 'copies.json').unlink()
    answers = restored(four, place, persist=[])
    assert [(answer['step'], answer['position']) for answer in answers] == [(2, 2)] * COUNT
    assert t5ckpt.all_steps(place.run) == [2]


@pytest.mark.parametrize('last', [1, 2])
def test_all_positions_are_lost(four, place, last):
    """The bucket's step, or the older step, is restored; the data does not begin again at 0."""
    saved(four, place, [1, 2], persist=[last])
    for disk in place.disks:
        for name in positions_in(disk, 2):
            (disk / 'checkpoint_2' / name).unlink()
    answers = restored(four, place, persist=[])
    assert [(answer['step'], answer['position']) for answer in answers] == [(last, last)] * COUNT


@pytest.mark.parametrize('how', ['removed', 'damaged'])
def test_without_a_position_anywhere_the_older_step_is_taken(four, place, how):
    """The bucket has the arrays of step 2 and not its positions, or the only copy of one is damaged."""
    saved(four, place, [1], persist=[1])
    saved(four, place, [2], persist=[2] if how == 'removed' else [])
    for disk in (1, 3) if how == 'removed' else (1,):
        shutil.rmtree(place.disks[disk])
    if how == 'removed':
        for name in positions_in(place.run, 2):
            (place.run / 'checkpoint_2' / name).unlink()
    else:
        damage(place.disks[3] / 'checkpoint_2' / 'train_ds-001-of-004.msgpack')
    place.begin(four, TWICE, persist=[])
    assert four.run('tiers_restore_or_init', 1) == [1] * COUNT
    four.run('tiers_close')
    assert 1 in t5ckpt.all_steps(place.run)


@pytest.mark.parametrize('process', [0, 1])
def test_a_job_in_which_one_process_has_an_iterator(four, place, process):
    """Its position is on two disks, and the other processes wait for none."""
    place.begin(four, TWICE, iterator_in=[process])
    four.start('tiers_save', 1)
    assert four.answers(60) == [1] * COUNT
    assert four.run('tiers_wait') == [None] * COUNT
    four.run('tiers_close')
    name = f'train_ds-00{process}-of-004.msgpack'
    holders = (process, process + 2)
    assert [positions_in(disk, 1) for disk in place.disks] == [[name] * (disk in holders) for disk in range(COUNT)]
    assert positions_in(place.run, 1) == [name]
    # The other positions are not missing: their processes had none.
    place.begin(four, TWICE, iterator_in=[process], persist=[])
    assert four.run('tiers_save', 2) == [2] * COUNT
    four.run('tiers_close')
    place.begin(four, TWICE, iterator_in=[process], persist=[])
    assert four.run('tiers_restore_or_init', 2) == [2] * COUNT
    four.run('tiers_close')

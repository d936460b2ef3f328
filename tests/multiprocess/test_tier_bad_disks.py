"""Local disks whose reads fail in a restore: no file whose bytes were not read is deleted, and the next start has all steps.

Local disks whose power is cut in a save: each step that they list is whole.
"""

import pickle
import shutil

import pytest
from job import Job
from support import faultshim, powercut
from tier_disks import Place

import t5ckpt

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

# Each of two disks has all shards of these.
LEAVES = ['target/rows', 'target/everywhere', 'target/small', 'state/step']


@pytest.fixture(scope='module')
def job(tmp_path_factory):
    """Two processes whose calls of the file system can fail."""
    job = Job(2, 4, str(faultshim.build(tmp_path_factory.mktemp('faultshim'))))
    yield job
    job.close()


@pytest.fixture
def place(job, tmp_path):
    """Steps 1 and 2 on the disks of two processes; none is in the bucket."""
    return saved(job, Place(tmp_path), LEAVES)


@pytest.fixture
def unequal(job, tmp_path):
    """The same with an array whose shards are on one disk each."""
    return saved(job, Place(tmp_path), [*LEAVES, 'target/both'])


def saved(job, place, leaves):
    place.leaves = leaves
    begin(job, place)
    for step in (1, 2):
        job.run('tiers_save', step)
    job.run('tiers_close')
    return place


def begin(job, place, **options):
    place.begin(job, place.leaves, order=[0, 1], persist=[], **options)


def files(place, disk):
    """The chunks on a disk."""
    found = place.disks[disk].glob('checkpoint_*/target*/[0-9]*')
    return sorted(str(file.relative_to(place.disks[disk])) for file in found)


def starts_with_2(job, place):
    begin(job, place)
    assert job.run('tiers_restore_or_init', 2) == [2, 2]
    job.run('tiers_close')


def test_a_sender_whose_disk_fails_deletes_nothing(job, place):
    """The disk of process 0 is lost, and no file of that of process 1 can be read."""
    shutil.rmtree(place.disks[0])
    before = files(place, 1)
    begin(job, place, local_hook=[1, 'read', 'checkpoint_', 'eio'])
    job.errors('tiers_restore_or_init', None)
    job.run('tiers_close')
    assert files(place, 1) == before
    starts_with_2(job, place)


def test_a_sender_that_cannot_read_an_array(job, place):
    """An older step is restored in place of step 2, of which every file is there."""
    shutil.rmtree(place.disks[0])
    before = files(place, 1)
    begin(job, place)
    fail_reads(job, place, 'target.everywhere')
    assert job.run('tiers_restore_or_init', 1) == [1, 1]
    assert job.run('tiers_disarm')[1]
    job.run('tiers_close')
    assert [len(files(place, 1)), len(before)] == [len(before)] * 2


@pytest.mark.parametrize('key', ['checkpoint_2/checkpoint', 'checkpoint_2/copies.json'])
def test_an_error_that_is_not_of_the_disk_fails_the_start(job, place, key):
    """Process 1 has too many open files. No older step is restored in place of step 2."""
    shutil.rmtree(place.disks[0])
    before = files(place, 1)
    begin(job, place, local_hook=[1, 'read', key, 'emfile'])
    errors = job.errors('tiers_restore_or_init', None)
    assert [kind for kind, _ in errors] == ['RemoteError', 'StorageError'], errors
    assert all('too many open files' in text for _, text in errors), errors
    job.run('tiers_close')
    assert files(place, 1) == before
    starts_with_2(job, place)


def fail_reads(job, place, array):
    """Reads of an array of step 2 fail in process 1."""
    directories = [place.disks[0] / 'nothing', place.disks[1] / 'checkpoint_2' / array]
    job.run('tiers_fail_reads', each=[str(directory) for directory in directories])


def test_a_disk_that_fails_while_arrays_are_read_deletes_nothing(job, unequal):
    """Without its bytes step 2 is not restored."""
    before = files(unequal, 1)
    begin(job, unequal)
    fail_reads(job, unequal, 'target.both')
    errors = job.errors('tiers_restore', 2)
    assert [kind for kind, _ in errors] == ['CorruptCheckpointError'] * 2, errors
    assert job.run('tiers_disarm')[1]
    job.run('tiers_close')
    assert files(unequal, 1) == before
    starts_with_2(job, unequal)


def test_the_power_of_both_machines_is_cut_in_a_save(job, tmp_path):
    """Each disk verifies its part of every step that it lists, and lists the step if the save had returned."""
    place, trouble = Place(tmp_path), tmp_path / 'trouble'
    trouble.write_text('away')
    disks = place.disks[:2]
    leaves = ['target/rows', 'target/small', 'state/step']
    place.begin(job, leaves, order=[0, 1], persist=[2], trouble=str(trouble))
    job.run('tiers_save', 1)
    before = [powercut.read_tree(disk) for disk in disks]
    job.run('tiers_save_recorded', 2, each=[str(disk) for disk in disks])
    job.run('tiers_close')
    count, root = 0, tmp_path / 'cut'
    for disk, (tree, links) in zip(disks, before, strict=True):
        operations = pickle.loads(disk.with_suffix('.operations').read_bytes())
        recording = powercut.Recording(tree, links, operations)
        for cut, left in powercut.trees(recording, randoms=1, seed=0):
            powercut.write_tree(root, left)
            steps = t5ckpt.all_steps(root)
            assert steps == [1, 2] or (steps == [1] and cut <= recording.returned), (cut, steps)
            assert 2 not in steps or (root / '.t5ckpt/to_persist/2').exists(), cut
            for step in steps:
                t5ckpt.verify(root, step, full=True).raise_if_damaged()
            shutil.rmtree(root)
            count += 1
    assert count >= 100

"""An operation of one disk, or of the bucket in one process, fails at random: all processes enter the same rounds.

A round that a process does not enter ends for the others with the time-out, whose error says "did not arrive".
"""

import random
import shutil

import pytest
from tier_disks import COUNT, Place, saved
from tier_scenarios import ONCE

import t5ckpt

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SEEDS = 24
CALLS = [
    ('tiers_save', 5),
    ('tiers_wait',),
    ('tiers_save', 6),
    ('tiers_delete', 5),
    ('tiers_wait',),
    ('tiers_restore',),
]


@pytest.fixture(scope='module')
def steps(four, tmp_path_factory):
    """Steps 2 and 3 on the disks, and steps 1 and 2 in the bucket."""
    place = Place(tmp_path_factory.mktemp('steps') / 'place')
    saved(four, place, [1, 2, 3], leaves=ONCE, persist=[1, 2])
    return place


def copied(steps, root):
    """The same at another place, whose local directories name the bucket there."""
    place = Place(root / 'place')
    shutil.copytree(steps.run.parent, root / 'place')
    for disk in place.disks:
        record = disk / '.t5ckpt' / 'tier.json'
        record.write_text(record.read_text().replace(str(steps.run), str(place.run)))
    return place


@pytest.mark.parametrize('seed', range(SEEDS))
def test_no_process_waits_for_another(four, steps, tmp_path, seed):
    """The disks are in some order, some are lost, and step 3 may wait for its upload."""
    rng, place = random.Random(seed), copied(steps, tmp_path)
    order = rng.choice([[0, 1, 2, 3], [2, 3, 1, 0]])
    for disk in rng.choice([[], [rng.randrange(COUNT)], [1, 3]]):
        shutil.rmtree(place.disks[disk])
    if rng.random() < 0.3:
        for disk in filter(lambda disk: disk.exists(), place.disks):
            (disk / '.t5ckpt/to_persist/3').touch()
    fails = [
        rng.randrange(COUNT),
        rng.choice(['local', 'local', 'run']),
        int(rng.triangular(0, 250, 20)),
        rng.random() < 0.3,
    ]
    place.begin(four, ONCE, order, fails=fails, process_timeout=10.0, persist=[5, 6])
    first = rng.choice([('tiers_restore_or_init', None), ('tiers_restore',)])
    for name, *arguments in (first, *CALLS, ('tiers_close',)):
        answers = four.run('tiers_any', name, *arguments, timeout=60)
        for error, seconds, answer in answers:
            assert 'did not arrive' not in str(error) + str(answer), (name, answers)
            assert seconds < 30, (name, answers)
            assert error is not None or answer is not None or name != 'tiers_restore_or_init', 'a new run has begun'
    assert {2} <= {*t5ckpt.all_steps(place.run)}

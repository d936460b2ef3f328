"""Four real processes that send each other boxes of arrays: disks in another order, lost, and without some arrays."""

import shutil

import pytest
from exchange_scenarios import LEAVES

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

# Of the others, some shards are on one disk.
REPLICATED = [name for name in LEAVES if name not in ('both', 'all', 'nibbles', 'mixed', 'one', 'part', 'shorter')]


@pytest.fixture(scope='module')
def step(four, tmp_path_factory):
    """A step, and a disk of each process with its part."""
    root = tmp_path_factory.mktemp('exchange')
    disks = [root / f'disk{role}' for role in range(4)]
    four.run('exchange_save', root / 'run', [*map(str, disks)])
    return root / 'run', disks


def location(name):
    return f'target.{name}'


def restored(job, run, disks, order=range(4), *, lacks=None, lost=(), budget=2**30, mesh=False, leaves=tuple(LEAVES)):
    """Restores with the disk of role ``order[p]`` in process p; the answers."""
    roles = {role: process for process, role in enumerate(order) if role not in lost}
    each = [str(run.parent / 'empty' if role in lost else disks[role]) for role in order]
    job.start('exchange_restore', run, roles, lacks or {}, budget, mesh, leaves, each=each)
    return job.answers()


def received(answers):
    """The bytes that each process has received."""
    assert all('error' not in answer for answer in answers), answers
    assert [answer['missing'] for answer in answers] == [[]] * 4
    return [answer['received'] for answer in answers]


def test_disks_in_place_send_nothing(four, step):
    assert received(restored(four, *step)) == [0] * 4


@pytest.mark.parametrize('budget', [1000, 2_000_000, 2**30])
@pytest.mark.parametrize('mesh', [False, True])
def test_disks_in_another_order(four, step, budget, mesh):
    """Each process gets all from the one with its disk. A tiny budget cuts boxes; the caller has set a mesh and a guard."""
    answers = restored(four, *step, [2, 3, 1, 0], budget=budget, mesh=mesh)
    assert min(received(answers)) > 0
    assert all(answer['pairs'] == [[0, 2], [1, 3], [2, 1], [3, 0]] for answer in answers)


@pytest.mark.parametrize('lost', [0, 3])
def test_replicas_stand_in_for_a_lost_disk(four, step, lost):
    answers = restored(four, *step, [1, 0, 2, 3], lost=[lost], budget=2_000_000, leaves=REPLICATED)
    # Role 0 is at process 1, and the other way round.
    assert [size > 0 for size in received(answers)] == [True, True, False, lost == 3]
    answers = restored(four, *step, [1, 0, 2, 3], lost=[lost])
    only = {0: ['both', 'all', 'nibbles', 'part', 'shorter'], 3: ['both', 'all', 'nibbles', 'mixed', 'one', 'shorter']}[
        lost
    ]
    assert [answer['missing'] for answer in answers] == [sorted(f'target/{name}' for name in only)] * 4


def test_some_arrays_of_two_disks_are_lacking(four, step, tmp_path):
    """Only these are sent."""
    run, disks = step
    lacks = {1: [location('everywhere'), location('host')], 2: [location('rows'), location('longer')]}
    copies = [tmp_path / disk.name for disk in disks]
    for role, disk in enumerate(disks):
        shutil.copytree(disk, copies[role])
        for array in lacks.get(role, ()):
            shutil.rmtree(copies[role] / 'checkpoint_1' / array)
    answers = restored(four, run, copies, lacks=lacks)
    assert [size > 0 for size in received(answers)] == [False, True, True, False]
    assert len(answers[0]['pairs']) <= 3


def test_a_process_has_some_boxes_of_a_leaf_and_receives_the_others(four, step):
    sizes = received(restored(four, *step, [1, 2, 0, 3], leaves=['mixed']))
    assert sizes == [16 * 1000 * 4] * 3 + [0]


@pytest.mark.parametrize('budget', [1000, 2**30])
def test_a_damaged_file_fails_its_sender_after_the_last_collective(four, step, tmp_path, budget):
    run, disks = step
    shutil.copytree(disks[2], tmp_path / 'disk')
    chunk = min((tmp_path / 'disk' / 'checkpoint_1' / location('both')).glob('[0-9]*'))
    chunk.write_bytes(bytes(chunk.stat().st_size))
    answers = restored(four, run, [*disks[:2], tmp_path / 'disk', disks[3]], [2, 3, 1, 0], budget=budget)
    kind, text = answers[0]['error']
    assert kind == 'CorruptCheckpointError'
    assert location('both') in text
    # All have entered the same collectives, so the next restore does well.
    received(restored(four, *step, [2, 3, 1, 0]))


def test_plans(four, step):
    """Whatever the disks lack: a box that a process lacks comes from a disk that has it, and all plan the same."""
    assert len(set(four.run('exchange_plans', step[0], 0, 200))) == 1

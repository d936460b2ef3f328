"""The simulator itself: the same seed is the same schedule, and what must be found is found."""

import errno
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from simulation.any_storage import scenarios_of
from simulation.campaign import continue_report, explore, simulate
from simulation.choosers import Replay, chooser_of
from simulation.disk import Disk
from simulation.primitives import Event, Lock, SimpleQueue, Thread
from simulation.report import Explored, table
from simulation.scheduler import Decision, Scheduler, active

TESTS = str(pathlib.Path(__file__).resolve().parents[1])

_TRACE = """
import sys
from simulation import virtual
virtual.enter()
import logging
logging.disable(logging.CRITICAL)
from simulation.choosers import Replay, chooser_of
from simulation.explore import Explorer
from simulation.scenarios import SCENARIOS
for name in sys.argv[1:]:
    explorer = Explorer(SCENARIOS[name])
    for seed in (1, 2, 3, 10):
        outcome = explorer.run(chooser_of(seed, explorer.scenario.faults, explorer.length), seed, keeps_trace=True)
        again = explorer.run(Replay(outcome.decisions), seed, keeps_trace=True)
        assert again.trace == outcome.trace
        print(name, seed, *outcome.trace, sep='\\n')
"""


@pytest.mark.slow
def test_the_same_seed_is_the_same_trace():
    """In two processes, byte for byte; and its decisions, replayed, are the same trace in one process."""
    command = [sys.executable, '-c', _TRACE, 'prune-faults', 'disk-save-faults']
    environment = {**os.environ, 'PYTHONPATH': TESTS, 'PYTHONHASHSEED': '0', 'JAX_PLATFORMS': 'cpu'}
    runs = [subprocess.run(command, env=environment, capture_output=True, check=False) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr.decode()
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.count(b'\n') > 500


def test_a_campaign_counts_what_it_ran():
    found = simulate(['remove'], range(40), workers=1)
    assert found.schedules == 40
    assert found.points > 40 * 20
    assert found.failures == []
    json.dumps(found.faults)


@pytest.mark.slow
def test_scenarios_are_reported_one_by_one():
    """Each as soon as all workers have it, in the order in which they were asked for."""
    told = explore(['remove', 'prune-faults', 'save'], range(40), workers=2)
    assert next(told)[0] == 'remove'
    assert [(name, found.schedules) for name, found in told] == [('prune-faults', 40), ('save', 40)]
    told = explore(['remove', 'save', 'remove'], range(9), switches=0, workers=2)
    assert [(name, found.schedules) for name, found in told] == [('remove', 1), ('save', 1)]


def test_a_worker_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match='KeyError'):
        simulate(['save', 'none'], range(2), workers=1)


@pytest.mark.slow
def test_a_report_is_continued(tmp_path):
    """Two parts count as one: other seeds, and each state once."""
    for expected in (30, 60):
        assert continue_report(tmp_path, ['remove-faults', 'save'], range(5, 35), workers=1).failures == []
        found = {name: Explored.read(tmp_path, name) for name in ('remove-faults', 'save')}
        assert {each.schedules for each in found.values()} == {expected}
        assert {(each.first, each.following) for each in found.values()} == {(5, 5 + expected)}
    # The storage has a few states in the save after the schedules, which is not repeated in one part.
    whole = simulate(['save'], range(5, 65), workers=1).states
    assert whole <= found['save'].states < 1.2 * whole
    assert f'| save | 60 | {found["save"].states} |' in table(tmp_path)


_REPORTS = """
import sys
from simulation.report import Explored
while True:
    explored = Explored.read(sys.argv[1], 'name')
    explored.following += 1
    explored.write(sys.argv[1], 'name', range(1000 * explored.following))
    print(explored.following, flush=True)
"""


def test_a_report_outlives_a_kill(tmp_path):
    following = 0
    for _ in range(4):
        command = [sys.executable, '-c', _REPORTS, tmp_path]
        environment = {**os.environ, 'PYTHONPATH': TESTS}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as writer:
            for _ in range(3):
                following = int(writer.stdout.readline())
            writer.kill()
        assert Explored.read(tmp_path, 'name').following >= following
        assert len(np.load(tmp_path / 'name.npy')) >= 1000 * following


@pytest.mark.slow
@pytest.mark.parametrize('storage', ['Plain', 'Careless'])
def test_a_storage_of_ones_own(storage):
    command = [
        sys.executable,
        '-m',
        'simulation',
        storage,
        '--module',
        'simulation.own_scenarios',
        '--workers',
        '1',
    ]
    environment = {**os.environ, 'PYTHONPATH': TESTS, 'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (int(storage == 'Careless'), '')
    lost = re.search(r'Careless: step 7 (is listed, and checkpoint_7/|was that of 2, and is that of 1)', done.stdout)
    assert (lost is not None) == (storage == 'Careless')
    if storage == 'Careless':
        violation, again = re.search(
            '(Careless: step 7 .*)\nafter .*; again: PYTHONPATH=tests python (.*)', done.stdout
        ).groups()
        command = [sys.executable, *again.split()]
        repeated = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (repeated.returncode, repeated.stderr) == (1, '')
        assert f'{violation}\nafter 1 schedules' in repeated.stdout


@pytest.mark.slow
def test_a_good_storage_passes_all_scenarios():
    names = [f'memory-{name}' for name in scenarios_of(dict)]
    found = simulate(names, range(100), module='simulation.own_scenarios')
    assert found.failures == []
    assert found.schedules == 100 * len(names)


@pytest.mark.slow
@pytest.mark.parametrize('storage', ['Careless', 'Twofold', 'Unconditional'])
def test_a_storage_without_conditions_fails(storage):
    found = simulate([f'{storage}-late'], range(1000), module='simulation.own_scenarios')
    assert re.search('is missing|is gone|was that of', found.failures[0].violation)


def run(program, chooser=None, processes=('one', 'two'), keeps_trace=False):
    """Runs a program in each process; returns the scheduler."""
    scheduler = Scheduler(chooser or Replay(()), keeps_trace=keeps_trace)
    scheduler.run([scheduler.start(scheduler.process(name), program) for name in processes])
    return scheduler


def test_a_deadlock_is_found():
    """Each process takes two locks, in the order of its name."""
    locks = {'one': Lock(), 'two': Lock()}
    failures = set()

    def program():
        name = active().current.process.name
        first, second = (locks[each] for each in ([name, *locks.keys() - {name}]))
        with first:
            active().point('has the first')
            with second:
                active().point('has both')

    for seed in range(30):
        for lock in locks.values():
            lock.release()
        failures.add(run(program, chooser_of(seed, (), 4)).failure)
    assert failures == {None, 'all tasks wait forever: one.0 (main), two.0 (main)'}


def test_a_lost_update_is_found_by_one_decision():
    """The exhaustive search of all schedules with one switch finds it."""
    failures = []
    for decisions in ((), (Decision('one.0', 2, 'run', 'two.0'),)):
        value = [0]

        def program(value=value):
            active().point('reads')
            read = value[0]
            active().point('writes')
            value[0] = read + 1

        run(program, Replay(decisions))
        failures.append(value[0])
    assert failures == [2, 1]


def test_threads_and_waits_follow_simulated_time():
    seen = []

    def program():
        event, queue = Event(), SimpleQueue()
        thread = Thread(target=lambda: (queue.put(event.wait(30.0)), queue.put('done')), daemon=True)
        thread.start()
        seen.append((queue.get(), queue.get(), thread.is_alive()))
        thread.join()

    scheduler = run(program, processes=('one',))
    assert scheduler.failure is None
    assert seen == [(False, 'done', False)]
    assert 30 <= scheduler.now - 1_700_000_000 < 31


def test_a_crash_ends_all_threads_of_a_process():
    after = []

    def program():
        def other():
            for _ in range(10):
                active().point('works')
                after.append(active().points)

        Thread(target=other).start()
        active().point('begins')
        active().point('ends')

    scheduler = run(program, Replay([Decision('one.0', 2, 'crash')]), processes=('one',))
    assert scheduler.failure is None
    assert after == []


def disk():
    found = Disk(lambda: 0.0)
    found.mkdir('/a')
    found.sync(found.find('/'))
    return found


def test_a_power_cut_keeps_what_was_synchronized():
    outcomes = set()
    for seed in range(64):
        found = disk()
        file = found.create('/a/file')
        found.write(file, b'bytes', 0)
        found.sync(file)
        found.sync(found.find('/a'))
        found.write(file, b'later', 0)
        found.create('/a/other')
        found.rename('/a/file', '/a/renamed')
        found.cut_power(seed)
        outcomes.add(frozenset(found.files().items()))
    names = {frozenset(name for name, _ in each) for each in outcomes}
    assert names == {
        frozenset({'/a/file'}),
        frozenset({'/a/renamed'}),
        frozenset({'/a/file', '/a/other'}),
        frozenset({'/a/renamed', '/a/other'}),
    }
    contents = {data for each in outcomes for name, data in each if name != '/a/other'}
    assert {b'bytes', b'later'} <= contents
    assert contents <= {b'bytes', *(b'later'[:count] for count in range(6))}


def test_the_disk_refuses_what_posix_refuses():
    found = disk()
    found.mkdir('/a/b')
    found.create('/a/b/file')
    found.mkdir('/c')
    for call, code in (
        (lambda: found.rename('/c', '/a/b'), errno.ENOTEMPTY),
        (lambda: found.rmdir('/a/b'), errno.ENOTEMPTY),
        (lambda: found.mkdir('/a/b'), errno.EEXIST),
        (lambda: found.unlink('/a'), errno.EISDIR),
        (lambda: found.find('/a/b/file/x'), errno.ENOTDIR),
        (lambda: found.find('/none'), errno.ENOENT),
        (lambda: found.link('/a/b', '/d'), errno.EPERM),
    ):
        with pytest.raises(OSError) as raised:  # noqa: PT011 - the code is compared
            call()
        assert raised.value.errno == code
    found.exchange('/a', '/c')
    assert set(found.files()) == {'/c/b/file'}

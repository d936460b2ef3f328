"""Real saves, deletions and overwrites, broken at every file-system call; see campaign.py for single faults and more."""

import collections

import campaign
import pytest
from support import faultshim, loopfs

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

# Of the faults that a call can have in addition to the first, CI takes each fifteenth, and of all that half of each kind, and a
# third of the two kinds that are most of all; campaign.py takes them all.
EVERY = 15
EVERY_OF_FREQUENT = {'EIO': 3, 'EACCES': 3}
# The same of two tiers, of which CI takes fewer, since each fault includes a restart and uploads.
EVERY_OF_TIERS = {'SIGKILL': 6, 'EIO': 30, 'EACCES': 30}


@pytest.fixture(scope='module')
def report():
    """All faults of CI; a minute on two cores."""
    faultshim.require_gcc()
    calls = campaign.calls_of(campaign.scenario_names())
    tiers = {name for name in calls if campaign.has_tiers(name)}
    planned = [
        (name, fault, at)
        for name in calls
        for fault, at in campaign.plan(calls[name], EVERY // 3 if name in tiers else EVERY)
    ]
    # A part of each kind, so that none of the rare ones is left out by chance.
    work = []
    for fault in campaign.FAULTS:
        every = EVERY_OF_FREQUENT.get(fault, 2)
        work += [each for each in planned if each[1] == fault and each[0] not in tiers][::every]
        work += [each for each in planned if each[1] == fault and each[0] in tiers][:: EVERY_OF_TIERS.get(fault, 4)]
    report = campaign.Report({}, [])
    campaign.run(work, report, workers=2)
    return report


def test_every_promise_is_kept(report):
    assert not report.broken, '\n'.join(report.lines())


def test_enough_was_broken(report):
    assert report.injected >= 2000
    happened = {fault for (_, fault), counts in report.outcomes.items() if counts.total() > counts['not reached']}
    assert happened == set(campaign.FAULTS)
    # A plan is made from one run and carried out in others, whose threads take turns otherwise; rarely one call less.
    missed = sum(counts['not reached'] for counts in report.outcomes.values())
    assert missed < report.injected / 50


def test_faults_are_reported_to_the_caller(report):
    """A fault without an error did no harm; most faults are errors."""
    for fault, name in [('ENOSPC', 'NoSpaceError'), ('EACCES', 'AccessDeniedError'), ('EIO', 'StorageError')]:
        total = sum((counts for (_, key), counts in report.outcomes.items() if key == fault), collections.Counter())
        assert total[name] > total.total() / 4


def test_a_file_system_that_refuses_direct_writes():
    """At the creation of the file or at a write: chunks then go through the page cache, and the save is none the worse."""
    faultshim.require_gcc()
    name, ends = 'save past the page cache', ('/0.0', '/1.0')
    calls = enumerate(campaign.calls_of([name])[name])
    chosen = [
        at for at, (kind, _, path) in calls if kind & (faultshim.CREATE | faultshim.WRITE) and path.endswith(ends)
    ]
    # Threads take turns as they like, so that some of the faults come to other calls, on a busy machine all of one kind.
    answers, chunks = [], []
    while {answer['call'] for answer in chunks} != {'create', 'pwrite64'}:
        assert len(answers) < 10 * len(chosen), answers
        answers += campaign.refuse(name, chosen)
        chunks = [answer for answer in answers if answer.get('path', '').endswith(ends)]
    assert {answer['outcome'] for answer in chunks} == {'completed'}, answers


def test_every_disk_that_a_power_cut_leaves():
    """Un-fsynced changes lost, torn and reordered, at every moment of every scenario."""
    faultshim.require_gcc()
    answers = campaign.cut_power(campaign.scenario_names(), randoms=2, seed=0, workers=2)
    assert [answer for answer in answers.values() if answer.get('number') != 0] == []
    assert sum(answer['disks'] for answer in answers.values()) >= 600


def test_a_program_that_does_not_fsync_loses_to_the_power_cut():
    """The model would notice: with the fsyncs left out of the same records, checkpoints break."""
    faultshim.require_gcc()
    answers = campaign.cut_power(['save', 'delete'], randoms=1, seed=0, workers=1, fsync=False)
    assert answers['save']['number'] > 0


def test_a_real_file_system_loses_power():
    """What the model above says, ext4 says, too: its journal is replayed after each cut."""
    faultshim.require_gcc()
    loopfs.require('ext4')
    names = [
        'first save',
        'save, linking',
        'save past the page cache',
        'delete',
        'convert, overwriting',
        'replace a step',
    ]
    count, broken = campaign.cut_file_system(names, 'ext4', every=25)
    assert broken == []
    assert count >= 30

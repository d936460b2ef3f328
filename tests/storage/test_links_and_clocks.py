"""Symbolic links in the place of runs and steps, times of files, a clock that steps back, a saver that is stopped."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.cli import ROOT, t5ckpt_cli
from support.options import with_options

import t5ckpt
from t5ckpt.errors import StorageError
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock, FaultyStorage


def state(step):
    return {'w': np.full(2000, step, np.float32), 'step': np.int32(step)}


def open_run(run, **options):
    return t5ckpt.Checkpointer(state(0), checkpoints_dir=run, **with_options(inline_bytes=64, **options))


def save(run, *steps, **options):
    with open_run(run, **options) as checkpointer:
        for step in steps:
            checkpointer.save(state(step))


def value(run, step=None):
    return open_run(run).restore(step)['w'][0]


# --- links ---------------------------------------------------------------------------------------------------------------


def test_a_run_behind_a_link(tmp_path):
    (tmp_path / 'disk').mkdir()
    run = tmp_path / 'run'
    run.symlink_to('disk')
    save(run, 1, 2, 3, keep=2)
    assert value(run) == 3
    open_run(run).delete(3)
    assert t5ckpt.all_steps(tmp_path / 'disk') == [2]
    assert run.is_symlink()


def test_a_step_behind_a_link_goes_without_what_it_leads_to(tmp_path):
    run, archive = tmp_path / 'run', tmp_path / 'archive'
    save(run, 1, 2, 3)
    archive.mkdir()
    for step in (1, 2):
        (run / f'checkpoint_{step}').rename(archive / f'checkpoint_{step}')
        (run / f'checkpoint_{step}').symlink_to(archive / f'checkpoint_{step}')
    assert [value(run, step) for step in (1, 2)] == [1, 2]
    open_run(run).delete(1)
    save(run, 4, keep=1)
    assert sorted(path.name for path in run.iterdir()) == ['checkpoint_4']
    assert [value(archive, step) for step in (1, 2)] == [1, 2]


@pytest.mark.parametrize('depth', ['', 'deeper/still'])
def test_a_run_behind_a_link_to_nothing_is_not_new(tmp_path, depth):
    """A disk that is not mounted: a run that begins anew here would prune the one that is there tomorrow."""
    (tmp_path / 'link').symlink_to(tmp_path / 'disk')
    run = tmp_path / 'link' / depth
    calls = [
        lambda: t5ckpt.all_steps(run),
        lambda: t5ckpt.latest_step(run),
        lambda: open_run(run).restore(),
        lambda: t5ckpt.restore_or_init(open_run(run), lambda: state(0)),
    ]
    for call in calls:
        with pytest.raises(
            StorageError, match=r'link is a symbolic link to .*disk, which does not exist\. Mount the disk'
        ):
            call()
    (tmp_path / 'disk').mkdir()
    assert t5ckpt.all_steps(run) == []


def test_a_step_behind_a_link_to_nothing_is_not_passed_over(tmp_path):
    run = tmp_path / 'run'
    save(run, 1, 2)
    (run / 'checkpoint_3').symlink_to(tmp_path / 'disk' / 'checkpoint_3')
    (run / 'notes_9').symlink_to(tmp_path / 'disk' / 'notes')
    assert t5ckpt.all_steps(run) == [1, 2, 3]
    assert t5ckpt.latest_step(run) == 3
    for call in (
        lambda: open_run(run).restore(),
        lambda: t5ckpt.restore_or_init(open_run(run), lambda: state(0)),
    ):
        with pytest.raises(StorageError, match=r'checkpoint_3 is a symbolic link to .*, which does not exist'):
            call()
    assert value(run, 2) == 2
    listed = json.loads(t5ckpt_cli('ls', run, '--json'))
    assert [(each['step'], each['state']) for each in listed] == [(1, 'complete'), (2, 'complete'), (3, 'unreadable')]
    save(run, 4, keep=1)
    assert sorted(path.name for path in run.iterdir()) == ['checkpoint_3', 'checkpoint_4', 'notes_9']


def test_a_link_to_nothing_inside_a_step_stops_no_retention(tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / 'checkpoint_1' / 'PINNED').symlink_to(tmp_path / 'disk')
    save(tmp_path, 3, keep=1)
    assert t5ckpt.all_steps(tmp_path) == [3]


def test_the_latest_step_is_found_with_as_many_looks_at_links_whatever_is_broken(tmp_path):
    """Each is a pass over the directory."""
    counts = []
    for broken in (3, 30):
        run = tmp_path / str(broken)
        save(run, 1)
        for step in range(2, 2 + broken):
            (run / f'checkpoint_{step}').mkdir()
        storage = FaultyStorage(open_storage(run))
        assert t5ckpt.latest_step(storage) == 1
        counts.append([storage.operations.count(each) for each in (('broken_links', ''), ('names', '/'))])
    assert counts[0] == counts[1]


def test_links_in_a_circle(tmp_path):
    run = tmp_path / 'run'
    save(run, 1)
    (run / 'checkpoint_1' / 'w' / 'up').symlink_to('..')
    (run / 'around').symlink_to('.')
    (run / 'itself').symlink_to('itself')
    assert t5ckpt.all_steps(run) == [1]
    assert t5ckpt.verify(run, full=True).ok
    (tmp_path / 'circle').symlink_to('circle')
    for call in (lambda: t5ckpt.all_steps(tmp_path / 'circle'), lambda: save(tmp_path / 'circle', 1)):
        with pytest.raises(StorageError, match='Symbolic links lead in a circle') as caught:
            call()
        assert caught.value.errno == errno.ELOOP


# --- times -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('when', [0, 2**33], ids=['1970', '2242'])
def test_the_times_of_the_files_of_steps_decide_nothing(tmp_path, when):
    run = tmp_path / 'run'
    save(run, 1, 2, 3)
    for place, names, files in os.walk(run):
        for name in (*names, *files):
            os.utime(Path(place) / name, (when, when))
    assert [value(run, step) for step in t5ckpt.all_steps(run)] == [1, 2, 3]
    assert t5ckpt.verify(run, full=True).ok
    ages = {each['step']: each['created'] for each in json.loads(t5ckpt_cli('ls', run, '--json'))}
    assert all(abs(created - time.time()) < 3600 for created in ages.values())
    save(run, 4, keep=2)
    assert t5ckpt.all_steps(run) == [3, 4]
    assert sorted(path.name for path in run.iterdir()) == ['checkpoint_3', 'checkpoint_4']


def test_a_clock_that_steps_back(tmp_path):
    """Between saves and within one: by a day, which is more than any horizon. One that steps forward ends a save."""
    clock, run, seconds = FakeClock(), tmp_path / 'run', 0

    def stepping(done, total):
        clock.advance(-86400 if done < total else seconds)

    with open_run(run, clock=clock, keep=2, progress=stepping) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(state(step))
            checkpointer.save({**state(step), 'w': state(step + 100)['w']}, overwrite=True)
            clock.advance(-86400)
        seconds = 3 * 86400
        with pytest.raises(StorageError, match='at most 3600 s are allowed, so it was given up'):
            checkpointer.save(state(6))
    assert sorted(path.name for path in run.iterdir()) == ['checkpoint_4', 'checkpoint_5']
    assert [value(run, step) for step in (4, 5)] == [104, 105]


# --- a process that stands still -------------------------------------------------------------------------------------------

STOPPED = """
import os, signal, sys
import numpy as np, t5ckpt
state = {'w': np.full(2000, 7, np.float32), 'step': np.int32(7)}
stop = lambda done, total: os.kill(os.getpid(), signal.SIGSTOP) if done < total else None
options = t5ckpt.CheckpointerOptions(inline_bytes=64, chunk_bytes=4000)
with t5ckpt.Checkpointer(state, checkpoints_dir=sys.argv[1], progress=stop, options=options) as checkpointer:
    checkpointer.save(state)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_saver_that_is_stopped_for_hours_goes_on(tmp_path):
    """Other savers leave its directory alone, whatever the clock says, since its process is there."""
    run = tmp_path / 'run'
    environ = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
    saver = subprocess.Popen([sys.executable, '-c', STOPPED, str(run)], env=environ)
    try:
        _, status = os.waitpid(saver.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        save(run, 1, 2, keep=1, clock=FakeClock(time.time() + 86400))
        assert [path.name.partition('-')[0] for path in run.iterdir() if 'tmp' in path.name] == ['checkpoint_7.tmp']
        while saver.poll() is None:
            saver.send_signal(signal.SIGCONT)
            time.sleep(0.05)
    finally:
        saver.kill()
    assert saver.returncode == 0
    assert t5ckpt.all_steps(run) == [2, 7]
    assert value(run) == 7
    assert t5ckpt.verify(run, full=True).ok
    assert sorted(path.name for path in run.iterdir()) == ['checkpoint_2', 'checkpoint_7']

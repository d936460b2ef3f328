"""Several processes on one directory; docs/reliability.md says what each of them may expect."""

import collections
import json
import pathlib
import subprocess

import crash_checks
import pytest
from crash_scenarios import NEXT, Trainer
from support import forked

import t5ckpt

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

HERE = pathlib.Path(__file__).parent
STEPS = 40
PROGRAM = f'import sys; sys.path[:0] = {[str(HERE), str(HERE.parent)]!r}; import crowd; crowd.main()'


def crowd(root, *roles):
    """Runs processes together; what each of them says."""
    pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
    processes = [forked.start(PROGRAM, role, root, STEPS, **pipes) for role in roles]
    for process in processes:
        assert process.stdout.readline() == 'ready\n', process.stderr.read()
    for process in processes:
        process.stdin.write('go\n')
        process.stdin.flush()
    readers = [process for process, role in zip(processes, roles, strict=True) if role in ('evaluate', 'verify')]
    outputs = {process: process.communicate(timeout=200) for process in readers}
    root.with_suffix('.done').touch()
    outputs |= {process: process.communicate(timeout=60) for process in processes if process not in outputs}
    for process, role in zip(processes, roles, strict=True):
        assert process.returncode == 0, f'{role}:\n{outputs[process][1][-4000:]}'
    return [json.loads(out.splitlines()[-1]) for process in processes for out in [outputs[process][0]]]


def check(root):
    """Everything that is listed is whole, and one more save leaves nothing else."""
    for step in crash_checks.listed(root):
        crash_checks.check_whole(root / f'checkpoint_{step}')
    Trainer(root).save(10**6 + NEXT)
    assert {path.name for path in root.iterdir()} == {f'checkpoint_{step}' for step in t5ckpt.all_steps(root)}


def test_two_trainers_save_the_same_steps(memory_dir):
    """Each step is saved by one of them; the other one is told that it is there."""
    first, second = crowd(memory_dir, 'train', 'train')
    times = collections.Counter(first['saved'] + second['saved'])
    assert set(times) >= set(range(1, STEPS + 1))
    # A step that the faster one has pruned is saved again by the slower one; a step that is there never is.
    assert first['skipped'] or second['skipped'] or times.total() == 2 * len(times)
    assert crash_checks.listed(memory_dir)[-1] == max(times)
    check(memory_dir)


def test_steps_are_read_and_verified_while_they_go(memory_dir):
    """What is read is right, and what is verified is whole, or the step is gone."""
    trained, read, verified, deleted = crowd(memory_dir, 'train', 'evaluate', 'verify', 'delete')
    assert len(trained['saved']) >= STEPS
    assert read['read'] >= STEPS
    assert verified['whole'] >= STEPS
    assert deleted['deleted'] > 5
    check(memory_dir)

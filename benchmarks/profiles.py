"""Where the time of a save or a restore goes: by lines of this project, as py-spy sees them.

    pip install py-spy
    python benchmarks/profiles.py small save             10,000 leaves of 1 KB
    python benchmarks/profiles.py small restore_warm
    python benchmarks/profiles.py reshard restore_warm   rows to columns
    python benchmarks/profiles.py s1 restore_warm 40     40 turns, not 20
    python benchmarks/profiles.py small save 1 --short   tiny, which only shows that it works

Cases and states are those of run.py; all turns are in one process, so the first one, which is the slowest, counts little. The
seconds and the time of the processors, of the program and of the kernel for it, are those of turns without a profiler. Then
py-spy samples as many again, a hundred times a second, all threads that are running; a sample belongs to the innermost line
of the project that is on its stack, and is printed with what that line had called.
"""

from __future__ import annotations

import argparse
import collections
import gc
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_HERE = pathlib.Path(__file__).parent
_PACKAGE = 't5ckpt/'
_SHOWN = 24


def act(case_name: str, action: str, turns: int, *, short: bool) -> None:
    """The turns; in the process that is sampled."""
    import cases
    import jax

    import t5ckpt

    case = cases.CASES[case_name]
    leaves = case.leaves(cases.SHORT if short else cases.FULL)
    mesh = cases.mesh_of(case.devices)
    template = cases.nest(cases.abstract(cases.resharded(case, leaves), mesh))
    measured = []
    with tempfile.TemporaryDirectory(dir=_HERE) as directory:
        source = cases.nest(cases.abstract(leaves, mesh))
        with t5ckpt.Checkpointer(source, checkpoints_dir=directory, keep=1) as ck:
            for step in range(turns if action == 'save' else 1):
                state = jax.block_until_ready(cases.materialize(leaves, mesh, dict.fromkeys(leaves, step)))
                measured.append(_measured(lambda ck=ck, state=state, step=step: ck.save(cases.nest(state), step=step)))
        if action != 'save':
            ck = t5ckpt.Checkpointer(template, checkpoints_dir=directory)
            measured = [_measured(lambda: jax.block_until_ready(ck.restore())) for _ in range(turns)]
    seconds, user, system = (statistics.median(column) for column in zip(*measured, strict=True))
    print(
        f'{case_name} {action}, medians of {turns} turns: {seconds:.3f} s; of the processors {user:.3f} s, '
        f'and {system:.3f} s of the kernel'
    )


def _measured(turn: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds, and those of the processors, without and in the kernel."""
    gc.collect()
    before, start = os.times(), time.perf_counter()
    result = turn()
    seconds, after = time.perf_counter() - start, os.times()
    # What frees a restored state is not part of restoring it.
    del result
    return seconds, after.user - before.user, after.system - before.system


def _place(frames: list[str]) -> tuple[str, str] | None:
    """(function of the project, what it had called), or None for a sample that is not the project's."""
    inner = [index for index, frame in enumerate(frames) if _PACKAGE in frame]
    if not inner:
        return None
    called = frames[inner[-1] + 1 : inner[-1] + 2]
    return _short(frames[inner[-1]]), _short(called[0]) if called else ''


def _short(frame: str) -> str:
    name, _, where = frame.partition(' (')
    return f'{"/".join(pathlib.PurePath(where.rstrip(")")).parts[-2:])} {name}'


def report(samples: pathlib.Path) -> None:
    """Prints the shares of the project's own samples."""
    places: collections.Counter[tuple[str, str]] = collections.Counter()
    for line in samples.read_text().splitlines():
        stack, _, count = line.rpartition(' ')
        place = _place(stack.split(';'))
        if place is not None:
            places[place] += int(count)
    total = sum(places.values())
    print(f'{total} samples')
    for (function, called), count in places.most_common(_SHOWN):
        print(f'{count / total:6.1%}  {function}{"  >  " if called else ""}{called}')


def main() -> None:
    """Samples a child that runs the turns."""
    import cases

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('case', choices=[name for name, case in cases.CASES.items() if 'save' in case.actions])
    parser.add_argument('action', choices=('save', 'restore_warm'))
    parser.add_argument('turns', nargs='?', type=int, default=20)
    parser.add_argument('--short', action='store_true', help='tiny states: only shows that it works')
    parser.add_argument('--act', action='store_true', help='the turns alone, without py-spy')
    words = parser.parse_args()
    if words.act:
        act(words.case, words.action, words.turns, short=words.short)
        return
    sampler = shutil.which('py-spy', path=os.pathsep.join([os.path.dirname(sys.executable), os.environ['PATH']]))
    if sampler is None:
        sys.exit('py-spy is not here: pip install py-spy')
    with tempfile.TemporaryDirectory() as scratch:
        samples = pathlib.Path(scratch, 'samples.txt')
        turns_of = [sys.executable, os.fspath(pathlib.Path(__file__)), *sys.argv[1:], '--act']
        command = [
            sampler,
            'record',
            '--rate',
            '100',
            '--nonblocking',
            '--format',
            'raw',
            '--output',
            os.fspath(samples),
        ]
        environment = os.environ | {
            'JAX_PLATFORMS': 'cpu',
            'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
            'PYTHONPATH': os.pathsep.join([os.fspath(_HERE.parent), os.environ.get('PYTHONPATH', '')]),
        }
        subprocess.run(turns_of, check=True, env=environment)
        subprocess.run([*command, '--', *turns_of], check=True, env=environment, stdout=subprocess.DEVNULL)
        report(samples)


if __name__ == '__main__':
    main()

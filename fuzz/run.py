"""Fuzzes the decoders.

    python fuzz/run.py                           every target as often as targets.RUNS says, more than a million runs
    python fuzz/run.py --target manifest --runs 1000000 --seed 3

Each target runs in a process of its own, guided by coverage where atheris is installed, else by mutation of the corpus. A
crash, an error that is not of ``t5ckpt.errors``, a run of more than five seconds, or 512 MB more memory than at the start is
a failure; the input is left in ``fuzz/crash-*`` and belongs into ``corpus/`` once it is mended.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import logging
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

_HERE = pathlib.Path(__file__).parent
_SECONDS = 5
_KILOBYTES = 512 * 1024
_MAX_BYTES = 4096
_WORDS = (b'\xff', b'\0', b'\x7f', b'\xdd\xff\xff\xff\xff', b'\xdf\x7f\xff\xff\xff', b'\xc6\xff\xff\xff\xff', b'[' * 64)
_TEXTS = (b'..', b'/', b'1e999', b'-1', b'9223372036854775808', b'null', b'{}', b'"<U1"', b'[[]]', b'"|O"', b'\\u0000')


def main() -> int:
    """Runs one target or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--target')
    parser.add_argument('--runs', type=int)
    parser.add_argument('--seed', type=int, default=1)
    options = parser.parse_args()
    sys.path.insert(0, str(_HERE))
    if options.target is not None:
        return _run_one(options.target, options.runs, options.seed)
    import targets

    failed = []
    started = time.monotonic()
    for name, runs in targets.RUNS.items():
        command = [sys.executable, __file__, '--target', name, '--runs', str(options.runs or runs)]
        done = subprocess.run([*command, '--seed', str(options.seed)], check=False)
        failed += [name] if done.returncode else []
    total = sum(options.runs or runs for runs in targets.RUNS.values())
    print(f'{total:,} runs in {time.monotonic() - started:.0f} s; failed: {", ".join(failed) or "none"}')
    return len(failed)


def _run_one(name: str, runs: int | None, seed: int) -> int:
    try:
        atheris: Any = importlib.import_module('atheris')
    except ImportError:
        atheris = None
    context = contextlib.nullcontext() if atheris is None else atheris.instrument_imports(include=['t5ckpt'])
    with context:
        import targets
    logging.getLogger('t5ckpt').setLevel(logging.CRITICAL)
    count = targets.RUNS[name] if runs is None else runs
    one = _Checked(name, targets.TARGETS[name])
    if atheris is None:
        _mutate(one, targets.corpus(name), count, random.Random(seed))
    else:
        _guided(atheris, one, targets.corpus(name), (count, seed))
    print(f'{name}: {count:,} runs, {one.seconds:.2f} s the longest, {one.memory() // 1024} MB more', flush=True)
    return 0


class _Checked:
    """A target whose errors, time and memory are looked at."""

    def __init__(self, name: str, target: Callable[[bytes], None]):
        from t5ckpt.errors import T5CkptError

        self.name, self._target, self._ours = name, target, T5CkptError
        self._before: int | None = None
        self.seconds = 0.0
        signal.signal(signal.SIGALRM, self._too_long)

    def __call__(self, data: bytes) -> None:
        if self._before is None:
            with contextlib.suppress(self._ours):
                self._target(data)
            self._before = _peak()
        started = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)
        try:
            self._target(data)
        except self._ours:
            pass
        except BaseException:
            self._keep(data)
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.seconds = max(self.seconds, time.perf_counter() - started)
        if self.memory() > _KILOBYTES:
            self._keep(data)
            raise MemoryError(f'{self.memory() // 1024} MB more than at the start')

    def memory(self) -> int:
        """Kilobytes above the peak of the first run."""
        return 0 if self._before is None else _peak() - self._before

    def _keep(self, data: bytes) -> None:
        path = _HERE / f'crash-{self.name}-{hashlib.sha256(data).hexdigest()[:12]}'
        path.write_bytes(data)
        print(f'{path} fails', file=sys.stderr)

    @staticmethod
    def _too_long(*_: object) -> None:
        raise TimeoutError(f'more than {_SECONDS} s')


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _mutate(one: Callable[[bytes], None], seeds: list[bytes], runs: int, rng: random.Random) -> None:
    for seed in seeds:
        one(seed)
    for _ in range(runs - len(seeds)):
        one(mutated(rng.choice(seeds), seeds, rng))


def mutated(data: bytes, seeds: list[bytes], rng: random.Random) -> bytes:
    """A few changes: flipped bits, bytes set, ranges removed, repeated or taken from another input, words put in."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(out) + 1)
        to = min(len(out), at + rng.choice((1, 2, 4, 16, 64)))
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.randrange(256)
            case 2:
                del out[at:to]
            case 3:
                out[at:at] = out[at:to] * rng.choice((1, 2, 50))
            case 4:
                other = rng.choice(seeds)
                start = rng.randrange(len(other) + 1)
                out[at:to] = other[start : start + rng.choice((1, 4, 16, 64))]
            case _:
                out[at : rng.choice((at, to))] = rng.choice((*_WORDS, *_TEXTS))
    return bytes(out[:_MAX_BYTES])


def _guided(atheris: Any, one: _Checked, seeds: list[bytes], how_often: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for number, seed in enumerate(seeds):
            (pathlib.Path(directory) / str(number)).write_bytes(seed)
        runs, seed = how_often
        flags = [f'-runs={runs}', f'-seed={seed}', f'-max_len={_MAX_BYTES}', '-verbosity=0', '-close_fd_mask=0']
        atheris.Setup([sys.argv[0], directory, *flags], one)
        # libFuzzer ends the process itself.
        print(f'{one.name}: {runs:,} runs, guided by coverage', flush=True)
        atheris.Fuzz()


if __name__ == '__main__':
    sys.exit(main())

"""Two trainers save the same steps at once, and one of them is stopped at random, often for hours of its clock."""

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import subprocess
import time

import numpy as np
import pytest
from support import forked

import t5ckpt

_TRAINER = """
import errno, json, sys, time
import numpy as np
import t5ckpt
from t5ckpt.commit.writers import writer_facts
from t5ckpt.storage import open_storage
from t5ckpt.storage.base import Lock
from t5ckpt.testing import FaultyStorage

url, name, start, speed = sys.argv[1], *json.loads(sys.argv[2])

class NoLock(Lock):
    def is_current(self): return True
    def close(self): pass

def scaled(unix):
    return start + (unix - start) * speed

class Machine(FaultyStorage):
    # Nobody else sees whether the process has ended, or its locks, so only the clock tells that it may act no more.
    def _named(self, data):
        own = writer_facts()['place'].encode()
        return data if b'"digests"' in data else data.replace(own, b'machine %d' % name)
    def write(self, key, data):
        super().write(key, self._named(data))
    def replace(self, key, data, version):
        return super().replace(key, self._named(data), version)
    def try_lock(self, key):
        return NoLock()
    def modified(self, key):
        unix = super().modified(key)
        return None if unix is None else scaled(unix)
    def server_time(self, key):
        unix = super().server_time(key)
        return None if unix is None else scaled(unix)

state = {'w': np.zeros((64, 64), np.float32), 'name': 0}
storage = Machine(open_storage(url))
options = t5ckpt.CheckpointerOptions(inline_bytes=64, clock=lambda: scaled(time.time()))
with t5ckpt.Checkpointer(state, checkpoints_dir=storage, options=options) as ck:
    print('ready', flush=True)
    for line in sys.stdin:
        step = int(line)
        value = {'w': np.full((64, 64), 2 * step + name, np.float32), 'name': name}
        try:
            answer = 'told' if ck.save(value, step=step) is not None else 'dropped'
        except t5ckpt.errors.T5CkptError as error:
            answer = f'failed: {type(error).__name__} {errno.errorcode.get(getattr(error, "errno", None))}'
        print(answer, flush=True)
"""
# Seconds of the trainers in one of ours. A horizon lasts one second and four: a
# save on a busy machine has to end within its horizon.
_SPEED = {'files': 3600.0, 'az': 900.0, 'gs': 900.0, 's3': 900.0}
_HORIZON_SECONDS = 3600.0
_STEPS, _SEED = (int(os.environ.get(f'T5CKPT_RACE_{name}', value)) for name, value in (('STEPS', 8), ('SEED', 18)))
# In hours. After two, garbage collection takes what a writer in a bucket has left.
_STOPS = dict.fromkeys(_SPEED, (0, 0.6, 1.3, 2.3, 2.6)) | {'files': (0, 1.3, 1.3, 1.3, 1.6)}


def race(url, kind, rounds, seed):
    """Both save each step, and one of them is stopped somewhere; the answers of both, by step."""
    rng, start = random.Random(seed), time.time()
    stops = [stop * _HORIZON_SECONDS / _SPEED[kind] for stop in _STOPS[kind]]
    with contextlib.ExitStack() as stack:
        trainers = []
        for name in (0, 1):
            words = url, json.dumps([name, start, _SPEED[kind]])
            trainer = forked.start(_TRAINER, *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            trainers.append(stack.enter_context(trainer))
            # A process that is stopped would be waited for.
            stack.callback(trainer.kill)
        assert [trainer.stdout.readline() for trainer in trainers] == ['ready\n'] * 2
        answers = [_step(trainers, step, stops, rng) for step in range(rounds)]
        for trainer in trainers:
            trainer.stdin.close()
        assert [trainer.wait(60) for trainer in trainers] == [0, 0]
    return answers


def _step(trainers, step, stops, rng):
    order, stopped = rng.sample(trainers, 2), rng.choice(trainers)
    # The other one begins at once, or when the horizon is over.
    begins_late = rng.random() < 0.5
    for trainer in order:
        trainer.stdin.write(f'{step}\n')
        trainer.stdin.flush()
        if begins_late:
            stopped = order[0]
            break
        time.sleep(rng.choice([0, rng.uniform(0, 0.1)]))
    time.sleep(rng.uniform(0, 0.15))
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(rng.choice(stops))
    if begins_late:
        order[1].stdin.write(f'{step}\n')
        order[1].stdin.flush()
        time.sleep(rng.uniform(0, 0.3))
    stopped.send_signal(signal.SIGCONT)
    return [trainer.stdout.readline().strip() for trainer in trainers]


@pytest.fixture(scope='module')
def raced(request, tmp_path_factory):
    """The races of all kinds that are asked for, which are waits for the most part, at once; (URL, answers) of each, by kind.

    `make soak` sets 1,000 steps, in four races of each kind.
    """
    kinds = {item.callspec.params['kind'] for item in request.session.items if item.path == request.path}
    races = max(1, _STEPS // 250)
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        places = {}
        for kind in sorted(kinds):
            # Without its server the test of a kind is skipped, and not those of the others.
            with contextlib.suppress(pytest.skip.Exception):
                places[kind] = _places(kind, request, patch, tmp_path_factory, races)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(races * len(kinds)))
        seeds = range(_SEED, _SEED + races)
        yield {
            kind: [
                (url, pool.submit(race, url, kind, _STEPS // races, seed))
                for url, seed in zip(urls, seeds, strict=True)
            ]
            for kind, urls in places.items()
        }


def _places(kind, request, patch, tmp_path_factory, races):
    """Where a kind's races are; the variables of all buckets are set."""
    if kind == 'files':
        return [str(tmp_path_factory.mktemp('race') / 'run') for _ in range(races)]
    bucket = request.getfixturevalue(f'_{kind}')
    for name, value in bucket.environment().items():
        patch.setenv(name, value)
    bucket.proxy.reset()
    return [bucket.url() for _ in range(races)]


_GIVEN_UP = 'failed: StorageError ETIMEDOUT'


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize('kind', ['files', 'az', 'gs', 's3'])
def test_two_trainers_race_for_each_step(kind, request, raced):
    """Each step has the values of one of them, whole, and this one alone was told that it has saved.

    In a bucket, a writer that was stopped for two horizons while it sent the manifest takes its step back, and fails.
    """
    if kind != 'files':
        request.getfixturevalue(f'_{kind}')
    for url, answers in raced[kind]:
        _check(url, kind, answers.result(), _SEED)


def _check(url, kind, answers, seed):
    listed = t5ckpt.all_steps(url)
    for step, pair in enumerate(answers):
        if step not in listed:
            # Its writer was stopped for two horizons while it sent the request that commits, and has taken it back.
            assert kind != 'files', (seed, step, pair)
            assert sorted(pair) == ['dropped', _GIVEN_UP], (seed, step, pair)
            continue
        found = t5ckpt.load_t5x_checkpoint(url, step)
        assert [name for name in (0, 1) if pair[name] == 'told'] == [int(found['name'])], (seed, step, pair)
        assert np.all(found['w'] == 2 * step + found['name']), (seed, step)
        report = t5ckpt.verify(url, step, full=True)
        assert report.ok, (seed, step, report)

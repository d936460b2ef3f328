"""Exceptions from signal handlers at any moment: every call returns at once, the next one works, and nothing is left."""

import json
import logging
import os
import textwrap

import numpy as np
import pytest
from support import forked

import t5ckpt

CALLS = """
    import faulthandler, itertools, json, os, random, signal, sys, threading, time
    import jax.numpy as jnp, numpy as np
    import t5ckpt
    from t5ckpt.core.thread_pool import Pool
    from t5ckpt.storage import open_storage

    name, count, run = sys.argv[1], int(sys.argv[2]), sys.argv[3]

    class Stop(BaseException):
        pass

    came_at = []

    def stop(*_):
        came_at.append(time.perf_counter())
        raise Stop

    before = set(threading.enumerate())
    state = {str(number): jnp.arange(50_000.0) + number for number in range(12)}
    # Its owner changes it as soon as a save has returned, or was interrupted; at step n all its values are n.
    owned = np.zeros((64, 1024))
    state |= {'owned': owned}
    options = t5ckpt.CheckpointerOptions(compression='lz4', inline_bytes=64, reuse_unchanged=False)
    # In a bucket the marker of a deletion stays for two hours.
    keep = None if run.startswith('s3:') else 3
    ck = t5ckpt.Checkpointer(state, checkpoints_dir=run, keep=keep, options=options)
    ck.save(state, step=0)
    view = t5ckpt.open_checkpoint(run)
    numbers = itertools.count(1)

    def saves(call):
        step = next(numbers)
        owned[:] = step
        try:
            call(step)
        finally:
            owned[:] = -1
        ck.wait_until_finished()
        assert step in ck.all_steps()

    def save(step):
        assert ck.save(state, step=step) is not None

    def save_async(step):
        assert ck.save_async(state, step=step).result() is not None

    def copy():
        t5ckpt.copy_checkpoint(run, f'copy{next(numbers)}')

    def tasks():
        with Pool(4) as pool:
            futures = [pool.submit(int, number) for number in range(200)]
            assert [future.result() for future in futures] == list(range(200))

    calls = {
        'save': lambda: saves(save),
        'save_async': lambda: saves(save_async),
        'wait': lambda: saves(lambda step: ck.save_async(state, step=step)),
        'restore': ck.restore,
        'verify': lambda: t5ckpt.verify(run, full=True),
        'load': lambda: t5ckpt.load_t5x_checkpoint(run, options=t5ckpt.CheckpointerOptions(mmap=False)),
        'cp': copy,
        'lazy': lambda: [view[f'{number}'][5:9] for number in range(12)],
        'tasks': tasks,
    }
    call = calls[name]
    signal.signal(signal.SIGALRM, stop)
    call()
    generator, waits, seconds = random.Random(0), [], float('inf')
    for attempt in range(20 * count):
        if len(waits) == count:
            break
        # A call takes milliseconds.
        faulthandler.dump_traceback_later(90, exit=True)
        try:
            started = time.perf_counter()
            if attempt:
                signal.setitimer(signal.ITIMER_REAL, max(1e-5, generator.random() * seconds))
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
            seconds = min(seconds, time.perf_counter() - started)
        except Stop:
            waits.append(time.perf_counter() - came_at[-1])
    faulthandler.dump_traceback_later(90, exit=True)
    call()
    np.testing.assert_array_equal(ck.restore()['3'], state['3'])
    ck.close()

    def left(place):
        "What is there but complete steps."
        steps = t5ckpt.all_steps(place)
        for step in steps:
            assert t5ckpt.verify(place, step=step, full=True).ok, (place, step)
            assert np.all(t5ckpt.load_t5x_checkpoint(place, step)['owned'] == step) or place != run, step
        for key, _ in open_storage(place).walk(''):
            directory, _, file = key.partition('/')
            if directory not in [f'checkpoint_{step}' for step in steps]:
                yield key
        if not place.startswith('s3:'):
            yield from {*os.listdir(place)} - {f'checkpoint_{step}' for step in steps}

    assert [*left(run)] == [], [*left(run)]
    for copied in [path for path in os.listdir('.') if path.startswith('copy')]:
        # It runs in the thread that was interrupted, and what it leaves is removed by the next one, as after a kill.
        t5ckpt.copy_checkpoint(run, copied, t5ckpt.ConvertOptions(overwrite=True))
        assert [*left(copied)] == [], [*left(copied)]
    # Of calls other than saves, the last tasks may still be under way; a dummy stands for a thread of JAX or TensorStore.
    deadline = time.monotonic() + 5
    while threads := [each for each in {*threading.enumerate()} - before if not each.name.startswith('Dummy-')]:
        assert time.monotonic() < deadline, threads
        time.sleep(0.01)
    print(json.dumps({'came': len(waits), 'slowest': max(waits, default=0), 'median': sorted(waits)[len(waits) // 2]}))
"""
NAMES = ('save', 'save_async', 'wait', 'restore', 'verify', 'load', 'cp', 'lazy')
IN_A_BUCKET = ('save', 'save_async', 'wait', 'restore', 'verify', 'load', 'cp')
#: `make soak` sends 200 into each.
SIGNALS = int(os.environ.get('T5CKPT_SIGNALS', '30'))
#: A second, on a machine that does nothing else.
SECONDS = 5


@pytest.mark.parametrize(
    ('name', 'place', 'count'),
    [
        ('save', 'run', 20),
        ('restore', 'run', 20),
        ('tasks', 'run', 2000),
        *[pytest.param(name, 'run', SIGNALS, marks=pytest.mark.slow) for name in NAMES],
        *[pytest.param(name, 's3', SIGNALS, marks=pytest.mark.slow) for name in IN_A_BUCKET],
    ],
)
def test_a_call_returns_after_an_exception_from_a_signal_handler(tmp_path, monkeypatch, request, name, place, count):
    monkeypatch.chdir(tmp_path)
    run = request.getfixturevalue('s3').url() if place == 's3' else place
    done = forked.run(textwrap.dedent(CALLS), name, count, run)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # pytest -rA shows it.
    logging.getLogger(__name__).warning('%s in %s: %s', name, place, found)
    assert found['came'] > count // 2
    assert found['slowest'] < SECONDS


AT_EACH_BYTECODE = """
    import faulthandler, gc, sys
    import t5ckpt

    run = sys.argv[1]

    class Stop(BaseException):
        pass

    def is_of_pool(frame):
        "Whether a function was called to take a connection from urllib3's pool, or to put it back."
        while frame is not None and frame.f_code.co_name not in ('_get_conn', '_put_conn'):
            frame = frame.f_back
        return frame is not None

    def stop_at(number):
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            if event == 'call':
                if not is_of_pool(frame):
                    return None
                frame.f_trace_opcodes = True
            elif event == 'opcode':
                count += 1
                if count == number:
                    raise Stop
            return trace

        return trace

    steps, number, is_done = t5ckpt.all_steps(run), 0, False
    while not is_done:
        number += 1
        faulthandler.dump_traceback_later(60, exit=True)
        sys.settrace(stop_at(number))
        try:
            assert t5ckpt.all_steps(run) == steps
            is_done = True
        except Stop:
            pass
        finally:
            sys.settrace(None)
        gc.collect()
"""


@pytest.mark.slow
def test_a_request_to_s3_leaves_no_lock_taken(s3):
    """An exception in the middle of the pool of connections, whose end would then wait for a lock that nobody releases."""
    with t5ckpt.Checkpointer({'w': np.ones(9)}, checkpoints_dir=s3.url()) as checkpointer:
        checkpointer.save({'w': np.ones(9)}, step=1)
    done = forked.run(textwrap.dedent(AT_EACH_BYTECODE), s3.url())
    assert done.returncode == 0, done.stderr[-3000:]

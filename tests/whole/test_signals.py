"""Exceptions from signal handlers at any moment: every call returns, and the next one works."""

import textwrap

import pytest
from support import forked

CALLS = """
    import faulthandler, itertools, os, random, signal, sys, time
    import jax.numpy as jnp, numpy as np
    import t5ckpt
    from t5ckpt.core.thread_pool import Pool

    class Stop(BaseException):
        pass

    rung = slowest = 0.0

    def stop(*_):
        global rung
        rung = time.perf_counter()
        raise Stop

    state = {str(number): jnp.arange(50_000.0) + number for number in range(12)}
    ck = t5ckpt.Checkpointer(state, checkpoints_dir='run', compression='lz4', inline_bytes=64)
    ck.save(state, step=1)
    view = t5ckpt.open_checkpoint('run')

    copies = itertools.count()

    def copy():
        t5ckpt.copy_checkpoint('run', f'copy{next(copies)}')

    # Its owner changes it as soon as a save has returned, or was interrupted; at step n all its values are n.
    owned = {'a': np.full((64, 1024), 2.0), 'b': np.full(9, 2.0)}
    saver = t5ckpt.Checkpointer(owned, checkpoints_dir='owned', keep=3, inline_bytes=100, reuse_unchanged=False)
    steps = itertools.count(2)

    def saved(call):
        step = next(steps)
        try:
            call(step)
        finally:
            # A second signal does not come.
            for leaf in owned.values():
                leaf[:] = step + 1

    saved(lambda step: saver.save(owned, step=step))

    def check_saved():
        saver.wait_until_finished()
        for step in saver.all_steps():
            assert t5ckpt.verify('owned', step, full=True).ok
            assert {float(value) for leaf in saver.restore(step=step).values() for value in leaf.ravel()} == {step}

    def tasks():
        with Pool(4) as pool:
            futures = [pool.submit(int, number) for number in range(200)]
            assert [future.result() for future in futures] == list(range(200))

    call = {
        'restore': ck.restore,
        'verify': lambda: t5ckpt.verify('run', full=True),
        'load': lambda: t5ckpt.load_t5x_checkpoint('run', mmap=False),
        'cp': copy,
        'lazy': lambda: [view[f'{number}'][5:9] for number in range(12)],
        'tasks': tasks,
        'save': lambda: saved(lambda step: saver.save(owned, step=step)),
        'save_async': lambda: saved(lambda step: saver.save_async(owned, step=step).result()),
    }[sys.argv[1]]
    signal.signal(signal.SIGALRM, stop)
    call()
    started = time.perf_counter()
    call()
    seconds = time.perf_counter() - started
    generator, came = random.Random(0), 0
    for _ in range(int(sys.argv[2])):
        # A call takes milliseconds.
        faulthandler.dump_traceback_later(90, exit=True)
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-5, generator.random() * seconds))
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Stop:
            slowest = max(slowest, time.perf_counter() - rung)
            came += 1
            if came % 10 == 0:
                check_saved()
    faulthandler.dump_traceback_later(90, exit=True)
    call()
    np.testing.assert_array_equal(ck.restore()['3'], state['3'])
    ck.close()
    check_saved()
    saver.close()
    assert not [name for name in os.listdir('owned') if '.' in name]
    print('slowest', slowest, 'came', came)
"""


@pytest.mark.parametrize(
    ('name', 'count'),
    [
        *[pytest.param(name, 300, marks=pytest.mark.slow) for name in ('restore', 'verify', 'load', 'cp', 'lazy')],
        ('save', 300),
        ('save_async', 300),
        ('restore', 30),
        ('tasks', 2000),
    ],
)
def test_a_call_returns_after_an_exception_from_a_signal_handler(tmp_path, monkeypatch, name, count):
    monkeypatch.chdir(tmp_path)
    done = forked.run(textwrap.dedent(CALLS), name, count)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    assert int(done.stdout.split()[-1]) > count // 10

"""Asynchronous saves: safe against donation, errors that surface, no leaks, exit, waves."""

import _thread
import contextlib
import gc
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.options import with_options

import t5ckpt
import t5ckpt.checkpointer
import t5ckpt.save.pending
from t5ckpt import errors


def sharded(values, *spec):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('a', 'b'))
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))


def big_state(seed=0):
    rng = np.random.default_rng(seed)
    return {
        'params': {
            'w': sharded(rng.standard_normal((256, 128), dtype=np.float32), 'a', 'b'),
            'v': sharded(rng.standard_normal((64, 256), dtype=np.float32), None, 'b'),
            'r': sharded(rng.standard_normal((8192,), dtype=np.float32)),
        },
        'step': jnp.int32(0),
    }


def same(left, right):
    return jax.tree.all(jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), left, right))


@pytest.mark.parametrize('direct_bytes', [1, 2**20])
def test_fifty_donating_steps_with_a_save_on_each(tmp_path, direct_bytes):
    @jax.jit
    def plain(state):
        return jax.tree.map(lambda x: x * 2 + 1 if x.dtype != jnp.int32 else x + 1, state)

    donating = jax.jit(plain, donate_argnums=0)
    steps = 50
    expected = [big_state()]
    for _ in range(steps):
        expected.append(plain(expected[-1]))
    state = big_state()
    options = {'inline_bytes': 64, 'storage_options': {'direct_bytes': direct_bytes}}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, **with_options(**options)) as ck:
        for step in range(steps):
            ck.save_async(state, step=step)
            state = donating(state)
    assert t5ckpt.all_steps(tmp_path) == list(range(steps))
    for step in range(0, steps, 7):
        assert same(ck.restore(step=step), expected[step])


def test_numpy_leaves_may_be_overwritten_at_once(tmp_path):
    state = {'x': np.arange(100_000, dtype=np.int32), 'small': np.arange(4), 'step': 1}
    ck = t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path)
    pending = ck.save_async(state)
    state['x'][:] = -1
    state['small'][:] = -1
    pending.result()
    loaded = t5ckpt.load_t5x_checkpoint(tmp_path)
    assert np.array_equal(loaded['x'], np.arange(100_000))
    assert np.array_equal(loaded['small'], np.arange(4))


def fail_writes(run_dir: pathlib.Path) -> None:
    """Puts a file where the run's directory should be."""
    run_dir.write_text('in the way')


@pytest.mark.parametrize(
    'ask', ['result', 'check_for_errors', 'save', 'close', 'wait_until_finished', 'wait_until_persisted']
)
def test_errors_surface(tmp_path, ask):
    run = tmp_path / 'run'
    ck = t5ckpt.Checkpointer(big_state(), checkpoints_dir=run)
    fail_writes(run)
    pending = ck.save_async(big_state())
    pending.wait()
    with pytest.raises((errors.NotADirectoryStorageError, errors.SaveFailedError), match='run') as error:
        {
            'result': pending.result,
            'check_for_errors': ck.check_for_errors,
            'wait_until_finished': ck.wait_until_finished,
            'wait_until_persisted': ck.wait_until_persisted,
            'save': lambda: ck.save(big_state()),
            'close': ck.close,
        }[ask]()
    cause = error.value.__cause__ if isinstance(error.value, errors.SaveFailedError) else error.value
    assert isinstance(cause, errors.NotADirectoryStorageError)
    ck.check_for_errors()
    ck.close()


def test_the_error_of_a_loop_is_not_lost_when_its_last_save_fails(tmp_path):
    fail_writes(tmp_path / 'run')

    def loop(error):
        with t5ckpt.Checkpointer(big_state(), checkpoints_dir=tmp_path / 'run') as ck:
            ck.save_async(big_state())
            raise error

    with pytest.raises(FloatingPointError, match='the loss is NaN') as caught:
        loop(FloatingPointError('the loss is NaN'))
    assert 'in the background failed' in caught.value.__notes__[0]
    # An exit with code 0 would hide the failure.
    with pytest.raises(errors.SaveFailedError):
        loop(SystemExit(0))


def test_a_second_save_waits_for_the_first(tmp_path):
    order = []
    ck = t5ckpt.Checkpointer(
        big_state(),
        checkpoints_dir=tmp_path,
        progress=lambda done, total: order.append((done, total)),
        options=t5ckpt.CheckpointerOptions(reuse_unchanged=False),
    )
    first = ck.save_async(big_state() | {'step': jnp.int32(1)})
    second = ck.save_async(big_state() | {'step': jnp.int32(2)})
    assert first.done()
    second.result()
    halves = order[: len(order) // 2], order[len(order) // 2 :]
    assert all(half == sorted(half) and half[-1][0] == half[-1][1] for half in halves)


RESTORES = {
    'restore': lambda ck: ck.restore(),
    'restore of the step': lambda ck: ck.restore(2),
    'restore of the run': lambda ck: ck.restore(path=ck.checkpoints_dir),
    'restore_or_init': lambda ck: t5ckpt.restore_or_init(ck, None),
}


@pytest.mark.parametrize(
    ('how', 'tiers'), [*((how, False) for how in RESTORES), ('restore', True), ('restore_or_init', True)]
)
def test_a_restore_waits_for_the_save_in_the_background(tmp_path, how, tiers):
    """Otherwise it returns an older step, and restore_or_init begins a new run (flowgym#51)."""
    state = {'w': np.ones((64, 512), np.float32)}
    local = t5ckpt.LocalTier(tmp_path / 'local') if tiers else None
    with t5ckpt.Checkpointer(
        state,
        checkpoints_dir=tmp_path / 'run',
        local=local,
        progress=lambda *_: time.sleep(0.5),
        options=t5ckpt.CheckpointerOptions(inline_bytes=0),
    ) as ck:
        ck.save(state, step=1)
        pending = ck.save_async({'w': state['w'] * 2}, step=2)
        assert not pending.done()
        np.testing.assert_array_equal(RESTORES[how](ck)['w'], state['w'] * 2)


def run_python(code, cwd):
    env = {**os.environ, 'PYTHONPATH': str(pathlib.Path(t5ckpt.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, '-c', textwrap.dedent(code)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_interpreter_exit_waits_for_a_pending_save(tmp_path):
    done = run_python(
        """
        import numpy as np, t5ckpt
        state = {'x': np.arange(20_000_000, dtype=np.float32), 'step': 7}
        t5ckpt.Checkpointer(state, checkpoints_dir='run').save_async(state)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert t5ckpt.all_steps(tmp_path / 'run') == [7]


@pytest.mark.slow
def test_interpreter_exit_says_what_was_lost(tmp_path):
    (tmp_path / 'run').write_text('in the way')
    done = run_python(
        """
        import numpy as np, t5ckpt
        state = {'x': np.arange(100_000, dtype=np.float32), 'step': 7}
        t5ckpt.Checkpointer(state, checkpoints_dir='run').save_async(state)
        """,
        tmp_path,
    )
    assert 'step 7' in done.stderr
    assert 'lost' in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize('direct_bytes', [1, 2**20])
def test_two_hundred_saves_leak_nothing(tmp_path, direct_bytes):
    state = big_state()
    options = {
        'keep': 2,
        'reuse_unchanged': False,
        'storage_options': {'direct_bytes': direct_bytes},
    }

    def usage_after(steps):
        # Closed, since steps that go are removed in the background.
        with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, **with_options(**options)) as checkpointer:
            for step in steps:
                checkpointer.save_async(state | {'step': jnp.int32(step)}, step=step)
        gc.collect()
        status = pathlib.Path('/proc/self/status').read_text()
        resident = int(next(line.split()[1] for line in status.splitlines() if line.startswith('VmRSS')))
        return len(os.listdir('/proc/self/fd')), threading.active_count(), resident

    before = usage_after(range(40))
    after = usage_after(range(40, 240))
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1]
    assert after[2] <= before[2] + 40 * 1024  # 200 saves of 0.5 MB would be 100 MB
    assert t5ckpt.all_steps(tmp_path) == [238, 239]


@pytest.mark.parametrize('budget_mb', [0.001, 0.1, 0.3, 1])
def test_waves(tmp_path, budget_mb):
    """Copies that do not fit the budget are staged in waves; a leaf larger than a wave is fetched chunk by chunk."""
    state = big_state(3)
    ck = t5ckpt.Checkpointer(
        state, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(chunk_bytes=8192, inline_bytes=0)
    )
    pending = ck.save_async(state, concurrent_gb=budget_mb / 1000, step=0)
    donated = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(state)
    pending.result()
    assert same(ck.restore(), big_state(3))
    del donated


def test_a_failing_wave_does_not_hang(tmp_path):
    run = tmp_path / 'run'
    state = big_state()
    ck = t5ckpt.Checkpointer(state, checkpoints_dir=run, options=t5ckpt.CheckpointerOptions(chunk_bytes=8192))
    fail_writes(run)
    with pytest.raises(errors.NotADirectoryStorageError):
        ck.save_async(state, concurrent_gb=0.0001).result(timeout=60)


INTERRUPTED = """
    import os, signal, sys, threading, time
    import jax, jax.numpy as jnp
    import t5ckpt

    returned = threading.Event()

    def callers():
        frame, names = sys._current_frames()[threading.main_thread().ident], set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        return names

    # A shell starts what runs in the background with interrupts ignored, and Python keeps that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    state = {f'x{i}': jnp.ones((512, 512)) * i for i in range(8)}
    jax.block_until_ready(state)
    where = sys.argv[1]
    tiny = {'concurrent_gb': 0.002} if where == 'feed' else {}

    def interrupt(done, total):
        # From the writer's thread, so at a moment when the save is surely under way.
        if done == total // 4 // 2**20 * 2**20 and not returned.is_set():
            while where == 'result' and 'result' not in callers():
                time.sleep(0.001)
            # To this thread, so that nothing wakes the caller, as when it comes just before the caller begins to wait.
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            # The save cannot end before its caller is back.
            print('back', returned.wait(2), flush=True)

    options = t5ckpt.CheckpointerOptions(chunk_bytes=2**20)
    ck = t5ckpt.Checkpointer(state, checkpoints_dir='run', progress=interrupt, options=options)
    try:
        ck.save(state, step=1, **tiny) if where != 'result' else ck.save_async(state, step=1).result()
    except KeyboardInterrupt:
        returned.set()
    ck.wait_until_finished()
    print(t5ckpt.all_steps('run'), os.listdir('run'), flush=True)
    jax.block_until_ready(state)
    ck.save(state, step=2)
    ck.close()
    print(t5ckpt.all_steps('run'), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(('where', 'steps'), [('save', []), ('feed', []), ('result', [1])])
def test_an_interrupt(tmp_path, where, steps):
    """Ctrl-C ends a blocking save, and leaves an asynchronous one alone; the caller is back at once, and nothing hangs."""
    env = {**os.environ, 'PYTHONPATH': str(pathlib.Path(t5ckpt.__file__).parents[1]), 'XLA_FLAGS': ''}
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(INTERRUPTED), where],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    names = [f'checkpoint_{step}' for step in steps]
    assert done.stdout.splitlines() == ['back True', f'{steps} {names}', f'{[*steps, 2]}'], done.stderr


class GivenUpError(Exception):
    """What a handler of a signal may raise, such as one that bounds the time."""


def save_interrupted(save, number, error, then=None):
    """Calls it with an interrupt at one line of the checkpointer's own; says whether there are so many.

    With ``then``, there is another one at a later call of a function of its own. A trace function that has raised is called
    no more, so that one comes from a profile function.
    """
    lines, calls = itertools.count(), itertools.count()
    files = {module.__file__ for module in (t5ckpt.checkpointer, t5ckpt.save.pending)}
    came = []

    def trace(frame, event, _):
        if event == 'line' and frame.f_code.co_filename in files and next(lines) == number:
            came.append(number)
            raise error
        return trace

    def profile(frame, event, _):
        if event == 'call' and came and frame.f_code.co_filename in files and next(calls) == then:
            raise error

    before = sys.gettrace(), sys.getprofile()
    sys.setprofile(None if then is None else profile)
    sys.settrace(trace)
    try:
        save()
    except error:
        pass
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return bool(came)


@pytest.mark.slow
@pytest.mark.parametrize('error', [KeyboardInterrupt, GivenUpError])
@pytest.mark.parametrize('method', ['save', 'save_async'])
def test_an_interrupt_at_every_line(tmp_path, method, error):
    """It may come before, between and after any two lines, such as those around the start of the thread."""
    state = {'x': np.zeros((8, 512), np.float32)}

    def slowly(*_):
        time.sleep(0.02)

    ck = t5ckpt.Checkpointer(
        state, checkpoints_dir=tmp_path, progress=slowly, options=t5ckpt.CheckpointerOptions(inline_bytes=0)
    )
    for number in itertools.count():
        if not save_interrupted(lambda step=number: getattr(ck, method)(state, step=step), number, error):
            break
        # The caller may change its arrays now: nothing of that is committed.
        state['x'] += 1
        ck.wait_until_finished()
        ck.check_for_errors()
    ck.close()
    # Nothing hung, and every line was tried.
    assert number > 30
    for step in t5ckpt.all_steps(tmp_path):
        assert t5ckpt.verify(tmp_path, step, full=True).ok
        assert (t5ckpt.load_t5x_checkpoint(tmp_path, step)['x'] == step).all()


class Changing:
    """A state that its owner changes as soon as a save has returned, or was interrupted; at step n all its values are n."""

    def __init__(self):
        self.state = {'x': np.zeros((8, 512), np.float32), 'inline': np.zeros(2, np.float32)}

    def set(self, step):
        for leaf in self.state.values():
            leaf[:] = step


@pytest.fixture
def changing(tmp_path):
    """The state, and a slow checkpointer of it; whatever it committed must be whole, and what the step had."""
    owner = Changing()
    with t5ckpt.Checkpointer(
        owner.state,
        checkpoints_dir=tmp_path,
        progress=lambda *_: time.sleep(0.01),
        options=t5ckpt.CheckpointerOptions(inline_bytes=8, reuse_unchanged=False),
    ) as ck:
        # What is imported only now is imported by this one.
        ck.save(owner.state, step=0)
        owner.set(1)
        yield owner, ck
        ck.wait_until_finished()
        ck.check_for_errors()
        owner.set(10**6)
        assert ck.save(owner.state, step=10**6) is not None
        for step in ck.all_steps():
            assert t5ckpt.verify(tmp_path, step, full=True).ok
            values = {float(value) for leaf in ck.restore(step=step).values() for value in leaf.ravel()}
            assert values == {step}
    assert all(path.name.startswith('checkpoint_') and '.' not in path.name for path in tmp_path.iterdir())


@contextlib.contextmanager
def at_most(seconds):
    """Fails the test instead of letting it hang."""

    def fail(*_):
        raise AssertionError(f'still waiting after {seconds} s')

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.parametrize('method', ['save', 'save_async'])
@pytest.mark.parametrize('then', range(5))
def test_two_interrupts(changing, method, then):
    """The second one comes while the first one is dealt with: nothing hangs, nothing that the caller changes then is
    committed, and the next save works."""
    owner, ck = changing
    for step in itertools.count(1):
        if not save_interrupted(
            lambda step=step: getattr(ck, method)(owner.state, step=step), step - 1, KeyboardInterrupt, then
        ):
            break
        # At once: a save that went on would see it.
        owner.set(step + 1)
        with at_most(20):
            ck.wait_until_finished()
    assert step > 30


def twice_interrupted(save, after, then, change):
    """Calls it with a signal ``after`` seconds and ``then`` one more; ``change`` is called as soon as the caller is back."""
    more, heard = [then], []

    def ring(*_):
        if more:
            signal.setitimer(signal.ITIMER_REAL, more.pop())
        if not heard:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    # What is raised in a callback of the collector is only printed, and must not raise again while it is.
    gc.disable()
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        # RuntimeError: from the start of a thread, where Python's own lock may be taken or not.
        with contextlib.suppress(KeyboardInterrupt, RuntimeError):
            save()
        heard.append(True)
        change()
    except KeyboardInterrupt:
        heard.append(True)
        change()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook
        gc.enable()


@pytest.mark.slow
def test_two_signals(changing):
    """As above, with real signals, microseconds apart."""
    owner, ck = changing
    for step in range(1, 201):
        twice_interrupted(
            lambda step=step: ck.save(owner.state, step=step), 0.005, 1e-6 * step, lambda step=step: owner.set(step + 1)
        )
        with at_most(20):
            ck.wait_until_finished()


@pytest.mark.parametrize('concurrent_gb', [1, 2e-5])
@pytest.mark.parametrize('method', ['save', 'save_async', 'wait_until_finished'])
def test_a_signal_handler_waits_during_a_blocking_save(tmp_path, method, concurrent_gb):
    """The blocking save is ended first, also when it has waves to stage, and is not given up: nobody raised anything."""
    states = [{name: jnp.full((8, 512), step, jnp.float32) for name in 'xyz'} for step in range(3)]
    entered, main, rung = threading.Event(), threading.get_ident(), []

    def ring(*_):
        if not rung:
            rung.append(True)
            signal.pthread_kill(main, signal.SIGALRM)
            assert entered.wait(60)

    def handler(*_):
        entered.set()
        getattr(ck, method)(*([states[2]] if 'save' in method else []), **({'step': 2} if 'save' in method else {}))

    ck = t5ckpt.Checkpointer(
        states[0], checkpoints_dir=tmp_path, progress=ring, options=t5ckpt.CheckpointerOptions(inline_bytes=0)
    )
    before = signal.signal(signal.SIGALRM, handler)
    try:
        assert ck.save(states[1], step=1, concurrent_gb=concurrent_gb) is not None
    finally:
        signal.signal(signal.SIGALRM, before)
    ck.wait_until_finished()
    ck.check_for_errors()
    assert entered.is_set()
    steps = [1, 2] if 'save' in method else [1]
    assert ck.all_steps() == steps
    for step in steps:
        assert same(ck.restore(step=step), states[step])


def test_a_signal_handler_waits_while_a_blocking_save_starts():
    """At every line between the call of ``save`` and its return; the save need not have a thread yet."""
    state = {'x': np.ones(8, np.float32)}
    ck = t5ckpt.Checkpointer(state, checkpoints_dir='memory://a handler waits/run')
    files = {t5ckpt.save.pending.__file__, threading.__file__}

    def save(step):
        """Waits at one line of the modules of saves and threads; says whether there are so many."""
        lines, waited = itertools.count(), []

        def trace(frame, event, _):
            is_line = event == 'line' and frame.f_code.co_filename in files
            # Python looks for no signal while it holds this lock, without which no thread starts.
            if is_line and not waited and not threading._active_limbo_lock._is_owned() and next(lines) == step:
                waited.append(True)
                with at_most(20):
                    ck.wait_until_finished()
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert ck.save(state, step=step) is not None
        finally:
            sys.settrace(before)
        return bool(waited)

    for step in itertools.count():
        if not save(step):
            break
    assert step > 30
    assert ck.all_steps() == list(range(step + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    'last',
    [
        'atexit.register(save)',
        'signal.signal(signal.SIGTERM, lambda *_: save()); threading.Thread(target=end).start()',
    ],
)
def test_a_save_while_the_interpreter_ends(tmp_path, last):
    """The last chance of a preempted job. Python counts the main thread as ended by then."""
    done = run_python(
        f"""
        import atexit, os, signal, threading, time
        import numpy as np, t5ckpt
        state = {{'x': np.arange(100_000)}}
        ck = t5ckpt.Checkpointer(state, checkpoints_dir='run')

        def save():
            print(threading.main_thread().is_alive(), ck.save(state, step=1).step, ck.save_async(state, step=2).result().step)

        def end():
            while threading.main_thread().is_alive():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

        {last}
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, 'False 1 2\n'), done.stderr
    assert t5ckpt.all_steps(tmp_path / 'run') == [1, 2]


@pytest.mark.slow
def test_the_first_save_while_the_interpreter_ends_needs_no_import_of_jax(tmp_path):
    """JAX 0.11 with filelock 3.32 cannot be imported by then, on Python 3.12."""
    done = run_python(
        """
        import atexit, sys
        import numpy as np, t5ckpt

        class Refusing:
            def find_spec(name, path, target=None):
                if name == 'jax':
                    raise RuntimeError("can't register atexit after shutdown")

        ck = t5ckpt.Checkpointer({'x': np.arange(9)}, checkpoints_dir='run')
        sys.meta_path.insert(0, Refusing)
        atexit.register(lambda: print(ck.save({'x': np.arange(9)}, step=1).step))
        """,
        tmp_path,
    )
    assert done.stdout == '1\n', done.stderr


@pytest.mark.slow
@pytest.mark.parametrize('before', ['t5ckpt.Checkpointer(state, checkpoints_dir="other").save(state, step=1)', ''])
def test_a_background_save_that_begins_while_the_interpreter_ends(tmp_path, before):
    """In a function that was registered before t5ckpt's own, or where t5ckpt has not registered any."""
    done = run_python(
        f"""
        import atexit
        atexit.register(lambda: ck.save_async(state, step=2))
        import numpy as np, t5ckpt
        state = {{'x': np.ones((3000, 3000))}}
        {before}
        ck = t5ckpt.Checkpointer(state, checkpoints_dir='run')
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, ''), done.stderr
    assert t5ckpt.all_steps(tmp_path / 'run') == [2]


def test_a_save_where_no_thread_starts(tmp_path):
    """The caller saves, deletes and restores, as in ``atexit`` on Python 3.12."""
    state = {'x': np.arange(100_000), 'y': jnp.arange(100_000)}
    ck = t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, keep=2)
    told = []
    before = threading.stack_size(2**46)  # larger than any address space
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        assert [ck.save(state, step=step).step for step in range(3)] == [0, 1, 2]
        pending = ck.save_async(state, step=3)
        pending.add_done_callback(told.append)
        assert (pending.result().step, told, t5ckpt.all_steps(tmp_path)) == (3, [pending], [2, 3])
        np.testing.assert_array_equal(ck.restore()['x'], state['x'])
        ck.close()
    finally:
        threading.stack_size(before)
    assert sorted(os.listdir(tmp_path)) == ['checkpoint_2', 'checkpoint_3']


@pytest.mark.parametrize('method', ['save', 'save_async'])
@pytest.mark.parametrize('inner', ['save', 'save_async', 'wait_until_finished', 'close'])
def test_a_callback_that_waits_for_its_own_save(tmp_path, method, inner):
    """An error, where it would hang for ever."""
    state = {'x': np.ones((64, 512), np.float32)}

    def callback(*_):
        getattr(ck, inner)(*([state] if 'save' in inner else []), **({'step': 9} if 'save' in inner else {}))

    ck = t5ckpt.Checkpointer(
        state, checkpoints_dir=tmp_path, progress=callback, options=t5ckpt.CheckpointerOptions(inline_bytes=0)
    )
    with pytest.raises(errors.SaveFailedError, match='was asked to wait for itself, by a callback'):
        ck.save(state, step=1) if method == 'save' else ck.save_async(state, step=1).result()
    assert t5ckpt.all_steps(tmp_path) == []


def test_a_process_forked_during_a_save_collects_garbage(tmp_path):
    done = run_python(
        """
        import gc, os, threading, warnings
        from t5ckpt.core.gc_pause import paused
        warnings.simplefilter('ignore')
        entered, leave = threading.Event(), threading.Event()

        def plan():
            with paused():
                entered.set()
                leave.wait(60)

        thread = threading.Thread(target=plan)
        thread.start()
        entered.wait(60)
        child = os.fork()
        if child == 0:
            os._exit(gc.isenabled())
        print(gc.isenabled(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        leave.set()
        thread.join()
        print(gc.isenabled())
        """,
        tmp_path,
    )
    assert done.stdout.split() == ['False', '1', 'True'], done.stderr


@pytest.mark.parametrize('direct_bytes', [1, None])
@pytest.mark.parametrize('method', ['save', 'save_async'])
def test_progress_that_fails_ends_the_save(tmp_path, method, direct_bytes):
    """All writes have ended when the error is there, so that what they wrote is gone."""

    def fail(done, total):
        raise GivenUpError(done, total)

    state = {'x': np.ones((512, 4096), np.float32)}
    options = {'chunk_bytes': 2**15, 'storage_options': {'direct_bytes': direct_bytes}}
    threads = _thread._count()
    ck = t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, progress=fail, **with_options(**options))
    with pytest.raises(GivenUpError):
        ck.save(state, step=1) if method == 'save' else ck.save_async(state, step=1).result()
    assert list(tmp_path.iterdir()) == []
    deadline = time.monotonic() + 20
    while _thread._count() > threads:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ck.close()
    assert (
        t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, **with_options(**options)).save(state, step=1) is not None
    )


@pytest.mark.slow
def test_a_forked_process_does_not_wait_for_its_parents_save(tmp_path):
    done = run_python(
        """
        import os, signal, threading, warnings
        import numpy as np, t5ckpt
        warnings.simplefilter('ignore')
        state, forked = {'x': np.ones(4_000_000, np.float32)}, threading.Event()
        ck = t5ckpt.Checkpointer(state, checkpoints_dir='run', progress=lambda *_: forked.wait(60))
        pending = ck.save_async(state, step=1)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            ck.close()
            os._exit(0 if pending.result() is None else 1)
        status = os.waitpid(child, 0)[1]
        forked.set()
        ck.close()
        print(status, t5ckpt.all_steps('run'))
        """,
        tmp_path,
    )
    assert done.stdout.strip() == '0 [1]', done.stdout + done.stderr


def test_a_failed_save_keeps_nothing_alive(tmp_path):
    run = tmp_path / 'run'
    state = big_state()
    refs = [weakref.ref(leaf) for leaf in state['params'].values()]
    template = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    ck = t5ckpt.Checkpointer(template, checkpoints_dir=run)
    fail_writes(run)
    pending = ck.save_async(state, step=1)
    pending.wait()
    with pytest.raises(errors.NotADirectoryStorageError):
        pending.result()
    del state
    gc.collect()
    assert [ref() is None for ref in refs] == [True] * len(refs)


@pytest.mark.parametrize('tiers', [1, 2])
def test_a_checkpointer_that_is_gone_keeps_nothing_alive(tmp_path, tiers):
    """Grain's worker processes end with the iterator; at the interpreter's exit they would leave their shared memory."""

    class Iterator:
        def get_state(self):
            return {}

        def set_state(self, state):
            pass

    def run():
        state, iterator = {**big_state(), 'step': 0}, Iterator()
        local = {'local': t5ckpt.LocalTier(tmp_path / 'ssd')} if tiers == 2 else {}
        policy = t5ckpt.SaveEvery(1)
        ck = t5ckpt.Checkpointer(
            state,
            checkpoints_dir=tmp_path / 'run',
            dataset_iterator=iterator,
            save_policy=policy,
            **with_options(**local),
        )
        t5ckpt.restore_or_init(ck, lambda: state)
        ck.maybe_save(1, {**state, 'step': 1})
        ck.save({**state, 'step': 2})
        ck.restore()
        ck.close()
        return [weakref.ref(each) for each in (ck, iterator, state['params']['w'])]

    gc.collect()
    gc.disable()
    try:
        assert [ref() for ref in run()] == [None, None, None]
    finally:
        gc.enable()


def test_lazy_arrays_are_let_go_one_by_one(tmp_path):
    alive, most = set(), [0]

    def values(index):
        array = np.full(250_000, index, np.float32)
        alive.add(index)
        weakref.finalize(array, alive.discard, index)
        most[0] = max(most[0], len(alive))
        return array

    state = {f'x{i:02}': t5ckpt.LazyThreadPoolArray((250_000,), np.float32, lambda i=i: values(i)) for i in range(20)}
    ck = t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path)
    ck.save(state, step=1, concurrent_gb=0.006)
    assert most[0] <= 5
    assert np.array_equal(t5ckpt.load_t5x_checkpoint(tmp_path)['x13'], np.full(250_000, 13))


FORKED = """
    import os, sys, warnings
    import numpy as np, t5ckpt
    warnings.simplefilter('ignore')
    where, state = sys.argv[-1], {'x': np.ones(20_000, np.float32)}
    options = {'checkpoints_dir': where, 'options': t5ckpt.CheckpointerOptions(compression='zstd')}
    ck = t5ckpt.Checkpointer(state, **options)
    ck.save(state, step=1)
    view = t5ckpt.open_checkpoint(where)
    assert view['x'][0] == 1
    uses = {
        'save': lambda: ck.save(state, step=2),
        'another save': lambda: t5ckpt.Checkpointer(state, **options).save(state, step=3),
        'background': lambda: ck.save_async(state, step=4).result(),
        'restore': ck.restore,
        'load': lambda: t5ckpt.load_t5x_checkpoint(where),
        'view': lambda: view['x'][:3],
    }
    for name, use in uses.items():
        child = os.fork()
        if child == 0:
            try:
                use()
            except t5ckpt.errors.T5CkptError as error:
                os._exit(0 if "'spawn'" in str(error) else 3)
            os._exit(4)
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    ck.save(state, step=9)
    print(t5ckpt.all_steps(where))
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize('where', ['run', 'memory://forked/run'])
def test_a_process_forked_after_a_save_works(tmp_path, where):
    done = run_python(FORKED.replace('sys.argv[-1]', repr(where)), tmp_path)
    uses = ('save', 'another save', 'background', 'restore', 'load', 'view')
    # TensorStore does not work there, and files need none.
    code, steps = (4, '[1, 2, 3, 4, 9]') if where == 'run' else (0, '[1, 9]')
    assert done.stdout.splitlines() == [*(f'{use} {code}' for use in uses), steps], done.stdout + done.stderr


AT_EXIT = """
import atexit, sys
import numpy as np, t5ckpt
run = sys.argv[1]
state = {'w': np.arange(2.0**16).reshape(256, 256), 'step': 1}
with t5ckpt.Checkpointer(state, checkpoints_dir=run) as ck:
    ck.save(state, step=1)

def last():
    with t5ckpt.Checkpointer(state, checkpoints_dir=run) as ck:
        restored = ck.restore()['w']
    loaded = t5ckpt.load_t5x_checkpoint(run)['w']
    corner = t5ckpt.open_checkpoint(run)['w'][:5, :5]
    t5ckpt.copy_checkpoint(run, f'{run}-copy')
    report = t5ckpt.verify(f'{run}-copy/checkpoint_1')
    print(restored.sum(), loaded.sum(), corner.sum(), report.ok)

atexit.register(last)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_restores_copies_and_checks_at_the_end_of_the_interpreter(tmp_path):
    """Their threads take work while ``concurrent.futures`` does not anymore."""
    done = subprocess.run(
        [sys.executable, '-c', AT_EXIT, str(tmp_path / 'run')], capture_output=True, text=True, check=True
    )
    assert done.stderr == ''
    assert done.stdout == '2147450880.0 2147450880.0 12850.0 True\n'


DAEMON = """
    import sys, threading, time
    import numpy as np
    import t5ckpt

    state, is_saved = {'a': np.arange(1e6)}, threading.Event()
    ck = t5ckpt.Checkpointer(state, checkpoints_dir='run', keep=2)
    ck.save(state, step=0)

    def loop():
        for step in range(1, 1000):
            getattr(ck, sys.argv[1])({'a': state['a'] + step}, step=step)
            is_saved.set()

    threading.Thread(target=loop, daemon=True).start()
    is_saved.wait()
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize('method', ['save', 'save_async'])
def test_a_save_in_a_daemon_thread_ends_before_the_interpreter(tmp_path, method):
    """Python would end the thread inside C++, which aborts the process."""
    for seconds in (0.0, 0.05):
        done = subprocess.run(
            [sys.executable, '-c', textwrap.dedent(DAEMON), method, str(seconds)],
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        report = t5ckpt.verify(tmp_path / 'run', full=True)
        assert report.ok, str(report)
        shutil.rmtree(tmp_path / 'run')

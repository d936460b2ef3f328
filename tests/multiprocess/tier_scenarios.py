"""What the processes of a job with local directories are told to do; as scenarios.py."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import pathlib
import pickle
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import scenarios
from support import faultshim

import t5ckpt
from t5ckpt.distributed.processes import jax_processes
from t5ckpt.errors import NoSpaceError, NotPersistedError, StorageError, T5CkptError
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage

# Every shard of these is on the disks of two processes at least.
TWICE = ['target/rows', 'target/bfloat', 'target/everywhere', 'target/small', 'state/step']
ONCE = [*TWICE, 'target/both']
_held: dict = {}


class Positions:
    """An iterator of this process, whose position is the step that it has reached."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return self.at

    def get_state(self):
        return {'at': self.at, 'of': jax.process_index()}

    def set_state(self, state):
        assert state['of'] == jax.process_index()
        self.at = state['at']


class DyingPolicy(t5ckpt.SaveEvery):
    """Kills process 0 when it is asked about a step: all files are durable, and nothing is committed."""

    def reason(self, moment):
        if moment.step == _held.get('dies_at'):
            scenarios.die()
        return super().reason(moment)


class Troubled(FaultyStorage):
    """A storage in the trouble that a file names while it exists.

    'away', 'full', 'slow', 'held' (writes of chunks wait), or 'torn' (writes of chunks fail in process 1).
    """

    def __init__(self, inner, flag):
        super().__init__(inner)
        self._flag = pathlib.Path(flag)

    def before_operation(self, name, key):
        super().before_operation(name, key)
        trouble = self._flag.read_text() if self._flag.exists() else ''
        if trouble == 'away':
            raise StorageError(5, 'injected: the bucket is away')
        if trouble == 'full' and name in ('write', 'replace', 'write_chunk'):
            raise NoSpaceError(28, 'injected: the bucket is full')
        if trouble == 'slow':
            time.sleep(0.2)
        while trouble == 'held' and name == 'write' and '/target.' in key:
            time.sleep(0.05)
            trouble = self._flag.read_text() if self._flag.exists() else ''
        if trouble == 'torn' and jax.process_index() == 1 and name == 'write' and '/target.' in key:
            raise StorageError(5, 'injected: the upload is torn')


class ReadOnly(scenarios.HookedStorage):
    """A disk that is remounted read-only at an operation."""

    def __init__(self, inner, operation, key):
        super().__init__(inner, operation, key, self._break)
        self._is_broken = False

    def _break(self):
        self._is_broken = True

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if self._is_broken and name in ('write', 'write_chunk', 'delete_file', 'make_dir', 'publish'):
            raise StorageError(30, 'injected: read-only file system')


class LostReply:
    """The coordination service, whose reply to the first message of process 0 about an upload is lost: the call times out."""

    def __init__(self, inner):
        self._inner, self._has_lost = inner, inner.index != 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def put(self, key, value, timeout_seconds):
        self._inner.put(key, value, timeout_seconds)
        if threading.current_thread().name == 't5ckpt-upload' and not self._has_lost:
            self._has_lost = True
            raise TimeoutError('injected: no answer')


def end_trouble_and_die(trouble):
    """Ends the trouble of the bucket, and dies when the other processes have ended the upload of step 1."""
    flag = pathlib.Path(trouble)
    if flag.exists():
        flag.unlink()
        while any(flag.parent.glob('disk[012]/.t5ckpt/to_persist/1')):
            time.sleep(0.05)
        scenarios.die()


def eio():
    """A bad sector, or a disk that is unplugged."""
    raise StorageError(5, 'injected: input/output error')


def bug():
    """An error of a storage that is no T5CkptError."""
    raise RuntimeError('injected: a bug')


def emfile():
    """A process that has used up its file descriptors."""
    raise StorageError(24, 'injected: too many open files')


def _dies(done, total):
    if _held.get('dies_at') == 'write' and done > total // 2:
        scenarios.die()


def tiers(directory, leaves, options, local):
    """Makes the checkpointer of this process, which the next orders use.

    ``options`` are those of the checkpointer, and: 'persist', the steps to upload; 'keep_local', the local steps to keep; 'hook',
    (process, operation, key) of the run's storage at which that process dies; 'local_hook', (process, operation, key, what
    happens) of the local directory; 'fails', (process, 'local' or 'run', number, whether the later ones fail, too) of an
    operation that fails; 'trouble', the file of :class:`Troubled` for the run's storage; 'iterator', whether there is one;
    'iterator_in', the processes with one; 'loses_reply', whether the processes are those of :class:`LostReply`.
    """
    options = dict(options)
    storage = open_storage(directory)
    hook, trouble = options.pop('hook', None), options.pop('trouble', None)
    if hook is not None and hook[0] == jax.process_index():
        storage = scenarios.HookedStorage(storage, hook[1], hook[2], scenarios.die)
    if options.pop('loses_reply', False):
        options['processes'] = LostReply(jax_processes())
    if trouble is not None:
        storage = Troubled(storage, trouble)
    process, where, number, is_sticky = options.pop('fails', (None, '', 0, False))
    if process == jax.process_index():
        failing = {
            'fail_at': number,
            'sticky': is_sticky,
            'error': StorageError(5 if number % 3 else 24, 'injected: it failed'),
        }
        if where == 'run':
            storage = FaultyStorage(storage, **failing)
        else:
            local = FaultyStorage(open_storage(local), **failing)
    hook = options.pop('local_hook', None)
    if hook is not None and hook[0] == jax.process_index():
        functions = {'die': scenarios.die, 'full': scenarios.fail, 'eio': eio, 'emfile': emfile, 'bug': bug}
        functions['end trouble, die'] = functools.partial(end_trouble_and_die, trouble)
        inner, *at = open_storage(local), *hook[1:3]
        local = (
            ReadOnly(inner, *at) if hook[3] == 'read-only' else scenarios.HookedStorage(inner, *at, functions[hook[3]])
        )
    shape = tuple(options.pop('shape', (2, 4)))
    _held.update(leaves=leaves, positions=Positions(), shape=shape)
    persist = options.pop('persist', None)
    policy = DyingPolicy(1) if persist is None else t5ckpt.SaveAt(persist)
    having = options.pop('iterator_in', range(jax.process_count()))
    has_iterator = options.pop('iterator', True) and jax.process_index() in having
    iterator = _held['positions'] if has_iterator else None
    _held['ck'] = scenarios.checkpointer(
        storage,
        scenarios.state(0, shape, leaves),
        dataset_iterator=iterator,
        local=t5ckpt.LocalTier(local, keep=options.pop('keep_local', 2), persist=policy),
        progress=_dies,
        **options,
    )


def tiers_in_some(directory, action, local):
    """Saves, restores or starts with a local directory in some processes alone."""
    tree = scenarios.state(1)
    tier = None if local is None else t5ckpt.LocalTier(local)
    ck = scenarios.checkpointer(directory, tree, local=tier, process_timeout=300.0)
    if action == 'save':
        ck.save(tree, step=1)
    elif action == 'restore':
        ck.restore()
    else:
        t5ckpt.restore_or_init(ck, lambda: tree)


def tiers_save(step, dies=None):
    """Saves the values of a step; with ``dies``, (process, where), that process dies in it."""
    _held['dies_at'] = dies[1] if dies is not None and dies[0] == jax.process_index() else None
    _held['positions'].at = step
    tree = scenarios.state(step, _held['shape'], _held['leaves'])
    done = _held['ck'].save(tree, step=step, metrics={'loss': float(step)})
    return None if done is None else done.step


def tiers_overwrite(step, seed):
    """Saves the values of another step in its place."""
    _held['positions'].at = step
    tree = scenarios.state(seed, leaves=_held['leaves'])
    return _held['ck'].save(tree, step=step, overwrite=True).step


def tiers_save_recorded(step, disk):
    """Saves with a record of the changes of the local directory, which goes to a file beside it; see support/faultshim.py."""
    shim = faultshim.Shim()
    shim.arm(disk, record=True)
    saved = tiers_save(step)
    shim.mark()
    shim.disarm()
    pathlib.Path(disk).with_suffix('.operations').write_bytes(pickle.dumps(shim.operations()))
    return saved


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def tiers_restore(step=None, seed=None, iterator=True):
    """Restores and checks the bits; what the log says of the sources, and the position of the iterator."""
    handler = _Lines()
    logging.getLogger('t5ckpt').addHandler(handler)
    try:
        restored = _held['ck'].restore(step, restore_iterator=iterator)
    finally:
        logging.getLogger('t5ckpt').removeHandler(handler)
    (line,) = [line for line in handler.lines if 'bytes of arrays from' in line]
    at = int(line.split('restored step ')[1].split(' ')[0])
    for name in _held['leaves']:
        size, dtype, _ = scenarios.LEAVES[name]
        group, leaf = name.split('/')
        values = scenarios.full(name, size, dtype, at if seed is None else seed)
        for shard in restored[group][leaf].addressable_shards:
            assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes(), name
    why = [
        line
        for line in handler.lines
        if any(words in line for words in ('not restored', 'counts as absent', 'is not uploaded'))
    ]
    numbers = re.search(r'; (\d+) bytes of arrays from .*, (\d+) from other processes, (\d+) from ', line).groups()
    position = _held['positions'].at
    return {'step': at, 'position': position, 'bytes': [*map(int, numbers)], 'line': line, 'why': why}


def _resident(resets=False):
    """The largest resident size in bytes; resets it first, when free memory is the system's."""
    if resets:
        ctypes.CDLL(None).malloc_trim(0)
        pathlib.Path('/proc/self/clear_refs').write_text('5')
    [line] = [line for line in pathlib.Path('/proc/self/status').read_text().splitlines() if line.startswith('VmHWM')]
    return int(line.split()[1]) * 1024


def tiers_peak(directory, action, gigabytes, local):
    """Saves or restores 128 MB in each process; the peak of memory above these, in bytes."""
    tier = t5ckpt.LocalTier(local, persist=t5ckpt.SaveAt([]))
    # Each shard is on the disks of two processes.
    values, sharding = np.random.default_rng(0).random((1024, 1024), np.float32), ('data',)
    template = jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=scenarios.sharded(values, sharding).sharding)
    template = {'params': {str(leaf): template for leaf in range(64)}, 'step': np.int32(1)}
    # Every job compiles programs.
    jax.jit(lambda value: value + 1)(1.0).block_until_ready()
    if action == 'save':
        arrays = {name: scenarios.sharded(values + np.float32(name), sharding) for name in template['params']}
        state = jax.block_until_ready({'params': arrays, 'step': np.int32(1)})
        with scenarios.checkpointer(directory, state, local=tier) as ck:
            before = _resident(resets=True)
            ck.save(state, concurrent_gb=gigabytes)
            return _resident() - before
    with scenarios.checkpointer(directory, template, local=tier, restore_concurrent_gb=gigabytes) as ck:
        before = _resident(resets=True)
        restored = jax.block_until_ready(ck.restore())
        peak = _resident() - before
    for leaf, array in restored['params'].items():
        # The two devices of a process share their memory.
        peak -= array.addressable_shards[0].data.nbytes
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), values[shard.index] + np.float32(leaf))
    return peak


def tiers_restore_lazily():
    """Restores lazily."""
    _held['ck'].restore(lazy_parameters=True)


def tiers_restore_on_own_devices(directory, local):
    """Restores with a leaf on a device of each process, and reads all of it."""
    tree = scenarios.template()
    tree = {'target': {'everywhere': tree['target']['everywhere']}, 'state': tree['state']}
    own = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    tree['target']['everywhere'] = jax.ShapeDtypeStruct((2048, 1024), jnp.float32, sharding=own)
    with scenarios.checkpointer(directory, tree, local=t5ckpt.LocalTier(local), process_timeout=20.0) as ck:
        found = ck.restore()['target']['everywhere']
    assert np.asarray(found).tobytes() == scenarios.full('target/everywhere', (2048, 1024), 'float32', 1).tobytes()


def tiers_restore_and_die(process):
    """Restores; a process dies when half of its arrays are there."""
    _held['dies_at'] = 'write' if jax.process_index() == process else None
    return tiers_restore()['step']


def tiers_host_arrays(directory, action, local):
    """Saves or restores a large and a small NumPy array, which have the index of the process; the values that are restored."""
    tree = {name: np.full(size, jax.process_index()) for name, size in (('large', 100_000), ('small', 3))}
    tree |= {'step': np.int32(1), 'w': scenarios.sharded(np.arange(64.0).reshape(8, 8), ('data', 'model'))}
    with scenarios.checkpointer(directory, tree, local=t5ckpt.LocalTier(local)) as ck:
        if action == 'save':
            ck.save(tree)
            return None
        restored = ck.restore()
    values = [np.unique(restored[name]).tolist() for name in ('large', 'small')]
    return [value for (value,) in values]


def tiers_restore_or_init(expected):
    """As a trainer starts; the step."""
    ck = _held['ck']
    restored = t5ckpt.restore_or_init(ck, lambda: scenarios.state(leaves=_held['leaves']))
    name = _held['leaves'][0]
    size, dtype, _ = scenarios.LEAVES[name]
    if expected is not None:
        group, leaf = name.split('/')
        values = scenarios.full(name, size, dtype, expected)
        for shard in restored[group][leaf].addressable_shards:
            assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes()
    return ck.restored_step


def tiers_fail_reads(directory):
    """Real reads of files below a directory fail with EIO until `tiers_disarm`."""
    shim = faultshim.Shim()
    shim.arm(directory, 0, faultshim.FAIL, errno.EIO, faultshim.GETS, faultshim.GETS)


def tiers_disarm():
    """Ends what `tiers_fail_reads` began; whether a read has failed."""
    shim = faultshim.Shim()
    shim.disarm()
    return shim.fired


def tiers_steps():
    """What this process lists."""
    return _held['ck'].all_steps()


def tiers_wait(step=None):
    """Waits for the uploads; the text of the error."""
    try:
        _held['ck'].wait_until_persisted(step)
    except NotPersistedError as error:
        return str(error)
    return None


def tiers_any(name, *arguments):
    """Does another order; the kind and the text of the error, if there is one, the seconds, and the answer."""
    began, error, answer = time.monotonic(), None, None
    try:
        answer = globals()[name](*arguments)
    except Exception as caught:  # noqa: BLE001 - the test looks at it
        error = f'{type(caught).__name__}: {caught}'
    return [error, time.monotonic() - began, answer]


def tiers_wait_alone(process, step=None):
    """Waits for the uploads in one process; the text of the error."""
    return tiers_wait(step) if jax.process_index() == process else None


def tiers_delete(step):
    """Deletes a step; the steps that are left, or the text of the error."""
    try:
        _held['ck'].delete(step)
    except T5CkptError as error:
        return str(error)
    return _held['ck'].all_steps()


def tiers_leave(process):
    """An error ends the training in one process; whether it was this one."""
    if jax.process_index() != process:
        return False
    with contextlib.suppress(ZeroDivisionError), _held['ck']:
        1 / 0  # noqa: B018
    return True


def tiers_restore_after_close():
    """Restores with a checkpointer that is closed, whose local directory another one may have; the step."""
    _held['ck'].close()
    return tiers_restore()['step']


def tiers_close():
    """Closes the checkpointer."""
    _held.pop('ck').close()


# --- a training loop -----------------------------------------------------------------------------------------------------


def _train_state(step):
    """What the training has after a step: arrays that two processes hold at least, and Python values."""
    values = {name: np.arange(4096.0, dtype=np.float32).reshape(64, 64) + step for name in ('w', 'r')}
    axes = {'w': ('model', None), 'r': ()}
    arrays = {name: scenarios.sharded(values[name], axes[name]) for name in values}
    return {'arrays': arrays, 'epoch': step // 2, 'phase': f'phase {step}', 'nothing': None}


def _check_train_state(state, step):
    expected = _train_state(step)
    for name, array in state['arrays'].items():
        for found, value in zip(array.addressable_shards, expected['arrays'][name].addressable_shards, strict=True):
            assert np.array_equal(np.asarray(found.data), np.asarray(value.data)), name
    for name in ('epoch', 'phase', 'nothing'):
        assert (state[name], type(state[name])) == (expected[name], type(expected[name])), name


def tiers_train(directory, last, dies_at, local):
    """Trains up to a step, with donated steps that have a collective, and a save in the background after each.

    ``dies_at`` is (process, step) or None. Returns the step that was restored, and its metrics and metadata.
    """
    step_fn = jax.jit(
        lambda arrays: {name: array + 1 + 0 * jnp.mean(arrays['w']) for name, array in arrays.items()},
        donate_argnums=0,
        out_shardings={name: array.sharding for name, array in _train_state(0)['arrays'].items()},
    )
    positions = Positions()
    with scenarios.checkpointer(
        directory,
        _train_state(0),
        dataset_iterator=positions,
        local=t5ckpt.LocalTier(local, persist=t5ckpt.SaveEvery(4)),
        save_policy=t5ckpt.SaveEvery(1),
        process_timeout=20.0,
        inline_bytes=64,
    ) as ck:
        state = t5ckpt.restore_or_init(ck, lambda: _train_state(0))
        start, found = ck.restored_step, []
        if start is not None:
            _check_train_state(state, start)
            assert positions.at == start
            if start in ck.all_steps():
                found = [dict(ck.metrics(start)), dict(t5ckpt.open_checkpoint(local, start).custom_metadata)]
        for step in range((start or 0) + 1, last + 1):
            arrays = step_fn(state['arrays'])
            state = _train_state(step) | {'arrays': arrays}
            assert next(positions) == step
            options = {'metrics': {'loss': 1 / step}, 'custom_metadata': {'git': f'commit {step}'}}
            if step % 2:
                ck.maybe_save(step, state, **options)
            else:
                ck.save_async(state, step=step, **options)
            if dies_at == [jax.process_index(), step]:
                scenarios.die()
        ck.wait_until_finished()
        _check_train_state(ck.restore(), last)
    return [start, *found]


# --- the ends of uploads -------------------------------------------------------------------------------------------------


def tiers_wait_after_close():
    """Closes the checkpointer, and waits; the kind of the error."""
    ck = _held.pop('ck')
    ck.close()
    try:
        ck.wait_until_persisted()
    except T5CkptError as error:
        return type(error).__name__
    return None

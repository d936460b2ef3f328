"""What the processes of a job are told to do. Every function runs in all of them at once; arguments are JSON's types."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import signal
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.options import with_options

import t5ckpt
from t5ckpt import PreemptionNotice, SaveAt, SaveEvery, SaveEverySeconds, SaveOnImprovement, SaveOnPreemption
from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.distributed.processes import jax_processes
from t5ckpt.distributed.rounds import Phase
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage

logging.getLogger('t5ckpt').setLevel(logging.INFO)

# By leaf: shape, dtype, and how it is sharded over the mesh ('data', 'model').
LEAVES = {
    'target/both': ((64, 4096), 'float32', ('data', 'model')),
    'target/rows': ((64, 4096), 'float32', ('model', None)),
    'target/bfloat': ((32, 2048), 'bfloat16', ('data', None)),
    'target/everywhere': ((2048, 1024), 'float32', ()),
    'target/odd': ((7, 300_007), 'float32', ()),
    'target/small': ((64,), 'float32', ()),
    'state/step': ((), 'int32', ()),
}


def mesh(shape=(2, 4)):
    return Mesh(np.array(jax.devices()).reshape(shape), ('data', 'model'))


@functools.lru_cache(maxsize=32)
def full(name: str, shape, dtype, seed: int = 0) -> np.ndarray:
    """The values of a leaf, the same wherever they are asked for."""
    rng = np.random.default_rng([seed, *name.encode()])
    values = np.asarray(rng.standard_normal(shape) * 100).astype(jnp.dtype(dtype))
    values.setflags(write=False)
    return values


def sharded(values: np.ndarray, axes, shape=(2, 4)) -> jax.Array:
    sharding = NamedSharding(mesh(shape), PartitionSpec(*axes))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def state(seed: int = 0, shape=(2, 4), leaves=None) -> dict:
    """All of LEAVES as global arrays."""
    tree: dict = {}
    for name in LEAVES if leaves is None else leaves:
        size, dtype, axes = LEAVES[name]
        group, leaf = name.split('/')
        tree.setdefault(group, {})[leaf] = sharded(full(name, size, dtype, seed), axes, shape)
    return tree


def expected(seed: int = 0) -> dict[str, np.ndarray]:
    return {name: full(name, shape, dtype, seed) for name, (shape, dtype, _) in LEAVES.items()}


def template(shape=(2, 4), swap: bool = False) -> dict:
    """What to restore to; with ``swap`` the axes of every leaf are the other way round."""
    tree: dict = {}
    for name, (size, dtype, axes) in LEAVES.items():
        group, leaf = name.split('/')
        sharding = NamedSharding(mesh(shape), PartitionSpec(*(reversed(axes) if swap else axes)))
        tree.setdefault(group, {})[leaf] = jax.ShapeDtypeStruct(size, jnp.dtype(dtype), sharding=sharding)
    return tree


def check(restored: dict, seed: int = 0) -> None:
    for name, values in expected(seed).items():
        group, leaf = name.split('/')
        for shard in restored[group][leaf].addressable_shards:
            assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes(), name


def bytes_read() -> int:
    return int(pathlib.Path('/proc/self/io').read_text().splitlines()[0].split()[1])


def checkpointer(directory, tree=None, **options):
    options = {'process_timeout': 60.0} | options
    return t5ckpt.Checkpointer(state() if tree is None else tree, checkpoints_dir=directory, **with_options(**options))


# --- saving and restoring ---------------------------------------------------------------------------------------------


def save(directory, step=1, seed=0, options=None):
    """Saves; returns the barriers it took and what was answered."""
    tree = state(seed)
    with checkpointer(directory, tree, **(options or {})) as ck:
        before = jax_processes().barriers
        done = ck.save(tree, step=step)
        return [jax_processes().barriers - before, None if done is None else [done.step, done.nbytes]]


def restore(directory, shape=(2, 4), swap=False, options=None):
    """Restores, checks the bits; returns the bytes this process read and the barriers it took."""
    with checkpointer(directory, template(tuple(shape), swap), **(options or {})) as ck:
        barriers, before = jax_processes().barriers, bytes_read()
        restored = ck.restore()
        read = bytes_read() - before
        check(restored)
        return [read, jax_processes().barriers - barriers]


def save_with(directory, options):
    save(directory, step=2, options=options)


def restore_with(directory, options):
    restore(directory, options=options)


def many_saves(directory, keep):
    with checkpointer(directory, keep=keep) as ck:
        for step in range(4):
            ck.save(state(step), step=step)
        multihost_utils.sync_global_devices('after the saves')
        return ck.all_steps()


def replace_and_delete(directory):
    """Replaces a step, deletes another, and has each process told when a commit is durable."""
    told = []
    with checkpointer(directory) as ck:
        for step in (1, 2):
            ck.save(state(step), step=step)
        skipped = ck.save(state(9), step=1)
        ck.save(state(3), step=1, overwrite=True, custom_metadata={'by': jax.process_index()})
        check(ck.restore(step=1), 3)
        ck.delete(2)
        pending = ck.save_async(state(4), step=4)
        pending.add_done_callback(lambda save: told.append([save.step, save.failed(), ck.latest_step()]))
        pending.result()
        while not told:
            time.sleep(0.01)
        try:
            ck.delete(2)
        except t5ckpt.errors.T5CkptError as error:
            refused = type(error).__name__
        multihost_utils.sync_global_devices('deleted')
        metadata = t5ckpt.open_checkpoint(directory, 1).custom_metadata
        return [skipped is None, told, refused, ck.all_steps(), metadata]


def train(directory, steps):
    """Donating steps with collectives, a save in the background on each; every checkpoint must hold its own step."""
    everywhere = NamedSharding(mesh(), PartitionSpec())
    by_rows = NamedSharding(mesh(), PartitionSpec(('data', 'model')))

    @jax.jit
    def mean(tree):
        return jax.lax.with_sharding_constraint(jnp.mean(tree['w'], axis=0), everywhere)

    step_fn = jax.jit(
        lambda tree: {'w': tree['w'] + 1 + 0 * jnp.mean(tree['w']), 'r': tree['r'] + 1},
        donate_argnums=0,
        out_shardings={'w': by_rows, 'r': everywhere},
    )
    values = np.zeros((8, 50_000), np.float32)
    tree = {'w': jax.device_put(values, by_rows), 'r': jax.device_put(values[0], everywhere)}
    pending = []
    with t5ckpt.Checkpointer(
        tree, checkpoints_dir=directory, options=t5ckpt.CheckpointerOptions(process_timeout=60)
    ) as ck:
        for step in range(steps):
            pending.append(ck.save_async(tree, step=step))
            tree = step_fn(tree)
            mean(tree).block_until_ready()
    return [save.result().step for save in pending]


def save_numpy(directory):
    """Host leaves differ from process to process; process 0's are taken."""
    index = jax.process_index()
    tree = {
        'big': np.full((300, 1000), index, np.float32),
        'number': index,
        'scalar': np.float32(index + 0.5),
        'array': sharded(full('x', (64, 64), 'float32'), ('data', 'model')),
    }
    with checkpointer(directory, tree) as ck:
        ck.save(tree, step=1)


def save_frozen(directory, step, seed):
    """Two leaves are the same arrays in every save, one of them in memory of NumPy; the other one is new."""
    if not hasattr(save_frozen, 'kept'):
        save_frozen.kept = {}
    if directory not in save_frozen.kept:
        # The output of a computation is XLA's own memory, which the callback of `sharded` shares with NumPy.
        frozen = jax.jit(jnp.negative)(sharded(full('frozen', (64, 32_768), 'float32'), ('model', None)))
        replicated = sharded(full('replicated', (1024, 1024), 'float32'), ())
        tree = {'frozen': frozen, 'replicated': replicated, 'new': None}
        save_frozen.kept[directory] = (tree, checkpointer(directory, tree))
    tree, ck = save_frozen.kept[directory]
    tree = tree | {'new': sharded(full('new', (64, 4096), 'float32', seed), ('data', 'model'))}
    ck.save(tree, step=step)


def save_transformed(directory):
    """The facts and save transforms, in a job of several processes."""
    tree = {'target': {'w': sharded(full('w', (64, 4096), 'float32'), ('model', None))}, 'empty': {}, 'count': 3}
    with checkpointer(directory, tree) as ck:
        ck.save(tree, step=1)
        back = ck.restore()
    assert back['empty'] == {}
    assert back['count'] == 3
    assert type(back['count']) is int


def some_devices(first, count):
    return NamedSharding(Mesh(np.array(jax.devices()[first : first + count]), ('x',)), PartitionSpec())


def save_odd(directory):
    """Arrays that some processes hold nothing of, empty arrays, dtypes that are stored as others; and back."""
    away = some_devices(4, 4)
    rows = NamedSharding(away.mesh, PartitionSpec('x'))

    def put(values, sharding):
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index], dtype=values.dtype)

    values = {
        'sub_sharded': (full('a', (512, 1024), 'float32'), rows),
        'sub_replicated': (full('b', (999, 1021), 'float32'), away),
        'sub_small': (full('c', (5,), 'float32'), away),
        'sub_scalar': (full('d', (), 'float32'), away),
        # Stages of a pipeline, each on devices of one process.
        'stage_0': (full('f', (512, 64), 'float32'), NamedSharding(some_devices(0, 2).mesh, PartitionSpec('x'))),
        'stage_1': (full('g', (512, 64), 'float32'), some_devices(2, 2)),
        'stage_0_small': (full('h', (4,), 'float32'), NamedSharding(some_devices(0, 2).mesh, PartitionSpec('x'))),
        'stage_3_small': (full('i', (4,), 'float32'), NamedSharding(some_devices(6, 2).mesh, PartitionSpec('x'))),
        'stage_3_scalar': (full('j', (), 'float32'), jax.sharding.SingleDeviceSharding(jax.devices()[7])),
        'empty': (np.zeros((0, 8), np.float32), NamedSharding(mesh(), PartitionSpec(None, 'model'))),
        'uint4': (np.arange(4096).reshape(64, 64).astype(jnp.uint4), NamedSharding(mesh(), PartitionSpec('model'))),
        'float8': (full('e', (64, 64), 'float8_e4m3'), NamedSharding(mesh(), PartitionSpec('model'))),
    }
    tree = {name: put(*each) for name, each in values.items()}
    for step, compression in enumerate((None, 'auto')):
        options = {'compression': compression, 'inline_bytes': 64}
        with checkpointer(directory, tree, **options) as ck:
            ck.save(tree, step=step)
            back = ck.restore(step=step)
        for name, (expect, sharding) in values.items():
            assert back[name].shape == expect.shape, name
            assert back[name].dtype == expect.dtype, name
            assert back[name].sharding.is_equivalent_to(sharding, expect.ndim), name
            for shard in back[name].addressable_shards:
                assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(expect[shard.index]).tobytes(), name


def save_in_any_order(directory):
    """The keys of the state come in another order in each process."""
    tree = state()
    names = sorted(tree['target'], key=lambda name: hash((name, jax.process_index())))

    def shuffle(state_dict, infos):
        return (
            {'target': {name: state_dict['target'][name] for name in names}},
            {'target': {name: infos['target'][name] for name in names}},
        )

    with checkpointer(directory, tree) as ck:
        ck.save(tree, [shuffle], step=1)


def restore_between(directory):
    """A restore while a save is under way, whose process 0 is slow and whose process 1 fails."""
    checkpointer(directory).save(state(), step=1)
    storage = open_storage(directory)
    hooks = {0: lambda: time.sleep(2), 1: fail}
    if jax.process_index() in hooks:
        storage = HookedStorage(storage, 'write', 'integrity', hooks[jax.process_index()])
    ck = checkpointer(storage)
    pending = ck.save_async(state(1), step=2)
    check(ck.restore(step=1))
    try:
        pending.result()
    except t5ckpt.errors.T5CkptError as error:
        return [type(error).__name__, ck.all_steps()]
    return ['saved', ck.all_steps()]


def share_after_failure(directory):
    """One process cannot read; the next restore, with collectives again, is of its own step everywhere."""
    with checkpointer(directory, share_replicated=True) as ck:
        for step in (1, 2):
            ck.save(state(step), step=step)
    multihost_utils.sync_global_devices('saved')
    calls = []

    def progress(*_):
        calls.append(1)
        if len(calls) == 1 and jax.process_index() == 1:
            raise t5ckpt.errors.StorageError(5, 'injected: input/output error')

    with checkpointer(directory, template(), share_replicated=True, progress=progress) as ck:
        try:
            ck.restore(step=2)
        except t5ckpt.errors.T5CkptError as error:
            kind = type(error).__name__
        check(ck.restore(step=1), 1)
    return kind


def restore_local(directory):
    """Restores one leaf to an array of each process's own; returns what the warning begins with, and whether it is local."""
    tree = template()
    tree['target']['both'] = jax.ShapeDtypeStruct(tree['target']['both'].shape, tree['target']['both'].dtype)
    with checkpointer(directory, tree) as ck, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        restored = ck.restore()
    check(restored)
    (warning,) = caught
    return [str(warning.message).partition(',')[0], restored['target']['both'].is_fully_addressable]


def restore_another_step(directory):
    with checkpointer(directory, template()) as ck:
        ck.restore(step=1 + jax.process_index() // 3)


def restore_replaced(directory, other):
    """Another program puts another checkpoint in the place of the step, after all processes have opened it."""
    step, gone = pathlib.Path(directory) / 'checkpoint_1', pathlib.Path(directory) / 'gone'

    def replace(state_dict, template):
        del template
        multihost_utils.sync_global_devices('opened')
        if jax.process_index() == 3:
            step.rename(gone)
            (pathlib.Path(other) / 'checkpoint_1').rename(step)
        multihost_utils.sync_global_devices('replaced')
        return state_dict

    with checkpointer(directory, template()) as ck:
        ck.restore(state_transformation_fns=[replace])


def restore_lazily(path):
    """The values of a leaf of a safetensors file, read when they are asked for."""
    with checkpointer('', {'both': np.zeros((64, 4096), 'float32')}) as ck:
        return float(ck.restore(path=path, lazy_parameters=True, strict='contains')['both'].get().sum())


# --- what goes wrong ---------------------------------------------------------------------------------------------------


def save_with_fault(directory, process, operation, key):
    """One process's storage fails in one operation; then all save again, without."""
    storage = open_storage(directory)
    if jax.process_index() == process:
        storage = HookedStorage(storage, operation, key, fail)
    with checkpointer(storage) as ck:
        try:
            ck.save(state(1), step=1)
        finally:
            multihost_utils.sync_global_devices('failed')
            assert not (pathlib.Path(directory) / 'checkpoint_1').exists()


class HookedStorage(FaultyStorage):
    """Does something when an operation comes to a key that contains a text."""

    def __init__(self, inner, operation, key, hook):
        super().__init__(inner)
        self._at = operation, key
        self._hook = hook

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if name == self._at[0] and self._at[1] in key:
            self._hook()


def fail():
    raise t5ckpt.errors.NoSpaceError(28, 'injected: no space left on device')


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def coordination_errors(directory):
    """What calls of the real coordination service raise: a key that is set twice, a message and a barrier without a peer."""
    channel = Coordinator(open_storage(directory), None, 1.0).new_channel()
    coordination = channel.round('the test')
    name = f'own/{jax.process_index()}'
    coordination.share(name, b'1')
    calls = [
        lambda: coordination.share(name, b'2'),
        lambda: coordination.receive('nothing', 1),
        lambda: channel.broadcast(name, None, 'the test'),
        # Each process waits in a phase of its own.
        lambda: coordination.reduce_on_leader(list(Phase)[jax.process_index()], 5, lambda votes: votes),
    ]
    raised = []
    for call in calls:
        try:
            call()
        except t5ckpt.errors.T5CkptError as error:
            raised.append([type(error).__name__, str(error), getattr(error, 'code', None)])
    votes = coordination.reduce_on_leader(Phase.AGREE, jax.process_index(), lambda votes: votes)
    return raised, votes


def save_and_die(directory, step, process, operation, key, options):
    """One process kills itself when its storage comes to an operation."""
    storage = open_storage(directory)
    if jax.process_index() == process:
        storage = HookedStorage(storage, operation, key, die)
    with checkpointer(storage, **options) as ck:
        done = ck.save(state(), step=step)
        time.sleep(1)
        return done.step


def save_and_stop(directory, operation, key):
    """Process 0 stops itself when its storage comes to an operation, and with it the coordination service."""
    storage = open_storage(directory)
    if jax.process_index() == 0:
        storage = HookedStorage(storage, operation, key, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    with checkpointer(storage, process_timeout=3.0) as ck:
        ck.save(state(), step=2)


def restore_and_die(directory, process):
    """One process kills itself when the first bytes have come."""
    progress = (lambda *_: die()) if jax.process_index() == process else None
    with checkpointer(directory, template(), process_timeout=3.0, progress=progress) as ck:
        ck.restore()


def save_differently(directory, what):
    """All processes but the last agree."""
    tree, step = state(), 1
    if jax.process_index() == jax.process_count() - 1:
        match what:
            case 'step':
                step = 2
            case 'directory':
                directory = f'{directory}-other'
            case 'shape':
                tree['target']['small'] = sharded(full('x', (128,), 'float32'), ())
            case 'tree':
                tree['target']['more'] = sharded(full('x', (64,), 'float32'), ())
            case 'sharding':
                tree['target']['both'] = sharded(full('x', (64, 4096), 'float32'), ('model', 'data'))
            case 'dtype':
                tree['target']['small'] = sharded(full('x', (64,), 'bfloat16'), ())
            case 'devices':
                devices = np.array(jax.devices())[::-1].reshape(2, 4)
                sharding = NamedSharding(Mesh(devices, ('data', 'model')), PartitionSpec('data', 'model'))
                values = full('target/both', (64, 4096), 'float32')
                tree['target']['both'] = jax.make_array_from_callback(
                    values.shape, sharding, lambda index: values[index]
                )
            case 'leaf':
                tree['target']['small'] = object()
    with checkpointer(directory, tree) as ck:
        ck.save(tree, step=step)


def save_local(directory):
    tree = {'here': [jnp.ones((4, 4))] * 30, 'everywhere': state()['target']['both']}
    with checkpointer(directory, tree) as ck:
        ck.save(tree, step=1)


def save_slowly(directory, timeout):
    """As ``save``, for a job one of whose processes is stopped meanwhile."""
    with checkpointer(directory, process_timeout=timeout) as ck:
        try:
            ck.save(state(), step=1)
        except t5ckpt.errors.T5CkptError as error:
            first = [type(error).__name__, str(error)]
        else:
            first = None
        multihost_utils.sync_global_devices('all are back')
        return [first, ck.save(state(), step=2).step]


# --- data iterators ----------------------------------------------------------------------------------------------------


class Counter:
    """The smallest iterator with a position."""

    def __init__(self):
        self.position = 0

    def save(self, filename):
        pathlib.Path(filename).write_text(str(self.position))

    def load(self, filename):
        self.position = int(pathlib.Path(filename).read_text())


class DataPartitioner:
    """Says which data shard a process reads; shardings come from the arrays."""

    params_on_devices = True

    def __init__(self, shards):
        per_shard = jax.process_count() // shards
        self.mesh = mesh()
        self.shard_id = jax.process_index() // per_shard
        self.num_shards = shards
        self.is_first_host_in_replica_set = jax.process_index() % per_shard == 0

    def get_data_layout(self):
        return self

    def get_mesh_axes(self, train_state):
        return jax.tree.map(lambda leaf: leaf.sharding.spec, train_state)


class States(Counter):
    """The same, with a state."""

    save = load = None

    def get_state(self):
        return {'position': self.position}

    def set_state(self, state):
        self.position = state['position']


def save_iterators(directory, shards, kind='Counter', apart=1):
    """Process ``i`` is at the position 100 + i * apart."""
    tree, data = state(), globals()[kind]()
    data.position = 100 + jax.process_index() * apart
    partitioner = None if shards is None else DataPartitioner(shards)
    with checkpointer(directory, tree, partitioner=partitioner, dataset_iterator=data) as ck:
        ck.save(tree, step=1)


def restore_iterators(directory, shards, kind='Counter', mapped=None):
    data = globals()[kind]()
    partitioner = None if shards is None else DataPartitioner(shards)
    options = {'partitioner': partitioner, 'dataset_iterator': data}
    if mapped is not None:
        options['map_positions'] = {'sum': _sum_of_states, 'last': _last_file, 'none': lambda _: None}[mapped]
    with checkpointer(directory, template(), **options) as ck:
        check(ck.restore())
    return data.position


def _sum_of_states(positions):
    assert list(positions) == list(range(len(positions)))
    return {'position': sum(each['position'] for each in positions.values()) + jax.process_index()}


def _last_file(positions):
    return positions[max(positions)]


class AxesPartitioner(DataPartitioner):
    """T5X's: axes for parameters, none for Adafactor's factors."""

    def get_mesh_axes(self, train_state):
        return {'state': {'param_states': {'v_row': None, 'v_col': None}}, 'target': {'w': PartitionSpec('model')}}


def save_factors(directory, partitioned):
    """v_row is on all devices, v_col sharded although it has no axes."""
    values = {name: full(name, (32_128,), 'float32') for name in ('v_row', 'v_col')}
    factors = {'v_row': sharded(values['v_row'], ()), 'v_col': sharded(values['v_col'], ('data',))}
    tree = {'state': {'param_states': factors}, 'target': {'w': sharded(full('w', (64, 4096), 'float32'), ('model',))}}
    with checkpointer(directory, tree, partitioner=AxesPartitioner(1) if partitioned else None) as ck:
        ck.save(tree, step=1)


# --- loops ------------------------------------------------------------------------------------------------------------


def loop(directory, seconds_a_step):
    """Trains at each process's own pace until one is preempted; returns the saved steps and the seconds of the calls."""
    tree = state(leaves=['target/rows'])
    policy = SaveEverySeconds(1.5) | SaveAt({3}) | SaveOnImprovement('loss', 'min') | SaveOnPreemption()
    saved, calls = [], []
    with (
        PreemptionNotice() as notice,
        checkpointer(directory, tree, save_policy=policy, preempted=notice) as ck,
    ):
        pathlib.Path(directory, f'ready-{jax.process_index()}').touch()
        for step in range(1, 100_000):
            # Every process has a number of its own; process 0's counts, and is not an improvement at step 8.
            loss = {4: 5.0, 8: 6.0}[step] if step in (4, 8) else None
            began = time.perf_counter()
            metrics = None if loss is None else {'loss': loss - jax.process_index() * 3}
            pending = ck.maybe_save(step, tree, metrics=metrics)
            calls.append(time.perf_counter() - began)
            if pending is not None:
                saved.append(pending.step)
            if ck.should_stop:
                return [saved, step, sorted(calls)[len(calls) // 2]]
            time.sleep(seconds_a_step)
    return None


def preempted_in_a_loop_that_went_back(directory):
    """The steps after which all processes see that one of them is preempted, in a loop that continues from step 0 again."""
    flag: list[int] = []
    with checkpointer(directory, template(), preempted=lambda: bool(flag) and jax.process_index() == 1) as ck:
        for step in range(1500):
            assert not ck.reached_preemption(step)
        multihost_utils.sync_global_devices('back')
        flag.append(1)
        return next((step for step in range(1500) if ck.reached_preemption(step)), None)


def loops_apart(directory):
    """Process 1 calls for other steps than the rest."""
    tree = state(leaves=['target/rows'])
    with checkpointer(directory, tree, save_policy=SaveEvery(1000)) as ck:
        for step in range(1, 6):
            ck.maybe_save(step + (jax.process_index() == 1), tree)


def come_back(directory, initial=None):
    """restore_or_init; which step, and the first value of the weights on this process."""
    tree = state(leaves=['target/rows'])

    def init():
        return state(77, leaves=['target/rows'])

    with checkpointer(directory, tree) as ck:
        back = t5ckpt.restore_or_init(ck, init, initial_checkpoint=initial)
        first = back['target']['rows'].addressable_shards[0]
        expected_seed = next(
            (
                seed
                for seed in (*range(10), 77)
                if np.array_equal(np.asarray(first.data), full('target/rows', (64, 4096), 'float32', seed)[first.index])
            ),
            None,
        )
        return [ck.restored_step, expected_seed]


def come_back_wider(directory, fails):
    """restore_or_init with a leaf that the run lacks; ``init_fn`` fails in one process."""
    leaves = ['target/rows', 'target/small']

    def init():
        if jax.process_index() == fails:
            raise ValueError('no state here')
        return state(77, leaves=leaves)

    with checkpointer(directory, state(leaves=leaves)) as ck:
        back = t5ckpt.restore_or_init(ck, init, missing='init')
        for name, values in (('target/rows', expected(5)), ('target/small', expected(77))):
            for shard in back['target'][name.partition('/')[2]].addressable_shards:
                assert np.asarray(shard.data).tobytes() == values[name][shard.index].tobytes(), name
        return ck.restored_step


def save_small(directory, steps):
    with checkpointer(directory, state(leaves=['target/rows'])) as ck:
        for step in steps:
            ck.save(state(step, leaves=['target/rows']), step=step)


def save_weights(directory):
    """The weights alone, cast, in a run of their own."""
    weights = state(leaves=['target/rows', 'target/everywhere'])
    with checkpointer(directory, weights, save_dtype='bfloat16') as ck:
        done = ck.save(weights, step=7)
    return None if done is None else done.step


def train_from_seed(directory):
    """Step 0 was saved by one process; the whole job starts from it, and goes on."""
    with checkpointer(directory, template(), save_policy=SaveEvery(1)) as ck:
        started = t5ckpt.restore_or_init(ck, state)
        check(started)
        first = ck.restored_step
        ck.maybe_save(0, started)
        ck.maybe_save(1, started)
        ck.wait_until_finished()
        return [first, ck.all_steps()]


def start_from_two(directory, one, two):
    """A new run from two checkpoints; each process reads its own parts of both."""

    def merged():
        with checkpointer('', template(swap=True)) as ck:
            first = ck.restore(path=two)
        with checkpointer('', first) as ck:
            return ck.restore(path=one, take='target/(both|rows|small)')

    with checkpointer(directory, template(swap=True)) as ck:
        started = t5ckpt.restore_or_init(ck, merged)
    firsts = {
        name: values for name, values in expected(0).items() if name in ('target/both', 'target/rows', 'target/small')
    }
    for name, values in (expected(1) | firsts).items():
        group, leaf = name.split('/')
        for shard in started[group][leaf].addressable_shards:
            assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes(), name
    return ck.restored_step


def restore_safetensors(path):
    """Each process restores its parts of a safetensors file; returns the bytes it read."""
    model = {'both': template()['target']['both'], 'rows': template(swap=True)['target']['rows']}
    with checkpointer('', model) as ck:
        before = bytes_read()
        restored = ck.restore(path=os.fsencode(path))
        read = bytes_read() - before
    for name, array in restored.items():
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == expected()[f'target/{name}'][shard.index].tobytes(), name
    return read

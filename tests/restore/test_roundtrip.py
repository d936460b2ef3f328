"""Arbitrary trees, shapes, dtypes and shardings come back to the bit, onto any other sharding."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from support import forked, independent_reader, partitioner, states, t5x_rules
from support.bits import assert_same, random_bits
from support.golden import flatten, nest
from support.options import with_options
from support.states import JAX_DTYPES, WIDE_DTYPES

import t5ckpt
from t5ckpt import errors

# ---- strategies ----

_MESHES = [((8,), 'x'), ((4, 2), 'xy'), ((2, 2, 2), 'xyz'), ((2, 4), 'xy'), ((3,), 'x'), ((1,), 'x'), ((2, 3), 'xy')]
_SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 0]


@st.composite
def shardings(draw, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    """A sharding over up to 8 devices that divides the shape; several mesh axes may go to one dimension."""
    if draw(st.integers(0, 9)) == 0:
        return SingleDeviceSharding(jax.devices()[draw(st.integers(0, 7))])
    sizes, names = draw(st.sampled_from(_MESHES))
    mesh = partitioner.mesh(sizes, tuple(names))
    left = list(draw(st.permutations(names)))
    spec: list[Any] = []
    for size in shape:
        taken: list[str] = []
        for name in list(left):
            parts = math.prod(mesh.shape[n] for n in [*taken, name])
            if size % parts == 0 and draw(st.booleans()):
                taken.append(name)
                left.remove(name)
        spec.append(tuple(taken) if len(taken) > 1 else (taken[0] if taken else None))
    return NamedSharding(mesh, PartitionSpec(*spec))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf: what is saved, and where it is restored to."""

    dtype: str
    shape: tuple[int, ...]
    #: None: all zeros, which is what a missing chunk reads as elsewhere.
    seed: int | None
    source: jax.sharding.Sharding | None
    goal: jax.sharding.Sharding | None
    abstract: bool

    @functools.cached_property
    def array(self) -> np.ndarray:
        if self.seed is None:
            return np.zeros(self.shape, states.np_dtype(self.dtype))
        return random_bits(np.random.default_rng(self.seed), self.shape, states.np_dtype(self.dtype))

    def saved(self) -> Any:
        return self.array if self.source is None else jax.device_put(self.array, self.source)

    def template(self) -> Any:
        if self.goal is None:
            return np.zeros(self.array.shape, self.array.dtype)
        if self.abstract:
            return jax.ShapeDtypeStruct(self.array.shape, self.array.dtype, sharding=self.goal)
        return jax.device_put(np.zeros(self.array.shape, self.array.dtype), self.goal)


@st.composite
def leaves(draw) -> Leaf:
    shape = tuple(draw(st.lists(st.sampled_from(_SIZES), max_size=4)))
    dtype = draw(st.sampled_from(JAX_DTYPES + WIDE_DTYPES))
    on_devices = st.just(None) if dtype in WIDE_DTYPES else st.none() | shardings(shape) | shardings(shape)
    return draw(st.builds(Leaf, st.just(dtype), st.just(shape), _SEEDS, on_devices, on_devices, st.booleans()))


_SEEDS = st.none() | st.integers(0, 2**32)
_KEYS = st.text('abcXY01_-. ~/ü', min_size=1, max_size=6) | st.sampled_from(['target', 'params', 'step', 'opt_state'])


def trees(leaf: st.SearchStrategy) -> st.SearchStrategy:
    """Nested dicts, lists, tuples and namedtuples with None and empty containers."""
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.dictionaries(_KEYS, inner | st.none(), max_size=4),
            st.lists(inner | st.none(), max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(states.Pair, inner, inner | st.none()),
        ),
        max_leaves=8,
    )


def is_leaf(node: Any) -> bool:
    return isinstance(node, Leaf)


# ---- any tree ----


def roundtrip(tree: Any, **options: Any) -> None:
    """Saves a tree of `Leaf`s, checks T5X's rules, restores it onto the goals, compares."""
    with tempfile.TemporaryDirectory() as tmp:
        saved = jax.tree.map(Leaf.saved, tree, is_leaf=is_leaf)
        with t5ckpt.Checkpointer(saved, checkpoints_dir=tmp, **with_options(**options)) as ck:
            committed = ck.save(saved, step=1)
        t5x_rules.check(pathlib.Path(committed.path))
        template = jax.tree.map(Leaf.template, tree, is_leaf=is_leaf)
        with t5ckpt.Checkpointer(template, checkpoints_dir=tmp) as ck:
            restored = ck.restore()
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for leaf, got in zip(jax.tree.leaves(tree, is_leaf=is_leaf), jax.tree.leaves(restored), strict=True):
        assert_same(got, leaf.array, str(leaf))
        assert isinstance(got, jax.Array) == (leaf.goal is not None), str(leaf)
        if leaf.goal is not None:
            assert got.sharding.is_equivalent_to(leaf.goal, got.ndim), str(leaf)


@pytest.mark.slow
@settings(max_examples=120)
@given(tree=st.dictionaries(_KEYS, trees(leaves()), min_size=1, max_size=4))
def test_any_tree(tree):
    roundtrip(tree)


_BIG = [(48, 96, 16), (384, 192), (96, 768), (73728,), (24, 16, 24, 8)]
_BIG_DTYPES = ['float32', 'bfloat16', 'uint16', 'int4', 'float8_e4m3', 'complex64', 'bool', 'uint4']


@st.composite
def big_leaves(draw) -> Leaf:
    """Large enough to be arrays on disk, with shards that do not line up."""
    shape = draw(st.sampled_from(_BIG))
    on_devices = st.none() | shardings(shape) | shardings(shape)
    dtype = st.sampled_from(_BIG_DTYPES)
    return draw(st.builds(Leaf, dtype, st.just(shape), _SEEDS, on_devices, on_devices, st.booleans()))


_OPTIONS = st.fixed_dictionaries(
    {
        'compression': st.sampled_from([None, None, 'zstd', 'gzip', 'blosc']),
        'chunk_bytes': st.sampled_from([1 << 13, 1 << 26]),
        'inline_bytes': st.sampled_from([0, 1 << 14, 1 << 30]),
    }
)


@pytest.mark.slow
@settings(max_examples=50)
@given(flat=st.dictionaries(st.sampled_from('abc'), big_leaves(), min_size=1, max_size=3), options=_OPTIONS)
def test_big_leaves_reshard(flat, options):
    roundtrip({'target': flat}, **options)


@st.composite
def basic_indices(draw, shape: tuple[int, ...]) -> tuple[Any, ...]:
    def one(size: int) -> Any:
        bound = st.none() | st.integers(-size - 2, size + 2)
        step = st.none() | st.sampled_from([1, 2, 5, -1, -3])
        return draw(st.integers(-size, size - 1) | st.builds(slice, bound, bound, step))

    head = draw(st.integers(0, len(shape)))
    index = [one(size) for size in shape[:head]]
    if draw(st.booleans()):
        tail = draw(st.integers(0, len(shape) - head))
        index += [Ellipsis, *(one(size) for size in shape[len(shape) - tail :])]
    return tuple(index)


_SLICED = {
    'bfloat16': (48, 96, 16),
    'float32': (73728,),
    'int4': (24, 16, 24, 8),
    'uint4': (384, 192),
    'inline': (6, 5, 4),
}


@pytest.fixture(scope='module')
def sliceable(tmp_path_factory):
    """name -> (lazy array, the array), stored in many chunks and inline."""
    rng = np.random.default_rng(0)
    dtypes = {name: states.np_dtype('float32' if name == 'inline' else name) for name in _SLICED}
    arrays = {name: random_bits(rng, shape, dtypes[name]) for name, shape in _SLICED.items()}
    run_dir = tmp_path_factory.mktemp('sliceable')
    with t5ckpt.Checkpointer(
        arrays, checkpoints_dir=run_dir, options=t5ckpt.CheckpointerOptions(chunk_bytes=1 << 14)
    ) as ck:
        t5x_rules.check(pathlib.Path(ck.save(arrays, step=1).path))
    view = t5ckpt.open_checkpoint(run_dir)
    return {name: (view[name], array) for name, array in arrays.items()}


@pytest.mark.slow
@settings(max_examples=150)
@given(drawn=st.sampled_from(sorted(_SLICED)).flatmap(lambda key: st.tuples(st.just(key), basic_indices(_SLICED[key]))))
def test_views_slice_like_numpy(sliceable, drawn):
    """Basic indexing: integers, slices with steps, an ellipsis; the bits NumPy gives."""
    key, index = drawn
    lazy, array = sliceable[key]
    assert_same(np.asarray(lazy[index]), np.asarray(array[index]), str(index))


@pytest.mark.parametrize('index', [(0, 0, 0, 0, 0), (6,), (0, -6), (slice(None), slice(None), slice(None), 0)])
def test_views_refuse_what_numpy_refuses(sliceable, index):
    lazy, array = sliceable['inline']
    with pytest.raises(IndexError):
        array[index]
    with pytest.raises(IndexError):
        lazy[index]
    lazy, array = sliceable['bfloat16']
    index = tuple(i * 100 if isinstance(i, int) else i for i in index)
    with pytest.raises(IndexError):
        lazy[index]


# ---- the makers of states ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ('make', 'step'),
    [(states.flax_state, None), (states.nnx_state, 3), (states.wild_tree, 0), (states.dtype_tree, 12)],
    ids=['flax', 'nnx', 'wild', 'dtypes'],
)
@pytest.mark.filterwarnings('ignore:.*unsafe_rbg.*')
def test_states_come_back_as_they_were(run_dir, make, step):
    """Same containers, same Python types, same typed keys, same bits."""
    state = make()
    with t5ckpt.Checkpointer(states.blank(state), checkpoints_dir=str(run_dir)) as ck:
        ck.save(state, **({} if step is None else {'step': step}))
        restored = ck.restore()
    states.assert_same_tree(restored, state)


def test_flax_train_state_keeps_its_functions(run_dir):
    state = states.flax_state()
    with t5ckpt.Checkpointer(state, checkpoints_dir=str(run_dir)) as ck:
        ck.save(state)
        restored = ck.restore()
    assert restored.apply_fn is not None
    assert restored.tx is state.tx
    assert type(restored.opt_state) is type(state.opt_state)
    nxt = restored.apply_gradients(grads=jax.tree.map(jnp.ones_like, restored.params))
    states.assert_same_tree(nxt, state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params)))


@pytest.mark.slow
def test_nnx_state_updates_a_module(run_dir):
    from flax import nnx

    module = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    other = nnx.Linear(8, 4, rngs=nnx.Rngs(1))
    with t5ckpt.Checkpointer(nnx.state(other), checkpoints_dir=str(run_dir)) as ck:
        ck.save(nnx.state(module), step=0)
        nnx.update(other, ck.restore())
    assert_same(other.kernel[...], module.kernel[...])


GUARDED = {
    'float': lambda rows: jax.device_put(jnp.ones((128, 64)), rows),
    'small': lambda rows: jax.device_put(jnp.ones(8), rows),
    'one device': lambda _: jnp.ones((128, 64)),
    'weak': lambda _: jnp.asarray(1.0),
    'int4': lambda rows: jax.device_put(jnp.ones((128, 64), jnp.int4), rows),
    'int4 one device': lambda _: jnp.ones((256, 128), jnp.int4),
    'int4 small': lambda _: jnp.ones(3, jnp.int4),
    'keys': lambda rows: jax.device_put(jax.random.split(jax.random.key(0), 8), rows),
    'numpy': lambda _: np.ones((128, 64)),
    'python': lambda _: 1.5,
    'count': lambda _: jnp.int32(3),
    'mutable': lambda _: jax.new_ref(jnp.ones(3)),
}


@pytest.mark.slow
@pytest.mark.parametrize('is_global', [False, True])
def test_a_guard_against_implicit_transfers_does_not_stop_a_save_or_a_restore(run_dir, is_global):
    mesh = jax.make_mesh((8,), ('d',), axis_types=(jax.sharding.AxisType.Auto,))
    state = {name: make(NamedSharding(mesh, PartitionSpec('d'))) for name, make in GUARDED.items()}
    state['numbers'] = {1: 2}
    template = {name: leaf[...] if name == 'mutable' else leaf for name, leaf in state.items()}
    loss, step, before = jnp.float32(1), jnp.int32(1), jax.config.jax_transfer_guard
    with contextlib.ExitStack() as stack:
        if is_global:
            # The threads of a save have it, too.
            stack.callback(jax.config.update, 'jax_transfer_guard', before)
            jax.config.update('jax_transfer_guard', 'disallow')
        else:
            stack.enter_context(jax.transfer_guard('disallow'))
        for codec, mmap in (('auto', False), (None, True)):
            with t5ckpt.Checkpointer(
                template, checkpoints_dir=str(run_dir), options=t5ckpt.CheckpointerOptions(compression=codec, mmap=mmap)
            ) as ck:
                ck.save(state, metrics={'loss': loss}, step=step, overwrite=True)
                ck.save_async(state, step=2, overwrite=True).result()
                for number in (1, 2):
                    restored = ck.restore(step=number)
                more = {**template, 'new': state['float'], 'moved': state['float']}
            given = {'new': np.ones((128, 64), np.float32), 'moved': template['one device']}
            t5ckpt.Checkpointer(more, checkpoints_dir=str(run_dir)).restore(fallback_state=given)
    assert jax.tree.map(lambda leaf: getattr(leaf, 'dtype', None), restored) == jax.tree.map(
        lambda leaf: getattr(leaf, 'dtype', None), template
    )
    with t5ckpt.Checkpointer(template, checkpoints_dir=str(run_dir)) as ck, jax.transfer_guard('disallow_explicit'):
        with pytest.raises(
            errors.T5CkptError, match=r"jax\.transfer_guard\('disallow_explicit'\) forbids a transfer of this"
        ):
            ck.restore()
        with jax.transfer_guard('disallow'):
            ck.restore()


FORBIDDEN_ONCE = """
import sys
import jax
import t5ckpt
state = {'w': jax.numpy.ones((64, 512))}
with t5ckpt.Checkpointer(state, checkpoints_dir=sys.argv[1]) as ck:
    ck.save(state, step=1)
    try:
        with jax.transfer_guard('disallow_explicit'):
            ck.restore()
    except t5ckpt.errors.T5CkptError as error:
        assert 'transfer_guard' in str(error), error
    assert (ck.restore()['w'] == 1).all()
"""


@pytest.mark.multiprocess
def test_a_transfer_that_was_forbidden_once_is_made_later(run_dir):
    """In a process that has restored nothing before: what it learns of devices under the guard says nothing of dtypes."""
    assert forked.run(FORBIDDEN_ONCE, run_dir).stderr == ''


def test_random_keys_go_on_as_they_would(run_dir):
    key = jax.random.key(3, impl='rbg')
    template = {'key': jax.random.key(0, impl='rbg')}
    with t5ckpt.Checkpointer(template, checkpoints_dir=str(run_dir)) as ck:
        ck.save({'key': key}, step=1)
        restored = ck.restore()['key']
    assert jax.random.key_impl(restored) == jax.random.key_impl(key)
    assert_same(jax.random.normal(restored, (4,)), jax.random.normal(key, (4,)))


@pytest.mark.parametrize('kind', ['pinned_host', 'unpinned_host', 'device'])
def test_memory_kinds(run_dir, kind):
    mesh = partitioner.mesh()
    array = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    goal = NamedSharding(mesh, PartitionSpec('data', 'model'), memory_kind=kind)
    for n, source in enumerate((goal, goal.with_memory_kind('device'))):
        state = {'w': jax.device_put(array, source)}
        template = {'w': jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=goal)}
        with t5ckpt.Checkpointer(template, checkpoints_dir=str(run_dir)) as ck:
            ck.save(state, step=n)
            restored = ck.restore()['w']
        assert restored.sharding.memory_kind == kind
        assert_same(restored, array)


def test_many_small_leaves(run_dir):
    rng = np.random.default_rng(0)
    tree = {f'layer_{i}': {'w': rng.standard_normal(16).astype(np.float32)} for i in range(2000)}
    with t5ckpt.Checkpointer(tree, checkpoints_dir=str(run_dir)) as ck:
        step_dir = pathlib.Path(ck.save(tree, step=1).path)
        restored = ck.restore()
    for key, leaf in flatten(tree).items():
        assert_same(flatten(restored[key.split('/')[0]])['w'], leaf, key)
    assert sum(1 for _ in step_dir.iterdir()) < 10


def test_saving_leaves_the_state_as_it_was(run_dir):
    state = states.t5x_state(states.adafactor_arrays(), partitioner.mesh())
    before = {key: (leaf, np.asarray(leaf).copy()) for key, leaf in flatten(state.tree).items()}
    with t5ckpt.Checkpointer(state, checkpoints_dir=str(run_dir), save_dtype=states.np_dtype('bfloat16')) as ck:
        ck.save(state)
    for key, leaf in flatten(state.tree).items():
        assert leaf is before[key][0], key
        assert_same(leaf, before[key][1], key)


def test_save_async_is_safe_from_donation(run_dir):
    """The buffers are given away while the save runs; what was there when save_async returned is what is saved."""

    @jax.jit
    def double(tree):
        return jax.tree.map(lambda x: x * 2, tree)

    donating = jax.jit(double, donate_argnums=0)
    mesh = partitioner.mesh()
    array = np.random.default_rng(0).standard_normal((512, 256)).astype(np.float32)
    small = np.arange(4, dtype=np.float32)
    state = {
        'w': jax.device_put(array, NamedSharding(mesh, PartitionSpec('data', 'model'))),
        'small': jax.device_put(small, NamedSharding(mesh, PartitionSpec())),
    }
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with t5ckpt.Checkpointer(template, checkpoints_dir=str(run_dir)) as ck:
        pending = []
        for step in range(4):
            pending.append(ck.save_async(state, step=step))
            state = donating(state)
        ck.wait_until_finished()
        ck.check_for_errors()
        assert [p.result().step for p in pending] == [0, 1, 2, 3]
        assert all(p.done() for p in pending)
        for step in range(4):
            assert_same(ck.restore(step=step)['w'], array * np.float32(2**step))
            assert_same(ck.restore(step=step)['small'], small * np.float32(2**step))


def test_save_async_is_safe_from_writes_into_numpy(run_dir):
    state = {'w': np.arange(2.0**17), 'small': np.arange(4.0)}
    before = {key: leaf.copy() for key, leaf in state.items()}
    with t5ckpt.Checkpointer(state, checkpoints_dir=str(run_dir)) as ck:
        pending = ck.save_async(state, step=1)
        for leaf in state.values():
            leaf[:] = -1
        pending.result()
        restored = ck.restore()
    for key, leaf in before.items():
        assert_same(restored[key], leaf, key)


def test_restored_arrays_are_independent_of_the_files_and_of_each_other(run_dir):
    """May be donated, and the checkpoint may be deleted, right after."""
    array = np.arange(512 * 256, dtype=np.float32).reshape(512, 256)
    mesh = partitioner.mesh()
    state = {
        'w': jax.device_put(array, NamedSharding(mesh, PartitionSpec('model'))),
        'same everywhere': jax.device_put(array, NamedSharding(mesh, PartitionSpec())),
        'small': jax.device_put(array[0, :4], NamedSharding(mesh, PartitionSpec())),
    }
    add_one = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with t5ckpt.Checkpointer(state, checkpoints_dir=str(run_dir)) as ck:
        ck.save(state, step=1)
        first, second = ck.restore(), ck.restore()
    shutil.rmtree(run_dir)
    first = add_one(add_one(first))
    for key, leaf in state.items():
        assert_same(first[key], np.asarray(leaf) + 2, key)
        assert_same(second[key], leaf, key)
        # Every device has its own.
        for shard in first[key].addressable_shards:
            assert_same(shard.data, np.asarray(leaf)[shard.index] + 2, key)


def test_restored_numpy_is_writable(run_dir):
    tree = nest({'small': np.arange(4.0), 'big': np.arange(2.0**17)})
    with t5ckpt.Checkpointer(tree, checkpoints_dir=str(run_dir)) as ck:
        ck.save(tree, step=1)
        restored = ck.restore()
    for key, leaf in restored.items():
        np.add(leaf, 1, out=leaf)
        assert_same(leaf, tree[key] + 1, key)


@pytest.mark.parametrize('concurrent_gb', [128, 1, 1e-3, 1e-9])
def test_a_budget_smaller_than_an_array(run_dir, concurrent_gb):
    """T5X waits for ever for an array that is as large as the budget."""
    mesh = partitioner.mesh()
    state = states.t5x_state({f'target/w{i}': np.full((512, 256), i, np.float32) for i in range(6)}, mesh)
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=str(run_dir), options=t5ckpt.CheckpointerOptions(chunk_bytes=1 << 16)
    ) as ck:
        ck.save(state, step=1, concurrent_gb=concurrent_gb)
        ck.save_async(state, step=2, concurrent_gb=concurrent_gb).result()
        for step in (1, 2):
            for key, leaf in flatten(ck.restore(step=step).tree).items():
                assert_same(leaf, flatten(state.tree)[key], key)


def test_a_python_int_that_fits_is_narrowed_in_silence(run_dir):
    """`jax.eval_shape` makes an int32 of a Python int; warnings are errors here."""
    with t5ckpt.Checkpointer({'n': 7}, checkpoints_dir=str(run_dir)) as ck:
        ck.save({'n': 7}, step=1)
        ck.save({'n': 2**40}, step=2)
    ck = t5ckpt.Checkpointer(jax.eval_shape(lambda: {'n': 7}), checkpoints_dir=str(run_dir))
    assert ck.restore(step=1)['n'] == 7
    with (
        pytest.warns(UserWarning, match='int64'),
        pytest.raises(errors.DtypeMismatch, match=r'^n: holds 1099511627776.*x64'),
    ):
        ck.restore(step=2)


@pytest.mark.parametrize('mmap', [False, True])
@pytest.mark.parametrize('count', [3, 2**13])
def test_an_integer_that_does_not_fit_is_an_error(run_dir, count, mmap):
    """JAX would make another number of it."""
    tree = {'fits': np.arange(count), 'wide': np.arange(count) + 2**40}
    with t5ckpt.Checkpointer(tree, checkpoints_dir=str(run_dir)) as ck:
        ck.save(tree, step=1)
    for key, leaf in tree.items():
        template = dict(tree) | {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)}
        ck = t5ckpt.Checkpointer(template, checkpoints_dir=str(run_dir), options=t5ckpt.CheckpointerOptions(mmap=mmap))
        # What is stored in the manifest is looked at before anything is said.
        is_said = key == 'wide' or count > 16
        expected = pytest.warns(UserWarning, match=f'{key}.*int64') if is_said else contextlib.nullcontext()
        wrong = pytest.raises(errors.DtypeMismatch, match=f'wide: holds {2**40}.*int64.*int32.*jax_enable_x64')
        with expected, wrong if key == 'wide' else contextlib.nullcontext() as error:
            assert_same(ck.restore()[key], leaf.astype(np.int32), key)
        if key == 'wide':
            assert [problem.leaf for problem in error.value.problems] == ['wide']


def test_64_bits_are_not_narrowed_in_silence(run_dir):
    tree = {'big': np.arange(2.0**13) / 3, 'small': np.arange(3) / 3}
    with t5ckpt.Checkpointer(tree, checkpoints_dir=str(run_dir)) as ck:
        ck.save(tree, step=1)
    for key, leaf in tree.items():
        template = dict(tree) | {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)}
        with (
            t5ckpt.Checkpointer(template, checkpoints_dir=str(run_dir)) as ck,
            pytest.warns(UserWarning, match='64.*32.*x64'),
        ):
            restored = ck.restore()
        assert_same(restored[key], np.asarray(leaf).astype(leaf.dtype.name.replace('64', '32')), key)


def test_a_dtype_of_the_same_kind_stays_the_checkpoints(run_dir):
    """As in T5X; restore_dtype casts."""
    bf16 = states.np_dtype('bfloat16')
    tree = {
        'params': {'w': np.arange(8, dtype=np.float32), 'big': np.arange(2**14, dtype=np.float32)},
        'n': np.int32(3),
    }
    model = {'params': {key: leaf.astype(bf16) for key, leaf in tree['params'].items()}, 'n': np.int32(0)}
    with t5ckpt.Checkpointer(model, checkpoints_dir=str(run_dir)) as ck:
        ck.save(tree, step=1)
        states.assert_same_tree(ck.restore(), tree)
    with t5ckpt.Checkpointer(model, checkpoints_dir=str(run_dir), restore_dtype=bf16) as ck:
        cast = ck.restore()
    states.assert_same_tree(cast, {'params': jax.tree.map(lambda x: x.astype(bf16), tree['params']), 'n': np.int32(3)})


@pytest.mark.filterwarnings('ignore::t5ckpt.errors.StepMismatchWarning')
def test_where_the_step_comes_from(run_dir):
    """The word of the caller, the state's attribute, a leaf: an array, a lazy array or a number."""
    leaf = np.asarray(4, np.int32)
    lazy = t5ckpt.LazyThreadPoolArray((), np.int32, lambda: np.asarray(7, np.int32))
    cases = [
        ({'step': leaf}, None, 4),
        ({'step': jnp.asarray(5)}, None, 5),
        ({'step': 6}, None, 6),
        (states.t5x_state({'target/w': leaf, 'state/step': lazy}), None, 7),
        ({'step': leaf}, 8, 8),
        ({'step': leaf}, np.int64(9), 9),
        ({'step': leaf}, 0, 0),
        (states.flax_state(updates=1), None, 1),
    ]
    for state, step, expected in cases:
        with t5ckpt.Checkpointer(state, checkpoints_dir=str(run_dir)) as ck:
            assert ck.save(state, step=step).step == expected
    assert list(t5ckpt.all_steps(run_dir)) == [0, 1, 4, 5, 6, 7, 8, 9]


def test_a_second_async_save_waits_for_the_first(run_dir):
    state = {'w': np.arange(2.0**17)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=str(run_dir), keep=3) as ck:
        pending = [ck.save_async(state, step=step) for step in range(6)]
        assert all(p.done() for p in pending[:-1])
    # Leaving the block waits for the last.
    assert pending[-1].done()
    assert list(t5ckpt.all_steps(run_dir)) == [3, 4, 5]
    assert pathlib.Path(pending[-1].result().path) == run_dir / 'checkpoint_5'


class Counter:
    """A data iterator that keeps its position in a file, or in several."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def save(self, filename: str) -> None:
        pathlib.Path(filename + '.index').write_text(str(self.position))
        pathlib.Path(filename + '.data-00000-of-00001').write_text('')

    def load(self, filename: str) -> None:
        self.position = int(pathlib.Path(filename + '.index').read_text())


@pytest.mark.parametrize('how', ['save', 'save_async'])
def test_data_iterators_are_saved_beside_the_arrays(run_dir, how):
    parts = partitioner.Partitioner(partitioner.mesh(), partitioner.t5x_rules)
    iterator = Counter()
    flat = states.adafactor_arrays()
    options = {'keep_dataset_checkpoints': 2}
    with t5ckpt.Checkpointer(
        states.t5x_state(flat, parts.mesh), parts, str(run_dir), iterator, **with_options(**options)
    ) as ck:
        for step in (1, 2, 3):
            iterator.position = 10 * step
            state = states.t5x_state(flat | {'state/step': np.asarray(step, np.int32)}, parts.mesh)
            pending = getattr(ck, how)(state)
            iterator.position = -1
        if how == 'save_async':
            pending.result()
        assert list(ck.all_dataset_checkpoint_steps()) == [2, 3]
        assert list(ck.all_steps()) == [1, 2, 3]
        for step in (2, 3):
            assert (run_dir / f'checkpoint_{step}' / 'train_ds-000-of-001.index').is_file()
            t5x_rules.check(run_dir / f'checkpoint_{step}')
            assert int(ck.restore(step=step).step) == step
            assert iterator.position == 10 * step


# ---- one checkpoint does not depend on another ----


def _sharded_state(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    sharding = NamedSharding(partitioner.mesh(), PartitionSpec('data', 'model'))
    return {name: jax.device_put(rng.standard_normal((512, 256)).astype(np.float32), sharding) for name in 'ab'}


def test_unchanged_leaves_saved_again_survive_the_checkpoint_before(run_dir):
    state = _sharded_state(0)
    with t5ckpt.Checkpointer(state, checkpoints_dir=run_dir) as ck:
        ck.save(state, step=1)
        state = {**state, 'b': state['b'] + 1}
        ck.save(state, step=2)
        ck.save(dict(state), step=3)
        shutil.rmtree(run_dir / 'checkpoint_1')
        for step in (2, 3):
            t5x_rules.check(run_dir / f'checkpoint_{step}')
            found = independent_reader.read(run_dir / f'checkpoint_{step}')
            for key, leaf in state.items():
                assert_same(found[key], leaf, f'{step}: {key}')


def test_a_checkpoint_replaced_by_another_process_is_not_taken_for_ours(run_dir):
    """The step saved before was rolled back and saved anew, with other values, behind the checkpointer's back."""
    ours, theirs = _sharded_state(0), _sharded_state(1)
    with t5ckpt.Checkpointer(ours, checkpoints_dir=run_dir) as ck:
        ck.save(ours, step=1)
        shutil.rmtree(run_dir / 'checkpoint_1')
        with t5ckpt.Checkpointer(theirs, checkpoints_dir=run_dir) as other:
            other.save(theirs, step=1)
        ck.save(ours, step=2)
    for step, state in ((1, theirs), (2, ours)):
        found = independent_reader.read(run_dir / f'checkpoint_{step}')
        for key, leaf in state.items():
            assert_same(found[key], leaf, f'{step}: {key}')


@pytest.mark.parametrize('restart', [False, True])
def test_what_was_lost_in_the_checkpoint_before_is_written_again(run_dir, restart):
    """Chunks of it are gone, and others are shorter."""
    state = _sharded_state(0)
    ck = t5ckpt.Checkpointer(state, checkpoints_dir=run_dir)
    ck.save(state, step=1)
    chunks = sorted(p for p in (run_dir / 'checkpoint_1' / 'a').iterdir() if p.name != '.zarray')
    chunks[0].unlink()
    short = chunks[1].read_bytes()[:-4]
    chunks[1].unlink()
    chunks[1].write_bytes(short)
    if restart:
        ck = t5ckpt.Checkpointer(state, checkpoints_dir=run_dir)
    ck.save(state, step=2)
    t5x_rules.check(run_dir / 'checkpoint_2')
    found = independent_reader.read(run_dir / 'checkpoint_2')
    for key, leaf in state.items():
        assert_same(found[key], leaf, key)


_ODD_VALUES = {
    'int1': np.arange(2).astype(ml_dtypes.int1),
    'wide': 2**64,
    'bytes': np.array([b'a']),
    'texts': np.array(['a']),
    'date': np.datetime64('2020-01-01'),
    'record': np.zeros(2, [('a', 'i4')]),
    'objects': np.array([1, None]),
    'rank': np.ones((1,) * 33),
    'rank of 32': np.ones((1,) * 32, '>f8'),
    'signs': np.array([np.nan, -np.inf, -0.0]),
    'payload': np.array([0x7FF4000000000001], np.uint64).view(np.float64),
    'complex': np.complex64(complex(-0.0, np.nan)),
    'int2': np.arange(4).astype(ml_dtypes.int2),
    'float4': np.arange(4).astype(ml_dtypes.float4_e2m1fn),
    'none': np.zeros((0, 2), np.int64),
}
_REFUSED = frozenset({'int1', 'wide', 'bytes', 'texts', 'date', 'record', 'objects', 'rank'})


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(key=st.text(max_size=4), what=st.sampled_from(sorted(_ODD_VALUES)), inline_bytes=st.sampled_from([0, 1024]))
def test_a_leaf_comes_back_to_the_bit_or_is_refused_by_name(key, what, inline_bytes):
    """Whatever its key and its dtype; a refused leaf leaves nothing behind."""
    value = _ODD_VALUES[what]
    with tempfile.TemporaryDirectory() as run:
        checkpointer = t5ckpt.Checkpointer(
            {'p': {key: value}}, checkpoints_dir=run, options=t5ckpt.CheckpointerOptions(inline_bytes=inline_bytes)
        )
        if what in _REFUSED:
            with pytest.raises(errors.UnsupportedLeafError, match='p/'):
                checkpointer.save({'p': {key: value}}, step=1)
            assert checkpointer.all_steps() == []
            return
        checkpointer.save({'p': {key: value}}, step=1)
        found = np.asarray(checkpointer.restore()['p'][key])
        wanted = np.asarray(value).astype(np.asarray(value).dtype.newbyteorder('='))
        assert (found.shape, found.dtype, found.tobytes()) == (wanted.shape, wanted.dtype, wanted.tobytes())

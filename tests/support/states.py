"""Makers of train states: T5X's protocol, Flax with optax, nnx, and unusual pytrees."""

import collections
import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx
from flax.training import train_state as flax_train_state
from jax.sharding import Mesh

from support.bits import fingerprint, random_bits
from support.golden import flatten, nest
from support.partitioner import Rules, T5XState, shard, t5x_rules

#: Every dtype a jax array can have without x64.
JAX_DTYPES = [
    'bool',
    'int2',
    'int4',
    'int8',
    'int16',
    'int32',
    'uint2',
    'uint4',
    'uint8',
    'uint16',
    'uint32',
    'float4_e2m1fn',
    'float8_e3m4',
    'float8_e4m3',
    'float8_e4m3b11fnuz',
    'float8_e4m3fn',
    'float8_e4m3fnuz',
    'float8_e5m2',
    'float8_e5m2fnuz',
    'float8_e8m0fnu',
    'float16',
    'bfloat16',
    'float32',
    'complex64',
]
#: And those only NumPy has then.
WIDE_DTYPES = ['int64', 'uint64', 'float64', 'complex128']


def np_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a name, those of ml_dtypes included."""
    return np.dtype(getattr(ml_dtypes, name, name))


# ---- T5X's protocol ----

_SHAPES = {
    'target/token_embedder/embedding': (64, 32),
    'target/encoder/layers_0/attention/query/kernel': (32, 64),
    'target/encoder/layers_0/mlp/wi/kernel': (32, 128),
    'target/encoder/layers_0/mlp/wo/kernel': (128, 32),
    'target/encoder/layers_0/pre_mlp_layer_norm/scale': (32,),
    'target/encoder/relpos_bias/rel_embedding': (8, 16),
    'target/encoder/encoder_norm/scale': (32,),
}
_FACTOR = 32


def adafactor_arrays(step: int = 5, seed: int = 0, *, mutables: bool = True) -> dict[str, Any]:
    """'a/b/c' -> array with the structure of Adafactor in T5X: factored second moments and (1,) dummies."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    flat: dict[str, Any] = {key: normal(*shape) for key, shape in _SHAPES.items()}
    flat['state/step'] = np.asarray(step, np.int32)
    for key, shape in _SHAPES.items():
        base = 'state/param_states/' + key.removeprefix('target/')
        factored = len(shape) == 2 and min(shape) >= _FACTOR
        flat[f'{base}/v_row'] = normal(shape[0]) if factored else normal(1)
        flat[f'{base}/v_col'] = normal(shape[1]) if factored else normal(1)
        flat[f'{base}/v'] = normal(1) if factored else normal(*shape)
        flat[f'{base}/m'] = normal(1)
    if mutables:
        flat['flax_mutables/batch_stats/mean'] = normal(16)
        flat['flax_mutables/counters/seen'] = np.asarray(7, np.int32)
    return flat


def t5x_state(flat: dict[str, Any], mesh: Mesh | None = None, rules: Rules = t5x_rules) -> T5XState:
    """A train state of these leaves, on the devices of `mesh` or, without one, as they are."""
    if mesh is not None:
        flat = {k: shard(v, mesh, rules, k) if isinstance(v, np.ndarray) else v for k, v in flat.items()}
    return T5XState(nest(flat))


def shapes_of(state: T5XState) -> T5XState:
    """The state with a ShapeDtypeStruct, without sharding, for every array: what T5X hands to a checkpointer."""
    return T5XState(
        nest(
            {
                key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, 'shape') else leaf
                for key, leaf in flatten(state.tree).items()
            }
        )
    )


# ---- Flax and nnx ----


class Mlp(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, 8) -> (batch, 4)."""
        return nn.Dense(4)(nn.relu(nn.Dense(16)(x)))


def flax_state(seed: int = 0, updates: int = 2) -> flax_train_state.TrainState:
    """A Flax TrainState whose optax chain has a namedtuple, counts and an EmptyState."""
    model = Mlp()
    params = model.init(jax.random.key(seed), jnp.ones((2, 8)))['params']
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = flax_train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for _ in range(updates):
        state = state.apply_gradients(grads=jax.tree.map(lambda p: p * 0.5 + 0.25, state.params))
    return state


def nnx_state(seed: int = 0) -> Any:
    """The state of an nnx module: parameters and the counts and typed keys of its random streams."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(8, 16, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)

    return nnx.state(Net(nnx.Rngs(seed)))


# ---- unusual pytrees ----


class Pair(NamedTuple):
    """A namedtuple node."""

    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    """A dataclass node with a static field."""

    content: Any
    label: str = dataclasses.field(default='box', metadata={'static': True})


def wild_tree(seed: int = 0) -> dict[str, Any]:
    """Every container, every kind of leaf."""
    rng = np.random.default_rng(seed)
    return {
        'dict': {'a': jnp.asarray(random_bits(rng, (3, 5), np.float32)), 'empty': {}, 'none': None},
        'list': [np.arange(4, dtype=np.int64), None, [], [jnp.zeros((0, 4))]],
        'tuple': (jnp.float32(1.5), (), np.float64(2.5)),
        'named': Pair(Pair(jnp.arange(3), None), {}),
        'box': Box([Box(jnp.ones((2, 2), jnp.bfloat16), 'inner')], 'outer'),
        'ordered': collections.OrderedDict(z=jnp.int32(1), a=jnp.int32(2)),
        'keys': {
            'one': jax.random.key(seed),
            'many': jax.random.split(jax.random.key(seed, impl='rbg'), 6).reshape(2, 3),
            'unsafe': jax.random.key(seed, impl='unsafe_rbg'),
            'raw': jax.random.PRNGKey(seed),
        },
        'python': {'int': 7, 'negative': -(2**40), 'float': 0.1, 'nan': float('nan'), 'true': True, 'false': False},
        'text': ['hello', ''],
        'numpy': {'scalar': np.float32(3.25), 'bool': np.bool_(True), 'rank0': np.asarray(9, np.int16)},
        'zero': {'size': np.zeros((3, 0, 2), np.float16), 'rank': jnp.asarray(-0.0)},
        # T5X gives the first two the same directory, and a case-insensitive disk the last two.
        'names': {'a.b': np.arange(600.0), 'a': {'b': np.arange(600.0) + 1}, 'w': np.arange(5), 'W': np.arange(5) + 1},
        'odd keys': {'with/slash': np.arange(3), '': np.arange(2), '.hidden': np.arange(1), 'ü': np.arange(4)},
        'numbers': {0: np.arange(3), 1: np.arange(2)},
        'long' * 80: np.arange(2),
    }


def dtype_tree(seed: int = 0, shape: tuple[int, ...] = (16, 8)) -> dict[str, Any]:
    """One leaf of arbitrary bits for every dtype."""
    rng = np.random.default_rng(seed)
    tree: dict[str, Any] = {name: jnp.asarray(random_bits(rng, shape, np_dtype(name))) for name in JAX_DTYPES}
    tree |= {name: random_bits(rng, shape, name) for name in WIDE_DTYPES}
    return tree


# ---- comparing ----


def blank(tree: Any) -> Any:
    """The same structure with other values: what a program has before it restores."""

    def other(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.zeros_like(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        if isinstance(leaf, jax.Array):
            return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)
        if isinstance(leaf, np.generic):
            return type(leaf)()
        return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else type(leaf)()

    return jax.tree.map(other, tree)


def assert_same_tree(actual: Any, expected: Any) -> None:
    """Same containers, same kinds of leaves, same bits, same shardings."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, got), want in pairs:
        name = jax.tree_util.keystr(path)
        assert isinstance(got, jax.Array) == isinstance(want, jax.Array), f'{name}: {type(got)}, not {type(want)}'
        if type(want) in (bool, int, float, str):
            assert type(got) is type(want), f'{name}: {type(got)}, not {type(want)}'
        if isinstance(want, jax.Array):
            assert got.sharding.is_equivalent_to(want.sharding, want.ndim), f'{name}: {got.sharding}'
            assert got.dtype == want.dtype, f'{name}: {got.dtype}, not {want.dtype}'
        assert leaf_print(got) == leaf_print(want), f'{name}: {got!r}, not {want!r}'


def leaf_print(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    """`fingerprint`, of typed PRNG keys too."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return fingerprint(jax.random.key_data(leaf))
    return fingerprint(leaf)


def stored_forms(leaf: Any) -> set[tuple[str, tuple[int, ...], bytes]]:
    """What T5X may find for this leaf: itself, or a wider dtype where T5X has none of its own.

    zarr v2 has no name for uint2, uint4 and float8_e4m3, and T5X refuses uint16. Integers keep their value, so that T5X
    reads the right numbers; a float keeps its bits.
    """
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    forms = {fingerprint(array)}
    match array.dtype.name:
        case 'uint2' | 'uint4':
            forms.add(fingerprint(array.astype(np.uint8)))
        case 'uint16':
            forms |= {fingerprint(array.astype(np.uint32)), fingerprint(array.astype(np.int32))}
        case 'float8_e4m3':
            forms.add(fingerprint(array.view(np.uint8)))
    return forms


def key_of(storage, ending: str, directory: str = 'checkpoint_1') -> str:
    """The only key of a step with this ending: each save in a bucket gives its files a directory of their own."""
    [key] = [key for key, _ in storage.walk(directory) if key.endswith(ending)]
    return key

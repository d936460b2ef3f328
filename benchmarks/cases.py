"""The states that are measured: tables of leaves, and how a table becomes arrays.

Every measured save gets values that were never saved before: t5ckpt does not write an array again that the previous
checkpoint already holds, and a benchmark that saves one state over and over would measure that instead. Only the case
`frozen` keeps its arrays from one save to the next, because that is what it is about.

All peers of a round get the same values. They are drawn anew for each peer: an array remembers the host copy that was
made of it, so a peer that is handed used arrays would find part of its work done.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import jax

    Axes = tuple[str | None, ...]
    Tree = dict[str, Any]

MESH_AXIS = 'model'
_WORTH_COMPILING = 1 << 18


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array: `axes` names the mesh axis each dimension is sharded over, as a PartitionSpec does."""

    shape: tuple[int, ...]
    axes: Axes = ()
    dtype: str = 'float32'
    zeros: bool = False


@dataclasses.dataclass(frozen=True)
class Size:
    """What the tables are made from: the real sizes, or ones that only show that everything works."""

    layers: int
    width: int
    hidden: int
    vocabulary: int
    small_leaves: int
    big: tuple[int, int]
    square: int


FULL = Size(
    layers=12, width=1024, hidden=4096, vocabulary=32128, small_leaves=10_000, big=(32_000, 31_250), square=4096
)
SHORT = Size(layers=1, width=64, hidden=128, vocabulary=256, small_leaves=20, big=(256, 250), square=64)


@dataclasses.dataclass(frozen=True)
class Case:
    """One state and what is measured with it.

    Attributes:
        actions: what every peer does in its turns, each in a process of its own.
        devices: how many CPU devices the process gets; an accelerator's own number is taken as it is.
        needs: how many devices the case makes sense with.
        headline: the metrics that the summary shows.
        asynchronous: whether `save_async` is measured too.
        target_axes: what a leaf is restored to, if not to the sharding it was saved with.
        changes: for a save after a save: tells the leaves that are new in the second one, which is the one measured.
        without: peers left out, and why.
    """

    name: str
    title: str
    leaves: Callable[[Size], dict[str, Leaf]]
    headline: tuple[str, ...]
    actions: tuple[str, ...] = ('save', 'restore_warm', 'restore_cold')
    devices: int = 4
    needs: int = 1
    rounds: int = 3
    asynchronous: bool = False
    target_axes: Callable[[Leaf], Axes] | None = None
    changes: Callable[[str], bool] | None = None
    without: Mapping[str, str] = dataclasses.field(default_factory=dict)


def transformer(size: Size, dtype: str = 'float32') -> dict[str, Leaf]:
    """S1: the weights of a small transformer, 0.74 GB, sharded the way T5X shards them."""
    width, hidden = size.width, size.hidden
    columns, rows = (None, MESH_AXIS), (MESH_AXIS, None)
    leaves = {'embedding': Leaf((size.vocabulary, width), rows, dtype)}
    for layer in range(size.layers):
        at = f'layers_{layer}'
        leaves[f'{at}/norm'] = Leaf((width,), (), dtype)
        leaves |= {f'{at}/{name}': Leaf((width, width), columns, dtype) for name in ('query', 'key', 'value')}
        leaves[f'{at}/out'] = Leaf((width, width), rows, dtype)
        leaves[f'{at}/wi'] = Leaf((width, hidden), columns, dtype)
        leaves[f'{at}/wo'] = Leaf((hidden, width), rows, dtype)
    return leaves


def _small(size: Size) -> dict[str, Leaf]:
    return {f'group_{i // 100}/leaf_{i % 100}': Leaf((256,)) for i in range(size.small_leaves)}


def _big(size: Size) -> dict[str, Leaf]:
    return {'array': Leaf(size.big)}


def _squares(size: Size) -> dict[str, Leaf]:
    return {f'matrix_{i}': Leaf((size.square, size.square), (MESH_AXIS, None)) for i in range(8)}


def _fresh_optimizer(size: Size) -> dict[str, Leaf]:
    """Weights in bfloat16 and the two moments of Adam before the first step: zeros in float32."""
    weights = transformer(dataclasses.replace(size, layers=max(1, size.layers // 3)), 'bfloat16')
    moments = {
        f'{moment}/{path}': dataclasses.replace(leaf, dtype='float32', zeros=True)
        for moment in ('mu', 'nu')
        for path, leaf in weights.items()
    }
    return {f'target/{path}': leaf for path, leaf in weights.items()} | moments


def _adapters(size: Size) -> dict[str, Leaf]:
    """Frozen weights, and for each matrix an adapter of rank 8 with the two moments of Adam."""
    frozen = transformer(size)
    leaves = {f'frozen/{path}': leaf for path, leaf in frozen.items()}
    for path, leaf in frozen.items():
        if len(leaf.shape) == 2:
            for part in ('target', 'mu', 'nu'):
                leaves[f'adapter/{part}/{path}/a'] = Leaf((leaf.shape[0], 8))
                leaves[f'adapter/{part}/{path}/b'] = Leaf((8, leaf.shape[1]))
    return leaves


_GZIP = {'t5x-gzip': 'gzip takes minutes for this state; the case s1 has its numbers'}

CASES = {
    case.name: case
    for case in (
        Case(
            's1',
            'S1: 0.74 GB of float32 weights, 4 devices',
            transformer,
            ('save', 'async_call', 'restore_warm', 'restore_cold', 'save_memory', 'restore_warm_memory'),
            rounds=5,
            asynchronous=True,
        ),
        Case(
            'stall',
            'S1 on one device, in a training loop that donates its state',
            transformer,
            ('lost', 'loop_call'),
            actions=('stall',),
            devices=1,
            rounds=5,
        ),
        Case('small', '10,000 leaves of 1 KB', _small, ('save', 'restore_warm'), devices=1, without=_GZIP),
        Case(
            'big',
            'One array of 4 GB',
            _big,
            ('save', 'restore_warm', 'save_memory', 'restore_warm_memory'),
            devices=1,
            without=_GZIP,
        ),
        Case(
            'reshard',
            '0.54 GB saved by rows, restored by columns, 8 devices',
            _squares,
            ('restore_warm', 'restore_cold'),
            devices=8,
            needs=2,
            target_axes=lambda _: (None, MESH_AXIS),
            without=_GZIP,
        ),
        Case(
            'zeros',
            'bfloat16 weights, float32 moments of an optimizer before its first step',
            _fresh_optimizer,
            ('save', 'restore_warm', 'disk'),
        ),
        Case(
            'frozen',
            'A second save, 0.74 GB of frozen weights and new adapters',
            _adapters,
            ('save', 'disk'),
            changes=lambda path: path.startswith('adapter/'),
            without=_GZIP,
        ),
    )
}


def size_of(*, short: bool, scale: int) -> Size:
    """The sizes to run; `scale` multiplies the widths of the transformer, so that its bytes grow with the square."""
    size = SHORT if short else FULL
    return dataclasses.replace(size, width=size.width * scale, hidden=size.hidden * scale)


@functools.cache
def _generator(shape: tuple[int, ...], dtype: str, sharding: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    import jax

    def normal(seed: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), index)
        return jax.random.normal(key, shape, dtype)

    return jax.jit(normal, out_shardings=sharding)


def mesh_of(devices: int) -> jax.sharding.Mesh:
    """A mesh of one axis over at most `devices` of the devices there are."""
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), (MESH_AXIS,))


def sharding_of(mesh: jax.sharding.Mesh, axes: Axes) -> jax.sharding.Sharding:
    """The sharding over `mesh` that `axes` describe."""
    import jax

    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def materialize(leaves: Mapping[str, Leaf], mesh: jax.sharding.Mesh, seeds: Mapping[str, int]) -> dict[str, jax.Array]:
    """The arrays of the leaves that have a seed, by path. The same seed gives the same values.

    Zeros are the same in every round; they are new arrays nonetheless.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    arrays = {}
    for index, (path, leaf) in enumerate(leaves.items()):
        if path not in seeds:
            continue
        sharding = sharding_of(mesh, leaf.axes)
        if leaf.zeros:
            arrays[path] = jnp.zeros(leaf.shape, leaf.dtype, device=sharding)
        elif np.prod(leaf.shape) < _WORTH_COMPILING:
            noise = np.random.default_rng([seeds[path], index]).standard_normal(leaf.shape, np.float32)
            arrays[path] = jax.device_put(noise.astype(jnp.dtype(leaf.dtype)), sharding)
        else:
            arrays[path] = _generator(leaf.shape, leaf.dtype, sharding)(np.uint32(seeds[path]), np.uint32(index))
    return arrays


def abstract(leaves: Mapping[str, Leaf], mesh: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of a table, by path."""
    import jax

    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(mesh, leaf.axes))
        for path, leaf in leaves.items()
    }


def resharded(case: Case, leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """The table a case is restored to."""
    if case.target_axes is None:
        return dict(leaves)
    return {path: dataclasses.replace(leaf, axes=case.target_axes(leaf)) for path, leaf in leaves.items()}


def nest(flat: Mapping[str, Any]) -> Tree:
    """{'a/b': x} -> {'a': {'b': x}}."""
    tree: Tree = {}
    for path, value in flat.items():
        *parents, name = path.split('/')
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def flatten(tree: Tree, prefix: str = '') -> dict[str, Any]:
    """{'a': {'b': x}} -> {'a/b': x}."""
    flat = {}
    for name, value in tree.items():
        flat |= flatten(value, f'{prefix}{name}/') if isinstance(value, dict) else {f'{prefix}{name}': value}
    return flat


def state_bytes(leaves: Mapping[str, Leaf]) -> int:
    """The size of the state, a replicated array counted once."""
    import jax.numpy as jnp
    import numpy as np

    return sum(int(np.prod(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves.values())

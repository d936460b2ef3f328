"""Describes a leaf of a template: its shape, dtype, sharding and Python type."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from t5ckpt.core.arguments import native_dtype
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.protocols import Partitioner
from t5ckpt.errors import UnshardedTemplateWarning
from t5ckpt.lazy import LazyArray
from t5ckpt.tree.leaf_table import Empty
from t5ckpt.tree.leaf_values import base_number, check_is_array, is_jax_array, is_key
from t5ckpt.tree.parts import BARE

# From the tag in a key dtype's name to the name that jax.random.wrap_key_data takes (jax/_src/prng.py).
_KEY_IMPLS = {'fry': 'threefry2x32', 'rbg': 'rbg', 'urbg': 'unsafe_rbg'}


@dataclasses.dataclass(frozen=True)
class LeafTemplate:
    """The description of one leaf of a template.

    Attributes:
      kind: 'array', 'scalar' (a Python number), 'key' (typed PRNG keys), 'text', 'none', 'empty', 'skip' (``...``, a
        leaf that a restore leaves out) or 'unread' (a leaf that this restore does not return).
      shape: of the array; of the key data for keys.
      dtype: numpy dtype; uint32 for keys. None for text, none, empty and skip.
      device: whether the result is a jax.Array.
      sharding: of the result; None with ``device`` lets JAX choose the device (uncommitted).
      python: the scalar's type, for 'scalar', which may be a subclass such as an IntEnum; ``np.generic`` if an array leaf
        is a numpy scalar.
      impl: the name of the PRNG implementation, for 'key'.
      example: the leaf itself for 'none', 'empty' and 'text', which are returned unchanged.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    device: bool = False
    sharding: Any = None
    python: type | None = None
    impl: str = ''
    example: Any = None

    def left_out(self) -> LeafTemplate:
        """The template of a leaf that is not read."""
        return dataclasses.replace(self, kind='unread', sharding=None)


def leaf_template(path: Path, leaf: Any, sharding: Any = None, host: bool = False) -> LeafTemplate:
    """Describes a template leaf.

    Args:
      path: of the leaf, for errors.
      leaf: jax.Array, ShapeDtypeStruct, numpy array or scalar, Python number, LazyArray, typed key, None, Empty, str.
      sharding: from a partitioner; overrides that of the leaf.
      host: whether the result is a numpy array in any case.
    """
    if is_jax_array(leaf) and isinstance(leaf.dtype, np.dtype):
        # First, because most leaves are jax.Arrays.
        place = _own_sharding(leaf) if sharding is None else sharding
        return LeafTemplate('array', leaf.shape, leaf.dtype, not host, None if host else place)
    if leaf is None or leaf is ...:
        return LeafTemplate('none' if leaf is None else 'skip')
    if isinstance(leaf, (Empty, str)):
        return LeafTemplate('text' if isinstance(leaf, str) else 'empty', example=leaf)
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        return LeafTemplate('scalar', (), np.asarray(base_number(type(leaf))(leaf)).dtype, python=type(leaf))
    check_is_array(path, leaf)
    if is_key(leaf.dtype):
        return _key_target(leaf, sharding)
    on_device = not isinstance(leaf, (np.ndarray, np.generic, LazyArray)) or sharding is not None
    if sharding is None and on_device:
        sharding = _own_sharding(leaf)
    place = (on_device and not host, None if host else sharding)
    return LeafTemplate(
        'array',
        tuple(leaf.shape),
        native_dtype(leaf.dtype),
        *place,
        np.generic if isinstance(leaf, np.generic) else None,
    )


def _own_sharding(leaf: Any) -> Any:
    sharding = getattr(leaf, 'sharding', None)
    return sharding if getattr(leaf, 'committed', True) else None


def _key_target(leaf: Any, sharding: Any) -> LeafTemplate:
    import jax

    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    if sharding is None:
        sharding = _own_sharding(leaf)
    # The dtype's name is 'key<fry>'; its implementation has no other public name for a ShapeDtypeStruct.
    impl = str(_KEY_IMPLS.get(leaf.dtype.name[4:-1], leaf.dtype.name[4:-1]))
    return LeafTemplate('key', tuple(data.shape), np.dtype(data.dtype), True, sharding, impl=impl)


def canonical_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype on a device: JAX converts 64 bits to 32, unless ``jax_enable_x64`` is set."""
    import jax

    return jax.dtypes.canonicalize_dtype(dtype)


def axes_tree(partitioner: Partitioner, state: Any) -> Any:
    """The partitioner's PartitionSpecs, as nested dicts or a tree of the state's own types."""
    from jax.sharding import PartitionSpec

    axes = partitioner.get_mesh_axes(state)
    if isinstance(axes, PartitionSpec):
        return {BARE[0]: axes}
    return axes.state_dict() if hasattr(axes, 'state_dict') else axes


def unsharded_warning(text: str) -> UnshardedTemplateWarning:
    """The warning of a template without shardings, with the code that attaches them."""
    cure = (
        'Attach shardings to the template: jax.eval_shape(jax.jit(init, out_shardings=...)), or '
        'jax.ShapeDtypeStruct(shape, dtype, sharding=...). If one device is meant: '
        'sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]).'
    )
    return UnshardedTemplateWarning(f'{text} {cure}')

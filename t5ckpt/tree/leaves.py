"""Describes leaves: the values that can be leaves, and the facts about each that a save or a restore needs.

jax.Arrays, numpy arrays and scalars, Python numbers, text and LazyArrays are leaves. A save reads a ``jax.Ref`` or an object with
``__array__``. An object of any other type is an error that names it, before anything is planned.

A subclass of a Python number, such as an IntEnum, is saved as the number (:func:`base_number`) and restored as the type of the
template (:func:`as_instance`, called by ``restore/make_leaf.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.loaded import loaded
from t5ckpt.core.text import lines
from t5ckpt.errors import T5CkptError, UnsupportedLeafError
from t5ckpt.lazy import LazyArray
from t5ckpt.tree.leaf_table import MAX_RANK, MAX_SAVED_DEPTH, Empty, LeafTable

# Libraries whose arrays have more than values, and the conversion that an error suggests.
_OTHERS = {
    'pandas': 'x.to_numpy()',
    'scipy': 'x.toarray(), or its arrays in a dict,',
    'tensorflow': 'x.numpy()',
    'torch': 'x.detach().cpu().numpy()',
    'xarray': 'x.to_numpy()',
}
# Of transfers between host and devices, for ``jax.transfer_guard``.
_DIRECTIONS = ('host_to_device', 'device_to_host', 'device_to_device')
_VALUED = (np.ndarray, np.generic, bool, int, float, complex, str, LazyArray)


def is_jax_array(leaf: Any) -> bool:
    """Whether a leaf is a jax.Array; checks only the type, since the attributes of a donated array raise."""
    return hasattr(type(leaf), 'addressable_shards')


def is_key(dtype: Any) -> bool:
    """Whether a dtype is one of JAX's typed keys; does not import jax."""
    return not isinstance(dtype, np.dtype) and type(dtype).__name__ == 'KeyTy'


def check_is_array(path: Path, leaf: Any) -> None:
    """Checks that a leaf has the shape and the dtype of an array; not for Python numbers, text and containers.

    Raises:
      UnsupportedLeafError: it does not, or it has more than values, such as a mask or an index.
    """
    name, kind = leaf_name(path), f'{type(leaf).__module__}.{type(leaf).__qualname__}'.removeprefix('builtins.')
    values = _OTHERS.get(kind.partition('.')[0], '')
    # Not a device of torch, or an iterator of tf.data.
    if values and hasattr(type(leaf), values[2:].partition('(')[0].partition('.')[0]):
        raise UnsupportedLeafError(
            f'{name}: {kind} is not saved, because it could not be restored as one. Give {values} instead.'
        )
    try:
        is_array = isinstance(leaf.shape, tuple)
        if not is_key(leaf.dtype):
            # Raises if NumPy does not have the dtype.
            native_dtype(leaf.dtype)
    except Exception:  # noqa: BLE001 - the attributes may be properties of any class
        is_array = False
    if values or isinstance(leaf, np.ma.MaskedArray) or not is_array:
        raise UnsupportedLeafError(
            f'{name}: {kind} is neither an array nor a number. {_as_leaf(leaf)}, or leave it out: mark the field static; of a '
            'file, t5ckpt cp --leave.'
        )


def _as_leaf(leaf: Any) -> str:
    """The cure for an object that is not a leaf."""
    from jax.sharding import PartitionSpec, Sharding

    sharding = 'x' if isinstance(leaf, Sharding) else 'jax.NamedSharding(mesh, x)'
    cures = (
        (isinstance(leaf, Iterator), 'Pass it as Checkpointer(dataset_iterator=...), which saves its position'),
        (
            hasattr(leaf, 'load_state_dict'),
            'Pass it as Checkpointer(dataset_iterator=...), or put its state_dict() there and load that after a restore',
        ),
        (
            isinstance(leaf, (PartitionSpec, Sharding)),
            f'In a template, give jax.ShapeDtypeStruct(shape, dtype, sharding={sharding})',
        ),
        (isinstance(leaf, np.ma.MaskedArray), 'Give x.data and x.mask as two arrays'),
        (callable(leaf), 'Leave functions out (equinox.filter(model, equinox.is_array))'),
        (isinstance(leaf, bytes), 'Give it as an array (numpy.frombuffer(x, numpy.uint8))'),
    )
    cure = next((text for applies, text in cures if applies), None)
    if cure is not None:
        return cure
    try:
        is_numeric = np.asarray(leaf).dtype.kind in 'biufc'
    except Exception:  # noqa: BLE001 - the conversion may run code of any class
        is_numeric = False
    return 'Give it as an array (numpy.asarray)' if is_numeric else 'Give its values as arrays, numbers or text'


@dataclasses.dataclass(frozen=True)
class KeyData:
    """Typed PRNG keys as their data, an array of uint32, and the name of their implementation, which JAX need not know here."""

    data: Any
    impl: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data."""
        return tuple(self.data.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the data."""
        return np.dtype(np.uint32)


def as_key_data(leaf: Any) -> Any:
    """Typed keys as :class:`KeyData`; any other leaf unchanged."""
    if not is_key(getattr(leaf, 'dtype', None)):
        return leaf
    import jax

    return KeyData(jax.random.key_data(leaf), str(_impl_of(leaf.dtype)))


@functools.lru_cache(64)
def _impl_of(dtype: Any) -> Any:
    """The implementation of a dtype of keys, as ``jax.random.wrap_key_data`` takes it."""
    import jax

    impls: list[Any] = []
    # key_impl takes an array or a tracer, and only the dtype is known.
    jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), jax.ShapeDtypeStruct((), dtype))
    return impls[0]


def _check_is_no_tracer(path: Path, leaf: Any) -> None:
    if 'Tracer' in type(leaf).__name__:
        raise UnsupportedLeafError(
            f'{leaf_name(path)}: is a tracer. Call the checkpointer outside of jit, grad and vmap, with the arrays that they '
            'returned.'
        )


def check_has_values(path: Path, value: Any) -> None:
    """Checks that a leaf has values.

    Raises:
      UnsupportedLeafError: it is abstract, or a tracer, or its buffer was donated, or its devices hold terms of a sum.
    """
    # First, since most attributes of a tracer raise.
    _check_is_no_tracer(path, value)
    if callable(getattr(value, 'is_deleted', None)) and value.is_deleted():
        raise UnsupportedLeafError(
            f'{leaf_name(path)}: its buffer was donated to a jitted step and is gone. Give the array that the step returned.'
        )
    if is_abstract(value):
        raise UnsupportedLeafError(f'{leaf_name(path)}: a ShapeDtypeStruct has no values. Give the arrays themselves.')
    if names := unreduced_axes(getattr(value, 'sharding', None)):
        raise UnsupportedLeafError(
            f'{leaf_name(path)}: is unreduced over the mesh axes {names}: each device holds a term of the sum. Give '
            'jax.reshard(x, jax.NamedSharding(x.sharding.mesh, jax.P())), which adds them up.'
        )


def is_abstract(leaf: Any) -> bool:
    """Whether a leaf is a ``jax.ShapeDtypeStruct``."""
    return type(leaf).__name__ == 'ShapeDtypeStruct'


def unreduced_axes(sharding: Any) -> str:
    """The mesh axes along which devices hold terms of a sum, for messages; '' for most shardings."""
    return ', '.join(sorted(map(str, getattr(getattr(sharding, 'spec', None), 'unreduced', ()))))


@functools.lru_cache(256)
def processes_of(sharding: Any) -> frozenset[int]:
    """The processes of a job that hold a part of an array."""
    return frozenset(device.process_index for device in sharding.device_set)


def most_devices(leaves: Iterable[Any]) -> int:
    """The largest number of devices of any leaf."""
    # Many leaves share few shardings, and each call of device_set makes a set. A tracer has no sharding.
    shardings = [getattr(leaf, 'sharding', None) for leaf in leaves if is_jax_array(leaf)]
    distinct = {id(sharding): sharding for sharding in shardings if sharding is not None}
    return max((len(sharding.device_set) for sharding in distinct.values()), default=1)


def base_number(python: type) -> type:
    """The Python number that a subclass of it (IntEnum, IntFlag, a float with a unit) is saved as."""
    return next(base for base in (bool, int, float, complex) if issubclass(python, base))


def as_instance(python: type, value: Any) -> Any:
    """Converts a number or text to the template's subclass, if that has exactly this value; else returns it unchanged."""
    if type(value) is python:
        return value
    try:
        made = python(value)
        is_same = bool(made == value or (np.isnan(made) and np.isnan(value)))
    except Exception:  # noqa: BLE001 - the user's class, such as an enum without this member
        return value
    return made if is_same else value


@dataclasses.dataclass(frozen=True)
class LeafTemplate:
    """The description of one leaf of a template.

    Attributes:
      kind: 'array', 'scalar' (a Python number), 'key' (typed PRNG keys), 'text', 'none', 'empty' or 'skip' (``...``,
        a leaf that a restore leaves out).
      shape: of the array; of the key data for keys.
      dtype: numpy dtype; uint32 for keys. None for text, none, empty and skip.
      device: whether the result is a jax.Array.
      sharding: of the result; None with ``device`` lets JAX choose the device (uncommitted).
      python: the scalar's type, for 'scalar', which may be a subclass such as an IntEnum; ``np.generic`` if an array leaf
        is a numpy scalar; with ``device``, the number that a weakly typed jax.Array promotes as.
      impl: the PRNG implementation, for 'key': its name, or JAX's PRNGSpec; its text is its name in a checkpoint.
      example: the leaf itself for 'none', 'empty' and 'text', which are returned unchanged.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    device: bool = False
    sharding: Any = None
    python: type | None = None
    impl: Any = ''
    example: Any = None


def leaf_template(path: Path, leaf: Any, sharding: Any = None, host: bool = False) -> LeafTemplate:
    """Describes a template leaf.

    Args:
      path: of the leaf, for errors.
      leaf: jax.Array, ShapeDtypeStruct, numpy array or scalar, Python number, LazyArray, typed key, None, Empty, str.
      sharding: from a partitioner; overrides the leaf's.
      host: whether the result is a numpy array in any case.

    Raises:
      UnsupportedLeafError: it is a tracer, or neither an array nor a number.
    """
    _check_is_no_tracer(path, leaf)
    # First, because most leaves are jax.Arrays.
    if not is_jax_array(leaf):
        if leaf is None or leaf is ...:
            return LeafTemplate('none' if leaf is None else 'skip')
        if isinstance(leaf, (Empty, str)):
            return LeafTemplate('text' if isinstance(leaf, str) else 'empty', example=leaf)
        if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
            return LeafTemplate('scalar', (), np.asarray(base_number(type(leaf))(leaf)).dtype, python=type(leaf))
        check_is_array(path, leaf)
    if is_key(leaf.dtype):
        return _key_template(leaf, sharding)
    on_device = not host and (sharding is not None or not isinstance(leaf, (np.ndarray, np.generic, LazyArray)))
    if sharding is None and on_device:
        sharding = _own_sharding(leaf)
    number = np.generic if isinstance(leaf, np.generic) else None if host else _weak(leaf)
    return LeafTemplate('array', tuple(leaf.shape), native_dtype(leaf.dtype), on_device, sharding, number)


def _weak(leaf: Any) -> type | None:
    """The Python number that a weakly typed array promotes as; None for other leaves."""
    return type(leaf.dtype.type(0).item()) if getattr(leaf, 'weak_type', False) else None


def _own_sharding(leaf: Any) -> Any:
    sharding = getattr(leaf, 'sharding', None)
    if type(getattr(sharding, 'mesh', None)).__name__ == 'AbstractMesh':
        return _over_devices(sharding)
    return sharding if getattr(leaf, 'committed', True) else None


def _over_devices(sharding: Any) -> Any:
    """A sharding over an AbstractMesh, on the devices of the mesh of ``jax.set_mesh`` if that has the same axes."""
    import jax

    mesh = jax.sharding.get_mesh()
    if mesh.empty or mesh.abstract_mesh != sharding.mesh:
        return sharding
    return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _key_template(leaf: Any, sharding: Any) -> LeafTemplate:
    import jax

    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    if sharding is None:
        sharding = _own_sharding(leaf)
    return LeafTemplate('key', tuple(data.shape), np.dtype(data.dtype), True, sharding, impl=_impl_of(leaf.dtype))


def canonical_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype on a device: JAX converts 64 bits to 32, unless ``jax_enable_x64`` is set."""
    import jax

    return jax.dtypes.canonicalize_dtype(dtype)


@functools.cache
def is_on_devices(dtype: np.dtype) -> bool:
    """Whether JAX puts a dtype on a device: 0.10 does not with float6, 0.12 does, and only a trial tells."""
    import jax

    try:
        jax.device_put(np.zeros((), dtype))
    except RuntimeError as error:
        # Others, such as of jax.transfer_guard or of a full device, say nothing of the dtype.
        return 'NumPy dtype' not in str(error)
    return True


class LeafToSave(NamedTuple):
    """A leaf of a state to be saved.

    A named tuple, since one is made per leaf, and a frozen dataclass takes three times as long to make.

    Attributes:
      path: of the leaf.
      name: of the leaf.
      value: a jax.Array, numpy array, Python number, LazyArray or None. Typed keys are their data, and a subclass of a Python
        number is that number.
      kind: 'array', 'scalar' (a Python number), 'key' (typed PRNG keys), 'text', 'none' or 'empty'.
      shape: of the array; of the key data for keys.
      dtype: of the array; None for text, none and empty.
      note: what the facts record about the kind: the name of the number's type, of the keys' implementation, or of the
        empty container's type; the text itself.
    """

    path: Path
    name: str
    value: Any
    kind: str
    shape: tuple[int, ...] = ()
    dtype: Any = None
    note: str = ''

    @property
    def is_whole_per_process(self) -> bool:
        """Whether a process that holds a part of the value holds all of it; the same in all processes."""
        value = self.value
        if getattr(value, 'is_fully_addressable', True) or value.is_fully_replicated:
            return True
        sharding = getattr(value, 'sharding', None)
        return sharding is not None and len(processes_of(sharding)) == 1


def leaves_to_save(table: LeafTable, is_storable: Callable[[np.dtype], bool]) -> list[LeafToSave]:
    """The leaves of a table, in its order.

    Args:
      table: path to leaf.
      is_storable: whether the format has arrays of a dtype.

    Raises:
      UnsupportedLeafError: naming every leaf that cannot be saved.
    """
    leaves: list[LeafToSave] = []
    problems: list[str] = []
    for path, value in table.items():
        try:
            leaf = _leaf_to_save(path, value)
            _check_format(leaf, is_storable)
            leaves.append(leaf)
        except UnsupportedLeafError as error:
            problems.append(str(error))
    problems += [f'{leaf_name(path)}: {text}' for path, text in _spec_lookalikes(table)]
    if problems:
        raise UnsupportedLeafError(lines('the state cannot be saved as it is:', *problems, between='\n  '))
    return leaves


def _leaf_to_save(path: Path, leaf: Any) -> LeafToSave:
    """The record of one leaf.

    Raises:
      UnsupportedLeafError: the leaf has no values, or is not an array or a number.
    """
    name = leaf_name(path)
    # First, because most leaves are arrays, and a state may have ten thousand of them.
    if type(leaf) is np.ndarray:
        return LeafToSave(path, name, leaf, 'array', leaf.shape, native_dtype(leaf.dtype))
    if is_jax_array(leaf) and isinstance(leaf.dtype, np.dtype):
        check_has_values(path, leaf)
        return LeafToSave(path, name, leaf, 'array', leaf.shape, leaf.dtype)
    if isinstance(leaf, Empty):
        return LeafToSave(path, name, leaf, 'empty', note=leaf.kind)
    value = as_key_data(_valued(path, leaf))
    if isinstance(value, KeyData):
        return LeafToSave(path, name, value.data, 'key', value.shape, value.dtype, value.impl)
    template = leaf_template(path, value)
    if template.kind == 'skip':
        raise UnsupportedLeafError(
            f'{name}: is ..., which stands for a leaf that a restore left out. Put its value there before you save.'
        )
    note = ''
    if template.kind == 'scalar':
        number = base_number(type(value))
        value, note = number(value), number.__name__
    elif template.kind == 'text':
        note = str.__str__(value)
    return LeafToSave(path, name, value, template.kind, template.shape, template.dtype, note)


def _valued(path: Path, leaf: Any) -> Any:
    """The values of a leaf of a state to save.

    Reads the current array of a ``jax.Ref``, and converts an object with ``__array__`` to numpy. Returns other leaves unchanged.

    Raises:
      UnsupportedLeafError: its values cannot be read, or it has none.
    """
    check_has_values(path, leaf)
    if is_jax_array(leaf) or isinstance(leaf, (*_VALUED, KeyData)) or leaf is None or leaf is ...:
        return leaf
    check_is_array(path, leaf)
    name, kind = leaf_name(path), type(leaf).__qualname__
    try:
        if _is_ref(leaf):
            with explicit_transfers():
                return leaf[...]
        values = np.asarray(leaf) if hasattr(type(leaf), '__array__') else None
    except Exception as error:
        raise UnsupportedLeafError(
            f'{name}: the values of {kind} cannot be read ({error!s:.200}). Give a numpy array.'
        ) from error
    if values is None or (values.shape, values.dtype) != (leaf.shape, np.dtype(leaf.dtype)):
        result = 'no array' if values is None else f'an array of {values.dtype} {values.shape}'
        raise UnsupportedLeafError(
            f'{name}: {kind} says that it is an array of {leaf.dtype} {leaf.shape} and gives {result}. Give a numpy array.'
        )
    return values


@contextlib.contextmanager
def explicit_transfers() -> Generator[None]:
    """Makes all transfers in a block explicit, as ``jax.device_put`` and ``jax.device_get`` are: the caller of a save wants them.

    Not every JAX function for them has an explicit form (``jax.make_array_from_callback``). The guard is that of the thread.

    Raises:
      T5CkptError: the guard forbids explicit transfers, too ('disallow_explicit').
    """
    jax: Any = loaded('jax')
    if jax is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for direction in _DIRECTIONS:
            if getattr(jax.config, f'jax_transfer_guard_{direction}') in ('disallow', 'log'):
                stack.enter_context(getattr(jax, f'transfer_guard_{direction}')('allow'))
        try:
            yield
        except RuntimeError as error:
            if 'Disallowed' not in str(error):
                raise
            raise T5CkptError(
                f"jax.transfer_guard('disallow_explicit') forbids a transfer of this save or restore: {error!s:.200}. Call it "
                "inside jax.transfer_guard('disallow')."
            ) from error


def _is_ref(leaf: Any) -> bool:
    """Whether a leaf is a mutable array of JAX (``jax.new_ref``)."""
    if not type(leaf).__module__.startswith('jax.'):
        return False
    import jax

    return isinstance(leaf, getattr(jax, 'Ref', ()))


def _check_format(leaf: LeafToSave, is_storable: Callable[[np.dtype], bool]) -> None:
    """Rejects leaves that could be written and never read again."""
    path, name = leaf.path, leaf.name
    if len(path) > MAX_SAVED_DEPTH or len(leaf.shape) > MAX_RANK:
        raise UnsupportedLeafError(
            f'{name[:200]}: nested {len(path)} deep with {len(leaf.shape)} dimensions, the format holds '
            f'{MAX_SAVED_DEPTH} and {MAX_RANK}. Flatten the state.'
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedLeafError(
            f'{name!r}: the key is not valid Unicode text ({error.reason}). Rename it.'
        ) from error
    if '__msgpack_chunked_array__' in path:
        raise UnsupportedLeafError(f'{name}: Flax uses this key for split arrays. Rename it.')
    if leaf.dtype == object and isinstance(leaf.value, int):
        raise UnsupportedLeafError(
            f'{name}: the int {leaf.value!r:.40} does not fit in 64 bits, as those of a checkpoint do. Give it as text (str), or '
            'pass the object that holds it as dataset_iterator=, whose state may hold any int.'
        )
    if leaf.dtype is not None and not is_storable(leaf.dtype):
        raise UnsupportedLeafError(
            f'{name}: {type(leaf.value).__name__} of dtype {leaf.dtype} cannot be saved: a checkpoint holds bool, integers of 2 '
            'to 64 bits, floats of 4 to 64 bits, complex64 and complex128. Convert it to one of these, or mark the field static.'
        )


def _spec_lookalikes(table: LeafTable) -> list[tuple[Path, str]]:
    """Subtrees that every reader of the format would take for a stored array."""
    text = 'a subtree with the keys driver, kvstore and metadata reads as a stored array. Rename one of the keys.'
    inside = {path[:level] for path in table if 'kvstore' in path for level, key in enumerate(path) if key == 'kvstore'}
    keys = {above: {path[len(above)] for path in table if path[: len(above)] == above != path} for above in inside}
    return [(above, text) for above, names in keys.items() if names >= {'driver', 'kvstore', 'metadata'}]


def native_dtype(dtype: Any) -> np.dtype:
    """The numpy dtype in this machine's byte order."""
    plain = np.dtype(dtype)
    return plain.newbyteorder('=') if plain.byteorder in '<>' else plain

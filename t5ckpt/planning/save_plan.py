"""Plans a save: which leaves go into the manifest, and which chunks of the others this process writes.

``plan_save`` decides for each leaf of the table whether it is written inline into the manifest or stored as a zarr array,
with which chunks, from which shards of this process. It reads no device and no file.

Inline or stored: an inline leaf takes 13 us and no file, a zarr array 750 us and two files (10,000 leaves of 1 KB: 0.13 s
compared with 7.5 s). So small leaves that this process holds whole go inline, smallest first, up to a total size. T5X reads
inline leaves everywhere it reads stored ones.

The reverse is not true: T5X inlines a leaf whose mesh axes are None, whatever its size, and cannot restore such a leaf when
it is stored. With a partitioner, ``rule`` names these leaves. Without one, the vectors of the optimizer state
(``state/param_states``, such as Adafactor's v_row and v_col, to which T5X gives no axes) go inline up to ``vector_bytes``.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from t5ckpt.core.arguments import integer
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.protocols import ParameterInfo
from t5ckpt.core.text import lines
from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.format.array_dirs import array_dirs
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box
from t5ckpt.format.codecs import CODECS
from t5ckpt.format.dtypes import Cast, cast_dtype, check_cast, dtype_from_name, name_of, stored_dtype
from t5ckpt.format.sidecar import TreeFacts
from t5ckpt.planning.chunk_shape import DEFAULT_CHUNK_BYTES
from t5ckpt.planning.write_assignment import HeldShard, WriteAssignment, chunk_shape_for
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.leaf_values import base_number, is_jax_array
from t5ckpt.tree.template import LeafTemplate, leaf_to_save

__all__ = ['ArrayWrite', 'ChunkWrite', 'InlineWrite', 'SaveOptions', 'SavePlan', 'plan_save']


_MAX_DEPTH = 200
_MAX_RANK = 32
_OPTIMIZER_STATE = ('state', 'param_states')
_FACTORS = frozenset({'v_row', 'v_col'})


@dataclasses.dataclass(frozen=True)
class SaveOptions:
    """Options of a save.

    Attributes:
      cast: of floating leaves; None casts nothing.
      codec: a key of ``CODECS``.
      chunk_bytes: the desired largest size of a chunk.
      inline_bytes: leaves up to this many bytes go into the manifest.
      inline_total_bytes: the limit for the sum of the manifest's arrays.
      vector_bytes: the limit for vectors of an optimizer's state if there is no partitioner; by default 64 stacked layers
        of T5-11B (64 x 65,536 float32).
    """

    cast: Cast | None = None
    codec: str | None = None
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    inline_bytes: int = 16 * 1024
    inline_total_bytes: int = 256 * 2**20
    vector_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        if self.codec not in tuple(CODECS):
            raise ValueError(f'compression is one of {list(CODECS)}, got {self.codec!r:.80}.')
        integer('chunk_bytes', self.chunk_bytes, 1)
        integer('inline_bytes', self.inline_bytes)


@dataclasses.dataclass(frozen=True)
class ChunkWrite:
    """One chunk that this process writes.

    Attributes:
      box: in the array's coordinates; exactly one chunk of the grid.
      shard: index into the leaf's addressable shards, or -1 when the leaf is a host array.
      box_in_shard: the same box in the shard's coordinates.
    """

    box: Box
    shard: int
    box_in_shard: Box


@dataclasses.dataclass(frozen=True)
class ArrayWrite:
    """One stored leaf. ``dtype`` is the leaf's after the cast, ``array.dtype`` the one on disk."""

    path: Path
    leaf: Any
    dtype: np.dtype
    array: StoredArray
    chunks: tuple[ChunkWrite, ...]

    @property
    def name(self) -> str:
        """The name of the leaf."""
        return leaf_name(self.path)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk on disk, uncompressed."""
        return math.prod(self.array.metadata['chunks']) * self.array.dtype.itemsize

    @property
    def zarray(self) -> str:
        """The file of the array's metadata, relative to the checkpoint's directory."""
        return join(self.array.location, '.zarray')

    def files(self, *, with_metadata: bool) -> list[str]:
        """The files that this process writes, relative to the checkpoint's directory: the metadata first, then ``chunks``."""
        grid, location = self.array.grid, self.array.location
        files = [join(location, grid.key(grid.index_of(chunk.box))) for chunk in self.chunks]
        return [self.zarray, *files] if with_metadata else files


class InlineWrite(NamedTuple):
    """One leaf of the manifest; ``dtype`` is the leaf's after the cast, or None for a leaf that is None.

    A named tuple, since there may be many, and a frozen dataclass takes three times as long to make.
    """

    path: Path
    leaf: Any
    dtype: np.dtype | None

    @property
    def name(self) -> str:
        """The name of the leaf."""
        return leaf_name(self.path)


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """What to write; ``facts`` becomes the sidecar's ``tree``."""

    writes: tuple[ArrayWrite, ...]
    inline: tuple[InlineWrite, ...]
    facts: TreeFacts


class _Leaf(NamedTuple):
    """A leaf with the facts that the planner needs; ``dtype`` is None if it is not an array.

    A named tuple, since one is made per leaf, and a frozen dataclass of eight fields takes three times as long to make.
    """

    path: Path
    value: Any
    target: LeafTemplate
    dtype: np.dtype | None
    name: str
    array_name: str
    whole: bool
    nbytes: int


def plan_save(
    table: LeafTable,
    infos: Mapping[Path, ParameterInfo],
    options: SaveOptions,
    assignment: WriteAssignment | None = None,
    rule: Mapping[Path, bool] | None = None,
) -> SavePlan:
    """Plans a save.

    Args:
      table: the leaves, after save transforms.
      infos: by path, for leaves that have one.
      options: see :class:`SaveOptions`.
      assignment: assigns the chunks of shards that several processes hold.
      rule: by path, whether T5X writes the leaf into the manifest, where that is known.

    Raises:
      UnsupportedLeafError: naming every leaf that cannot be written.
      UnmatchedPattern: the cast selects no leaf.
    """
    assignment = WriteAssignment() if assignment is None else assignment
    leaves = _examine_all(table, infos, options)
    if options.cast is not None:
        check_cast(options.cast, {leaf.path: leaf.target.dtype for leaf in leaves})
    if assignment.count > 1:
        _refuse_local(leaves, assignment.count)
        # Chunks are assigned leaf by leaf, so all processes need the same order, which dicts do not guarantee.
        leaves.sort(key=lambda leaf: leaf.path)
    stored = _stored_paths(leaves, options, assignment, {} if rule is None else rule)
    directories = _directories([leaf for leaf in leaves if leaf.path in stored])
    writes = tuple(
        _plan_array(leaf, directories[leaf.path], options, assignment) for leaf in leaves if leaf.path in stored
    )
    inline = tuple(
        InlineWrite(leaf.path, leaf.value, leaf.dtype)
        for leaf in leaves
        if leaf.path not in stored and leaf.target.kind not in ('empty', 'text')
    )
    return SavePlan(writes, inline, _facts(leaves, writes))


def _examine_all(table: LeafTable, infos: Mapping[Path, ParameterInfo], options: SaveOptions) -> list[_Leaf]:
    leaves: list[_Leaf] = []
    problems: list[str] = []
    for path, value in table.items():
        try:
            leaves.append(_examine(path, value, infos.get(path), options))
        except UnsupportedLeafError as error:
            problems.append(str(error))
    problems += [f'{leaf_name(path)}: {text}' for path, text in _spec_lookalikes(table)]
    if problems:
        raise UnsupportedLeafError(lines('the state cannot be saved as it is:', *problems, between='\n  '))
    return leaves


def _spec_lookalikes(table: LeafTable) -> list[tuple[Path, str]]:
    """Subtrees that every reader of the format would take for a stored array."""
    children: dict[Path, set[str]] = {}
    # Hardly any state has such a key, which is seen in a fifth of the time.
    if not any('kvstore' in path for path in table):
        return []
    for path in table:
        for length in range(len(path)):
            children.setdefault(path[:length], set()).add(path[length])
    text = 'a subtree with the keys driver, kvstore and metadata reads as a stored array. Rename one of the keys.'
    return [(path, text) for path, names in children.items() if names >= {'driver', 'kvstore', 'metadata'}]


def _examine(path: Path, value: Any, info: ParameterInfo | None, options: SaveOptions) -> _Leaf:
    name = leaf_name(path)
    value, target = leaf_to_save(path, value)
    _check_path(path, name, target)
    if target.dtype is None:
        return _Leaf(path, value, target, None, name, name, True, 0)
    try:
        dtype_from_name(name_of(target.dtype))
    except KeyError:
        raise UnsupportedLeafError(
            f'{name}: {type(value).__name__} of dtype {target.dtype} cannot be saved: a checkpoint holds bool, integers of 2 to '
            '64 bits, floats of 4 to 64 bits, complex64 and complex128. Convert it to one of these, or mark the field static.'
        ) from None
    whole = getattr(value, 'is_fully_addressable', True) or getattr(value, 'is_fully_replicated', False)
    dtype = cast_dtype(path, target.dtype, options.cast)
    array_name = info.array_name if info is not None and info.name else name
    return _Leaf(path, value, target, dtype, name, array_name, whole, math.prod(target.shape) * dtype.itemsize)


def _check_path(path: Path, name: str, target: LeafTemplate) -> None:
    """Rejects leaves that could be written and never read again."""
    if len(path) > _MAX_DEPTH or len(target.shape) > _MAX_RANK:
        raise UnsupportedLeafError(
            f'{name[:200]}: nested {len(path)} deep with {len(target.shape)} dimensions, the format holds '
            f'{_MAX_DEPTH} and {_MAX_RANK}. Flatten the state.'
        )
    # Most names are ASCII, which is a fast check.
    if not name.isascii():
        _check_unicode(name)
    if '__msgpack_chunked_array__' in path:
        raise UnsupportedLeafError(f'{name}: Flax uses this key for split arrays. Rename it.')


def _check_unicode(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedLeafError(
            f'{name!r}: the key is not valid Unicode text ({error.reason}). Rename it.'
        ) from error


def _stored_paths(
    leaves: Sequence[_Leaf], options: SaveOptions, assignment: WriteAssignment, rule: Mapping[Path, bool]
) -> set[Path]:
    """The leaves that are stored as arrays: those that are too large, or that process 0 does not hold whole.

    Empty arrays and scalars always go inline, since zarr has no chunk of size 0 and a scalar cannot be split. Leaves that T5X
    inlines by ``rule`` go inline whatever their size.
    """
    stored: set[Path] = set()
    total = 0
    # Of equal size, the first of the table; in a job of several processes it is sorted by path.
    for leaf in sorted(leaves, key=operator.attrgetter('nbytes')):
        if leaf.dtype is None:
            continue
        at_hand = not is_jax_array(leaf.value) or assignment.on_leader(leaf.value)
        t5x_inlines = rule.get(leaf.path)
        must_inline = leaf.nbytes == 0 or (
            at_hand and (leaf.target.shape == () or (t5x_inlines is True and leaf.whole))
        )
        limit = options.inline_bytes
        if t5x_inlines is None and leaf.nbytes > limit and _is_optimizer_vector(leaf):
            limit = max(limit, options.vector_bytes)
        fits = leaf.whole and at_hand and leaf.nbytes <= limit and total + leaf.nbytes <= options.inline_total_bytes
        if must_inline or fits:
            total += leaf.nbytes
        else:
            stored.add(leaf.path)
    return stored


def _is_optimizer_vector(leaf: _Leaf) -> bool:
    """Whether T5X's partitioners probably give a leaf no axes, as for the factors of Adafactor's second moments."""
    is_vector = len(leaf.target.shape) <= 1 or not _FACTORS.isdisjoint(leaf.path)
    return is_vector and leaf.path[:2] == _OPTIMIZER_STATE


def _directories(leaves: Sequence[_Leaf]) -> dict[Path, str]:
    """The directory of each stored leaf. If a transform gives two leaves one name, the first gets it."""
    names: dict[Path, str] = {}
    taken: set[str] = set()
    for leaf in leaves:
        candidates = [leaf.array_name, leaf.name]
        name = next((text for text in candidates if text not in taken), None)
        while name is None or name in taken:
            name = f'{candidates[-1]}~{len(taken)}'
            candidates.append(name)
        names[leaf.path] = name
        taken.add(name)
    by_name = array_dirs(names.values())
    return {path: by_name[name] for path, name in names.items()}


def _refuse_local(leaves: Sequence[_Leaf], count: int) -> None:
    """Rejects host-local arrays in a job of several processes, since each process has different values of them."""
    local = [leaf for leaf in leaves if is_jax_array(leaf.value) and leaf.value.is_fully_addressable]
    if local:
        names = [f'{leaf.name} {leaf.target.shape} on {leaf.value.sharding}' for leaf in local[:20]]
        names += [f'and {len(local) - 20} more'] if len(local) > 20 else []
        head = f'these arrays lie on this process alone, and each of the {count} processes has its own:'
        cure = (
            'Make them global: create them in a jitted function with out_shardings over the mesh of all '
            'processes, or with jax.make_array_from_process_local_data; values that are the same everywhere may also be '
            'given as numpy arrays or numbers, which are taken from process 0.'
        )
        raise UnsupportedLeafError(lines(lines(head, *names, between='\n  '), cure))


def _plan_array(leaf: _Leaf, directory: str, options: SaveOptions, assignment: WriteAssignment) -> ArrayWrite:
    dtype = np.dtype(np.void) if leaf.dtype is None else leaf.dtype
    on_disk = stored_dtype(dtype)
    shape, value = leaf.target.shape, leaf.value
    if is_jax_array(value):
        chunk_shape = assignment.chunk_shape(value, on_disk.itemsize, options.chunk_bytes)
        shards = assignment.shards_of(value)
    else:
        # Host arrays are written by process 0.
        chunk_shape = chunk_shape_for(shape, shape, on_disk.itemsize, options.chunk_bytes, 1)
        shards = [HeldShard(-1, Box.whole(shape), (0,))]
    metadata = {'chunks': chunk_shape, 'compressor': CODECS[options.codec]}
    array = StoredArray(directory, shape, on_disk, metadata=metadata)
    grid = array.grid
    chunks: list[ChunkWrite] = []
    for shard in shards:
        boxes = assignment.chunks_of_this_process(shard, grid, on_disk.itemsize)
        # For a shard at the array's origin both boxes are one object, which halves memory and time.
        is_shifted = any(shard.box.start)
        chunks += [ChunkWrite(box, shard.index, box.relative_to(shard.box) if is_shifted else box) for box in boxes]
    return ArrayWrite(leaf.path, leaf.value, dtype, array, tuple(chunks))


def _facts(leaves: Sequence[_Leaf], writes: Sequence[ArrayWrite]) -> TreeFacts:
    return TreeFacts(
        empty={leaf.path: leaf.target.example.kind for leaf in leaves if leaf.target.kind == 'empty'},
        python={leaf.path: _python_name(leaf) for leaf in leaves if leaf.target.kind == 'scalar'},
        keys={leaf.path: leaf.target.impl for leaf in leaves if leaf.target.kind == 'key'},
        text={leaf.path: str.__str__(leaf.target.example) for leaf in leaves if leaf.target.kind == 'text'},
        stored={write.array.location: write.dtype.name for write in writes if write.dtype != write.array.dtype},
    )


def _python_name(leaf: _Leaf) -> str:
    return '' if leaf.target.python is None else base_number(leaf.target.python).__name__

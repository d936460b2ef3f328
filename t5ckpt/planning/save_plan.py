"""Plans a save: which leaves go into the manifest, and which chunks of the others this process writes.

``plan_save`` decides for each leaf of the table whether it is written inline into the manifest or stored as a zarr array,
with which chunks, from which shards of this process. It reads no device and no file.

Inline or stored: an inline leaf takes 13 us and no file, a zarr array 750 us and two files (10,000 leaves of 1 KB: 0.13 s
compared with 7.5 s). So small leaves of which this process holds all values go inline, smallest first, up to a total size. T5X
reads inline leaves everywhere it reads stored ones.

The reverse is not true: T5X inlines a leaf whose mesh axes are None, whatever its size, and cannot restore such a leaf when
it is stored. With a partitioner, ``t5x_inlines`` names these leaves. Without one, the vectors of the optimizer state
(``state/param_states``, such as Adafactor's v_row and v_col, to which T5X gives no axes) go inline up to ``vector_bytes``.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.core.leaf_path import Path
from t5ckpt.core.protocols import ParameterInfo
from t5ckpt.core.text import lines
from t5ckpt.errors import DisagreementError, UnsupportedLeafError
from t5ckpt.format.array_dirs import array_dirs
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.checksum import digest
from t5ckpt.format.chunk_grid import Box
from t5ckpt.format.codecs import CODECS, takes
from t5ckpt.format.dtypes import stored_dtype
from t5ckpt.format.facts import TreeFacts
from t5ckpt.format.zarray import zarray_file
from t5ckpt.planning.casts import Cast, leaves_after_cast
from t5ckpt.planning.chunk_shape import DEFAULT_CHUNK_BYTES
from t5ckpt.planning.write_assignment import ChunkWrite, WriteAssignment
from t5ckpt.tree.leaves import LeafToSave, is_jax_array, processes_of

_OPTIMIZER_STATE = ('state', 'param_states')
_FACTORS = frozenset({'v_row', 'v_col'})
# Of each process. The cure comes after them.
_MAX_DIFF_LINES = 8
_ALL_OF_PROCESS = ', all of process '


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


@dataclasses.dataclass(frozen=True)
class ArrayWrite:
    """One stored leaf. ``value`` is the caller's array, ``dtype`` its dtype after the cast, ``array.disk_dtype`` the one on disk.

    ``boxes_of_others`` are those of the chunks that are assigned to other processes, see ``WriteAssignment.with_copies``.
    """

    path: Path
    name: str
    value: Any
    dtype: np.dtype
    array: StoredArray
    chunks: tuple[ChunkWrite, ...]
    boxes_of_others: frozenset[Box] = frozenset()

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk on disk, uncompressed."""
        return math.prod(self.array.metadata['chunks']) * self.array.disk_dtype.itemsize

    @property
    def chunk_files(self) -> list[str]:
        """The files of ``chunks``, relative to the checkpoint's directory."""
        grid, location = self.array.grid, self.array.location
        return [f'{location}/{grid.key(grid.index_of(chunk.box))}' for chunk in self.chunks]

    def files_of_others(self, *, with_metadata: bool) -> list[str]:
        """Those of ``chunk_files`` that are assigned to other processes and, before them, the metadata if these write it."""
        chunks = zip(self.chunk_files, self.chunks, strict=True)
        files = [file for file, chunk in chunks if chunk.box in self.boxes_of_others]
        return [zarray_file(self.array), *files] if with_metadata else files


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """The leaves to write, those of the manifest with the dtype after the cast; ``tree_facts`` becomes ``Facts.tree``."""

    writes: tuple[ArrayWrite, ...]
    inline: tuple[LeafToSave, ...]
    tree_facts: TreeFacts


def plan_save(
    given: Sequence[LeafToSave],
    infos: Mapping[Path, ParameterInfo],
    options: SaveOptions,
    assignment: WriteAssignment,
    t5x_inlines: Mapping[Path, bool] | None = None,
) -> SavePlan:
    """Plans a save.

    Args:
      given: the leaves, after save transforms.
      infos: by path, for leaves that have one.
      options: see :class:`SaveOptions`.
      assignment: assigns the chunks of shards that several processes hold.
      t5x_inlines: by path, whether T5X writes the leaf into the manifest, where that is known.

    Raises:
      UnmatchedPattern: the cast selects no leaf.
    """
    leaves = leaves_after_cast(given, options.cast)
    if assignment.count > 1:
        # Chunks are assigned leaf by leaf, so all processes need the same order, which dicts do not guarantee.
        leaves = sorted(leaves, key=operator.attrgetter('path'))
    stored = _stored_paths(leaves, options, assignment, t5x_inlines or {})
    arrays = [leaf for leaf in leaves if leaf.path in stored]
    directories = _directories(arrays, infos)
    writes = tuple(plan_array(leaf, directories[leaf.path], options, assignment) for leaf in arrays)
    inline = tuple(leaf for leaf in leaves if leaf.path not in stored and leaf.kind not in ('empty', 'text'))
    return SavePlan(writes, inline, _facts(given, writes))


def _stored_paths(
    leaves: Sequence[LeafToSave], options: SaveOptions, assignment: WriteAssignment, t5x_inlines: Mapping[Path, bool]
) -> set[Path]:
    """The leaves to store as arrays: those too large to inline, and those that process 0 does not hold completely.

    Empty arrays go inline, since zarr has no chunk of size 0, and so do scalars that process 0 holds. A leaf that process 0 holds
    completely, and of which ``t5x_inlines`` is True, goes inline whatever its size.
    """
    stored: set[Path] = set()
    total = 0
    is_single = assignment.count == 1
    # Leaves of equal size stay in the order of the table, which is sorted by path in a job of several processes.
    arrays = [(math.prod(leaf.shape) * leaf.dtype.itemsize, leaf) for leaf in leaves if leaf.dtype is not None]
    for nbytes, leaf in sorted(arrays, key=operator.itemgetter(0)):
        # A job of one process holds every value.
        on_leader = is_single or not is_jax_array(leaf.value) or 0 in processes_of(leaf.value.sharding)
        leader_has_all = on_leader and leaf.is_whole_per_process
        in_t5x = t5x_inlines.get(leaf.path)
        must_inline = nbytes == 0 or (on_leader and leaf.shape == ()) or (leader_has_all and in_t5x is True)
        limit = options.inline_bytes
        if in_t5x is None and nbytes > limit and _is_optimizer_vector(leaf):
            limit = max(limit, options.vector_bytes)
        fits = nbytes <= limit and total + nbytes <= options.inline_total_bytes
        if must_inline or (leader_has_all and fits):
            total += nbytes
        else:
            stored.add(leaf.path)
    return stored


def _is_optimizer_vector(leaf: LeafToSave) -> bool:
    """Whether T5X's partitioners probably give a leaf no axes, as for the factors of Adafactor's second moments."""
    is_vector = len(leaf.shape) <= 1 or not _FACTORS.isdisjoint(leaf.path)
    return is_vector and leaf.path[:2] == _OPTIMIZER_STATE


def _directories(leaves: Sequence[LeafToSave], infos: Mapping[Path, ParameterInfo]) -> dict[Path, str]:
    """The directory of each stored leaf. If a transform gives two leaves one name, the first gets it."""
    paths: dict[str, Path] = {}
    for leaf in leaves:
        info = infos.get(leaf.path)
        name = info.array_name if info is not None and info.name else leaf.name
        if name in paths:
            name = leaf.name
        while name in paths:
            name = f'{name}~{len(paths)}'
        paths[name] = leaf.path
    return {paths[name]: directory for name, directory in array_dirs(paths).items()}


def plan_array(leaf: LeafToSave, directory: str, options: SaveOptions, assignment: WriteAssignment) -> ArrayWrite:
    """Plans the write of a leaf, with its dtype after the cast, as an array in a directory.

    Raises:
      UnsupportedLeafError: a chunk is too large for the codec.
    """
    on_disk = stored_dtype(leaf.dtype)
    chunk_shape, chunks, boxes_of_others = assignment.chunks_of(leaf, on_disk.itemsize, options.chunk_bytes)
    metadata = {'chunks': chunk_shape, 'compressor': CODECS[options.codec]}
    stored = StoredArray(directory, leaf.shape, leaf.dtype, on_disk, metadata)
    write = ArrayWrite(leaf.path, leaf.name, leaf.value, leaf.dtype, stored, chunks, boxes_of_others)
    if not takes(metadata['compressor'], write.chunk_bytes):
        raise UnsupportedLeafError(
            f'{leaf.name}: {options.codec} encodes chunks of less than 2 GiB, and those of {leaf.shape} have '
            f"{write.chunk_bytes:,} bytes. Pass compression='auto', or a smaller chunk_bytes."
        )
    return write


def _facts(leaves: Sequence[LeafToSave], writes: Sequence[ArrayWrite]) -> TreeFacts:
    notes: dict[str, dict[Path, str]] = {'empty': {}, 'scalar': {}, 'key': {}, 'text': {}}
    for leaf in leaves:
        if leaf.kind in notes:
            notes[leaf.kind][leaf.path] = leaf.note
    stored = {write.array.location: write.dtype.name for write in writes if write.dtype != write.array.disk_dtype}
    return TreeFacts(notes['empty'], notes['scalar'], notes['key'], notes['text'], stored)


def plan_text(plan: SavePlan, header: Sequence[str]) -> str:
    """One line per leaf, after the header. Excludes the chunks of this process.

    Python numbers and host arrays may differ between processes; those of process 0 are saved.
    """
    shardings: dict[int, str] = {}
    leaves = [f'{write.name}: {_leaf_text(write, shardings)}' for write in (*plan.writes, *plan.inline)]
    return '\n'.join([*header, *sorted(leaves)])


def _leaf_text(write: ArrayWrite | LeafToSave, shardings: dict[int, str]) -> str:
    value = write.value
    if value is None:
        return 'None'
    sharding = getattr(value, 'sharding', None)
    if sharding is None:
        memory = 'host'
    else:
        # Many leaves share few shardings, and formatting one is slow.
        if id(sharding) not in shardings:
            shardings[id(sharding)] = f'{sharding} on {_devices_text(sharding)}'
        memory = shardings[id(sharding)]
    shape = tuple(getattr(value, 'shape', ()))
    chunks = tuple(write.array.metadata['chunks']) if isinstance(write, ArrayWrite) else 'inline'
    dtype = '' if write.dtype is None else write.dtype.name
    return f'{dtype} {shape} in {chunks}, {memory}'


def _devices_text(sharding: Any) -> str:
    """The devices in their order, and the process that has all of them, such as a stage of a pipeline.

    The text of a mesh has only their number.
    """
    mesh = getattr(sharding, 'mesh', None)
    devices = sharding.device_set if mesh is None else mesh.devices.flat
    ids = [device.id for device in devices]
    processes = processes_of(sharding)
    owner = f'{_ALL_OF_PROCESS}{next(iter(processes))}' if len(processes) == 1 else ''
    return f'devices {digest(str(sorted(ids) if mesh is None else ids).encode())}{owner}'


def difference(first: str, other: str, process: int) -> DisagreementError:
    """The error for a process whose plan differs from process 0's."""
    shown = [*_only_in(first, other, '-', 0), *_only_in(other, first, '+', process)]
    listed = lines('the processes were asked to save different things; nothing was written:', *shown, between='\n  ')
    cures = ['Every process has to save the same tree, to the same directory, as the same step.']
    if f'{_ALL_OF_PROCESS}{process}' in listed:
        cures.append(
            f'Arrays on devices of process {process} only are its own, and other processes have others. Make them global: create '
            'them in a jitted function with out_shardings over the mesh of all processes, or with '
            'jax.make_array_from_process_local_data. Values that are the same everywhere may be NumPy arrays, which are taken '
            'from process 0; for jax.pmap: jax.device_get(flax.jax_utils.unreplicate(state)).'
        )
    return DisagreementError(lines(listed, *cures))


def _only_in(text: str, other: str, sign: str, process: int) -> list[str]:
    known = {*other.splitlines()}
    found = [f'{sign}{line}' for line in text.splitlines() if line not in known]
    more = len(found) - _MAX_DIFF_LINES
    return [f'{sign * 3} process {process}', *found[:_MAX_DIFF_LINES], *[f'... and {more} more lines'] * (more > 0)]

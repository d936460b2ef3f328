"""Parses and writes the TensorStore specs with which a manifest refers to stored arrays.

A spec is parsed field by field against an allow-list of the fields that T5X writes. It is never passed to TensorStore, which
would open any file or host that it names.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from t5ckpt.core.keys import is_inside
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import CorruptCheckpointError, UnsafeSpecError, UnsupportedFormatError
from t5ckpt.format.chunk_grid import ChunkGrid
from t5ckpt.format.dtypes import STORED_AS, dtype_from_name, dtype_from_typestr, name_of, stored_dtype
from t5ckpt.format.facts import TreeFacts
from t5ckpt.tree.leaf_table import MAX_RANK, Empty, LeafTable

_SPEC_KEYS = {'driver', 'kvstore', 'metadata'}
_ALLOWED_SPEC_KEYS = _SPEC_KEYS | {
    'assume_metadata',
    'cache_pool',
    'context',
    'create',
    'data_copy_concurrency',
    'delete_existing',
    'dtype',
    'fill_missing_data_reads',
    'key_encoding',
    'open',
    'path',
    'rank',
    'recheck_cached_data',
    'recheck_cached_metadata',
    'schema',
    'store_data_equal_to_fill_value',
    'transform',
}
_ALLOWED_KVSTORES = {'file', 'gcs', 'gfile', 'memory', 's3'}
_KEPT_METADATA = ('chunks', 'compressor', 'dimension_separator', 'dtype', 'filters', 'order')
_IDENTITY_KEYS = {'input_exclusive_max', 'input_inclusive_min', 'input_labels', 'input_rank', 'input_shape'}


class ArrayLayout(enum.Enum):
    """The layout of an array in a checkpoint: zarr chunks in files or in an OCDBT database, or bytes of a file."""

    ZARR = enum.auto()
    ZARR3 = enum.auto()
    ZARR_IN_OCDBT = enum.auto()
    ZARR3_IN_OCDBT = enum.auto()
    BYTE_RANGE = enum.auto()

    @classmethod
    def of_zarr(cls, *, zarr3: bool, ocdbt: bool) -> ArrayLayout:
        """The layout of zarr chunks."""
        if ocdbt:
            return cls.ZARR3_IN_OCDBT if zarr3 else cls.ZARR_IN_OCDBT
        return cls.ZARR3 if zarr3 else cls.ZARR

    @property
    def driver(self) -> str:
        """TensorStore's driver for zarr chunks."""
        return 'zarr3' if self in (ArrayLayout.ZARR3, ArrayLayout.ZARR3_IN_OCDBT) else 'zarr'

    @property
    def metadata_file(self) -> str:
        """The file, or the key of a database, with the metadata of zarr chunks."""
        return 'zarr.json' if self.driver == 'zarr3' else '.zarray'

    @property
    def has_chunk_files(self) -> bool:
        """Whether the array is a directory with a file for each chunk."""
        return self in (ArrayLayout.ZARR, ArrayLayout.ZARR3)

    @property
    def is_in_database(self) -> bool:
        """Whether the chunks are values in an OCDBT database."""
        return self in (ArrayLayout.ZARR_IN_OCDBT, ArrayLayout.ZARR3_IN_OCDBT)


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """A leaf whose values are stored in an array next to the manifest.

    Attributes:
      location: relative to the checkpoint's directory, '/'-separated, without a trailing slash: the directory of the chunks, the
        file, or a database's directory and the prefix of the array's keys in it, with '//' between them.
      shape: of the array.
      dtype: on disk; a reader may view or convert it (``TreeFacts``, version 2).
      bits_of: the dtype that the stored bits represent, if it is not ``dtype`` (bfloat16 in version 2).
      metadata: the zarr metadata in the manifest: ``chunks``, ``compressor``, ``order``, ...; ``offset`` and ``file_bytes`` of a
        range of bytes.
      layout: of the values.
      stores_all: whether its writer stores also the chunks that equal the fill value of the array, so that an absent one is lost.
    """

    location: str
    shape: tuple[int, ...]
    dtype: np.dtype
    bits_of: np.dtype | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    layout: ArrayLayout = ArrayLayout.ZARR
    stores_all: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in memory, uncompressed."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_byte_range(self) -> bool:
        """Whether the values are a range of bytes of a file, in C order."""
        return self.layout is ArrayLayout.BYTE_RANGE

    @property
    def root(self) -> str:
        """The file or directory of the checkpoint that holds the array: ``location``, or the directory of its database."""
        return self.location.partition('//')[0] if self.layout.is_in_database else self.location

    @property
    def key_prefix(self) -> str:
        """The prefix of the array's keys in its database."""
        prefix = self.location.partition('//')[2]
        return f'{prefix}/' if prefix else ''

    @property
    def grid(self) -> ChunkGrid:
        """The chunk grid by the manifest, with keys as t5ckpt writes them; needs ``chunks`` in the metadata."""
        return ChunkGrid(self.shape, tuple(self.metadata['chunks']))


def is_spec(value: Any) -> bool:
    """Whether a map is a TensorStore spec and not a subtree (T5X's own test, state_utils.tensorstore_leaf)."""
    return isinstance(value, Mapping) and value.keys() >= _SPEC_KEYS


def spec_of(array: StoredArray, driver: str) -> dict[str, Any]:
    """The spec that represents a stored array in the manifest.

    Args:
      array: with ``chunks`` and ``compressor`` in its metadata.
      driver: ``'file'`` or ``'gcs'``, the two that real T5X accepts. ``gcs`` gets T5X's dummy bucket, so that the checkpoint does
        not depend on its location.
    """
    kvstore: dict[str, Any] = {'driver': driver, 'path': f'{array.location}/'}
    if driver == 'gcs':
        kvstore['bucket'] = 't5x-dummy-bucket'
    metadata = {
        'chunks': list(array.metadata['chunks']),
        'compressor': array.metadata['compressor'],
        'shape': list(array.shape),
    }
    return {'driver': 'zarr', 'dtype': name_of(array.dtype), 'kvstore': kvstore, 'metadata': metadata}


def parse_spec(spec: Mapping[str, Any], version: int, name: str) -> StoredArray:
    """Parses a spec against the allow-list of fields that T5X has ever written.

    Accepted: driver ``zarr``; kvstore ``file``, ``gfile``, ``gcs``, ``s3`` or ``memory``, whose driver and bucket are ignored;
    a relative path in ``kvstore`` or, before tensorstore 0.1.14, at the top, with or without a trailing slash; ``metadata``
    with a shape and any field of zarr v2; an identity ``transform``.

    Raises:
      UnsafeSpecError: another driver, a nested spec, an absolute path or one with ``..``.
      CorruptCheckpointError: fields missing or of the wrong type.
      UnsupportedFormatError: a transform that is not the identity, or an unknown dtype.
    """
    unknown = sorted(map(str, set(spec) - _ALLOWED_SPEC_KEYS))
    if unknown or spec['driver'] != 'zarr':
        raise UnsafeSpecError(
            f'{name}: spec with driver {spec["driver"]!r:.40} and fields {unknown} is not one that T5X writes; only '
            'zarr arrays inside the checkpoint are read.'
        )
    location = location_of(spec, name)
    metadata = spec['metadata']
    if not isinstance(metadata, Mapping):
        raise CorruptCheckpointError(f'{name}: spec metadata is {type(metadata).__name__}, expected a map.')
    shape = shape_of(metadata.get('shape'), name)
    _check_transform(spec.get('transform'), shape, name)
    kept = {key: metadata[key] for key in _KEPT_METADATA if key in metadata}
    _check_metadata(kept, shape, name)
    dtype = _spec_dtype(spec.get('dtype'), metadata.get('dtype'), name)
    bits_of = dtype_from_name('bfloat16') if version in (1, 2) and dtype == np.uint16 else None
    return StoredArray(location, shape, dtype, bits_of, kept)


def untyped_specs(state: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The specs of a decoded manifest without a dtype, both at the top and in their metadata.

    For these, TensorStore takes the dtype from the array's ``.zarray``, and a reader has to do the same.
    """
    for key, value in state.items():
        if is_spec(value):
            metadata = value['metadata']
            if 'dtype' not in value and not (isinstance(metadata, Mapping) and 'dtype' in metadata):
                yield (*path, key), value
        elif isinstance(value, dict):
            yield from untyped_specs(value, (*path, key))


def typed_by_zarray(spec: dict[str, Any], name: str, read: Callable[[str], bytes]) -> None:
    """Adds the dtype in the array's ``.zarray`` to a spec without one; ``read`` takes the file's name.

    If the ``.zarray`` has none either, the spec is unchanged and ``parse_spec`` raises the error.
    """
    text = read(f'{location_of(spec, name)}/.zarray')
    try:
        typestr = json.loads(text).get('dtype')
    except (ValueError, AttributeError, RecursionError):
        return
    if isinstance(typestr, str) and isinstance(spec['metadata'], Mapping):
        spec['metadata'] = {**spec['metadata'], 'dtype': typestr}


def _check_metadata(metadata: Mapping[str, Any], shape: tuple[int, ...], name: str) -> None:
    """Checks the metadata that replaces a missing ``.zarray``; TensorStore gets only these fields."""
    chunks = metadata.get('chunks', [1] * len(shape))
    good = _is_list_of_sizes(chunks) and len(chunks) == len(shape) and all(size > 0 for size in chunks)
    codec = metadata.get('compressor')
    good = good and (codec is None or (isinstance(codec, Mapping) and all(map(_is_plain_item, codec.items()))))
    filters: Any = metadata.get('filters') or ()
    good = good and isinstance(filters, (list, tuple)) and all(isinstance(codec, Mapping) for codec in filters)
    good = good and all(isinstance(metadata.get(key, ''), str) for key in ('dimension_separator', 'dtype', 'order'))
    if not good:
        raise CorruptCheckpointError(
            f'{name}: the metadata in the spec is not zarr v2 metadata for shape {shape}: {metadata!r:.200}.'
        )


def _is_plain_item(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and (item[1] is None or isinstance(item[1], (str, int, float)))


def _is_list_of_sizes(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**62 for size in value
    )


def shape_of(value: Any, name: str) -> tuple[int, ...]:
    """The shape of an array by its metadata. ``reading/size_limits.py`` limits its size.

    Raises:
      CorruptCheckpointError: it is not a list of sizes.
    """
    if not _is_list_of_sizes(value) or len(value) > MAX_RANK:
        raise CorruptCheckpointError(f'{name}: metadata has shape {value!r:.120}, expected a list of sizes.')
    return tuple(value)


def location_of(spec: Mapping[str, Any], name: str) -> str:
    """The location of the array of a spec, see :class:`StoredArray`; raises as :func:`parse_spec`."""
    kvstore = spec['kvstore']
    if not isinstance(kvstore, Mapping) or str(kvstore.get('driver')) not in _ALLOWED_KVSTORES or 'base' in kvstore:
        raise UnsafeSpecError(f'{name}: key-value store {kvstore!r:.120} is not one of {sorted(_ALLOWED_KVSTORES)}.')
    parts = [part for part in (kvstore.get('path'), spec.get('path')) if part is not None]
    if not parts or not all(isinstance(part, str) for part in parts):
        raise CorruptCheckpointError(f'{name}: the spec has no path, neither in "kvstore" nor at the top.')
    path = '/'.join(part.rstrip('/') for part in parts)
    if not is_inside(path):
        raise UnsafeSpecError(
            f'{name}: array path {path!r:.120} leads outside the checkpoint; only relative paths inside it are read.'
        )
    return path


def _spec_dtype(dtype_name: Any, typestr: Any, name: str) -> np.dtype:
    if isinstance(dtype_name, str):
        try:
            return dtype_from_name(dtype_name)
        except KeyError:
            raise UnsupportedFormatError(
                f'{name}: spec has the dtype {dtype_name!r:.60}, which t5ckpt does not know.'
            ) from None
    if not isinstance(typestr, str):
        raise CorruptCheckpointError(f'{name}: neither its spec nor its metadata or .zarray has a dtype.')
    dtype = dtype_from_typestr(typestr)
    if dtype is None:
        raise UnsupportedFormatError(f'{name}: its .zarray has the dtype {typestr!r:.40}, which t5ckpt does not know.')
    return dtype


def _check_transform(transform: Any, shape: tuple[int, ...], name: str) -> None:
    """Accepts the identity that ``ts.Spec.to_json`` adds; any other transform selects other elements, which is not supported."""
    if transform is None:
        return
    identity = isinstance(transform, Mapping) and set(transform) <= _IDENTITY_KEYS
    if identity:
        ends = transform.get('input_exclusive_max', transform.get('input_shape', list(shape)))
        starts = transform.get('input_inclusive_min', [0] * len(shape))
        identity = isinstance(ends, (list, tuple)) and starts == [0] * len(shape)
        # ``to_json`` writes an implicit bound as a list of one number.
        identity = identity and [
            end[0] if isinstance(end, (list, tuple)) and len(end) == 1 else end for end in ends
        ] == list(shape)
    if not identity:
        raise UnsupportedFormatError(f'{name}: spec has the transform {transform!r:.200}; only the identity is read.')


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A stored leaf of a checkpoint; ``dtype`` is the dtype after reading, ``array.dtype`` the dtype on disk.

    A restore transform moves it. It is not a mapping, so that functions that rebuild nested dicts treat it as one leaf.
    """

    array: StoredArray
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self.array.shape

    def __copy__(self) -> StoredLeaf:
        # The facts of a leaf follow its identity.
        return self

    def __deepcopy__(self, memo: object) -> StoredLeaf:
        return self


def checkpoint_leaves(table: LeafTable, version: int, tree_facts: TreeFacts) -> LeafTable:
    """Parses the specs of a (possibly transformed) manifest.

    Args:
      table: with specs, StoredArray, StoredLeaf, arrays, scalars, None, ``Empty`` and text, see :func:`with_facts`.
      version: the manifest's.
      tree_facts: of the checkpoint.

    Returns:
      A table with values of type StoredLeaf, array, None, Empty and str.

    Raises:
      FormatError: a spec that is not accepted, see ``parse_spec``.
    """
    return {
        path: stored_leaf(value, version, tree_facts, path)
        if isinstance(value, StoredArray) or (not isinstance(value, np.ndarray) and is_spec(value))
        else value
        for path, value in table.items()
    }


def with_facts(table: LeafTable, tree_facts: TreeFacts) -> LeafTable:
    """Adds the strings and the empty containers in the facts to a table."""
    full: LeafTable = {**tree_facts.text, **table} if tree_facts.text else table
    if not tree_facts.empty:
        return full
    occupied = {path[:length] for path in full for length in range(1, len(path) + 1)}
    empties = {path: Empty(kind) for path, kind in tree_facts.empty.items() if path not in occupied}
    return full | empties


def stored_leaf(spec: StoredArray | Mapping[str, Any], version: int, tree_facts: TreeFacts, path: Path) -> StoredLeaf:
    """Parses one spec, unless it is parsed, and determines the dtype after reading."""
    name = leaf_name(path)
    array = spec if isinstance(spec, StoredArray) else parse_spec(spec, version, name)
    if array.bits_of is not None:
        return StoredLeaf(array, array.bits_of)
    dtype_name = tree_facts.stored.get(array.location)
    if dtype_name is None:
        return StoredLeaf(array, array.dtype)
    try:
        dtype = dtype_from_name(dtype_name)
    except KeyError:
        dtype = np.dtype(np.void)
    if dtype.name not in STORED_AS or stored_dtype(dtype) != array.dtype:
        raise CorruptCheckpointError(
            f'{name}: its dtype in the facts is {dtype_name!r:.40}, which is never stored as {array.dtype.name}. '
            f'{CURE_OF_DAMAGE}'
        )
    return StoredLeaf(array, dtype)

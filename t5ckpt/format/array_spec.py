"""Parses and writes the TensorStore specs with which a manifest refers to stored arrays.

A spec is parsed field by field against an allow-list of the fields that T5X writes. It is never passed to TensorStore, which
would open any file or host that it names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from t5ckpt.core.keys import is_inside
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import CorruptCheckpointError, UnsafeSpecError, UnsupportedFormatError, UnsupportedLeafError
from t5ckpt.format.chunk_grid import ChunkGrid
from t5ckpt.format.dtypes import DTYPES, STORED_AS, TYPESTRS, name_of
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
METADATA_FILES = {'zarr': '.zarray', 'zarr3': 'zarr.json'}
"""The file, or the key in a database, with the metadata of an array, by TensorStore's driver."""
# The values in a codec.
_PLAIN = str | int | float | None
_NO_VALUES = (
    ': a state transformation runs before arrays are read, so this leaf has only a shape and a dtype in it. Compute with '
    't5ckpt.open_checkpoint(path)[leaf][...] instead, and pass the result as fallback_state.'
)
_IDENTITY_KEYS = {'input_exclusive_max', 'input_inclusive_min', 'input_labels', 'input_rank', 'input_shape'}


@dataclasses.dataclass(frozen=True)
class StoredArray(NDArrayOperatorsMixin):
    """A leaf whose values are stored in an array next to the manifest.

    A restore transform moves it. It is not a mapping, so that functions that rebuild nested dicts treat it as one leaf. Whatever
    would compute with it raises UnsupportedLeafError.

    Attributes:
      location: relative to the checkpoint's directory, '/'-separated, without a trailing slash: the directory of the chunks, the
        file, or a database's directory and the prefix of the array's keys in it, with '//' between them.
      shape: of the array.
      dtype: after reading.
      disk_dtype: on disk. It differs for what ``TreeFacts.stored`` records, and for bfloat16 in version 2.
      metadata: the zarr metadata in the manifest: ``chunks``, ``compressor``, ``order``, ...; ``offset`` and ``file_bytes`` of a
        range of bytes.
      driver: ``'zarr'`` or ``'zarr3'`` (TensorStore's driver of the chunks, in files or in an OCDBT database), or ``'bytes'``, a
        range of bytes of a file, in C order.
      stores_all: whether an absent chunk is lost: the array has no fill value, or its writer stores also chunks that equal it.
    """

    location: str
    shape: tuple[int, ...]
    dtype: np.dtype
    disk_dtype: np.dtype
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    driver: str = 'zarr'
    stores_all: bool = False

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedLeafError(f'{self.location}{_NO_VALUES}')

    __array__ = __array_ufunc__ = __getitem__ = __float__ = __int__ = _refuse

    def __getattr__(self, name: str) -> Any:
        hint = f'. {self.location}{_NO_VALUES}' if hasattr(np.ndarray, name) and name[:1] != '_' else ''
        raise AttributeError(f'{type(self).__name__} has no attribute {name!r}{hint}')

    @property
    def nbytes(self) -> int:
        """Bytes in memory, uncompressed."""
        return math.prod(self.shape) * self.disk_dtype.itemsize

    @property
    def is_in_database(self) -> bool:
        """Whether the chunks are values in an OCDBT database."""
        return '//' in self.location

    @property
    def is_zarr_directory(self) -> bool:
        """Whether the array is a directory with ``.zarray`` and a file for each chunk."""
        return self.driver == 'zarr' and not self.is_in_database

    @property
    def root(self) -> str:
        """The file or directory of the checkpoint that holds the array: ``location``, or the directory of its database."""
        return self.location.partition('//')[0]

    @property
    def key_prefix(self) -> str:
        """The prefix of the array's keys in its database."""
        prefix = self.location.partition('//')[2]
        return f'{prefix}/' if prefix else ''

    @property
    def grid(self) -> ChunkGrid:
        """The chunk grid by the manifest, with keys as t5ckpt writes them; needs ``chunks`` in the metadata."""
        return ChunkGrid(self.shape, tuple(self.metadata['chunks']))

    def __copy__(self) -> StoredArray:
        # The facts of a leaf follow its identity.
        return self

    def __deepcopy__(self, memo: object) -> StoredArray:
        return self


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
    return {'driver': 'zarr', 'dtype': name_of(array.disk_dtype), 'kvstore': kvstore, 'metadata': layout_of(array)}


def layout_of(array: StoredArray) -> dict[str, Any]:
    """The metadata of a stored array, in types of JSON, that a spec has, and a ``.zarray``, too."""
    return {
        'chunks': list(array.metadata['chunks']),
        'compressor': array.metadata['compressor'],
        'shape': list(array.shape),
    }


def parse_spec(spec: Mapping[str, Any], name: str) -> StoredArray:
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
    # Of a spec without a dtype, that of the metadata.
    text = metadata.get('dtype') if spec.get('dtype') is None else spec['dtype']
    dtype = TYPESTRS.get(str(text))
    if dtype is None:
        raise UnsupportedFormatError(f'{name}: its spec has the dtype {text!r:.60}, which t5ckpt does not know.')
    return StoredArray(location, shape, dtype, dtype, kept)


def _check_metadata(metadata: Mapping[str, Any], shape: tuple[int, ...], name: str) -> None:
    """Checks the fields that are used without the ``.zarray``; ``format/zarray.py`` checks the others where it is missing."""
    chunks, codec = metadata.get('chunks', [1] * len(shape)), metadata.get('compressor')
    if not (
        is_list_of_sizes(chunks)
        and len(chunks) == len(shape)
        and all(chunks)
        and isinstance(codec, Mapping | None)
        and all(isinstance(key, str) and isinstance(value, _PLAIN) for key, value in (codec or {}).items())
    ):
        raise CorruptCheckpointError(
            f'{name}: the metadata in the spec is not zarr v2 metadata for shape {shape}: {metadata!r:.200}.'
        )


def is_list_of_sizes(value: Any) -> bool:
    """Whether a value in a file is a list of integers below 2**62."""
    return isinstance(value, (list, tuple)) and all(type(size) is int and 0 <= size < 2**62 for size in value)


def shape_of(value: Any, name: str) -> tuple[int, ...]:
    """The shape of an array by its metadata. ``reading/size_limits.py`` limits its size.

    Raises:
      CorruptCheckpointError: it is not a list of sizes.
      UnsupportedFormatError: the array has too many dimensions for TensorStore.
    """
    if not is_list_of_sizes(value):
        raise CorruptCheckpointError(f'{name}: metadata has shape {value!r:.120}, expected a list of sizes.')
    if len(value) > MAX_RANK:
        raise UnsupportedFormatError(
            f'{name}: the array has {len(value)} dimensions, and t5ckpt reads at most {MAX_RANK}. zarr-python reads up to 64.'
        )
    return tuple(value)


def location_of(spec: Mapping[str, Any], name: str) -> str:
    """The location of the array of a spec, see :class:`StoredArray`; raises as :func:`parse_spec`."""
    kvstore = spec['kvstore']
    if not isinstance(kvstore, Mapping) or str(kvstore.get('driver')) not in _ALLOWED_KVSTORES or 'base' in kvstore:
        raise UnsafeSpecError(f'{name}: key-value store {kvstore!r:.120} is not one of {sorted(_ALLOWED_KVSTORES)}.')
    parts = [part for part in (kvstore.get('path'), spec.get('path')) if part is not None]
    if {*map(type, parts)} != {str}:
        raise CorruptCheckpointError(f'{name}: the spec has no path, neither in "kvstore" nor at the top.')
    path = '/'.join(part.rstrip('/') for part in parts)
    if not is_inside(path):
        raise UnsafeSpecError(
            f'{name}: array path {path!r:.120} leads outside the checkpoint; only relative paths inside it are read.'
        )
    return path


def _check_transform(transform: Any, shape: tuple[int, ...], name: str) -> None:
    """Accepts the identity that ``ts.Spec.to_json`` adds; any other transform selects other elements, which is not supported."""
    if transform is None:
        return
    identity = isinstance(transform, Mapping) and set(transform) <= _IDENTITY_KEYS
    if identity:
        ends = transform.get('input_exclusive_max', transform.get('input_shape', list(shape)))
        starts = transform.get('input_inclusive_min', [0] * len(shape))
        identity = isinstance(ends, (list, tuple)) and len(ends) == len(shape) and starts == [0] * len(shape)
        # ``to_json`` writes an implicit bound as a list of one number.
        identity = identity and all(end in (size, [size]) for end, size in zip(ends, shape, strict=True))
    if not identity:
        raise UnsupportedFormatError(f'{name}: spec has the transform {transform!r:.200}; only the identity is read.')


def checkpoint_leaves(leaves: LeafTable, version: int, tree_facts: TreeFacts) -> LeafTable:
    """The leaves of a manifest, with the strings and the empty containers in the facts.

    Args:
      leaves: the manifest's, with specs, StoredArray, arrays, scalars, None and Empty.
      version: the manifest's.
      tree_facts: of the checkpoint.

    Returns:
      A table with values of type StoredArray, array, None, Empty and str.

    Raises:
      FormatError: a spec that is not accepted, see ``parse_spec``.
    """
    table: LeafTable = {**tree_facts.text, **leaves}
    occupied = {path[:length] for path in table for length in range(len(path) + 1)} if tree_facts.empty else ()
    table |= {path: Empty(kind) for path, kind in tree_facts.empty.items() if path not in occupied}
    return {
        path: _stored_array(value, version, tree_facts, path) if isinstance(value, dict) else value
        for path, value in table.items()
    }


def _stored_array(spec: Mapping[str, Any], version: int, tree_facts: TreeFacts, path: Path) -> StoredArray:
    """Parses a spec, and determines the dtype after reading."""
    name = leaf_name(path)
    array = parse_spec(spec, name)
    recorded = tree_facts.stored.get(array.location)
    if version in (1, 2) and array.dtype == np.uint16:
        recorded = 'bfloat16'
    elif recorded is None:
        return array
    elif STORED_AS.get(recorded) != array.dtype.name:
        raise CorruptCheckpointError(
            f'{name}: its dtype in the facts is {recorded!r:.40}, which is never stored as {array.dtype.name}. '
            f'{CURE_OF_DAMAGE}'
        )
    return dataclasses.replace(array, dtype=DTYPES[recorded])

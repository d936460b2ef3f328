"""What must hold of every checkpoint we write, so that real T5X can read it. Uses none of our code."""

import itertools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts

from support import independent_reader

_BESIDE = re.compile(r'integrity\.\d+(\..*)?|PINNED|DATASET_REMOVED|train_ds-\d{3,}-of-\d{3,}.*')
_SPEC_KEYS = {'driver', 'dtype', 'kvstore', 'metadata'}
_METADATA_KEYS = {'shape', 'chunks', 'compressor'}


def check(step_dir: pathlib.Path) -> dict[str, Any]:
    """Asserts every rule; returns 'a/b/c' -> leaf of the manifest (spec dict, array, numpy scalar or None)."""
    contents = independent_reader.manifest(step_dir)
    assert isinstance(contents, dict)
    assert set(contents) - {'t5ckpt'} == {'version', 'optimizer'}, sorted(contents)
    assert type(contents['version']) is int
    assert contents['version'] == 3
    assert isinstance(contents['optimizer'], dict)
    # A state of nothing but empty containers is the one empty dict that T5X loads.
    leaves = independent_reader.flat_leaves(contents['optimizer']) if contents['optimizer'] else {}
    directories: dict[str, str] = {}
    for key, leaf in leaves.items():
        if independent_reader.is_spec(leaf):
            path = check_spec(key, leaf)
            assert path not in directories, f'{key} and {directories[path]} share the directory {path}'
            directories[path] = key
            check_array(step_dir, key, leaf)
        else:
            check_inline(key, leaf)
    check_files(step_dir, {path.rstrip('/') for path in directories})
    return leaves


def check_axes(step_dir: pathlib.Path, rules: Callable[[str, tuple[int, ...]], Any], small: int = 16 * 1024) -> None:
    """T5X's rule for every leaf: one without axes is in the manifest, since T5X cannot restore it from an array.

    One with axes is an array, or small: T5X reads what is in the manifest everywhere.
    """
    for key, leaf in check(step_dir).items():
        if leaf is None:
            continue
        shape = tuple(leaf['metadata']['shape'] if independent_reader.is_spec(leaf) else leaf.shape)
        if rules(key, shape) is None:
            assert not independent_reader.is_spec(leaf), f'{key} {shape}: T5X cannot restore it, it has no mesh axes'
        elif not independent_reader.is_spec(leaf):
            assert leaf.nbytes <= small, f'{key} {shape}: {leaf.nbytes} bytes in the manifest'


def check_inline(key: str, leaf: Any) -> None:
    """T5X loads arrays, numpy scalars and nil."""
    assert leaf is None or isinstance(leaf, (np.ndarray, np.generic)), f'{key}: T5X cannot load {type(leaf)} {leaf!r}'


def check_spec(key: str, spec: dict[str, Any]) -> str:
    """The spec as T5X writes one; returns its path."""
    assert set(spec) == _SPEC_KEYS, f'{key}: {sorted(spec)}'
    assert spec['driver'] == 'zarr', key
    assert spec['dtype'] != 'uint16', f'{key}: T5X refuses uint16 on disk'
    kvstore = {name: value for name, value in spec['kvstore'].items() if name != 'path'}
    assert kvstore in ({'driver': 'file'}, {'driver': 'gcs', 'bucket': 't5x-dummy-bucket'}), f'{key}: {kvstore}'
    path = spec['kvstore']['path']
    assert path.endswith('/'), f'{key}: {path!r}'
    assert not path.startswith('/'), f'{key}: {path!r}'
    assert not {'', '.', '..'} & set(path.rstrip('/').split('/')), f'{key}: {path!r}'
    assert set(spec['metadata']) == _METADATA_KEYS, f'{key}: {sorted(spec["metadata"])}'
    json.dumps(spec)  # plain numbers and strings, nothing numpy
    parsed = ts.Spec(spec).to_json()
    assert {'chunks', 'compressor'} <= set(parsed['metadata']), f'{key}: T5X deletes both, and would fail: {parsed}'
    assert parsed['metadata']['shape'] == list(spec['metadata']['shape']), key
    return path


def check_array(step_dir: pathlib.Path, key: str, spec: dict[str, Any]) -> None:
    """The directory of one array: zarr v2, as the manifest says, with every chunk there."""
    directory = step_dir / spec['kvstore']['path']
    zarray = json.loads((directory / '.zarray').read_text())
    assert zarray['zarr_format'] == 2, key
    for name in _METADATA_KEYS:
        assert zarray[name] == spec['metadata'][name], (
            f'{key}: {name}: .zarray {zarray[name]}, manifest {spec["metadata"][name]}'
        )
    # The strict open: every field of the manifest must agree with the .zarray.
    strict = {**spec, 'kvstore': {'driver': 'file', 'path': f'{directory}/'}}
    store = ts.open(strict, open=True).result()
    assert store.dtype.name == spec['dtype'], key
    shape, chunks = zarray['shape'], zarray['chunks']
    assert len(shape) == len(chunks), f'{key}: {shape} in {chunks}'
    assert min(chunks, default=1) >= 1, f'{key}: {shape} in {chunks}'
    grid = [range(-(-size // chunk)) for size, chunk in zip(shape, chunks, strict=True)]
    separator = zarray.get('dimension_separator', '.')
    wanted = {separator.join(map(str, index)) or '0' for index in itertools.product(*grid)}
    found = {p.relative_to(directory).as_posix() for p in directory.rglob('*') if p.is_file()}
    assert found == wanted | {'.zarray'}, f'{key}: missing {sorted(wanted - found)}, stray {sorted(found - wanted)}'
    if zarray['compressor'] is None:
        size = int(np.prod(chunks, dtype=np.int64)) * _itemsize(spec['dtype'])
        for name in wanted:
            assert (directory / name).stat().st_size == size, f'{key}/{name}'


def check_files(step_dir: pathlib.Path, arrays: set[str]) -> None:
    """No file but those the format knows."""
    for entry in step_dir.iterdir():
        if entry.is_dir():
            files = [p for p in entry.rglob('*') if p.is_file() and not _BESIDE.fullmatch(p.name)]
            nested = {p.parent.relative_to(step_dir).as_posix() for p in files}
            assert nested <= arrays, f'stray {sorted(nested - arrays)}'
            assert nested, f'empty directory {entry.name}'
        else:
            assert entry.name == 'checkpoint' or _BESIDE.fullmatch(entry.name), f'stray file {entry.name}'


def check_run_dir(run_dir: pathlib.Path) -> None:
    """Nothing half-written is left beside the checkpoints."""
    for entry in run_dir.iterdir():
        assert re.fullmatch(r'checkpoint_\d+', entry.name), f'stray {entry.name}'


def _itemsize(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize

"""Reads a checkpoint with flax, tensorstore and NumPy alone, the way T5X reads one.

What T5X does (its `checkpoints.py`: finding the manifest, replacing drivers, opening a spec), restated:

* the manifest is `flax.serialization` msgpack; the tree is under 'optimizer' when there is a 'version', which must be
  >= 2;
* on a local disk the kvstore drivers `gcs` and `gfile` become `file`;
* a dict with at least driver, kvstore and metadata is an array on disk: it is parsed by `ts.Spec`, turned back into
  JSON, and `metadata.chunks` and `metadata.compressor` are *deleted* (so they must be there);
* its path, in the kvstore or (before tensorstore 0.1.14) at the top level, is joined to the checkpoint directory;
* `uint16` on disk is refused; `None` stays; an empty dict is not understood.
"""

import os
import pathlib
from typing import Any

import numpy as np
import tensorstore as ts
from flax import serialization


def manifest(step_dir: pathlib.Path) -> Any:
    """The decoded file `checkpoint`, specs as dicts."""
    return serialization.msgpack_restore((step_dir / 'checkpoint').read_bytes())


def is_spec(node: Any) -> bool:
    """Whether a node of the tree is an array on disk."""
    return isinstance(node, dict) and {'driver', 'kvstore', 'metadata'} <= set(node)


def flat_leaves(tree: Any, prefix: str = '') -> dict[str, Any]:
    """'a/b/c' -> spec dict, array, None or {}."""
    if is_spec(tree) or not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out.update(flat_leaves(value, f'{prefix}/{key}' if prefix else key))
    return out


def read(step_dir: pathlib.Path) -> dict[str, np.ndarray | None]:
    """'a/b/c' -> the array, or None where the manifest has nil. Anything T5X would not load raises."""
    contents = manifest(step_dir)
    if contents.get('version', 0) < 2:
        raise ValueError(f'version {contents.get("version")}')
    out: dict[str, np.ndarray | None] = {}
    for key, leaf in flat_leaves(contents['optimizer']).items():
        if leaf is None:
            out[key] = None
        elif is_spec(leaf):
            out[key] = read_spec(step_dir, leaf)
        elif isinstance(leaf, (np.ndarray, np.generic)):
            out[key] = np.asarray(leaf)
        else:
            raise TypeError(f'{key}: T5X cannot load {leaf!r}')
    return out


def read_spec(step_dir: pathlib.Path, spec: dict[str, Any]) -> np.ndarray:
    """Opens and reads one array on disk."""
    local = {**spec, 'kvstore': dict(spec['kvstore'])}
    if local['kvstore']['driver'] in ('gcs', 'gfile'):
        local['kvstore']['driver'] = 'file'
        local['kvstore'].pop('bucket', None)
    parsed = ts.Spec(local).to_json()
    del parsed['metadata']['chunks']
    del parsed['metadata']['compressor']
    if parsed['dtype'] == 'uint16':
        raise ValueError(f'T5X refuses uint16 on disk: {spec}')
    holder = parsed['kvstore'] if 'path' in parsed['kvstore'] else parsed
    holder['path'] = os.path.join(step_dir, holder['path'])
    return ts.open(parsed, open=True).result().read().result()

"""Describes a checkpoint's leaves as a tree with sums. Nothing is read or printed here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.codecs import codec_text
from t5ckpt.tree.leaf_table import Empty, LeafTable

_TEXT_SHOWN = 40


@dataclasses.dataclass(frozen=True)
class LeafInfo:
    """A description of one leaf by the manifest.

    Attributes:
      path: the keys of the leaf.
      kind: ``'stored'`` in chunk files, ``'inline'`` in the manifest, or ``'none'``, ``'empty'``, ``'text'``.
      shape: of the array; () for other leaves.
      dtype: the name of the dtype after reading; '' for leaves that are not arrays.
      nbytes: in memory.
      chunks: the chunk shape of a stored leaf; None if the manifest does not have it.
      codec: of a stored leaf: ``'zstd'``, ``'blosc lz4'``, ``'none'``, ...
      value: a scalar or text, shortened; '' for other leaves.
      text: complete text; '' for other leaves.
    """

    path: Path
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ''
    nbytes: int = 0
    chunks: tuple[int, ...] | None = None
    codec: str = ''
    value: str = ''
    text: str = dataclasses.field(default='', repr=False)

    @property
    def name(self) -> str:
        """The leaf's name, ``'target/encoder/kernel'``."""
        return leaf_name(self.path)

    @property
    def size(self) -> int:
        """The number of elements; 0 for leaves that are not arrays."""
        return math.prod(self.shape) if self.dtype else 0

    @property
    def location(self) -> str:
        """The location of the values, as text."""
        if self.kind != 'stored':
            return self.kind
        codec = '' if self.codec == 'none' else f', {self.codec}'
        return f'stored in chunks of {self.chunks}{codec}' if self.chunks is not None else f'stored{codec}'


@dataclasses.dataclass(frozen=True)
class Group:
    """An inner node, with the sums over all leaves below it, of which None is none; ``name`` is the last key."""

    name: str
    path: Path
    children: dict[str, Group | LeafInfo]
    leaves: int
    size: int
    nbytes: int


def leaf_infos(leaves: LeafTable) -> list[LeafInfo]:
    """Describes each leaf, in the table's order."""
    return [_info(path, leaf) for path, leaf in leaves.items()]


def _info(path: Path, leaf: Any) -> LeafInfo:
    if isinstance(leaf, StoredArray):
        metadata = leaf.metadata
        chunks = metadata.get('chunks')
        return LeafInfo(
            path,
            'stored',
            leaf.shape,
            leaf.dtype.name,
            math.prod(leaf.shape) * leaf.dtype.itemsize,
            None if chunks is None else tuple(chunks),
            codec_text(metadata.get('compressor')),
        )
    if isinstance(leaf, Empty):
        return LeafInfo(path, 'empty', value=repr(leaf.build()))
    if leaf is None:
        return LeafInfo(path, 'none')
    if not hasattr(leaf, 'dtype'):
        text = repr(leaf)
        shown = text if len(text) <= _TEXT_SHOWN else text[: _TEXT_SHOWN - 3] + '...'
        return LeafInfo(path, 'text', value=shown, text=text)
    array = np.asarray(leaf)
    value = str(array[()]) if array.ndim == 0 else ''
    return LeafInfo(path, 'inline', array.shape, array.dtype.name, array.nbytes, value=value)


def build_tree(infos: Iterable[LeafInfo], name: str = '') -> Group:
    """Builds the tree, with groups and leaves in the order of their first leaf, and the items of a sequence in theirs."""
    root: dict[str, Any] = {}
    for info in infos:
        node = root
        for key in info.path[:-1]:
            node = node.setdefault(key, {})
        node[info.path[-1] if info.path else ''] = info
    return _group(name, (), root)


def _group(name: str, path: Path, node: dict[str, Any]) -> Group:
    # Empty containers are listed last. Numbers may have thousands of digits, which int refuses.
    is_sequence = all(key.isascii() and key.isdigit() for key in node)
    keys = sorted(node, key=lambda key: (len(key), key)) if is_sequence else [*node]
    children: dict[str, Group | LeafInfo] = {
        key: node[key] if isinstance(node[key], LeafInfo) else _group(key, (*path, key), node[key]) for key in keys
    }
    below = list(children.values())
    leaves = sum(child.kind != 'none' if isinstance(child, LeafInfo) else child.leaves for child in below)
    return Group(name, path, children, leaves, sum(c.size for c in below), sum(c.nbytes for c in below))

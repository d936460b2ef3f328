"""Looking into a checkpoint without loading it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from t5ckpt._leaves import LeafTable
from t5ckpt._open import Contents, leaves_of, read_contents
from t5ckpt._plan_restore import StoredLeaf
from t5ckpt._reader import ArrayReader
from t5ckpt._types import leaf_name
from t5ckpt.errors import near_names
from t5ckpt.lazy import LazyArray, LazyThreadPoolArray
from t5ckpt.steps import locate

__all__ = ['CheckpointView', 'lazy_leaf', 'open_checkpoint']


def open_checkpoint(path: str | os.PathLike[str], step: int | None = None, *, mmap: bool = True) -> CheckpointView:
    """Opens a checkpoint for looking: reads the manifest and no array.

    Args:
      path: a run's directory, a step's directory, or the manifest file.
      step: which step, where ``path`` is a run's directory; None takes the latest.
      mmap: arrays of a local checkpoint are mapped where their files allow it; a slice is copied out of the map.

    Returns:
      A mapping from leaf name to LazyArray. ``view['target/a/kernel'][:, :64]`` reads only the chunks it needs.

    Raises:
      CheckpointNotFoundError, FormatError: see ``find_checkpoint`` and ``read_contents``.
    """
    contents = read_contents(locate(path, step))
    leaves, _ = leaves_of(contents, (), {})
    reader = ArrayReader(contents.located.storage, contents.located.directory, mmap)
    return CheckpointView(contents, reader, leaves, '')


def lazy_leaf(reader: ArrayReader, leaf: Any, name: str, dtype: np.dtype | None = None) -> LazyArray:
    """A lazy array of a checkpoint's leaf, stored or inline, cast to ``dtype`` when read."""
    wanted = np.dtype(leaf.dtype) if dtype is None else dtype
    if not isinstance(leaf, StoredLeaf):
        value = np.asarray(leaf)
        return LazyThreadPoolArray(value.shape, wanted, value.copy, lambda index: value[index].copy())
    # Read in the thread that asks: no pool and no event loop, which are gone when the interpreter is on its way out.
    return LazyThreadPoolArray(
        leaf.shape, wanted, lambda: reader.read(leaf, name), lambda index: reader.read(leaf, name, index)
    )


class CheckpointView(Mapping[str, LazyArray]):
    """A checkpoint as a mapping from leaf name to LazyArray; a subtree's name gives a view of the subtree.

    Notes: nothing is cached, each access reads; safe from any thread and inside a running event loop.
    """

    def __init__(self, contents: Contents, reader: ArrayReader, leaves: LeafTable, prefix: str):
        self._contents = contents
        self._prefix = prefix
        self._reader = reader
        self._all = leaves
        self._arrays = {leaf_name(path): leaf for path, leaf in leaves.items() if hasattr(leaf, 'dtype')}

    @property
    def path(self) -> str:
        """The manifest's path."""
        return self._contents.located.url

    @property
    def step(self) -> int | None:
        """The step in the directory's name, or None."""
        return self._contents.located.step

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in memory."""
        return sum(self[name].nbytes for name in self)

    def __getitem__(self, name: str) -> Any:
        if name in self._arrays:
            return lazy_leaf(self._reader, self._arrays[name], name)
        below = {path: leaf for path, leaf in self._all.items() if leaf_name(path).startswith(f'{name}/')}
        if below:
            depth = next(n for path in below for n in range(len(path)) if leaf_name(path[:n]) == name)
            inner = {path[depth:]: leaf for path, leaf in below.items()}
            return CheckpointView(self._contents, self._reader, inner, f'{self._prefix}{name}/')
        near = near_names(name, self._arrays)
        raise KeyError(
            f'{self._prefix}{name}: no such leaf in {self.path}. ' + (f'Near: {", ".join(near)}.' if near else '')
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        lines = [f'{self.path} ({self._prefix or "all"}, {len(self)} leaves, {self.nbytes:,} bytes)']
        width = max((len(name) for name in self), default=0)
        for name in self:
            leaf = self[name]
            kind = 'stored' if isinstance(self._arrays[name], StoredLeaf) else 'inline'
            lines.append(f'  {name:<{width}}  {leaf.dtype.name:<10} {leaf.shape!s:<20} {kind}')
        return '\n'.join(lines)

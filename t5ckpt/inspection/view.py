"""Opens a checkpoint as a mapping of lazy arrays."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import Path, leaf_name, path_of
from t5ckpt.core.leaf_patterns import leaf_pattern, meant_pattern
from t5ckpt.core.protocols import Progress
from t5ckpt.core.text import counted, did_you_mean, human_bytes, printable, shown, some_of
from t5ckpt.datasets import by_shard, positions_in
from t5ckpt.errors import CheckpointNotFoundError, near_names
from t5ckpt.format.names import MANIFEST
from t5ckpt.inspection.leaf_tree import LeafInfo, leaf_infos
from t5ckpt.inspection.report.facts import BINS, checkpoint_facts
from t5ckpt.inspection.report.page import SAMPLE_BYTES, checked_output, write_report
from t5ckpt.inspection.stats import CheckpointStats, leaf_stats
from t5ckpt.inspection.tables import pandas, table_text, tree_html
from t5ckpt.lazy import LazyArray
from t5ckpt.options import CheckpointerOptions
from t5ckpt.reading.array_reader import ArrayReader, lazy_leaf, open_contents, reader_of
from t5ckpt.reading.contents import Contents
from t5ckpt.storage import PathOrStorage
from t5ckpt.tree.leaf_table import Empty, LeafTable


def open_checkpoint(
    path: PathOrStorage,
    step: int | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: CheckpointerOptions = CheckpointerOptions(),
) -> CheckpointView:
    """Opens a checkpoint as a mapping of lazy arrays; reads the manifest and no array.

    Args:
      path: a run's directory, a step's directory, or the manifest file; or a Storage with one of the first two as its root.
      step: which step, if ``path`` is a run's directory; None takes the latest.
      storage_options: see docs/storage.md.
      options: ``verify``, ``mmap`` and ``follow_links`` are used. An array is mapped if it has one chunk and all of it is read.

    Returns:
      A mapping from leaf name to LazyArray. ``view['target/a/kernel'][:, :64]`` reads only the chunks it needs.

    Raises:
      CheckpointNotFoundError, FormatError: see ``find_checkpoint`` and ``read_contents``.
    """
    contents = open_contents(path, step, storage_options, options)
    leaves = contents.leaves()
    return CheckpointView(contents, reader_of(contents, options), leaves)


class CheckpointView(Mapping[str, LazyArray]):
    """A checkpoint, or a part of it, as a mapping from leaf name to LazyArray.

    - ``view['target/encoder/kernel']`` is a leaf, ``view['target/encoder']`` a view of the leaves below it, and
      ``view['target/.*/kernel']`` a view of all leaves whose complete names match this regular expression.
    - ``view.target.encoder`` is the same by attribute, with completion; a key that is also a method of this class
      (``state.step``, ``items``) needs brackets.
    - Iterating yields the names of arrays. None, text and empty containers are shown, and returned by name.
    - In a notebook, a view is displayed as a tree.

    Notes: each access reads, without a cache. Safe from any thread and inside a running event loop.
    """

    def __init__(self, contents: Contents, reader: ArrayReader, leaves: LeafTable, prefix: Path = ()):
        self._contents = contents
        self._prefix = prefix
        self._reader = reader
        self._leaves = leaves
        self._infos: list[LeafInfo] | None = None
        self._by_name = {leaf_name(path): path for path in leaves}
        self._arrays = [name for name, path in self._by_name.items() if hasattr(leaves[path], 'dtype')]

    def __copy__(self) -> CheckpointView:
        return self

    def __deepcopy__(self, memo: Any) -> CheckpointView:
        # A view is immutable.
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f'a view of {self.path} cannot be pickled. Pass the path and call t5ckpt.open_checkpoint in the other process.'
        )

    @property
    def path(self) -> str:
        """The manifest's path."""
        return self._contents.located.url

    @property
    def step(self) -> int | None:
        """The step in the directory's name, or None."""
        return self._contents.located.step

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that were saved with the checkpoint."""
        return dict(self._contents.facts.metrics)

    @property
    def custom_metadata(self) -> dict[str, Any]:
        """The argument of ``save(..., custom_metadata={...})``, or {}."""
        return dict(self._contents.facts.custom_metadata)

    def data_positions(self) -> dict[int, Any]:
        """The states of the data iterators, by data shard; of iterators that write files, such as tf.data's, their paths.

        Raises:
          CorruptCheckpointError: one is damaged.
          DatasetStateError: there are several for a data shard.
        """
        located = self._contents.located
        directory = join(located.directory, self._contents.facts.positions_in)
        positions = by_shard(positions_in(located.storage, directory, of_orbax=not located.manifest))
        return {number: position.state() for number, position in positions.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in memory."""
        return sum(info.nbytes for info in self.infos())

    def infos(self) -> list[LeafInfo]:
        """The shape, dtype, bytes and chunks of each leaf by the manifest; see :class:`LeafInfo`."""
        if self._infos is None:
            self._infos = leaf_infos(self._leaves)
        return self._infos

    def to_pandas(self) -> Any:
        """A DataFrame with a row per leaf: name, kind, dtype, shape, size, nbytes, chunks, codec."""
        fields = ('name', 'kind', 'dtype', 'shape', 'size', 'nbytes', 'chunks', 'codec')
        return pandas().DataFrame(
            [[getattr(info, field) for field in fields] for info in self.infos()], columns=[*fields]
        )

    def stats(self, bins: int = BINS, progress: Progress | None = None) -> CheckpointStats:
        """Mean, standard deviation, extremes, norm, zeros, NaN and infinite values of every array; see :class:`LeafStats`.

        Reads all arrays block by block with bounded memory, with one thread per core: twice for a histogram of ``bins`` bins per
        leaf, which a notebook shows in the table, and once with ``bins=0``.
        """
        with self.in_one() as view:
            return CheckpointStats(self.path, leaf_stats(view, self.infos(), bins, progress))

    @contextlib.contextmanager
    def in_one(self) -> Generator[CheckpointView]:
        """Yields a view for many reads; checks once, at the end, whether the step was saved again before that."""
        with self._contents.identity.reading():
            yield CheckpointView(self._contents, self._reader.in_one(), self._leaves, self._prefix)

    def report(
        self,
        output: str | os.PathLike[str],
        *,
        sample_bytes: int | None = SAMPLE_BYTES,
        force: bool = False,
        progress: Progress | None = None,
    ) -> str:
        """Writes one HTML page on the checkpoint, which needs no server and no network; see docs/report.md.

        Args:
          output: the file, on a local file system.
          sample_bytes: about how many bytes of the arrays to read, spread evenly over the leaves; None reads all of them.
          force: replaces a file.
          progress: called with (bytes read, bytes to read).

        Returns:
          The absolute path of the page.

        Raises:
          OutputExistsError: there is such a file.
          MissingDependencyError: plotly is not installed.
        """
        local = checked_output(output, force)
        with self.in_one() as view:
            facts = checkpoint_facts(view, view.infos(), sample_bytes, progress)
        shown = {'path': printable(self._title()), 'steps': [], 'checkpoint': {'step': self.step, **facts}}
        return write_report(local, self.path.removesuffix(f'/{MANIFEST}'), shown, force)

    # --- access ------------------------------------------------------------------------------------------------------

    def __getitem__(self, name: object) -> Any:
        if not isinstance(name, str):
            raise KeyError(f'{name!r:.80}: names of leaves are str, got {type(name).__name__}.')
        path = path_of(name)
        if path in self._leaves:
            leaf = self._leaves[path]
            if hasattr(leaf, 'dtype'):
                return lazy_leaf(self._reader, leaf, leaf_name((*self._prefix, *path)))
            return leaf.build() if isinstance(leaf, Empty) else leaf
        depth = len(path)
        below = {leaf_path[depth:]: leaf for leaf_path, leaf in self._leaves.items() if leaf_path[:depth] == path}
        if below:
            return self._part(below, path)
        matching: LeafTable = {}
        with contextlib.suppress(ValueError):
            matches = leaf_pattern(name).fullmatch
            matching = {path: self._leaves[path] for text, path in self._by_name.items() if matches(text)}
        if matching:
            return self._part(matching, ())
        near = [] if '*' in name or '?' in name else near_names(name, self._by_name)
        hint = f' Near: {", ".join(near)}.' if near else meant_pattern(name, self._by_name) or self._keys()
        where = f'{leaf_name(self._prefix)}/{name}' if self._prefix else name
        raise KeyError(f'{where if len(where) <= 200 else shown(where)}: no such leaf in {self.path}.{hint}')

    def select(self, pattern: str) -> CheckpointView:
        """A view of the leaves of a name, a group or a pattern, by their whole names.

        Raises:
          CheckpointNotFoundError: no leaf matches.
        """
        group = path_of(pattern)
        leaves = {path: leaf for path, leaf in self._leaves.items() if path[: len(group)] == group}
        if leaves:
            return self._part(leaves, ())
        try:
            return self[pattern]
        except KeyError as error:
            raise CheckpointNotFoundError(error.args[0]) from error

    def without_leaves(self) -> CheckpointView:
        """The checkpoint with none of its leaves, as the other side of a comparison."""
        return self._part({}, ())

    def _part(self, leaves: LeafTable, below: Path) -> CheckpointView:
        return CheckpointView(self._contents, self._reader, leaves, (*self._prefix, *below))

    def _children(self) -> list[str]:
        return list(dict.fromkeys(path[0] for path in self._leaves if path))

    def _keys(self) -> str:
        return f' There are {some_of(self._children(), 8)}.' if self._leaves else ''

    def __getattr__(self, name: str) -> Any:
        # Notebooks and copy() access names with underscores before __init__ has run.
        keys = [] if name.startswith('_') else self._children()
        if name in keys:
            return self[leaf_name((name,))]
        hint = '' if name.startswith('_') else did_you_mean(name, keys) or self._keys()
        raise AttributeError(f'{type(self).__name__} has no attribute {name!r}, and the checkpoint no key here.{hint}')

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *[key for key in self._children() if key.isidentifier()]]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._by_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    # --- showing -----------------------------------------------------------------------------------------------------

    def _title(self) -> str:
        return f'{self.path}: {leaf_name(self._prefix)}' if self._prefix else self.path

    def _details(self) -> list[str]:
        infos, created = self.infos(), self._contents.facts.created_unix
        details = [] if self.step is None else [f'step {self.step}']
        details += [
            counted(sum(info.kind != 'none' for info in infos), 'leaf', 'leaves'),
            counted(sum(info.size for info in infos), 'value'),
            human_bytes(self.nbytes),
        ]
        if created is not None:
            saved = datetime.datetime.fromtimestamp(created, datetime.UTC)
            details.append(f'saved {saved:%Y-%m-%d %H:%M} UTC')
        return details + [f'{name} {value:.6g}' for name, value in self.metrics.items()]

    def __repr__(self) -> str:
        rows = [
            (info.name, info.dtype or info.kind, str(info.shape) if info.dtype else '', _described(info))
            for info in self.infos()
        ]
        title = f'{self._title()} ({", ".join(self._details())})'
        return table_text(title, ('name', 'dtype', 'shape', 'size'), rows, 4, "view['a/group'], view.to_pandas()")

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from treescope import repr_lib

        children = {key: self[leaf_name((key,))] for key in self._children()}
        return repr_lib.render_dictionary_wrapper(type(self), children, path, subtree_renderer)

    def _repr_html_(self) -> str:
        return tree_html(self._title(), self._details(), self.infos())


def _described(info: LeafInfo) -> str:
    if info.value:
        return f'= {info.value}'
    return f'{human_bytes(info.nbytes)} {info.kind}' if info.dtype else ''

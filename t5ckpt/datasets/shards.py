"""The data iterator's state beside the arrays: ``train_ds-SSS-of-NNN*``, one per data shard (T5X)."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import tempfile
from typing import Any

from t5ckpt.core.keys import join
from t5ckpt.core.protocols import DatasetIterator, Partitioner
from t5ckpt.datasets.adapters import as_dataset_iterator
from t5ckpt.distributed.processes import Processes
from t5ckpt.errors import DatasetStateError, T5CkptError
from t5ckpt.format.names import TRAIN_DS_PREFIX, dataset_prefix
from t5ckpt.storage import Storage

__all__ = ['DatasetState', 'warn_of_unused']

_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class _Shard:
    """The data shard that a process reads, and whether it is the one that writes its state."""

    prefix: str
    writes: bool


@dataclasses.dataclass(frozen=True)
class DatasetState:
    """A trainer's iterator and who says which data shard it reads."""

    iterator: DatasetIterator
    partitioner: Partitioner | None

    @classmethod
    def of(cls, iterator: Any, partitioner: Partitioner | None) -> DatasetState | None:
        """Makes the iterator fit; None for none.

        Raises:
          UnsupportedLeafError: the iterator cannot save and load itself.
        """
        return None if iterator is None else cls(as_dataset_iterator(iterator), partitioner)

    def _shard(self, processes: Processes) -> _Shard:
        """T5X's layout where there is a partitioner; without one each process reads a shard of its own."""
        if self.partitioner is None:
            return _Shard(dataset_prefix(processes.index, processes.count), True)
        layout = self.partitioner.get_data_layout()
        return _Shard(dataset_prefix(layout.shard_id, layout.num_shards), layout.is_first_host_in_replica_set)

    def snapshot(self, processes: Processes) -> dict[str, bytes]:
        """The iterator's state as files, by name; the iterator moves on as soon as the caller does.

        Raises:
          DatasetStateError: the iterator cannot be saved.
        """
        shard = self._shard(processes)
        if not shard.writes:
            return {}
        with tempfile.TemporaryDirectory(prefix='t5ckpt-') as directory:
            try:
                self.iterator.save(os.path.join(directory, shard.prefix))
            except T5CkptError:
                raise
            except Exception as error:
                raise DatasetStateError(
                    f'dataset_iterator: {type(self.iterator).__name__} could not be saved: {type(error).__name__}: '
                    f'{error}. Cache stateful steps of the pipeline offline, or leave out dataset_iterator.'
                ) from error
            files = _files_below(pathlib.Path(directory), shard.prefix)
        if not files:
            # CLU's iterators with checkpoint=False do that on purpose.
            _log.warning(
                't5ckpt: save(filename) of %s wrote no file whose name begins with filename: the checkpoint will not say '
                'where the data goes on',
                type(self.iterator).__name__,
            )
        return files

    def prefix(self, processes: Processes) -> str:
        """What the names of this process's files begin with."""
        return self._shard(processes).prefix

    def load(self, storage: Storage, directory: str, processes: Processes) -> None:
        """Takes the iterator's state from a checkpoint; one without any leaves the iterator as it is, and says so.

        Raises:
          DatasetStateError: the checkpoint holds the state of another number of shards, or of another pipeline.
        """
        prefix = self._shard(processes).prefix
        held = _held(storage, directory)
        if not held:
            _log.warning(
                't5ckpt: %s holds no data-iterator state, and this trainer has an iterator: it stays where it is, so '
                'batches that were trained on may come again',
                storage.url(directory),
            )
            return
        if not any(name.startswith(prefix) for name in held):
            raise DatasetStateError(
                f'{storage.url(directory)}: no iterator state {prefix}, it holds {", ".join(held[:4])}. Restore '
                'with the same number of data shards, or without dataset_iterator to start the data afresh.'
            )
        local = storage.local_path(directory)
        if local is not None:
            self._load(os.path.join(local, prefix), storage.url(directory))
            return
        with tempfile.TemporaryDirectory(prefix='t5ckpt-') as copied:
            for name in held:
                if name.startswith(prefix):
                    _fetch(storage, directory, name, pathlib.Path(copied))
            self._load(os.path.join(copied, prefix), storage.url(directory))

    def _load(self, filename: str, where: str) -> None:
        try:
            self.iterator.load(filename)
        except T5CkptError:
            raise
        except Exception as error:
            raise DatasetStateError(
                f'{where}: {type(self.iterator).__name__} did not take its state back: {type(error).__name__}: {error}. '
                'Restore without dataset_iterator to start the data afresh.'
            ) from error


def warn_of_unused(storage: Storage, directory: str) -> None:
    """Says that a checkpoint holds iterator state which a trainer without an iterator leaves there."""
    held = _held(storage, directory)
    if held:
        _log.warning(
            't5ckpt: %s holds data-iterator state (%s), and this trainer has no dataset_iterator: the data does not go '
            'on where it stopped',
            storage.url(directory),
            ', '.join(held[:4]),
        )


def _held(storage: Storage, directory: str) -> list[str]:
    return storage.names(directory, f'{TRAIN_DS_PREFIX}-')


def _fetch(storage: Storage, directory: str, name: str, copied: pathlib.Path) -> None:
    """Brings a file, or all files of a directory, to this disk."""
    keys = [key for key, _ in storage.walk(join(directory, name))] or [join(directory, name)]
    for key in keys:
        path = copied / key.removeprefix(f'{directory}/')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(storage.read(key))


def _files_below(root: pathlib.Path, prefix: str) -> dict[str, bytes]:
    names = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob('*')) if path.is_file()}
    return {name: path.read_bytes() for name, path in names.items() if name.startswith(prefix)}

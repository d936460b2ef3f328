"""Saves and restores the data iterator's state in the files ``train_ds-SSS-of-NNN*``, one per data shard (T5X)."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import re
import tempfile
from typing import Any

from t5ckpt.core.keys import join
from t5ckpt.core.protocols import DatasetIterator, Partitioner
from t5ckpt.datasets.adapters import StateIterator, as_dataset_iterator
from t5ckpt.distributed.processes import Processes
from t5ckpt.errors import DatasetStateError, T5CkptError
from t5ckpt.format.names import TRAIN_DS_PREFIX, dataset_prefix
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')
# The item of a step that holds the iterator's state where T5X saves through Orbax.
_ORBAX_ITEM = 'dataset'
# The files of Grain's CheckpointHandler.
_GRAIN = re.compile(r'process_[0-9]+-of-[0-9]+\.json')


@dataclasses.dataclass(frozen=True)
class _Shard:
    """The data shard that this process reads, and whether this process writes its state."""

    prefix: str
    writes: bool


@dataclasses.dataclass(frozen=True)
class DatasetState:
    """A trainer's iterator, and the partitioner that assigns its data shard."""

    iterator: DatasetIterator
    partitioner: Partitioner | None

    @classmethod
    def of(cls, iterator: Any, partitioner: Partitioner | None) -> DatasetState | None:
        """Adapts an iterator; None for None.

        Raises:
          UnsupportedLeafError: the iterator cannot return and restore a position.
        """
        return None if iterator is None else cls(as_dataset_iterator(iterator), partitioner)

    def _shard(self, processes: Processes) -> _Shard:
        """The partitioner's shard (T5X); without a partitioner each process reads a separate shard."""
        if self.partitioner is None:
            return _Shard(dataset_prefix(processes.index, processes.count), True)
        layout = self.partitioner.get_data_layout()
        return _Shard(dataset_prefix(layout.shard_id, layout.num_shards), layout.is_first_host_in_replica_set)

    def snapshot(self, processes: Processes) -> dict[str, bytes]:
        """The files of the iterator's state, by name; taken before the caller advances the iterator.

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
            # CLU's iterators with checkpoint=False write nothing on purpose.
            _log.warning(
                't5ckpt: save(filename) of %s wrote no file whose name begins with filename, so the checkpoint has no position '
                'in the data',
                type(self.iterator).__name__,
            )
        return files

    def prefix(self, processes: Processes) -> str:
        """The prefix of the names of this process's files."""
        return self._shard(processes).prefix

    def load(self, storage: Storage, directory: str, processes: Processes) -> None:
        """Restores the iterator's state from a checkpoint; without one, logs a warning and leaves the iterator unchanged.

        Raises:
          DatasetStateError: the checkpoint has the state of another number of shards, or of another pipeline.
        """
        prefix = self._shard(processes).prefix
        files = _state_files(storage, directory)
        if not files:
            files, directory = _files_of_orbax(storage, directory, processes)
        if not files and isinstance(self.iterator, StateIterator):
            key = _file_of_grain(storage, directory, processes)
            if key is not None:
                self.iterator.load_of_orbax(storage.read(key), storage.url(key))
                return
        if not files:
            _log.warning(
                't5ckpt: %s has no data-iterator state, so the position of this iterator does not change, and batches may be '
                'repeated',
                storage.url(directory),
            )
            return
        if not any(name.startswith(prefix) for name in files):
            raise DatasetStateError(
                f'{storage.url(directory)} has no iterator state {prefix}, only {", ".join(files[:4])}. Restore '
                'with the same number of data shards, or without dataset_iterator to start the data afresh.'
            )
        local = storage.local_path(directory)
        if local is not None:
            self._load(os.path.join(local, prefix), storage.url(directory))
            return
        with tempfile.TemporaryDirectory(prefix='t5ckpt-') as copied:
            for name in files:
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
                f'{where}: {type(self.iterator).__name__} could not restore its state: {type(error).__name__}: {error}. '
                'Restore without dataset_iterator to start the data afresh.'
            ) from error


def warn_of_unused(storage: Storage, directory: str) -> None:
    """Logs a warning if a trainer without an iterator restores a checkpoint with an iterator's state."""
    files = _state_files(storage, directory)
    if files:
        _log.warning(
            't5ckpt: %s has data-iterator state (%s), but this trainer has no dataset_iterator, so the data does not continue '
            'where it stopped',
            storage.url(directory),
            ', '.join(files[:4]),
        )


def _state_files(storage: Storage, directory: str) -> list[str]:
    return storage.names(directory, TRAIN_DS_PREFIX)


def _files_of_orbax(storage: Storage, directory: str, processes: Processes) -> tuple[list[str], str]:
    """The names of the state, and their directory, in a step that T5X saved through Orbax; without any the step's own.

    There it is the item ``dataset``, in which each of several processes has a directory (T5X, DatasetCheckpointHandler).
    """
    for below in (_ORBAX_ITEM, f'{_ORBAX_ITEM}/process_{processes.index}-of-{processes.count}'):
        files = _state_files(storage, join(directory, below))
        if files:
            return files, join(directory, below)
    return [], directory


def _file_of_grain(storage: Storage, directory: str, processes: Processes) -> str | None:
    """The file of this process in the item of a step that Grain saved through Orbax; None without one.

    Raises:
      DatasetStateError: only other numbers of processes have files, or several items have them.
    """
    wanted = f'process_{processes.index}-of-{processes.count}.json'
    items = sorted(entry.name for entry in storage.entries(directory) if entry.is_dir)
    files = [
        join(directory, item, entry.name)
        for item in items
        for entry in storage.entries(join(directory, item))
        if _GRAIN.fullmatch(entry.name)
    ]
    matching = [key for key in files if key.rpartition('/')[2] == wanted]
    if files and len(matching) != 1:
        existing = ', '.join(key.removeprefix(f'{directory}/') for key in files[:4])
        raise DatasetStateError(
            f'{storage.url(directory)}: several items have the state {wanted} of Grain: {existing}. Restore without '
            'dataset_iterator to start the data afresh.'
            if matching
            else f'{storage.url(directory)} has no state {wanted} of Grain, but {existing}. Restore with the same number of '
            'processes, or without dataset_iterator to start the data afresh.'
        )
    return matching[0] if matching else None


def _fetch(storage: Storage, directory: str, name: str, copied: pathlib.Path) -> None:
    """Copies a file, or all files of a directory, to the local disk."""
    keys = [key for key, _ in storage.walk(join(directory, name))] or [join(directory, name)]
    for key in keys:
        path = copied / key.removeprefix(f'{directory}/')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(storage.read(key))


def _files_below(root: pathlib.Path, prefix: str) -> dict[str, bytes]:
    names = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob('*')) if path.is_file()}
    return {name: path.read_bytes() for name, path in names.items() if name.startswith(prefix)}

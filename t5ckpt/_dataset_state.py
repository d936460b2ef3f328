"""The data iterator's state beside the arrays: ``train_ds-SSS-of-NNN*``, one per data shard (T5X)."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import tempfile
from typing import Any

from t5ckpt._layout import dataset_prefix, join
from t5ckpt._types import DatasetIterator, Partitioner
from t5ckpt.errors import CheckpointNotFoundError, UnsupportedLeafError
from t5ckpt.storage import Storage

__all__ = ['DatasetState']

_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class DatasetState:
    """An iterator and the data shard it reads."""

    iterator: DatasetIterator
    shard_id: int
    num_shards: int
    writes: bool

    @classmethod
    def of(cls, iterator: Any, partitioner: Partitioner | None) -> DatasetState | None:
        """Checks the iterator; None for none.

        Raises:
          UnsupportedLeafError: the iterator cannot save and load itself.
        """
        if iterator is None:
            return None
        if not isinstance(iterator, DatasetIterator):
            raise UnsupportedLeafError(
                f'dataset_iterator: {type(iterator).__name__} has no save(filename) and load(filename). Wrap it in an '
                'object that has, for instance one that writes its position to a file.'
            )
        if partitioner is None:
            return cls(iterator, 0, 1, True)
        layout = partitioner.get_data_layout()
        return cls(iterator, layout.shard_id, layout.num_shards, layout.is_first_host_in_replica_set)

    def snapshot(self) -> dict[str, bytes]:
        """The iterator's state as files, by name; the iterator moves on as soon as the caller does."""
        if not self.writes:
            return {}
        prefix = dataset_prefix(self.shard_id, self.num_shards)
        with tempfile.TemporaryDirectory(prefix='t5ckpt-') as directory:
            self.iterator.save(os.path.join(directory, prefix))
            return {
                path.relative_to(directory).as_posix(): path.read_bytes()
                for path in sorted(pathlib.Path(directory).rglob('*'))
                if path.is_file() and path.relative_to(directory).as_posix().startswith(prefix)
            }

    def load(self, storage: Storage, directory: str) -> None:
        """Takes the iterator's state from a checkpoint; one without any leaves the iterator as it is, and says so.

        Raises:
          CheckpointNotFoundError: the checkpoint holds the state of another number of shards.
        """
        prefix = dataset_prefix(self.shard_id, self.num_shards)
        held = [entry.name for entry in storage.entries(directory) if entry.name.startswith('train_ds-')]
        if not held:
            _log.warning(
                't5ckpt: %s holds no data-iterator state; the iterator stays where it is', storage.url(directory)
            )
            return
        local = storage.local_path(join(directory, prefix))
        if local is None or not any(name.startswith(prefix) for name in held):
            raise CheckpointNotFoundError(
                f'{storage.url(directory)}: no iterator state {prefix}, it holds {", ".join(sorted(held)[:4])}. Restore '
                'with the same number of data shards, or without dataset_iterator to start the data afresh.'
            )
        self.iterator.load(local)

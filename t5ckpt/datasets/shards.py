"""Saves and restores the data iterator's state in the files ``train_ds-SSS-of-NNN*``, one per data shard (T5X)."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from t5ckpt.core.protocols import DatasetIterator, Partitioner
from t5ckpt.core.text import counted, some_of
from t5ckpt.datasets.adapters import StateIterator, as_dataset_iterator
from t5ckpt.datasets.positions import Position, Shard, by_shard, positions_in
from t5ckpt.distributed.processes import Processes
from t5ckpt.errors import DatasetStateError, T5CkptError
from t5ckpt.format.names import TRAIN_DS_PREFIX, dataset_prefix
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')
MapPositions: TypeAlias = Callable[[dict[int, Any]], Any]


@dataclasses.dataclass(frozen=True)
class DatasetState:
    """A trainer's iterator, the partitioner that assigns its data shard, and the caller's map of old positions to new shards."""

    iterator: DatasetIterator
    partitioner: Partitioner | None
    map_positions: MapPositions | None = None

    @classmethod
    def of(
        cls, iterator: Any, partitioner: Partitioner | None, map_positions: MapPositions | None = None
    ) -> DatasetState | None:
        """Adapts an iterator; None for None.

        Raises:
          UnsupportedLeafError: the iterator cannot return and restore a position.
          ValueError: there is a map, and no iterator.
        """
        if iterator is None and map_positions is not None:
            raise ValueError('map_positions has no effect without dataset_iterator. Pass both, or leave it out.')
        return None if iterator is None else cls(as_dataset_iterator(iterator), partitioner, map_positions)

    def _shard(self, processes: Processes) -> tuple[Shard, bool]:
        """The data shard that this process reads, and whether this process writes its state.

        The shard is the partitioner's (T5X); without a partitioner each process has one.
        """
        if self.partitioner is None:
            return Shard(processes.index, processes.count), True
        layout = self.partitioner.get_data_layout()
        return Shard(layout.shard_id, layout.num_shards), layout.is_first_host_in_replica_set

    def snapshot(self, processes: Processes) -> dict[str, bytes]:
        """The files of the iterator's state, by name; taken before the caller advances the iterator.

        Raises:
          DatasetStateError: the iterator cannot be saved.
        """
        shard, writes = self._shard(processes)
        if not writes:
            return {}
        prefix = dataset_prefix(*shard)
        with tempfile.TemporaryDirectory(prefix='t5ckpt-') as directory:
            try:
                self.iterator.save(os.path.join(directory, prefix))
            except T5CkptError:
                raise
            except Exception as error:
                raise DatasetStateError(
                    f'dataset_iterator: {type(self.iterator).__name__} could not be saved: {type(error).__name__}: '
                    f'{error}. Cache stateful steps of the pipeline offline, or leave out dataset_iterator.'
                ) from error
            files = _files_below(pathlib.Path(directory), prefix)
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
        return dataset_prefix(*self._shard(processes)[0])

    def load(
        self,
        storage: Storage,
        directory: str,
        processes: Processes,
        check: Callable[[str], None],
        *,
        of_orbax: bool,
        is_part: bool,
    ) -> str | None:
        """Restores the iterator's state from a checkpoint; without one, logs a warning and leaves the iterator unchanged.

        Args:
          storage: of the checkpoint.
          directory: of the checkpoint.
          processes: of the job.
          check: verifies the files that begin with a prefix.
          of_orbax: whether the checkpoint is in the layout of Orbax.
          is_part: whether the directory has only the positions of some data shards.

        Returns:
          Where the data continues, for the log; None after the warning.

        Raises:
          DatasetStateError: the positions are those of other data shards, or of another pipeline.
        """
        shard, _ = self._shard(processes)
        check(dataset_prefix(*shard))
        positions = positions_in(
            storage, directory, of_orbax=of_orbax, of_grain=isinstance(self.iterator, StateIterator)
        )
        where = storage.url(directory)
        if not positions:
            _log.warning(
                't5ckpt: %s has no data-iterator state, so the position of this iterator does not change, and batches may be '
                'repeated',
                where,
            )
            return None
        with tempfile.TemporaryDirectory(prefix='t5ckpt-') as copied:
            own = by_shard([position for position in positions if position.shard == shard])
            if own:
                self._load(own[shard.number], copied, where)
                return 'data iterator continues'
            check(TRAIN_DS_PREFIX)
            return self._load_of_others(positions, shard, copied, where, is_part=is_part)

    def _load_of_others(
        self, positions: Sequence[Position], shard: Shard, copied: str, where: str, *, is_part: bool
    ) -> str:
        """Restores the position of a shard from those of another number of shards."""
        found, count = by_shard(positions), positions[0].shard.of
        is_whole = not is_part and len(found) == count
        if is_whole and self.map_positions is not None:
            state = self.map_positions({number: position.state(copied) for number, position in found.items()})
            if state is None:
                return 'data iterator is unchanged by map_positions'
            self._set(state, where)
            return f'data iterator continues as map_positions says, from {counted(count, "data shard")}'
        # With a partitioner, the shards are known to have other data.
        if is_whole and self.partitioner is None and len({each.contents() for each in positions}) == 1:
            _log.warning(
                't5ckpt: %s: %s saved one position, at which this job of %d continues. That is right for data that all processes '
                'read alike, and for positions that count global batches; for others pass map_positions=',
                where,
                counted(count, 'process', 'processes'),
                shard.of,
            )
            self._load(positions[0], copied, where)
            return f'data iterator continues, from {counted(count, "data shard")}'
        names = some_of([position.prefix for position in positions], 4)
        cure = (
            'Restore without local=, if checkpoints_dir has the step.'
            if is_part
            else 'Pass Checkpointer(map_positions=), which makes the state of a new data shard from those of the old ones '
            '(docs/data-iterators.md); lambda positions: None starts the data afresh. open_checkpoint(...).data_positions() '
            'returns the old ones.'
        )
        raise DatasetStateError(f'{where} has no iterator state {dataset_prefix(*shard)}, only {names}. {cure}')

    def _set(self, state: Any, where: str) -> None:
        if isinstance(self.iterator, StateIterator):
            self.iterator.set(state, f'{where}: the iterator rejected the state that map_positions returned')
        else:
            self._load_files(state, where)

    def _load(self, position: Position, copied: str, where: str) -> None:
        if position.is_of_grain and isinstance(self.iterator, StateIterator):
            self.iterator.load_of_orbax(*position.file())
        else:
            self._load_files(position.local_prefix(copied), where)

    def _load_files(self, filename: str, where: str) -> None:
        try:
            self.iterator.load(filename)
        except T5CkptError:
            raise
        except Exception as error:
            raise DatasetStateError(
                f'{where}: {type(self.iterator).__name__} could not restore its state: {type(error).__name__}: {error}. '
                'Restore without dataset_iterator to start the data afresh.'
            ) from error


def warn_of_unused(storage: Storage, directory: str, level: int, *, of_orbax: bool) -> None:
    """Logs a message if a trainer without an iterator restores a checkpoint with an iterator's state."""
    positions = positions_in(storage, directory, of_orbax=of_orbax)
    if positions:
        _log.log(
            level,
            't5ckpt: %s has data-iterator state (%s), but this trainer has no dataset_iterator, so the data does not continue '
            'where it stopped',
            storage.url(directory),
            some_of([position.prefix for position in positions], 4),
        )


def _files_below(root: pathlib.Path, prefix: str) -> dict[str, bytes]:
    names = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob('*')) if path.is_file()}
    return {name: path.read_bytes() for name, path in names.items() if name.startswith(prefix)}

"""Finds the positions of data iterators in a checkpoint of t5ckpt or T5X, or of T5X or Grain through Orbax."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from t5ckpt.core.keys import join
from t5ckpt.core.text import some_of
from t5ckpt.datasets.state_file import SUFFIX, decode_state
from t5ckpt.errors import DatasetStateError
from t5ckpt.format.names import TRAIN_DS_PREFIX
from t5ckpt.storage import Storage

# The item of a step that holds the iterator's state where T5X saves through Orbax.
_ORBAX_ITEM = 'dataset'
# The files of Grain's CheckpointHandler.
_GRAIN = re.compile(r'process_([0-9]+)-of-([0-9]+)\.json')
_T5X = re.compile(rf'({TRAIN_DS_PREFIX}([0-9]+)-of-([0-9]+)).*')


class Shard(NamedTuple):
    """One of ``of`` data shards, by its number."""

    number: int
    of: int


@dataclasses.dataclass(frozen=True)
class Position:
    """The position of one data shard.

    Attributes:
      shard: whose position it is.
      storage, directory: of its files.
      prefix: of their names.
      is_of_grain: whether Grain wrote it through Orbax: one file, with the state as JSON or the bytes of its DataLoader's state.
    """

    shard: Shard
    storage: Storage
    directory: str
    prefix: str
    is_of_grain: bool = False

    def file(self) -> tuple[bytes, str]:
        """The contents and the URL of the file that Grain wrote through Orbax."""
        key = join(self.directory, self.prefix)
        return self.storage.read(key), self.storage.url(key)

    def _keys(self) -> list[str]:
        paths = [join(self.directory, name) for name in self.storage.names(self.directory, self.prefix)]
        # Some iterators write directories.
        return [key for path in paths for key in [each for each, _ in self.storage.walk(path)] or [path]]

    def contents(self) -> frozenset[tuple[str, bytes]]:
        """The files, by the ends of their names: equal for two shards at the same position."""
        start = len(join(self.directory, self.prefix))
        return frozenset((key[start:], self.storage.read(key)) for key in self._keys())

    def local_prefix(self, copied: str) -> str:
        """The path that the files begin with on this disk; files in a bucket are copied below a directory."""
        local = self.storage.local_path(self.directory)
        if local is not None:
            return os.path.join(local, self.prefix)
        for key in self._keys():
            path = pathlib.Path(copied) / key.removeprefix(f'{self.directory}/')
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.storage.read(key))
        return os.path.join(copied, self.prefix)

    def state(self, copied: str | None = None) -> Any:
        """The state that the iterator returned; of an iterator that writes files itself, the path that they begin with.

        With ``copied`` the path is that of :meth:`local_prefix`, else it is on the storage.
        """
        if self.is_of_grain:
            return _json_or_bytes(self.file()[0])
        key = join(self.directory, f'{self.prefix}{SUFFIX}')
        if self.storage.is_file(key):
            return decode_state(self.storage.read(key), self.storage.url(key))[0]
        return self.storage.url(join(self.directory, self.prefix)) if copied is None else self.local_prefix(copied)


def _json_or_bytes(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data


def positions_in(storage: Storage, directory: str, *, of_orbax: bool, of_grain: bool = True) -> list[Position]:
    """The positions in the directory of a step, by shard.

    Args:
      storage: of the step.
      directory: of the step.
      of_orbax: whether the step is in the layout of Orbax.
      of_grain: finds those that Grain wrote through Orbax, too.
    """
    found = _of_t5x(storage, directory)
    if not found and of_orbax:
        # An item of several processes has a directory for each (T5X, DatasetCheckpointHandler).
        item = join(directory, _ORBAX_ITEM)
        below = [join(item, entry.name) for entry in storage.entries(item) if entry.is_dir]
        found = [position for each in (item, *below) for position in _of_t5x(storage, each)]
        if not found and of_grain:
            items = [join(directory, entry.name) for entry in storage.entries(directory) if entry.is_dir]
            found = [position for each in items for position in _of_grain(storage, each)]
    return sorted(found, key=lambda position: (position.shard, position.directory))


def by_shard(positions: Sequence[Position]) -> dict[int, Position]:
    """The positions by the number of the shard.

    Raises:
      DatasetStateError: a shard has several, or they are those of different numbers of shards.
    """
    found = {position.shard.number: position for position in positions}
    if len(found) < len(positions) or len({position.shard.of for position in positions}) > 1:
        urls = [position.storage.url(join(position.directory, position.prefix)) for position in positions]
        raise DatasetStateError(
            f'several positions of a data iterator: {some_of(urls, 4)}. Move away those of other saves, or restore without '
            'dataset_iterator to start the data afresh.'
        )
    return found


def _of_t5x(storage: Storage, directory: str) -> list[Position]:
    matches = filter(None, map(_T5X.fullmatch, storage.names(directory, TRAIN_DS_PREFIX)))
    prefixes = {match[1]: Shard(int(match[2]), int(match[3])) for match in matches}
    return [Position(shard, storage, directory, prefix) for prefix, shard in prefixes.items()]


def _of_grain(storage: Storage, directory: str) -> list[Position]:
    matches = filter(None, map(_GRAIN.fullmatch, storage.names(directory, 'process_')))
    return [
        Position(Shard(int(match[1]), int(match[2])), storage, directory, match[0], is_of_grain=True)
        for match in matches
    ]

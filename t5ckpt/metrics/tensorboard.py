"""Reads metrics of steps from TensorBoard's event files, without TensorFlow and TensorBoard.

Each call continues where the previous one ended, so that a save reads only the events since the previous save. On an object
store, a file that has changed is fetched completely, and its new part is parsed.
"""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.metrics.event_file import EventScan
from t5ckpt.storage import PathOrStorage, Storage, open_storage

_log = logging.getLogger('t5ckpt')


class TensorBoardMetrics:
    """The metrics ``{run}/{tag}`` in a directory; pass it to ``Checkpointer(metric_source=...)``.

    A metric's name is split in every way: 'inference_eval/glue/eval/accuracy' is tag 'glue/eval/accuracy' of the files in
    ``inference_eval``, or 'accuracy' of those in ``inference_eval/glue/eval``. If several have a value for a step, the shortest
    directory takes precedence, then the last file, then the last value (T5X).

    Notes: takes 16 bytes of memory per event of the metric. Not safe from several threads.
    """

    def __init__(self, directory: PathOrStorage):
        """Opens nothing; the directory may be created later."""
        self._storage = open_storage(directory)
        self._files: dict[tuple[str, str], _EventFile] = {}

    def by_step(self, metric: str, steps: Collection[int]) -> Mapping[int, float]:
        """The values of the steps that have one.

        Raises:
          StorageError: a file cannot be read.
        """
        parts = metric.split('/')
        values: dict[int, float] = {}
        # The shortest directory comes last, so that it takes precedence.
        for length in range(len(parts) - 1, 0, -1):
            run, tag = '/'.join(parts[:length]), '/'.join(parts[length:])
            for name in sorted(entry.name for entry in self._storage.entries(run) if is_event_file(entry.name)):
                key = join(run, name)
                file = self._files.setdefault((key, tag), _EventFile(key, tag))
                file.read_on(self._storage)
                values |= file.values(steps)
        return values


def is_event_file(name: str) -> bool:
    """Whether TensorBoard reads a file of this name."""
    return 'tfevents' in name and not name.endswith('.profile-empty')


class _EventFile:
    """The values of one tag in one file."""

    def __init__(self, key: str, tag: str):
        self._key = key
        self._tag = tag
        self._begin()

    def _begin(self) -> None:
        self._scan = EventScan(self._tag.encode())
        self._steps = array('q')
        self._values = array('d')
        self._identity: Any = None

    def read_on(self, storage: Storage) -> None:
        """Reads the events that were added."""
        key, broken = self._key, self._scan.broken
        if storage.is_file_system:
            # The device and the inode, which change when the file is replaced.
            identity, size = (storage.stamp(key) or ())[:2], storage.size(key) or 0
            is_other = identity != self._identity
            self._take(size, identity, lambda start, count: storage.read(key, start, start + count), is_other)
        elif (version := storage.version(key)) not in (None, self._identity):
            with contextlib.suppress(CheckpointNotFoundError):
                data = storage.read(key)
                self._take(len(data), version, lambda start, count: data[start : start + count], is_other=False)
        if self._scan.broken > broken:
            _log.warning('t5ckpt: %s is damaged, so some of its metrics are missing', storage.url(key))

    def _take(self, size: int, identity: Any, read: Callable[[int, int], bytes], is_other: bool) -> None:
        if size < self._scan.offset or is_other:
            self._begin()
        self._identity = identity
        for scalar in self._scan.scalars(size, read):
            if scalar.tag == self._tag:
                self._steps.append(scalar.step)
                self._values.append(scalar.value)

    def values(self, wanted: Collection[int]) -> dict[int, float]:
        """The last value of each wanted step that has one."""
        if not self._steps:
            return {}
        steps, values = np.array(self._steps), np.array(self._values)
        indices = np.flatnonzero(np.isin(steps, list(wanted)))
        return {int(steps[index]): float(values[index]) for index in indices}

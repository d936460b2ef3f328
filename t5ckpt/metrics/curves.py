"""Reads all scalars of the event files of TensorBoard below a run's directory, as curves for a report.

Notes: reads at most 64 MB of events, the newest files first, and keeps at most 1,000 points of each of 200 curves. Records
above 16 kB are skipped, since they hold images and histograms. Directories of steps are not searched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator

from t5ckpt.errors import T5CkptError
from t5ckpt.format.chunk_grid import ceil_div
from t5ckpt.format.names import parse_prefixed_step
from t5ckpt.metrics.event_file import EventScan
from t5ckpt.metrics.tensorboard import is_event_file
from t5ckpt.storage import Storage, foreign_errors

_log = logging.getLogger('t5ckpt')

_MAX_BYTES = 64 * 2**20
_MAX_RECORD = 2**14
_MAX_CURVES = 200
_MAX_POINTS = 1000
_MAX_DEPTH = 4


@dataclasses.dataclass(frozen=True)
class Curve:
    """The values of a tag.

    Attributes:
      name: directory and tag, as in :class:`TensorBoardMetrics`; the tag alone for files in the run's directory.
      points: (step, unix seconds, value), ascending by step; of a step the last value.
      count: the number of steps with a value, of which ``points`` may be a selection.
    """

    name: str
    points: tuple[tuple[int, float, float], ...]
    count: int


def curves(storage: Storage) -> list[Curve]:
    """The curves of a run by name. For a run that is not on a local file system, logs a line and returns none."""
    root = storage.local_path('')
    if root is None:
        _log.warning(
            't5ckpt: %s: event files are read on local file systems only; their curves are not drawn', storage.url()
        )
        return []
    points: dict[str, dict[int, tuple[float, float]]] = {}
    for path in _chosen(root):
        directory = os.path.relpath(os.path.dirname(path), root)
        scan = EventScan(max_record=_MAX_RECORD)
        try:
            with foreign_errors(path), open(path, 'rb') as file:
                size, number = os.path.getsize(path), file.fileno()
                for scalar in scan.scalars(size, lambda start, count, number=number: os.pread(number, count, start)):
                    name = scalar.tag if directory == os.curdir else f'{directory}/{scalar.tag}'
                    points.setdefault(name, {})[scalar.step] = (scalar.time, scalar.value)
        except T5CkptError as error:
            _log.warning('t5ckpt: events are not read: %s', error)
    return [_curve(name, points[name]) for name in sorted(points)[:_MAX_CURVES]]


def _chosen(root: str) -> list[str]:
    """The newest files within the limit; the oldest first, so that the last attempt of a resumed run replaces the others."""
    files: list[tuple[float, int, str]] = []
    for path in _event_files(root):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            files.append((status.st_mtime, status.st_size, path))
    left, chosen = _MAX_BYTES, list[str]()
    for _, size, path in sorted(files, reverse=True):
        if size <= left:
            chosen.append(path)
            left -= size
    if len(chosen) < len(files):
        _log.info('t5ckpt: of %d files of events, %d are read: the others are too large', len(files), len(chosen))
    return chosen[::-1]


def _event_files(root: str) -> Iterator[str]:
    for parent, directories, names in os.walk(root):
        if parent == root:
            directories[:] = [name for name in directories if parse_prefixed_step(name.partition('.')[0]) is None]
        elif parent.count(os.sep) - root.count(os.sep) == _MAX_DEPTH:
            directories.clear()
        yield from (os.path.join(parent, name) for name in names if is_event_file(name))


def _curve(name: str, values: dict[int, tuple[float, float]]) -> Curve:
    steps = sorted(values)
    every = max(1, ceil_div(len(steps), _MAX_POINTS))
    # From the end, so that the last point is always there.
    kept = steps[::-1][::every][::-1]
    return Curve(name, tuple((step, *values[step]) for step in kept), len(steps))

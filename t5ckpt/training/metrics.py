"""Writes scalars and histograms for TensorBoard from process 0, without TensorFlow.

Uses tensorboardX's record writer in the caller's thread. tensorboardX's ``SummaryWriter`` has two problems: its ``flush`` does
not wait for the thread that writes, and its file name contains the second, so that two starts in one second write to the same
file.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any, Self

import numpy as np

from t5ckpt.core.leaf_path import leaf_name
from t5ckpt.distributed.processes import jax_processes
from t5ckpt.errors import MissingDependencyError, UnsupportedFormatError, UnsupportedLeafError
from t5ckpt.storage import open_storage
from t5ckpt.tree.leaf_table import Empty
from t5ckpt.tree.train_state import flatten_state

_log = logging.getLogger('t5ckpt')
_BINS = 64


class MetricWriter:
    """Writes an event file to a directory, which is one run in TensorBoard.

    Args:
      directory: a local directory, which is created if necessary.
      resume_at: the step at which a killed run resumes: TensorBoard discards earlier events of this and later steps.

    Raises:
      MissingDependencyError: the extra 'tensorboard' is not installed.
      UnsupportedFormatError: the directory is not on a local file system.

    Notes: does nothing in processes other than the first. Writing an event takes about 50 microseconds; fetching a value waits
    for the step that computes it. ``flush`` makes all events durable.
    """

    def __init__(self, directory: str | os.PathLike[str], *, resume_at: int | None = None):
        self._events: Any = None
        root = open_storage(directory).local_path('')
        if root is None:
            raise UnsupportedFormatError(
                f'{directory}: event files are appended to, which needs a local file system. Write to a local directory and copy '
                'it.'
            )
        if jax_processes().index != 0:
            return
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2
        except ImportError as error:
            raise MissingDependencyError(
                "MetricWriter needs tensorboardX: pip install tensorboardX, or pip install 't5ckpt[tensorboard]'"
            ) from error
        os.makedirs(root, exist_ok=True)
        # Any, because these classes are generated when the modules are loaded.
        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        self._events = EventsWriter(os.path.join(root, 'events'), f'.{os.getpid()}.{time.time_ns()}')
        if resume_at is not None:
            log = self._event.SessionLog(status=self._event.SessionLog.START)
            self._events.write_event(self._event.Event(wall_time=time.time(), step=resume_at, session_log=log))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, metrics: Any) -> None:
        """Writes one event with all metrics.

        Args:
          step: of the run.
          metrics: a pytree. A number or an array without dimensions is a scalar, any other array a histogram. The name is the
            path: ``{'loss': {'train': x}}`` has the name ``loss/train``.

        Raises:
          UnsupportedLeafError: a value is not a number, or is partly on devices of other processes.
        """
        if self._events is None:
            return
        values = [
            self._value(leaf_name(path), leaf)
            for path, leaf in flatten_state(metrics).table.items()
            if leaf is not None and not isinstance(leaf, Empty)
        ]
        summary = self._summary.Summary(value=[value for value in values if value is not None])
        self._events.write_event(self._event.Event(wall_time=time.time(), step=int(step), summary=summary))

    def flush(self) -> None:
        """Makes all events durable."""
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def _value(self, name: str, leaf: Any) -> Any:
        if not getattr(leaf, 'is_fully_addressable', True) and not leaf.is_fully_replicated:
            raise UnsupportedLeafError(
                f'{name} is partly on devices of other processes ({leaf.sharding}). Return it replicated from the step, with '
                'out_shardings=PartitionSpec().'
            )
        array = np.asarray(leaf)
        try:
            values = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise UnsupportedLeafError(
                f'{name}: {type(leaf).__name__} {leaf!r:.40} is not a number. Leave it out.'
            ) from error
        if values.ndim == 0:
            return self._summary.Summary.Value(tag=name, simple_value=float(values))
        finite = values[np.isfinite(values)]
        if finite.size < values.size or finite.size == 0:
            text = 't5ckpt: histogram %s: %d of %d values are not finite, so they are left out'
            _log.warning(text, name, values.size - finite.size, values.size)
        return None if finite.size == 0 else self._histogram(name, finite)

    def _histogram(self, name: str, values: np.ndarray) -> Any:
        counts, edges = np.histogram(values, bins=_BINS)
        proto = self._summary.HistogramProto(
            min=values.min(),
            max=values.max(),
            num=values.size,
            sum=values.sum(),
            sum_squares=np.square(values).sum(),
            bucket_limit=edges[1:],
            bucket=counts,
        )
        return self._summary.Summary.Value(tag=name, histo=proto)

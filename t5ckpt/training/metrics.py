"""Scalars and histograms for TensorBoard, from process 0, without TensorFlow.

Events are written by tensorboardX's record writer straight from the caller's thread. Its ``SummaryWriter`` is not used:
it hands events to a thread and does not wait for it in ``flush``, and names the file by the second, so that two starts
in one second write to one file.
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

__all__ = ['MetricWriter']

_log = logging.getLogger('t5ckpt')
_BINS = 64


class MetricWriter:
    """Writes an event file into a directory; one directory is one run of TensorBoard.

    Args:
      directory: a local one; made if it is not there.
      resume_at: the step at which a run goes on that was killed: TensorBoard drops what the killed one wrote for this
        step and later.

    Raises:
      MissingDependencyError: the extra 'tensorboard' is not installed.
      UnsupportedFormatError: the directory is not on a local file system.

    Notes: in processes other than the first nothing is written and no array is fetched. An event takes some 50
    microseconds; fetching a value waits for the step that computes it. ``flush`` makes everything durable.
    """

    def __init__(self, directory: str | os.PathLike[str], *, resume_at: int | None = None):
        self._events: Any = None
        root = open_storage(directory).local_path('')
        if root is None:
            raise UnsupportedFormatError(
                f'{directory}: event files are appended to, which only a local file system can do. Write to a local directory, '
                'and copy it.'
            )
        if jax_processes().index != 0:
            return
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2
        except ImportError as error:
            raise MissingDependencyError(
                "MetricWriter needs tensorboardX: pip install 't5ckpt[tensorboard]'"
            ) from error
        os.makedirs(root, exist_ok=True)
        # The classes in them are made when the modules are loaded.
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
        """Writes one event with all of them.

        Args:
          step: of the run.
          metrics: a pytree. A number or an array without dimensions is a scalar, any other array a histogram; the name
            is the path, ``{'loss': {'train': x}}`` gives ``loss/train``.

        Raises:
          UnsupportedLeafError: a value is no number, or lies on devices of other processes.
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
        """Makes what was written durable."""
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Ends the file."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def _value(self, name: str, leaf: Any) -> Any:
        if not getattr(leaf, 'is_fully_addressable', True) and not leaf.is_fully_replicated:
            raise UnsupportedLeafError(
                f'{name}: lies in parts on devices of other processes ({leaf.sharding}). Return it replicated from the '
                'step, with out_shardings=PartitionSpec().'
            )
        array = np.asarray(leaf)
        try:
            values = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise UnsupportedLeafError(f'{name}: {type(leaf).__name__} {leaf!r:.40} is no number') from error
        if values.ndim == 0:
            return self._summary.Summary.Value(tag=name, simple_value=float(values))
        finite = values[np.isfinite(values)]
        if finite.size < values.size or finite.size == 0:
            text = 't5ckpt: histogram %s: %d of %d values are not finite and are left out'
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

"""Adapts data iterators to one protocol.

The protocol is T5X's and CLU's: ``save(filename)`` writes files whose names begin with ``filename``, and ``load(filename)``
(``restore`` in newer CLUs) restores the position. Other iterators that are accepted, in the order of the tests:

    tf.data iterators                     a TensorFlow checkpoint of the iterator as ``ds``, byte for byte as T5X writes it
    get_state() / set_state(state)        Grain's iterators
    state_dict() / load_state_dict(state) torch's StatefulDataLoader, and any ``Stateful`` object

``datasets/state_file.py`` writes the state of the last two to ``<filename>.msgpack``.
"""

from __future__ import annotations

import inspect
import json
import pathlib
from collections.abc import Callable
from typing import Any

from t5ckpt.core.loaded import loaded
from t5ckpt.core.protocols import DatasetIterator
from t5ckpt.datasets.state_file import SUFFIX, decode_state, encode_state
from t5ckpt.errors import DatasetStateError, UnsupportedLeafError

# T5X's message (t5x/checkpoints.py), which users of tf.data search for.
_STATELESS = (
    'Input pipeline must be stateless in order to checkpoint. Cache stateful steps offline or disable iterator '
    'checkpointing (leave out dataset_iterator).'
)


class StateIterator:
    """Adapts an iterator that returns its state and accepts one."""

    def __init__(self, get_state: Callable[[], Any], set_state: Callable[[Any], Any], name: str):
        """``name`` is the iterator's class, for messages."""
        self._get_state = get_state
        self._set_state = set_state
        self._name = name

    def save(self, filename: str) -> None:
        """Writes ``<filename>.msgpack``."""
        pathlib.Path(filename + SUFFIX).write_bytes(encode_state(self._get_state(), self._name))

    def load(self, filename: str) -> None:
        """Restores the state in ``<filename>.msgpack``; a file that does not decode leaves the iterator unchanged."""
        path = pathlib.Path(filename + SUFFIX)
        if not path.exists():
            raise DatasetStateError(
                f'{filename}*: {self._name} cannot restore it, since there is no {path.name}: another kind of iterator wrote it. '
                'Restore with that kind, or without dataset_iterator to start the data afresh.'
            )
        state, name = decode_state(path.read_bytes(), str(path))
        self.set(state, f'{path}: {self._name} rejected the state that {name} has written')

    def load_of_orbax(self, data: bytes, where: str) -> None:
        """Restores the state in a file that Grain wrote through Orbax: JSON, or the bytes of its DataLoader's state."""
        rejected = f'{where}: {self._name} rejected the state that Grain has written'
        try:
            state: Any = data if isinstance(self._get_state(), bytes) else json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DatasetStateError(f'{rejected}: it does not decode ({error!s:.120}).') from error
        self.set(state, rejected)

    def set(self, state: Any, rejected: str) -> None:
        """Sets a state; the error begins with ``rejected``."""
        try:
            self._set_state(state)
        except Exception as error:
            raise DatasetStateError(
                f'{rejected}: {type(error).__name__}: {error}. Restore with the same pipeline and as many workers, or without '
                'dataset_iterator to start the data afresh.'
            ) from error


class TfDataIterator:
    """Adapts iterators of tf.data, with T5X's files ``<filename>.index`` and ``<filename>.data-*``."""

    def __init__(self, iterator: Any):
        """Wraps ``iter(dataset)``, or a ``tf.train.Checkpoint`` of several."""
        import tensorflow as tf

        is_several = isinstance(iterator, tf.train.Checkpoint)
        self._checkpoint = iterator if is_several else tf.train.Checkpoint(ds=iterator)
        self._stateful = tf.errors.FailedPreconditionError
        self._unreadable = tf.errors.OpError

    def save(self, filename: str) -> None:
        """Writes a TensorFlow checkpoint."""
        try:
            self._checkpoint.write(filename)
        except self._stateful as error:
            raise DatasetStateError(f'{_STATELESS} TensorFlow says: {error.message}') from error

    def load(self, filename: str) -> None:
        """Restores the position in a TensorFlow checkpoint."""
        try:
            self._checkpoint.read(filename).assert_consumed()
        except (self._unreadable, AssertionError) as error:
            raise DatasetStateError(
                f'{filename}*: the tf.data iterator rejected this state: {error!s:.300}. Restore with the same pipeline, or '
                'without dataset_iterator to start the data afresh.'
            ) from error


class _Renamed:
    """Adapts newer CLU iterators, whose ``load`` has the name ``restore``."""

    def __init__(self, iterator: Any):
        self.save = iterator.save
        self.load = iterator.restore


def as_dataset_iterator(iterator: Any) -> DatasetIterator:
    """Adapts an iterator to the protocol; one that implements it is returned unchanged.

    Raises:
      UnsupportedLeafError: it cannot return and restore a position; the message names the methods that are needed.
    """
    tf = loaded('tensorflow')
    if tf is not None and isinstance(iterator, tf.data.Dataset):
        # Its methods `save` and `load` write and read all elements.
        raise UnsupportedLeafError(
            'dataset_iterator: a tf.data.Dataset has no position. Pass iter(dataset), and train from that iterator.'
        )
    if tf is not None and isinstance(iterator, (tf.data.Iterator, tf.data.NumpyIterator, tf.train.Checkpoint)):
        return TfDataIterator(iterator)
    # Grain's iterators also have `save` and `load`, but these are coroutines of Orbax's protocol.
    if _has(iterator, 'save', 'restore'):
        return _Renamed(iterator)
    if _has(iterator, 'save', 'load'):
        return iterator
    for get, put in (('get_state', 'set_state'), ('state_dict', 'load_state_dict')):
        if _has(iterator, get, put):
            cls = type(iterator)
            name = f'{cls.__module__}.{cls.__qualname__}'
            return StateIterator(getattr(iterator, get), getattr(iterator, put), name)
    raise UnsupportedLeafError(
        f'dataset_iterator: {type(iterator).__name__} cannot return its position. It needs save(filename) and '
        'load(filename), get_state() and set_state(state), or state_dict() and load_state_dict(state). For tf.data and Grain '
        'pass iter(dataset), for several of tf.data tf.train.Checkpoint(train=..., eval=...), for torch a '
        'torchdata.StatefulDataLoader.'
    )


def _has(iterator: Any, *names: str) -> bool:
    methods = [getattr(iterator, name, None) for name in names]
    return all(callable(method) and not inspect.iscoroutinefunction(method) for method in methods)

"""One protocol for data iterators, and what makes others fit it.

The protocol is T5X's and CLU's: ``save(filename)`` writes files whose names begin with ``filename``, ``load(filename)``
(``restore`` in newer CLUs) takes the position back. What else is accepted, in the order in which it is looked for:

    tf.data iterators                     a TensorFlow checkpoint of the iterator as ``ds``, byte for byte what T5X writes
    get_state() / set_state(state)        Grain's iterators
    state_dict() / load_state_dict(state) torch's StatefulDataLoader, anything that is ``Stateful``

The state of the last two is written by ``datasets/state_file.py``, to ``<filename>.msgpack``.
"""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Callable
from typing import Any

from t5ckpt.core.loaded import loaded
from t5ckpt.core.protocols import DatasetIterator
from t5ckpt.datasets.state_file import decode_state, encode_state
from t5ckpt.errors import DatasetStateError, UnsupportedLeafError

__all__ = ['SUFFIX', 'StateIterator', 'TfDataIterator', 'as_dataset_iterator']

SUFFIX = '.msgpack'
# T5X's own words (t5x/checkpoints.py), which users of tf.data search for.
_STATELESS = (
    'Input pipeline must be stateless in order to checkpoint. Cache stateful steps offline or disable iterator '
    'checkpointing (leave out dataset_iterator).'
)


class StateIterator:
    """The protocol for an iterator that hands out its state and takes one back."""

    def __init__(self, get_state: Callable[[], Any], set_state: Callable[[Any], Any], name: str):
        """``name`` is the iterator's class, for messages."""
        self._get_state = get_state
        self._set_state = set_state
        self._name = name

    def save(self, filename: str) -> None:
        """Writes ``<filename>.msgpack``."""
        pathlib.Path(filename + SUFFIX).write_bytes(encode_state(self._get_state(), self._name))

    def load(self, filename: str) -> None:
        """Reads it; a file that does not decode leaves the iterator as it is."""
        path = pathlib.Path(filename + SUFFIX)
        if not path.exists():
            raise DatasetStateError(
                f'{filename}* is no state that {self._name} can take: there is no {path.name}. It was written by an '
                'iterator of another kind. Restore with that kind, or without dataset_iterator to start the data afresh.'
            )
        state, name = decode_state(path.read_bytes(), str(path))
        try:
            self._set_state(state)
        except Exception as error:
            raise DatasetStateError(
                f'{path}: {self._name} did not take the state that {name} has written: {type(error).__name__}: {error}. '
                'Is it the same pipeline? Restore without dataset_iterator to start the data afresh.'
            ) from error


class TfDataIterator:
    """The protocol for an iterator of tf.data, in T5X's files ``<filename>.index`` and ``<filename>.data-*``."""

    def __init__(self, iterator: Any):
        """Wraps ``iter(dataset)``."""
        import tensorflow as tf

        self._checkpoint = tf.train.Checkpoint(ds=iterator)
        self._stateful = tf.errors.FailedPreconditionError
        self._unreadable = tf.errors.OpError

    def save(self, filename: str) -> None:
        """Writes a TensorFlow checkpoint."""
        try:
            self._checkpoint.write(filename)
        except self._stateful as error:
            raise DatasetStateError(f'{_STATELESS} TensorFlow says: {error.message}') from error

    def load(self, filename: str) -> None:
        """Reads one."""
        try:
            self._checkpoint.read(filename).assert_consumed()
        except (self._unreadable, AssertionError) as error:
            raise DatasetStateError(
                f'{filename}*: the tf.data iterator did not take this state: {error!s:.300}. It must come from the same '
                'pipeline. Restore without dataset_iterator to start the data afresh.'
            ) from error


class _Renamed:
    """The protocol for newer CLU iterators, whose ``load`` is called ``restore``."""

    def __init__(self, iterator: Any):
        self.save = iterator.save
        self.load = iterator.restore


def as_dataset_iterator(iterator: Any) -> DatasetIterator:
    """Makes an iterator fit the protocol; one that fits is returned as it is.

    Raises:
      UnsupportedLeafError: it has no way to say or to take a position; the message says what would.
    """
    tf = loaded('tensorflow')
    if tf is not None and isinstance(iterator, tf.data.Dataset):
        # It has `save` and `load`, which write and read every element of it.
        raise UnsupportedLeafError(
            'dataset_iterator: this is a tf.data.Dataset, which has no position. Pass iter(dataset), and train from that.'
        )
    if tf is not None and isinstance(iterator, (tf.data.Iterator, tf.data.NumpyIterator)):
        return TfDataIterator(iterator)
    # Grain's iterators have `save` and `load` too, but coroutines of Orbax's protocol.
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
        f'dataset_iterator: {type(iterator).__name__} cannot say where it stands. It needs save(filename) and '
        'load(filename), get_state() and set_state(state), or state_dict() and load_state_dict(state); iterators of '
        'tf.data and Grain and torchdata.StatefulDataLoader are accepted as they are. Of a Grain dataset pass '
        'iter(dataset), of torch the loader itself.'
    )


def _has(iterator: Any, *names: str) -> bool:
    methods = [getattr(iterator, name, None) for name in names]
    return all(callable(method) and not inspect.iscoroutinefunction(method) for method in methods)

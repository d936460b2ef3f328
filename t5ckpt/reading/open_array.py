"""An opened array, and the reads that fill buffers with its boxes. ``ArrayReader.start_open`` chooses the class."""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import tensorstore as ts

from t5ckpt.errors import T5CkptError
from t5ckpt.format.chunk_grid import Box
from t5ckpt.format.stored_leaf import StoredLeaf
from t5ckpt.reading.aligned_memory import aligned_empty
from t5ckpt.reading.basic_index import relative_to_box
from t5ckpt.reading.size_limits import check_memory
from t5ckpt.storage import TENSORSTORE_ERRORS, Storage, foreign_errors

Task = Callable[[], None]


class Filling:
    """Reads in flight, of threads and of TensorStore. Their buffers must outlive them."""

    def __init__(self, storage: Storage, where: str, futures: Sequence[Any]):
        """Takes the futures; ``where`` is for errors."""
        self._storage = storage
        self._where = where
        self._futures = futures

    def wait(self) -> None:
        """Waits until all buffers are filled; raises the first error."""
        with foreign_errors(self._where):
            for future in self._futures:
                if isinstance(future, Future):
                    future.result()
                else:
                    self._storage.wait(future)

    def abandon(self) -> None:
        """Cancels the reads of threads, and waits for those of TensorStore, which cannot be cancelled."""
        for future in self._futures:
            if isinstance(future, Future):
                future.cancel()
            else:
                with contextlib.suppress(*TENSORSTORE_ERRORS, T5CkptError):
                    self._storage.wait(future)


class OpenArray(abc.ABC):
    """An opened array.

    Attributes:
      converts: whether buffers may have the dtype to convert to instead of the dtype on disk.
    """

    def __init__(self, storage: Storage, leaf: StoredLeaf, where: str, *, converts: bool = False):
        """Takes the array; ``where`` has the names of the leaf and of the array, for errors."""
        self.converts = converts
        self._storage = storage
        self._leaf = leaf
        self._where = where

    @abc.abstractmethod
    def fill(self, buffers: Mapping[Box, np.ndarray], pool: Executor | None = None) -> Filling:
        """Starts to fill C-order buffers with their boxes of the array, in threads of the pool or in the caller's."""

    @abc.abstractmethod
    def read(self, slices: tuple[slice, ...]) -> np.ndarray:
        """Reads forward slices, in the dtype on disk. A caller who wants checksums compared does that before."""

    def _new_buffer(self, shape: tuple[int, ...]) -> np.ndarray:
        check_memory(math.prod(shape) * self._leaf.array.dtype.itemsize, self._where)
        return aligned_empty(shape, self._leaf.array.dtype)


class FileArray(OpenArray):
    """An array whose uncompressed bytes are read from files, or from ranges of an object, by tasks for threads."""

    def __init__(
        self,
        storage: Storage,
        leaf: StoredLeaf,
        where: str,
        tasks: Callable[[Mapping[Box, np.ndarray]], list[Task]],
        *,
        converts: bool = False,
    ):
        """``tasks`` returns the tasks that fill buffers."""
        super().__init__(storage, leaf, where, converts=converts)
        self._tasks = tasks

    def fill(self, buffers: Mapping[Box, np.ndarray], pool: Executor | None = None) -> Filling:
        """See ``OpenArray``."""
        return Filling(self._storage, self._where, _started(self._tasks(buffers), pool))

    def read(self, slices: tuple[slice, ...]) -> np.ndarray:
        """See ``OpenArray``."""
        box = Box.from_slices(slices, self._leaf.shape)
        out = self._new_buffer(box.shape)
        self.fill({box: out})
        return out[relative_to_box(slices)]


class TensorStoreArray(OpenArray):
    """An array that TensorStore reads, in threads of its own."""

    def __init__(
        self,
        storage: Storage,
        leaf: StoredLeaf,
        where: str,
        store: Any,
        checks: Callable[[Iterable[Box]], list[Task]],
    ):
        """Takes the opened TensorStore, and the tasks that verify the files of boxes."""
        super().__init__(storage, leaf, where)
        self._store = store
        self._checks = checks

    def fill(self, buffers: Mapping[Box, np.ndarray], pool: Executor | None = None) -> Filling:
        """See ``OpenArray``."""
        views = {box: self._store[box.slices] for box in buffers}
        futures = _started(self._checks(buffers), pool)
        futures += [_start_read(views[box], buffer) for box, buffer in buffers.items()]
        return Filling(self._storage, self._where, futures)

    def read(self, slices: tuple[slice, ...]) -> np.ndarray:
        """See ``OpenArray``."""
        view = self._store[slices] if slices else self._store
        out = self._new_buffer(tuple(view.shape))
        with foreign_errors(self._where):
            self._storage.wait(_start_read(view, out))
        return out


def _started(tasks: Iterable[Task], pool: Executor | None) -> list[Any]:
    """The futures of tasks in a pool; without one, the tasks run now."""
    if pool is not None:
        return [pool.submit(task) for task in tasks]
    for task in tasks:
        task()
    return []


def _start_read(view: Any, out: np.ndarray) -> Any:
    """Starts to read a TensorStore array into a numpy array of its shape and dtype."""
    if view.rank:
        view = view[ts.d[:].translate_to[0]]
    return ts.array(out).write(view)

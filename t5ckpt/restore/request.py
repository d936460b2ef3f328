"""The request of one restore, and the check of its step or path."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5ckpt.catalog.locate import Located
from t5ckpt.core.arguments import given_step
from t5ckpt.core.byte_budget import ByteBudget
from t5ckpt.core.call_site import Notices
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.protocols import Partitioner, Progress
from t5ckpt.core.text import shown
from t5ckpt.datasets import DatasetState
from t5ckpt.distributed.rounds import CoordinationRound
from t5ckpt.errors import T5CkptError
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.options import CheckpointerOptions
from t5ckpt.planning.casts import Cast
from t5ckpt.planning.leaf_choice import LeafChoice
from t5ckpt.planning.leaf_reads import StoredRead
from t5ckpt.reading.array_reader import ArrayReader
from t5ckpt.storage import Storage
from t5ckpt.tree.leaf_table import LeafTable


class LocalPart(ABC):
    """A checkpoint of which each process has a part in a storage of its own.

    Attributes:
      located: the part of this process.
      manifest, facts: of the checkpoint, the same in all processes.
      checksums: of the files of the part.
    """

    located: Located
    manifest: bytes
    facts: bytes
    checksums: FileChecksums

    @abstractmethod
    def agree(self, at: CoordinationRound, reads: Sequence[StoredRead], position: str | None) -> None:
        """Agrees with the other processes, which call it too, on where each array comes from.

        ``position`` is the prefix of the position of this process's data iterator, or None.
        """

    @abstractmethod
    def read(
        self, request: RestoreRequest, reader: ArrayReader, reads: Sequence[StoredRead], budget: ByteBudget
    ) -> dict[Path, Any]:
        """Reads arrays, as ``read_arrays``, after a vote in ``Phase.SEND``; all processes call it."""

    @abstractmethod
    def positions(self) -> tuple[Storage, str] | None:
        """The storage and the directory of the position of this process; None if it is in ``located``."""


@dataclasses.dataclass(frozen=True)
class RestoreRequest:
    """The arguments of a call, see ``Checkpointer.restore``, and of its checkpointer.

    Attributes:
      template: the state whose structure, dtypes and shardings the result has.
      partitioner: as passed to ``Checkpointer``; its shardings replace those of the template.
      dataset: the data iterator, whose position is restored except with ``leaves_iterator``.
      storage, storage_options: of the run, and for a ``path`` elsewhere.
      round: of all processes of the job.
      cast: of the leaves, from ``restore_dtype`` and ``cast_leaves``.
      reading: the options of reads, such as memory maps.
      continues: whether the caller may train on, so that data without its position is worth a warning.
      choice: which leaves come from the checkpoint.
      repeats: whether the same call will restore later checkpoints of the run, too, which have the new names.
      strict: see ``strictness``.
      fallback: ``fallback_state``.
      init: returns the values of new leaves; None takes them from the template. All processes call it together.
      note_read: called with the bytes of arrays that this process has read.
      sources: returns what the log line of the restore says of the tiers that the arrays came from.
      note_step: called after the restore, with the step of the run; None for one from a ``path``.
      no_step: makes the error for a step that does not exist; None lists the steps of ``storage`` in it.
      local_part: in a job of several processes, the part that this process has on its disk; None reads ``storage`` or a ``path``.
    """

    template: Any
    partitioner: Partitioner | None
    dataset: DatasetState | None
    storage: Storage
    storage_options: Mapping[str, Any] | None
    round: CoordinationRound
    cast: Cast | None
    progress: Progress | None
    reading: CheckpointerOptions
    notices: Notices
    continues: bool
    choice: LeafChoice
    strict: str
    transforms: Sequence[Any] = ()
    step: int | None = None
    path: str | os.PathLike[str] | None = None
    fallback: Mapping[str, Any] | None = None
    lazy: bool = False
    donate: bool = False
    leaves_iterator: bool = False
    init: Callable[[Sequence[Path]], LeafTable] | None = None
    repeats: bool = False
    note_read: Callable[[int], None] = lambda _: None
    sources: Callable[[], str] = lambda: ''
    note_step: Callable[[int | None], None] = lambda _: None
    no_step: Callable[[int], T5CkptError] | None = None
    local_part: LocalPart | None = None


def check_source(step: Any, path: Any) -> None:
    """Checks the step and the path of a restore.

    Raises:
      ValueError: both are given, or the step is not an integer of at least 0, or the path is empty.
    """
    if path is not None and not os.fspath(path):
        raise ValueError(
            'path is empty. Pass the path of a checkpoint, or leave it out to restore a step of checkpoints_dir.'
        )
    if step is not None and path is not None:
        raise ValueError(f'step={shown(step)} and path={os.fspath(path)!r} exclude each other: pass one of them.')
    given_step(step)

"""The part of ``Checkpointer`` that reads TensorFlow checkpoints; the signatures are T5X's."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from t5ckpt.commit.transaction import CommittedCheckpoint
from t5ckpt.core.byte_budget import bytes_of_gb
from t5ckpt.core.protocols import Clock, Partitioner, Progress, SaveStateTransformationFn
from t5ckpt.distributed.rounds import CoordinationRound
from t5ckpt.format.dtypes import Cast
from t5ckpt.planning.save_plan import SaveOptions
from t5ckpt.save.stream_writer import StreamRequest
from t5ckpt.save.transforms import LeafAxes
from t5ckpt.storage import Storage, require_directory
from t5ckpt.translate import CheckpointTranslator

__all__ = ['FromTensorFlow']


class FromTensorFlow(ABC):
    """Restores and converts checkpoints of Mesh-TensorFlow's T5, with the model, storage and options of a checkpointer."""

    _train_state: Any
    _partitioner: Partitioner | None
    _axes: LeafAxes
    _storage: Storage
    _options: SaveOptions
    _progress: Progress | None
    _clock: Clock

    @abstractmethod
    def _round(self, action: str) -> CoordinationRound: ...

    @abstractmethod
    def _restore_cast(self) -> Cast | None: ...

    def restore_from_tf_checkpoint(
        self, path_or_dir: str | os.PathLike[str], strict: bool = True, translator: CheckpointTranslator | None = None
    ) -> Any:
        """Restores a train state of the constructor's structure from a TensorFlow checkpoint of Mesh-TensorFlow's T5.

        Args:
          path_or_dir: a directory, or the prefix of a checkpoint's files.
          strict: False leaves out what the model does not have. What the model has must be there either way.
          translator: rules from TensorFlow's names; None takes those of T5 (``convert/tf_rules.py``).

        Raises:
          TreeMismatchError: checkpoint and model differ, or a name has no rule; the error lists all of it.
        """
        from t5ckpt.convert.tf.model import restore_tf

        restore_round = self._round('a restore')
        try:
            restored = restore_tf(
                (path_or_dir, strict, translator), self._restore_cast(), self._train_state, self._partitioner
            )
        except BaseException as error:
            restore_round.fail('restore', error)
            raise
        restore_round.reduce_on_leader('restore', None, lambda _: None)
        return restored

    def convert_from_tf_checkpoint(
        self,
        path_or_dir: str | os.PathLike[str],
        *,
        state_transformation_fns: Sequence[SaveStateTransformationFn] = (),
        concurrent_gb: float = 16,
        translator: CheckpointTranslator | None = None,
    ) -> CommittedCheckpoint | None:
        """Writes a TensorFlow checkpoint as a step of ``checkpoints_dir``, tensor by tensor; process 0 does it alone.

        What the model does not have is left out. A conversion that was killed goes on where it was.

        Args:
          path_or_dir: see :meth:`restore_from_tf_checkpoint`.
          state_transformation_fns: as in ``save``.
          concurrent_gb: gigabytes (10^9 bytes) of values in flight.
          translator: see :meth:`restore_from_tf_checkpoint`.

        Returns:
          The checkpoint, in process 0; None elsewhere, and when a complete one of this step was there already.
        """
        from t5ckpt.convert.tf.model import convert_tf_to_model

        require_directory(self._storage)
        budget = bytes_of_gb(concurrent_gb)
        request = StreamRequest(self._storage, 0, self._options, budget, progress=self._progress, clock=self._clock)
        done: list[CommittedCheckpoint | None] = []

        def convert(_: Sequence[Any]) -> None:
            asked = (path_or_dir, False, translator)
            model = (self._train_state, self._partitioner)
            done.append(convert_tf_to_model(asked, request, model, self._axes, state_transformation_fns))

        self._round('a conversion').reduce_on_leader('convert', None, convert)
        return done[0] if done else None

"""T5X's SaveBestCheckpointer: a Checkpointer whose keep policy looks at a metric, and nothing else."""

from __future__ import annotations

import os
from typing import Any

from t5ckpt.catalog.locate import open_run_storage
from t5ckpt.checkpointer import Checkpointer
from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.protocols import Partitioner
from t5ckpt.errors import NoEffectWarning
from t5ckpt.metrics import TensorBoardMetrics
from t5ckpt.policies import KeepAll, KeepBest, KeepPolicy, check_metric_mode, check_metric_name
from t5ckpt.storage import Storage

__all__ = ['SaveBestCheckpointer']


class SaveBestCheckpointer(Checkpointer):
    """Keeps the ``keep`` best checkpoints by a metric, and besides always the latest. Signature as in T5X.

    The metric comes from TensorBoard's event files below ``checkpoints_dir``, or from ``save(..., metrics={...})``,
    which counts where both have it. Neither TensorFlow nor TensorBoard need be installed.

    Args:
      train_state: this and the next three as for ``Checkpointer``, and so are all keywords that are not named here.
      partitioner: T5X's.
      checkpoints_dir: the run's directory.
      dataset_iterator: the data.
      keep: how many of the best stay; None keeps all.
      metric_name_to_monitor: ``{run}/{tag}``: the event files lie in ``{run}`` below the run's directory.
      metric_mode: ``'max'`` or ``'min'``: which values are best. NaN never is; of equal ones the newer.
      keep_checkpoints_without_metrics: steps that have no metric stay; if False they go first, the oldest before.
      force_keep_period: steps that it divides stay, and take no slot.
      **options: of ``Checkpointer``.
    """

    def __init__(
        self,
        train_state: Any,
        partitioner: Partitioner | None = None,
        checkpoints_dir: str | os.PathLike[str] | Storage = '',
        dataset_iterator: Any = None,
        *,
        keep: int | None = None,
        metric_name_to_monitor: str = 'train/accuracy',
        metric_mode: str = 'max',
        keep_checkpoints_without_metrics: bool = True,
        force_keep_period: int | None = None,
        **options: Any,
    ):
        check_metric_name(metric_name_to_monitor)
        check_metric_mode(metric_mode)
        # T5X takes a period of 0 for none.
        period = None if force_keep_period == 0 else force_keep_period

        def policy_of(count: int | None) -> KeepPolicy:
            if count is None:
                return KeepAll()
            return KeepBest(count, metric_name_to_monitor, metric_mode, keep_checkpoints_without_metrics, period)

        idle = [
            name
            for name, is_given in {
                'keep_checkpoints_without_metrics': not keep_checkpoints_without_metrics,
                'force_keep_period': period is not None,
            }.items()
            if is_given and keep is None
        ]
        if idle:
            warn_caller(
                NoEffectWarning(
                    f'{" and ".join(idle)} has no effect while keep is None, since all steps stay. Pass keep=, or leave it out.'
                )
            )
        super().__init__(
            train_state,
            partitioner,
            checkpoints_dir,
            dataset_iterator,
            keep_policy=policy_of(keep),
            metric_source=TensorBoardMetrics(open_run_storage(checkpoints_dir, options.get('storage_options'))),
            **options,
        )
        self._policy_of_keep = policy_of
        self._keep = keep
        # Also with keep=None, where the policy looks at no metric.
        self._monitored = ((metric_name_to_monitor, metric_mode),)

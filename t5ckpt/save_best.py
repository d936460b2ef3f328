"""T5X's SaveBestCheckpointer: a Checkpointer with the keep policy KeepBest."""

from __future__ import annotations

from typing import Any

from t5ckpt.catalog.locate import open_run_storage
from t5ckpt.checkpointer import Checkpointer
from t5ckpt.core.arguments import MAX, integer
from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.protocols import Partitioner
from t5ckpt.errors import NoEffectWarning
from t5ckpt.metrics import TensorBoardMetrics
from t5ckpt.policies import KeepAll, KeepBest, KeepPolicy, best_mode, check_metric_name
from t5ckpt.storage import PathOrStorage

__all__ = ['SaveBestCheckpointer']


class SaveBestCheckpointer(Checkpointer):
    """Keeps the ``keep`` best checkpoints by a metric, in addition to the latest. The signature is T5X's.

    The metric comes from ``save(..., metrics={...})`` or else from TensorBoard's event files in ``checkpoints_dir``. Neither
    TensorFlow nor TensorBoard has to be installed.

    Args:
      train_state: as for ``Checkpointer``.
      partitioner: T5X's.
      checkpoints_dir: the run's directory.
      dataset_iterator: as for ``Checkpointer``.
      keep: the number of best checkpoints; None keeps all.
      metric_name_to_monitor: ``{run}/{tag}``; the event files are in ``{run}`` in the run's directory.
      metric_mode: ``'max'`` or ``'min'``; the default warns about a metric such as a loss. NaN is never best. Of equal values
        the newer one is better.
      keep_checkpoints_without_metrics: keeps steps without the metric; if False they are deleted first, the oldest before others.
      force_keep_period: its multiples are also kept.
      **others: the other arguments of ``Checkpointer``.
    """

    def __init__(
        self,
        train_state: Any,
        partitioner: Partitioner | None = None,
        checkpoints_dir: PathOrStorage = '',
        dataset_iterator: Any = None,
        *,
        keep: int | None = None,
        metric_name_to_monitor: str = 'train/accuracy',
        metric_mode: str = MAX,
        keep_checkpoints_without_metrics: bool = True,
        force_keep_period: int | None = None,
        **others: Any,
    ):
        check_metric_name(metric_name_to_monitor)
        mode = best_mode('metric_mode', metric_mode, metric_name_to_monitor)
        # In T5X, 0 stands for no period.
        period = None if force_keep_period == 0 else force_keep_period

        def policy_of(count: int | None) -> KeepPolicy:
            if count is None:
                return KeepAll()
            best = integer('keep', count, 1, 'None keeps all.')
            return KeepBest(best, metric_name_to_monitor, mode, keep_checkpoints_without_metrics, period)

        if keep is None and (period is not None or not keep_checkpoints_without_metrics):
            text = (
                'keep_checkpoints_without_metrics and force_keep_period have no effect with keep=None, which keeps all steps. '
                'Pass keep=, or leave them out.'
            )
            warn_caller(NoEffectWarning(text))
        super().__init__(
            train_state,
            partitioner,
            checkpoints_dir,
            dataset_iterator,
            keep_policy=policy_of(keep),
            metric_source=TensorBoardMetrics(open_run_storage(checkpoints_dir, others.get('storage_options'))),
            **others,
        )
        self._policy_of_keep = policy_of
        self._keep = keep
        # Also with keep=None, when the policy compares no metric.
        self._monitored = ((metric_name_to_monitor, mode),)

"""t5ckpt: saves and restores JAX checkpoints in T5X's format.

Names are imported when they are first used (PEP 562), so that ``import t5ckpt`` does not load JAX or TensorStore.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from t5ckpt._version import __version__

if TYPE_CHECKING:
    from t5ckpt.checkpointer import Checkpointer
    from t5ckpt.commit.transaction import CommittedCheckpoint
    from t5ckpt.convert import ConvertOptions, ConvertReport, convert_checkpoint
    from t5ckpt.convert.copy import copy_checkpoint
    from t5ckpt.core.leaf_path import MODEL, OPTIMIZER
    from t5ckpt.core.protocols import ParameterInfo, RestoreStateTransformationFn, SaveStateTransformationFn
    from t5ckpt.inspection.diff import CheckpointDiff, diff
    from t5ckpt.inspection.runs import Run, open_run
    from t5ckpt.inspection.view import CheckpointView, open_checkpoint
    from t5ckpt.integrity.report import VerifyReport
    from t5ckpt.integrity.verify import verify
    from t5ckpt.lazy import LazyArray, LazyAwaitableArray, LazyThreadPoolArray
    from t5ckpt.load import load_t5x_checkpoint
    from t5ckpt.metrics import TensorBoardMetrics
    from t5ckpt.options import CheckpointerOptions
    from t5ckpt.policies import (
        KeepAll,
        KeepBest,
        KeepEvery,
        KeepEveryHours,
        KeepLatest,
        KeepPolicy,
        KeepSteps,
    )
    from t5ckpt.preemption import PreemptionNotice
    from t5ckpt.progress import ProgressReporter
    from t5ckpt.resume import WarmStart, restore_or_init
    from t5ckpt.save.pending import PendingSave
    from t5ckpt.save_best import SaveBestCheckpointer
    from t5ckpt.save_policies import (
        SaveAt,
        SaveEvery,
        SaveEverySeconds,
        SaveFirst,
        SaveLast,
        SaveOnImprovement,
        SaveOnPreemption,
        SavePolicy,
        SaveWhenIdle,
    )
    from t5ckpt.steps import (
        all_dataset_checkpoint_steps,
        all_steps,
        find_checkpoint,
        get_checkpoint_dir,
        is_pinned_checkpoint,
        latest_step,
        pin_checkpoint,
        unpin_checkpoint,
    )
    from t5ckpt.tiers.local_tier import LocalTier
    from t5ckpt.translate import CheckpointTranslator, apply_assignment_map, intersect_state
    from t5ckpt.watch import checkpoints_iterator

__all__ = [
    'MODEL',
    'OPTIMIZER',
    'CheckpointDiff',
    'CheckpointTranslator',
    'CheckpointView',
    'Checkpointer',
    'CheckpointerOptions',
    'CommittedCheckpoint',
    'ConvertOptions',
    'ConvertReport',
    'KeepAll',
    'KeepBest',
    'KeepEvery',
    'KeepEveryHours',
    'KeepLatest',
    'KeepPolicy',
    'KeepSteps',
    'LazyArray',
    'LazyAwaitableArray',
    'LazyThreadPoolArray',
    'LocalTier',
    'ParameterInfo',
    'PendingSave',
    'PreemptionNotice',
    'ProgressReporter',
    'RestoreStateTransformationFn',
    'Run',
    'SaveAt',
    'SaveBestCheckpointer',
    'SaveEvery',
    'SaveEverySeconds',
    'SaveFirst',
    'SaveLast',
    'SaveOnImprovement',
    'SaveOnPreemption',
    'SavePolicy',
    'SaveStateTransformationFn',
    'SaveWhenIdle',
    'TensorBoardMetrics',
    'VerifyReport',
    'WarmStart',
    '__version__',
    'all_dataset_checkpoint_steps',
    'all_steps',
    'apply_assignment_map',
    'checkpoints_iterator',
    'convert_checkpoint',
    'copy_checkpoint',
    'diff',
    'find_checkpoint',
    'get_checkpoint_dir',
    'intersect_state',
    'is_pinned_checkpoint',
    'latest_step',
    'load_t5x_checkpoint',
    'open_checkpoint',
    'open_run',
    'pin_checkpoint',
    'restore_or_init',
    'unpin_checkpoint',
    'verify',
]

# The public names of each module.
_NAMES = {
    'checkpointer': 'Checkpointer',
    'commit.transaction': 'CommittedCheckpoint',
    'convert': 'ConvertOptions ConvertReport convert_checkpoint',
    'convert.copy': 'copy_checkpoint',
    'core.leaf_path': 'MODEL OPTIMIZER',
    'core.protocols': 'ParameterInfo RestoreStateTransformationFn SaveStateTransformationFn',
    'inspection.diff': 'CheckpointDiff diff',
    'inspection.runs': 'Run open_run',
    'inspection.view': 'CheckpointView open_checkpoint',
    'integrity.report': 'VerifyReport',
    'integrity.verify': 'verify',
    'lazy': 'LazyArray LazyAwaitableArray LazyThreadPoolArray',
    'load': 'load_t5x_checkpoint',
    'metrics': 'TensorBoardMetrics',
    'policies': 'KeepAll KeepBest KeepEvery KeepEveryHours KeepLatest KeepPolicy KeepSteps',
    'options': 'CheckpointerOptions',
    'preemption': 'PreemptionNotice',
    'progress': 'ProgressReporter',
    'resume': 'WarmStart restore_or_init',
    'save.pending': 'PendingSave',
    'save_best': 'SaveBestCheckpointer',
    'save_policies': (
        'SaveAt SaveEvery SaveEverySeconds SaveFirst SaveLast SaveOnImprovement '
        'SaveOnPreemption SavePolicy SaveWhenIdle'
    ),
    'steps': (
        'all_dataset_checkpoint_steps all_steps find_checkpoint get_checkpoint_dir is_pinned_checkpoint '
        'latest_step pin_checkpoint unpin_checkpoint'
    ),
    'tiers.local_tier': 'LocalTier',
    'translate': 'CheckpointTranslator apply_assignment_map intersect_state',
    'watch': 'checkpoints_iterator',
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f't5ckpt.{_MODULES[name]}'), name)
    if name == 'errors':
        return importlib.import_module('t5ckpt.errors')
    import difflib

    near = difflib.get_close_matches(name, __all__, 1)
    hint = f'. Did you mean {near[0]}?' if near and not name.startswith('_') else ''
    raise AttributeError(f'module t5ckpt has no attribute {name!r}{hint}')


def __dir__() -> list[str]:
    return [*__all__, 'errors']

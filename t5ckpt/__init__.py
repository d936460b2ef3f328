"""t5ckpt: saves and restores JAX checkpoints in T5X's format.

Names are imported when they are first used (PEP 562), so that ``import t5ckpt`` does not load JAX or TensorStore.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from t5ckpt._version import __version__

if TYPE_CHECKING:
    from t5ckpt.catalog.foreign_layouts import CheckpointTypes, detect_checkpoint_type
    from t5ckpt.catalog.listing import reindex_steps
    from t5ckpt.checkpointer import Checkpointer
    from t5ckpt.commit.transaction import CommittedCheckpoint
    from t5ckpt.convert import Conversion, ConvertOptions, convert_checkpoint
    from t5ckpt.convert.copy import CopyOptions, CopyReport, copy_checkpoint
    from t5ckpt.convert.export_options import ExportOptions, ExportReport, ImportOptions
    from t5ckpt.convert.huggingface import export_hf, import_hf
    from t5ckpt.convert.plain import export_npz, export_safetensors, import_npz, import_safetensors
    from t5ckpt.convert.rewrite import Changes, rewrite_checkpoint
    from t5ckpt.core.protocols import ParameterInfo, RestoreStateTransformationFn, SaveStateTransformationFn
    from t5ckpt.errors import (
        MissingMetricWarning,
        NarrowedDtypeWarning,
        NoEffectWarning,
        ObsoleteArgumentWarning,
        StepMismatchWarning,
        T5CkptWarning,
        TemplateMismatchWarning,
        UnreadLayoutWarning,
        UnshardedTemplateWarning,
    )
    from t5ckpt.export import export_weights
    from t5ckpt.inspection.diff import CheckpointDiff, LeafDiff, diff
    from t5ckpt.inspection.runs import Run, Series, open_run
    from t5ckpt.inspection.stats import CheckpointStats, LeafStats
    from t5ckpt.inspection.view import CheckpointView, open_checkpoint
    from t5ckpt.integrity.repair import RepairReport, repair
    from t5ckpt.integrity.repair_plan import RepairOptions
    from t5ckpt.integrity.report import Damage, VerifyReport
    from t5ckpt.integrity.verify import verify
    from t5ckpt.lazy import LazyArray, LazyAwaitableArray, LazyThreadPoolArray
    from t5ckpt.load import load_t5x_checkpoint
    from t5ckpt.metrics import TensorBoardMetrics
    from t5ckpt.policies import (
        Decision,
        KeepAll,
        KeepAny,
        KeepBest,
        KeepEvery,
        KeepEveryHours,
        KeepLatest,
        KeepPolicy,
        KeepSteps,
        StepInfo,
    )
    from t5ckpt.preemption import PreemptionNotice
    from t5ckpt.progress import ProgressReporter
    from t5ckpt.resume import MODEL, OPTIMIZER, WarmStart, restore_or_init
    from t5ckpt.save.pending import PendingSave
    from t5ckpt.save_best import SaveBestCheckpointer
    from t5ckpt.save_policies import (
        Moment,
        SaveAll,
        SaveAny,
        SaveAt,
        SaveEvery,
        SaveEverySeconds,
        SaveFirst,
        SaveLast,
        SaveOnImprovement,
        SaveOnPreemption,
        SavePolicy,
        SaveWhenIdle,
        YoungDaly,
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
    from t5ckpt.translate import CheckpointTranslator, apply_assignment_map, intersect_state
    from t5ckpt.watch import checkpoints_iterator

__all__ = [
    'MODEL',
    'OPTIMIZER',
    'Changes',
    'CheckpointDiff',
    'CheckpointStats',
    'CheckpointTranslator',
    'CheckpointTypes',
    'CheckpointView',
    'Checkpointer',
    'CommittedCheckpoint',
    'Conversion',
    'ConvertOptions',
    'CopyOptions',
    'CopyReport',
    'Damage',
    'Decision',
    'ExportOptions',
    'ExportReport',
    'ImportOptions',
    'KeepAll',
    'KeepAny',
    'KeepBest',
    'KeepEvery',
    'KeepEveryHours',
    'KeepLatest',
    'KeepPolicy',
    'KeepSteps',
    'LazyArray',
    'LazyAwaitableArray',
    'LazyThreadPoolArray',
    'LeafDiff',
    'LeafStats',
    'MissingMetricWarning',
    'Moment',
    'NarrowedDtypeWarning',
    'NoEffectWarning',
    'ObsoleteArgumentWarning',
    'ParameterInfo',
    'PendingSave',
    'PreemptionNotice',
    'ProgressReporter',
    'RepairOptions',
    'RepairReport',
    'RestoreStateTransformationFn',
    'Run',
    'SaveAll',
    'SaveAny',
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
    'Series',
    'StepInfo',
    'StepMismatchWarning',
    'T5CkptWarning',
    'TemplateMismatchWarning',
    'TensorBoardMetrics',
    'UnreadLayoutWarning',
    'UnshardedTemplateWarning',
    'VerifyReport',
    'WarmStart',
    'YoungDaly',
    '__version__',
    'all_dataset_checkpoint_steps',
    'all_steps',
    'apply_assignment_map',
    'checkpoints_iterator',
    'convert_checkpoint',
    'copy_checkpoint',
    'detect_checkpoint_type',
    'diff',
    'export_hf',
    'export_npz',
    'export_safetensors',
    'export_weights',
    'find_checkpoint',
    'get_checkpoint_dir',
    'import_hf',
    'import_npz',
    'import_safetensors',
    'intersect_state',
    'is_pinned_checkpoint',
    'latest_step',
    'load_t5x_checkpoint',
    'open_checkpoint',
    'open_run',
    'pin_checkpoint',
    'reindex_steps',
    'repair',
    'restore_or_init',
    'rewrite_checkpoint',
    'unpin_checkpoint',
    'verify',
]

_MODULES = {
    'MissingMetricWarning': 'errors',
    'NarrowedDtypeWarning': 'errors',
    'StepMismatchWarning': 'errors',
    'UnshardedTemplateWarning': 'errors',
    'TemplateMismatchWarning': 'errors',
    'MODEL': 'resume',
    'OPTIMIZER': 'resume',
    'Changes': 'convert.rewrite',
    'CheckpointDiff': 'inspection.diff',
    'CheckpointStats': 'inspection.stats',
    'CheckpointTranslator': 'translate',
    'CheckpointTypes': 'catalog.foreign_layouts',
    'CheckpointView': 'inspection.view',
    'Checkpointer': 'checkpointer',
    'CommittedCheckpoint': 'commit.transaction',
    'CopyOptions': 'convert.copy',
    'CopyReport': 'convert.copy',
    'Conversion': 'convert',
    'ConvertOptions': 'convert',
    'Damage': 'integrity.report',
    'Decision': 'policies',
    'ExportOptions': 'convert.export_options',
    'ExportReport': 'convert.export_options',
    'ImportOptions': 'convert.export_options',
    'KeepAll': 'policies',
    'KeepAny': 'policies',
    'KeepBest': 'policies',
    'KeepEvery': 'policies',
    'KeepEveryHours': 'policies',
    'KeepLatest': 'policies',
    'KeepPolicy': 'policies',
    'KeepSteps': 'policies',
    'LazyArray': 'lazy',
    'LazyAwaitableArray': 'lazy',
    'LazyThreadPoolArray': 'lazy',
    'LeafDiff': 'inspection.diff',
    'LeafStats': 'inspection.stats',
    'Moment': 'save_policies',
    'NoEffectWarning': 'errors',
    'ObsoleteArgumentWarning': 'errors',
    'ParameterInfo': 'core.protocols',
    'PendingSave': 'save.pending',
    'PreemptionNotice': 'preemption',
    'ProgressReporter': 'progress',
    'RepairOptions': 'integrity.repair_plan',
    'RepairReport': 'integrity.repair',
    'RestoreStateTransformationFn': 'core.protocols',
    'Run': 'inspection.runs',
    'SaveAll': 'save_policies',
    'SaveAny': 'save_policies',
    'SaveAt': 'save_policies',
    'SaveBestCheckpointer': 'save_best',
    'SaveEvery': 'save_policies',
    'SaveEverySeconds': 'save_policies',
    'SaveFirst': 'save_policies',
    'SaveLast': 'save_policies',
    'SaveOnImprovement': 'save_policies',
    'SaveOnPreemption': 'save_policies',
    'SavePolicy': 'save_policies',
    'SaveStateTransformationFn': 'core.protocols',
    'SaveWhenIdle': 'save_policies',
    'Series': 'inspection.runs',
    'StepInfo': 'policies',
    'T5CkptWarning': 'errors',
    'UnreadLayoutWarning': 'errors',
    'TensorBoardMetrics': 'metrics',
    'VerifyReport': 'integrity.report',
    'WarmStart': 'resume',
    'YoungDaly': 'save_policies',
    'all_dataset_checkpoint_steps': 'steps',
    'all_steps': 'steps',
    'apply_assignment_map': 'translate',
    'copy_checkpoint': 'convert.copy',
    'checkpoints_iterator': 'watch',
    'convert_checkpoint': 'convert',
    'detect_checkpoint_type': 'catalog.foreign_layouts',
    'diff': 'inspection.diff',
    'export_hf': 'convert.huggingface',
    'export_npz': 'convert.plain',
    'export_safetensors': 'convert.plain',
    'export_weights': 'export',
    'find_checkpoint': 'steps',
    'get_checkpoint_dir': 'steps',
    'import_hf': 'convert.huggingface',
    'import_npz': 'convert.plain',
    'import_safetensors': 'convert.plain',
    'intersect_state': 'translate',
    'is_pinned_checkpoint': 'steps',
    'latest_step': 'steps',
    'load_t5x_checkpoint': 'load',
    'open_checkpoint': 'inspection.view',
    'open_run': 'inspection.runs',
    'pin_checkpoint': 'steps',
    'reindex_steps': 'catalog.listing',
    'repair': 'integrity.repair',
    'restore_or_init': 'resume',
    'rewrite_checkpoint': 'convert.rewrite',
    'unpin_checkpoint': 'steps',
    'verify': 'integrity.verify',
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f't5ckpt.{_MODULES[name]}'), name)
    if name == 'errors':
        return importlib.import_module('t5ckpt.errors')
    raise AttributeError(f'module t5ckpt has no attribute {name!r}')


def __dir__() -> list[str]:
    return [*__all__, 'errors']

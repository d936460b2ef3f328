"""The storage of checkpoints: one class per backend, behind one small interface.

Only this package knows URL schemes and TensorStore drivers. A new backend is a module here: a subclass of ``base.Storage``, or
of ``bucket.BucketStorage`` for an object store, and ``open_at``, which makes it. ``open.py`` finds the module by its scheme,
``options.py`` has its options, and ``testing/conformance.py`` tests it.
"""

from __future__ import annotations

from t5ckpt.storage.absent import AbsentStorage, require_directory
from t5ckpt.storage.base import Entry, PathOrStorage, Storage
from t5ckpt.storage.error_mapping import TENSORSTORE_ERRORS, foreign_errors, is_disk_error, means_damage
from t5ckpt.storage.open import is_same_kind, open_in_memory, open_storage, option_values, split_path
from t5ckpt.storage.options import storage_defaults

__all__ = [
    'TENSORSTORE_ERRORS',
    'AbsentStorage',
    'Entry',
    'PathOrStorage',
    'Storage',
    'foreign_errors',
    'is_disk_error',
    'is_same_kind',
    'means_damage',
    'open_in_memory',
    'open_storage',
    'option_values',
    'require_directory',
    'split_path',
    'storage_defaults',
]

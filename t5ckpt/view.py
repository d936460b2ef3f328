"""The public path of ``t5ckpt.inspection.view``."""

from t5ckpt.inspection.view import CheckpointView, open_checkpoint
from t5ckpt.reading.array_reader import lazy_leaf

__all__ = ['CheckpointView', 'lazy_leaf', 'open_checkpoint']

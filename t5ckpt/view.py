"""The public path of ``t5ckpt.inspection.view``."""

from t5ckpt.inspection.view import CheckpointView, open_checkpoint

__all__ = ['CheckpointView', 'open_checkpoint']

"""The public path of ``t5ckpt.inspection.runs``."""

from t5ckpt.inspection.runs import Run, Series, open_run

__all__ = ['Run', 'Series', 'open_run']

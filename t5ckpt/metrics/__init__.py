"""Reads metrics of steps from the files of trainers."""

from __future__ import annotations

from t5ckpt.metrics.tensorboard import TensorBoardMetrics

__all__ = ['TensorBoardMetrics']

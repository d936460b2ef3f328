"""Metrics of steps, from where trainers write them."""

from __future__ import annotations

from t5ckpt.metrics.tensorboard import TensorBoardMetrics

__all__ = ['TensorBoardMetrics']

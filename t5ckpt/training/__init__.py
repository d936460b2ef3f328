"""Independent helpers for training loops, which trainers otherwise copy from each other; saves and restores do not need them."""

from __future__ import annotations

from t5ckpt.training.flops import peak_flops
from t5ckpt.training.hlo import write_hlo
from t5ckpt.training.metrics import MetricWriter
from t5ckpt.training.profiler import ProfilerWindow
from t5ckpt.training.summary import state_summary, write_state_summary
from t5ckpt.training.watchdog import Watchdog

__all__ = [
    'MetricWriter',
    'ProfilerWindow',
    'Watchdog',
    'peak_flops',
    'state_summary',
    'write_hlo',
    'write_state_summary',
]

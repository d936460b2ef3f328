"""Small helpers for a training loop; each stands alone, and none is needed to save or restore."""

from __future__ import annotations

from t5ckpt.training._flops import peak_flops
from t5ckpt.training._hlo import write_hlo
from t5ckpt.training._metrics import MetricWriter
from t5ckpt.training._profiler import ProfilerWindow
from t5ckpt.training._summary import state_summary, write_state_summary
from t5ckpt.training._watchdog import Watchdog

__all__ = [
    'MetricWriter',
    'ProfilerWindow',
    'Watchdog',
    'peak_flops',
    'state_summary',
    'write_hlo',
    'write_state_summary',
]

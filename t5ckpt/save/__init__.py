"""Saves: the request, its checks, and the stages that carry it out."""

from t5ckpt.core.call_site import Notices
from t5ckpt.save.arguments import SaveCall, in_order, metric_numbers
from t5ckpt.save.monitored import best_step_of, monitored_metrics
from t5ckpt.save.request import Reuse, SaveRequest
from t5ckpt.save.template_check import TemplateCheck

__all__ = [
    'Notices',
    'Reuse',
    'SaveCall',
    'SaveRequest',
    'TemplateCheck',
    'best_step_of',
    'in_order',
    'metric_numbers',
    'monitored_metrics',
]

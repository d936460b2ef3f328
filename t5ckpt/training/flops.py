"""The peak performance of accelerators, with which a trainer computes the utilization of a step.

The numbers are for dense bfloat16 matrix products, from the vendors' data sheets; numbers for sparse operands are halved. A JAX
device is a whole chip, except on TPU v2 and v3, where it is one of two cores.
"""

from __future__ import annotations

import logging
import re
from typing import Any

_log = logging.getLogger('t5ckpt')

_TERA = 1e12
# (pattern for the whole ``device_kind``, operations per second)
_KNOWN = (
    (r'TPU v2', 22.5 * _TERA),
    (r'TPU v3', 61.5 * _TERA),
    (r'TPU v4', 275 * _TERA),
    (r'TPU v5 lite|TPU v5e', 197 * _TERA),
    (r'TPU v5p?', 459 * _TERA),
    (r'TPU v6 lite|TPU v6e', 918 * _TERA),
    (r'NVIDIA A100\b.*', 312 * _TERA),
    (r'NVIDIA (H100|H200) NVL', 835.5 * _TERA),
    (r'NVIDIA H100 PCIe', 756.5 * _TERA),
    (r'NVIDIA (H100 80GB HBM3|H200)', 989.5 * _TERA),
    (r'NVIDIA B200', 2250 * _TERA),
    (r'NVIDIA A10', 125 * _TERA),
    (r'NVIDIA A30', 165 * _TERA),
    (r'NVIDIA L4', 121 * _TERA),
    (r'NVIDIA L40S', 362 * _TERA),
    (r'AMD Instinct MI300X', 1307.4 * _TERA),
)


def peak_flops(device: Any = None) -> float | None:
    """The peak floating-point operations per second of a device, in dense bfloat16 matrix products.

    Args:
      device: a ``jax.Device``; the first one by default.

    Returns:
      The number, or None for an unknown chip, which is logged.
    """
    if device is None:
        import jax

        device = jax.devices()[0]
    kind = str(device.device_kind)
    for pattern, flops in _KNOWN:
        if re.fullmatch(pattern, kind):
            return flops
    _log.warning('t5ckpt: the peak performance of %r is unknown, so its utilization cannot be computed', kind)
    return None

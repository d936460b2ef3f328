"""What a chip can do at most, for the share of it that a step uses.

Matrix products in bfloat16 with dense operands, from the makers' data sheets; those that give the number for sparse
operands only are halved. A JAX device is a whole chip, except on TPU v2 and v3, where it is a core, half of one.
"""

from __future__ import annotations

import logging
import re
from typing import Any

__all__ = ['peak_flops']

_log = logging.getLogger('t5ckpt')

_TERA = 1e12
# (what ``device_kind`` matches in full, operations a second)
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
    """Floating-point operations a second that a device can do at most, in dense bfloat16 matrix products.

    Args:
      device: a ``jax.Device``; the first one by default.

    Returns:
      The number, or None for a chip that is not known, which is logged: a made-up number is worse than none.
    """
    if device is None:
        import jax

        device = jax.devices()[0]
    kind = str(device.device_kind)
    for pattern, flops in _KNOWN:
        if re.fullmatch(pattern, kind):
            return flops
    _log.warning('t5ckpt: the peak of %r is not known, so there is no utilisation to report', kind)
    return None

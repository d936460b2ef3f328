"""Codecs of chunks by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ['AUTO', 'CODECS']


AUTO: dict[str, Any] = {'id': 'auto'}
"""Placeholder for a codec that is chosen during the save; never written."""


CODECS: Mapping[str | None, dict[str, Any] | None] = {
    None: None,
    'auto': AUTO,
    'zstd': {'id': 'zstd', 'level': 1},
    'gzip': {'id': 'gzip', 'level': 1},
    'blosc': {'id': 'blosc', 'cname': 'lz4', 'clevel': 5, 'shuffle': -1, 'blocksize': 0},
}
"""zarr v2 compressors, by the name a user gives; levels are T5X's."""

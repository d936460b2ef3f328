"""System programs that a test needs."""

from __future__ import annotations

import os
import shutil

import pytest

__all__ = ['need']


def need(*names: str) -> str:
    """The path of the first of these programs; skips where there is none, and fails in CI, which installs them."""
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    if os.environ.get('CI'):
        pytest.fail(f'{names[0]} is not installed, and CI has to install it')
    pytest.skip(f'needs {names[0]}, which is not installed')

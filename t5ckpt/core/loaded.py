"""Optional libraries that the program may have imported already."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ['loaded']


def loaded(name: str) -> Any:
    """Returns a module that the program has imported, else None; imports nothing.

    Where another thread is in the middle of its import, waits for that: until then the module lacks most of its names.
    """
    return importlib.import_module(name) if sys.modules.get(name) is not None else None

"""Optional libraries that the program may have imported already."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def loaded(name: str) -> Any:
    """Returns a module that the program has imported, or None; imports nothing.

    While another thread imports the module, waits for that thread, because the module lacks most of its names until then.
    """
    return importlib.import_module(name) if sys.modules.get(name) is not None else None

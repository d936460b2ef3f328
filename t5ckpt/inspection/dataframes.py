"""Imports pandas, which is in the extra ``notebook``."""

from __future__ import annotations

from typing import Any

from t5ckpt.errors import MissingDependencyError


def pandas() -> Any:
    """Returns the module pandas; raises MissingDependencyError if it is not installed."""
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingDependencyError(
            "to_pandas needs pandas: pip install pandas, or pip install 't5ckpt[notebook]'"
        ) from error
    return pd

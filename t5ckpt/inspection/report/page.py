"""Puts the facts of a report into one HTML page.

Names come from checkpoints of unknown origin. The facts are compressed JSON in base64, and ``page.js`` sets them as text, so no
name is parsed as HTML. The page's Content-Security-Policy allows the two scripts by their hashes, and no request to any host.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import importlib.resources
import json
from collections.abc import Mapping
from string import Template
from typing import Any

from t5ckpt.core.text import printable
from t5ckpt.errors import MissingDependencyError


def check_plotly() -> Any:
    """Returns the function that returns plotly.js; raises MissingDependencyError if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingDependencyError(
            "a report needs plotly: pip install plotly, or pip install 't5ckpt[report]'"
        ) from error
    return get_plotlyjs


def page(title: str, facts: Mapping[str, Any]) -> str:
    """The page.

    Args:
      title: of the browser's tab.
      facts: JSON; see ``page.js``.

    Raises:
      MissingDependencyError: plotly is not installed.
    """
    plotly: str = check_plotly()()
    script = _asset('page.js')
    hashes = ' '.join(f"'sha256-{_hash(text)}'" for text in (plotly, script))
    return Template(_asset('page.html')).substitute(
        title=html.escape(printable(title)),
        policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'",
        style=_asset('page.css'),
        facts=_packed(json.dumps(facts, allow_nan=False)),
        plotly=_packed(plotly),
        script=script,
    )


def _asset(name: str) -> str:
    return importlib.resources.files(__package__ or '').joinpath(name).read_text(encoding='utf-8')


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _packed(text: str) -> str:
    """A third of the size; the alphabet of base64 cannot end an element."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()

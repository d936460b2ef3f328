"""Writes the facts of a report as one HTML page.

Names come from checkpoints of unknown origin. The facts are compressed JSON in base64, and ``page.js`` sets them as text, so no
name is parsed as HTML. The page's Content-Security-Policy allows the two scripts by their hashes, and no request to any host.
"""

from __future__ import annotations

import base64
import datetime
import gzip
import hashlib
import html
import importlib.resources
import json
import os
from collections.abc import Mapping
from string import Template
from typing import Any

from t5ckpt._version import __version__
from t5ckpt.commit.output_files import check_output, local_output, output
from t5ckpt.core.text import printable
from t5ckpt.errors import MissingDependencyError
from t5ckpt.storage import foreign_errors

SAMPLE_BYTES = 512_000_000


def checked_output(path: str | os.PathLike[str], force: bool) -> str:
    """The absolute path of the page; checks it before anything is read.

    Raises:
      OutputExistsError: it exists.
      MissingDependencyError: plotly is not installed.
    """
    local = local_output(path)
    check_output(local, force)
    _plotly()
    return local


def write_report(local: str, path: str, facts: Mapping[str, Any], force: bool) -> str:
    """Writes the page atomically.

    Args:
      local: the path that :func:`checked_output` returned.
      path: of the run or the checkpoint; the last two keys are the title.
      facts: ``steps``, ``checkpoint`` and, of a run, ``compared``, ``curves`` and ``changes``; see ``page.js``.
      force: replaces a file.

    Returns:
      The path.
    """
    made = f'{datetime.datetime.now(datetime.UTC):%Y-%m-%d}'
    name = printable('/'.join(path.split('/')[-2:]).strip('/'))
    text = _page(name, {'name': name, 'path': printable(path), 'made': made, 'version': __version__, **facts})
    with (
        output(local, force) as temporary,
        foreign_errors(local, writing=True),
        open(temporary, 'w', encoding='utf-8') as file,
    ):
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return local


def _plotly() -> Any:
    """Returns the function that returns plotly.js; raises MissingDependencyError if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingDependencyError(
            "a report needs plotly: pip install plotly, or pip install 't5ckpt[report]'"
        ) from error
    return get_plotlyjs


def _page(name: str, facts: Mapping[str, Any]) -> str:
    plotly: str = _plotly()()
    script = _asset('page.js')
    hashes = ' '.join(f"'sha256-{_hash(text)}'" for text in (plotly, script))
    return Template(_asset('page.html')).substitute(
        title=html.escape(f'{name} · t5ckpt report'),
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

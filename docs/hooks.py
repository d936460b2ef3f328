"""What mkdocs asks for: neither the navigation nor the API reference is short of what mkdocs.yml or docs/api.md does not name."""

from __future__ import annotations

import pathlib
from typing import Any

import t5ckpt


def on_config(config: Any) -> Any:
    """Called once: pages that the navigation does not name yet stand at its end."""
    named = str(config.nav)
    more = [path.name for path in sorted(pathlib.Path(config.docs_dir).glob('*.md')) if f"'{path.name}'" not in named]
    config.nav += [{'More': more}] if more else []
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called for each page before it is rendered: public names that the reference does not group yet stand at its end."""
    if page.file.src_uri != 'api.md':
        return markdown
    listed = set(markdown.split())
    names = [f't5ckpt.{name}' for name in t5ckpt.__all__ if not name.startswith('__')]
    more = ''.join(f'::: {name}\n\n' for name in names if name not in listed)
    return markdown.replace('## Errors', f'## More\n\n{more}## Errors') if more else markdown

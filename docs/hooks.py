"""What mkdocs asks for: the API reference is never short of a public name that docs/api.md does not group yet."""

from __future__ import annotations

from typing import Any

import t5ckpt


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called for each page before it is rendered."""
    if page.file.src_uri != 'api.md':
        return markdown
    listed = set(markdown.split())
    names = [f't5ckpt.{name}' for name in t5ckpt.__all__ if not name.startswith('__')]
    more = ''.join(f'::: {name}\n\n' for name in names if name not in listed)
    return markdown.replace('## Errors', f'## More\n\n{more}## Errors') if more else markdown

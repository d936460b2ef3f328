"""What mkdocs calls while it builds the site: notebooks become pages, and links to a notebook lead to its page."""

from __future__ import annotations

import html
import re
from typing import Any

import nbformat
from mkdocs.structure.files import File

# The outputs of each notebook, by the name of its page. Markdown would change their HTML, so they take the place of a
# paragraph once the page is rendered.
_OUTPUTS: dict[str, list[str]] = {}

# What a reader searches for comes first: how to do it, then what it is called, then how it was built and measured.
_BOOSTS = {'Tutorials': 2, 'How-to guides': 2, 'Explanation': 1, 'Reference': 0.8, 'Contributors': 0.2}

# The signature of a name in api.md, for readers of the file.
_SIGNATURE = re.compile(r'^```py\n.*?^```\n\n(?=::: )', re.DOTALL | re.MULTILINE)
# A line of code, and the spaces at its beginning. The ids are not unique: each docstring counts its lines.
_LINE = re.compile(r'<span id="__line-[\d-]+">((?:<span class="w">)?)( *)')
_PAGE = re.compile(r'docs/([a-z0-9-]+)\.md')
_ROLE = re.compile(r':(?:attr|class|func|meth|mod):(?=<code>)')

# For text, and for the tables of pandas.
_STYLE = (
    '<style>pre, .dataframe { font-size: .7em } pre { line-height: 1.4; margin: 0 } .dataframe { border-collapse: collapse } '
    '.dataframe :is(td, th) { padding: .2em .5em; border-color: #8886 } '
    ':host { --jp-layout-color0: var(--md-default-bg-color) }</style>'
)


def on_files(files: Any, config: Any) -> Any:
    """Called once: adds a page for each notebook."""
    for notebook in [file for file in files if file.src_uri.endswith('.ipynb')]:
        name = notebook.src_uri.removesuffix('.ipynb') + '.md'
        files.append(File.generated(config, name, content=_page(nbformat.reads(notebook.content_string, 4), name)))
        files.remove(notebook)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called for each page before it is rendered."""
    part = page.ancestors[-1].title if page.ancestors else ''
    # The tables of measurements have every word that a reader searches for.
    measured = page.file.src_uri.startswith('performance/')
    page.meta.setdefault('search', {'exclude': True} if measured else {'boost': _BOOSTS.get(part, 1)})
    # mkdocstrings shows the signatures itself.
    return _SIGNATURE.sub('', markdown).replace('.ipynb)', '.md)')


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Called for each page after it was rendered."""
    outputs = _OUTPUTS.get(page.file.src_uri, [])
    content = _LINE.sub(lambda match: f'<span style="--indent: {len(match[2])}ch">{match[1]}{match[2]}', content)
    content = re.sub(r'<p>@output (\d+)</p>', lambda match: outputs[int(match[1])], content)
    if page.file.src_uri in ('api.md', 'errors.md'):
        # Docstrings and messages name the pages of a checkout, and other objects by Sphinx's roles.
        content = _PAGE.sub(r'<a href="\1.html">docs/\1.md</a>', content)
        content = _ROLE.sub('', content)
    return content


def _page(book: Any, name: str) -> str:
    """The notebook as Markdown."""
    parts: list[str] = []
    outputs = _OUTPUTS[name] = []
    for cell in book.cells:
        parts.append(cell.source if cell.cell_type == 'markdown' else f'```python\n{cell.source}\n```')
        for output in cell.get('outputs', []):
            parts.append(f'@output {len(outputs)}')
            # A shadow root keeps the styles of the theme and of the output apart.
            shadow = f'<template shadowrootmode="open">{_STYLE}{_html(output)}</template>'
            outputs.append(f'<div class="output">{shadow}</div>')
    return '\n\n'.join(parts)


def _html(output: Any) -> str:
    """What the notebook shows for one output of a cell."""
    data = output.get('data', {})
    if 'image/png' in data:
        png = data['image/png'].replace('\n', '')
        return f'<img style="max-width: 100%" src="data:image/png;base64,{png}" alt="The plot of the cell above">'
    if 'text/html' in data:
        return data['text/html']
    return f'<pre>{html.escape(data.get("text/plain", output.get("text", "")))}</pre>'

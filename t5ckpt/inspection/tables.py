"""Shows tables and trees of leaves: as text, as HTML in a notebook, and as a DataFrame of pandas.

The HTML has plain elements and inline styles in the page's colors, without scripts and files. So it works in JupyterLab, in VS
Code and in print, in light and dark themes. Names are escaped, because the origin of a checkpoint may be unknown.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

from t5ckpt.core.text import aligned, counted, human_bytes, printable
from t5ckpt.errors import MissingDependencyError
from t5ckpt.inspection.leaf_tree import Group, LeafInfo, build_tree

# More rows make browsers slow; for large trees, users select a part of the view.
_MAX_ROWS = 2000
_OPEN_ROWS = 30
_SHOWN = 60
_STYLE = r"""<style>
.t5ckpt{font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.t5ckpt summary{cursor:pointer;list-style:none}
.t5ckpt summary::-webkit-details-marker{display:none}
.t5ckpt summary::before,.t5ckpt .leaf::before{content:'';display:inline-block;width:1.2em}
.t5ckpt summary::before{content:'\25B8'}
.t5ckpt details[open]>summary::before{content:'\25BE'}
.t5ckpt .in{margin-left:1.4em}
.t5ckpt .row{display:inline-grid;grid-template-columns:minmax(5em,1fr) 8em 11em 9em 6em 8em;gap:.8em;width:calc(100% - 1.3em)}
@media(max-width:40em){
.t5ckpt .row{grid-template-columns:minmax(5em,1fr) 5em 8em 5em}
.t5ckpt .row>:nth-child(4),.t5ckpt .bar{display:none}
}
.t5ckpt .row>:first-child{overflow-wrap:anywhere}
.t5ckpt .n{text-align:right}
.t5ckpt .dim{opacity:.65}
.t5ckpt .bar{align-self:center;height:.55em;background:rgba(128,128,128,.22);border-radius:2px}
.t5ckpt .bar span{display:block;height:100%;background:#4878d0;border-radius:2px;min-width:1px}
.t5ckpt .scroll{overflow:auto;max-height:36em}
.t5ckpt table{border-collapse:collapse;margin:0}
.t5ckpt td,.t5ckpt th{padding:2px 10px;text-align:right;white-space:nowrap}
.t5ckpt th{position:sticky;top:0;background:var(--jp-layout-color0,var(--vscode-editor-background,Canvas))}
.t5ckpt .hist{display:block;width:80px;height:18px;background:#4878d0}
.t5ckpt td:first-child,.t5ckpt th:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere;max-width:34em}
.t5ckpt .long{min-width:18em}
</style>"""


def pandas() -> Any:
    """Returns the module pandas; raises MissingDependencyError if it is not installed."""
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingDependencyError(
            "to_pandas needs pandas: pip install pandas, or pip install 't5ckpt[notebook]'"
        ) from error
    return pd


def table_text(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, more: str) -> str:
    """A title and the first rows as lines.

    Args:
      title: the first line.
      columns: their names.
      rows: cells, as many in each row as there are columns.
      left: how many columns are left-aligned; the others are right-aligned.
      more: the call that shows all rows.
    """
    lines = [printable(title)]
    if rows:
        lines += aligned([columns, *rows[:_SHOWN]], [at >= left for at in range(len(columns))])
    if len(rows) > _SHOWN:
        lines.append(f'... and {len(rows) - _SHOWN:,} more: {more}')
    return '\n'.join(lines)


def table_html(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A title and a table that scrolls, of at most 2,000 rows, as HTML; a cell that is ``Html`` is not escaped."""
    head = ''.join(f'<th>{_text(column)}</th>' for column in columns)
    body = ''.join(f'<tr>{_name(row[0])}{"".join(map(_cell, row[1:]))}</tr>' for row in rows[:_MAX_ROWS])
    hidden = len(rows) - _MAX_ROWS
    more = f'<div class="dim">... and {hidden:,} rows more: .to_pandas() has all.</div>' if hidden > 0 else ''
    return (
        f'{_STYLE}<div class="t5ckpt"><b>{_text(title)}</b><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{body}</tbody></table></div>{more}</div>'
    )


def _name(text: str) -> str:
    # Wraps after a slash first, and not to a column of single letters.
    long = ' class="long"' if len(text) > 18 else ''
    return f'<td{long}>{_text(text).replace("/", "/<wbr>")}</td>'


def _cell(text: str) -> str:
    return f'<td>{text if isinstance(text, Html) else _text(text)}</td>'


class Html(str):
    """A cell of elements, made by this room."""

    __slots__ = ()


def histogram(counts: Sequence[int]) -> Html:
    """The counts of a histogram as a shape; empty if there are none."""
    most, width = max(counts, default=0), 100 / max(1, len(counts))
    edges = ','.join(
        f'{(at + side) * width:.1f}% {100 - 100 * count / most:.0f}%'
        for at, count in enumerate(counts)
        for side in (0, 1)
        if most
    )
    return Html(edges and f'<span class="hist" style="clip-path:polygon(0 100%,{edges},100% 100%)"></span>')


def tree_html(title: str, facts: Sequence[str], infos: Sequence[LeafInfo]) -> str:
    """A title, a line of facts and the tree with at most 2,000 rows, as HTML: groups that open and close."""
    tree = build_tree(infos)
    rows, total = iter(range(_MAX_ROWS)), max(1, tree.nbytes)
    is_small = tree.leaves <= _OPEN_ROWS
    body = ''.join(
        _node(key, child, total, rows, is_open=True, is_small=is_small) for key, child in tree.children.items()
    )
    hidden = len(infos) - body.count('class="leaf"')
    more = f'<div class="dim">... and {_leaves(hidden)} more: view[\'a/group\'] shows a part.</div>' if hidden else ''
    about = _text(' · '.join(facts))
    return f'{_STYLE}<div class="t5ckpt"><b>{_text(title)}</b><div class="dim">{about}</div>{body}{more}</div>'


def _node(name: str, node: Group | LeafInfo, total: int, rows: Iterator[int], *, is_open: bool, is_small: bool) -> str:
    if next(rows, None) is None:
        return ''
    share = f'<span class="bar"><span style="width:{100 * node.nbytes / total:.2f}%"></span></span>'
    size = f'<span class="n">{node.size:,}</span><span class="n">{human_bytes(node.nbytes)}</span>{share}</span>'
    if isinstance(node, LeafInfo):
        value = f' <span class="dim">= {_text(node.value)}</span>' if node.value else ''
        what = f'<span>{node.dtype}</span><span>{node.shape if node.dtype else node.kind}</span>'
        about = _text(f'{node.name}: {node.location}')
        return (
            f'<div class="leaf" title="{about}"><span class="row"><span>{_text(name)}{value}</span>{what}{size}</div>'
        )
    below = ''.join(
        _node(key, child, total, rows, is_open=is_small, is_small=is_small) for key, child in node.children.items()
    )
    row = f'<span class="row"><span><b>{_text(name)}</b></span><span></span><span>{_leaves(node.leaves)}</span>{size}'
    opened = ' open' if is_open else ''
    return f'<details{opened}><summary>{row}</summary><div class="in">{below}</div></details>'


def _leaves(count: int) -> str:
    return counted(count, 'leaf', 'leaves')


def _text(text: str) -> str:
    """Escapes HTML and control characters, such as marks of direction."""
    return html.escape(printable(text))

"""Renders a tree of leaves as HTML for notebooks: groups that open and close, sums, and shares as bars.

The HTML has plain elements and inline styles in the page's colors, without scripts and files. So it works in JupyterLab, in VS
Code and in print, in light and dark themes. Names are escaped, because the origin of a checkpoint may be unknown.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from t5ckpt.core.text import counted, human_bytes, printable
from t5ckpt.inspection.leaf_tree import Group, LeafInfo

# More rows make browsers slow; for large trees, users select a part of the view.
_MAX_ROWS = 2000
_OPEN_ROWS = 30
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


class _Rows:
    """Limits the number of rows, and counts those that are left out."""

    def __init__(self, left: int):
        self.left = left
        self.hidden = 0

    def take(self, count: int = 1) -> bool:
        if self.left < 1:
            self.hidden += count
            return False
        self.left -= 1
        return True


def _text(text: str) -> str:
    """Escapes HTML and control characters, such as marks of direction."""
    return html.escape(printable(text))


def tree_html(title: str, facts: Sequence[str], tree: Group) -> str:
    """A title, a line of facts and the tree, as HTML."""
    rows = _Rows(_MAX_ROWS)
    body = ''.join(_node(key, child, max(1, tree.nbytes), rows, tree.leaves) for key, child in tree.children.items())
    more = ''
    if rows.hidden:
        more = f'<div class="dim">... and {_leaves(rows.hidden)} more: view[\'a/group/**\'] shows a part.</div>'
    about = _text(' · '.join(facts))
    return f'{_STYLE}<div class="t5ckpt"><b>{_text(title)}</b><div class="dim">{about}</div>{body}{more}</div>'


def _node(name: str, node: Group | LeafInfo, total: int, rows: _Rows, leaves: int) -> str:
    if isinstance(node, LeafInfo):
        return _leaf(name, node, total) if rows.take() else ''
    if not rows.take(node.leaves):
        return ''
    below = ''.join(_node(key, child, total, rows, leaves) for key, child in node.children.items())
    cells = _cells(f'<b>{_text(name)}</b>', '', _leaves(node.leaves), f'{node.size:,}', node.nbytes, total)
    is_open = ' open' if leaves <= _OPEN_ROWS or len(node.path) == 1 else ''
    return f'<details{is_open}><summary>{cells}</summary><div class="in">{below}</div></details>'


def _leaves(count: int) -> str:
    return counted(count, 'leaf', 'leaves')


def _leaf(name: str, leaf: LeafInfo, total: int) -> str:
    shape = str(leaf.shape) if leaf.dtype else leaf.kind
    value = f' <span class="dim">= {_text(leaf.value)}</span>' if leaf.value else ''
    cells = _cells(_text(name) + value, leaf.dtype, shape, f'{leaf.size:,}', leaf.nbytes, total)
    return f'<div class="leaf" title="{_text(f"{leaf.name}: {leaf.location}")}">{cells}</div>'


def _cells(name: str, dtype: str, shape: str, size: str, nbytes: int, total: int) -> str:
    bar = f'<span class="bar"><span style="width:{100 * nbytes / total:.2f}%"></span></span>'
    return (
        f'<span class="row"><span>{name}</span><span>{_text(dtype)}</span><span>{_text(shape)}</span>'
        f'<span class="n">{size}</span><span class="n">{human_bytes(nbytes)}</span>{bar}</span>'
    )


def table_html(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], pictures: Sequence[Sequence[int]] | None = None
) -> str:
    """A title and a table that scrolls, of at most 2,000 rows, as HTML.

    Args:
      title: above the table.
      columns: their names.
      rows: cells, as many in each row as there are columns.
      pictures: for each row the counts of a histogram, which is drawn in the second column.
    """
    titles = [*columns[:1], *([] if pictures is None else ['histogram']), *columns[1:]]
    head = ''.join(f'<th>{_text(column)}</th>' for column in titles)
    drawn = [''] * len(rows) if pictures is None else [f'<td>{_histogram(counts)}</td>' for counts in pictures]
    body = ''.join(
        f'<tr>{_name(row[0])}{picture}{"".join(map(_cell, row[1:]))}</tr>'
        for row, picture in zip(rows[:_MAX_ROWS], drawn, strict=False)
    )
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
    return f'<td>{_text(text)}</td>'


def _histogram(counts: Sequence[int]) -> str:
    most, width = max(counts, default=0), 100 / max(1, len(counts))
    if not most:
        return ''
    edges = ','.join(
        f'{(bin_index + side) * width:.1f}% {100 - 100 * count / most:.0f}%'
        for bin_index, count in enumerate(counts)
        for side in (0, 1)
    )
    return f'<span class="hist" style="clip-path:polygon(0 100%,{edges},100% 100%)"></span>'

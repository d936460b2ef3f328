"""Writes what was measured: results.json, results.md and results.png.

Every number is the median of the rounds; the JSON has each of them. A ratio is one median over another of the same run.
Orbax has three interfaces: where it is compared, it is with the fastest of them in that row.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import TYPE_CHECKING, Any

import cases
import peers

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable

PROGRESS = ('save', 'async_call', 'lost', 'loop_call', 'restore_warm', 'restore_cold')
_OURS, _LIMIT = 't5ckpt', 'limit'


@dataclasses.dataclass(frozen=True)
class Metric:
    """A column: what it is called, what it means, and how its numbers read."""

    name: str
    label: str
    meaning: str
    unit: str = 's'

    def text(self, value: float) -> str:
        """The number with three digits, in seconds or in MB."""
        if self.unit == 'MB':
            return f'{value / 1e6:,.0f} MB'
        return f'{value:.3f} s' if abs(value) < 10 else f'{value:.1f} s'


METRICS = (
    Metric('save', 'save', 'a blocking save, until everything is on the disk'),
    Metric('save_returned', 'save returned', 'a blocking save, until the call returns'),
    Metric('async_call', 'async call', 'the call of an asynchronous save, with nothing else going on'),
    Metric('async_total', 'async durable', 'an asynchronous save, until everything is on the disk'),
    Metric('lost', 'training time lost', 'time of n steps with a save among them - time of n steps without'),
    Metric('loop_call', 'async call in the loop', 'the call of an asynchronous save, while a step is running'),
    Metric('loop_total', 'durable after', 'from that call until everything is on the disk'),
    Metric('step', 'one step', 'a training step without a save'),
    Metric('restore_warm', 'restore, warm', 'the files are in the page cache'),
    Metric('restore_warm_used', 'and read, warm', 'the same, and every page of the result read'),
    Metric('restore_cold', 'restore, cold', 'the files are on the disk only'),
    Metric('restore_cold_used', 'and read, cold', 'the same, and every page of the result read'),
    Metric('save_memory', 'memory, save', 'peak of the host memory above the state', 'MB'),
    Metric('async_memory', 'memory, async', 'peak of the host memory above the state', 'MB'),
    Metric('restore_warm_memory', 'memory, restore', 'peak of the host memory above the restored state', 'MB'),
    Metric('disk', 'disk', 'what the checkpoint adds on the disk', 'MB'),
)


class Table:
    """The medians of a run."""

    def __init__(self, results: dict[str, Any]):
        self._medians = {
            (series['case'], series['peer'], series['metric']): statistics.median(series['samples'])
            for series in results['series']
        }
        self.results = results

    def median(self, case: str, peer: str, metric: str) -> float | None:
        """None if it was not measured."""
        return self._medians.get((case, peer, metric))

    def best(self, case: str, names: Iterable[str], metric: str) -> float | None:
        """The lowest median among some peers."""
        found = [value for name in names if (value := self.median(case, name, metric)) is not None]
        return min(found, default=None)

    def cases(self) -> list[cases.Case]:
        """Those that were run, in their order."""
        return [case for name, case in cases.CASES.items() if any(key[0] == name for key in self._medians)]

    def peers(self, case: cases.Case) -> list[type[peers.Peer]]:
        """Those that a case has numbers of, in their order."""
        return [
            peer for name, peer in peers.PEERS.items() if any(key[:2] == (case.name, name) for key in self._medians)
        ]

    def metrics(self, case: cases.Case) -> list[Metric]:
        """Those that a case has numbers of, in their order."""
        return [metric for metric in METRICS if any(key[0::2] == (case.name, metric.name) for key in self._medians)]


def _row(cells: Iterable[str]) -> str:
    return f'| {" | ".join(cells)} |'


def _markdown_table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [_row(head), _row(['---', *['---:'] * (len(head) - 1)]), *map(_row, rows), '']


def _ratio(numerator: float | None, denominator: float | None) -> str:
    """Of two times or sizes, where it means something: a loss of time can come out as nothing, or less."""
    if numerator is None or denominator is None or numerator <= 0 or denominator <= 0:
        return ''
    value = numerator / denominator
    return f'{value:.{2 if value < 1 else 1 if value < 100 else 0}f}x'


def _summary(table: Table) -> list[str]:
    """t5ckpt against the fastest Orbax and against the limit."""
    rows = []
    for case in table.cases():
        for metric in (metric for metric in table.metrics(case) if metric.name in case.headline):
            ours, limit = (table.median(case.name, name, metric.name) for name in (_OURS, _LIMIT))
            orbax = table.best(case.name, peers.ORBAX, metric.name)
            values = ['' if value is None else metric.text(value) for value in (ours, orbax, limit)]
            rows.append([f'{case.title}: {metric.label}', *values, _ratio(orbax, ours), _ratio(limit, ours)])
    head = ['', 't5ckpt', 'best Orbax', 'limit', 'Orbax / t5ckpt', 'limit / t5ckpt']
    return _markdown_table(head, rows)


def _case_table(table: Table, case: cases.Case) -> list[str]:
    """All peers of a case; behind each number how many times t5ckpt's it is."""
    metrics = table.metrics(case)
    rows = []
    for peer in table.peers(case):
        row = [peer.label]
        for metric in metrics:
            value = table.median(case.name, peer.name, metric.name)
            ratio = '' if peer.name == _OURS else _ratio(value, table.median(case.name, _OURS, metric.name))
            row.append('' if value is None else f'{metric.text(value)} {f"({ratio})" if ratio else ""}'.strip())
        rows.append(row)
    size = table.results['bytes'][case.name] / 1e6
    return [
        f'### {case.title} (`{case.name}`, {size:,.0f} MB)',
        '',
        *_markdown_table(['', *(metric.label for metric in metrics)], rows),
        *_absent(table.results, case),
    ]


def _absent(results: dict[str, Any], case: cases.Case) -> list[str]:
    absent = [(entry['peer'], entry['reason']) for entry in results['left_out'] if entry['case'] == case.name]
    absent += [
        (entry['peer'], f'failed: {entry["error"]}') for entry in results['failed'] if entry['case'] == case.name
    ]
    lines = [f'- Without {peers.PEERS[name].label}: {why}.' for name, why in absent]
    return [*lines, ''] if lines else []


def _about(results: dict[str, Any]) -> list[str]:
    machine = results['machine']
    versions = ', '.join(f'{name} {version}' for name, version in machine['versions'].items() if version)
    accelerator = [] if machine['platform'] == 'cpu' else [f'{machine["devices"]} x {machine["device"]}']
    memory = [f'{machine["memory"] / 2**30:.0f} GiB memory'] if machine['memory'] else []
    where = [*accelerator, machine['cpu'], f'{machine["cores"]} cores', *memory]
    where += [f'{machine["file_system"]}', machine['system'], f'Python {machine["python"]}']
    return [
        f'{results["date"]}. {", ".join(where)}. {versions}. Page cache emptied with {machine["cold_cache"]}.',
        f'Load average before and after: {machine["load_before"]} and {machine["load_after"]}.',
        '',
    ]


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    table = Table(results)
    seen = {metric for case in table.cases() for metric in table.metrics(case)}
    lines = ['# Benchmarks', '', *_about(results)]
    if results['short']:
        lines += ['**Tiny states, measured once: this run only shows that everything works.**', '']
    lines += ['Medians; a ratio above 1 is in favour of t5ckpt.', '', '## Summary', '', *_summary(table)]
    lines += ['## All peers', '', 'In brackets: how many times what t5ckpt takes.', '']
    for case in table.cases():
        lines += _case_table(table, case)
    lines += ['## What was measured', '', *(f'- {m.label}: {m.meaning}.' for m in METRICS if m in seen), '']
    return '\n'.join(lines)


def plot(results: dict[str, Any], file: pathlib.Path) -> None:
    """A panel for each case: the peers' times side by side, on a logarithmic axis; a time below zero has no bar."""
    import matplotlib as mpl

    mpl.use('agg')
    import matplotlib.pyplot as plt

    table = Table(results)
    shown = table.cases()
    rows = -(-(len(shown) + 1) // 2)  # the last panel is the legend
    figure, grid = plt.subplots(rows, 2, figsize=(12, 3 * rows), squeeze=False, layout='constrained')
    panels = list(grid.flat)
    for case, panel in zip(shown, panels, strict=False):
        _plot_case(table, case, panel)
    for panel in panels[len(shown) :]:
        panel.axis('off')
    bars = {bar.get_label(): bar for panel in panels for bar in panel.containers}
    panels[-1].legend(list(bars.values()), list(bars), loc='center')
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _plot_case(table: Table, case: cases.Case, panel: Any) -> None:
    metrics = [metric for metric in table.metrics(case) if metric.name in PROGRESS]
    names = table.peers(case)
    width = 0.8 / len(names)
    for number, peer in enumerate(names):
        at = [i + (number - (len(names) - 1) / 2) * width for i in range(len(metrics))]
        medians = [table.median(case.name, peer.name, metric.name) for metric in metrics]
        heights = [0 if value is None else max(value, 0) for value in medians]
        colour = {_OURS: 'black', _LIMIT: 'lightgrey'}.get(peer.name, f'C{list(peers.PEERS).index(peer.name)}')
        panel.bar(at, heights, width, label=peer.label, color=colour)
    panel.set_yscale('log')
    panel.set_ylabel('seconds')
    panel.set_title(case.title, fontsize=10)
    panel.set_xticks(range(len(metrics)), [metric.label for metric in metrics])
    panel.grid(axis='y', alpha=0.3)


def write(directory: pathlib.Path, results: dict[str, Any]) -> str:
    """Writes the three files; returns the text."""
    (directory / 'results.json').write_text(json.dumps(results, indent=1) + '\n')
    text = markdown(results)
    (directory / 'results.md').write_text(text)
    try:
        plot(results, directory / 'results.png')
    except ModuleNotFoundError as error:
        text += f'\nNo plot: {error.name} is not installed.\n'
    return text

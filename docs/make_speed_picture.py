"""Draws docs/pictures/speed.svg, the picture of docs/performance.md, from the samples of a run of the benchmarks.

python docs/make_speed_picture.py
"""

import json
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
SAMPLES = HERE / 'performance' / '2026-11-22.json'
ORBAX = ('orbax-pytree', 'orbax-standard', 'orbax-v1')
CALL = ('stall', 'loop_call')  # raw I/O hands its bytes to a thread: there is nothing to compare
CASES = {
    ('s1', 'save'): 'save, durable',
    CALL: 'call of save_async\nbehind a running step',
    ('stall', 'lost'): 'training time\nlost to a save',
    ('s1', 'restore_warm'): 'restore, page cache warm',
    ('reshard', 'restore_warm'): 'restore to another\nsharding, warm',
    ('small', 'save'): 'save of 10,000\nsmall leaves',
    ('small', 'restore_warm'): 'restore of 10,000\nsmall leaves',
    ('frozen', 'save'): 'second save,\nmost weights frozen',
}


def main() -> None:
    """Draws a group of three bars for each case."""
    found = {
        (entry['case'], entry['metric'], entry['peer']): float(np.median(entry['samples']))
        for entry in json.loads(SAMPLES.read_text(encoding='utf-8'))['series']
    }
    bars = {
        't5ckpt': ('#00796b', [found[*case, 't5ckpt'] for case in CASES]),
        'best Orbax': ('#e57373', [min(found[*case, peer] for peer in ORBAX) for case in CASES]),
        'raw I/O': ('#bdbdbd', [found[*case, 'limit'] if case != CALL else np.nan for case in CASES]),
    }
    mpl.rcParams['svg.hashsalt'] = 't5ckpt'  # the same file from the same samples
    figure, axes = plt.subplots(figsize=(9, 7.5), layout='constrained')
    for offset, (label, (color, values)) in zip((-0.27, 0, 0.27), bars.items(), strict=True):
        drawn = axes.barh(np.arange(len(CASES)) + offset, values, 0.26, label=label, color=color)
        axes.bar_label(
            drawn,
            ['' if np.isnan(value) else f'{value:.2f} s' if value < 10 else f'{value:.0f} s' for value in values],
            padding=3,
            fontsize=9,
        )
    axes.set_yticks(np.arange(len(CASES)), CASES.values())
    axes.invert_yaxis()
    axes.set(xscale='log', xlim=(0.02, 100), xlabel='seconds (logarithmic axis, lower is better)', ylabel='case')
    axes.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f'{value:g}'))
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(loc='lower right', frameon=False)
    figure.savefig(HERE / 'pictures' / 'speed.svg', metadata={'Date': None})


if __name__ == '__main__':
    main()

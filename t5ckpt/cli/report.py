"""``t5ckpt report``: writes an HTML page."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import click

from t5ckpt.catalog.locate import locate
from t5ckpt.cli.conversion_output import library_usage_errors
from t5ckpt.cli.output import json_option, layers_option, print_json, print_line, progress, size_of, steps_option
from t5ckpt.cli.paths import ANY_PATH, CHECKPOINT
from t5ckpt.cli.verb import Verb
from t5ckpt.core.text import human_bytes
from t5ckpt.inspection.report.page import SAMPLE_BYTES
from t5ckpt.inspection.runs import Run
from t5ckpt.inspection.view import open_checkpoint


def _sample(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    return None if value == 'all' else size_of(ctx, param, value)


@click.command('report', cls=Verb)
@click.argument('path', type=CHECKPOINT)
@click.option('--output', '-o', type=ANY_PATH, required=True, metavar='FILE', help='The page, such as run.html.')
@steps_option
@click.option(
    '--sample',
    default=f'{SAMPLE_BYTES // 10**6}MB',
    show_default=True,
    callback=_sample,
    metavar='SIZE',
    help='About how many bytes of each step to read, such as 2GB, or all.',
)
@layers_option
@click.option('--force', is_flag=True, help='Replace the file.')
@json_option
def command(path: str, output: str, steps: Sequence[int], sample: int | None, as_json: bool, **how: Any) -> None:
    """Writes one HTML page, which a browser opens without a server or a network.

    For a run, the page shows the steps with sizes, metrics and the reason to keep each; the tree, statistics and a histogram of
    each leaf of the latest step; and the changes since the previous step. --step selects another step, and a second --step
    the step to compare it with. For a checkpoint outside a run, the page shows its leaves and their statistics.

    Of a large checkpoint, a sample is read, spread evenly over all leaves; the page marks these leaves. Needs plotly.

    \b
    Examples:
      t5ckpt report run -o run.html
      t5ckpt report run --step 1000 --step 2000 --sample all -o changes.html
    """
    started = time.monotonic()
    located = locate(path, steps[0] if steps else None, tensors=True)
    with library_usage_errors(), progress('reading') as report:
        run = Run(located.storage)
        if located.step is not None and located.step in run.steps:
            written = run.report(output, steps=steps or (located.step,), sample_bytes=sample, **how, progress=report)
        elif how.pop('layers') is not None:
            raise click.UsageError('--layers divides the changes between two steps of a run. Leave it out.')
        else:
            written = open_checkpoint(path).report(output, sample_bytes=sample, **how, progress=report)
    size, seconds = os.path.getsize(written), time.monotonic() - started
    if as_json:
        print_json({'path': written, 'bytes': size, 'seconds': seconds})
    else:
        print_line(f'wrote {written}: {human_bytes(size)}, {seconds:.1f} s')

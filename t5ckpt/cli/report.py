"""``t5ckpt report``: writes an HTML page."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from t5ckpt.catalog.locate import locate
from t5ckpt.cli.paths import LATER, OTHER, checkpoint
from t5ckpt.cli.verb import STEPS, argument, emit, flag, option, progress, size, verb
from t5ckpt.core.text import human_bytes
from t5ckpt.inspection.report.page import SAMPLE_BYTES
from t5ckpt.inspection.runs import Run
from t5ckpt.inspection.view import open_checkpoint


def _sample(text: str) -> int | None:
    return None if text == 'all' else size(text)


@verb(
    'report',
    argument('path', LATER),
    option('--output -o', 'The page, such as run.html.', OTHER, required=True),
    STEPS,
    option(
        '--sample sample_bytes',
        'About how many bytes of each step to read, such as 2GB, or all.',
        _sample,
        'SIZE',
        default=f'{SAMPLE_BYTES // 10**6}MB',
        show_default=True,
    ),
    flag('--force', 'Replace the file.'),
)
def report(path: str, output: str, steps: Sequence[int], **how: Any) -> None:
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
    path = checkpoint(path, steps[0] if steps else None)
    located = locate(path, tensors=True)
    run = Run(located.storage)
    how['progress'] = progress('reading')
    if located.step is not None and located.step in run.steps:
        written = run.report(output, steps=steps or (located.step,), **how)
    else:
        written = open_checkpoint(path).report(output, **how)
    size, seconds = os.path.getsize(written), time.monotonic() - started
    text = f'wrote {written}: {human_bytes(size)}, {seconds:.1f} s'
    emit({'path': written, 'bytes': size, 'seconds': seconds}, text)

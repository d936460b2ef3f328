"""``t5ckpt verify``: checks whether a checkpoint is complete and intact."""

from __future__ import annotations

from t5ckpt.cli.paths import CHECKPOINT
from t5ckpt.cli.verb import FOLLOW_LINKS, STEP, Exit, argument, emit, fields_of, flag, progress, verb
from t5ckpt.integrity.verify import verify as verified


@verb(
    'verify',
    argument('path', CHECKPOINT),
    STEP,
    flag('--full', 'Read every byte and compare all checksums.'),
    FOLLOW_LINKS,
)
def verify(path: str, full: bool, follow_links: bool) -> int:
    """Checks that every file of a checkpoint exists and has its size; with --full, also compares all checksums.

    If a checkpoint has no checksums (T5X, Orbax), --full decodes every chunk.

    Exit codes: 0 intact; 1 anything is damaged; 3 no such step.

    \b
    Examples:
      t5ckpt verify run
      t5ckpt verify run/checkpoint_1000 --full
      t5ckpt verify run --full --json | jq '.damages[].file'
    """
    report = verified(path, full=full, follow_links=follow_links, progress=progress('verifying'))
    emit({'ok': report.ok, **fields_of(report)}, str(report))
    return Exit.DONE if report.ok else Exit.NO

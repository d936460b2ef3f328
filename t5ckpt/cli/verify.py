"""``t5ckpt verify``: checks whether a checkpoint is complete and intact."""

from __future__ import annotations

from t5ckpt.cli.paths import BOTH, LATER, checkpoint, tier_paths
from t5ckpt.cli.verb import (
    FOLLOW_LINKS,
    STEP,
    TIER,
    Exit,
    argument,
    code_of,
    emit,
    fields_of,
    flag,
    progress,
    say,
    verb,
)
from t5ckpt.errors import CheckpointNotFoundError, StorageError, T5CkptError
from t5ckpt.integrity.report import VerifyReport
from t5ckpt.integrity.verify import verify as verified


@verb(
    'verify',
    argument('path', LATER),
    STEP,
    flag('--full', 'Read every byte and compare all checksums.'),
    FOLLOW_LINKS,
    TIER,
)
def verify(path: str, at: int | None, full: bool, follow_links: bool, tier: str | None) -> int:
    """Checks that every file of a checkpoint exists and has its size; with --full, also compares all checksums.

    If a checkpoint has no checksums (T5X, Orbax), --full decodes every chunk. With --tier all, a tier that does not have the
    step is named, and the other one is verified.

    Exit codes: 0 intact; 1 anything is damaged; 3 no tier has the step; 4 a tier does not answer.

    \b
    Examples:
      t5ckpt verify run
      t5ckpt verify run/checkpoint_1000 --full
      t5ckpt verify run --full --json | jq '.damages[].file'
    """
    reports: dict[str | None, VerifyReport] = {}
    lacking: dict[str | None, T5CkptError] = {}
    for name, place in tier_paths(path, tier).items():
        try:
            reports[name] = verified(
                checkpoint(place, at), full=full, follow_links=follow_links, progress=progress('verifying')
            )
        except (CheckpointNotFoundError, StorageError) as error:
            if tier != BOTH:
                raise
            lacking[name] = error
    is_ok = all(report.ok for report in reports.values())
    fields = [{'tier': name, 'ok': report.ok, **fields_of(report)} for name, report in reports.items()]
    if reports:
        emit(fields if tier == BOTH else fields[0], *map(str, reports.values()))
    for name, error in lacking.items():
        say(f'tier {name} is not verified: {error}', err=True)
    away = [error for error in lacking.values() if isinstance(error, StorageError)]
    if not is_ok:
        return Exit.NO
    return code_of(away[0]) if away else Exit.DONE if reports else Exit.UNREADABLE

"""``t5ckpt pin`` and ``unpin``: pins steps, which retention then never deletes, and removes the pins."""

from __future__ import annotations

from collections.abc import Sequence

from t5ckpt.catalog.pin_file import NO_REASON, pin_text
from t5ckpt.cli.paths import CHECKPOINT, step_path
from t5ckpt.cli.verb import Exit, argument, emit, option, verb
from t5ckpt.steps import is_pinned_checkpoint, pin_checkpoint, unpin_checkpoint
from t5ckpt.storage import open_storage

_PATHS = argument('paths', CHECKPOINT, metavar='PATH...', nargs=-1, required=True)


@verb(
    'pin',
    _PATHS,
    option('--why', 'The reason, which ls shows; default: the reason of an earlier pin.', default=NO_REASON),
)
def pin(paths: Sequence[str], why: str) -> None:
    """Pins the checkpoints at PATH...; of a run its latest step.

    No keep policy deletes a pinned step. The pin is a file PINNED in the step's directory, as in T5X.

    \b
    Examples:
      t5ckpt pin run@1000 --why 'in the paper'
      t5ckpt pin run@best:eval/loss run@latest
    """
    checkpoints = list(dict.fromkeys(map(step_path, paths)))
    for path in checkpoints:
        pin_checkpoint(path, why)
    reasons = {path: pin_text(open_storage(path), '') for path in checkpoints}
    texts = [': '.join(filter(None, [f'pinned {path}', reason])) for path, reason in reasons.items()]
    emit({'paths': checkpoints, 'why': reasons}, *texts)


@verb('unpin', _PATHS)
def unpin(paths: Sequence[str]) -> int:
    """Unpins the checkpoints at PATH...; of a run its latest step.

    This deletes nothing, but the next save of the run or t5ckpt prune may delete the step.

    \b
    Exit codes: 0 done; 1 one of them was not pinned.

    \b
    Example:
      t5ckpt unpin run@1000
    """
    were = {path: is_pinned_checkpoint(path) for path in map(step_path, paths)}
    unpinned = [path for path, was_pinned in were.items() if was_pinned]
    not_pinned = [path for path in were if path not in unpinned]
    for path in unpinned:
        unpin_checkpoint(path)
    texts = [f'unpinned {path}' for path in unpinned] + [f'was not pinned: {path}' for path in not_pinned]
    emit({'unpinned': unpinned, 'not_pinned': not_pinned}, *texts)
    return Exit.NO if not_pinned else Exit.DONE

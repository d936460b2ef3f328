"""Restores a run from its own checkpoints, starts it from those of another run, or initializes it.

    restored = restore_or_init(checkpointer, init_fn, initial_checkpoint=WarmStart('pretrained', take=MODEL))

A damaged checkpoint is reported and renamed to ``checkpoint_<step>.damaged-<unix seconds>``, and the next older one is used. The
renamed directory keeps its files but is not listed, so the run can save that step again. If a run has checkpoints and none can
be read, this is an error, never a fresh start.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from t5ckpt.catalog.locate import log_newer, refuse_other_contents
from t5ckpt.checkpointer import Checkpointer
from t5ckpt.commit.deletion import try_to_rename_damaged
from t5ckpt.core.arguments import check_kind, check_word, given_step
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.leaf_patterns import Pattern, Patterns
from t5ckpt.core.text import lines
from t5ckpt.errors import (
    CorruptCheckpointError,
    DisagreementError,
    NotADirectoryStorageError,
    RemoteError,
    UnsupportedTopologyError,
)
from t5ckpt.planning.leaf_choice import LeafChoice
from t5ckpt.restorer import Restorer
from t5ckpt.storage import Storage, open_storage
from t5ckpt.tree.leaf_table import Empty, LeafTable
from t5ckpt.tree.train_state import flatten_state

_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class WarmStart(LeafChoice):
    r"""The leaves to take from another run's checkpoint; the others come from ``init_fn``.

    Patterns, one or several, as text or compiled, are matched with the whole name of a leaf of the template,
    ``'params/dense/kernel'``. ``Checkpointer.restore`` takes the same words, with the template in place of ``init_fn``.

    Attributes:
      take: leaves that come from the checkpoint.
      leave: leaves that do not, although ``take`` matches them.
      rename: (pattern, replacement) in order, as in ``apply_assignment_map``: the names in the checkpoint of leaves of the
        template. Averaged weights instead of the trained ones: ``[(r'params/(.*)', r'ema/\1')]``.
      missing: for leaves that ``take`` matches and the checkpoint lacks: 'error', or 'init' to take them from ``init_fn``.
      strict: the required match of checkpoint and template: 'exact' includes every dtype, after casts; 'up_to_dtype' allows
        float32 for bfloat16 and the like; 'contains' also allows a checkpoint with more leaves than the template, whose number
        is logged. None is 'contains' for a state with T5X's protocol and with a partitioner, as in T5X, and 'up_to_dtype' for
        any other pytree.
      resize: leaves that may have another shape: the values keep their indices, a larger dimension of the template is padded
        with zeros, a smaller one is truncated. The log names each leaf. PRNG keys are not resized.
      path: a run's directory, a step's directory or a manifest; a relative one is of the directory in which this is made.
      step: which step, if ``path`` is a run's directory; None takes the latest.
      restore_iterator: whether the position of the data iterator is restored, too. None restores it without ``take``, which
        continues the run.
    """

    path: str | os.PathLike[str]
    step: int | None = None
    restore_iterator: bool | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, 'path', open_storage(self.path).url())
        given_step(self.step)


def restore_or_init(
    checkpointer: Checkpointer,
    init_fn: Callable[[], Any] | None,
    *,
    fallback: str | None = 'older',
    initial_checkpoint: str | os.PathLike[str] | WarmStart | None = None,
    rename: Sequence[tuple[Pattern, str | None]] = (),
    missing: str = 'error',
    strict: str | None = None,
    resize: Patterns | None = None,
    donate: bool = False,
) -> Any:
    """Returns the state to continue from: the run's latest checkpoint, that of another run, or a new state.

    Every process of the job calls it. Afterwards ``checkpointer.restored_step`` is the step that was restored, or None if the run
    had none. ``rename``, ``missing``, ``strict`` and ``resize`` are for the run's own checkpoints, and may stay: they change
    nothing in a checkpoint that fits the template.

    Args:
      checkpointer: of the run.
      init_fn: makes a new state; called only if a leaf of it is needed.
      fallback: 'older' reports a damaged checkpoint and restores the next older one; None raises the error.
      initial_checkpoint: a checkpoint of another run to start from; ignored if this run has a checkpoint. A path restores
        everything, with the position of the data iterator. To merge several, restore them in ``init_fn``.
      rename: (name in the template, name in the checkpoint), as in :class:`WarmStart`. A rule for a leaf that the checkpoint has
        under its new name is an error, unless the old name is gone: each restart would replace the trained values again.
      missing: 'init' takes leaves that the checkpoint lacks from ``init_fn``; 'error' lists them.
      strict: the required match of checkpoint and template, as in :class:`WarmStart`.
      resize: leaves that are padded with zeros or truncated to the template's shape, as in :class:`WarmStart`.
      donate: as in ``Checkpointer.restore``.

    Raises:
      ValueError: ``restore_iterator=True`` without a data iterator.
      CorruptCheckpointError: the run has checkpoints and none of them can be read.
      UnsupportedFormatError: t5ckpt does not read the format of the latest checkpoint, or of an array in it.
      TreeMismatchError: checkpoint and template differ.
      DisagreementError: only some processes of the job pass an ``initial_checkpoint``.
    """
    check_word('fallback', fallback, ('older', None))
    choice = LeafChoice(rename=rename, missing=missing, strict=strict, resize=resize)
    warm = (
        WarmStart(initial_checkpoint)
        if isinstance(initial_checkpoint, str | bytes | os.PathLike)
        else initial_checkpoint
    )
    check_kind('initial_checkpoint', warm, WarmStart, "WarmStart('pretrained', take=MODEL)")
    run = checkpointer._restorer  # noqa: SLF001 - its other user  # pyright: ignore[reportPrivateUsage]
    initial = _Initial(run.template, init_fn)
    steps: list[int] = run.agree('restore_or_init', run.local_steps, run.steps)
    if steps:
        log_newer(run.storage, steps[-1])
    failed: list[int] = []
    for step in reversed(steps):
        error: Exception | None = None
        try:
            init = initial.leaves if missing == 'init' else None
            state = run.restore(choice, step=step, repeats=True, donate=donate, init=init)
        except Exception as caught:  # noqa: BLE001 - raised below, when the other processes know
            error = caught
        else:
            _rename_damaged(run, failed, shared=False)
            run.agree('renaming damaged steps', None, lambda _: _rename_damaged(run, failed, shared=True))
            return state
        why = run.agree('the fallback of restore_or_init', _kind(error), _verdict)
        if fallback is None or not why or (why == 'topology' and step == steps[0]):
            raise error
        if why == 'corrupt':
            failed.append(step)
        _log.error('t5ckpt: step %d cannot be restored, looking for an older one: %s', step, error)
    if failed:
        copies = [run.damaged_copies(step, shared=shared) for step in failed for shared in (True, False)]
        urls = [checkpointer.checkpoints_dir, *(storage.url() for storages in copies for storage in storages)]
        raise CorruptCheckpointError(
            f'{" and ".join(dict.fromkeys(urls))}: none of the steps {failed[::-1]} can be restored; the log has the errors. '
            'Copy one without its damaged leaves (t5ckpt cp --leave), or move them away to start a new run.'
        )
    run.agree('a new run', warm is not None, lambda given: _check_new_run(run.storage, given))
    _log.info('t5ckpt: %s has no checkpoint, so a new run starts', checkpointer.checkpoints_dir)
    return initial.state() if warm is None else _warm_start(run, initial, warm, donate)


def _check_new_run(storage: Storage, given: Sequence[bool]) -> None:
    """Raises an error if no new run may begin here, or if ``initial_checkpoint`` is given in some processes only."""
    refuse_other_contents(storage)
    if len(set(given)) > 1:
        raise DisagreementError(
            f'initial_checkpoint is given in some processes only, in order: {given}. Every process of the job has to pass it.'
        )


def _kind(error: Exception) -> str:
    """Classifies the error of a failed restore, in one process."""
    # A file in place of the directory of an array is damage, too.
    if isinstance(error, (CorruptCheckpointError, NotADirectoryStorageError)):
        return 'corrupt'
    # A local step of a job with other processes or shardings stays as it is.
    if isinstance(error, UnsupportedTopologyError):
        return 'topology'
    # All others, such as an unsupported format, are not damage. An older step would lose the training after it.
    return 'remote' if isinstance(error, RemoteError) else 'other'


def _verdict(kinds: Sequence[str]) -> str:
    """The reason why no process can restore the step, or ''; a remote error repeats the error of another process."""
    own = set(kinds) - {'remote'}
    return own.pop() if own in ({'corrupt'}, {'topology'}) else ''


def _rename_damaged(run: Restorer, failed: Sequence[int], *, shared: bool) -> None:
    """Renames damaged steps, except those that are kept or that another program wrote."""
    for step in failed:
        for storage in run.damaged_copies(step, shared=shared):
            try_to_rename_damaged(storage, step, run.options.clock)


class _Initial:
    """The state of ``init_fn``, which is made when a leaf of it is needed."""

    def __init__(self, template: Any, init_fn: Callable[[], Any] | None):
        self._template = template
        self._init_fn = init_fn
        self.count = 0

    def state(self) -> Any:
        state = None if self._init_fn is None else self._init_fn()
        if state is None:
            what = 'init_fn is None' if self._init_fn is None else 'init_fn returned None'
            raise ValueError(f'{what}, but a new state is needed. Pass a function that returns the state.')
        return state

    def leaves(self, needed: Sequence[Path]) -> LeafTable:
        fresh = flatten_state(self.state()).table
        _check_new_state(fresh, flatten_state(self._template).table, needed)
        self.count = len(needed)
        return {path: fresh[path] for path in needed}


def _warm_start(run: Restorer, initial: _Initial, warm: WarmStart, donate: bool) -> Any:
    if warm.restore_iterator and run.dataset is None:
        raise ValueError(
            'initial_checkpoint has restore_iterator=True: the Checkpointer has no dataset_iterator to continue there. Pass '
            'Checkpointer(dataset_iterator=), or leave restore_iterator out.'
        )
    continues = warm.take == WarmStart.take if warm.restore_iterator is None else warm.restore_iterator
    state = run.restore(
        warm, path=warm.path, step=warm.step, init=initial.leaves, donate=donate, leaves_iterator=not continues
    )
    # No checkpoint holds an empty container, such as optax's EmptyState, or None.
    table = flatten_state(run.template).table
    total = sum(not isinstance(leaf, Empty | None) for leaf in table.values())
    _log.info('t5ckpt: started from %s: %d of %d leaves', warm.path, total - initial.count, total)
    if run.dataset is not None:
        starts = 'starts at its beginning (WarmStart(restore_iterator=True) continues it)'
        _log.info('t5ckpt: the data %s', f'continues at the position in {warm.path}' if continues else starts)
    return state


def _check_new_state(fresh: LeafTable, template: LeafTable, needed: Sequence[Path]) -> None:
    """Raises where the state of ``init_fn`` is not one of the checkpointer's template.

    Raises:
      ValueError: with every leaf that is missing, too many, or of another shape.
    """
    problems = [(path, 'in the template, not in the new state') for path in needed if path not in fresh]
    problems += [(path, 'in the new state, not in the template') for path in fresh if path not in template]
    for path in needed:
        shapes = [getattr(table.get(path), 'shape', None) for table in (fresh, template)]
        if None not in shapes and shapes[0] != shapes[1]:
            problems.append((path, f'shape {shapes[0]} in the new state, {shapes[1]} in the template'))
    if problems:
        texts = [f'{leaf_name(path)}: {text}' for path, text in problems]
        cure = 'Let init_fn return a state of the tree that Checkpointer was given.'
        raise ValueError(lines("init_fn: its state is not one of the checkpointer's template.", *texts, cure))

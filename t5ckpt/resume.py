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
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from t5ckpt.catalog.locate import log_newer, refuse_other_contents
from t5ckpt.checkpointer import Checkpointer
from t5ckpt.commit.deletion import try_to_rename_damaged
from t5ckpt.core.arguments import check_path, check_patterns, check_word, given_step
from t5ckpt.core.leaf_path import OPTIMIZER, Path, leaf_name, path_of
from t5ckpt.core.protocols import leaf_pattern, meant_pattern
from t5ckpt.core.text import some_of
from t5ckpt.errors import (
    CorruptCheckpointError,
    DisagreementError,
    NotADirectoryStorageError,
    RemoteError,
    TreeMismatchError,
    UnsupportedTopologyError,
    with_cures,
)
from t5ckpt.planning.leaf_match import check_new_state
from t5ckpt.planning.resizing import Patterns, Resize
from t5ckpt.steps import find_checkpoint
from t5ckpt.storage import Storage, open_storage
from t5ckpt.translate import assigned
from t5ckpt.tree.leaf_table import Empty, LeafTable, flatten_nested, unflatten
from t5ckpt.tree.train_state import flatten_state

__all__ = ['MODEL', 'OPTIMIZER', 'WarmStart', 'restore_or_init']

_log = logging.getLogger('t5ckpt')

MODEL = r'(?!(.*/)?rngs/(.*/)?(key|count)(/value)?$)(target|params)/.*'
"""The weights, in T5X's and in Flax's train state; a pattern for ``WarmStart.take``.

Of Flax NNX these are all variables of the model but the keys and counters of RNG streams in attributes called ``rngs``.
"""


# Cures with the options of WarmStart, since restore_or_init does not take those of Checkpointer.restore.
_WARM_CURES = {
    'dtype': 'Values are not cast to another kind of dtype: name the leaf in WarmStart(leave=...), or change the template.',
    'key shape': 'Keys are not padded. WarmStart(leave=...) takes them from init_fn.',
    'missing': "WarmStart(missing='init') takes new leaves from init_fn.",
    'shape': 'WarmStart(resize=...) pads with zeros or truncates; WarmStart(leave=...) takes the leaf from init_fn.',
    'unexpected': "WarmStart(strict='contains') leaves out leaves that the template lacks.",
    'rename': 'WarmStart(rename={rules})',
}
# A run continues only from its complete state. A changed model is a new run.
_OWN_CURES = dict.fromkeys(
    _WARM_CURES,
    'To continue with a changed model, start a run in a new directory with initial_checkpoint=WarmStart(the old directory, '
    "...). Its options missing='init', leave=, resize=, rename= and strict='contains' select the leaves. If leaves appear "
    'during the run, as in a replay buffer, use ... as their subtree in the template; t5ckpt.load_t5x_checkpoint(directory, '
    'checkpointer.restored_step) then reads them.',
) | {
    'dtype': 'Values are not cast to another kind of dtype: give the leaf of the template that of the checkpoint, or start a run '
    'in a new directory with initial_checkpoint=WarmStart(the old directory, leave=...), which takes the leaf from init_fn.',
    'rename': 'initial_checkpoint=WarmStart(the old directory, rename={rules}), in a new directory',
}


@dataclasses.dataclass(frozen=True)
class WarmStart:
    r"""The leaves to take from another run's checkpoint; the others come from ``init_fn``.

    Patterns, text or compiled, are matched with the whole name of a leaf of the template, ``'params/dense/kernel'``.

    Attributes:
      path: a run's directory, a step's directory or a manifest; a relative one is of the directory in which this is made.
      step: which step, if ``path`` is a run's directory; None takes the latest.
      take: leaves that come from the checkpoint.
      leave: leaves that do not, although ``take`` matches them.
      rename: (pattern, replacement) in order, as in ``apply_assignment_map``: the names in the checkpoint of leaves of the
        template. Averaged weights instead of the trained ones: ``((r'params/(.*)', r'ema/\1'),)``.
      missing: for leaves that ``take`` matches and the checkpoint lacks: 'error', or 'init' to take them from ``init_fn``.
      strict: as in ``Checkpointer.restore``, for the leaves that come from this source.
      resize: as in ``Checkpointer.restore``.
      restore_iterator: whether the position of the data iterator is restored, too. None restores it from a single source
        without ``take``, which continues its run.
    """

    path: str | os.PathLike[str]
    step: int | None = None
    take: str | re.Pattern[str] = '.*'
    leave: str | re.Pattern[str] | None = None
    rename: Sequence[tuple[str | re.Pattern[str], str | None]] = ()
    missing: str = 'error'
    strict: str | None = None
    resize: Patterns | None = None
    restore_iterator: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, 'path', open_storage(self.path).url())
        check_word('missing', self.missing, ('error', 'init'))
        given_step(self.step)
        Resize(self.resize)
        for field, pattern in (('take', self.take), ('leave', self.leave)):
            check_patterns(() if pattern is None else (pattern,), f'WarmStart: {field}')
        rules: Any = self.rename
        is_list = isinstance(rules, Sequence) and not isinstance(rules, str)
        if not is_list or any(isinstance(rule, str) or len(rule) != 2 for rule in rules):
            raise ValueError(
                'WarmStart: rename must be a list of (name in the template, name in the checkpoint), such as '
                f"[('params/(.*)', r'ema/\\1')], got {rules!r:.80}."
            )
        check_patterns((pattern for pattern, _ in rules), 'WarmStart: rename')

    @property
    def location(self) -> str:
        """The path to restore from; with ``step`` it is resolved, without storage options.

        Raises:
          CheckpointNotFoundError: the run does not have this step.
        """
        return os.fspath(self.path) if self.step is None else find_checkpoint(self.path, self.step)

    def is_taken(self, name: str) -> bool:
        """Whether ``take`` and ``leave`` select a leaf of the template."""
        left = self.leave is not None and leaf_pattern(self.leave).fullmatch(name) is not None
        return leaf_pattern(self.take).fullmatch(name) is not None and not left

    def transform(self, state_dict: Any, target_state_dict: Any) -> Any:
        """A restore transform: renames the checkpoint's leaves to the template's, and keeps only those that are taken."""
        if self.rename:
            may_lack = self.missing == 'init'
            state_dict = assigned(state_dict, target_state_dict, self.rename, wanted=self.is_taken, may_lack=may_lack)
        table = flatten_nested(state_dict)
        return unflatten({path: _value(leaf) for path, leaf in table.items() if self.is_taken(leaf_name(path))})


def restore_or_init(
    checkpointer: Checkpointer,
    init_fn: Callable[[], Any] | None,
    *,
    fallback: str | None = 'older',
    initial_checkpoint: str | os.PathLike[str] | WarmStart | Sequence[str | os.PathLike[str] | WarmStart] | None = None,
    strict: str | None = None,
    donate: bool = False,
) -> Any:
    """Returns the state to continue from: the run's latest checkpoint, that of another run, or a new state.

    Every process of the job calls it. Afterwards ``checkpointer.restored_step`` is the step that was restored, or None if the run
    had none.

    Args:
      checkpointer: of the run.
      init_fn: makes a new state; called only if a leaf of it is needed.
      fallback: 'older' reports a damaged checkpoint and restores the next older one; None raises the error.
      initial_checkpoint: a checkpoint of another run, or several, to start from; ignored if this run has a checkpoint. A path
        restores everything, with the position of the data iterator. Each of several provides the leaves that those before it
        lack, and the data starts at its beginning; ``WarmStart(restore_iterator=...)`` decides otherwise.
      strict: as in ``Checkpointer.restore``, for the run's own checkpoints.
      donate: as in ``Checkpointer.restore``.

    Raises:
      ValueError: ``restore_iterator=True`` of several sources, or without a data iterator.
      CorruptCheckpointError: the run has checkpoints and none of them can be read.
      UnsupportedFormatError: t5ckpt does not read the format of the latest checkpoint, or of an array in it.
      TreeMismatchError: checkpoint and template differ.
      DisagreementError: the processes of the job pass another number of sources.
    """
    check_word('fallback', fallback, ('older', None))
    sources = _sources(initial_checkpoint)
    steps: list[int] = checkpointer.agree('restore_or_init', checkpointer.local_steps, checkpointer.steps_to_restore)
    if steps:
        log_newer(checkpointer.storage, steps[-1])
    failed: list[int] = []
    for step in reversed(steps):
        error: Exception | None = None
        try:
            state = checkpointer.restore(step, strict=strict, donate=donate)
        except TreeMismatchError as caught:
            error = with_cures(caught, _OWN_CURES)
        except Exception as caught:  # noqa: BLE001 - raised below, when the other processes know
            error = caught
        else:
            _rename_damaged(checkpointer, failed, shared=False)
            checkpointer.agree(
                'renaming damaged steps', None, lambda _: _rename_damaged(checkpointer, failed, shared=True)
            )
            return state
        why = checkpointer.agree('the fallback of restore_or_init', _kind(error), _verdict)
        if fallback is None or not why or (why == 'topology' and step == steps[0]):
            raise error
        if why == 'corrupt':
            failed.append(step)
        _log.error('t5ckpt: step %d cannot be restored, looking for an older one: %s', step, error)
    if failed:
        copies = [checkpointer.damaged_copies(step, shared=shared) for step in failed for shared in (True, False)]
        urls = [checkpointer.checkpoints_dir, *(storage.url() for storages in copies for storage in storages)]
        raise CorruptCheckpointError(
            f'{" and ".join(dict.fromkeys(urls))}: none of the steps {failed[::-1]} can be restored; the log has the errors. '
            'Copy one without its damaged leaves (t5ckpt cp --drop), or move them away to start a new run.'
        )
    checkpointer.agree('a new run', len(sources or ()), lambda counts: _check_new_run(checkpointer.storage, counts))
    _log.info('t5ckpt: %s has no checkpoint, so a new run starts', checkpointer.checkpoints_dir)
    if sources is None:
        return _new_state(init_fn)
    try:
        return _warm_start(checkpointer, init_fn, sources, donate)
    except TreeMismatchError as error:
        raise with_cures(error, _WARM_CURES) from error.__cause__


def _check_new_run(storage: Storage, counts: Sequence[int]) -> None:
    """Raises an error if no new run may begin here, or for another number of sources in some process."""
    refuse_other_contents(storage)
    if len(set(counts)) > 1:
        raise DisagreementError(
            f'initial_checkpoint has another number of checkpoints in some processes, in order: {counts}. Every process of the '
            'job has to pass it alike.'
        )


def _sources(given: Any) -> list[WarmStart] | None:
    if given is None:
        return None
    listed: list[Any] = [given] if isinstance(given, (str, bytes, os.PathLike, WarmStart)) else [*given]
    if not listed:
        raise ValueError('initial_checkpoint is empty. Pass a path, a WarmStart, a list of these, or None.')
    for path in (each for each in listed if not isinstance(each, WarmStart)):
        check_path('initial_checkpoint', path)
    return [each if isinstance(each, WarmStart) else WarmStart(each) for each in listed]


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


def _rename_damaged(checkpointer: Checkpointer, failed: Sequence[int], *, shared: bool) -> None:
    """Renames damaged steps, except those that are kept or that another program wrote."""
    for step in failed:
        for storage in checkpointer.damaged_copies(step, shared=shared):
            try_to_rename_damaged(storage, step, time.time)


@dataclasses.dataclass(frozen=True)
class _Share:
    """The leaves of the template that one source provides, and those that it should provide but lacks."""

    warm: WarmStart
    found: frozenset[Path]
    lacking: frozenset[Path]
    before: frozenset[Path]

    def transform(self, state_dict: Any, target_state_dict: Any) -> Any:
        """``WarmStart.transform`` without the leaves of the sources before this one."""
        table = flatten_nested(self.warm.transform(state_dict, target_state_dict))
        return unflatten({path: _value(leaf) for path, leaf in table.items() if path not in self.before})


def _warm_start(
    checkpointer: Checkpointer, init_fn: Callable[[], Any] | None, sources: Sequence[WarmStart], donate: bool
) -> Any:
    table = flatten_state(checkpointer.template).table
    # No checkpoint holds an empty container, such as optax's EmptyState, or None.
    template = {path: leaf for path, leaf in table.items() if not isinstance(leaf, Empty | None)}
    paths: list[str] = checkpointer.agree(
        'the sources of a warm start', None, lambda _: [_found(checkpointer, each) for each in sources]
    )
    sources = [dataclasses.replace(each, path=path, step=None) for each, path in zip(sources, paths, strict=True)]
    shares: list[_Share] = []
    given: frozenset[Path] = frozenset()
    for warm in sources:
        shares.append(_share(checkpointer, warm, template, given))
        given |= shares[-1].found
    asked = given.union(*(share.lacking for share in shares))
    from_init = [path for path in template if path not in asked]
    iterator_from = _iterator_source(sources, has_iterator=checkpointer.has_iterator)
    values: LeafTable = {}
    *earlier, last = shares
    for share in earlier:
        warm = share.warm
        values |= checkpointer.restore_leaves(
            warm.location,
            share.found | share.lacking,
            (share.transform,),
            strict=warm.strict,
            resize=warm.resize,
            restore_iterator=warm is iterator_from,
        )
    initial: LeafTable = {}
    if from_init:
        fresh = flatten_state(_new_state(init_fn)).table
        check_new_state(fresh, table, from_init)
        initial = {path: _value(fresh[path]) for path in from_init}
    rest = values | initial
    state = checkpointer.restore(
        path=last.warm.location,
        state_transformation_fns=(last.transform,),
        fallback_state=unflatten(rest) if rest else None,
        strict=last.warm.strict,
        donate=donate,
        restore_iterator=last.warm is iterator_from,
        resize=last.warm.resize,
    )
    for share in shares:
        _log.info('t5ckpt: started from %s: %d of %d leaves', share.warm.location, len(share.found), len(template))
    _log.info('t5ckpt: %d of %d leaves are new', len(initial), len(template))
    if checkpointer.has_iterator:
        starts = 'starts at its beginning (WarmStart(restore_iterator=True) continues it)'
        where = starts if iterator_from is None else f'continues at the position in {iterator_from.location}'
        _log.info('t5ckpt: the data %s', where)
    return state


def _iterator_source(sources: Sequence[WarmStart], *, has_iterator: bool) -> WarmStart | None:
    """The source whose position of the data iterator is restored; None leaves the iterator as it is."""
    asked = [warm for warm in sources if warm.restore_iterator]
    if len(asked) > 1:
        raise ValueError(
            'initial_checkpoint: more than one source has restore_iterator=True. Leave it out of all but one.'
        )
    if asked and not has_iterator:
        raise ValueError(
            'initial_checkpoint has restore_iterator=True: the Checkpointer has no dataset_iterator to continue there. Pass '
            'Checkpointer(dataset_iterator=), or leave restore_iterator out.'
        )
    (first, *others) = sources
    continues = not others and first.restore_iterator is None and first.take == WarmStart.take
    return asked[0] if asked else first if continues else None


def _new_state(init_fn: Callable[[], Any] | None) -> Any:
    state = None if init_fn is None else init_fn()
    if state is None:
        what = 'init_fn is None' if init_fn is None else 'init_fn returned None'
        raise ValueError(f'{what}, but a new state is needed. Pass a function that returns the state.')
    return state


def _found(checkpointer: Checkpointer, warm: WarmStart) -> str:
    """The path of a source; a step of a run is resolved once, so that all processes read the same one."""
    return os.fspath(warm.path) if warm.step is None else checkpointer.open_elsewhere(warm.path, warm.step).path


def _share(checkpointer: Checkpointer, warm: WarmStart, template: LeafTable, before: frozenset[Path]) -> _Share:
    """Determines the leaves that a source provides, in addition to the sources before it.

    Raises:
      ValueError: a pattern matches no leaf, or the source provides no leaf that the sources before it lack.
    """
    source = checkpointer.agree('a warm start', None, lambda _: list(checkpointer.open_elsewhere(warm.location)))
    found = warm.transform(_names(source), unflatten({path: _value(leaf) for path, leaf in template.items()}))
    _check_patterns(warm, [*map(leaf_name, template), *source])
    have = set(flatten_nested(found))
    free = frozenset(path for path in template if path not in before)
    share = frozenset(path for path in free if path in have)
    lacking = [path for path in template if path in free - share and warm.is_taken(leaf_name(path))]
    if lacking and warm.missing == 'init':
        names = some_of([leaf_name(path) for path in lacking], 5)
        _log.info("t5ckpt: %s lacks %s; missing='init' takes them from other sources or init_fn", warm.location, names)
        lacking = []
    if not share and (before or not lacking):
        cure = 'Narrow take= of those' if before else 'Correct take=, leave= and rename='
        left = ' that the sources before it lack' if before else ''
        raise ValueError(
            f'initial_checkpoint: {warm.location} provides no leaf of the template{left}. {cure}, or leave this source out.'
        )
    return _Share(warm, share, frozenset(lacking), before)


def _check_patterns(warm: WarmStart, names: Sequence[str]) -> None:
    """Raises ValueError for a pattern without a match, since the run would start from other weights than intended."""
    for field, pattern in (('take', warm.take), ('leave', warm.leave)):
        if pattern is not None and not any(leaf_pattern(pattern).fullmatch(name) for name in names):
            text = leaf_pattern(pattern).pattern
            near = next((name for name in names if leaf_pattern(pattern).match(name)), None)
            hint = '' if near is None else f'; it matches only the beginning of {near}, so pass {field}={text + ".*"!r}'
            meant = meant_pattern(text, names) or meant_pattern(f'{text}/.*', names)
            raise ValueError(
                f'WarmStart: {field}={pattern!r} names no leaf of the template or of {warm.location}, such as '
                f'{", ".join(names[:3])}. Patterns are matched with whole names{hint}.{meant}'
            )


def _names(held: Sequence[str]) -> dict[str, Any]:
    """A state dict whose leaves are their names in the checkpoint."""
    return unflatten({path_of(name): name for name in held})


def _value(leaf: Any) -> Any:
    return leaf.build() if isinstance(leaf, Empty) else leaf

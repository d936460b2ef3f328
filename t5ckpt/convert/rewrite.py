"""Copies checkpoints with changes: drops, casts, renames, averages leaves, or replaces them by their moving averages.

One pass in bounded memory. The files of unchanged arrays are hard-linked if source and copy are on one file system, and read
only to verify their checksums (``save/linked_arrays.py``). Sources may be in the format of T5X, Orbax or Flax; the copy is in
T5X's.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from t5ckpt.catalog.locate import locate
from t5ckpt.convert.conversion import Conversion, ConvertOptions, Found, finish
from t5ckpt.convert.trees import optimizer_leaves, stamp_of
from t5ckpt.core.arguments import check_patterns
from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import PARAMETER_ROOTS, Path, leaf_name, path_of, root_names
from t5ckpt.core.protocols import leaf_pattern, meant_pattern
from t5ckpt.core.text import lines, listed
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LeafProblem,
    MissingLeaves,
    NoEffectWarning,
    TreeMismatchError,
    UnmatchedPattern,
    mismatch_error,
    near_names,
)
from t5ckpt.format.dtypes import kind
from t5ckpt.format.facts import Facts
from t5ckpt.format.file_checksums import FileChecksums, entry_of
from t5ckpt.format.names import TRAIN_DS_PREFIX, is_position, removal_marks, without_generation
from t5ckpt.lazy import LazyArray, LazyThreadPoolArray
from t5ckpt.reading.array_reader import ArrayReader
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.contents import Contents, read_contents
from t5ckpt.save.linked_arrays import linked_leaves, open_source
from t5ckpt.storage import Storage
from t5ckpt.tree.leaf_table import Empty

_UNLIKE = (
    'All checkpoints of an average need the same parameters. To average only some of the leaves, pass parameters=.'
)


@dataclasses.dataclass(frozen=True)
class Changes:
    r"""The changes of a copy, in the order in which they are applied.

    Attributes:
      ema: the location of moving averages of the parameters: a scope, ``'opt_state/0/ema'``, or a name in which ``{}`` stands
        for the parameter's name without its first key, ``'state/param_states/{}/ema'``. They replace the parameters.
      drop: patterns; leaves and files of data iterators are left out if one of them matches the whole name.
      rename: (pattern, replacement) pairs; the first pattern that matches a leaf's whole name determines its new name, with
        ``\1`` for groups.
      parameters: a pattern for the whole names of the leaves that are averaged, or replaced by their moving averages; None
        stands for the leaves under ``target`` and ``params``.
      trust_files: copies also a checkpoint with a lost or damaged list of checksums. Then only the checksum of the manifest is
        compared, the values may be wrong, and the copy has new checksums.
    """

    ema: str | None = None
    drop: Sequence[str | re.Pattern[str]] = ()
    rename: Sequence[tuple[str | re.Pattern[str], str]] = ()
    parameters: str | re.Pattern[str] | None = None
    trust_files: bool = False

    def __post_init__(self) -> None:
        check_patterns([] if self.parameters is None else [self.parameters], 'parameters')
        check_patterns(self.drop, 'drop')
        check_patterns([pattern for pattern, _ in self.rename], 'rename')
        for pattern, new in self.rename:
            try:
                leaf_pattern(pattern).sub(new, '')
            except (re.error, IndexError) as error:
                raise ValueError(f'rename: {new!r} does not fit the pattern {pattern!r}: {error}.') from error


class _Leaf(NamedTuple):
    """A leaf of a source."""

    path: Path
    value: Any


_Leaves: TypeAlias = Mapping[str, _Leaf]
"""The leaves of a source by name."""


def rewrite_checkpoint(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    directory: str | os.PathLike[str] | Storage,
    changes: Changes | None = None,
    options: ConvertOptions | None = None,
) -> Conversion:
    """Writes a changed copy of a checkpoint, or the average of several.

    Args:
      sources: a checkpoint, or several, whose floating parameters (``Changes.parameters``) are averaged in float64; all other
        leaves come from the last one. Each is a run's directory (its latest step), a step's, or a manifest file.
      directory: of the run to write to; the copy is ``checkpoint_<step>`` in it, with the step of the last source.
      changes: see :class:`Changes`.
      options: ``save_dtype`` casts, ``optimizer=False`` drops; see :class:`ConvertOptions`.

    Returns:
      The result, with ``mapped`` from old to new names.

    Raises:
      CheckpointExistsError: the step exists.
      UnmatchedPattern: a pattern or the cast matches no leaf.
      TreeMismatchError: two leaves would get the same name, or the checkpoints to average differ.
      MissingLeaves: a parameter has no moving average.
      ValueError: ``parameters`` without ``ema`` and with one source.
    """
    changes = Changes() if changes is None else changes
    options = ConvertOptions() if options is None else options
    if changes.parameters is not None and changes.ema is None and isinstance(sources, (str, os.PathLike)):
        raise ValueError(
            f'parameters={changes.parameters!r} has no effect: it selects leaves to average or to replace by moving averages. '
            'Pass several checkpoints or ema=, or leave it out. For a cast, pass cast_leaves=.'
        )
    several = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not several:
        raise ValueError('no checkpoint to copy: pass at least one.')
    contents = [read_contents(locate(source)) for source in several]
    located = contents[-1].located
    checkpoints, are_trusted = zip(*(_opened(each, changes.trust_files) for each in contents), strict=True)
    if changes.trust_files and not any(are_trusted):
        warn_caller(NoEffectWarning('trust_files has no effect: no list of checksums is lost. Leave it out.'))
    leaves = _averaged(contents, checkpoints, changes.parameters)
    if changes.ema is not None:
        leaves = _with_ema(leaves, changes.ema, changes.parameters)
    of_optimizer = set[Path]() if options.optimizer else optimizer_leaves([leaf.path for leaf in leaves.values()])
    positions = _iterator_files(contents[-1], checkpoints[-1].files)
    kept = _without_dropped(leaves, changes.drop, of_optimizer, positions)
    new_paths = _renamed(kept, changes.rename)
    identity = {
        'format': 't5x',
        'paths': [checkpoint.located.url for checkpoint in contents],
        'stamps': [stamp_of(checkpoint.located) for checkpoint in contents],
        'changes': _recorded(changes),
    }
    found = Found(
        {new_paths[name]: leaf.value for name, leaf in kept.items()},
        located.step,
        identity,
        {name: leaf_name(path) for name, path in new_paths.items()},
        dropped=tuple(name for name in leaves if name not in kept),
        files=_read_positions(checkpoints[-1].files, positions, changes.drop),
        facts=_copied(contents[-1].facts),
        inline=_inline_of(contents, kept, new_paths),
        without_effect=() if options.optimizer or of_optimizer else ('optimizer',),
    )
    return finish(found, directory, options)


def _opened(contents: Contents, trust_files: bool) -> tuple[ArrayReader, bool]:
    """A source, and whether its files are trusted, since a list of checksums is lost."""
    try:
        return open_source(contents), False
    except CorruptCheckpointError:
        if not trust_files:
            raise
        return open_source(contents, trusts_files=True), True


def _inline_of(contents: Sequence[Contents], kept: _Leaves, new_paths: Mapping[str, Path]) -> set[Path]:
    """The new paths of the inline leaves of the last source; none for Flax's manifests, in which all leaves are inline."""
    last = contents[-1]
    if last.manifest.version == 0:
        return set()
    return {
        new_paths[name] for name, leaf in kept.items() if isinstance(last.manifest.leaves.get(leaf.path), np.ndarray)
    }


def _iterator_files(contents: Contents, source: CheckpointFiles) -> dict[str, str]:
    """The files of data iterators, also those that are recorded and lost, by their name without the generation."""
    storage, directory = source.storage, join(source.directory, contents.facts.positions_in)
    names = [entry.name for entry in storage.entries(directory) if entry.name.startswith(TRAIN_DS_PREFIX)]
    recorded = [file for file in source.checksums or () if is_position(file)]
    marks = [join(source.directory, mark) for mark in removal_marks(recorded)]
    files = {} if any(storage.are_files(marks)) else {without_generation(file): file for file in recorded}
    for name in names:
        key = join(directory, name)
        keys = [key] if storage.kind(key) == 'file' else [below for below, _ in storage.walk(key)]
        files |= {below.removeprefix(f'{directory}/'): below.removeprefix(f'{source.directory}/') for below in keys}
    return files


def _read_positions(
    source: CheckpointFiles, files: Mapping[str, str], dropped: Sequence[str | re.Pattern[str]]
) -> dict[str, bytes]:
    """The files of data iterators that are not dropped, compared with their checksums."""
    patterns = [leaf_pattern(pattern) for pattern in dropped]
    read: dict[str, bytes] = {}
    for name, file in files.items():
        if any(pattern.fullmatch(name) for pattern in patterns):
            continue
        where, cure = source.storage.url(join(source.directory, file)), f"Leave it out: drop=['{name}']."
        try:
            read[name] = source.read(file)
        except CheckpointNotFoundError as error:
            raise CorruptCheckpointError(f'{where} is missing. {cure}') from error
        (source.checksums or FileChecksums()).check(file, entry_of(read[name]), where, cure)
    return read


def _is_floating(leaf: Any) -> bool:
    return isinstance(getattr(leaf, 'dtype', None), np.dtype) and kind(leaf.dtype) == 'float'


# --- several into one ------------------------------------------------------------------------------------------------


def _averaged(
    contents: Sequence[Contents], checkpoints: Sequence[ArrayReader], parameters: str | re.Pattern[str] | None
) -> _Leaves:
    sources = [
        {leaf_name(path): _Leaf(path, value) for path, value in linked_leaves(each, checkpoint).items()}
        for each, checkpoint in zip(contents, checkpoints, strict=True)
    ]
    last = sources[-1]
    problems: list[LeafProblem] = []
    for checkpoint, leaves in zip(contents[:-1], sources[:-1], strict=True):
        problems += _differences(leaves, last, checkpoint.located.url, parameters)
    if problems:
        where = f'{contents[0].located.url} and others, to be averaged as {contents[-1].located.url},'
        raise mismatch_error(problems, where, dict.fromkeys({problem.kind for problem in problems}, _UNLIKE))
    if len(sources) == 1:
        return last
    averaged = [name for name, leaf in last.items() if _is_averaged(name, leaf, parameters)]
    if not averaged:
        raise UnmatchedPattern(_no_parameters(last, parameters, 'nothing would be averaged'))
    mean = {name: _Leaf(last[name].path, _mean([leaves[name].value for leaves in sources])) for name in averaged}
    return last | mean


def _is_averaged(name: str, leaf: _Leaf, parameters: str | re.Pattern[str] | None) -> bool:
    is_parameter = (
        leaf.path[0] in PARAMETER_ROOTS if parameters is None else leaf_pattern(parameters).fullmatch(name) is not None
    )
    return is_parameter and _is_floating(leaf.value)


def _no_parameters(leaves: _Leaves, parameters: str | re.Pattern[str] | None, consequence: str) -> str:
    floating = {name: leaf.path for name, leaf in leaves.items() if _is_floating(leaf.value)}
    roots = ', '.join(root_names(floating.values())[:8])
    which = "is under 'target' or 'params'" if parameters is None else f'matches parameters={parameters!r}'
    cure = ' Pass a pattern for the whole names of the parameters: parameters=.'
    if parameters is not None:
        cure = meant_pattern(parameters, floating, option='parameters=') or cure
    return f'{consequence}: no floating leaf {which}; they are under {roots or "nothing"}.{cure}'


def _differences(
    leaves: _Leaves, last: _Leaves, where: str, parameters: str | re.Pattern[str] | None
) -> list[LeafProblem]:
    """The differences between the parameters of two checkpoints to average."""
    facts, expected_facts = (
        {
            name: (leaf.value.dtype.name, tuple(leaf.value.shape))
            for name, leaf in source.items()
            if _is_averaged(name, leaf, parameters)
        }
        for source in (leaves, last)
    )
    problems: list[LeafProblem] = []
    for name in sorted(facts.keys() | expected_facts.keys()):
        actual, expected = facts.get(name), expected_facts.get(name)
        if actual != expected:
            texts = ['' if fact is None else f'{fact[0]} {fact[1]}' for fact in (actual, expected)]
            unlike = 'dtype' if actual and expected and actual[1] == expected[1] else 'shape'
            cause = 'missing' if actual is None else 'unexpected' if expected is None else unlike
            problems.append(LeafProblem(name, cause, texts[0], texts[1], f'({where})'))
    return problems


def _mean(leaves: Sequence[Any]) -> LazyArray:
    """The mean of several leaves as a lazy array."""
    shape, dtype = tuple(leaves[0].shape), np.dtype(leaves[0].dtype)

    def read(index: Any) -> np.ndarray:
        total = np.asarray(leaves[0][index], np.float64)
        for leaf in leaves[1:]:
            total = total + np.asarray(leaf[index], np.float64)
        return (total / len(leaves)).astype(dtype)

    return LazyThreadPoolArray(shape, dtype, lambda: read(...), read)


# --- one into another ------------------------------------------------------------------------------------------------


def _with_ema(leaves: _Leaves, scope: str, parameters: str | re.Pattern[str] | None) -> _Leaves:
    """Replaces the parameters by their moving averages, and removes the moving averages from their old location."""
    pattern = scope if '{}' in scope else f'{scope.rstrip("/")}/{{}}'
    sources: dict[str, str] = {}
    missing: list[str] = []
    for name, leaf in leaves.items():
        if not _is_averaged(name, leaf, parameters):
            continue
        source, shape = pattern.replace('{}', leaf_name(leaf.path[1:])), tuple(leaf.value.shape)
        source_shape = tuple(leaves[source].value.shape) if source in leaves else None
        if source_shape == shape:
            sources[name] = source
        else:
            near = ', '.join(near_names(source, leaves)) if len(missing) < 3 else ''
            cause = 'does not exist' if source_shape is None else f'has the shape {source_shape}, not {shape}'
            missing.append(f'{name}: {source} {cause}. {f"Near: {near}." if near else ""}'.rstrip())
    if not missing and not sources:
        raise MissingLeaves(_no_parameters(leaves, parameters, 'no parameter would be replaced by its moving average'))
    if missing:
        head = f'parameters without a moving average at {pattern!r}:'
        raise MissingLeaves(lines(head, *listed(missing)))
    averages = set(sources.values())
    return {
        name: _Leaf(leaf.path, leaves[sources.get(name, name)].value)
        for name, leaf in leaves.items()
        if name not in averages
    }


def _recorded(changes: Changes) -> dict[str, Any]:
    """The changes in types of JSON; a compiled pattern becomes its text and its flags."""

    def plain(pattern: str | re.Pattern[str]) -> Any:
        return pattern if isinstance(pattern, str) else [pattern.pattern, pattern.flags]

    return {
        'ema': changes.ema,
        'drop': [plain(pattern) for pattern in changes.drop],
        'rename': [[plain(pattern), new] for pattern, new in changes.rename],
        'parameters': None if changes.parameters is None else plain(changes.parameters),
        **({'trust_files': True} if changes.trust_files else {}),
    }


def _without_dropped(
    leaves: _Leaves, given: Sequence[str | re.Pattern[str]], of_optimizer: Collection[Path], positions: Collection[str]
) -> _Leaves:
    patterns = [leaf_pattern(pattern) for pattern in given]
    unused = {pattern for pattern in patterns if not any(map(pattern.fullmatch, positions))}
    kept: dict[str, _Leaf] = {}
    for name, leaf in leaves.items():
        matching = {pattern for pattern in patterns if pattern.fullmatch(name)}
        unused -= matching
        if not matching and leaf.path not in of_optimizer:
            kept[name] = leaf
    _refuse_unused([pattern.pattern for pattern in patterns if pattern in unused], leaves)
    if all(isinstance(leaf.value, Empty) for leaf in kept.values()):
        raise TreeMismatchError('the copy would have no leaves. Drop fewer of them.')
    return kept


def _renamed(leaves: _Leaves, given: Sequence[tuple[str | re.Pattern[str], str]]) -> dict[str, Path]:
    """The new path of each leaf, by its old name."""
    rules = [(leaf_pattern(pattern), new) for pattern, new in given]
    unused = {pattern for pattern, _ in rules}
    old_names: dict[Path, str] = {}
    clashes: list[str] = []
    new_paths: dict[str, Path] = {}
    for name, leaf in leaves.items():
        rule = next(((match, new) for pattern, new in rules if (match := pattern.fullmatch(name))), None)
        new = leaf.path
        if rule is not None:
            unused.discard(rule[0].re)
            new = tuple(key for key in path_of(rule[0].expand(rule[1])) if key)
        if new in old_names or not new:
            first = f'{old_names[new]} and ' if new in old_names else ''
            clashes.append(f'{first}{name} would become {leaf_name(new)!r}')
        new_paths[name], old_names[new] = new, name
    for new, name in old_names.items():
        above = next((old_names[new[:length]] for length in range(1, len(new)) if new[:length] in old_names), None)
        if above is not None:
            clashes.append(f'{name} would become {leaf_name(new)!r}, below the new name of {above}')
    if clashes:
        raise TreeMismatchError(lines('names clash after the renaming:', *listed(clashes)))
    _refuse_unused([pattern.pattern for pattern, _ in rules if pattern in unused], leaves)
    return new_paths


def _refuse_unused(patterns: Sequence[str], names: Collection[str]) -> None:
    if patterns:
        shown = ', '.join(near_names(patterns[0], names) or list(names)[:3])
        raise UnmatchedPattern(
            f'the patterns {list(patterns)} match no leaf; the leaves are {shown}, ... Correct or remove the patterns.'
            f'{meant_pattern(patterns[0], names)}'
        )


def _copied(facts: Facts) -> Facts:
    """The facts to copy; without any in the source, records that typed keys and the like are unknown."""
    return Facts(knows_tree=facts.knows_tree, keep=facts.keep, metrics=facts.metrics)

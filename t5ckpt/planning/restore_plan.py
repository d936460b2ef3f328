"""Plans a restore: matches the leaves of a checkpoint with the leaves of a template, before anything is read.

``plan_restore`` matches the leaves that ``format/array_spec.py`` parsed with the template. It either returns a plan or raises
one error that lists all differences.

Rules that T5X leaves open, or that differ from T5X:

- The result has the checkpoint's dtype, as in T5X, unless ``restore_dtype`` casts it. A difference within a dtype class
  (float32 and bfloat16) is logged; a difference of class is an error.
- Inline leaves are checked like stored ones, while T5X accepts any shape there.
- None, an empty container and an absent leaf are equivalent in the template. An array that the checkpoint holds there or
  below is an unexpected leaf.
- ``...`` as a leaf of the template skips the leaves of the checkpoint there or below; they are not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from t5ckpt.core.leaf_path import Path, leaf_name, path_of
from t5ckpt.core.text import some_of
from t5ckpt.errors import LeafProblem, TreeMismatchError, UnsupportedLeafError, mismatch_error, near_names
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.dtypes import kind
from t5ckpt.planning.casts import Cast, cast_dtype, check_cast
from t5ckpt.planning.leaf_choice import LeafPatterns
from t5ckpt.planning.leaf_reads import InlineRead, StoredRead, sharding_problem
from t5ckpt.planning.renaming import Rule, renaming_rules
from t5ckpt.translate import sources_of
from t5ckpt.tree.leaf_table import Empty, LeafTable
from t5ckpt.tree.leaves import (
    KeyData,
    LeafTemplate,
    as_instance,
    as_key_data,
    base_number,
    canonical_dtype,
    check_has_values,
    is_on_devices,
)

_NO_ARRAY = ('none', 'empty', 'skip')
# Number of leaves for which close names are searched, which takes milliseconds each.
_HINTED = 20


def strictness(strict: str | None, *, is_t5x: bool) -> str:
    """The strictness of a call; None takes T5X's default for a state or a partitioner of T5X."""
    return strict or ('contains' if is_t5x else 'up_to_dtype')


@dataclasses.dataclass(frozen=True)
class RestoreOptions:
    """Options of a restore.

    Attributes:
      cast: of floating leaves; None casts nothing.
      fallback: values for leaves that the checkpoint lacks; a missing leaf without one is an error.
      keys: the implementation of typed PRNG keys, by path, as recorded by the program that wrote them.
      knows_keys: whether ``keys`` has all keys; in a checkpoint of another program, any uint32 array may be keys.
      strict: see :func:`strictness`.
      resize: leaves that may be padded or truncated to the template's shape.
      on_devices: whether leaves are put on devices; a lazy restore does not, and ignores shardings.
    """

    cast: Cast | None = None
    fallback: Mapping[Path, Any] = dataclasses.field(default_factory=dict[Path, Any])
    keys: Mapping[Path, str] = dataclasses.field(default_factory=dict[Path, str])
    knows_keys: bool = False
    strict: str = 'up_to_dtype'
    on_devices: bool = True
    resize: LeafPatterns | None = None


class RestorePlan:
    """The leaves to restore, and the source of each.

    Attributes:
      stored: arrays to read from storage.
      inline: leaves whose values are in the manifest.
      kept: leaves that are taken from the template: None, ``...``, empty containers, text.
      fallback: leaves that the caller gave.
      ignored: leaves of the checkpoint that the template lacks.
      skipped: leaves of the checkpoint where the template has ``...``, or below.
      absent: text and ``...`` of the template that the checkpoint lacks.
      notes: differences of dtype within a dtype class, for the log.
      resized: leaves that are padded or truncated, with both shapes, for the log.
      problems: differences that make it an error.
    """

    def __init__(self) -> None:
        """Plans nothing yet."""
        self.stored: list[StoredRead] = []
        self.inline: list[InlineRead] = []
        self.kept: LeafTable = {}
        self.fallback: list[InlineRead] = []
        self.ignored: list[Path] = []
        self.skipped: list[Path] = []
        self.absent: list[Path] = []
        self.notes: list[str] = []
        self.resized: list[str] = []
        self.problems: list[LeafProblem] = []


def plan_restore(
    leaves: LeafTable,
    templates: Mapping[Path, LeafTemplate],
    options: RestoreOptions,
    where: str,
) -> RestorePlan:
    """Matches a checkpoint with a template.

    Args:
      leaves: from :func:`checkpoint_leaves`.
      templates: the template of each leaf.
      options: fallback values, casts, and recorded facts.
      where: the checkpoint, for messages.

    Raises:
      TreeMismatchError: with all differences; a subclass if they are all of one kind.
      UnsupportedLeafError: a transform returned something that cannot be a leaf.
      UnmatchedPattern: the cast selects no leaf of the template.
    """
    check_cast(options.cast, templates)
    plan = _Matcher(leaves, templates, options).plan
    if plan.problems:
        rename, remaining = _renaming(plan, leaves, templates, options)
        raise mismatch_error(plan.problems, where, rename=rename, remaining=remaining)
    return plan


def _renaming(
    plan: RestorePlan, leaves: LeafTable, templates: Mapping[Path, LeafTemplate], options: RestoreOptions
) -> tuple[list[Rule], int]:
    """The rules of ``rename=`` that fit leaves of other names, and the number of differences that remain with them."""
    arrays = {path: template for path, template in templates.items() if template.kind not in _NO_ARRAY}
    missing = [problem.leaf for problem in plan.problems if problem.kind == 'missing']
    rules = renaming_rules(missing, _values_by_name(arrays), _values_by_name(leaves))
    # With their empty containers, into which a rule must not move leaves.
    held = {leaf_name(path): () if isinstance(leaf, Empty | None) else path for path, leaf in leaves.items()}
    wanted = {leaf_name(path): path if path in arrays else None for path in templates}
    if not rules:
        return [], 0
    try:
        old_names = sources_of(held, wanted, rules, wanted=lambda _: True)
    except TreeMismatchError:
        return [], 0
    # The rules are printed only if a restore with them finds no other problem.
    renamed = {path_of(new): held[old] for new, old in old_names.items() if held[old]}
    keys = {path: options.keys[old] for path, old in renamed.items() if old in options.keys}
    moved = {path: leaves[old] for path, old in renamed.items()}
    matched = _Matcher(moved, templates, dataclasses.replace(options, keys=keys)).plan
    before, after = ({(each.leaf, each.kind) for each in found.problems} for found in (plan, matched))
    dropped = [(leaf_name(path), 'missing') for path in arrays if path in leaves and path not in renamed]
    return (rules, len(matched.problems)) if after.difference(dropped) < before else ([], 0)


def _values_by_name(table: Mapping[Path, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {leaf_name(path): _values_of(leaf) for path, leaf in table.items() if hasattr(leaf, 'dtype')}


class _Pair(NamedTuple):
    """A leaf of the template, and the leaf of the checkpoint at its path, or of ``fallback_state`` with its ``label``."""

    path: Path
    name: str
    template: LeafTemplate
    leaf: Any
    label: str = ''


class _Matcher:
    """Collects the plan and the differences, leaf by leaf."""

    def __init__(self, leaves: LeafTable, templates: Mapping[Path, LeafTemplate], options: RestoreOptions):
        self._leaves = leaves
        self._templates = templates
        self._options = options
        self._names = {path: leaf_name(path) for path in {**templates, **leaves, **options.fallback}}
        # Possibly misspelt.
        self._unmatched_fallback = [self._names[path] for path in options.fallback if path not in templates]
        self.plan = RestorePlan()
        for path, template in templates.items():
            self._match(path, template)
        self._match_rest()

    def _match(self, path: Path, template: LeafTemplate) -> None:
        pair = _Pair(path, self._names[path], template, _as_leaf(path, self._leaves.get(path)))
        if template.sharding is not None and self._options.on_devices:
            cause, wrong = sharding_problem(template.sharding, template.shape)
            if wrong:
                self.plan.problems.append(LeafProblem(pair.name, cause, '', wrong))
        leaf = pair.leaf
        if template.kind in ('none', 'skip'):
            self.plan.kept[path] = None if template.kind == 'none' else ...
        elif template.kind in ('empty', 'text'):
            self._keep(pair)
        elif isinstance(leaf, Empty | str | None):
            self._absent(pair)
        elif (dtype := self._dtype_if_it_fits(pair)) is not None:
            if isinstance(leaf, StoredArray):
                self.plan.stored.append(StoredRead(path, pair.name, leaf, template, dtype))
            else:
                resizes = tuple(leaf.shape) != template.shape
                self.plan.inline.append(InlineRead(path, pair.name, leaf, template, dtype, resizes))

    def _keep(self, pair: _Pair) -> None:
        """Adds an empty container or a text of the template."""
        template, leaf = pair.template, pair.leaf
        if hasattr(leaf, 'dtype') and template.kind == 'text':
            self.plan.problems.append(LeafProblem(pair.name, 'unexpected', _leaf_text(leaf), 'text'))
        elif template.kind == 'text' and not isinstance(leaf, str):
            self.plan.absent.append(pair.path)
        is_text = isinstance(leaf, str) and template.kind == 'text'
        self.plan.kept[pair.path] = as_instance(type(template.example), leaf) if is_text else template.example

    def _absent(self, pair: _Pair) -> None:
        """Adds a leaf that the checkpoint lacks: from ``fallback_state``, or as a problem."""
        value = self._options.fallback.get(pair.path)
        if not isinstance(value, Empty | str | None):
            self._fall_back(pair, value)
        elif pair.path in self._leaves:
            hint = f'The checkpoint holds {_leaf_text(pair.leaf)} there.'
            self.plan.problems.append(LeafProblem(pair.name, 'missing', '', _template_text(pair.template), hint))
        else:
            near = self._near_names(pair.path, pair.template, self._leaves, self._templates)
            unmatched = some_of(self._unmatched_fallback, 3)
            hint = f'fallback_state has {unmatched}, which the template lacks.' if unmatched else ''
            if pair.path in self._options.fallback:
                hint = f'fallback_state holds {_leaf_text(value)} there.'
            self.plan.problems.append(LeafProblem(pair.name, 'missing', '', _template_text(pair.template), hint, near))

    def _fall_back(self, pair: _Pair, value: Any) -> None:
        """Takes a leaf from ``fallback_state``, with the same checks as for a leaf of the checkpoint."""
        leaf = _as_leaf(pair.path, value, 'fallback_state')
        dtype = self._dtype_if_it_fits(pair._replace(leaf=leaf, label='fallback_state '))
        if dtype is not None:
            array = leaf.data if isinstance(leaf, KeyData) else leaf
            self.plan.fallback.append(InlineRead(pair.path, pair.name, array, pair.template, dtype))

    def _near_names(
        self, path: Path, leaf: Any, other_side: Mapping[Path, Any], this_side: Mapping[Path, Any]
    ) -> tuple[str, ...]:
        """Close names of leaves on the other side with the same shape and kind of dtype that match no leaf on this side.

        One of them may be the renamed leaf.
        """
        if len(self.plan.problems) >= _HINTED:
            return ()
        name = self._names[path]
        # Only leaves can have been renamed, and not to the name of a leaf above or below this one.
        candidates = (
            other
            for other_path, other_leaf in other_side.items()
            if other_path not in this_side
            and not isinstance(other_leaf, Empty)
            and getattr(other_leaf, 'kind', '') not in _NO_ARRAY
            and _values_of(other_leaf) == _values_of(leaf)
            and not _is_above(name, other := self._names[other_path])
            and not _is_above(other, name)
        )
        return tuple(near_names(name, candidates))

    def _dtype_if_it_fits(self, pair: _Pair) -> np.dtype | None:
        """The dtype of the restored leaf, after the cast. None if the leaf does not fit, which is added to the problems."""
        template, shape, dtype = pair.template, tuple(pair.leaf.shape), np.dtype(pair.leaf.dtype)
        template_dtype = np.dtype(np.void) if template.dtype is None else template.dtype
        # Leaves of ``fallback_state`` are cast only to the template's dtypes.
        casts = self._options.cast is not None and (pair.label == '' or self._options.cast.dtype is None)
        cast = cast_dtype(pair.path, dtype, self._options.cast, template_dtype) if casts else dtype
        problem = self._problem_of(pair, template_dtype, cast)
        if problem is not None:
            self.plan.problems.append(problem)
            return None
        if shape != template.shape:
            self.plan.resized.append(f'{pair.name}: {shape} to {template.shape}')
        differs = cast != template_dtype and template.kind == 'array'
        # A cast that the caller requested needs no note.
        if differs and cast == dtype and not (template.device and canonical_dtype(cast) == template_dtype):
            self.plan.notes.append(f'{pair.name}: checkpoint {dtype.name}, template {template_dtype.name}')
        return cast

    def _problem_of(self, pair: _Pair, template_dtype: np.dtype, cast: np.dtype) -> LeafProblem | None:
        """The first reason why a leaf does not fit: its keys, its shape, its kind of dtype, or its dtype after the cast."""
        template, shape, dtype = pair.template, tuple(pair.leaf.shape), np.dtype(pair.leaf.dtype)
        problem = self._wrong_keys(pair)
        if problem is not None:
            return problem
        if shape != template.shape and not self._may_resize(pair):
            cause = 'key shape' if template.kind == 'key' else 'shape'
            return LeafProblem(pair.name, cause, f'{pair.label}{shape}', str(template.shape))
        if dtype != template_dtype and kind(dtype) != kind(template_dtype) and not _both_python_ints(dtype, template):
            return LeafProblem(pair.name, 'dtype', f'{pair.label}{dtype.name}', template_dtype.name)
        if template.device and self._options.on_devices and not is_on_devices(cast):
            hint = f'JAX has no {cast.name} on devices: give the template a NumPy array there.'
            return LeafProblem(
                pair.name, 'dtype', f'{pair.label}{cast.name}', f'{template_dtype.name} on a device', hint
            )
        if self._options.strict == 'exact' and cast != template_dtype and template.kind == 'array':
            hint = "strict='exact' asks for the same; Checkpointer(restore_dtype='template') casts."
            return LeafProblem(pair.name, 'dtype', f'{pair.label}{cast.name}', template_dtype.name, hint)
        return None

    def _may_resize(self, pair: _Pair) -> bool:
        """Whether the caller allows a leaf of the checkpoint to be padded or truncated."""
        has_axes = pair.template.kind == 'array' and len(pair.leaf.shape) == len(pair.template.shape)
        return (
            pair.label == ''
            and has_axes
            and self._options.resize is not None
            and self._options.resize.covers(pair.name)
        )

    def _wrong_keys(self, pair: _Pair) -> LeafProblem | None:
        """The problem of PRNG keys of another implementation, or of keys where the template has an array, or the reverse."""
        template, leaf = pair.template, pair.leaf
        written = '' if pair.label else self._options.keys.get(pair.path, '' if self._options.knows_keys else None)
        written = leaf.impl if isinstance(leaf, KeyData) else written
        wanted = str(template.impl)
        if written is None or written == wanted or template.dtype is None:
            return None
        given = f'PRNG keys of {written}' if written else np.dtype(leaf.dtype).name
        in_template = f'PRNG keys of {wanted}' if wanted else template.dtype.name
        hint = '' if written else f'jax.random.wrap_key_data(x, impl={wanted!r}) makes keys of uint32.'
        return LeafProblem(pair.name, 'dtype', f'{pair.label}{given}', in_template, hint)

    def _match_rest(self) -> None:
        """Adds the leaves of the checkpoint that the template lacks."""
        without_array = {
            path: template.kind for path, template in self._templates.items() if template.kind in _NO_ARRAY
        }
        skips = {path for path, kind in without_array.items() if kind == 'skip'}
        used = set[Path]()
        for path, leaf in self._leaves.items():
            if (path in self._templates and path not in without_array) or isinstance(leaf, Empty | None):
                continue
            above = _topmost_in(path, skips)
            if above is not None:
                used.add(above)
                self.plan.skipped.append(path)
            elif isinstance(leaf, str) or self._options.strict == 'contains':
                self.plan.ignored.append(path)
            else:
                self._add_unexpected(path, leaf, without_array)
        self.plan.absent += skips - used

    def _add_unexpected(self, path: Path, leaf: Any, without_array: Mapping[Path, str]) -> None:
        above = _topmost_in(path, without_array)
        near = self._near_names(path, leaf, self._templates, self._leaves)
        in_template = hint = ''
        if above is not None:
            in_template = 'None' if without_array[above] == 'none' else 'an empty container'
            where = 'there' if above == path else f'at {self._names[above]}'
            hint = f'The template has {in_template} {where}: ... leaves it out, its subtree restores it.'
        self.plan.problems.append(
            LeafProblem(self._names[path], 'unexpected', _leaf_text(leaf), in_template, hint, near)
        )


def _values_of(leaf: Any) -> tuple[tuple[int, ...], str]:
    """The shape and the kind of dtype of a leaf of the checkpoint or of the template."""
    dtype = getattr(leaf, 'dtype', None)
    return tuple(getattr(leaf, 'shape', ())), '' if dtype is None else kind(np.dtype(dtype))


def _is_above(name: str, other: str) -> bool:
    # Flax NNX has one more level, 'value', in one of the forms of its state.
    return other.startswith(f'{name}/') and other != f'{name}/value'


def _as_leaf(path: Path, value: Any, giver: str = 'a state transformation') -> Any:
    """A leaf of the checkpoint, or one that the caller gave: numbers as numpy, typed keys as ``KeyData``.

    Raises:
      UnsupportedLeafError: the caller gave something that cannot be a leaf, or that has no values.
    """
    if value is None or isinstance(value, (StoredArray, np.ndarray, np.generic, Empty, str)):
        return value
    if hasattr(value, 'shape') and hasattr(value, 'dtype'):
        check_has_values(path, value)
        return as_key_data(value)
    if isinstance(value, (bool, int, float, complex)):
        return np.asarray(value)
    if isinstance(value, (list, tuple)) and not value:
        return Empty.of(value)
    raise UnsupportedLeafError(
        f'{leaf_name(path)}: {giver} put a value of type {type(value).__name__} there. Give an array or a number.'
    )


def _both_python_ints(dtype: np.dtype, template: LeafTemplate) -> bool:
    """Whether both are Python ints: one of 2^63 or more is stored as uint64 and restored as a Python int."""
    is_int = template.kind == 'scalar' and template.python is not None and base_number(template.python) is int
    return is_int and kind(dtype) in ('int', 'uint')


def _leaf_text(leaf: Any) -> str:
    """Describes a leaf of the checkpoint, for a message."""
    if hasattr(leaf, 'dtype'):
        return f'{np.dtype(leaf.dtype).name} {tuple(leaf.shape)}'
    return (
        'None'
        if leaf is None
        else 'an empty container'
        if isinstance(leaf, Empty)
        else 'text'
        if isinstance(leaf, str)
        else type(leaf).__name__
    )


def _template_text(template: LeafTemplate) -> str:
    """Describes a leaf of the template, for a message."""
    if template.kind == 'scalar' and template.python is not None:
        return f'Python {template.python.__name__}'
    return f'{"" if template.dtype is None else template.dtype.name} {template.shape}'.strip()


def _topmost_in(path: Path, paths: Collection[Path]) -> Path | None:
    """The path, or its ancestor nearest to the root, that is one of these; None if there is none."""
    return next((path[:length] for length in range(1, len(path) + 1) if path[:length] in paths), None)

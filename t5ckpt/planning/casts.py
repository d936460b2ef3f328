"""Chooses the dtype that each leaf is cast to: in a save (``save_dtype``), a restore (``restore_dtype``), and a conversion.

:func:`cast_dtype` decides for one leaf. ``planning/save_plan.py`` and ``planning/restore_plan.py`` record its answer, and
``format/dtypes.cast`` casts the values where they are in memory:

- in a save, in ``save/stage.py``;
- in a restore, in ``reading/chunks.py`` while chunks are read, and in ``restore/make_leaf.py`` for the leaves of the manifest.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.core.leaf_path import PARAMETER_ROOTS, Path, leaf_name, root_names
from t5ckpt.core.leaf_patterns import Patterns, meant_pattern
from t5ckpt.core.text import did_you_mean, shown, some_of
from t5ckpt.errors import UnmatchedPattern
from t5ckpt.format.dtypes import is_storable, kind
from t5ckpt.planning.leaf_choice import LeafPatterns
from t5ckpt.tree.leaves import LeafToSave

# The dtypes that a misspelt cast may mean.
_USUAL = ('bfloat16', 'float16', 'float32', 'float64')


def _floating_dtype(dtype: Any, option: str) -> np.dtype | None:
    """Checks the dtype of a cast option; None is returned unchanged.

    Raises:
      ValueError: the dtype is not floating; a cast to integers would lose the weights. Or no checkpoint holds it.
    """
    if dtype is None:
        return None
    try:
        parsed = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(
            f"{option}: {shown(dtype)} is not a dtype. Pass one, such as 'bfloat16'."
            f'{did_you_mean(dtype, _USUAL) if isinstance(dtype, str) else ""}'
        ) from error
    if kind(parsed) != 'float':
        raise ValueError(
            f'{option} must be a floating dtype such as bfloat16, got {parsed.name}: only floating leaves are cast.'
        )
    if not is_storable(parsed):
        raise ValueError(
            f'{option}: neither JAX nor a checkpoint has the dtype {parsed.name}. Pass one that they have, such as float64.'
        )
    return parsed


@dataclasses.dataclass(frozen=True)
class Cast:
    """A cast of floating leaves.

    Attributes:
      dtype: the dtype after the cast; None for the template's dtype.
      leaves: patterns, matched with the whole names of leaves; None for the leaves under ``target`` and ``params``, or for all
        leaves if the dtype is the template's.
      option: the option that requests the cast, for messages.
    """

    dtype: np.dtype | None
    leaves: Patterns | None = None
    option: str = 'save_dtype'

    def __post_init__(self) -> None:
        _ = self.patterns

    @functools.cached_property
    def patterns(self) -> LeafPatterns:
        """Those of ``leaves``."""
        return LeafPatterns(self.leaves, 'cast_leaves')

    @classmethod
    def of(cls, dtype: Any, leaves: Patterns | None, option: str) -> Cast | None:
        """Parses the two options of a cast; None if neither is given.

        Raises:
          ValueError: the dtype is not floating, the pattern is not a regular expression, or it comes without a dtype.
        """
        wanted = _floating_dtype(dtype, option)
        if wanted is None and leaves is not None:
            raise ValueError(f'cast_leaves={leaves!r} has no effect without {option}. Pass the dtype, too, or neither.')
        return None if wanted is None else cls(wanted, leaves, option)

    @classmethod
    def of_restore(cls, dtype: Any, leaves: Patterns | None) -> Cast | None:
        """Parses the cast of a restore, whose dtype may be 'template'; None if there is no dtype.

        Raises:
          ValueError: the dtype is not floating, or the pattern is not a regular expression.
        """
        if dtype is None:
            return None
        if not isinstance(dtype, str) or dtype != 'template':
            return cls.of(dtype, leaves, 'restore_dtype')
        return cls(None, leaves, 'restore_dtype')

    def touches(self, path: Path) -> bool:
        """Whether the cast applies to a leaf with this path, provided that the leaf is floating."""
        if self.leaves is None:
            return self.dtype is None or path[0] in PARAMETER_ROOTS
        return self.patterns.covers(leaf_name(path))


def casts_of(save_dtype: Any, restore_dtype: Any, leaves: Patterns | None) -> tuple[Cast | None, Cast | None]:
    """Parses the options of a checkpointer; returns the casts of its saves and of its restores.

    Raises:
      ValueError: see :meth:`Cast.of`.
    """
    if save_dtype is None and restore_dtype is None:
        Cast.of(None, leaves, 'save_dtype or restore_dtype')
    cast = None if save_dtype is None else Cast.of(save_dtype, leaves, 'save_dtype')
    return cast, Cast.of_restore(restore_dtype, leaves)


def check_cast(cast: Cast | None, leaves: Mapping[Path, Any]) -> None:
    """Raises UnmatchedPattern for a cast, or one of its patterns, that applies to none of the floating leaves.

    Args:
      cast: the cast, if there is one.
      leaves: all leaves. One without a NumPy dtype, such as a typed PRNG key, is not cast.
    """
    if cast is None or (cast.dtype is None and cast.leaves is None):
        return
    dtypes = {path: getattr(leaf, 'dtype', None) for path, leaf in leaves.items()}
    floating = [path for path, dtype in dtypes.items() if isinstance(dtype, np.dtype) and kind(dtype) == 'float']
    names = [leaf_name(path) for path in floating]
    unmatched = [each for each in cast.patterns.patterns if not any(map(each.fullmatch, names))]
    if any(cast.touches(path) for path in floating) and not unmatched:
        return
    asked = f'{cast.option}={"template" if cast.dtype is None else cast.dtype.name}'
    if not floating:
        raise UnmatchedPattern(f'{asked} casts floating leaves, but the tree has none. Leave {cast.option} out.')
    roots = root_names(floating)
    asked_leaves = unmatched[0].pattern if unmatched else cast.leaves
    which = "under 'target' and 'params'" if cast.leaves is None else f'that match cast_leaves={asked_leaves!r}'
    example = re.escape(roots[0]).replace('\\-', '-') + '.*' if roots[0].endswith('/') else '.*'
    # One pattern for the parameters of several models, which does not match Adam's moments.
    example = '[^/]*/params/.*' if any('params' in path[1:2] for path in floating) else example
    cure = f' Pass a pattern for the whole names of the leaves to cast: cast_leaves={example!r}.'
    if unmatched:
        cure = meant_pattern(unmatched[0], names, 'cast_leaves=') or cure
    raise UnmatchedPattern(
        f'{asked} would have no effect: it casts floating leaves {which}, but the floating leaves are {some_of(roots, 8)}.{cure}'
    )


def cast_dtype(path: Path, dtype: np.dtype, cast: Cast | None, template: np.dtype | None = None) -> np.dtype:
    """The dtype of a leaf after a cast; ``template`` is the leaf's dtype in the template.

    Only floating leaves are cast. T5X also casts the integers in ``target``, and so loses step counters inside models.
    """
    if cast is None or kind(dtype) != 'float' or not cast.touches(path):
        return dtype
    wanted = template if cast.dtype is None else cast.dtype
    return dtype if wanted is None else wanted


def leaves_after_cast(leaves: Sequence[LeafToSave], cast: Cast | None) -> Sequence[LeafToSave]:
    """The leaves of a save with their dtypes after the cast; their values are not cast yet.

    Raises:
      UnmatchedPattern: the cast applies to no leaf.
    """
    if cast is None:
        return leaves
    check_cast(cast, {leaf.path: leaf for leaf in leaves})
    dtypes = (None if leaf.dtype is None else cast_dtype(leaf.path, leaf.dtype, cast) for leaf in leaves)
    return [leaf._replace(dtype=dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]

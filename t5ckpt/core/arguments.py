"""Checks of the arguments that callers pass, each with an error that names the argument and the value."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Collection, Sequence
from types import NoneType
from typing import Any

import numpy as np

from t5ckpt.core.text import did_you_mean, shown

MODES = ('max', 'min')
"""The words for the best value of a metric: the largest or the smallest."""
_KEY_WORD = re.compile(r'[A-Z]?[a-z]+|[A-Z]+')
_LOW_IS_GOOD = {
    'cer',
    'err',
    'error',
    'errors',
    'loss',
    'losses',
    'mae',
    'mse',
    'nll',
    'perplexity',
    'ppl',
    'rmse',
    'wer',
}
# In the name of a metric, they turn the meaning of such a word around.
_TURNS = {'inverse', 'neg', 'negative', 'reduction', 'scale'}


class _Default(str):
    """A default, which differs in type from the same value that a caller passes."""

    __slots__ = ()


MAX = _Default('max')
"""The default of a mode, T5X's."""


def is_doubtful(mode: str, metric: str) -> bool:
    """Whether a mode is the default, and the metric seems to be one whose low values are good, as those of a loss."""
    words = {word.lower() for word in _KEY_WORD.findall(metric)}
    return mode is MAX and bool(words & _LOW_IS_GOOD) and not words & _TURNS


def integer(name: str, value: Any, least: int = 0, otherwise: str = '') -> int:
    """Returns an integer option of Python, NumPy or JAX as a Python int.

    Args:
      name: the name of the option, for the error.
      value: the value that the caller passed; a bool or a float is refused.
      least: the smallest integer allowed.
      otherwise: a sentence for the error about other values that are allowed.

    Raises:
      ValueError: with the option and the value.
    """
    try:
        # Python counts a bool as an integer, but keep=True is a mistake.
        converted = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        converted = None
    if converted is None or converted < least:
        tail = f' {otherwise}' if otherwise else ''
        raise ValueError(f'{name} must be an integer of at least {least}, got {shown(value)}.{tail}')
    return converted


def given_step(step: Any) -> int | None:
    """A step that a caller names, or None for the latest.

    Raises:
      ValueError: not an integer of at least 0.
    """
    if isinstance(step, (str, os.PathLike)):
        raise ValueError(  # noqa: TRY004 - as for all options
            f'step must be an integer of at least 0, got {shown(step)}. The path comes before the step.'
        )
    return None if step is None else integer('step', step)


def number(name: str, value: Any, *, least: float | None = None) -> float:
    """Returns an option that is a finite number, above 0 or of at least ``least``, as a Python float.

    Raises:
      ValueError: with the option and the value.
    """
    converted = math.nan
    if not isinstance(value, (bool, np.bool_, str, bytes)):
        try:
            converted = float(value)
        except (TypeError, ValueError, OverflowError):
            converted = math.nan
    if not math.isfinite(converted) or (converted <= 0 if least is None else converted < least):
        bound = 'above 0' if least is None else f'of at least {least:g}'
        raise ValueError(f'{name} must be a finite number {bound}, got {shown(value)}.')
    return converted


def set_fields(policy: Any, **fields: Any) -> None:
    """Sets the checked values of fields in a frozen policy; a NumPy integer, for example, cannot be encoded in the facts."""
    for name, value in fields.items():
        object.__setattr__(policy, name, value)


def given_steps(steps: Any) -> Collection[int]:
    """Returns a caller's steps as integers. A range is returned unchanged, since it may be large.

    Raises:
      ValueError: not a collection, or an element is not a step.
    """
    if isinstance(steps, range):
        return steps
    check_kind('steps', steps, Collection, '{100, 200}')
    return frozenset(integer('each of the steps', step) for step in steps)


def check_flags(**flags: Any) -> None:
    """Raises ValueError unless each option is True or False; the string 'no' would count as True."""
    for name, value in flags.items():
        if type(value) not in (bool, np.bool_):
            raise ValueError(f'{name} must be True or False, got {shown(value)}.')


def check_callables(**functions: Any) -> None:
    """Raises ValueError unless each option is a function, or None."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise ValueError(f'{name} must be a function, got {shown(value)}.')


def check_word(name: str, value: Any, words: Sequence[str | None]) -> None:
    """Raises ValueError unless an option is one of some words."""
    # An array compares element by element, so it is not looked for among the words.
    if not isinstance(value, (str, NoneType)) or value not in words:
        hint = did_you_mean(value, filter(None, words)) if isinstance(value, str) else ''
        raise ValueError(f'{name} must be one of {", ".join(map(repr, words))}, got {shown(value)}.{hint}')


def check_path(name: str, value: Any) -> None:
    """Raises ValueError unless an option is text or a path."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        order = ' The path comes before the step.' if isinstance(value, int) else ''
        raise ValueError(f'{name}: A path is text or a pathlib.Path, got {shown(value)}.{order}')  # noqa: TRY004 - as for all options


def check_kind(name: str, value: Any, kind: type[Any], example: str) -> None:
    """Raises ValueError unless an option is an object of a class, or None."""
    if value is not None and not isinstance(value, kind):
        article = 'an' if kind.__name__.startswith(tuple('AEIO')) else 'a'
        raise ValueError(f'{name} must be {article} {kind.__name__} such as {example}, got {shown(value)}.')


def check_joined_policies(policies: Any, kind: type[Any], owner: str) -> None:
    """Raises ValueError unless ``policies`` has at least one element and all are instances of ``kind``."""
    if not isinstance(policies, Collection) or isinstance(policies, str):
        raise ValueError(f'{owner}: policies must be a list or a tuple, got {shown(policies)}.')  # noqa: TRY004 - as for all options
    if not policies:
        raise ValueError(f'{owner} needs at least one policy, got none in policies={shown(policies)}.')
    for policy in policies:
        if not isinstance(policy, kind):
            raise ValueError(f'{owner} joins policies of type {kind.__name__}, got {shown(policy)}.')  # noqa: TRY004 - as for all options

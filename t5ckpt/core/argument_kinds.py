"""Checks the kinds of the arguments of public functions and option classes by their annotations, before anything is read.

The annotations are the only list of the accepted kinds, so that no function repeats it. ``Checkpointer`` is an
exception: its arguments are checked in ``save/arguments.py`` and with ``core/arguments.py``. A parameter with an annotation
that a value cannot be compared with, such as a state, a dtype or a protocol, is left to the function.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from t5ckpt.core.arguments import check_kind, check_path, check_patterns, given_step, integer, number
from t5ckpt.core.text import shown
from t5ckpt.core.unknown_arguments import explains_fields

_P = ParamSpec('_P')
_R = TypeVar('_R')
_C = TypeVar('_C', bound=type)


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes))


def _is_number(value: Any, method: str) -> bool:
    return not isinstance(value, (bool, np.bool_, str, bytes)) and hasattr(type(value), method)


# By the class in an annotation: what the parameter must be, in errors, and the check. Other classes: their instances.
_KINDS: Mapping[Any, tuple[str, Callable[[Any], bool]]] = {
    types.NoneType: ('None', lambda value: value is None),
    bool: ('True or False', lambda value: isinstance(value, (bool, np.bool_))),
    int: ('an integer', lambda value: _is_number(value, '__index__')),
    float: ('a number', lambda value: _is_number(value, '__float__')),
    str: ('text', lambda value: isinstance(value, str)),
    re.Pattern: ('a regular expression', lambda value: isinstance(value, re.Pattern)),
    os.PathLike: ('a pathlib.Path', lambda value: isinstance(value, (bytes, os.PathLike))),
    Mapping: ('a dict', lambda value: isinstance(value, Mapping)),
    Callable: ('a function', callable),
    **dict.fromkeys((Sequence, Collection, Iterable, tuple), ('a list or a tuple', _is_iterable)),
}


def checks_kinds(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function so that an argument of another kind is a ValueError with the parameter, the value and the cure.

    A call costs about 5 us. The wrapper has no ``__signature__``: inspect and gin follow ``__wrapped__``. Gin wraps functions
    again, and would copy the signature to a function with other parameters.
    """
    parameters = inspect.signature(function).parameters
    kinds: dict[str, tuple[Any, ...]] = {}

    @functools.wraps(function)
    def checked(*args: _P.args, **given: _P.kwargs) -> _R:
        if not kinds:
            # At the first call, since the classes may be in modules that import this one.
            kinds.update(_kinds(function))
        # A call that does not fit the signature gets the function's own error.
        for name, value in (*zip(parameters, args, strict=False), *given.items()):
            if name in kinds and value is not parameters[name].default:
                _check(name, value, kinds[name])
        return function(*args, **given)

    return checked


def checks_options(kind: _C) -> _C:
    """Decorates a dataclass so that its constructor checks kinds, and names the nearest field of an unknown one."""
    kind.__init__ = checks_kinds(kind.__init__)
    return explains_fields(kind)


def _kinds(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """For each parameter that can be checked, the classes that its annotation joins."""
    kinds = {}
    for name, hint in typing.get_type_hints(function).items():
        joined = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else [hint]
        classes = tuple(typing.get_origin(joined_class) or joined_class for joined_class in joined)
        if name != 'return' and all(map(_is_checked, classes)):
            kinds[name] = classes
    return kinds


def _is_checked(kind: Any) -> bool:
    ours = isinstance(kind, type) and kind.__module__.startswith('t5ckpt.')
    return kind in _KINDS or (ours and not getattr(kind, '_is_protocol', False))


def _fits(value: Any, kind: Any) -> bool:
    return _KINDS[kind][1](value) if kind in _KINDS else isinstance(value, kind)


def _check(name: str, value: Any, kinds: tuple[Any, ...]) -> None:
    if any(_fits(value, kind) for kind in kinds):
        return
    only = {*kinds} - {types.NoneType}
    if os.PathLike in only and not only & {Sequence, re.Pattern}:
        check_path(name, value)
    elif only == {int}:
        given_step(value) if name == 'step' else integer(name, value)
    elif only == {float}:
        number(name, value, least=0)
    elif only == {str, re.Pattern}:
        check_patterns([value], name)
    elif only == {Mapping}:
        check_kind(name, value, Mapping, "{'anonymous': True}" if 'options' in name else "{'key': value}")
    elif len(only) == 1 and not only & {*_KINDS}:
        (kind,) = only
        check_kind(name, value, kind, f'{kind.__name__}(...)')
    several = [_KINDS[kind][0] if kind in _KINDS else f'a {kind.__name__}' for kind in kinds]
    raise ValueError(f'{name} must be {" or ".join(dict.fromkeys(several))}, got {shown(value)}.')

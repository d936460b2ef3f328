"""Checks the kinds of the arguments of public functions and option classes by their annotations, before anything is read.

The annotations are the only list of what each parameter takes, so that no function repeats it. Flags, numbers, text, paths,
patterns, collections, mappings, functions and option classes are checked. Parameters with another annotation, such as a state, a
dtype or a protocol, are left to the function.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np

from t5ckpt.core.arguments import check_kind, check_patterns, given_step, integer, number
from t5ckpt.core.text import shown

__all__ = ['check_path', 'checks_kinds', 'checks_options']

_P = ParamSpec('_P')
_R = TypeVar('_R')
_C = TypeVar('_C', bound=type)

_SPLIT = re.compile(r'\[[^\[\]]*\]')
_OF_OPTIONS = re.compile(r'\w+Options|Changes')
_CLASSES = {'CheckpointView', 'WarmStart', 'Storage', 'CheckpointTypes'}
_OF_PATHS = {'str', 'os.PathLike', 'None', 'Storage', 'CheckpointView'}


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes))


def _is_number(value: Any, method: str) -> bool:
    return not isinstance(value, (bool, np.bool_, str, bytes)) and hasattr(type(value), method)


# By the name of a type in an annotation: what the parameter must be, in errors, and the check.
_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    'None': ('None', lambda value: value is None),
    'bool': ('True or False', lambda value: isinstance(value, (bool, np.bool_))),
    'int': ('an integer', lambda value: _is_number(value, '__index__')),
    'float': ('a number', lambda value: _is_number(value, '__float__')),
    'str': ('text', lambda value: isinstance(value, str)),
    're.Pattern': ('a regular expression', lambda value: isinstance(value, re.Pattern)),
    'os.PathLike': ('a pathlib.Path', lambda value: hasattr(type(value), '__fspath__')),
    'Mapping': ('a dict', lambda value: isinstance(value, Mapping)),
    **dict.fromkeys(('Callable', 'Progress', 'Clock'), ('a function', callable)),
    **dict.fromkeys(('Sequence', 'Collection', 'Iterable', 'tuple'), ('a list or a tuple', _is_iterable)),
}


def checks_kinds(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function so that an argument of another kind is a ValueError with the parameter, the value and the cure."""
    signature = inspect.signature(function)
    kinds = {
        name: found
        for name, parameter in signature.parameters.items()
        if name != 'self' and (found := _kinds(str(parameter.annotation))) is not None
    }

    @functools.wraps(function)
    def checked(*args: _P.args, **given: _P.kwargs) -> _R:
        # A call that does not fit the signature gets the function's own error.
        for name, value in (*zip(signature.parameters, args, strict=False), *given.items()):
            if name in kinds and value is not signature.parameters[name].default:
                _check(name, value, kinds[name])
        return function(*args, **given)

    # For readers of signatures that do not follow __wrapped__, such as inspect.getfullargspec and gin.
    vars(checked)['__signature__'] = signature
    return checked


def checks_options(kind: _C) -> _C:
    """Decorates a class so that its constructor is as :func:`checks_kinds` makes it."""
    kind.__init__ = checks_kinds(kind.__init__)
    return kind


def check_path(name: str, value: Any) -> None:
    """Raises ValueError unless an argument is text, a path or a storage."""
    if not isinstance(value, (str, bytes)) and not any(_fits(value, kind) for kind in ('os.PathLike', 'Storage')):
        order = ' The path comes before the step.' if isinstance(value, int) else ''
        raise ValueError(f'{name}: A path is text or a pathlib.Path, got {shown(value)}.{order}')


def _kinds(annotation: str) -> tuple[str, ...] | None:
    """The names of the types in a union, without their parameters; None if one of them is not checked."""
    while _SPLIT.search(annotation):
        annotation = _SPLIT.sub('', annotation)
    names = tuple(name.strip() for name in annotation.split('|'))
    known = all(name in _KINDS or name in _CLASSES or _OF_OPTIONS.fullmatch(name) for name in names)
    return names if known else None


def _check(name: str, value: Any, kinds: tuple[str, ...]) -> None:
    if any(_fits(value, kind) for kind in kinds):
        return
    only = {*kinds} - {'None'}
    if 'os.PathLike' in kinds and _OF_PATHS.issuperset(kinds):
        check_path(name, value)
    if only == {'int'}:
        given_step(value) if name == 'step' else integer(name, value)
    if only == {'float'}:
        number(name, value, least=0)
    if only == {'str', 're.Pattern'}:
        check_patterns([value], name)
    if only == {'Mapping'}:
        check_kind(name, value, Mapping, "{'anonymous': True}" if 'options' in name else "{'key': value}")
    options = next((kind for kind in kinds if _OF_OPTIONS.fullmatch(kind)), None)
    if options is not None:
        raise ValueError(f'{name} must be {options}(...), got {shown(value)}. Pass {name}={options}(name=value).')
    several = [_KINDS[kind][0] if kind in _KINDS else f'a {kind}' for kind in kinds]
    raise ValueError(f'{name} must be {" or ".join(dict.fromkeys(several))}, got {shown(value)}.')


def _fits(value: Any, kind: str) -> bool:
    if kind in _KINDS:
        return _KINDS[kind][1](value)
    # The classes are in rooms above this one.
    return any(base.__name__ == kind for base in type(value).__mro__)

"""Checks the functions that a caller passes as ``state_transformation_fns``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from t5ckpt.core.text import shown


def check_transforms(transforms: Any) -> None:
    """Raises ValueError unless the option is a list of functions."""
    if callable(transforms):
        raise ValueError(  # noqa: TRY004 - as for all options
            f'state_transformation_fns is a list of functions, got {shown(transforms)}. Put it into a list.'
        )
    is_list = isinstance(transforms, Sequence) and not isinstance(transforms, str)
    wrong = next((fn for fn in transforms if not callable(fn)), None) if is_list else transforms
    if wrong is not None:
        raise ValueError(f'state_transformation_fns is a list of functions, got {shown(wrong)}.')
    for fn in transforms:
        _check_takes_two(fn)


def _check_takes_two(fn: Any) -> None:
    """Raises ValueError for a function that cannot be called with two positional arguments."""
    try:
        # What a wrapper binds, such as that of gin, is not in the signature of what it wraps.
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        # A function written in C may have no signature.
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(fn, '__name__', type(fn).__name__)
        needed = [
            each.name
            for each in signature.parameters.values()
            if each.default is each.empty and each.kind is each.KEYWORD_ONLY
        ]
        cure = (
            f'Bind what else it needs: functools.partial({name}, {", ".join(f"{each}=..." for each in needed)}).'
            if needed
            else 'Give it two parameters, and defaults to all others.'
        )
        raise ValueError(
            f'state_transformation_fns: {name}{signature} cannot be called with two arguments, which is how each function in '
            f'the list is called ({error}). {cure}'
        ) from error

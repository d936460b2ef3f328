"""Writes the signatures in api.md: a block before each `::: t5ckpt.NAME`, which the site replaces by the whole reference."""

from __future__ import annotations

import inspect
import pathlib
import re
import textwrap
import typing

import t5ckpt

PAGE = pathlib.Path(__file__).with_name('api.md')
# Defaults whose text is not valid Python.
DEFAULTS = (
    ('<factory>', '...'),
    (r'<Signals\.(\w+): \d+>', r'signal.\1'),
    (r'(?<==)(\w+)\((?:[^()]|\(\))*\)', r'\1()'),
)
# Made by the library, or by subclasses.
NOT_MADE = {
    'CheckpointStats',
    'CheckpointView',
    'KeepPolicy',
    'PendingSave',
    'Run',
    'SavePolicy',
}
# Methods that other modules of the package call.
INTERNAL = {
    'complete',
    'raise_unreported',
    'start',
}


class Builtin:
    """A function of C as a default: ``time.time`` instead of ``<built-in function time>``."""

    def __init__(self, function) -> None:
        self.function = function

    def __repr__(self) -> str:
        return f'{self.function.__module__}.{self.function.__name__}'


def parameters(function) -> str:
    """Names and defaults of what a caller passes, without annotations."""
    signature = inspect.signature(function)
    given = [
        each.replace(
            annotation=each.empty, default=Builtin(each.default) if inspect.isbuiltin(each.default) else each.default
        )
        for each in signature.parameters.values()
        if each.name != 'self'
    ]
    return str(signature.replace(parameters=given, return_annotation=signature.empty))


def call(name: str, function) -> str:
    """A call as a line of at most 120 characters, or several."""
    text = f'{name}{parameters(function)}'
    for pattern, shown in DEFAULTS:
        text = re.sub(pattern, shown, text)
    return textwrap.fill(text, 120, subsequent_indent='    ', break_long_words=False, break_on_hyphens=False)


def signatures(name: str) -> list[str]:
    """The signature of a public name, and those of the methods that its class defines."""
    item = getattr(t5ckpt, name)
    if not inspect.isclass(item):
        return [call(name, item)] if callable(item) else [f'{name} = {item!r}']
    is_made = name not in NOT_MADE and typing.Protocol not in item.__bases__
    lines = [call(name, item)] if is_made else []
    for method, value in vars(item).items():
        inherited = any(hasattr(base, method) for base in item.__mro__[1:] if base.__module__.startswith('t5ckpt'))
        if method.startswith('_') or method in INTERNAL or inherited:
            continue
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(function):
            text = call(f'{name}.{method}', function)
            lines.append(text.replace('(cls, ', '(') if isinstance(value, classmethod) else text)
    return lines


def page() -> str:
    """The page with its current signatures."""
    text = PAGE.read_text(encoding='utf-8')
    text = re.sub(r'^```py\n.*?^```\n\n(?=::: )', '', text, flags=re.DOTALL | re.MULTILINE)

    def with_signature(match: re.Match) -> str:
        lines = signatures(match[1])
        block = '\n'.join(lines)
        return f'```py\n{block}\n```\n\n{match[0]}' if lines else match[0]

    return re.sub(r'^::: t5ckpt\.(?!errors|training)(\w+)$', with_signature, text, flags=re.MULTILINE)


if __name__ == '__main__':
    PAGE.write_text(page(), encoding='utf-8')

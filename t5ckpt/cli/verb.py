"""The base of all verbs: ``--json``, the options of storages, paths, exit codes, errors, Ctrl-C, and the printer.

A new verb is a function with :func:`verb`, in a module that ``VERBS`` of ``cli/__init__.py`` lists. It ends with :func:`emit`.
docs/json.md has the JSON keys of all verbs; ``tests/cli/test_json.py`` compares them with what is printed.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import click

from t5ckpt.cli.activity import Activity
from t5ckpt.cli.interrupts import INTERRUPTED, Interrupts
from t5ckpt.cli.paths import TIERS, PathType, record_of
from t5ckpt.core.protocols import Progress
from t5ckpt.core.text import Lines, aligned, finite_json, lines, printable
from t5ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatError,
    InvalidPathError,
    MissingDependencyError,
    NotEnoughMemoryError,
    OutputExistsError,
    StepKeptError,
    StorageError,
    T5CkptError,
    TreeMismatchError,
)
from t5ckpt.storage import option_values, storage_defaults


class Exit(enum.IntEnum):
    """The exit codes; docs/looking.md has the same table."""

    DONE = 0
    NO = 1
    USAGE = 2
    UNREADABLE = 3
    STORAGE = 4
    LACKING = 5
    INTERRUPTED = INTERRUPTED
    READER_GONE = 141


# The first class that fits counts. An existing target is an answer (1), like a difference, and not an error of the storage.
_CODES: tuple[tuple[tuple[type[T5CkptError], ...], Exit], ...] = (
    ((InvalidPathError,), Exit.USAGE),
    ((CheckpointExistsError, OutputExistsError, StepKeptError, TreeMismatchError), Exit.NO),
    ((MissingDependencyError, NotEnoughMemoryError), Exit.LACKING),
    ((CheckpointNotFoundError, FormatError), Exit.UNREADABLE),
    ((StorageError,), Exit.STORAGE),
)
# The keys of JSON for fields of the library's records: the same in all verbs.
_KEYS = {'nbytes': 'bytes', 'output': 'path'}
# A cell that is aligned to the right: a number, also with a unit.
_NUMBER = re.compile(r'-?[\d.,]+(e[+-]\d+)?( \w+)?|-?inf|nan|')
_Run = TypeVar('_Run', bound=Callable[..., Any])

COMMANDS: dict[str, click.Command] = {}
"""The verbs of the modules that are imported."""

_ACTIVITY, _JSON = 't5ckpt.activity', 't5ckpt.json'


def code_of(error: T5CkptError) -> Exit:
    """The exit code for an error of the library."""
    return next((code for kinds, code in _CODES if isinstance(error, kinds)), Exit.UNREADABLE)


def fail(text: str, code: Exit) -> NoReturn:
    """Prints an error and ends the verb."""
    say(lines('t5ckpt: ', text, between=''), err=True)
    raise click.exceptions.Exit(code)


def argument(name: str, kind: Any = None, **how: Any) -> click.Argument:
    """An argument; ``how`` is passed to click."""
    return click.Argument([name], type=kind, **how)


def option(names: str, text: str, kind: Any = None, metavar: str | None = None, **how: Any) -> click.Option:
    """An option with a value; ``how`` is passed to click."""
    return click.Option(names.split(), help=text, type=kind, metavar=metavar, **how)


def flag(names: str, text: str) -> click.Option:
    """An option without a value."""
    return click.Option(names.split(), is_flag=True, help=text)


NUMBER, COUNT = click.IntRange(0), click.IntRange(1)
# One rule for all verbs: --step names the step to work on, --as-step the one to write as.
STEP = option('--step at', 'Step of the run; default: the latest.', NUMBER)
STEPS = option('--step steps', 'Step of the run; may be repeated.', NUMBER, multiple=True)
DRY_RUN = flag('--dry-run', 'Print what would be written or deleted; change nothing.')
FOLLOW_LINKS = flag('--follow-links', 'Follow symbolic links that lead out of the checkpoint.')
MODE = option(
    '--mode', 'Which value is best; default: that of the keep policy of the run.', click.Choice(['max', 'min'])
)
_COMMON = (
    option(
        '--storage-option',
        'Option of the storage, such as region=us-east-1; may be repeated (docs/storage.md).',
        metavar='KEY=VALUE',
        multiple=True,
    ),
    flag('--json', 'Print JSON.'),
)


class Verb(click.Command):
    """A verb: resolves its paths, opens storages with their options, and reports errors."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the verb."""
        params = ctx.params
        named = {param.name: param.type for param in self.params if isinstance(param.type, PathType)}
        given = [path for name in named for path in _several(params[name])]
        if isinstance(ctx.obj, Interrupts):
            ctx.obj.is_running = True
        try:
            if TIERS in named.values():
                given += [record.run for record in map(record_of, given) if record is not None]
            options = _storage_options(params.pop('storage_option'), given)
            with Activity(given) as activity, storage_defaults(options):
                ctx.meta[_ACTIVITY], ctx.meta[_JSON] = activity, params.pop('json')
                for name, kind in named.items():
                    step = params.pop('at', None) if kind.name == 'checkpoint' else None
                    paths = tuple(kind.resolve(path, step) for path in _several(params[name]))
                    params[name] = paths if isinstance(params[name], tuple) else next(iter(paths), None)
                ctx.exit(super().invoke(ctx) or Exit.DONE)
        except click.UsageError as error:
            # An error from a helper has no context, and would show no usage line.
            error.ctx = error.ctx or ctx
            raise
        except T5CkptError:
            raise
        except ValueError as error:
            # Of the library, such as for an unknown dtype.
            raise click.UsageError(str(error), ctx) from error
        except KeyboardInterrupt:
            raise click.Abort from None


def verb(name: str, *params: click.Parameter) -> Callable[[_Run], _Run]:
    """Makes a function a verb with these parameters; its docstring is the help."""

    def register(run: _Run) -> _Run:
        text = inspect.getdoc(run) or ''
        COMMANDS[name] = Verb(
            name, callback=run, help=text, short_help=text.partition('\n')[0], params=[*params, *_COMMON]
        )
        return run

    return register


def _several(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


def _storage_options(texts: Sequence[str], given: Sequence[str]) -> Mapping[str, Any]:
    """The options of storages that the verb was given.

    Raises:
      ValueError: none of the verb's paths is on a storage that has the option, or the value is of another type.
    """
    wrong = next((text for text in texts if not text.partition('=')[1]), None)
    if wrong is not None:
        raise click.UsageError(f'--storage-option {wrong!r}: write KEY=VALUE, such as region=us-east-1.')
    return option_values(dict(text.split('=', 1) for text in texts), given)


def progress(title: str) -> Progress:
    """A callback that shows the progress of the running verb."""
    return click.get_current_context().meta[_ACTIVITY].progress(title)


# --- the printer ------------------------------------------------------------------------------------------------------


def say(*texts: str, err: bool = False) -> None:
    """Prints lines, with control characters escaped."""
    for text in texts:
        click.echo(printable(text), err=err)


def as_json() -> bool:
    """Whether the running verb prints JSON."""
    return click.get_current_context().meta[_JSON]


def emit(value: Any, *texts: str) -> None:
    """Prints the result of a verb: the value with ``--json``, else the lines."""
    if as_json():
        click.echo(json.dumps(finite_json(json.loads(json.dumps(value, default=_plain))), indent=2))
    emit_lines(*texts)


def emit_lines(*texts: str, err: bool = False) -> None:
    """Prints lines unless ``--json`` was passed."""
    if not as_json():
        say(*texts, err=err)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return fields_of(value)
    return value.item() if hasattr(value, 'item') else str(value)


def fields_of(report: Any) -> dict[str, Any]:
    """The fields of a record of the library, with the keys of JSON."""
    return {_KEYS.get(field.name, field.name): getattr(report, field.name) for field in dataclasses.fields(report)}


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    """Lines with aligned columns, numbers to the right; a column without a cell is left out."""
    columns = [column for column in zip(titles, *rows, strict=True) if any(column[1:])]
    right = [all(map(_NUMBER.fullmatch, cells)) for _, *cells in columns]
    return lines(*aligned([*zip(*columns, strict=True)], right))


def confirm(question: str, *, yes: bool) -> None:
    """Asks for confirmation of a deletion, unless ``--yes`` was given.

    Raises:
      click.UsageError: there is no terminal to ask.
      click.exceptions.Exit: the answer was no.
    """
    if yes:
        return
    question = printable(question)
    if not sys.stdin.isatty():
        raise click.UsageError(f'{question} There is no terminal to ask: pass --yes.')
    if not click.confirm(question, err=True):
        fail('nothing was deleted.', Exit.USAGE)


def size(text: str) -> int:
    """Reads a size: '5GB', '500M'."""
    match = re.fullmatch(r'(\d+(?:\.\d+)?)\s*([KMGT]?)B?', text.strip().upper())
    value = 0 if match is None else int(float(match[1]) * 1000 ** ' KMGT'.index(match[2] or ' '))
    if value < 1:
        raise click.BadParameter(f'{text!r} is not a size such as 5GB or 500MB.')
    return value

"""The base class of all verbs: the options of storages, errors in terms of the command line, exit codes, Ctrl-C.

A new verb is a module of ``cli/`` with a ``command``, and is listed in ``VERBS`` of ``cli/__init__.py``. It prints its JSON with
``cli/output.print_json``.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import click

from t5ckpt.cli.interrupts import INTERRUPTED, Interrupts
from t5ckpt.cli.paths import named_paths, paths_of, remote_paths
from t5ckpt.cli.shell_messages import in_shell_terms
from t5ckpt.cli.tiers import recorded_run
from t5ckpt.cli.waiting import Waiting
from t5ckpt.core.text import did_you_mean, lines
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

_LONGEST_SUMMARY = 300


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
_CODES: tuple[tuple[type[T5CkptError], Exit], ...] = (
    (InvalidPathError, Exit.USAGE),
    (CheckpointExistsError, Exit.NO),
    (OutputExistsError, Exit.NO),
    (StepKeptError, Exit.NO),
    (MissingDependencyError, Exit.LACKING),
    (NotEnoughMemoryError, Exit.LACKING),
    (CheckpointNotFoundError, Exit.UNREADABLE),
    (FormatError, Exit.UNREADABLE),
    (StorageError, Exit.STORAGE),
    (TreeMismatchError, Exit.NO),
)


def code_of(error: T5CkptError) -> Exit:
    """The exit code for an error of the library."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), Exit.UNREADABLE)


def fail(text: str, code: Exit) -> NoReturn:
    """Prints an error and ends the verb."""
    click.echo(lines('t5ckpt: ', text, between=''), err=True)
    raise click.exceptions.Exit(code)


class _Seconds(click.FloatRange):
    """A finite number of seconds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f'{value} is not a number of seconds.', param, ctx)
        return seconds


class Summarized(click.Command):
    """A command that is listed with the complete first sentence of its help, which click would cut."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence of the help."""
        del limit
        return super().get_short_help_str(_LONGEST_SUMMARY)


class VerbGroup(Summarized, click.Group):
    """The verbs of a word: ``export hf``, ``export safetensors``."""


class Verb(Summarized):
    """A verb, with the options of storages."""

    def __init__(self, *args: Any, **kwargs: Any):
        """The arguments of click.Command."""
        super().__init__(*args, **kwargs)
        self.params += [
            click.Option(
                ['--storage-option'],
                multiple=True,
                metavar='KEY=VALUE',
                expose_value=False,
                callback=_keep,
                help='Option of the storage, such as region=us-east-1; may be repeated (docs/storage.md).',
            ),
            click.Option(
                ['--anonymous'],
                is_flag=True,
                expose_value=False,
                callback=_keep,
                help='Send no credentials to a bucket.',
            ),
            click.Option(
                ['--timeout'],
                type=_Seconds(1),
                metavar='SECONDS',
                expose_value=False,
                callback=_keep,
                help='How long to retry requests to a bucket that does not reply; default: 50.',
            ),
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the words of a shell; the error for an unknown one names the nearest that is shown."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hidden = {option for param in self.params if getattr(param, 'hidden', False) for option in param.opts}
            vars(error)['possibilities'] = [option for option in error.possibilities or () if option not in hidden]
            raise
        except click.BadParameter as error:
            value = re.match("'(.*?)' is not one of", error.message)
            if value is not None and isinstance(kind := getattr(error.param, 'type', None), click.Choice):
                vars(error)['message'] += did_you_mean(value[1], map(str, kind.choices))
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the verb."""
        given = paths_of(self, ctx.params)
        if 'tier' in ctx.params:
            given += [run for path in given if (run := recorded_run(path)) is not None]
        if isinstance(ctx.obj, Interrupts):
            ctx.obj.is_running = True
        try:
            with Waiting(remote_paths(given)) as waiting, storage_defaults(_storage_options(ctx, given)):
                ctx.meta['t5ckpt.waiting'] = waiting
                ctx.params.update(named_paths(self, ctx.params))
                return super().invoke(ctx)
        except click.UsageError as error:
            # An error from a helper has no context, and would show no usage line.
            error.ctx = error.ctx or ctx
            vars(error)['message'] = in_shell_terms(error.message, self)
            raise
        except T5CkptError as error:
            # For the message in terms of this verb.
            vars(error)['verb'] = self
            raise
        except KeyboardInterrupt:
            raise click.Abort from None


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    ctx.meta[f't5ckpt.{param.name}'] = value


def _storage_options(ctx: click.Context, given: list[str]) -> Mapping[str, Any]:
    """The options of storages that the verb was given.

    Raises:
      click.UsageError: none of the verb's paths is on a storage that has the option, or the value is of another type.
    """
    pairs: dict[str, str] = {}
    for text in ctx.meta.get('t5ckpt.storage_option', ()):
        key, separator, value = text.partition('=')
        if not separator or not key:
            raise click.UsageError(f'--storage-option {text!r}: write KEY=VALUE, such as region=us-east-1.', ctx)
        pairs[key.replace('-', '_')] = value
    if ctx.meta.get('t5ckpt.anonymous'):
        pairs['anonymous'] = 'true'
    if ctx.meta.get('t5ckpt.timeout') is not None:
        pairs['retry_seconds'] = str(ctx.meta['t5ckpt.timeout'])
    for name, option in (('anonymous', '--anonymous'), ('retry_seconds', '--timeout')):
        if name in pairs and given and not remote_paths(given):
            raise click.UsageError(
                f'{option} is for buckets, and {" and ".join(given)} is on this machine. Leave it out.', ctx
            )
    try:
        return option_values(pairs, given)
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from error

"""The group of all verbs, and what becomes of errors."""

from __future__ import annotations

import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence

import click

from t5ckpt._version import __version__
from t5ckpt.cli import VERBS
from t5ckpt.core.text import lines, printable
from t5ckpt.errors import CheckpointNotFoundError, FormatError, InvalidPathError, StorageError, T5CkptError

__all__ = ['app', 'run']

_USAGE, _UNREADABLE, _REFUSED, _INTERRUPTED = 2, 3, 4, 130


class _Verbs(click.Group):
    """Imports a verb's module when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in VERBS:
            return None
        return importlib.import_module(f't5ckpt.cli.{VERBS[cmd_name]}').command


@click.group(cls=_Verbs, context_settings={'help_option_names': ['-h', '--help']})
@click.version_option(__version__, '-V', '--version', prog_name='t5ckpt')
def app() -> None:
    """Looks at, checks, copies and converts checkpoints in T5X's format.

    PATH is a run's directory, a step's directory or a manifest file; what looks at all steps (ls, prune) wants the run.

    \b
    Exit codes: 0 done; 1 done, and the answer is no (damage, differences);
    2 invalid arguments; 3 no such checkpoint, or unreadable; 4 the storage refused;
    130 interrupted. Shell completion: eval "$(_T5CKPT_COMPLETE=bash_source t5ckpt)"
    (zsh_source, fish_source).
    """


def run(arguments: Sequence[str] | None = None) -> None:
    """Runs the verb that the arguments, or ``sys.argv``, name, and exits with its code."""
    warnings.showwarning = _say_warning
    try:
        code = app.main(arguments, prog_name='t5ckpt', standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        _fail('interrupted', _INTERRUPTED)
    except click.ClickException as error:
        text = io.StringIO()
        # The message holds words of the user and names of a checkpoint; the line breaks are click's.
        vars(error)['message'] = printable(error.message)
        error.show(text)
        click.echo(lines(*text.getvalue().split('\n')), err=True, nl=False)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader, such as head, has seen enough; click exits so, too. Python flushes once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except T5CkptError as error:
        _fail(str(error), _code_of(error))


def _say_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Shows a warning of the library as the program's own words, without a line of source."""
    click.echo(lines('t5ckpt: warning: ', str(message), between=''), err=True)


def _code_of(error: T5CkptError) -> int:
    if isinstance(error, InvalidPathError):
        return _USAGE
    if isinstance(error, (CheckpointNotFoundError, FormatError)):
        return _UNREADABLE
    return _REFUSED if isinstance(error, StorageError) else 1


def _fail(text: str, code: int) -> None:
    click.echo(lines('t5ckpt: ', text, between=''), err=True)
    sys.exit(code)

"""The group of all verbs, and the handling of errors; ``cli/verb.py`` has the exit codes."""

from __future__ import annotations

import importlib
import io
import sys
import warnings
from collections.abc import Sequence

import click

from t5ckpt._version import __version__
from t5ckpt.cli import VERBS
from t5ckpt.cli.interrupts import Interrupts
from t5ckpt.cli.streams import OutputError, discard_output
from t5ckpt.cli.verb import COMMANDS, Exit, code_of, say
from t5ckpt.core.text import lines, printable
from t5ckpt.errors import T5CkptError


class _Verbs(click.Group):
    """Imports a verb's module when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in VERBS:
            return None
        importlib.import_module(f't5ckpt.cli.{VERBS[cmd_name]}')
        return COMMANDS[cmd_name]


# The names alone are what click compares a misspelt one with.
@click.group(
    cls=_Verbs,
    commands=dict.fromkeys(VERBS, click.Command(None)),
    context_settings={'help_option_names': ['-h', '--help']},
)
@click.version_option(__version__, '-V', '--version', prog_name='t5ckpt')
def app() -> None:
    """Inspects, verifies, copies and converts checkpoints in T5X's format.

    PATH is the directory of a run or of a step, or a manifest file. ls, best and prune take the directory of a run. In every
    verb, run@1200, run@latest, run@best and run@best:eval/loss:min name a step of a run.

    Exit codes: 0 done; 1 the answer is no (the checkpoints differ, one is damaged, nothing matches, the step exists already
    or must be kept); 2 wrong usage; 3 no such checkpoint, or it cannot be read; 4 the storage or standard output failed; 5
    a library or memory is missing; 130 interrupted; 141 the program that reads the output has exited.

    \b
    Shell completion (or zsh_source, fish_source):
      eval "$(_T5CKPT_COMPLETE=bash_source t5ckpt)"
    """


def run(arguments: Sequence[str] | None = None, interrupts: Interrupts | None = None) -> None:
    """Runs the verb that the arguments, or ``sys.argv``, name, and exits with its code.

    With ``interrupts``, the handler of this process, an interrupted verb ends the process without waiting for its threads.
    """
    warnings.showwarning = _print_warning
    try:
        code = app.main(arguments, prog_name='t5ckpt', standalone_mode=False, obj=interrupts)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else Exit.DONE)
    except click.exceptions.Abort:
        if interrupts is not None:
            interrupts.end()
        _fail('interrupted', Exit.INTERRUPTED)
    except click.ClickException as error:
        text = io.StringIO()
        # The message has input of the user and names from a checkpoint. The other line breaks are click's.
        vars(error)['message'] = printable(error.message)
        error.show(text)
        say(lines(*text.getvalue().rstrip('\n').split('\n')), err=True)
        sys.exit(error.exit_code)
    except OutputError as error:
        discard_output()
        if isinstance(error.__cause__, BrokenPipeError):
            sys.exit(Exit.READER_GONE)
        _fail(str(error), Exit.STORAGE)
    except T5CkptError as error:
        _fail(str(error), code_of(error))


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Shows a warning of the library without a source line."""
    say(lines('t5ckpt: warning: ', str(message), between=''), err=True)


def _fail(text: str, code: int) -> None:
    say(lines('t5ckpt: ', text, between=''), err=True)
    sys.exit(code)

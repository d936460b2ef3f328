"""The group of all verbs, and the handling of errors; ``cli/verb.py`` has the exit codes."""

from __future__ import annotations

import importlib
import io
import sys
import warnings
from collections.abc import Collection, Sequence

import click

from t5ckpt._version import __version__
from t5ckpt.cli import VERBS
from t5ckpt.cli.interrupts import Interrupts
from t5ckpt.cli.shell_messages import in_shell_terms
from t5ckpt.cli.streams import OutputError, ReaderGoneError, discard_output
from t5ckpt.cli.verb import Exit, code_of
from t5ckpt.core.text import did_you_mean, lines, printable
from t5ckpt.errors import T5CkptError


class _Verbs(click.Group):
    """Imports a verb's module when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(VERBS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            # click compares with the verbs that are loaded.
            if not args[0].startswith('-'):
                vars(error)['message'] += _with_verb(args[0]) or did_you_mean(args[0], VERBS)
            raise

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in VERBS:
            return None
        return importlib.import_module(f't5ckpt.cli.{VERBS[cmd_name]}').command


def _with_verb(word: str) -> str:
    """The verbs that take a word as their first, such as a format, as a hint."""
    from t5ckpt.cli.convert import command as convert
    from t5ckpt.cli.export import command as export
    from t5ckpt.cli.import_ import command as import_

    words: dict[str, Collection[str]] = {'export': export.commands, 'import': import_.commands}
    words['convert'] = next(
        parameter.type.choices for parameter in convert.params if isinstance(parameter.type, click.Choice)
    )
    matching = [f't5ckpt {verb} {word}' for verb, formats in words.items() if word in formats]
    return f' Did you mean {" or ".join(matching)}?' if matching else ''


@click.group(cls=_Verbs, context_settings={'help_option_names': ['-h', '--help']})
@click.version_option(__version__, '-V', '--version', prog_name='t5ckpt')
def app() -> None:
    """Inspects, verifies, copies and converts checkpoints in T5X's format.

    PATH is the directory of a run or of a step, or a manifest file. ls, best and prune take the directory of a run. In every
    verb, run@1200, run@latest, run@best and run@best:eval/loss name a step of a run.

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
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        if interrupts is not None:
            interrupts.end()
        _fail('interrupted', Exit.INTERRUPTED)
    except click.ClickException as error:
        text = io.StringIO()
        # The message has input of the user and names from a checkpoint. The other line breaks are click's.
        vars(error)['message'] = printable(error.message)
        error.show(text)
        click.echo(lines(*text.getvalue().split('\n')), err=True, nl=False)
        sys.exit(error.exit_code)
    except ReaderGoneError:
        discard_output()
        sys.exit(Exit.READER_GONE)
    except OutputError as error:
        discard_output()
        _fail(str(error), Exit.STORAGE)
    except T5CkptError as error:
        _fail(in_shell_terms(str(error), vars(error).get('verb')), code_of(error))


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Shows a warning of the library in terms of the command line, without a source line."""
    context = click.get_current_context(silent=True)
    text = in_shell_terms(str(message), None if context is None else context.command)
    click.echo(lines('t5ckpt: warning: ', text, between=''), err=True)


def _fail(text: str, code: int) -> None:
    click.echo(lines('t5ckpt: ', text, between=''), err=True)
    sys.exit(code)

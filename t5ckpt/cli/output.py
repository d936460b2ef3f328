"""The output of verbs: tables, JSON, progress and questions; and the options that several verbs share.

docs/json.md has the JSON keys of all verbs; ``tests/cli/test_json.py`` compares them with what is printed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from t5ckpt.catalog.locate import no_checkpoint, open_run_storage
from t5ckpt.cli.verb import Exit, fail
from t5ckpt.cli.waiting import Waiting, current_waiting
from t5ckpt.core.protocols import Clock, Progress
from t5ckpt.core.text import aligned, finite_json, printable
from t5ckpt.policies import Decision
from t5ckpt.progress import progress_text
from t5ckpt.storage import Storage

if TYPE_CHECKING:
    from t5ckpt.inspection.view import CheckpointView


_UNITS = {'': 1, 'K': 10**3, 'M': 10**6, 'G': 10**9, 'T': 10**12}
# A verb that ends within two seconds prints no progress.
_FIRST_LINE_SECONDS, _LINE_SECONDS = 2.0, 9.0
# A narrower terminal has no room for the columns of a table.
_NARROW = 30
_F = TypeVar('_F', bound=Callable[..., Any])

# One rule for all verbs: --step names the step to work on, --as-step the one to write as.
step_option = click.option('--step', type=click.IntRange(0), help='Step of the run; default: the latest.')
steps_option = click.option(
    '--step', 'steps', type=click.IntRange(0), multiple=True, help='Step of the run; may be repeated.'
)
as_step_option = click.option(
    '--as-step', type=click.IntRange(0), metavar='STEP', help='Step to write; default: the step of the source.'
)
cast_leaves_option = click.option(
    '--cast-leaves', metavar='REGEX', help='Leaves that --save-dtype casts; default: target/.* and params/.*'
)
follow_links_option = click.option(
    '--follow-links', is_flag=True, help='Follow symbolic links that lead out of the checkpoint.'
)
layers_option = click.option(
    '--layers',
    metavar='AXIS',
    help="Arrays that hold several layers, which are divided: 'axis 0 of params/layers/.*'.",
)
json_option = click.option('--json', 'as_json', is_flag=True, help='Print JSON.')


def with_options(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """A decorator that adds arguments and options to a verb, in this order."""

    def add(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def dtype_option(field: str) -> Any:
    """``--save-dtype`` with its older name, for every verb that writes; ``field`` is the parameter."""
    text = 'Cast floating parameters to this dtype, such as bfloat16.'
    return click.option('--save-dtype', '--dtype', field, metavar='DTYPE', help=text)


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table; numbers go to the right."""

    title: str
    right: bool = False


def moved_option(old: str, cure: str, *, is_flag: bool = False) -> Any:
    """An option of earlier versions, or of other verbs; its use is an error with a cure.

    Args:
      old: the option.
      cure: a sentence with the replacement.
      is_flag: whether it takes no value.
    """

    def refuse(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value:
            raise click.UsageError(f'{ctx.command_path} takes no {param.opts[0]}: {cure}', ctx)

    # A separate parameter name, since click confuses options that share one.
    kind: dict[str, Any] = {'is_flag': True} if is_flag else {'type': str, 'multiple': True}
    return click.option(old, 'moved', **kind, hidden=True, expose_value=False, callback=refuse)


def size_of(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Reads a size: '5GB', '500M'."""
    match = re.fullmatch(r'(\d+(?:\.\d+)?)\s*([KMGT]?)B?', value.strip().upper())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise click.BadParameter(f'{value!r} is not a size such as 5GB or 500MB.', ctx, param)
    return size


def print_line(text: str, *, err: bool = False) -> None:
    """Prints one line, with control characters escaped."""
    click.echo(printable(text), err=err)


def say_what_is_read(view: CheckpointView) -> None:
    """Prints the path and the step of a checkpoint, since the path of a run does not name the step."""
    print_line(view.path if view.step is None else f'{view.path}: step {view.step}')


def print_json(value: Any) -> None:
    """Prints a value as JSON; numpy scalars become numbers, and other objects text."""
    # JSON has no NaN and no infinity, so these become text.
    click.echo(json.dumps(finite_json(json.loads(json.dumps(value, default=_plain))), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, 'item') else str(value)


def fields_of(report: Any) -> dict[str, Any]:
    """The fields of a report for JSON, with the same keys in every verb: ``path`` and ``bytes``."""
    names = {'nbytes': 'bytes', 'output': 'path'}
    return {names.get(name, name): value for name, value in dataclasses.asdict(report).items()}


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table: with rich on a terminal, as plain aligned text in a pipe."""
    if not sys.stdout.isatty():
        _print_plain(columns, [*rows])
        return
    import rich.box
    import rich.console

    console = rich.console.Console(highlight=False)
    if console.width < _NARROW:
        _print_plain(columns, [*rows])
        return
    import rich.table
    import rich.text

    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(
            rich.text.Text(printable(column.title)), justify='right' if column.right else 'left', overflow='fold'
        )
    for row in rows:
        table.add_row(*[_Cell(printable(cell)) for cell in row])
    console.print(table)


class _Cell:
    """Text for rich that wraps after the words and the slashes of a name, and within a key only if the key is too long."""

    def __init__(self, text: str):
        self._parts = re.findall(r' *[^/ ]+[/ ]*|[/ ]+', text)

    def __rich_console__(self, console: Any, options: Any) -> Generator[Any]:
        from rich.cells import cell_len
        from rich.text import Text

        del console
        rows = ['']
        for part in self._parts:
            if rows[-1] and cell_len((rows[-1] + part).rstrip(' ')) > options.max_width:
                rows.append('')
            rows[-1] += part
        # As Text, since names may hold square brackets, which are rich's markup.
        yield Text('\n'.join(row.rstrip(' ') for row in rows), overflow='fold')

    def __rich_measure__(self, console: Any, options: Any) -> Any:
        from rich.cells import cell_len
        from rich.measure import Measurement

        del console
        widths = [cell_len(part) for part in self._parts]
        return Measurement(max(widths, default=0), sum(widths)).with_maximum(options.max_width)


def print_decisions(plan: Iterable[tuple[str | None, Decision]]) -> None:
    """Prints the decision about each step and its reason, with the name of its tier, if it has one."""
    rows = list(plan)
    has_tiers = any(tier is not None for tier, _ in rows)
    columns = [Column('step', right=True), *[Column('tier')] * has_tiers, Column(''), Column('because')]
    print_table(
        columns,
        [
            [str(decision.step), *[tier or ''] * has_tiers, 'keep' if decision.keep else 'delete', decision.reason]
            for tier, decision in rows
        ],
    )


def decision_fields(
    plan: Iterable[tuple[str | None, Decision]], deleted: Collection[tuple[str | None, int]]
) -> list[dict[str, Any]]:
    """The decisions in the types of JSON, each with the name of its tier, and whether the step was deleted from it."""
    return [
        {**dataclasses.asdict(decision), 'tier': tier, 'was_deleted': (tier, decision.step) in deleted}
        for tier, decision in plan
    ]


def deleted_texts(deleted: Iterable[tuple[str | None, int]]) -> list[str]:
    """The deleted steps, each with the name of its tier, if it has one."""
    return [str(step) if tier is None else f'{step} ({tier})' for tier, step in deleted]


def without_nan(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with null for NaN, as JSON has no NaN."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in fields.items()}


def _print_plain(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    for line in aligned([[column.title for column in columns], *rows], [column.right for column in columns]):
        click.echo(line)


@contextlib.contextmanager
def progress(title: str) -> Generator[Progress]:
    """Yields a progress callback: a bar if standard error is a terminal, else a line every few seconds."""
    waiting = current_waiting()
    if not sys.stderr.isatty():
        yield ProgressLines(title, waiting)
        return
    import rich.console
    import rich.progress as bars

    columns = (bars.TextColumn(title), bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn())
    with bars.Progress(*columns, bars.TimeRemainingColumn(), console=rich.console.Console(stderr=True)) as shown:
        task = shown.add_task(title, total=None)
        update: Callable[..., None] = shown.update

        def report(done: int, total: int) -> None:
            update(task, completed=done, total=total)
            if waiting is not None:
                waiting.touch()

        with contextlib.ExitStack() as stack:
            if waiting is not None:
                # The bar would overwrite a line that is printed in another way.
                stack.enter_context(waiting.shown_by(shown.console.out))
            yield report


class ProgressLines:
    """Progress without a terminal: a line after two seconds, and then one every ten."""

    def __init__(self, title: str, waiting: Waiting | None, clock: Clock = time.monotonic):
        self._title = title
        self._waiting = waiting
        self._clock = clock
        self._started = clock()
        self._due = self._started + _FIRST_LINE_SECONDS
        self._guard = threading.Lock()

    def __call__(self, done: int, total: int) -> None:
        """Takes the bytes done so far and in all."""
        now = self._clock()
        with self._guard:
            if now < self._due:
                return
            self._due = now + _LINE_SECONDS
        print_line(progress_text(self._title, done, total, now - self._started), err=True)
        if self._waiting is not None:
            self._waiting.touch()


def run_at(path: str) -> Storage:
    """Opens the run at a path from the command line.

    Raises:
      click.UsageError: the path is empty, for instance from an unset variable of the shell.
      CheckpointNotFoundError: the directory does not exist, or is a step's directory.
    """
    if not path:
        raise click.UsageError("PATH is empty. Write '.' for the current directory.")
    storage = open_run_storage(path)
    if storage.root_kind() != 'dir':
        raise no_checkpoint(storage)
    return storage


def check_exists(storage: Storage) -> None:
    """Raises CheckpointNotFoundError if there is no run. On a bucket, :func:`run_at` makes no request."""
    if storage.kind('') != 'dir':
        raise no_checkpoint(storage)


def confirm(question: str, yes: bool) -> None:
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

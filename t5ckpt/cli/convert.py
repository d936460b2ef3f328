"""``t5ckpt convert``: converts checkpoints from other formats, and to Orbax's."""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Sequence
from typing import Any

import click

from t5ckpt.cli.conversion_output import library_usage_errors, print_names, print_report, report_fields
from t5ckpt.cli.output import (
    as_step_option,
    cast_leaves_option,
    dtype_option,
    json_option,
    print_json,
    print_line,
    progress,
    steps_option,
)
from t5ckpt.cli.paths import CHECKPOINT, RUN, step_path
from t5ckpt.cli.verb import Verb
from t5ckpt.convert import FORMATS, TO_ORBAX, ConvertOptions, ConvertReport, convert_checkpoint
from t5ckpt.convert.whole_run import RUN_FORMATS, convert_run
from t5ckpt.core.text import human_bytes, some_of
from t5ckpt.format.codecs import CODECS
from t5ckpt.translate import CheckpointTranslator

_SHOWN = 8
_CODECS = [codec for codec in CODECS if codec is not None]


@click.command('convert', cls=Verb)
@click.argument('kind', type=click.Choice(FORMATS), metavar='FORMAT')
@click.argument('source', metavar='SRC', type=CHECKPOINT)
@click.argument('directory', metavar='DST', type=RUN)
@steps_option
@click.option(
    '--all',
    'everything',
    is_flag=True,
    help='Convert every step of the run SRC; skip steps that an earlier call converted.',
)
@as_step_option
@dtype_option('save_dtype')
@cast_leaves_option
@click.option('--no-optimizer', is_flag=True, help='Leave out the optimizer state.')
@click.option(
    '--compression',
    type=click.Choice(_CODECS),
    help='Codec of the arrays; default: none.',
)
@click.option('--rules', metavar='FILE.py', help='For tf: a Python file that defines `translator`. It is executed.')
@click.option(
    '--concurrent-gb', type=float, default=ConvertOptions.concurrent_gb, help='Limit of the values in memory.'
)
@click.option('--force', is_flag=True, help='Replace an existing checkpoint when the new one is complete.')
@click.option('--dry-run', is_flag=True, help='Print what would be written; read no array, write nothing.')
@json_option
def command(kind: str, source: str, directory: str, rules: str | None, as_json: bool, **arguments: Any) -> None:
    """Converts the checkpoint at SRC to T5X's format, as a step of the run DST.

    FORMAT is tf, orbax, flax, jax, seqax or zarr. The structure is taken from the checkpoint, so no model is needed. Arrays are
    read in chunks, so memory does not depend on the size of the checkpoint.

    With to-orbax, SRC is a checkpoint in T5X's format, and DST the directory of a step in Orbax's.

    If SRC is a run, its latest step is converted. --step selects another. --all, or --step several times, converts
    several steps, with metrics, times and custom metadata; for to-orbax, DST is then the directory of a run, which
    CheckpointManager reads.

    \b
    Example:
      t5ckpt convert tf t5.1.1.base/model.ckpt-1000000 t5_1_1_base
      t5ckpt convert orbax run@12 new_run --save-dtype bfloat16
      t5ckpt convert orbax run new_run --all
      t5ckpt convert to-orbax new_run orbax_run/12
    """
    steps, everything, as_step = arguments.pop('steps'), arguments.pop('everything'), arguments.pop('as_step')
    of_run = everything or len(steps) > 1
    _check_steps(kind, steps, everything=everything, as_step=as_step)
    arguments['step'] = as_step
    arguments['optimizer'] = not arguments.pop('no_optimizer')
    arguments['overwrite'] = arguments.pop('force')
    if rules is not None:
        arguments['translator'] = _translator(rules)
    with progress(f'convert {source}') as shown, library_usage_errors():
        options = ConvertOptions(**arguments, progress=shown)
        if of_run:
            run = convert_run(kind, source, directory, options, steps=None if everything else steps)
            _print_run(run, directory, as_json=as_json, dry_run=options.dry_run)
            return
        source = step_path(source, steps[0]) if steps else source
        done = convert_checkpoint(kind, source, directory, options)
    print_report(done, options, as_json)


def _check_steps(kind: str, steps: Sequence[int], *, everything: bool, as_step: int | None) -> None:
    """Raises click.UsageError for options of steps that contradict each other or the format."""
    if (steps or everything) and kind not in RUN_FORMATS:
        raise click.UsageError(
            '--step names the step to read, and SRC names that here, such as run/12. To write as a step, pass --as-step.'
        )
    if as_step is not None and kind == TO_ORBAX:
        raise click.UsageError(
            '--as-step: Orbax takes the step from the name of DST, such as run/12. To read a step of SRC, pass --step.'
        )
    if steps and everything:
        raise click.UsageError('--all converts every step, and --step names some. Leave one of them out.')
    if as_step is not None and (everything or len(steps) > 1):
        raise click.UsageError('--as-step is for one step. The steps of a run keep their numbers.')


def _print_run(done: Sequence[ConvertReport], path: str, *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        print_json({'path': path, 'steps': [report_fields(report) for report in done], 'dry_run': dry_run})
        return
    there = [str(report.step) for report in done if report.outcome == 'there']
    gone = [str(report.step) for report in done if report.outcome == 'gone']
    if there:
        print_line(f'already there: step {some_of(there, _SHOWN, ", ")}')
    for report in done:
        if report.outcome == 'converted':
            written = f'written: {human_bytes(report.nbytes)} in {report.seconds:.1f} s'
            print_line(f'{report.path} {"would be written" if dry_run else written}')
    if gone:
        print_line(f'deleted from the source during the conversion: {", ".join(gone)}')
    print_names({name for report in done for name in report.dropped}, 'dropped: ')
    print_names({name for report in done for name in report.left_out}, 'left out: ')


def _translator(path: str) -> CheckpointTranslator:
    try:
        translator = runpy.run_path(path).get('translator')
    except OSError as error:
        raise click.UsageError(f'--rules {path}: {error.strerror}.') from error
    except Exception as error:
        # The user's program may raise any error.
        lines_of_it = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        where = f', line {lines_of_it[-1]}' if lines_of_it else ''
        raise click.UsageError(f'--rules {path}{where}: {type(error).__name__}: {error}') from error
    if not isinstance(translator, CheckpointTranslator):
        raise click.UsageError(f'--rules {path}: defines no `translator`, a t5ckpt.CheckpointTranslator.')
    return translator

"""``t5ckpt convert``: converts checkpoints from other formats, and to Orbax's."""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Collection, Sequence
from typing import Any

import click

from t5ckpt.cli.conversion_output import library_usage_errors
from t5ckpt.cli.output import (
    as_step_option,
    cast_leaves_option,
    dtype_option,
    fields_of,
    json_option,
    print_json,
    print_line,
    progress,
    steps_option,
)
from t5ckpt.cli.paths import CHECKPOINT, RUN, step_path
from t5ckpt.cli.verb import Verb
from t5ckpt.convert import CODEC_NAMES, FORMATS, RUN_FORMATS, TO_ORBAX, RunConversion, convert_checkpoint, convert_run
from t5ckpt.convert.conversion import Conversion, ConvertOptions
from t5ckpt.convert.to_orbax import convert_to_orbax
from t5ckpt.core.text import counted, human_bytes, lines, some_of
from t5ckpt.translate import CheckpointTranslator

_SHOWN = 8


@click.command('convert', cls=Verb)
@click.argument('kind', type=click.Choice((*FORMATS, TO_ORBAX)), metavar='FORMAT')
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
@click.option('--compression', type=click.Choice(CODEC_NAMES), help='Codec of the arrays; default: none.')
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
    translator = None if rules is None else _translator(rules)
    if translator is not None and kind != 'tf':
        raise click.UsageError(f'--rules is only for tf, not for {kind}. Leave it out.')
    with progress(f'convert {source}') as shown, library_usage_errors():
        options = ConvertOptions(**arguments, progress=shown)
        if of_run:
            run = convert_run(kind, source, directory, options, steps=None if everything else steps)
            _print_run(run, as_json=as_json, dry_run=options.dry_run)
            return
        source = step_path(source, steps[0]) if steps else source
        if kind == TO_ORBAX:
            done = convert_to_orbax(source, directory, options)
        else:
            done = convert_checkpoint(kind, source, directory, options, translator)
    if as_json:
        print_json({**conversion_fields(done), 'dry_run': options.dry_run})
    else:
        print_conversion(done, options.dry_run)


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


def _print_run(done: RunConversion, *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        converted = [conversion_fields(conversion) for conversion in done.converted]
        print_json({**fields_of(done), 'converted': converted, 'dry_run': dry_run})
        return
    if done.there:
        print_line(f'already there: step {some_of(list(map(str, done.there)), _SHOWN, ", ")}')
    for conversion in done.converted:
        how = (
            'would be written'
            if dry_run
            else f'written: {human_bytes(conversion.nbytes)} in {conversion.seconds:.1f} s'
        )
        print_line(f'{conversion.path} {how}')
    if done.gone:
        print_line(f'deleted from the source during the conversion: {", ".join(map(str, done.gone))}')
    dropped = sorted({name for conversion in done.converted for name in conversion.dropped})
    if dropped:
        _print_some(f'dropped {counted(len(dropped), "name")}', dropped)
    _print_names({name for conversion in done.converted for name in conversion.left_out}, 'left out: ')
    _print_names({option for conversion in done.converted for option in _idle(conversion)}, 'without effect: ')


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


def conversion_fields(done: Conversion) -> dict[str, Any]:
    """The fields of a conversion for JSON, with the command line's names of options."""
    return {**fields_of(done), 'without_effect': _idle(done)}


def _idle(done: Conversion) -> list[str]:
    return [f'--no-{name}' for name in done.without_effect]


def print_conversion(done: Conversion, dry_run: bool) -> None:
    """Prints the summary of a conversion."""
    what = 'would be written' if dry_run else f'written: {human_bytes(done.nbytes)} in {done.seconds:.1f} s'
    print_line(f'{done.path} {what}')
    renamed = [f'{old} -> {new}' for old, new in done.mapped.items() if old != new]
    _print_some(f'mapped {counted(len(done.mapped), "name")}, {len(renamed)} renamed', renamed)
    _print_some(f'added {counted(len(done.added), "leaf", "leaves")}', done.added)
    _print_some(f'dropped {counted(len(done.dropped), "name")}', done.dropped)
    _print_names(done.left_out, 'left out: ')
    _print_names(_idle(done), 'without effect: ')


def _print_names(names: Collection[str], head: str) -> None:
    if names:
        print_line(f'{head}{some_of(sorted(names), _SHOWN)}')


def _print_some(head: str, names: Sequence[str]) -> None:
    more = [f'and {len(names) - _SHOWN} more (--json lists all)'] if names[_SHOWN:] else []
    print_line(lines(f'{head}:', *names[:_SHOWN], *more, between='\n  ') if names else head)

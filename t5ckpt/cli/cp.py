"""``t5ckpt cp``: copies a checkpoint to another storage, byte for byte or with changes."""

from __future__ import annotations

from typing import Any

import click

from t5ckpt.cli.conversion_output import library_usage_errors, print_report
from t5ckpt.cli.output import (
    as_step_option,
    cast_leaves_option,
    dtype_option,
    follow_links_option,
    json_option,
    moved_option,
    progress,
    step_option,
)
from t5ckpt.cli.paths import CHECKPOINT, RUN
from t5ckpt.cli.verb import Verb
from t5ckpt.convert.copy import copy_checkpoint
from t5ckpt.convert.options import ConvertOptions

_SAME_NAME = (
    'save_dtype',
    'cast_leaves',
    'compression',
    'drop',
    'rename',
    'ema',
    'parameters',
    'trust_files',
    'dry_run',
)
_CHANGES = (*_SAME_NAME[:-1], 'no_optimizer', 'average', 'as_step')


@click.command('cp', cls=Verb)
@click.argument('source', type=CHECKPOINT)
@click.argument('target', type=RUN)
@step_option
@moved_option(
    '--all',
    'it copies one step. Run it for each step: t5ckpt cp run@100 TARGET.',
    is_flag=True,
)
@click.option('--workers', type=int, help='How many files to copy at once; default: 16.')
@dtype_option('save_dtype')
@cast_leaves_option
@click.option('--no-optimizer', is_flag=True, help='Leave out the optimizer state.')
@click.option('--drop', multiple=True, metavar='REGEX', help='Leave out the leaves that match; may be repeated.')
@click.option(
    '--trust-files',
    is_flag=True,
    help='Copy also where a list of checksums is lost; the copy has new ones.',
)
@click.option(
    '--rename',
    multiple=True,
    nargs=2,
    metavar='REGEX NEW',
    help=r'Rename leaves; \1 in NEW is a group of REGEX; may be repeated.',
)
@click.option(
    '--ema', metavar='SCOPE', help='Replace the parameters with the moving averages below SCOPE, such as opt_state/ema.'
)
@click.option(
    '--average',
    type=CHECKPOINT,
    multiple=True,
    metavar='OTHER',
    help='Average the parameters with those of OTHER; may be repeated.',
)
@click.option(
    '--parameters', metavar='REGEX', help='Parameters for --ema and --average; default: target/.* and params/.*'
)
@click.option('--compression', metavar='CODEC', help='Codec of the copy, such as zstd or auto.')
@as_step_option
@follow_links_option
@click.option('--force', is_flag=True, help='Replace an existing checkpoint when the copy is complete.')
@click.option('--dry-run', is_flag=True, help='Print what would be written; write nothing.')
@json_option
def command(source: str, target: str, step: int | None, as_json: bool, **arguments: Any) -> None:
    """Copies the checkpoint at SOURCE into the run at TARGET: byte for byte, or with changes.

    Both may be on any storage: a path, gs://bucket/run, s3://bucket/run, az://container/run. Each file is compared with its
    checksum, and the copy is listed when it is complete. A copy with changes takes bounded memory; on the same file system,
    unchanged chunks are hard-linked.

    \b
    Examples:
      t5ckpt cp run gs://bucket/run
      t5ckpt cp s3://bucket/run/checkpoint_1000 /data/run
      t5ckpt cp run weights --no-optimizer --save-dtype bfloat16
      t5ckpt cp run/checkpoint_3000 mean --average run/checkpoint_2000
    """
    if any(arguments[name] not in (None, (), False) for name in _CHANGES):
        _with_changes(source, target, step, as_json, arguments)
        return
    with progress('copying') as report, library_usage_errors():
        done = copy_checkpoint(
            source,
            target,
            step,
            workers=16 if arguments['workers'] is None else arguments['workers'],
            overwrite=arguments['force'],
            dry_run=arguments['dry_run'],
            follow_links=arguments['follow_links'],
            progress=report,
        )
    print_report(done, ConvertOptions(dry_run=arguments['dry_run']), as_json)


def _with_changes(source: str, target: str, step: int | None, as_json: bool, arguments: dict[str, Any]) -> None:
    # Imported here, since a plain copy needs no jax.
    from t5ckpt.convert.rewrite import rewrite_checkpoint
    from t5ckpt.steps import find_checkpoint

    if arguments['follow_links']:
        raise click.UsageError('--follow-links applies only to a copy without changes. Leave it out.')
    if arguments['workers'] is not None:
        raise click.UsageError('--workers applies only to a copy without changes. Leave it out.')
    with progress('copying') as report, library_usage_errors():
        options = ConvertOptions(
            step=arguments['as_step'],
            optimizer=not arguments['no_optimizer'],
            overwrite=arguments['force'],
            progress=report,
            **{name: arguments[name] for name in _SAME_NAME},
        )
        checkpoint = find_checkpoint(source, step)
        sources = [*arguments['average'], checkpoint] if arguments['average'] else checkpoint
        done = rewrite_checkpoint(sources, target, options)
    print_report(done, options, as_json)

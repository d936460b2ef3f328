"""``t5ckpt import``: writes a checkpoint from a file or a directory of another format."""

from __future__ import annotations

from typing import Any

import click

from t5ckpt.cli.conversion_output import library_usage_errors, print_report
from t5ckpt.cli.output import cast_leaves_option, dtype_option, json_option, moved_option, progress, with_options
from t5ckpt.cli.paths import ANY_PATH, RUN
from t5ckpt.cli.verb import Verb, VerbGroup
from t5ckpt.convert import ConvertOptions, convert_checkpoint

_common = with_options(
    click.argument('path', type=ANY_PATH),
    click.argument('out', type=RUN),
    moved_option('--step', '--as-step sets the step to write.'),
    click.option(
        '--as-step',
        'step',
        type=click.IntRange(0),
        metavar='STEP',
        help='Step to write; default: that in the input, or 0.',
    ),
    dtype_option('save_dtype'),
    cast_leaves_option,
    click.option('--force', 'overwrite', is_flag=True, help='Replace an existing checkpoint.'),
    click.option('--dry-run', is_flag=True, help='Print what would be written; write nothing.'),
    json_option,
)


@click.group('import', cls=VerbGroup)
def command() -> None:
    """Writes a checkpoint from another format: that of Hugging Face, or safetensors.

    Writes checkpoint_<step> into the run OUT, atomically. Tensors are read in pieces, so memory is bounded. Pickles
    are not read. Every format takes --json, --dry-run, --force, --as-step and --save-dtype.

    \b
    Examples:
      t5ckpt import hf model run
      t5ckpt import safetensors params.safetensors run --as-step 100
    """


@command.command('hf', cls=Verb)
@_common
@click.option('--config', help='Entries that override config.json: JSON text or a file.')
@click.option(
    '--scanned/--unscanned',
    default=None,
    help='All layers in one array, or one array each; default: as exported, UMT5 scanned.',
)
@click.option(
    '--split-heads/--joined-heads',
    default=None,
    help='With or without an axis for heads; default: as exported, UMT5 with it.',
)
def import_hf(path: str, out: str, config: str | None, as_json: bool, **options: Any) -> None:
    """Writes the T5 in the directory PATH (config.json and safetensors) as a T5X checkpoint in OUT.

    \b
    Examples:
      t5ckpt import hf model run
      t5ckpt import hf model run --as-step 1000000 --save-dtype float32
    """
    with library_usage_errors(), progress('importing') as report:
        chosen = ConvertOptions(config=config, progress=report, **options)
        print_report(convert_checkpoint('hf', path, out, chosen), chosen, as_json)


@command.command('safetensors', cls=Verb)
@_common
def import_safetensors(path: str, out: str, as_json: bool, **options: Any) -> None:
    """Writes the tensors of a file, index or directory PATH as a checkpoint in OUT; a '/' in a name begins a level of the tree.

    \b
    Example:
      t5ckpt import safetensors params.safetensors run
    """
    with library_usage_errors(), progress('importing') as report:
        chosen = ConvertOptions(progress=report, **options)
        print_report(convert_checkpoint('safetensors', path, out, chosen), chosen, as_json)

"""``t5ckpt export``: writes a checkpoint as a file or a directory of another format."""

from __future__ import annotations

from typing import Any

import click

from t5ckpt.cli.conversion_output import library_usage_errors, print_report
from t5ckpt.cli.output import (
    cast_leaves_option,
    dtype_option,
    json_option,
    progress,
    size_of,
    step_option,
    with_options,
)
from t5ckpt.cli.paths import ANY_PATH, CHECKPOINT
from t5ckpt.cli.verb import Verb, VerbGroup
from t5ckpt.convert import ConvertOptions, convert_checkpoint

_common = with_options(
    click.argument('path', type=CHECKPOINT),
    click.argument('out', type=ANY_PATH),
    step_option,
    dtype_option('save_dtype'),
    click.option('--force', 'overwrite', is_flag=True, help='Replace the output of an earlier export.'),
    click.option('--dry-run', is_flag=True, help='Print what would be written; write nothing.'),
    json_option,
)
# For the formats that keep the names of the checkpoint.
_named = with_options(
    click.option('--select', metavar='REGEX', help='Only arrays whose whole names match.'),
    cast_leaves_option,
)


@click.group('export', cls=VerbGroup)
def command() -> None:
    """Writes a checkpoint in another format: that of Hugging Face, or safetensors.

    Arrays are read in pieces, so memory is bounded. The output is complete or absent. --force replaces an existing output.
    Every format takes --json, --dry-run, --step and --save-dtype.

    \b
    Examples:
      t5ckpt export hf run model
      t5ckpt export safetensors run params.safetensors --select 'target/.*'
    """


@command.command('hf', cls=Verb)
@_common
@click.option('--config', help="Entries of config.json: JSON text, or a file such as a model's own config.json.")
@click.option(
    '--max-shard-size', callback=size_of, default='5GB', show_default=True, help='Limit of the size of a file.'
)
def export_hf(path: str, out: str, config: str | None, max_shard_size: int, as_json: bool, **options: Any) -> None:
    """Writes a T5 as the directory OUT, which transformers loads with from_pretrained.

    T5 1.0 and 1.1, mT5, Flan-T5, ByT5, UMT5, LongT5 with transient global attention, Switch and separate encoders are
    recognized by the names and shapes of their arrays. Pass other properties of the model with --config.

    \b
    Examples:
      t5ckpt export hf t5_1_1_base model --save-dtype bfloat16
      t5ckpt export hf ul2 model --config '{"feed_forward_proj": "gated-silu"}'
      t5ckpt export hf longt5 model \\
        --config '{"model_type": "longt5", "encoder_attention_type": "local"}'
    """
    with library_usage_errors(), progress('exporting') as report:
        chosen = ConvertOptions(config=config, max_shard_bytes=max_shard_size, progress=report, **options)
        print_report(convert_checkpoint('to-hf', path, out, chosen), chosen, as_json)


@command.command('safetensors', cls=Verb)
@_common
@_named
def export_safetensors(path: str, out: str, as_json: bool, **options: Any) -> None:
    """Writes arrays as the file OUT under their own names, for safetensors.safe_open.

    \b
    Example:
      t5ckpt export safetensors run params.safetensors --select 'target/.*'
    """
    with library_usage_errors(), progress('exporting') as report:
        chosen = ConvertOptions(progress=report, **options)
        print_report(convert_checkpoint('to-safetensors', path, out, chosen), chosen, as_json)

"""``t5ckpt cp`` copies a checkpoint, ``t5ckpt convert`` reads and writes other formats."""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import click

from t5ckpt.cli.paths import CHECKPOINT, LATER, RUN, checkpoint
from t5ckpt.cli.verb import (
    DRY_RUN,
    FOLLOW_LINKS,
    NUMBER,
    STEP,
    argument,
    emit,
    fields_of,
    flag,
    option,
    progress,
    size,
    verb,
)
from t5ckpt.convert import FORMATS, ConvertOptions, ConvertReport, convert_checkpoint
from t5ckpt.convert.copy import copy_checkpoint
from t5ckpt.core.leaf_path import MODEL, OPTIMIZER
from t5ckpt.core.text import human_bytes, some_of
from t5ckpt.format.codecs import CODECS
from t5ckpt.translate import CheckpointTranslator

_SHOWN = 8


def _pattern(text: str) -> str:
    return {'MODEL': MODEL, 'OPTIMIZER': OPTIMIZER}.get(text, text)


# Of a copy and of a conversion, with the names of ConvertOptions.
_SHARED = (
    option('--as-step step', 'Step to write. A leaf that counts steps keeps its value.', NUMBER),
    option('--save-dtype', 'Cast floating parameters to this dtype, such as bfloat16.', metavar='DTYPE'),
    option('--cast-leaves', 'Leaves that --save-dtype casts; default: target/.* and params/.*', metavar='REGEX'),
    option(
        '--take', 'Only leaves whose whole names match, or MODEL; may be repeated.', _pattern, 'REGEX', multiple=True
    ),
    option(
        '--leave', 'Leave out the leaves that match, or OPTIMIZER; may be repeated.', _pattern, 'REGEX', multiple=True
    ),
    option('--compression', 'Codec of the arrays.', click.Choice([codec for codec in CODECS if codec])),
    option('--concurrent-gb', 'Limit of the values in memory.', float),
    flag('--force overwrite', 'Replace what exists, when the new is complete.'),
    DRY_RUN,
)


def _options(given: Mapping[str, Any]) -> ConvertOptions:
    """The options that were given."""
    options = {name: value for name, value in given.items() if value not in (None, ())}
    return ConvertOptions(progress=progress('writing'), **options)


def _emit(report: ConvertReport, *, dry_run: bool) -> None:
    """Prints a line for what was written, and one for each kind of names that changed or were left out."""
    names: dict[str, Sequence[str]] = {
        'renamed': [f'{old} -> {new}' for old, new in report.mapped.items() if old != new],
        'added': report.added,
        'dropped': report.dropped,
        'left out': report.left_out,
    }
    written = f'written: {human_bytes(report.nbytes)} in {report.seconds:.1f} s'
    # 'files' counts files in every verb.
    files = {'files': len(report.files), 'file_names': report.files}
    emit(
        {**fields_of(report), **files, 'dry_run': dry_run},
        f'{report.path} {"would be written" if dry_run else written}',
        *[f'{what}: {some_of(those, _SHOWN)}' for what, those in names.items() if those],
    )


@verb(
    'cp',
    argument('source', CHECKPOINT),
    argument('target', RUN),
    STEP,
    flag('--trust-files', 'Copy also where a list of checksums is lost; the copy has new ones.'),
    option(
        '--rename',
        r'Rename leaves; \1 in NEW is a group of REGEX; may be repeated.',
        metavar='REGEX NEW',
        multiple=True,
        nargs=2,
    ),
    FOLLOW_LINKS,
    *_SHARED,
)
def cp(source: str, target: str, **given: Any) -> None:
    """Copies the checkpoint at SOURCE into the run at TARGET, as it is or with changes.

    Both may be on any storage: a path, gs://bucket/run, s3://bucket/run, az://container/run. Each file is compared with its
    checksum, and the copy is listed when it is complete. It takes bounded memory; on the same file system, unchanged chunks are
    hard-linked, so that both checkpoints share them.

    \b
    Examples:
      t5ckpt cp run gs://bucket/run
      t5ckpt cp s3://bucket/run/checkpoint_1000 /data/run
      t5ckpt cp run weights --leave OPTIMIZER --save-dtype bfloat16
      t5ckpt cp run t5x --rename 'params/(.*)' 'target/\1'
      for step in 100 200; do t5ckpt cp run@$step gs://bucket/run; done
    """
    options = _options(given)
    _emit(copy_checkpoint(source, target, options), dry_run=options.dry_run)


@verb(
    'convert',
    argument('kind', click.Choice(FORMATS), metavar='FORMAT'),
    argument('source', LATER, metavar='SRC'),
    argument('target', RUN, metavar='DST'),
    STEP,
    option('--rules', 'For tf: a Python file that defines `translator`. It is executed.', metavar='FILE.py'),
    option('--config', 'For hf and to-hf: entries of config.json, as JSON text or a file.'),
    option('--max-shard-size max_shard_bytes', 'For to-hf: limit of the size of a file; default: 5GB.', size, 'SIZE'),
    option('--scanned/--unscanned', 'For hf: all layers in one array, or one array each.', default=None),
    option('--split-heads/--joined-heads', 'For hf: with or without an axis for heads.', default=None),
    *_SHARED,
)
def convert(kind: str, source: str, target: str, at: int | None, rules: str | None, **given: Any) -> None:
    """Converts a checkpoint of another format to T5X's, or back.

    FORMAT is tf, orbax, flax, seqax, zarr, safetensors or hf (a T5 of Hugging Face): SRC is in this format, and DST is
    the run that gets the step. The structure is taken from SRC, so no model is needed.

    With to-orbax, to-seqax, to-safetensors or to-hf, SRC is a checkpoint in T5X's format, and DST the output: the directory of
    a step, a file, or a directory for from_pretrained.

    Arrays are read in pieces, so memory is bounded. Pickles are not read. The output is complete or absent. If SRC is a run,
    its latest step is converted. --step selects another. From and to Orbax, metrics, times and custom metadata are kept.

    \b
    Examples:
      t5ckpt convert tf t5.1.1.base/model.ckpt-1000000 t5_1_1_base
      t5ckpt convert orbax run@12 new_run --save-dtype bfloat16
      for step in 10 20; do t5ckpt convert orbax run@$step new_run; done
      t5ckpt convert to-orbax new_run orbax_run/12
      t5ckpt convert hf model run --as-step 1000000
      t5ckpt convert to-hf run model --config '{"model_type": "longt5"}'
      t5ckpt convert to-safetensors run x.safetensors --take 'target/.*'
    """
    if at is not None and kind in ('tf', 'hf', 'safetensors'):
        raise click.UsageError('--step names a step of SRC, which has none. To write as a step, pass --as-step.')
    if given['step'] is not None and kind.startswith('to-'):
        raise click.UsageError(
            "--as-step is for a step in T5X's format; Orbax takes it from the name of DST, such as run/12. To read a step of "
            'SRC, pass --step.'
        )
    options = _options({**given, 'translator': None if rules is None else _translator(rules)})
    _emit(convert_checkpoint(kind, checkpoint(source, at), target, options), dry_run=options.dry_run)


def _translator(path: str) -> CheckpointTranslator:
    try:
        translator = runpy.run_path(path).get('translator')
    except OSError as error:
        raise click.UsageError(f'--rules {path}: {error.strerror}.') from error
    except Exception as error:
        # The user's program may raise any error.
        numbers = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        where = f', line {numbers[-1]}' if numbers else ''
        raise click.UsageError(f'--rules {path}{where}: {type(error).__name__}: {error}') from error
    if not isinstance(translator, CheckpointTranslator):
        raise click.UsageError(f'--rules {path}: defines no `translator`, a t5ckpt.CheckpointTranslator.')
    return translator

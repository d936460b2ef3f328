"""Converts from and to other formats, and copies checkpoints with changes.

A reader returns a table of LazyArrays, and a writer takes one; ``save/prepare.write_stream`` is the writer of T5X's format. So
every conversion reads one tensor, or a part of one, at a time. Optional dependencies are imported when they are needed.
"""

from __future__ import annotations

import os

from t5ckpt.convert.conversion import Conversion, ConvertOptions
from t5ckpt.convert.tf import convert_tf
from t5ckpt.convert.trees import TREE_FORMATS, convert_tree
from t5ckpt.convert.whole_run import RUN_FORMATS, TO_ORBAX, RunConversion, convert_run
from t5ckpt.format.codecs import CODECS
from t5ckpt.storage import Storage
from t5ckpt.translate import CheckpointTranslator

__all__ = [
    'CODEC_NAMES',
    'FORMATS',
    'RUN_FORMATS',
    'TO_ORBAX',
    'Conversion',
    'ConvertOptions',
    'RunConversion',
    'convert_checkpoint',
    'convert_run',
]

FORMATS = ('tf', *TREE_FORMATS)
"""The formats that :func:`convert_checkpoint` reads."""

CODEC_NAMES = tuple(codec for codec in CODECS if codec is not None)


def convert_checkpoint(
    kind: str,
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str] | Storage,
    options: ConvertOptions | None = None,
    translator: CheckpointTranslator | None = None,
) -> Conversion:
    """Converts a checkpoint of another format to T5X's, as ``checkpoint_<step>`` in a run's directory.

    Args:
      kind: one of ``FORMATS``; see ``convert_tf`` and ``convert_tree`` for what each reads.
      source: the checkpoint.
      directory: the run's.
      options: see :class:`ConvertOptions`.
      translator: rules from TensorFlow's names; only for 'tf'.
    """
    if kind == TO_ORBAX:
        raise ValueError(
            f'{kind}: to write a run of Orbax, call t5ckpt.convert_run({kind!r}, run, directory, steps=[...]).'
        )
    if kind == 'tf':
        return convert_tf(source, directory, options, translator)
    if translator is not None:
        raise ValueError(f"translator has no effect: it is for 'tf', not for {kind!r}. Leave it out.")
    return convert_tree(kind, source, directory, options)

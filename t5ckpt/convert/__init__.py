"""Converts from and to other formats, and copies checkpoints with changes.

A format's reader returns a :class:`Source`, a table of LazyArrays, and ``source.write_source`` writes one in T5X's format. An
export takes one (``source.open_export``) and writes it in another format. So every conversion reads one tensor, or a part of one,
at a time. Optional dependencies are imported when they are needed.
"""

from __future__ import annotations

import os

from t5ckpt.convert.options import FORMATS, TAKES, ConvertOptions, ConvertReport, check_options
from t5ckpt.convert.safetensors import export_safetensors
from t5ckpt.convert.seqax import export_seqax
from t5ckpt.convert.source import Source, write_source
from t5ckpt.convert.trees import open_tree
from t5ckpt.core.arguments import check_word
from t5ckpt.storage import PathOrStorage, Storage

__all__ = ['FORMATS', 'TAKES', 'ConvertOptions', 'ConvertReport', 'convert_checkpoint']


def convert_checkpoint(
    kind: str,
    source: str | os.PathLike[str],
    target: PathOrStorage,
    options: ConvertOptions = ConvertOptions(),  # noqa: B008 - frozen
) -> ConvertReport:
    """Converts a checkpoint of another format to T5X's, as ``checkpoint_<step>`` in a run's directory, or back.

    Args:
      kind: 'tf', 'orbax', 'flax', 'seqax', 'zarr', 'safetensors' or 'hf' (a T5 of transformers), to read the format; or
        'to-orbax', 'to-seqax', 'to-safetensors' or 'to-hf', to write it.
      source: the checkpoint, as a path; see ``convert/tf`` and ``convert/trees.open_tree`` for what each format reads. With
        'to-...': a run's directory, a step's directory, or a file that t5ckpt reads.
      target: the run's directory. With 'to-...' the output: a directory such as ``run/12`` for Orbax, seqax's
        ``checkpoint_dir``, a file, or a directory that ``from_pretrained`` loads; on a local file system except for seqax.
      options: see :class:`ConvertOptions`.

    Raises:
      CheckpointExistsError, OutputExistsError: the step or the output exists, and ``overwrite`` is not set; nothing was read.
      CheckpointNotFoundError: there is no such checkpoint.
      FormatError: the source is damaged, or in another format.
      UnsupportedFormatError: transformers has no class for the model, or T5X has none, with the names that do not match; or
        ``config`` contradicts the weights.
      UnsupportedLeafError: the format cannot hold a leaf.
      TreeMismatchError, MissingLeaves: arrays of a T5 are missing or differ.
      StorageError: the source cannot be read, or the output cannot be written; nothing became visible.
    """
    check_word('the format', kind, FORMATS)
    check_options(options, kind)
    if not kind.startswith('to-'):
        return write_source(open_source(kind, source, options), target, options)
    path = target.url() if isinstance(target, Storage) else target
    match kind:
        case 'to-safetensors':
            return export_safetensors(source, path, options)
        case 'to-seqax':
            return export_seqax(source, path, options)
        case 'to-hf':
            from t5ckpt.convert.huggingface.export import export_hf

            return export_hf(source, path, options)
        case _:
            from t5ckpt.convert.to_orbax import convert_to_orbax

            return convert_to_orbax(source, path, options)


def open_source(kind: str, path: str | os.PathLike[str], options: ConvertOptions) -> Source:
    """Reads the names, shapes and dtypes of a checkpoint of another format."""
    if kind == 'tf':
        from t5ckpt.convert.tf import open_tf, tf_leaves

        return tf_leaves(open_tf(path), options)
    if kind == 'hf':
        from t5ckpt.convert.huggingface.import_ import open_hf

        return open_hf(path, options)
    return open_tree(kind, path, options)

"""Imports a T5 from Hugging Face's directory of safetensors to T5X's format; see ``huggingface/names.py``."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from t5ckpt.convert.conversion import write_import
from t5ckpt.convert.export_options import LAYOUT_KEY, ExportReport, ImportOptions, stamp
from t5ckpt.convert.files.safetensors import TensorReader, lazy_copy
from t5ckpt.convert.huggingface.config import attention_of, check_config, logits_are_tied, read_config
from t5ckpt.convert.huggingface.model import check_tensors, model_of_tensors
from t5ckpt.convert.huggingface.names import Layout, Pair, pairs_of
from t5ckpt.core.leaf_path import path_of
from t5ckpt.errors import CheckpointNotFoundError, UnsupportedFormatError
from t5ckpt.format.safetensors import WHOLE_NAMES
from t5ckpt.lazy import LazyArray
from t5ckpt.storage import foreign_errors
from t5ckpt.tree.leaf_table import LeafTable

_EMBEDDING, _HEAD = 'shared.weight', 'lm_head.weight'
_DOUBLES = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
# A tensor in files from before transformers 2, which transformers ignores, too.
_IGNORED = ('decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight',)


def import_hf(
    directory: str | os.PathLike[str],
    checkpoints_dir: str | os.PathLike[str],
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    options: ImportOptions = ImportOptions(),  # noqa: B008 - frozen
) -> ExportReport:
    """Writes a T5 of Hugging Face as a T5X checkpoint, ``<checkpoints_dir>/checkpoint_<step>``.

    The checkpoint has only the parameters, under ``target``, and the step. A training run passes ``fallback_state`` for a new
    optimizer.

    Args:
      directory: with ``config.json`` and ``model.safetensors``, or its shards and their index.
      checkpoints_dir: a run's directory.
      config: entries that override the directory's ``config.json``: a mapping, JSON text, or a file.
      options: see :class:`ImportOptions`.

    Raises:
      CheckpointNotFoundError: the directory has no safetensors. Pickled files are not read.
      UnsupportedFormatError, TreeMismatchError: the model is not a T5 that T5X has, with the names that do not match.
      CorruptCheckpointError: a file is damaged.
      CheckpointExistsError: the step exists, and ``options.force`` is not set.
    """
    started = time.monotonic()
    root = os.fspath(directory)
    model_files = _open(root)
    settings = read_config(os.path.join(root, 'config.json')) | read_config(config)
    tensors, dropped = _without_doubles(model_files, settings)
    pairs, step = _pairs(tensors, model_files.metadata, settings, options)
    check_tensors(pairs, {name: tensor.shape for name, tensor in tensors.items()}, root)
    table: LeafTable = {path_of(pair.leaf): _lazy(pair, tensors, model_files.forget) for pair in pairs}
    table['state', 'step'] = np.int32(step)
    source = {'format': 'huggingface', 'files': [stamp(name) for name in model_files.files]}
    url = write_import(table, step, checkpoints_dir, options, source)
    total = sum(tensor.nbytes for tensor in tensors.values())
    mapped = {pair.leaf: pair.tensors for pair in pairs}
    kind = str(settings.get('model_type', 't5'))
    return ExportReport(url, kind, (), total, mapped, dropped, time.monotonic() - started, options.dry_run)


def _open(root: str) -> TensorReader:
    with foreign_errors(root):
        names = sorted(os.listdir(root))
    whole = next((name for name in WHOLE_NAMES if name in names), None)
    if whole is not None:
        return TensorReader(os.path.join(root, whole))
    pickled = [name for name in names if name.endswith(('.bin', '.pt', '.pth', '.ckpt', '.h5'))]
    cure = f'There are {", ".join(names[:10]) or "no files"}.'
    if any(name.endswith('.msgpack') for name in names):
        cure += ' t5ckpt convert flax reads Flax weights.'
    elif pickled:
        cure = (
            f'{", ".join(pickled[:3])} may be pickled and is not read: load the model with transformers and call '
            'save_pretrained, which writes safetensors.'
        )
    raise CheckpointNotFoundError(f'{root}: no model.safetensors and no model.safetensors.index.json. {cure}')


def _with_aliases(found: TensorReader) -> dict[str, np.ndarray]:
    """The tensors, also under the names that ``safetensors.torch.save_model`` recorded: of equal tensors it writes one."""
    aliases = {name: found.tensors[kept] for name, kept in found.metadata.items() if kept in found.tensors}
    return aliases | found.tensors


def _without_doubles(found: TensorReader, config: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """The tensors without copies of the embedding, and the names of these copies.

    Raises:
      UnsupportedFormatError: a tower has a different embedding, or T5X cannot compute the logits in the same way.
    """
    kept = {name: tensor for name, tensor in _with_aliases(found).items() if name not in _IGNORED}
    shared = next((kept[name] for name in (_EMBEDDING, *_DOUBLES) if name in kept), None)
    if shared is not None:
        kept[_EMBEDDING] = shared
    for name in _DOUBLES:
        if name in kept and not _same_bits(kept.pop(name), shared, found.forget):
            raise UnsupportedFormatError(
                f'{name} differs from {_EMBEDDING}, but T5X has one embedding for both towers.'
            )
    if any(name.startswith('decoder.') for name in kept):
        if logits_are_tied(config, _HEAD in kept, _same_bits(kept.get(_HEAD), shared, found.forget)):
            kept.pop(_HEAD, None)
        elif shared is not None:
            kept.setdefault(_HEAD, shared)
    return kept, tuple(name for name in found.tensors if name not in kept)


def _same_bits(one: np.ndarray | None, other: np.ndarray | None, forget: Callable[[], None]) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    rows = max(1, 2**24 // max(1, one[:1].nbytes))
    for i in range(0, len(one), rows):
        if one[i : i + rows].tobytes() != other[i : i + rows].tobytes():
            return False
        forget()
    return True


def _pairs(
    tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str], config: Mapping[str, Any], options: ImportOptions
) -> tuple[list[Pair], int]:
    model = model_of_tensors({name: tensor.shape for name, tensor in tensors.items()}, str(config.get('model_type')))
    if attention_of(config) not in ('', model.attention):
        raise UnsupportedFormatError(
            f'encoder_attention_type: configuration {config.get("encoder_attention_type")!r}, weights {model.attention}'
        )
    # logits_are_tied has checked this flag.
    check_config(model, {key: value for key, value in config.items() if key != 'tie_word_embeddings'})
    # UMT5 was trained with scalable_t5, which scans its layers and splits heads.
    layout = Layout(scanned=model.relpos_per_layer, split_heads=model.relpos_per_layer)
    layout, step = _kept_layout(metadata.get(LAYOUT_KEY), layout)
    asked = {'scanned': options.scanned, 'split_heads': options.split_heads}
    layout = dataclasses.replace(layout, **{name: value for name, value in asked.items() if value is not None})
    if layout.scanned and model.sparse:
        raise UnsupportedFormatError(
            'a model with experts cannot be scanned, because layers with and without experts differ. Leave scanned out.'
        )
    return pairs_of(model, layout), step if options.step is None else options.step


def _kept_layout(text: str | None, default: Layout) -> tuple[Layout, int]:
    """The layout and the step that an export recorded; ``default`` and 0 for any other text."""
    try:
        value = json.loads(text or '')
        fields = {field.name: value[field.name] for field in dataclasses.fields(Layout)}
        step = value['step']
    except (ValueError, TypeError, KeyError, RecursionError):
        return default, 0
    good = all(type(fields[name]) is type(getattr(default, name)) for name in fields)
    good = good and fields['prefix'] in ('target/', 'params/', 'target/params/', 'params/params/', '')
    good = good and fields['embedder'] in ('token_embedder', 'encoder/token_embedder')
    return (Layout(**fields) if good else default), step if type(step) is int and step >= 0 else 0


def _lazy(pair: Pair, tensors: Mapping[str, np.ndarray], forget: Callable[[], None]) -> LazyArray:
    parts = [tensors[name] for name in pair.tensors]
    kinds = {part.dtype.name for part in parts}
    if len(kinds) > 1:
        raise UnsupportedFormatError(
            f'{pair.leaf}: its tensors {pair.tensors[0]}, ... have the dtypes {", ".join(sorted(kinds))}, but an array has one. '
            'Cast them to one dtype first.'
        )
    return lazy_copy(
        pair.shape,
        parts[0].dtype,
        lambda index: pair.from_tensors(parts, None if index is Ellipsis else index),
        forget,
    )

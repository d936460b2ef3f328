"""Imports a T5 from Hugging Face's directory of safetensors to T5X's format; see ``huggingface/names.py``."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.convert.huggingface.config import attention_of, check_config, logits_are_tied, read_config
from t5ckpt.convert.huggingface.model import model_of_tensors
from t5ckpt.convert.huggingface.names import EMBEDDERS, LAYOUT_KEY, PREFIXES, Layout, Pair, pairs_of
from t5ckpt.convert.options import ConvertOptions
from t5ckpt.convert.safetensors import open_tensors
from t5ckpt.convert.source import Source, boxes_of
from t5ckpt.core.leaf_path import leaf_name, path_of
from t5ckpt.errors import UnsupportedFormatError
from t5ckpt.format.chunk_grid import Box
from t5ckpt.lazy import LazyArray, LazyThreadPoolArray
from t5ckpt.save.linked_arrays import linked_leaves
from t5ckpt.tree.leaf_table import LeafTable

_EMBEDDING, _HEAD = 'shared.weight', 'lm_head.weight'
_DOUBLES = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
# A tensor in files from before transformers 2, which transformers ignores, too.
_IGNORED = ('decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight',)


def open_hf(directory: str | os.PathLike[str], options: ConvertOptions) -> Source:
    """Opens a T5 of Hugging Face. The checkpoint gets only the parameters, under ``target``, and the step.

    Args:
      directory: with ``config.json`` and ``model.safetensors``, or its shards and their index.
      options: ``config`` overrides entries of ``config.json``; ``scanned`` and ``split_heads``.

    Raises:
      CheckpointNotFoundError: the directory has no safetensors. Pickled files are not read.
      UnsupportedFormatError, TreeMismatchError: the model is not a T5 that T5X has, with the names that do not match.
      CorruptCheckpointError: a file is damaged.
    """
    contents, metadata = open_tensors(directory)
    config = read_config(os.path.join(directory, 'config.json')) | read_config(options.config)
    found = {leaf_name(path): array for path, array in linked_leaves(contents).items()}
    tensors = _without_doubles(found, metadata, config)
    pairs, step = _pairs(tensors, os.fspath(directory), metadata, config, options)
    table: LeafTable = {path_of(pair.leaf): _lazy(pair, tensors) for pair in pairs}
    table['state', 'step'] = np.int32(step)
    mapped = {tensor: pair.leaf for pair in pairs for tensor in pair.tensors}
    return Source(
        table, step, contents.located.url, mapped, dropped=tuple(name for name in found if name not in tensors)
    )


def _without_doubles(found: dict[str, Any], metadata: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors without copies of the embedding.

    Raises:
      UnsupportedFormatError: a tower has a different embedding, or T5X cannot compute the logits in the same way.
    """
    # Of equal tensors, safetensors.torch.save_model writes one, and records the names of the others.
    aliases = {name: found[kept] for name, kept in metadata.items() if kept in found}
    kept = {name: tensor for name, tensor in (aliases | found).items() if name not in _IGNORED}
    shared = next((kept[name] for name in (_EMBEDDING, *_DOUBLES) if name in kept), None)
    if shared is not None:
        kept[_EMBEDDING] = shared
    for name in _DOUBLES:
        if name in kept and not _same_bits(kept.pop(name), shared):
            raise UnsupportedFormatError(
                f'{name} differs from {_EMBEDDING}, but T5X has one embedding for both towers.'
            )
    if any(name.startswith('decoder.') for name in kept):
        if logits_are_tied(config, _HEAD in kept, _same_bits(kept.get(_HEAD), shared)):
            kept.pop(_HEAD, None)
        elif shared is not None:
            kept.setdefault(_HEAD, shared)
    return kept


def _same_bits(one: Any, other: Any) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    boxes = (box.slices for box in boxes_of(one, 0, 2**24))
    return one is other or all(one[box].tobytes() == other[box].tobytes() for box in boxes)


def _pairs(
    tensors: Mapping[str, Any],
    where: str,
    metadata: Mapping[str, str],
    config: Mapping[str, Any],
    options: ConvertOptions,
) -> tuple[list[Pair], int]:
    """The arrays with their tensors, and the step that an export recorded."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    model = model_of_tensors(shapes, where, str(config.get('model_type')))
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
    return pairs_of(model, layout), step


def _kept_layout(text: str | None, default: Layout) -> tuple[Layout, int]:
    """The layout and the step that an export recorded; ``default`` and 0 for any other text."""
    try:
        value = json.loads(text or '')
        fields = {field.name: value[field.name] for field in dataclasses.fields(Layout)}
        step = value['step']
    except (ValueError, TypeError, KeyError, RecursionError):
        return default, 0
    good = all(type(fields[name]) is type(getattr(default, name)) for name in fields)
    good = good and fields['prefix'] in PREFIXES
    good = good and fields['embedder'] in EMBEDDERS
    return (Layout(**fields) if good else default), step if type(step) is int and step >= 0 else 0


def _lazy(pair: Pair, tensors: Mapping[str, Any]) -> LazyArray:
    parts = [tensors[name] for name in pair.tensors]
    kinds = {part.dtype.name for part in parts}
    if len(kinds) > 1:
        raise UnsupportedFormatError(
            f'{pair.leaf}: its tensors {pair.tensors[0]}, ... have the dtypes {", ".join(sorted(kinds))}, but an array has one. '
            'Cast them to one dtype first.'
        )

    def read(box: Any = ...) -> np.ndarray:
        return pair.from_tensors(parts, Box.whole(pair.shape).slices if box is Ellipsis else box)

    return LazyThreadPoolArray(pair.shape, parts[0].dtype, read, read)

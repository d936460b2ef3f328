"""Exports a T5 from T5X's format to Hugging Face's directory of safetensors, without changing a bit.

Names and shapes determine the architecture: T5 1.0 (tied logits), T5 1.1, mT5, Flan-T5 and UL2 (gated, separate logits), ByT5 (a
shallower decoder), UMT5 (a bias table for each layer), LongT5 with transient global attention, Switch, an encoder alone; separate
or scanned layers; merged or split heads. Other models are refused with the names that do not match. ``names.py`` has the table of
names, and ``config.py`` the values that the weights do not determine.

Notes: arrays are read in parts, so that a model of any size needs some hundred megabytes of memory. The output becomes visible
when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.commit.output_files import check_output, local_output, output
from t5ckpt.convert.huggingface.config import (
    attention_of,
    config_of,
    needs_embed_tokens,
    needs_larger_norm,
    read_config,
)
from t5ckpt.convert.huggingface.model import model_of_leaves
from t5ckpt.convert.huggingface.names import LAYOUT_KEY, Pair, pairs_of
from t5ckpt.convert.options import ConvertOptions, ConvertReport
from t5ckpt.convert.safetensors import TensorSpec, TensorWriter, check_dtype
from t5ckpt.convert.source import Source, boxes_of, open_export
from t5ckpt.core.leaf_path import leaf_name
from t5ckpt.format.dtypes import cast
from t5ckpt.progress import Meter
from t5ckpt.storage import foreign_errors
from t5ckpt.storage.durable import write_synced

_WEIGHTS = 'model.safetensors'
_INDEX = f'{_WEIGHTS}.index.json'
_CONFIG = 'config.json'
# 'configuration_files' in config.json names these: versions 5.0 to 5.23 of transformers load the first one, later ones the
# second one; see config.py.
_CONFIG_5 = 'config.5.0.0.json'
_CONFIG_5_24 = 'config.5.24.0.json'
_INDEX_5 = 'model-transformers-5.safetensors.index.json'
_NORM_5 = 'norm-transformers-5.safetensors'
_FINAL_NORM = 'decoder.final_layer_norm.weight'
_EMBEDDING = 'shared.weight'
_COPIES = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
_OURS = ('.safetensors', '.safetensors.index.json')


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The plan of an export.

    Attributes:
      pairs: arrays and their tensors.
      arrays: by name.
      dtypes: of the output, by array.
      shards: tensors, by file name; with another final norm for versions 5.0 to 5.23 of transformers, if they need one.
      config: of the model.
      metadata: of each file.
      copies: tensors that are copies of the embedding.
    """

    pairs: Sequence[Pair]
    arrays: Mapping[str, Any]
    dtypes: Mapping[str, np.dtype]
    shards: Mapping[str, Sequence[TensorSpec]]
    config: Mapping[str, Any]
    metadata: Mapping[str, str]
    copies: Sequence[str]

    @functools.cached_property
    def weight_map(self) -> dict[str, str]:
        """The file of each tensor."""
        return {spec.name: file for file, specs in self.shards.items() if file != _NORM_5 for spec in specs}

    @property
    def texts(self) -> dict[str, Any]:
        """The contents of the JSON files, by name."""
        sizes = {spec.name: spec.nbytes for specs in self.shards.values() for spec in specs}
        metadata = {'total_size': sum(sizes.values())}
        files: dict[str, Any] = {_CONFIG: dict(self.config)}
        if list(self.shards) != [_WEIGHTS]:
            files[_INDEX] = {'metadata': metadata, 'weight_map': self.weight_map}
        if _NORM_5 in self.shards:
            files[_CONFIG] |= {'configuration_files': [_CONFIG_5, _CONFIG_5_24]}
            files[_CONFIG_5_24] = dict(self.config)
            files[_CONFIG_5] = {**self.config, 'transformers_weights': _INDEX_5}
            files[_INDEX_5] = {'metadata': metadata, 'weight_map': {**self.weight_map, _FINAL_NORM: _NORM_5}}
        return files


def export_hf(
    checkpoint: str | os.PathLike[str], directory: str | os.PathLike[str], options: ConvertOptions
) -> ConvertReport:
    """Writes a T5 as a directory that ``transformers`` loads with ``from_pretrained``.

    Raises:
      UnsupportedFormatError: Hugging Face has no class for the model, with the names that do not match; or ``options.config``
        contradicts the weights.
      TreeMismatchError: arrays are missing, or their shapes are inconsistent.
      OutputExistsError: the directory is not empty, and ``options.overwrite`` is not set.
    """
    started = time.monotonic()
    target = local_output(directory)
    check_output(target, options.overwrite, _is_exported_file)
    contents, source = open_export(checkpoint, target, options, typed=False)
    plan = _plan(source, options)
    total = sum(math.prod(pair.shape) * plan.dtypes[pair.leaf].itemsize for pair in plan.pairs)
    if not options.dry_run:
        with contents.identity.reading(), output(target, options.overwrite, _is_exported_file) as temporary:
            _write(plan, temporary, Meter(options.progress, total), options.piece_bytes)
            for name, text in plan.texts.items():
                with foreign_errors(temporary, writing=True):
                    write_synced(os.path.join(temporary, name), f'{json.dumps(text, indent=2)}\n'.encode())
    leaves = {pair.leaf for pair in plan.pairs}
    mapped = {tensor: pair.leaf for pair in plan.pairs for tensor in pair.tensors}
    dropped = (*(name for name in source.mapped if name not in leaves), *source.dropped)
    seconds = time.monotonic() - started
    return ConvertReport(
        source.step, target, total, seconds, mapped, dropped=dropped, files=(*plan.texts, *plan.shards)
    )


def _is_exported_file(name: str) -> bool:
    return name.endswith(_OURS) or name in (_CONFIG, _CONFIG_5, _CONFIG_5_24)


def _plan(source: Source, options: ConvertOptions) -> _Plan:
    given = read_config(options.config)
    arrays = {leaf_name(path): array for path, array in source.table.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    model, layout = model_of_leaves(shapes, source.path, attention_of(given))
    pairs = pairs_of(model, layout)
    config = config_of(model, given)
    wanted = None if options.cast is None else options.cast.dtype
    dtypes = {pair.leaf: wanted or np.dtype(arrays[pair.leaf].dtype) for pair in pairs}
    for leaf, dtype in dtypes.items():
        check_dtype(leaf, dtype)
    names = {dtype.name for dtype in dtypes.values()}
    if len(names) == 1:
        config['torch_dtype'] = names.pop()
    specs = [TensorSpec(name, dtypes[pair.leaf], pair.tensor_shape) for pair in pairs for name in pair.tensors]
    copies = _COPIES if needs_embed_tokens(model, config) else ()
    specs += [dataclasses.replace(spec, name=name) for spec in specs if spec.name == _EMBEDDING for name in copies]
    shards = _shards(specs, options.max_shard_bytes, needs_larger_norm(model, config))
    metadata = {'format': 'pt', LAYOUT_KEY: json.dumps({'step': source.step, **dataclasses.asdict(layout)})}
    return _Plan(pairs, arrays, dtypes, shards, config, metadata, copies)


def _shards(specs: Sequence[TensorSpec], limit: int, has_two_norms: bool) -> dict[str, list[TensorSpec]]:
    """Assigns tensors to files, in order; with two final norms each of them to a separate file, after the others."""
    norm = [spec for spec in specs if has_two_norms and spec.name == _FINAL_NORM]
    files: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if spec in norm:
            continue
        if files[-1] and sum(other.nbytes for other in files[-1]) + spec.nbytes > limit:
            files.append([])
        files[-1].append(spec)
    files += [norm] if norm else []
    if len(files) == 1:
        return {_WEIGHTS: files[0]}
    shards = {f'model-{i:05}-of-{len(files):05}.safetensors': shard for i, shard in enumerate(files, 1)}
    return shards | ({_NORM_5: norm} if norm else {})


def _write(plan: _Plan, directory: str, meter: Meter, piece_bytes: int) -> None:
    with contextlib.ExitStack() as stack:
        files = {
            file: stack.enter_context(TensorWriter(os.path.join(directory, file), specs, plan.metadata))
            for file, specs in plan.shards.items()
        }
        for pair in plan.pairs:
            array, axis, dtype = plan.arrays[pair.leaf], pair.row_axis, plan.dtypes[pair.leaf]
            for box in boxes_of(array, axis, piece_bytes):
                values = cast(np.asarray(array[box.slices]), dtype, pair.leaf)
                row = box[axis][0] * pair.rows_per_index
                for name, rows in zip(pair.tensors, pair.to_tensors(values), strict=True):
                    for copy in (name, *(plan.copies if name == _EMBEDDING else ())):
                        files[plan.weight_map[copy]].write(copy, row, rows)
                if _NORM_5 in files and pair.tensors == (_FINAL_NORM,):
                    # Computed in double precision, so that it is rounded only once.
                    larger = values.astype(np.float64) * math.sqrt(plan.config['d_model'])
                    files[_NORM_5].write(_FINAL_NORM, row, cast(larger, dtype, pair.leaf))
                meter.add(values.nbytes)

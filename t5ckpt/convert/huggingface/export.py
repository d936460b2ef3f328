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
import json
import math
import os
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.commit.output_files import check_output, local_output, output
from t5ckpt.convert.export_options import LAYOUT_KEY, ExportOptions, ExportReport, refuse_inside, refuse_options
from t5ckpt.convert.files.safetensors import TensorSpec, TensorWriter, check_dtype
from t5ckpt.convert.huggingface.config import (
    attention_of,
    config_of,
    needs_embed_tokens,
    needs_larger_norm,
    read_config,
)
from t5ckpt.convert.huggingface.model import check_leaves, model_of_leaves
from t5ckpt.convert.huggingface.names import Pair, pairs_of
from t5ckpt.convert.source_arrays import Sources, boxes_of, open_sources
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
      dtypes: of the output, by array.
      shards: tensors, by file name.
      config: of the model.
      metadata: of each file.
      second_norm: whether to write another final norm for versions 5.0 to 5.23 of transformers.
      copies: tensors that are copies of the embedding.
    """

    pairs: Sequence[Pair]
    dtypes: Mapping[str, np.dtype]
    shards: Mapping[str, Sequence[TensorSpec]]
    config: Mapping[str, Any]
    metadata: Mapping[str, str]
    second_norm: bool
    copies: Sequence[str]

    @property
    def texts(self) -> dict[str, Any]:
        """The contents of the JSON files, by name."""
        total = sum(spec.nbytes for specs in self.shards.values() for spec in specs)
        weight_map = {spec.name: file for file, specs in self.shards.items() for spec in specs}
        files: dict[str, Any] = {_CONFIG: dict(self.config)}
        if list(self.shards) != [_WEIGHTS]:
            files[_INDEX] = {'metadata': {'total_size': total}, 'weight_map': weight_map}
        if self.second_norm:
            files[_CONFIG] |= {'configuration_files': [_CONFIG_5, _CONFIG_5_24]}
            files[_CONFIG_5_24] = dict(self.config)
            files[_CONFIG_5] = {**self.config, 'transformers_weights': _INDEX_5}
            files[_INDEX_5] = {'metadata': {'total_size': total}, 'weight_map': {**weight_map, _FINAL_NORM: _NORM_5}}
        return files

    @property
    def files(self) -> tuple[str, ...]:
        """The names of all files."""
        return (*self.texts, *self.shards, *([_NORM_5] if self.second_norm else []))


def export_hf(
    checkpoint: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    options: ExportOptions = ExportOptions(),  # noqa: B008 - frozen
) -> ExportReport:
    """Writes a T5 as a directory that ``transformers`` loads with ``from_pretrained``.

    Args:
      checkpoint: a run's directory, a step's directory, or the manifest file.
      directory: on a local file system; must not exist, or be empty.
      config: entries of ``config.json`` that the weights do not determine: a mapping, JSON text, or a file, such as a model's
        original ``config.json``. Needed for LongT5 with local attention
        (``{"model_type": "longt5", "encoder_attention_type": "local"}``), which has T5's names, and for another
        activation than relu or gelu (UL2: ``{"feed_forward_proj": "gated-silu"}``).
      options: see :class:`ExportOptions`.

    Raises:
      UnsupportedFormatError: Hugging Face has no class for the model, with the names that do not match; or ``config``
        contradicts the weights.
      TreeMismatchError: arrays are missing, or their shapes are inconsistent.
      OutputExistsError: the directory is not empty, and ``options.force`` is not set.
      CheckpointNotFoundError: no such checkpoint.
      FormatError: the checkpoint is damaged, or in another format.
      StorageError: the checkpoint cannot be read, or the model cannot be written.
    """
    started = time.monotonic()
    refuse_options(options, ('select', 'cast_leaves'), 'a Hugging Face model')
    target = local_output(directory)
    check_output(target, options.force, _is_exported_file)
    sources = open_sources(checkpoint, options.step)
    refuse_inside(target, sources.located.storage.local_path(sources.located.directory))
    plan = _plan(sources, read_config(config), options)
    total = sum(math.prod(pair.shape) * plan.dtypes[pair.leaf].itemsize for pair in plan.pairs)
    if not options.dry_run:
        with (
            sources.identity.reading(),
            output(target, options.force, _is_exported_file) as temporary,
            _writers(temporary, plan) as writers,
        ):
            _write(sources, plan, writers, Meter(options.progress, total), options.piece_bytes)
            for name, contents in plan.texts.items():
                with foreign_errors(temporary, writing=True):
                    write_synced(os.path.join(temporary, name), f'{json.dumps(contents, indent=2)}\n'.encode())
    mapped = {pair.leaf: pair.tensors for pair in plan.pairs}
    dropped = (*(name for name in sources.arrays if name not in mapped), *sources.others)
    seconds = time.monotonic() - started
    return ExportReport(target, plan.config['model_type'], plan.files, total, mapped, dropped, seconds, options.dry_run)


def _is_exported_file(name: str) -> bool:
    return name.endswith(_OURS) or name in (_CONFIG, _CONFIG_5, _CONFIG_5_24)


def _plan(sources: Sources, given: Mapping[str, Any], options: ExportOptions) -> _Plan:
    shapes = {name: source.shape for name, source in sources.arrays.items()}
    model, layout = model_of_leaves(shapes, attention_of(given))
    pairs = pairs_of(model, layout)
    check_leaves(pairs, shapes, layout.prefix, sources.located.url)
    config = config_of(model, given)
    wanted = None if options.cast is None else options.cast.dtype
    dtypes = {pair.leaf: wanted or sources.arrays[pair.leaf].dtype for pair in pairs}
    for leaf, dtype in dtypes.items():
        check_dtype(leaf, dtype)
    names = {dtype.name for dtype in dtypes.values()}
    if len(names) == 1:
        config['torch_dtype'] = names.pop()
    specs = [TensorSpec(name, dtypes[pair.leaf], pair.tensor_shape) for pair in pairs for name in pair.tensors]
    copies = _COPIES if needs_embed_tokens(model, config) else ()
    specs += [dataclasses.replace(spec, name=name) for spec in specs if spec.name == _EMBEDDING for name in copies]
    second_norm = needs_larger_norm(model, config)
    text = json.dumps({'step': sources.located.step, **dataclasses.asdict(layout)})
    metadata = {'format': 'pt', LAYOUT_KEY: text}
    shards = _shards(specs, options.max_shard_bytes, second_norm)
    return _Plan(pairs, dtypes, shards, config, metadata, second_norm, copies)


def _shards(specs: Sequence[TensorSpec], limit: int, apart: bool) -> dict[str, list[TensorSpec]]:
    """Assigns tensors to files, in order; with ``apart`` the final norm to a separate file, the last one."""
    files: list[list[TensorSpec]] = [[]]
    last = [spec for spec in specs if apart and spec.name == _FINAL_NORM]
    for spec in specs:
        if spec in last:
            continue
        if files[-1] and sum(other.nbytes for other in files[-1]) + spec.nbytes > limit:
            files.append([])
        files[-1].append(spec)
    files += [last] if last else []
    if len(files) == 1:
        return {_WEIGHTS: files[0]}
    return {f'model-{i:05}-of-{len(files):05}.safetensors': shard for i, shard in enumerate(files, 1)}


@contextlib.contextmanager
def _writers(directory: str, plan: _Plan) -> Generator[dict[str, TensorWriter]]:
    """Yields the open file of each tensor, and that of the second norm by its file name; makes all files durable at the end."""
    shards = dict(plan.shards)
    if plan.second_norm:
        shards[_NORM_5] = [next(spec for spec in shards[list(shards)[-1]] if spec.name == _FINAL_NORM)]
    files: dict[str, TensorWriter] = {}
    try:
        for name, specs in shards.items():
            files[name] = TensorWriter(os.path.join(directory, name), specs, plan.metadata)
        by_tensor = {spec.name: files[name] for name, specs in plan.shards.items() for spec in specs}
        yield by_tensor | {name: file for name, file in files.items() if name == _NORM_5}
        for file in files.values():
            file.close()
    finally:
        for file in files.values():
            file.abort()


def _write(sources: Sources, plan: _Plan, writers: Mapping[str, TensorWriter], meter: Meter, piece_bytes: int) -> None:
    for pair in plan.pairs:
        source, axis, dtype = sources.arrays[pair.leaf], pair.row_axis, plan.dtypes[pair.leaf]
        for box in boxes_of(source, axis, piece_bytes):
            values = cast(source.read(box.slices), dtype, pair.leaf)
            row = box[axis][0] * pair.rows_per_index
            for name, rows in zip(pair.tensors, pair.to_tensors(values), strict=True):
                for copy in (name, *(plan.copies if name == _EMBEDDING else ())):
                    writers[copy].write(copy, row, rows)
            if plan.second_norm and pair.tensors == (_FINAL_NORM,):
                # Computed in double precision, so that it is rounded only once.
                larger = values.astype(np.float64) * math.sqrt(plan.config['d_model'])
                writers[_NORM_5].write(_FINAL_NORM, row, cast(larger, dtype, pair.leaf))
            meter.add(values.nbytes)

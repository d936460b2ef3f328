"""Converts TensorFlow checkpoints of Mesh-TensorFlow's T5.

No model is needed, since the structure follows from the checkpoint's names. Local checkpoints are read in slices without
TensorFlow (``convert/tf/bundle.py``). TensorFlow's own reader reads other checkpoints and those at a URL, in whole tensors.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.catalog.locate import locate
from t5ckpt.convert.options import ConvertOptions
from t5ckpt.convert.source import Source, warn_no_optimizer
from t5ckpt.convert.tf.bundle import read_bundle
from t5ckpt.convert.tf.rules import (
    PARAM_STATES,
    STEP,
    T5_RULES,
    check_complete,
    with_all_slots,
    with_shared_relpos,
)
from t5ckpt.core.leaf_path import path_of
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingDependencyError,
    T5CkptError,
    UnsupportedFormatError,
    UnsupportedLeafError,
)
from t5ckpt.format.dtypes import is_storable
from t5ckpt.format.names import MANIFEST
from t5ckpt.lazy import LazyArray, LazyThreadPoolArray
from t5ckpt.reading.checkpoint_files import read_source
from t5ckpt.reading.contents import read_contents
from t5ckpt.storage import foreign_errors
from t5ckpt.translate import CheckpointTranslator
from t5ckpt.tree.leaf_table import LeafTable

__all__ = ['T5_RULES', 'TfCheckpoint', 'open_tf', 'tf_leaves']

_STATE_FILE = 'checkpoint'
_STATE_BYTES = 2**20
_DATA_FILE = re.compile(r'(.*)\.(?:index|data-\d{5}-of-\d{5})')


@dataclasses.dataclass(frozen=True)
class TfCheckpoint:
    """An open TensorFlow checkpoint.

    Attributes:
      prefix: of the names of its files.
      tensors: lazy arrays by name.
    """

    prefix: str
    tensors: Mapping[str, LazyArray]

    @property
    def source(self) -> dict[str, Any]:
        """The identity of the checkpoint: its prefix, and the sizes and times of its files if they are local."""
        folder, name = os.path.split(self.prefix)
        files: dict[str, list[int]] = {}
        if os.path.isdir(folder):
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                match = _DATA_FILE.fullmatch(entry.name)
                if match is not None and match[1] == name:
                    files[entry.name] = [entry.stat().st_size, entry.stat().st_mtime_ns]
        return {'format': 'tf', 'path': self.prefix, 'files': files}


def open_tf(path: str | os.PathLike[str]) -> TfCheckpoint:
    """Opens a TensorFlow checkpoint: reads its index and no tensor.

    Args:
      path: a directory, for its latest checkpoint; a prefix such as ``dir/model.ckpt-1000000``; or one of its files.

    Raises:
      CheckpointNotFoundError: there is no checkpoint; the message lists the contents of the directory.
      CorruptCheckpointError, UnsupportedFormatError, MissingDependencyError.
    """
    text = os.fspath(path)
    if '://' in text:
        return _open_with_tensorflow(text)
    prefix = _prefix(os.path.abspath(os.path.expanduser(text)))
    if not os.path.isfile(f'{prefix}.index'):
        # The format before 2016 is one file without an index.
        return _open_with_tensorflow(prefix)
    try:
        return TfCheckpoint(prefix, read_bundle(prefix))
    except UnsupportedFormatError as error:
        if importlib.util.find_spec('tensorflow') is None:
            raise UnsupportedFormatError(f'{error} Install it: pip install tensorflow') from error
        return _open_with_tensorflow(prefix)


def _prefix(path: str) -> str:
    match = _DATA_FILE.fullmatch(path)
    if match is not None:
        return match[1]
    if os.path.isdir(path):
        return _latest_in(path)
    if not os.path.isfile(path) and not os.path.isfile(f'{path}.index'):
        raise CheckpointNotFoundError(
            f'{path} is neither a directory nor the prefix of a TensorFlow checkpoint. Check the path.'
        )
    return path


def _latest_in(directory: str) -> str:
    """The prefix of the checkpoint that the state file names, or of the only one in the directory."""
    prefixes = sorted(name.removesuffix('.index') for name in os.listdir(directory) if name.endswith('.index'))
    state = os.path.join(directory, _STATE_FILE)
    if os.path.exists(state) and not os.path.isdir(state):
        with foreign_errors(state):
            text = read_source(state, _STATE_BYTES).decode(errors='replace')
        match = re.search(r'^model_checkpoint_path: *"(.*)"', text, re.MULTILINE)
        # Only the base name counts, since the directory may have been copied.
        if match is not None and os.path.basename(match[1]) in prefixes:
            return os.path.join(directory, os.path.basename(match[1]))
    if not prefixes:
        _refuse_readable(directory)
        below = os.path.join(directory, 'variables', 'variables')
        if os.path.exists(f'{below}.index'):
            raise CheckpointNotFoundError(f'{directory} is a SavedModel, whose checkpoint is {below}. Pass that.')
    if len(prefixes) != 1:
        contents = (
            f'several TensorFlow checkpoints: {", ".join(prefixes[:10])}. Pass one' if prefixes else 'no file *.index'
        )
        raise CheckpointNotFoundError(f'{directory} has {contents}.')
    return os.path.join(directory, prefixes[0])


def _refuse_readable(directory: str) -> None:
    """Raises UnsupportedFormatError if t5ckpt reads the directory, so that TensorFlow's conversion is not what it needs."""
    try:
        located = locate(directory)
        read_contents(located)
    except T5CkptError:
        return
    description = (
        "in T5X's format already and needs no conversion"
        if located.manifest == MANIFEST
        else 'in the layout of Orbax or Flax. Convert it from that format'
    )
    raise UnsupportedFormatError(f'{directory} has no file *.index: it is {description}.')


def _open_with_tensorflow(path: str) -> TfCheckpoint:
    try:
        import tensorflow as tf
    except ImportError as error:
        raise MissingDependencyError(
            f"{path}: only TensorFlow reads it: pip install tensorflow, or pip install 't5ckpt[tf]'"
        ) from error
    try:
        if tf.io.gfile.isdir(path):
            latest = tf.train.latest_checkpoint(path)
            if latest is None:
                raise CheckpointNotFoundError(f'{path}: no TensorFlow checkpoint in this directory.')
            path = latest
        reader = tf.train.load_checkpoint(path)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    except (tf.errors.NotFoundError, ValueError) as error:
        if isinstance(error, CheckpointNotFoundError):
            raise
        raise CheckpointNotFoundError(f'{path} is not a TensorFlow checkpoint ({error!s:.200}).') from error
    except (tf.errors.OpError, RuntimeError) as error:
        raise CorruptCheckpointError(f'{path}: TensorFlow cannot read it ({error!s:.200}).') from error

    def read(name: str) -> np.ndarray:
        try:
            return np.asarray(reader.get_tensor(name))
        except (tf.errors.OpError, RuntimeError) as error:
            raise CorruptCheckpointError(f'{path}: {name} cannot be read ({error!s:.200}).') from error

    def lazy(name: str) -> LazyArray:
        return LazyThreadPoolArray(shapes[name], np.dtype(dtypes[name].as_numpy_dtype), lambda: read(name))

    return TfCheckpoint(path, {name: lazy(name) for name in sorted(shapes)})


def tf_leaves(
    checkpoint: TfCheckpoint,
    translator: CheckpointTranslator | None = None,
    options: ConvertOptions = ConvertOptions(),  # noqa: B008 - frozen
) -> Source:
    """The leaves of a TensorFlow checkpoint under T5X's names.

    Args:
      checkpoint: from :func:`open_tf`.
      translator: the rules; None takes those of T5.
      options: ``optimizer=False`` leaves out the slots of the optimizer.

    Raises:
      UnsupportedLeafError: a rule keeps a tensor of text.
      TreeMismatchError: a name has no rule, or two names would become the same leaf.
      MissingLeaves: with T5's rules, if the leaves of a T5 are incomplete.
    """
    rules = T5_RULES if translator is None else translator
    translation = with_shared_relpos(rules.translate(checkpoint.tensors))
    leaves, mapped, dropped = translation.leaves, translation.mapped, translation.dropped
    for old, new in mapped.items():
        dtype = checkpoint.tensors[old].dtype
        # Text; a rule may have made an array of it.
        if leaves[new] is checkpoint.tensors[old] and not is_storable(dtype):
            raise UnsupportedLeafError(
                f'{old}: a tensor of dtype {dtype} cannot be saved. Drop it by a rule of translator= that returns (None, None).'
            )
    if not options.optimizer:
        leaves = {name: value for name, value in leaves.items() if not name.startswith(PARAM_STATES)}
        if len(leaves) == len(translation.leaves):
            warn_no_optimizer([path_of(name) for name in leaves])
        dropped += tuple(old for old, new in mapped.items() if new not in leaves)
        mapped = {old: new for old, new in mapped.items() if new in leaves}
    if translator is None:
        check_complete(leaves)
    has_slots = any(name.startswith(PARAM_STATES) for name in leaves)
    added = with_all_slots(leaves) if has_slots else {}
    # The rules of another model may give it the name that it has there.
    step = leaves.get(STEP, leaves.get('step'))
    if step is None:
        match = re.search(r'-(\d+)$', checkpoint.prefix)
        if match is not None and int(match[1]) <= np.iinfo(np.int32).max:
            step = added[STEP] = np.int32(match[1])
    table: LeafTable = {path_of(name): value for name, value in (leaves | added).items()}
    number = None if step is None else int(np.asarray(step))
    return Source(table, number, checkpoint.source, mapped, tuple(sorted(added)), tuple(sorted(dropped)))

"""Converts TensorFlow checkpoints of Mesh-TensorFlow's T5.

No model is needed, since the structure follows from the checkpoint's names. Tensors are read in slices without TensorFlow
(``convert/tf/bundle.py``).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

import numpy as np

from t5ckpt.catalog.locate import not_of_format
from t5ckpt.convert.options import ConvertOptions
from t5ckpt.convert.source import Source
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
from t5ckpt.core.text import some_of
from t5ckpt.errors import (
    CheckpointNotFoundError,
    UnsupportedLeafError,
)
from t5ckpt.format.dtypes import is_storable
from t5ckpt.lazy import LazyArray
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.storage import Storage, open_storage, split_path
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


def open_tf(path: str | os.PathLike[str]) -> TfCheckpoint:
    """Opens a TensorFlow checkpoint on any storage: reads its index and no tensor.

    Args:
      path: a directory, for its latest checkpoint; a prefix such as ``dir/model.ckpt-1000000``; or one of its files.

    Raises:
      CheckpointNotFoundError: there is no checkpoint; the message lists the contents of the directory.
      CorruptCheckpointError, UnsupportedFormatError, MissingDependencyError: see ``read_bundle``.
    """
    storage, (parent, name) = open_storage(path), split_path(path)
    match = _DATA_FILE.fullmatch(name)
    outer, name = open_storage(parent), name if match is None else match[1]
    if name and (outer.is_file(f'{name}.index') or outer.is_file(name)):
        prefix = outer.url(name)
    elif storage.root_kind() == 'dir':
        prefix = storage.url(_latest_in(storage))
    else:
        text = f'{path} is neither a directory nor the prefix of a TensorFlow checkpoint'
        raise not_of_format(os.fspath(path), text)
    return TfCheckpoint(prefix, read_bundle(prefix))


def _latest_in(storage: Storage) -> str:
    """The prefix of the checkpoint that the state file names, or of the only one in the directory."""
    where = storage.url()
    prefixes = sorted(name.removesuffix('.index') for name in storage.names('', '') if name.endswith('.index'))
    if storage.is_file(_STATE_FILE):
        text = CheckpointFiles.at(storage, '').read(_STATE_FILE, limit=_STATE_BYTES).decode(errors='replace')
        match = re.search(r'^model_checkpoint_path: *"(?:.*/)?(.*)"', text, re.MULTILINE)
        # Only the base name counts, since the directory may have been copied.
        if match is not None and match[1] in prefixes:
            return match[1]
    if len(prefixes) == 1:
        return prefixes[0]
    if prefixes:
        raise CheckpointNotFoundError(f'{where} has several TensorFlow checkpoints: {some_of(prefixes, 10)}. Pass one.')
    if storage.is_file('variables/variables.index'):
        below = storage.url('variables/variables')
        raise CheckpointNotFoundError(f'{where} is a SavedModel, whose checkpoint is {below}. Pass that.')
    raise not_of_format(where, f'{where} has no file *.index')


def tf_leaves(checkpoint: TfCheckpoint, options: ConvertOptions = ConvertOptions()) -> Source:  # noqa: B008 - frozen
    """The leaves of a TensorFlow checkpoint under T5X's names.

    Args:
      checkpoint: from :func:`open_tf`.
      options: ``translator``, and ``take`` and ``leave`` for T5X's names.

    Raises:
      UnsupportedLeafError: a rule keeps a tensor of text.
      UnmatchedPattern: a pattern matches no leaf.
      TreeMismatchError: a name has no rule, or two names would become the same leaf.
      MissingLeaves: with T5's rules, if the leaves of a T5 are incomplete.
    """
    rules = T5_RULES if options.translator is None else options.translator
    translation = with_shared_relpos(rules.translate(checkpoint.tensors))
    for old, new in translation.mapped.items():
        dtype = checkpoint.tensors[old].dtype
        # Text; a rule may have made an array of it.
        if translation.leaves[new] is checkpoint.tensors[old] and not is_storable(dtype):
            raise UnsupportedLeafError(
                f'{old}: a tensor of dtype {dtype} cannot be saved. Drop it by a rule of translator= (--rules '
                'FILE.py) that returns (None, None).'
            )
    taken = options.taken(translation.leaves)
    has_slots = any(name.startswith(PARAM_STATES) for name in taken)
    if options.translator is None:
        check_complete([name for name in translation.leaves if has_slots or not name.startswith(PARAM_STATES)])
    leaves = {name: value for name, value in translation.leaves.items() if name in taken}
    mapped = {old: new for old, new in translation.mapped.items() if new in taken}
    dropped = (*translation.dropped, *(old for old in translation.mapped if old not in mapped))
    added = with_all_slots(leaves) if has_slots else {}
    # The rules of another model may give it the name that it has there.
    step = translation.leaves.get(STEP, translation.leaves.get('step'))
    if step is None:
        match = re.search(r'-(\d+)$', checkpoint.prefix)
        if match is not None and int(match[1]) <= np.iinfo(np.int32).max:
            step = added[STEP] = np.int32(match[1])
    table: LeafTable = {path_of(name): value for name, value in (leaves | added).items()}
    number = None if step is None else int(np.asarray(step))
    return Source(table, number, checkpoint.prefix, mapped, tuple(sorted(added)), tuple(sorted(dropped)))

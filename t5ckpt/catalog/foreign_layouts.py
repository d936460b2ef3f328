"""Recognises directories and files of other programs, for error messages that say how to read them."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.catalog.layouts import ListedStep
from t5ckpt.catalog.listing import catalog_of
from t5ckpt.core.argument_kinds import checks_kinds
from t5ckpt.core.keys import join
from t5ckpt.core.text import counted, some_of
from t5ckpt.errors import CheckpointNotFoundError, T5CkptError, UnsupportedFormatError
from t5ckpt.format.manifest import is_whole
from t5ckpt.format.names import MANIFEST, parse_step_dir, step_dir
from t5ckpt.format.orbax_names import TREE_METADATA
from t5ckpt.format.safetensors import WHOLE_NAMES
from t5ckpt.storage import Entry, Storage, open_storage, split_path

_log = logging.getLogger('t5ckpt')

# A listing for each is a request to a bucket.
_MAX_RUNS = 20
_STEP = re.compile(r'(?:step[_-])?([0-9]+)')
# A directory is described by the first pattern that matches one of the names in it.
_MARKS = (
    (
        r'\.metadata|.*\.distcp',
        'a torch.distributed.checkpoint (DCP) directory, whose metadata is a pickle and is not read',
    ),
    (r'.*\.index|checkpoint\.index', 'a TensorFlow checkpoint, which T5X converts with convert_from_tf_checkpoint'),
    (r'.*\.safetensors(\.index\.json)?', 'a safetensors model, of which restore(path=...) takes a file or the index'),
    (r'pytorch_model.*\.bin|.*\.pth?', 'a PyTorch file, which needs pickle and is not read'),
    (r'\.zgroup|zarr\.json', 'a zarr group, such as a step of seqax, without a T5X manifest'),
)
# The same for the directory of a step: the files that it contains, a description, and how to read it.
_STEP_MARKS = (
    (
        {'.metadata'},
        'a run of torchtitan, or another one that saves with torch.distributed.checkpoint (DCP)',
        'Their metadata is a pickle and is not read: load them with PyTorch and save safetensors',
    ),
    ({'index', 'gda'}, 'a run of axlearn', "They are in axlearn's own layout and are not read: load them with axlearn"),
    ({'.zattrs', '.zgroup'}, 'a run of seqax', 'import_seqax of t5ckpt.convert.seqax converts them'),
)


# A file is recognised by its name, because it may be too large to read.
_FILES = (
    (
        ('.safetensors', '.safetensors.index.json'),
        'a safetensors file',
        'restore(path=...) and open_checkpoint read it, t5ckpt show lists it, t5ckpt import safetensors makes a checkpoint of it',
    ),
    (
        '.npz',
        'an npz file',
        'restore(path=...) and open_checkpoint read it, t5ckpt show lists it, t5ckpt import npz makes a checkpoint of it',
    ),
    ('.npy', 'one array of numpy', 'numpy.load reads it'),
    (
        ('.bin', '.pt', '.pth'),
        'a PyTorch file, which needs pickle and is not read',
        'load it with PyTorch and save safetensors',
    ),
)


def foreign_file(name: str) -> str | None:
    """Describes a file of another program by its name, with a cure, to end a sentence; None for a possible manifest."""
    return next((f'{what}, not a checkpoint: {cure}' for ends, what, cure in _FILES if name.endswith(ends)), None)


def not_a_run(storage: Storage) -> T5CkptError:
    """The error for a path that is not the directory of a run; for a file it says which program reads it."""
    where = storage.url()
    if storage.kind('') is None:
        return CheckpointNotFoundError(f'{where}: {catalog_of(storage).absence}. Check the path.')
    what = foreign_file(where)
    if what is not None:
        return UnsupportedFormatError(f'{where} is {what}.')
    return CheckpointNotFoundError(f'{where} is a file, not the directory of a run. Check the path.')


def foreign_layout(storage: Storage) -> str | None:
    """Describes the layout of a storage's root, to end a sentence; None for an unknown layout.

    Compares only names: those in the directory, and those in the latest directory that is named like a step.
    """
    entries = storage.entries()
    steps = {entry.name: int(match[1]) for entry in entries if entry.is_dir and (match := _STEP.fullmatch(entry.name))}
    if steps:
        latest = max(steps, key=lambda name: steps[name])
        names = {below.name for below in storage.entries(latest)}
        for marks, what, cure in _STEP_MARKS:
            if marks <= names:
                shown = ', '.join(str(step) for step in sorted(steps.values())[-5:])
                more = 'the last are ' if len(steps) > 5 else ''
                return f'{what}, with {counted(len(steps), "step")}: {more}{shown}. {cure}; {storage.url(join(latest))} is one'
    names = [entry.name for entry in entries]
    return next((text for mark, text in _MARKS if any(re.fullmatch(mark, name) for name in names)), None)


def model_file(storage: Storage) -> str | None:
    """The file with which the safetensors model in a directory is opened; None without a model."""
    return next((name for name in WHOLE_NAMES if storage.is_file(name)), None)


def no_checkpoint(storage: Storage) -> CheckpointNotFoundError:
    """The error for a directory without a checkpoint; it lists the contents and names a file that can be read."""
    model, runs = model_file(storage), runs_below(storage)
    cure = 'Check the path.'
    if model is not None:
        cure = f'Give the path of the file: {storage.url(model)}'
    elif runs:
        cure = f'Give the path of one: {storage.url(runs[0])}'
    held = f'it holds {counted(len(runs), "run")}: {some_of(runs, 5)}' if runs else _contents_text(storage)
    return CheckpointNotFoundError(f'{storage.url()}: no complete checkpoint there; {held}. {cure}')


def no_step(storage: Storage, step: int, steps: Sequence[ListedStep], cure: str) -> T5CkptError:
    """The error for a step that a run lacks, with its complete steps and how to name one of them."""
    if not steps and not catalog_of(storage).exists():
        return not_a_run(storage)
    where = f'{storage.url(step_dir(step))}: step {step} does not exist, complete steps are'
    if not steps:
        return CheckpointNotFoundError(f'{where}: none.')
    return CheckpointNotFoundError(f'{where}: {", ".join(str(each.step) for each in steps[-10:])}. {cure}')


def runs_below(storage: Storage) -> list[str]:
    """The directories with steps in a directory that is not a run; at most so many are looked into."""
    found: list[str] = []
    for entry in storage.entries()[:_MAX_RUNS]:
        with contextlib.suppress(T5CkptError):
            if entry.is_dir and any(_is_step(below) for below in storage.entries(entry.name)):
                found.append(entry.name)
    return found


def _is_step(entry: Entry) -> bool:
    return entry.is_dir and (parse_step_dir(entry.name) is not None or entry.name.isdigit())


def _contents_text(storage: Storage) -> str:
    if storage.kind('') != 'dir':
        return 'there is no such directory'
    names = [entry.name for entry in storage.entries()]
    if not names:
        return 'the directory is empty'
    known = foreign_layout(storage)
    looks = '' if known is None else f'; it looks like {known}'
    return f'it holds {counted(len(names), "entry", "entries")}: {some_of(names, 5)}{looks}'


def unread_contents(storage: Storage) -> str | None:
    """Describes the steps in a run that t5ckpt does not read, to end a sentence; None if there are none."""
    known = foreign_layout(storage)
    if known is not None:
        return f'it looks like {known}'
    holding = catalog_of(storage).incomplete()
    return f'it holds {", ".join(holding[:5])}, none of which is a complete checkpoint' if holding else None


class CheckpointTypes(enum.Enum):
    """T5X's names of checkpoint formats (t5x/checkpoint_utils.py)."""

    ORBAX = 'ORBAX'
    T5X = 'T5X'
    T5X_TF = 'T5X_TF'


@checks_kinds
def detect_checkpoint_type(
    checkpoint_path: str | os.PathLike[str],
    expected: CheckpointTypes | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> CheckpointTypes:
    """The format of a checkpoint, by T5X's rules.

    Args:
      checkpoint_path: its file ``checkpoint``, or the directory of a step.
      expected: another format than this one is logged as a warning.
      storage_options: see docs/storage.md.

    Returns:
      ORBAX if the directory has a file ``_METADATA``, T5X_TF for the state file of a TensorFlow checkpoint, else T5X.

    Raises:
      CheckpointNotFoundError: there is no such file.
      UnsupportedFormatError: the file is neither a state file of TensorFlow nor one complete msgpack map.
    """
    parent, name = split_path(checkpoint_path)
    storage = open_storage(parent, storage_options)
    if not storage.is_file(name):
        storage, name = open_storage(checkpoint_path, storage_options), MANIFEST
    found = _type_of(storage, name)
    if expected is not None and found is not expected:
        text = 'Expected the checkpoint at %s to be %s format, but the actual detected format was %s.'
        _log.warning(text, storage.url(name), expected, found)
    return found


def _type_of(storage: Storage, name: str) -> CheckpointTypes:
    if storage.is_file(TREE_METADATA):
        return CheckpointTypes.ORBAX
    data = storage.read(name)
    if data.startswith(b'model_checkpoint_path'):
        return CheckpointTypes.T5X_TF
    if not is_whole(data):
        raise UnsupportedFormatError(
            f'{storage.url(name)} is neither one complete msgpack map nor the state file of a TensorFlow checkpoint, so its '
            'format is unknown. Check the path, or copy the checkpoint again.'
        )
    return CheckpointTypes.T5X

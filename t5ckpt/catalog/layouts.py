"""Determines the layout in which a step of a run is stored, for all listings, restores and saves.

    t5x     ``checkpoint_<step>/checkpoint`` begins like a manifest; written by t5ckpt and T5X's own checkpointer
    orbax   ``checkpoint_<step>`` as T5X writes it through Orbax, or ``<step>`` of an Orbax CheckpointManager,
            with its ``step_prefix`` and its padding; on Google's storage with ``commit_success.txt``
    flax    ``checkpoint_<step>`` is a file, as ``flax.training.checkpoints`` writes it
    zarr    ``step-<step>`` of Levanter: a tree of zarr arrays, complete with its ``metadata.json``; by its path also any
            other directory tree of zarr arrays
    t5x-padded  as t5x, with leading zeros in the number; T5X lists such steps but does not write them

Steps in all layouts are listed and restored. Only steps in the layout t5x are written or replaced,
and keep policies delete only these.

A step whose manifest is cut off or damaged is listed, and opening it raises the error.

Notes: reads the first bytes of each manifest; without a manifest, checks for six names. Does not load TensorStore.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import re
from collections.abc import Sequence

from t5ckpt.core.keys import join
from t5ckpt.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    StorageError,
    T5CkptError,
    UnsupportedFormatError,
)
from t5ckpt.format.manifest import begins_state, facts_range, version_of
from t5ckpt.format.names import (
    MANIFEST,
    STEP_PREFIX,
    parse_padded_step,
    parse_prefixed_step,
    parse_step_dir,
    parse_step_name,
    step_dir,
)
from t5ckpt.format.orbax import COMMITTED, OCDBT_MANIFEST, PLACEHOLDER, STEP_METADATA, TREE_METADATA
from t5ckpt.storage import Storage

T5X, ORBAX, FLAX, PADDED, ZARR = 't5x', 'orbax', 'flax', 't5x-padded', 'zarr'
LEVANTER = 'metadata.json'
# What is in no tree of zarr arrays. A step that is being written has arrays, but not yet its manifest.
_OTHER_LAYOUT = re.compile(
    rf'{MANIFEST}|{STEP_PREFIX}.*|step-[0-9]+|.*\.orbax-checkpoint-tmp.*|{TREE_METADATA}|{STEP_METADATA}|t5ckpt\..*json'
)
# Directories that are listed in search of an array.
_SEARCHED = 20
# The version of a manifest, and the beginning of its facts with their checksum.
_HEAD_BYTES = 64
# More than the leaves before the first array of a manifest take.
_PLACEHOLDER_BYTES = 2**20
# The usual names of the item that holds the tree.
_ITEMS = ('state', 'default')
_ORBAX_MARKERS = (TREE_METADATA, STEP_METADATA, OCDBT_MANIFEST)


def number_of(name: str) -> int:
    """The number of a step, from the name of its directory or file."""
    return parse_prefixed_step(name) or 0


@dataclasses.dataclass(frozen=True)
class ListedStep:
    """A complete step of a run. It may be damaged, which shows when it is opened.

    Attributes:
      step: its number.
      name: of its directory, or of its file in Flax's layout, in the run's directory.
      layout: ``'t5x'``, ``'orbax'``, ``'flax'``, ``'zarr'`` or ``'t5x-padded'``.
      manifest: the file to decode, in :attr:`directory`; '' in Orbax's newer layout, which has none.
      head: the first bytes of the manifest, with the checksum of its facts.
      error: why its files could not be inspected; its layout is unknown then.
    """

    step: int
    name: str
    layout: str = T5X
    manifest: str = MANIFEST
    head: bytes = b''
    error: T5CkptError | None = None

    @property
    def directory(self) -> str:
        """The directory of the step's files, a key of the run's storage; '' for a single file."""
        return '' if self.layout == FLAX else self.name

    @property
    def is_t5x(self) -> bool:
        """Whether the step is in T5X's layout, so that t5ckpt may replace and delete it."""
        return self.layout == T5X and self.error is None


def other_layout(where: str, layout: str, refused: str, cure: str) -> UnsupportedFormatError:
    """The error of an operation that t5ckpt does only on steps in T5X's layout.

    Args:
      where: the step.
      layout: its layout.
      refused: a relative clause that names the operation, such as 'which are not pruned', without a full stop.
      cure: the last sentence, which is replaced for a step with leading zeros in its name.
    """
    if layout == PADDED:
        cure = f'Rename it to {step_dir(number_of(where.rpartition("/")[2]))} first.'
    return UnsupportedFormatError(f'{where} is in the layout of {layout}, {refused}. {cure}')


def orbax_marks(directory: str) -> list[str]:
    """Files of which each Orbax directory has at least one: files of a tree, or of the item with the tree."""
    marks = [*_ORBAX_MARKERS, *(f'{item}/{TREE_METADATA}' for item in _ITEMS)]
    return [join(directory, mark) for mark in marks]


def is_orbax(storage: Storage, directory: str) -> bool:
    """Whether a directory contains one of :func:`orbax_marks`."""
    return any(storage.are_files(orbax_marks(directory)))


def is_levanter(storage: Storage, directory: str) -> bool:
    """Whether a directory is a complete step of Levanter, which writes the file last."""
    try:
        facts = json.loads(storage.heads([join(directory, LEVANTER)], 2**16)[0] or b'')
    except (ValueError, RecursionError):
        return False
    return isinstance(facts, dict) and {'step', 'timestamp'} <= facts.keys()


def is_zarr_tree(storage: Storage, name: str) -> bool:
    """Whether the root of a storage, a directory with this name, has an array of zarr below it and nothing of another layout."""
    # With the name of a step, it lacks its manifest.
    waiting = [] if name.startswith(STEP_PREFIX) else ['']
    for _ in range(_SEARCHED):
        if not waiting:
            break
        directory = waiting.pop()
        entries = storage.entries(directory)
        names = {entry.name for entry in entries}
        if any(map(_OTHER_LAYOUT.fullmatch, names)):
            break
        metadata = join(directory, 'zarr.json')
        is_array = '.zarray' in names or ('zarr.json' in names and b'"array"' in storage.read(metadata, 0, 2**16))
        if directory and is_array:
            return True
        waiting += [join(directory, entry.name) for entry in reversed(entries) if entry.is_dir]
    return False


def is_state_file(storage: Storage, key: str) -> bool:
    """Whether a file begins like a manifest or a state of Flax, whatever its name; a damaged one does, too."""
    return begins_state(storage.heads([key], 8)[0] or b'')


def _layout_of(storage: Storage, directory: str) -> str | None:
    """The layout of a complete checkpoint of another program in a directory, by the files that its writer writes last."""
    if is_orbax(storage, directory) and _is_committed(storage, directory):
        return ORBAX
    return ZARR if is_levanter(storage, directory) else None


def is_checkpoint(storage: Storage, directory: str) -> bool:
    """Whether a directory is one checkpoint, by the files in it; its name does not matter, and it may be damaged."""
    return is_state_file(storage, join(directory, MANIFEST)) or _layout_of(storage, directory) is not None


def has_placeholder(manifest: bytes) -> bool:
    """Whether a complete manifest is in Orbax's older layout, in which a text replaces each array; one with facts is not."""
    return facts_range(manifest) is None and PLACEHOLDER.encode() in manifest


def inspect_name(storage: Storage, name: str) -> ListedStep | None:
    """The complete step with this name in the run, in any layout; None if there is none.

    Raises:
      StorageError: its files cannot be inspected.
    """
    found = inspected(storage, [name] if parse_prefixed_step(name) is not None else [])
    return readable(found[0]) if found else None


def readable(found: ListedStep) -> ListedStep:
    """The same step; raises the error of one whose files could not be inspected."""
    if found.error is not None:
        raise found.error
    return found


def inspected(storage: Storage, names: Sequence[str]) -> list[ListedStep]:
    """The complete steps among some names, ascending, with the first bytes of their manifests.

    Of a step in two layouts, that in T5X's.

    Raises:
      StorageError: an object store failed. On a disk, a step that cannot be inspected has the error.
    """
    found: list[ListedStep | None] = []
    for some in [[name] for name in names] if storage.commits_by_rename else [names]:
        try:
            heads = storage.heads([join(name, MANIFEST) for name in some], _HEAD_BYTES)
            found += [_inspect(storage, name, head) for name, head in zip(some, heads, strict=True)]
        except CheckpointNotFoundError:
            # Another process has deleted it since it was listed.
            continue
        except StorageError as error:
            if not storage.commits_by_rename:
                raise
            # With another prefix, a directory that may not be read counts as no step.
            if _is_own(some[0]) or not (isinstance(error, AccessDeniedError) or error.errno == errno.ELOOP):
                found.append(ListedStep(number_of(some[0]), some[0], error=error))
    steps = sorted(filter(None, found), key=lambda each: (each.step, each.is_t5x))
    return [*{each.step: each for each in steps}.values()]


def _is_own(name: str) -> bool:
    return parse_padded_step(name) is not None or parse_step_name(name) is not None


def _inspect(storage: Storage, name: str, head: bytes | None) -> ListedStep | None:
    """The complete step with this name, whose manifest begins with ``head``; None if there is none."""
    step = number_of(name)
    if head is not None and _is_own(name) and begins_state(head):
        if version_of(head) is None:
            # The first array is replaced by a text, which is among the first bytes.
            head = storage.read(join(name, MANIFEST), 0, _PLACEHOLDER_BYTES)
        if not (name.isdecimal() or has_placeholder(head)):
            return ListedStep(step, name, T5X if parse_padded_step(name) is None else PADDED, head=head)
        return ListedStep(step, name, ORBAX) if _is_committed(storage, name) else None
    layout = _layout_of(storage, name)
    if layout is not None:
        return ListedStep(step, name, layout, manifest='')
    is_flax = parse_step_dir(name) is not None and is_state_file(storage, name)
    return ListedStep(step, name, FLAX, manifest=name) if is_flax else None


def _is_committed(storage: Storage, directory: str) -> bool:
    """Whether Orbax has written a directory completely; on storages with rename, directories of Orbax are always complete."""
    return not storage.orbax_commits or any(
        storage.are_files([join(directory, item, COMMITTED) for item in ('', *_ITEMS)])
    )

"""Deletes steps in the layouts of Orbax and Flax, on request (``prune_other_layouts``).

A step is deleted only if its layout is certain: :func:`unknown_to_its_writer` returns the files that the writer of the layout
does not write, and a step with such files stays. The directory is renamed to ``checkpoint_<step>.pruned-<unix seconds>`` under
the leases of a deletion, checked again, and removed; garbage collection removes the leftovers of a crash. A single file of Flax
is unlinked.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgpack

from t5ckpt.catalog.layouts import FLAX, ORBAX, PADDED, ZARR, ListedStep
from t5ckpt.catalog.orbax_facts import read_orbax_facts
from t5ckpt.commit.bucket_deletion import Hidden
from t5ckpt.commit.removal import check_known, few, foreign_files, keys_below, move_aside, rename_aside
from t5ckpt.commit.step_facts import known_sidecar
from t5ckpt.commit.step_lease import acquire_to_hide
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError, FormatError, StorageError, T5CkptError
from t5ckpt.format.names import PINNED
from t5ckpt.format.orbax import OCDBT_MANIFEST, STEP_METADATA, TREE_METADATA, is_orbax_key, orbax_array
from t5ckpt.format.sidecar import NO_SIDECAR, Sidecar
from t5ckpt.policies import StepInfo
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')

_TREE_MARKS = (TREE_METADATA, OCDBT_MANIFEST)
_ARRAY_METADATA = ('.zarray', 'zarr.json')
_OCDBT = re.compile(r'ocdbt\.process_.*')
_HEAD_BYTES = 4096


def pruning_refusal(storage: Storage) -> ValueError:
    """The error for a store that cannot rename: no single operation there hides a step of Orbax."""
    return ValueError(
        f'{storage.url()}: steps in other layouts are deleted on file systems only, since object stores cannot rename a '
        'directory. Leave prune_other_layouts (--other-layouts) out, and remove them with the program that wrote them.'
    )


def infos_of_others(
    storage: Storage, steps: Sequence[ListedStep], leased: Collection[int], given: Mapping[str, Mapping[int, float]]
) -> list[StepInfo]:
    """The facts about steps in other layouts for a keep policy.

    Args:
      storage: the run.
      steps: in other layouts than T5X's.
      leased: those with a read lease.
      given: the metrics from the metric source, by name and step. Those that were saved with a step take precedence.

    Returns:
      The facts. The time is that of the save in Orbax's metadata, else that of the directory. Metrics that cannot be read are
      logged and left out; :func:`reason_to_stay` keeps such a step.
    """
    times = {entry.name: entry.mtime for entry in storage.entries()} if steps else {}
    infos: list[StepInfo] = []
    for listed in steps:
        try:
            saved = _saved_facts(storage, listed)
        except T5CkptError as error:
            _log.warning('t5ckpt: %s: its metrics are not read: %s', storage.url(listed.name), error)
            saved = NO_SIDECAR
        created = times.get(listed.name) if saved.created_unix is None else saved.created_unix
        metrics = {name: values[listed.step] for name, values in given.items() if listed.step in values}
        pinned = listed.layout != FLAX and storage.is_file(join(listed.name, PINNED))
        infos.append(
            StepInfo(listed.step, pinned, listed.step in leased, created or None, {**metrics, **saved.metrics})
        )
    return infos


def _saved_facts(storage: Storage, listed_step: ListedStep) -> Sidecar:
    if listed_step.layout == ORBAX:
        return read_orbax_facts(storage, listed_step.name)
    return known_sidecar(storage, listed_step.name) if listed_step.layout == PADDED else NO_SIDECAR


def reason_to_stay(storage: Storage, listed_step: ListedStep) -> str | None:
    """The reason not to delete a step in another layout; None if the writer of the layout wrote all its files."""
    if listed_step.layout == ZARR:
        return 'only Levanter deletes its steps'
    try:
        unknown = unknown_to_its_writer(storage, listed_step.name, listed_step.layout)
        _saved_facts(storage, listed_step)
    except FormatError as error:
        return str(error)
    return (
        f'{listed_step.layout} does not write {few(unknown)}: move it away, so that the step can be deleted'
        if unknown
        else None
    )


def unknown_to_its_writer(storage: Storage, name: str, layout: str) -> list[str]:
    """The files of a step that the writer of its layout does not write, relative to the step; empty if the layout is certain.

    Orbax 0.12.8 writes ``_CHECKPOINT_METADATA`` and ``commit_success.txt`` into a step (``metadata/checkpoint.py`` and
    ``path/atomicity_types.py`` in its ``_src``), and a directory for each item that the former names. A tree, in an item or
    in the step itself, is ``_METADATA``, ``_sharding``, ``array_metadatas/process_<n>``, ``_strings.json``, and either
    OCDBT's ``manifest.ocdbt``, ``d/`` and ``ocdbt.process_<n>/`` (``path/format_utils.py`` and
    ``serialization/ocdbt_process_spec.py``) or a zarr directory for each array with, in 2023, the msgpack file
    ``checkpoint``. JSON items are one file, ``metadata`` or ``metrics``. T5X's item ``dataset`` has files ``train_ds-*``,
    Grain's ``process_<n>-of-<m>.json``. Flax writes one msgpack map with string keys.

    Raises:
      UnsupportedFormatError: T5X's step with zeros in its name was written by a newer program.
    """
    if layout == FLAX:
        return [] if _begins_as_flax(storage.read_range(name, 0, _HEAD_BYTES)) else [name]
    if layout == PADDED:
        check_known(storage, name)
        return foreign_files(storage, name)
    keys = keys_below(storage, name)
    return unknown_to_orbax(keys, _items(storage, name) if STEP_METADATA in keys else ())


def unknown_to_orbax(keys: Collection[str], items: Iterable[str]) -> list[str]:
    """The files that Orbax does not write into a step.

    Args:
      keys: all files of the step, relative to it.
      items: the item directories that the step's metadata names.
    """
    homes = set(items)
    arrays = set[str]()
    for key in keys:
        directory, _, name = key.rpartition('/')
        if name in _TREE_MARKS and directory and '/' not in directory and not _OCDBT.fullmatch(directory):
            homes.add(directory)
        if name in _ARRAY_METADATA:
            arrays.add(directory)

    def is_known(key: str) -> bool:
        top, slash, below = key.partition('/')
        item = f'{top}/' if slash and top in homes else ''
        array = orbax_array(below if item else key)
        if array is not None:
            return f'{item}{array}' in arrays
        return is_orbax_key(below if item else key, in_item=bool(item))

    return [key for key in keys if not is_known(key)]


def _items(storage: Storage, name: str) -> list[str]:
    try:
        metadata: Any = json.loads(storage.read(join(name, STEP_METADATA)))
    except (ValueError, CheckpointNotFoundError):
        return []
    handlers = metadata.get('item_handlers') if isinstance(metadata, Mapping) else None
    return [str(item) for item in handlers] if isinstance(handlers, Mapping) else []


def _begins_as_flax(head: bytes) -> bool:
    unpacker = msgpack.Unpacker()
    unpacker.feed(head)
    try:
        return unpacker.read_map_header() > 0 and isinstance(unpacker.unpack(), str)
    except (ValueError, msgpack.UnpackException):
        return False


def hide_other(storage: Storage, listed_step: ListedStep, clock: Clock) -> Hidden | None:
    """Makes a step in another layout invisible, in one atomic operation, under the write lease of the step.

    Returns:
      The argument of ``remove_hidden``; None if the step has a read lease, is pinned, or has files that its writer does not
      write.

    Raises:
      CheckpointNotFoundError: another process has deleted it.
      StorageError: it could not be made invisible, and is unchanged.
    """
    lease = acquire_to_hide(storage, listed_step.step, clock)
    try:
        if listed_step.step in lease.read_steps or reason_to_stay(storage, listed_step) is not None:
            return None
        if listed_step.layout == FLAX:
            storage.delete_file(listed_step.name)
            return Hidden('', listed_step.step)
        if storage.is_file(join(listed_step.name, PINNED)):
            return None
        doomed = rename_aside(storage, listed_step.name, listed_step.step, 'pruned', clock())
        added = (
            [PINNED]
            if storage.is_file(join(doomed, PINNED))
            else unknown_to_its_writer(storage, doomed, listed_step.layout)
        )
        if not added:
            return Hidden(doomed, listed_step.step)
        try:
            storage.publish(doomed, listed_step.name)
        except StorageError:
            # A writer has written the step.
            move_aside(storage, doomed, listed_step.step, clock(), added)
            raise
        return None
    finally:
        lease.release()

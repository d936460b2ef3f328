"""Lists the steps of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from t5ckpt.catalog.bucket_catalog import BucketCatalog
from t5ckpt.catalog.directory_catalog import DirectoryCatalog
from t5ckpt.catalog.facts_files import read_facts_file
from t5ckpt.catalog.layouts import ListedStep, Listing, inspect_name, is_checkpoint
from t5ckpt.catalog.run_catalog import RunCatalog
from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.format.manifest import facts_range
from t5ckpt.format.names import (
    MANIFEST,
    TRAIN_DS_PREFIX,
    parse_padded_step,
    parse_step_dir,
    parse_step_name,
    step_dir,
)
from t5ckpt.storage import Storage, open_storage

_HEAD_BYTES = 2**14


def catalog_of(storage: Storage) -> RunCatalog:
    """The catalog that finds the steps of a run."""
    return DirectoryCatalog(storage) if storage.commits_by_rename else BucketCatalog(storage)


def listing(storage: Storage) -> Listing:
    """The complete steps in a run, with their layouts, and the errors of those that could not be inspected."""
    return catalog_of(storage).listing()


def steps_in(storage: Storage) -> list[int]:
    """The numbers of the complete steps in a run, ascending, in any layout."""
    return listing(storage).numbers


def newest(storage: Storage) -> ListedStep | None:
    """The step with the largest number, in any layout, or None."""
    return catalog_of(storage).newest()


def inspect_step(storage: Storage, step: int) -> ListedStep | None:
    """The complete step with a number. Names with a prefix or leading zeros take a listing."""
    for name in (step_dir(step), str(step)):
        listed_step = inspect_name(storage, name)
        if listed_step is not None:
            return listed_step
    return catalog_of(storage).with_other_name(step)


def has_step(storage: Storage, step: int) -> bool:
    """Whether a step exists, in any layout."""
    return storage.is_file(join(step_dir(step), MANIFEST)) or inspect_step(storage, step) is not None


def dataset_steps_in(storage: Storage) -> list[int]:
    """The steps with states of data iterators, ascending; on an object store only complete steps."""
    steps = {
        name: step
        for name in catalog_of(storage).directories()
        if (step := step_of(name)) is not None or (step := parse_step_name(name)) is not None
    }
    return sorted({step for name, step in steps.items() if storage.names(name, TRAIN_DS_PREFIX)})


def waiting_steps(storage: Storage) -> set[int]:
    """The steps of a local directory that wait for their upload, see ``tiers/intents.py``; no request in a bucket."""
    return catalog_of(storage).waiting()


def read_head(storage: Storage, directory: str) -> bytes:
    """The first bytes of a step's manifest, in which most have all of their facts; b'' without a manifest."""
    try:
        return storage.read_range(join(directory, MANIFEST), 0, _HEAD_BYTES)
    except CheckpointNotFoundError:
        return b''


def read_facts(storage: Storage, directory: str, head: bytes | None = None) -> bytes:
    """The facts of a step, from the ``head`` of its manifest or, in the earlier layout, from a file.

    Raises:
      CheckpointNotFoundError: the step has none.
    """
    head = read_head(storage, directory) if head is None else head
    found = facts_range(head[:64])
    if found is None:
        return read_facts_file(storage, directory)
    whole = head if found[1] <= len(head) else storage.read_range(join(directory, MANIFEST), 0, found[1])
    return whole[slice(*found)]


def step_of(name: str) -> int | None:
    """The step of a directory in T5X's layout, with or without leading zeros."""
    step = parse_step_dir(name)
    return parse_padded_step(name) if step is None else step


def checkpoint_around(storage: Storage, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """The directory of the checkpoint that a storage's root is, or is inside, after links are resolved; None if it is a run.

    On an object store each check is a request, so only directories with the name of a step are looked at.
    """
    local = storage.local_path('')
    above = storage.url().rstrip('/') if local is None else os.path.realpath(local)
    outermost = None
    while '/' in above:
        parent, _, name = above.rpartition('/')
        if local is not None or parse_step_dir(name) is not None:
            outer = open_storage(above, None if local is not None else storage_options)
            # Beside steps it is a file of TensorFlow, or a run was started here.
            if is_checkpoint(outer, '') and (parse_step_dir(name) is not None or newest(outer) is None):
                outermost = above
        above = parent
    return outermost

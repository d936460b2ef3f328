"""Lists the steps of a run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

from t5ckpt.catalog.facts_files import read_facts_file
from t5ckpt.catalog.layouts import ORBAX, ListedStep, inspect_name, inspected, is_checkpoint, number_of, readable
from t5ckpt.catalog.orbax_facts import read_orbax_facts
from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.format.facts import NO_FACTS, Facts, decode_facts
from t5ckpt.format.manifest import facts_range
from t5ckpt.format.names import (
    MANIFEST,
    TO_PERSIST,
    TRAIN_DS_PREFIX,
    parse_padded_step,
    parse_prefixed_step,
    parse_step_dir,
    step_dir,
)
from t5ckpt.storage import Storage, open_storage

_FACTS_BYTES = 2**14


def step_names(storage: Storage) -> list[str]:
    """The names that may be steps, that with the largest number first."""
    names = [name for name in storage.names('', '') if parse_prefixed_step(name) is not None]
    return sorted(names, key=number_of, reverse=True)


def listing(storage: Storage) -> list[ListedStep]:
    """The complete steps in a run, ascending, in any layout, with the first bytes of their manifests."""
    return inspected(storage, step_names(storage))


def steps_in(storage: Storage) -> list[int]:
    """The numbers of the complete steps in a run, ascending, in any layout."""
    return [each.step for each in listing(storage)]


def newest(storage: Storage) -> ListedStep | None:
    """The step with the largest number, in any layout, or None."""
    return newest_and_passed(storage)[0]


def newest_and_passed(storage: Storage) -> tuple[ListedStep | None, list[str]]:
    """As :func:`newest`, and the names with larger numbers, which are no complete steps."""
    passed: list[str] = []
    # One number after the other, because the manifest of each inspected step is read.
    for _, same in itertools.groupby(step_names(storage), number_of):
        names = [*same]
        if found := inspected(storage, names):
            return found[0], passed
        passed += names
    return None, passed


def with_other_name(storage: Storage, step: int) -> ListedStep | None:
    """A step in another layout than T5X's, such as a number alone, or with a prefix or zeros."""
    found = inspected(storage, [name for name in step_names(storage) if number_of(name) == step])
    return next((readable(each) for each in found if not each.is_t5x), None)


def inspect_step(storage: Storage, step: int) -> ListedStep | None:
    """The complete step with a number. Names other than ``checkpoint_<step>`` take a listing."""
    return inspect_name(storage, step_dir(step)) or with_other_name(storage, step)


def has_step(storage: Storage, step: int) -> bool:
    """Whether a step exists, in any layout."""
    return inspect_step(storage, step) is not None


def dataset_steps_in(storage: Storage) -> list[int]:
    """The complete steps with states of data iterators, ascending."""
    steps = [each for each in listing(storage) if each.directory and each.error is None]
    return [each.step for each in steps if storage.names(each.directory, TRAIN_DS_PREFIX)]


def waiting_steps(storage: Storage) -> set[int]:
    """The steps of a local directory that wait for their upload, see ``tiers/waiting.py``; no request in a bucket."""
    names = storage.names(TO_PERSIST, '') if storage.commits_by_rename else []
    return {int(name) for name in names if name.isdecimal()}


def read_head(storage: Storage, directory: str) -> bytes:
    """The first bytes of a step's manifest, in which most have all of their facts; b'' without a manifest."""
    return storage.heads([join(directory, MANIFEST)], _FACTS_BYTES)[0] or b''


def read_facts(storage: Storage, directory: str, head: bytes = b'') -> bytes:
    """The facts of a step, from the ``head`` of its manifest or, in the earlier layout, from a file.

    Raises:
      CheckpointNotFoundError: the step has none.
    """
    head = head or read_head(storage, directory)
    found = facts_range(head[:64])
    if found is None:
        return read_facts_file(storage, directory)
    whole = head if found[1] <= len(head) else storage.read(join(directory, MANIFEST), 0, found[1])
    return whole[slice(*found)]


def facts_of(storage: Storage, listed: ListedStep) -> Facts:
    """A step's facts, in any layout; ``NO_FACTS`` if there are none.

    Raises:
      FormatError: they are damaged, or of a newer program.
      StorageError: they cannot be read.
    """
    readable(listed)
    if not listed.directory:
        return NO_FACTS
    try:
        if listed.layout == ORBAX:
            return read_orbax_facts(storage, listed.name)
        data = read_facts(storage, listed.name)
    except CheckpointNotFoundError:
        return NO_FACTS
    return decode_facts(data, storage.url(join(listed.name, MANIFEST)))


def step_of(name: str) -> int | None:
    """The step of a directory in T5X's layout, with or without leading zeros."""
    step = parse_step_dir(name)
    return parse_padded_step(name) if step is None else step


def checkpoint_around(storage: Storage, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """The directory of the step that a storage's root is, or is inside, after links are resolved; None if it may be a run.

    Only directories with the name of a step are looked at. On an object store each check is a request.
    """
    local = storage.local_path('')
    where = storage.url().rstrip('/') if local is None else os.path.realpath(local)
    paths = itertools.accumulate(where.split('/'), '{}/{}'.format)
    for path in paths:
        name = path.rpartition('/')[2]
        if parse_prefixed_step(name) is not None:
            outer = open_storage(path, storage_options)
            # A run may be named by a number.
            if is_checkpoint(outer, '') and (step_of(name) is not None or newest(outer) is None):
                return path
    return None

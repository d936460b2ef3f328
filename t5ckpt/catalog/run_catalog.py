"""Lists a run: the names that may be steps, the complete steps among some names, and the holds and markers.

A listing of the run's directory has the names; on an object store it has a delimiter, whatever the number of chunks below it. A
step of T5X exists if its manifest does. ``catalog/layouts.py`` inspects the files of a step.

Holds and markers are beside the steps or, on an object store, in ``.t5ckpt/``, see ``commit/markers.py``:

    busy/<step>.<unix s>.<nonce>   the marker of unfinished work on a step
    held_...                       the holds of readers
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from t5ckpt.catalog.layouts import ListedStep, Listing, inspect_name, number_of, one_a_step
from t5ckpt.core.keys import join
from t5ckpt.errors import T5CkptError
from t5ckpt.format.manifest import version_of
from t5ckpt.format.names import (
    BUSY_PREFIX,
    HOLD_PREFIX,
    INDEX,
    MANIFEST,
    PARTIAL_SUFFIX,
    Hold,
    MarkerName,
    parse_hold,
    parse_marker,
    parse_prefixed_step,
    parse_step_dir,
)
from t5ckpt.storage import Storage

# The version and the next key of a manifest.
_HEAD_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Announcements:
    """The holds and markers in one listing, including expired ones.

    ``partial`` has the names of those that a process is writing, or was writing when it was killed.
    """

    markers: tuple[MarkerName, ...]
    holds: tuple[Hold, ...]
    partial: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class BucketListing:
    """The names in a run on an object store that may be steps, complete or not, and the holds and markers; from two listings."""

    names: tuple[str, ...]
    announcements: Announcements


def step_names(storage: Storage) -> list[str]:
    """The names that may be steps, that with the largest number first."""
    names = [name for name in storage.names('', '') if parse_prefixed_step(name) is not None]
    return sorted(names, key=number_of, reverse=True)


def announcement_directory(storage: Storage) -> str:
    """The directory of the holds and, on file systems, the markers."""
    return '' if storage.commits_by_rename else INDEX


def announcements(storage: Storage) -> Announcements:
    """The holds and markers of the run, from one listing."""
    at_top = storage.commits_by_rename
    keys = storage.names('', (HOLD_PREFIX, BUSY_PREFIX)) if at_top else [key for key, _ in storage.walk(INDEX)]
    return Announcements(
        tuple(filter(None, map(parse_marker, keys))),
        tuple(filter(None, (parse_hold(key.removeprefix(f'{INDEX}/')) for key in keys))),
        tuple(key for key in keys if key.endswith(PARTIAL_SUFFIX)),
    )


def list_bucket(storage: Storage) -> BucketListing:
    """Lists the names that may be steps, and the holds and markers."""
    return BucketListing(tuple(step_names(storage)), announcements(storage))


def inspected(storage: Storage, names: Sequence[str]) -> Listing:
    """The complete steps among some names, and the errors of the others.

    Raises:
      StorageError: an object store failed.
    """
    is_bucket = not storage.commits_by_rename
    heads = storage.heads([join(name, MANIFEST) for name in names], _HEAD_BYTES) if is_bucket else [None] * len(names)
    steps: list[ListedStep | None] = []
    unreadable: dict[str, T5CkptError] = {}
    for name, head in zip(names, heads, strict=True):
        own = parse_step_dir(name)
        try:
            if own is not None and head is not None and version_of(head) is not None:
                # In a bucket the write of a manifest is one PUT, so one that exists is complete.
                steps.append(ListedStep(own, name))
            else:
                steps.append(inspect_name(storage, name))
        except T5CkptError as error:
            if is_bucket:
                raise
            unreadable[name] = error
    return Listing(tuple(one_a_step(filter(None, steps))), unreadable)

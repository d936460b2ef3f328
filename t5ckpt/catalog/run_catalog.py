"""Lists the holds and markers of a run.

They are beside the steps or, on an object store, in ``.t5ckpt/``, see ``commit/markers.py``:

    busy/<step>.<unix s>.<nonce>   the marker of unfinished work on a step
    held_...                       the holds of readers
"""

from __future__ import annotations

import dataclasses

from t5ckpt.catalog.listing import step_names
from t5ckpt.format.names import (
    BUSY_PREFIX,
    HOLD_PREFIX,
    INDEX,
    PARTIAL_SUFFIX,
    Hold,
    MarkerName,
    parse_hold,
    parse_marker,
)
from t5ckpt.storage import Storage


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

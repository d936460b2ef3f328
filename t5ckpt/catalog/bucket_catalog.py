"""Finds the steps of a run on an object store: lists the names in its directory, and reads the beginning of each manifest.

One listing with a delimiter has the names, whatever the number of chunks below them. A step of T5X exists if its manifest does.
A manifest of T5X or t5ckpt begins with its version. ``catalog/layouts.py`` inspects all other steps.

``.t5ckpt/`` has markers and holds, see ``commit/markers.py``:

    busy/<step>.<unix s>.<nonce>   the marker of unfinished work on a step
    held_...                       the holds of readers
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from t5ckpt.catalog.layouts import ListedStep, Listing, inspect_name, one_a_step
from t5ckpt.catalog.run_catalog import Announcements, BucketListing, RunCatalog
from t5ckpt.core.keys import join
from t5ckpt.errors import T5CkptError
from t5ckpt.format.manifest import is_tensorflow_state, version_of
from t5ckpt.format.names import (
    INDEX,
    MANIFEST,
    PINNED,
    parse_hold,
    parse_marker,
    parse_prefixed_step,
    parse_step_dir,
)
from t5ckpt.storage import Entry, Storage

# The version and the next key of a manifest.
_HEAD_BYTES = 32


def list_bucket(storage: Storage) -> BucketListing:
    """Lists the names that may be steps, and the holds and markers."""
    return BucketListing(tuple(_names(storage)), _announcements(storage))


def _names(storage: Storage) -> list[str]:
    return [name for name in storage.names('', '') if parse_prefixed_step(name) is not None]


def _announcements(storage: Storage) -> Announcements:
    keys = [key for key, _ in storage.walk(INDEX)]
    return Announcements(
        tuple(marker for key in keys if (marker := parse_marker(key)) is not None),
        tuple(hold for key in keys if (hold := parse_hold(key.removeprefix(f'{INDEX}/'))) is not None),
    )


def complete_steps(storage: Storage, names: Sequence[str]) -> list[ListedStep]:
    """The complete steps among some names, ascending."""
    own = [name for name in names if parse_step_dir(name) is not None]
    # The write of a manifest is one PUT, so one that exists is complete.
    heads = storage.heads([join(name, MANIFEST) for name in own], _HEAD_BYTES)
    own_steps = {
        name: ListedStep(step, name)
        for name, head in zip(own, heads, strict=True)
        if head is not None and version_of(head) is not None and (step := parse_step_dir(name)) is not None
    }
    other_steps = [inspect_name(storage, name) for name in names if name not in own_steps]
    return one_a_step([*own_steps.values(), *(step for step in other_steps if step is not None)])


class BucketCatalog(RunCatalog):
    """A run on an object store."""

    absence = 'no object has this prefix'
    incomplete_state = 'unfinished'
    announcement_directory = INDEX
    # The files are removed one by one, and another writer may write some of the same names before its manifest.
    is_deleted_whole = False

    def exists(self) -> bool:
        return self._storage.kind('') is not None

    def bucket_listing(self) -> BucketListing | None:
        return list_bucket(self._storage)

    def names(self) -> Mapping[str, T5CkptError | None]:
        return dict.fromkeys(_names(self._storage))

    def inspected(self, names: Mapping[str, T5CkptError | None]) -> Listing:
        return Listing(tuple(complete_steps(self._storage, [*names])))

    def is_beside_manifest(self) -> bool:
        # The steps are listed only if the file is the state file of TensorFlow, because a listing costs requests.
        return is_tensorflow_state(self._storage.read_range(MANIFEST, 0, 64)) and self.newest() is not None

    def directories(self) -> list[str]:
        return [listed_step.directory for listed_step in self.listing().steps if listed_step.directory]

    def announcements(self) -> Announcements:
        return _announcements(self._storage)

    def waiting(self) -> set[int]:
        return set()

    def incomplete(self) -> list[str]:
        # Interrupted saves leave files under the name of the step, so the files do not show whether it is complete.
        return []

    def entries(self, complete: Iterable[str]) -> list[Entry]:
        names = {*complete, *(name for name in _names(self._storage) if parse_step_dir(name) is not None)}
        return [Entry(name, True) for name in sorted(names)]

    def files(self, entry: Entry) -> dict[str, Entry] | None:
        return {PINNED: Entry(PINNED, False)} if self._storage.is_file(join(entry.name, PINNED)) else {}

    def nbytes(self, name: str, recorded: int | None, files: Mapping[str, Entry]) -> int | None:
        del name, files
        return recorded

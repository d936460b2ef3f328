"""Finds the steps of a run on a file system: it lists the directory and checks the files of each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from t5ckpt.catalog.layouts import ListedStep, Listing, inspect_name, one_a_step
from t5ckpt.catalog.run_catalog import Announcements, BucketListing, RunCatalog
from t5ckpt.errors import T5CkptError
from t5ckpt.format.names import (
    DELETING_PREFIX,
    HOLD_PREFIX,
    PARTIAL_SUFFIX,
    TO_PERSIST,
    parse_hold,
    parse_marker,
    parse_prefixed_step,
    parse_step_dir,
)
from t5ckpt.storage import Entry


class DirectoryCatalog(RunCatalog):
    """A run on a file system."""

    absence = 'there is no such directory'
    incomplete_state = 'broken'
    announcement_directory = ''
    is_deleted_whole = True

    def exists(self) -> bool:
        return self._storage.kind('') == 'dir'

    def bucket_listing(self) -> BucketListing | None:
        return None

    def names(self) -> Mapping[str, T5CkptError | None]:
        names = [entry.name for entry in self._storage.entries() if parse_prefixed_step(entry.name) is not None]
        return {**dict.fromkeys(names), **self._broken()}

    def inspected(self, names: Mapping[str, T5CkptError | None]) -> Listing:
        steps: list[ListedStep] = []
        unreadable: dict[str, T5CkptError] = {}
        for name, broken in names.items():
            if broken is not None:
                unreadable[name] = broken
                continue
            try:
                step = inspect_name(self._storage, name)
            except T5CkptError as error:
                unreadable[name] = error
                continue
            steps += [] if step is None else [step]
        return Listing(tuple(one_a_step(steps)), unreadable)

    def _broken(self) -> dict[str, T5CkptError]:
        """The steps that are links to nothing."""
        return {name: error for name, error in self._storage.broken_links().items() if parse_step_dir(name) is not None}

    def is_beside_manifest(self) -> bool:
        return self.newest() is not None

    def directories(self) -> list[str]:
        return [entry.name for entry in self._storage.entries() if entry.is_dir]

    def announcements(self) -> Announcements:
        names = self._storage.names('', (HOLD_PREFIX, DELETING_PREFIX))
        return Announcements(
            tuple(marker for name in names if (marker := parse_marker(name)) is not None),
            tuple(hold for name in names if (hold := parse_hold(name)) is not None),
            tuple(name for name in names if name.endswith(PARTIAL_SUFFIX)),
        )

    def waiting(self) -> set[int]:
        return {int(entry.name) for entry in self._storage.entries(TO_PERSIST) if entry.name.isdecimal()}

    def incomplete(self) -> list[str]:
        names = [entry.name for entry in self._storage.entries() if parse_step_dir(entry.name) is not None]
        return [name for name in names if self._storage.kind(name) == 'file' or self._storage.entries(name)]

    def entries(self, complete: Iterable[str]) -> list[Entry]:
        del complete
        return [*self._storage.entries(), *(Entry(name, is_dir=True) for name in self._broken())]

    def files(self, entry: Entry) -> dict[str, Entry] | None:
        entries = self._storage.entries(entry.name) if entry.is_dir else [entry]
        return {item.name: item for item in entries} or None

    def nbytes(self, name: str, recorded: int | None, files: Mapping[str, Entry]) -> int | None:
        if recorded is not None:
            return recorded
        listed = [size or 0 for _, size in self._storage.walk(name)]
        return sum(listed) if listed else sum(item.size or 0 for item in files.values())

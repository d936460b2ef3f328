"""The interface through which the steps, holds and markers of a run are found, in its directory or on an object store."""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from t5ckpt.catalog.layouts import ListedStep, Listing
from t5ckpt.errors import T5CkptError
from t5ckpt.format.names import Hold, MarkerName, parse_prefixed_step, step_dir
from t5ckpt.storage import Entry, Storage


@dataclasses.dataclass(frozen=True)
class Announcements:
    """The holds and markers in one listing, including expired ones.

    ``partial`` has the names of those that a process is writing, or was writing when it was killed.
    """

    markers: tuple[MarkerName, ...]
    holds: tuple[Hold, ...]
    partial: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class BucketListing:
    """The names in a run on an object store that may be steps, complete or not, and the holds and markers; from two listings."""

    names: tuple[str, ...]
    announcements: Announcements

    @property
    def busy(self) -> set[int]:
        """The steps that have a marker."""
        return {marker.step for marker in self.announcements.markers}


class RunCatalog(ABC):
    """The steps of one run. ``catalog/listing.catalog_of`` chooses the implementation."""

    absence: str
    """The text of an error for a run that does not exist, without a full stop."""
    incomplete_state: str
    """The state of a step without a manifest, see :class:`~t5ckpt.catalog.step_summaries.StepSummary`."""

    announcement_directory: str
    """The directory of the holds and, on file systems, the markers."""
    is_deleted_whole: bool
    """Whether a step disappears at once, so that values that were read before its deletion are of one checkpoint."""

    def __init__(self, storage: Storage):
        """Takes the run."""
        self._storage = storage

    @abstractmethod
    def exists(self) -> bool:
        """Whether there is a directory, or a key."""

    @abstractmethod
    def bucket_listing(self) -> BucketListing | None:
        """The names, holds and markers on an object store; None on a file system."""

    @abstractmethod
    def names(self) -> Mapping[str, T5CkptError | None]:
        """The names that may be steps, each with its error if it is a link to nothing.

        Without these links the run would seem shorter than it is, or new.
        """

    @abstractmethod
    def inspected(self, names: Mapping[str, T5CkptError | None]) -> Listing:
        """The complete steps among some of the names."""

    def listing(self) -> Listing:
        """The complete steps, and the errors of those that could not be inspected."""
        return self.inspected(self.names())

    def newest(self) -> ListedStep | None:
        """The complete step with the largest number, or None."""
        # The largest number first, because the manifest of each inspected step is read.
        names = sorted(self.names().items(), key=_number, reverse=True)
        groups = (self.inspected(dict(same)).newest for _, same in itertools.groupby(names, _number))
        return next((found for found in groups if found is not None), None)

    def with_other_name(self, step: int) -> ListedStep | None:
        """A step with a prefix or zeros in its name, from Orbax's ``step_prefix`` and padding."""
        named = [each for each in self.names().items() if _number(each) == step]
        return self.inspected({name: error for name, error in named if name not in (step_dir(step), str(step))}).newest

    @abstractmethod
    def is_beside_manifest(self) -> bool:
        """Whether the directory has steps beside a file ``checkpoint``, as T5X leaves it after a TensorFlow checkpoint."""

    @abstractmethod
    def directories(self) -> list[str]:
        """The directories in which states of data iterators are looked for."""

    @abstractmethod
    def announcements(self) -> Announcements:
        """The holds and markers of the run, from one listing."""

    @abstractmethod
    def waiting(self) -> set[int]:
        """The steps of a local directory that wait for their upload, see ``tiers/intents.py``; no request in a bucket."""

    @abstractmethod
    def incomplete(self) -> list[str]:
        """The names of T5X's steps that hold files; called for a run without a complete step."""

    # --- for summaries -------------------------------------------------------------------------------------------------

    @abstractmethod
    def entries(self, complete: Iterable[str]) -> list[Entry]:
        """The entries that may be steps, among them the ``complete`` ones."""

    @abstractmethod
    def files(self, entry: Entry) -> dict[str, Entry] | None:
        """The entries of a step's directory, on an object store only ``PINNED``; None if the step is gone."""

    @abstractmethod
    def nbytes(self, name: str, recorded: int | None, files: Mapping[str, Entry]) -> int | None:
        """The bytes of a step's files; None if neither its facts (``recorded``) nor a listing has them."""


def _number(named: tuple[str, object]) -> int:
    """The number of a step, for its name and its error."""
    return parse_prefixed_step(named[0]) or 0

"""In which layout a step of a run is stored: the one place that decides it, for every finder and every save.

    t5x     ``checkpoint_<step>/checkpoint`` is a whole T5X manifest; what t5ckpt and T5X's own checkpointer write
    orbax   ``checkpoint_<step>`` as T5X writes it through Orbax, or ``<step>`` of an Orbax CheckpointManager,
            with its ``step_prefix`` and its padding; on Google's storage with ``commit_success.txt``
    flax    ``checkpoint_<step>`` is a file, as ``flax.training.checkpoints`` writes it
    t5x-padded  as the first, with zeros before the number in the name; T5X lists it and writes none

All are listed and restored. Only steps of the first are written, replaced, pruned or repaired.

Notes: a directory costs one read of its manifest and, where there is none, a look for five names. Loads no TensorStore.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Mapping
from typing import Any

from t5ckpt.core.keys import join
from t5ckpt.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    StorageError,
    T5CkptError,
    UnsupportedFormatError,
)
from t5ckpt.format.manifest import is_whole
from t5ckpt.format.names import (
    MANIFEST,
    parse_padded_step,
    parse_prefixed_step,
    parse_step_dir,
    parse_step_name,
    step_dir,
)
from t5ckpt.storage import Storage, open_storage

__all__ = [
    'FLAX',
    'ORBAX',
    'PADDED',
    'T5X',
    'ListedStep',
    'Listing',
    'has_placeholder',
    'inspect_all',
    'inspect_name',
    'inspect_others',
    'inspect_step',
    'is_orbax',
    'one_a_step',
    'orbax_marks',
    'other_layout',
    'step_around',
]

T5X, ORBAX, FLAX, PADDED = 't5x', 'orbax', 'flax', 't5x-padded'
# Larger manifests are taken to be whole: a listing must not read gigabytes.
_WALKED_BYTES = 64 * 2**20
# Orbax's older layout is Flax msgpack in which each array is this text.
_PLACEHOLDER = b'PLACEHOLDER://'
# Items of a step one of which is a tree.
_ITEMS = ('state', 'default')
# Orbax writes it last, and waits for it on Google's storage, where it writes a step in place.
_COMMITTED = 'commit_success.txt'
_ORBAX_MARKERS = ('_METADATA', '_CHECKPOINT_METADATA', 'manifest.ocdbt')


@dataclasses.dataclass(frozen=True)
class ListedStep:
    """A complete step of a run.

    Attributes:
      step: its number.
      name: of its directory, or of its file in Flax's layout, below the run.
      layout: ``'t5x'``, ``'orbax'``, ``'flax'`` or ``'t5x-padded'``.
      manifest: the file to decode, in :attr:`directory`; '' where there is none, in Orbax's newer layout.
    """

    step: int
    name: str
    layout: str = T5X
    manifest: str = MANIFEST

    @property
    def directory(self) -> str:
        """The directory that the step's files lie in, a key of the run's storage; '' for a single file."""
        return '' if self.layout == FLAX else self.name

    @property
    def is_t5x(self) -> bool:
        """Whether it is in T5X's layout, so that t5ckpt may replace and delete it."""
        return self.layout == T5X


@dataclasses.dataclass(frozen=True)
class Listing:
    """The steps of a run.

    Attributes:
      steps: those that are complete, ascending, in whichever layout.
      unreadable: why a name that is a step's cannot be looked at.
    """

    steps: tuple[ListedStep, ...]
    unreadable: Mapping[str, T5CkptError] = dataclasses.field(default_factory=dict[str, T5CkptError])

    @property
    def numbers(self) -> list[int]:
        """The numbers of the steps.

        Raises:
          T5CkptError: one cannot be looked at. To leave it out would make the run seem shorter than it is.
        """
        for error in self.unreadable.values():
            raise error
        return [each.step for each in self.steps]

    @property
    def newest(self) -> ListedStep | None:
        """The step with the largest number.

        Raises:
          T5CkptError: one with a larger number cannot be looked at.
        """
        last = self.steps[-1] if self.steps else None
        for name, error in self.unreadable.items():
            if last is None or (parse_prefixed_step(name) or 0) > last.step:
                raise error
        return last


def other_layout(where: str, layout: str, refused: str, cure: str) -> UnsupportedFormatError:
    """The error of what t5ckpt does only with steps in T5X's layout.

    Args:
      where: the step.
      layout: its layout.
      refused: what is not done with it, beginning with 'which' or the like, without a full stop.
      cure: what to do instead; of a step with zeros in its name another one is given.
    """
    padded = parse_padded_step(where.rpartition('/')[2])
    if layout == PADDED and padded is not None:
        cure = f'Rename it to {step_dir(padded)} first.'
    return UnsupportedFormatError(f'{where} is in the layout of {layout}, {refused}. {cure}')


def orbax_marks(directory: str) -> list[str]:
    """The files one of which every directory of Orbax has: a tree's, or those of items one of which is a tree."""
    marks = [*_ORBAX_MARKERS, *(f'{item}/_METADATA' for item in _ITEMS)]
    return [join(directory, mark) for mark in marks]


def is_orbax(storage: Storage, directory: str) -> bool:
    """Whether a directory looks like Orbax's."""
    return any(storage.are_files(orbax_marks(directory)))


def has_placeholder(manifest: bytes) -> bool:
    """Whether a whole manifest is Orbax's, whose older layout has a text in place of each array."""
    return _PLACEHOLDER in manifest


def inspect_name(storage: Storage, name: str) -> ListedStep | None:
    """What lies under a name of the run, if that is a complete step in one of the layouts.

    Raises:
      StorageError: it cannot be looked at.
    """
    step = parse_step_name(name)
    if step is None:
        return _inspect_prefixed(storage, name)
    key = join(name, MANIFEST)
    manifest = _map_file(storage, key)
    if manifest is not None:
        is_t5x = name == step_dir(step) and not has_placeholder(manifest)
        if is_t5x:
            return ListedStep(step, name)
        return ListedStep(step, name, ORBAX) if _is_committed(storage, name) else None
    if is_orbax(storage, name) and _is_committed(storage, name):
        return ListedStep(step, name, ORBAX, manifest='')
    if parse_step_dir(name) is not None and _is_flax_file(storage, name):
        return ListedStep(step, name, FLAX, manifest=name)
    return None


def _inspect_prefixed(storage: Storage, name: str) -> ListedStep | None:
    number = parse_prefixed_step(name)
    if number is None:
        return None
    manifest = None if parse_padded_step(name) is None else _map_file(storage, join(name, MANIFEST))
    if manifest is not None and not has_placeholder(manifest):
        return ListedStep(number, name, PADDED)
    return ListedStep(number, name, ORBAX, manifest='') if _is_prefixed(storage, name) else None


def _is_prefixed(storage: Storage, name: str) -> bool:
    """Whether what has a name with a prefix is a step of Orbax; mostly it is something else, which nobody may have to read."""
    try:
        return is_orbax(storage, name) and _is_committed(storage, name)
    except StorageError as error:
        if isinstance(error, AccessDeniedError) or error.errno == errno.ELOOP:
            return False
        raise


def _is_committed(storage: Storage, directory: str) -> bool:
    """Whether Orbax has written the whole of a directory; where it can rename, it shows no other."""
    if not storage.orbax_commits:
        return True
    return any(storage.are_files([join(directory, item, _COMMITTED) for item in ('', *_ITEMS)]))


def inspect_all(storage: Storage) -> Listing:
    """The steps of a run on a disk, and what cannot be looked at."""
    found: list[ListedStep] = []
    unreadable: dict[str, T5CkptError] = {}
    for entry in storage.entries():
        if parse_prefixed_step(entry.name) is None:
            continue
        try:
            step = inspect_name(storage, entry.name)
        except T5CkptError as error:
            unreadable[entry.name] = error
            continue
        found += [] if step is None else [step]
    return Listing(tuple(one_a_step(found)), unreadable)


def inspect_step(storage: Storage, step: int) -> ListedStep | None:
    """A complete step by its number: under the usual names at once, else, with a prefix or zeros, by a listing."""
    for name in (step_dir(step), str(step)):
        found = inspect_name(storage, name)
        if found is not None:
            return found
    return inspect_others(storage, step) if storage.renames else None


def inspect_others(storage: Storage, step: int) -> ListedStep | None:
    """A step on a disk that has a prefix or zeros in its name, as Orbax's ``step_prefix`` and padding make them."""
    known = (step_dir(step), str(step))
    names = [entry.name for entry in storage.entries() if entry.name not in known]
    others = [name for name in names if parse_prefixed_step(name) == step]
    return next((found for name in others if (found := inspect_name(storage, name)) is not None), None)


def _map_file(storage: Storage, key: str) -> bytes | None:
    """A file that is one msgpack map to its end; of a large one nothing is read."""
    if storage.renames:
        size = storage.size(key)
        if size is None:
            return None
        if size > _WALKED_BYTES:
            return b''
    try:
        data = storage.read(key)
    except CheckpointNotFoundError:
        # Deleted by another process since it was listed.
        return None
    return data if is_whole(data) else None


def _is_flax_file(storage: Storage, name: str) -> bool:
    # A bucket tells no sizes, and the file may be large.
    return _map_file(storage, name) is not None if storage.renames else storage.is_file(name)


def one_a_step(found: list[ListedStep]) -> list[ListedStep]:
    """Ascending, each number once: where a step is there in two layouts, T5X's counts."""
    by_step: dict[int, ListedStep] = {}
    for each in sorted(found, key=lambda each: (each.step, each.is_t5x)):
        by_step[each.step] = each
    return [*by_step.values()]


def step_around(storage: Storage, storage_options: Mapping[str, Any] | None = None) -> tuple[str, int] | None:
    """The directory of the step that a storage's root is or lies in, and its number. Costs nothing where no name says so."""
    here = above = storage.url().rstrip('/')
    while '/' in above:
        parent, _, name = above.rpartition('/')
        # A number alone names a step of Orbax, but mostly something else; on an object store a look is a request.
        step = parse_prefixed_step(name) if storage.renames else parse_step_dir(name)
        if step is not None:
            place = storage if above == here else open_storage(above, storage_options)
            # TensorFlow's directories have a file of the manifest's name, too.
            is_named = parse_step_name(name) is not None
            if (is_named and place.is_file(MANIFEST)) or is_orbax(place, ''):
                return above, step
        above = parent
    return None

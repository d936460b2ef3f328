"""The part of a step in the local directory of one of the processes that saved it, see ``save/parts.py``.

A complete checkpoint, which a job of one process saved, is a part with all files.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable

from t5ckpt.catalog.facts_files import read_facts_file
from t5ckpt.catalog.listing import read_facts, steps_in
from t5ckpt.catalog.locate import Located
from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError, FormatError, T5CkptError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.facts import decode_facts, save_id
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, entry_of
from t5ckpt.format.manifest import split_facts
from t5ckpt.format.names import (
    COPIES,
    DATASET_REMOVED,
    MANIFEST,
    TRAIN_DS_PREFIX,
    file_checksums_name,
    step_dir,
)
from t5ckpt.format.zarray import ZARRAY, zarray_bytes
from t5ckpt.reading.contents import Contents, RawFiles, decode_contents
from t5ckpt.storage import Storage, means_damage
from t5ckpt.tiers.coverage import ChunkNumbers, DiskStep, num_bits
from t5ckpt.tiers.local_reads import LocalReads

_POSITION = re.compile(r'train_ds-([0-9]+)-of-([0-9]+)')
_LIST = re.compile(r'integrity\.([0-9]+)\.json')


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a step.

    Attributes:
      storage, step: the local directory, and the step in it.
      manifest, facts: undecoded; the same on all disks of a save.
      lists: the lists of file checksums in the directory, by name; one for each process.
      checksums: of the files that were written here, including those that no longer exist.
      there: the names of the files that exist and have the recorded size.
      count: of the processes of the save.
      created: the time of the save, in unix seconds; 0 if it is not recorded.
      has_removed_positions: whether ``keep_dataset_checkpoints`` has removed the positions of data iterators.
    """

    storage: Storage
    step: int
    manifest: bytes
    facts: bytes
    lists: dict[str, FileChecksums]
    checksums: FileChecksums
    there: frozenset[str]
    count: int
    created: float
    has_removed_positions: bool

    @classmethod
    def read(cls, storage: Storage, step: int) -> Part:
        """Reads the files of a part that are not chunks, and the sizes of the others.

        Raises:
          FormatError: one of them is damaged.
          CheckpointNotFoundError: the step is not there.
          StorageError: the disk failed.
        """
        directory = step_dir(step)

        def where(name: str) -> str:
            return storage.url(join(directory, name))

        manifest, facts = split_facts(storage.read(join(directory, MANIFEST)))
        facts = read_facts_file(storage, directory) if facts is None else facts
        decoded = decode_facts(facts, where(MANIFEST))
        decoded.digests.check(MANIFEST, entry_of(manifest), where(MANIFEST))
        sizes = {key.removeprefix(f'{directory}/'): size for key, size in storage.walk(directory)}
        copies = FileChecksums()
        if COPIES in sizes:
            copies = FileChecksums.decode(storage.read(join(directory, COPIES)), where(COPIES))
        lists = decoded.digests.load_lists(
            lambda name: storage.read(join(directory, name)) if name in sizes else None, where
        )
        checksums = FileChecksums({name: entry for files in (copies, *lists.values()) for name, entry in files.items()})
        there = frozenset(name for name, entry in checksums.items() if sizes.get(name) == entry[0])
        has_removed, created = DATASET_REMOVED in sizes, decoded.created_unix or 0.0
        return cls(
            storage, step, manifest, facts, lists, checksums, there, len(decoded.digests.lists), created, has_removed
        )

    @property
    def save(self) -> str:
        """Identifies the save."""
        return save_id(self.facts)

    @property
    def located(self) -> Located:
        """The location from which a restore reads it."""
        return Located(self.storage, step_dir(self.step), MANIFEST, self.step)

    def has_all_chunks(self) -> bool:
        """Whether all chunks of the step exist and have the recorded size."""
        numbers = self.numbers()
        return num_bits(numbers.bits(self.there)) == numbers.count

    def complete_lists(self) -> list[int]:
        """The indices of the lists all of whose files are there."""
        return [
            int(match[1])
            for name, entries in self.lists.items()
            if self.there.issuperset(entries) and (match := _LIST.fullmatch(name)) is not None
        ]

    def listed(self) -> list[str]:
        """The files of these lists."""
        return [name for index in self.complete_lists() for name in self.lists[file_checksums_name(index)]]

    def positions_of(self, index: int) -> list[str]:
        """The existing files with the data-iterator position of one process of the save."""
        matches = {name: match for name in sorted(self.there) if (match := _POSITION.match(name)) is not None}
        return [name for name, match in matches.items() if int(match[1]) == index]

    def as_vote(self) -> DiskStep:
        """The vote of this process about the step."""
        index = next(iter(self.complete_lists()), -1)
        recorded = () if self.has_removed_positions else positions_in(self.checksums)
        num_positions = max((of for _, of in recorded), default=0)
        return DiskStep(self.save, index, self.count, positions_in(self.there), num_positions, self.created)

    def contents(self) -> Contents:
        """The decoded manifest and facts."""
        return decode_contents(self.located, RawFiles(self.manifest, self.facts))

    def arrays(self) -> dict[str, StoredArray]:
        """The arrays of the step, by location."""
        leaves = self.contents().leaves()
        return {leaf.location: leaf for leaf in leaves.values() if isinstance(leaf, StoredArray)}

    def numbers(self) -> ChunkNumbers:
        """The numbers of all chunks of the step."""
        return ChunkNumbers({location: array.grid for location, array in self.arrays().items()})

    def write_metadata(self, locations: Collection[str]) -> dict[str, FileEntry]:
        """Writes the ``.zarray`` of arrays whose chunks come from elsewhere: a restore maps only arrays that have it.

        Returns:
          Its entry in the file checksums, by name.
        """
        written: dict[str, FileEntry] = {}
        for location, array in self.arrays().items():
            name = f'{location}/{ZARRAY}'
            if location in locations and name not in self.there:
                data = zarray_bytes(array)
                self.storage.write(join(step_dir(self.step), name), data)
                written[name] = entry_of(data)
        return written


def time_of_save(facts: bytes) -> float:
    """The time of a save in unix seconds, from its facts; 0 if they do not record it, or are damaged."""
    try:
        return decode_facts(facts, MANIFEST).created_unix or 0.0
    except FormatError:
        return 0.0


def save_in(storage: Storage, step: int) -> str:
    """Identifies the save that a storage has of a step; '' if it has none, or the step has no facts or damaged ones.

    Raises:
      StorageError: the storage does not answer.
    """
    try:
        return save_id(read_facts(storage, step_dir(step)))
    except (CheckpointNotFoundError, FormatError):
        return ''


def save_of(storage: Storage, step: int) -> str:
    """As :func:`save_in`, of a local directory; '' also if the disk has failed."""
    try:
        return save_in(storage, step)
    except T5CkptError:
        return ''


def part_alone(storage: Storage, step: int) -> Part | None:
    """The part that a job of one process finds, which several processes saved; None for a complete checkpoint."""
    if not storage.is_file(join(step_dir(step), COPIES)):
        return None
    try:
        part = Part.read(storage, step)
    except FormatError:
        # The reader reports the damage.
        return None
    return part if len(part.lists) < part.count else None


def is_incomplete(storage: Storage, step: int) -> bool:
    """Whether a local directory has only a part without all chunks, which a job of one process cannot restore."""
    part = part_alone(storage, step)
    return part is not None and not part.has_all_chunks()


def array_bytes(name: str, size: int) -> int:
    """The size of a file that is a chunk of an array, for the log; 0 for metadata and for positions of data iterators."""
    is_chunk = '/' in name and not name.endswith('/.zarray') and not name.startswith(TRAIN_DS_PREFIX)
    return size if is_chunk else 0


def positions_in(names: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """The positions of data iterators among some files."""
    positions = {(int(match[1]), int(match[2])) for name in names if (match := _POSITION.match(name)) is not None}
    return tuple(sorted(positions))


@dataclasses.dataclass(frozen=True)
class LocalParts:
    """The steps of a local directory.

    Attributes:
      parts: by step.
      damaged: why other steps cannot be used, by step; they count as absent.
    """

    parts: dict[int, Part]
    damaged: dict[int, str]


def parts_in(storage: Storage, reads: LocalReads | None = None) -> LocalParts:
    """The parts in a local directory; without the files that ``reads`` could not read.

    Raises:
      StorageError: the directory cannot be listed, or an error of a part does not mean that it is damaged.
    """
    reads = LocalReads() if reads is None else reads
    local_parts = LocalParts({}, {})
    for step in steps_in(storage):
        try:
            part = reads.repeated(functools.partial(Part.read, storage, step))
        except T5CkptError as error:
            if not means_damage(error):
                raise
            local_parts.damaged[step] = str(error)
        else:
            local_parts.parts[step] = dataclasses.replace(part, there=part.there.difference(reads.unreadable[step]))
    return local_parts

"""Reads the files that the disk of one process has of a step: its part, see ``save/parts.py``, or all in a job of one process.

The index of a process in the save is the *role* of its disk: the disk has what the devices of the process with this index need
when the step is restored by as many processes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

from t5ckpt.catalog.listing import read_facts
from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError, FormatError, T5CkptError
from t5ckpt.format.facts import Facts, decode_facts, save_id
from t5ckpt.format.file_checksums import FileChecksums, entry_of
from t5ckpt.format.manifest import split_facts
from t5ckpt.format.names import COPIES, DATASET_REMOVED, MANIFEST, file_checksums_name, step_dir
from t5ckpt.storage import Storage, means_damage

# The prefix of the files of a data shard, see ``names.dataset_prefix``.
_POSITION = re.compile(r'train_ds-([0-9]+)-of-([0-9]+)')


@dataclasses.dataclass(frozen=True)
class Identity:
    """The save of a step on a disk.

    Attributes:
      save: the checksum of the facts, the same on the disks of all processes of the save.
      role: the index of the process of this disk in the save; -1 without its list of file checksums.
      count: the number of these processes.
      facts: of the step.
    """

    save: str
    role: int
    count: int
    facts: Facts


def _identity(facts: bytes, names: Iterable[str], where: str) -> Identity:
    decoded, there = decode_facts(facts, where), {*names}
    count = len(decoded.digests.lists)
    role = next((index for index in range(count) if file_checksums_name(index) in there), -1)
    return Identity(save_id(facts), role, count, decoded)


def identify(storage: Storage, step: int) -> Identity | None:
    """The save of a step on a disk; None if the disk does not have it, or its facts are missing or damaged.

    Raises:
      StorageError: the storage failed.
    """
    directory = step_dir(step)
    try:
        names = storage.names(directory, 'integrity.')
        return _identity(read_facts(storage, directory), names, storage.url(directory))
    except (CheckpointNotFoundError, FormatError):
        return None


def save_in(storage: Storage, step: int) -> str:
    """Identifies the save that a storage has of a step; '' if it has none, or the facts are missing or damaged.

    Raises:
      StorageError: the storage failed.
    """
    try:
        return save_id(read_facts(storage, step_dir(step)))
    except (CheckpointNotFoundError, FormatError):
        return ''


def save_on_disk(storage: Storage, step: int) -> str:
    """As :func:`save_in`; '' also if the disk has failed."""
    try:
        return save_in(storage, step)
    except T5CkptError:
        return ''


@dataclasses.dataclass(frozen=True)
class DiskStep:
    """The files that a disk has of a step.

    Attributes:
      storage, step: the local directory, and the step in it.
      identity: of the save.
      manifest, facts: undecoded; the same on all disks of the save.
      assigned: the checksums of the files that were assigned to the process, which it uploads.
      checksums: of all files that it wrote.
      there: the names of those that exist and have the recorded size.
      has_removed_positions: whether ``keep_dataset_checkpoints`` has removed the positions of data iterators.
    """

    storage: Storage
    step: int
    identity: Identity
    manifest: bytes
    facts: bytes
    assigned: FileChecksums
    checksums: FileChecksums
    there: frozenset[str]
    has_removed_positions: bool

    @classmethod
    def read(cls, storage: Storage, step: int) -> DiskStep:
        """Reads the files that are not chunks, and the sizes of the others.

        Raises:
          FormatError: one of them is damaged, or missing.
          CheckpointNotFoundError: the step is not there.
          StorageError: the disk failed.
        """
        directory = step_dir(step)

        def where(name: str) -> str:
            return storage.url(join(directory, name))

        manifest, facts = split_facts(storage.read(join(directory, MANIFEST)))
        facts = read_facts(storage, directory) if facts is None else facts
        sizes = {key.removeprefix(f'{directory}/'): size for key, size in storage.walk(directory)}
        identity = _identity(facts, sizes, where(MANIFEST))
        identity.facts.digests.check(MANIFEST, entry_of(manifest), where(MANIFEST))
        copies = FileChecksums()
        if COPIES in sizes:
            copies = FileChecksums.decode(storage.read(join(directory, COPIES)), where(COPIES))
        lists = identity.facts.digests.load_lists(
            lambda name: storage.read(join(directory, name)) if name in sizes else None, where
        )
        assigned = lists.get(file_checksums_name(identity.role), FileChecksums())
        checksums = FileChecksums({**copies, **assigned})
        there = frozenset(name for name, entry in checksums.items() if sizes.get(name) == entry[0])
        return cls(storage, step, identity, manifest, facts, assigned, checksums, there, DATASET_REMOVED in sizes)

    def key(self, name: str) -> str:
        """The key of a file in the storage."""
        return join(step_dir(self.step), name)

    def read_file(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
          FormatError, CheckpointNotFoundError: it is damaged or gone.
          StorageError: the disk failed.
        """
        data = self.storage.read(self.key(name))
        self.checksums.check(name, entry_of(data), self.storage.url(self.key(name)))
        return data

    def positions(self) -> dict[str, dict[str, bytes]]:
        """The positions of data iterators, by the prefix of their files; empty if a file is damaged or gone."""
        found: dict[str, dict[str, bytes]] = {}
        names = {name: matched[0] for name, matched in self._position_files().items()}
        for prefix in {} if self.has_removed_positions else sorted({*names.values()}):
            found[prefix] = {}
            try:
                found[prefix] = {name: self.read_file(name) for name, of in names.items() if of == prefix}
            except T5CkptError as error:
                if not means_damage(error):
                    raise
        return found

    def _position_files(self) -> dict[str, re.Match[str]]:
        return {name: matched for name in self.checksums if (matched := _POSITION.match(name))}

    def unreadable_files(self) -> frozenset[str]:
        """The files that should be there and are damaged, gone, or that the disk cannot read; reads all of them.

        Raises:
          StorageError: another error, such as too many open files, which says nothing about a file.
        """
        return frozenset(name for name in self.there if why_lost(functools.partial(self.read_file, name)))

    def vote(self) -> list[Any]:
        """The vote about it, of JSON's types, from which the processes choose a step; see ``tiers/choice.py``."""
        identity = self.identity
        files = self._position_files()
        shards = {int(matched[1]) for name, matched in files.items() if name in self.there}
        if not files.keys() & self.assigned.keys():
            # The process had no iterator.
            shards.add(identity.role)
        of = 0 if self.has_removed_positions else max((int(matched[2]) for matched in files.values()), default=0)
        created = round(identity.facts.created_unix or 0.0, 3)
        return [self.step, identity.save, identity.role, identity.count, created, sorted(shards), of]


def why_lost(read: Callable[[], Any]) -> str:
    """The error of a read of local files that means that a file is damaged, gone or cannot be read; '' if the read succeeds.

    Raises:
      StorageError: another error, such as too many open files, which says nothing about a file.
    """
    try:
        read()
    except T5CkptError as error:
        if not means_damage(error):
            raise
        return str(error)
    return ''

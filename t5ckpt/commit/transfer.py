"""Copies the files of a checkpoint to another run, byte for byte, between any two storages.

Files are copied concurrently, and each is compared with its checksum if the checkpoint has checksums. The manifest is written
last, by the same commit as that of a save, so a copy is visible only when it is complete.

A copy that was cut off leaves its files to garbage collection, and the next one begins again.

Notes: memory holds the files in flight, 256 MiB or one file. Only the file checksums are decoded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

from t5ckpt.commit.strategy import open_transaction
from t5ckpt.commit.transaction import Transaction, TransactionOptions
from t5ckpt.core.byte_budget import ByteBudget
from t5ckpt.core.keys import join, parents_of
from t5ckpt.core.protocols import Clock, Progress
from t5ckpt.core.thread_pool import Pool
from t5ckpt.errors import CorruptCheckpointError, StorageError, UnsupportedFormatError
from t5ckpt.format.file_checksums import FileChecksums, entry_of
from t5ckpt.format.manifest import file_with_facts
from t5ckpt.format.names import (
    COPIES,
    DATASET_REMOVED,
    PINNED,
    foreign_keys,
    is_facts_file,
    is_file_checksums,
    is_position,
    part_of,
    part_text,
    superseded,
)
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.identity import Identity
from t5ckpt.reading.raw_files import read_raw
from t5ckpt.storage import Storage

IN_FLIGHT_BYTES = 256 * 2**20
# Reserved for a file whose size neither the listing nor a checksum has.
_UNKNOWN_BYTES = 16 * 2**20


def _at_once(nbytes: int) -> None:
    del nbytes


@dataclasses.dataclass(frozen=True)
class TransferOptions:
    """The options of a transfer.

    Attributes:
      workers: the number of files that are copied at once.
      overwrite: replaces a complete checkpoint of the step, after the copy is complete; only where the storage renames.
      dry_run: copies nothing; the result describes the copy.
      progress: called with (bytes done, bytes in all), as far as they are known.
      pace: called with the size of each file before it is read; it may wait, or raise an error, which ends the transfer.
    """

    workers: int = 16
    overwrite: bool = False
    dry_run: bool = False
    progress: Progress | None = None
    pace: Callable[[int], None] = _at_once


@dataclasses.dataclass(frozen=True)
class Transferred:
    """The result of a transfer, or its description; see ``CopyReport`` for the fields."""

    files: int
    nbytes: int
    checked_files: int
    left_out: tuple[str, ...]


class Transfer:
    """One copy under way.

    Attributes:
      source_error: the first error of the storage that is copied from; None if it has not failed.
    """

    def __init__(self, source: Identity, storage: Storage, step: int, options: TransferOptions):
        """Takes the checkpoint, and the run and the step to write."""
        located = source.located
        self._source = source
        self._from = located.storage
        self._base = located.directory
        self._manifest_name = located.manifest
        self._to = storage
        self._step = step
        self._progress = options.progress
        self._options = options
        self._budget = ByteBudget(IN_FLIGHT_BYTES)
        self._done = 0
        self._files = CheckpointFiles.of(located)
        self.source_error: StorageError | None = None

    def run(self, clock: Clock = time.time) -> Transferred:
        """Copies all files, and commits.

        Raises:
          CorruptCheckpointError: a file is missing or differs from its checksum. Nothing became visible.
          UnsafeSpecError: a symbolic link leads out of the checkpoint.
          StepTakenError: another process has written the step, or is writing it.
          StorageError: one of the storages failed. Nothing became visible.
        """
        self._check_links()
        with self._reading_source():
            sizes = {key.removeprefix(f'{self._base}/'): size for key, size in self._from.walk(self._base)}
        left_out = {PINNED} & sizes.keys()
        with self._reading_source():
            raw = read_raw(self._source.located)
        manifest, facts = raw.manifest or b'', raw.facts
        # The copy has the facts in its manifest, also those of the earlier layout.
        sizes = {key: size for key, size in sizes.items() if key != PINNED and not is_facts_file(key)}
        checksums = self._file_checksums(facts, sizes)
        if facts is not None:
            # Without the files of other programs, and those of a replaced checkpoint that are not removed yet.
            foreign = {*foreign_keys(sizes)} - checksums.keys() - {self._manifest_name}
            left_out |= foreign
            sizes = {key: sizes[key] for key in sizes.keys() - foreign - superseded(sizes, checksums)}
        self._compare(self._manifest_name, manifest, checksums)
        lost = sorted(set(checksums) - set(sizes))
        removed = [name for name in lost if is_position(name) and DATASET_REMOVED in sizes]
        if len(lost) > len(removed):
            part = part_of(checksums.lists, sizes) if COPIES in sizes else None
            if part is not None:
                raise CorruptCheckpointError(part_text(self._from.url(self._base), part))
            gone = next(name for name in lost if name not in removed)
            raise CorruptCheckpointError(f'{self._from.url(join(self._base, gone))} is missing; it is not copied.')
        names = sorted(set(sizes) - {self._manifest_name})
        if self._options.dry_run:
            nbytes = sum(self._size(name, sizes, checksums) for name in sizes)
            return Transferred(len(sizes), nbytes, 0, tuple(sorted(left_out)))
        options = TransactionOptions(may_replace=lambda: self._options.overwrite, has_source_names=True, collects=True)
        with open_transaction(self._to, self._step, clock, options) as work:
            with self._source.reading('copied'):
                moved = self._copy_all(work, {name: self._size(name, sizes, checksums) for name in names}, checksums)
            work.commit(manifest, facts, parents_of(names))
        checked = sum(name in checksums for name in [*names, self._manifest_name])
        nbytes = moved + len(file_with_facts(manifest, facts))
        return Transferred(len(sizes), nbytes, checked, tuple(sorted(left_out)))

    @contextlib.contextmanager
    def _reading_source(self) -> Generator[None]:
        """Records the error of a read, so that the caller can tell it from that of a write."""
        try:
            yield
        except StorageError as error:
            self.source_error = self.source_error or error
            raise

    def _read(self, name: str, checksums: FileChecksums | None) -> bytes:
        # A damaged file may be larger than the memory.
        entry = None if checksums is None else checksums.get(name)
        with self._reading_source():
            data = self._files.read(name, None if entry is None else entry[0])
        if checksums is not None:
            self._compare(name, data, checksums)
        return data

    def _compare(self, name: str, data: bytes, checksums: FileChecksums) -> None:
        if name in checksums:
            cure = 'A damaged checkpoint is not copied; copy an older step.'
            checksums.check(name, entry_of(data), self._from.url(join(self._base, name)), cure)

    def _file_checksums(self, facts: bytes | None, sizes: Mapping[str, int | None]) -> FileChecksums:
        """The recorded checksums of all files; empty for a checkpoint without checksums."""
        if facts is None:
            if lists := [name for name in sizes if is_file_checksums(name)]:
                raise CorruptCheckpointError(
                    f'{self._from.url(self._base)} has no facts of t5ckpt, so no checksum of {lists[0]} can be compared. Copy an '
                    'older step, or remove integrity.*.json to copy it as a step of T5X.'
                )
            return FileChecksums()
        recorded = FileChecksums.recorded_in(facts, self._from.url(join(self._base, self._manifest_name)))
        lists = recorded.load_lists(
            lambda name: self._read(name, None) if name in sizes else None,
            lambda name: self._from.url(join(self._base, name)),
        )
        return FileChecksums.union((recorded, *lists.values()))

    def _check_links(self) -> None:
        """Checks that no directory is a symbolic link: the listing would leave out its files.

        Raises:
          UnsupportedFormatError: a directory is a symbolic link.
        """
        root = self._from.local_path(self._base)
        for parent, directories, _ in os.walk(root) if root is not None else ():
            for path in (os.path.join(parent, name) for name in directories):
                if os.path.islink(path):
                    raise UnsupportedFormatError(
                        f'{path} is a symbolic link to a directory, which a copy does not follow. Put the directory there.'
                    )

    @staticmethod
    def _size(name: str, sizes: Mapping[str, int | None], checksums: FileChecksums) -> int:
        size = sizes[name]
        return size if size is not None else checksums[name][0] if name in checksums else 0

    def _report(self, size: int, total: int) -> None:
        self._done += size
        if self._progress is not None and size:
            self._progress(self._done, max(total, self._done))

    def _copy_all(self, work: Transaction, sizes: Mapping[str, int], checksums: FileChecksums) -> int:
        for parent in parents_of(sizes):
            self._to.make_dir(join(work.directory, parent))
        moved, total = 0, sum(sizes.values())
        with Pool(self._options.workers) as pool:
            for future in [pool.submit(self._copy_one, work, name, size, checksums) for name, size in sizes.items()]:
                size = future.result()
                moved += size
                self._report(size, total)
        return moved

    def _copy_one(self, work: Transaction, name: str, size: int, checksums: FileChecksums) -> int:
        admitted = size or _UNKNOWN_BYTES
        self._options.pace(size)
        with self._admitted(admitted):
            data = self._read(name, checksums)
            self._to.write(join(work.directory, name), data)
            return len(data)

    @contextlib.contextmanager
    def _admitted(self, size: int) -> Any:
        self._budget.acquire(size)
        try:
            yield
        finally:
            self._budget.release(size)

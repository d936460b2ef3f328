"""Copies the files of a checkpoint to another run, byte for byte, between any two storages.

Files are copied concurrently, and each is compared with its checksum if the checkpoint has checksums. The manifest is written
last, by the same commit as that of a save, so a copy is visible only when it is complete. In a bucket, the files are below a
directory of the copy, as those of a save, and the manifest names this directory (``format/relocation.py``).

A copy that was cut off leaves its files to garbage collection, and the next one begins again.

Notes: memory holds the files in flight, 256 MiB or one file. Only the file checksums are decoded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeVar

from t5ckpt.catalog.layouts import has_placeholder
from t5ckpt.commit.markers import SLOWEST_RATE, seconds_for
from t5ckpt.commit.occupancy import generations_in
from t5ckpt.commit.strategy import open_transaction
from t5ckpt.commit.transaction import Transaction, TransactionOptions
from t5ckpt.core.argument_kinds import checks_options
from t5ckpt.core.byte_budget import ByteBudget
from t5ckpt.core.keys import join, parents_of
from t5ckpt.core.protocols import Clock, Progress
from t5ckpt.core.thread_pool import Pool
from t5ckpt.errors import CorruptCheckpointError, StorageError, UnsupportedFormatError
from t5ckpt.format.facts import Facts
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, counts_of, entry_of
from t5ckpt.format.manifest import file_with_facts, takes_facts
from t5ckpt.format.names import (
    COPIES,
    PINNED,
    foreign_keys,
    generation_of,
    is_facts_file,
    is_file_checksums,
    is_position,
    is_removal_mark,
    part_of,
    part_text,
    positions_for_t5x,
    removal_marks,
    step_dir,
    without_generation,
)
from t5ckpt.format.relocation import relocated
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.identity import Identity
from t5ckpt.reading.raw_files import read_raw
from t5ckpt.storage import Storage

IN_FLIGHT_BYTES = 256 * 2**20
_T = TypeVar('_T')
# Reserved for a file whose size neither the listing nor a checksum has.
_UNKNOWN_BYTES = 16 * 2**20


@checks_options
@dataclasses.dataclass(frozen=True)
class CopyOptions:
    """The options of a copy.

    Attributes:
      source_options, target_options: of the two storages, see docs/storage.md.
      workers: the number of files that are copied at once.
      overwrite: replaces a complete checkpoint of the step, after the copy is complete.
      follow_links: symbolic links out of the checkpoint are followed, and their targets are copied.
      dry_run: copies nothing; the report describes the copy.
    """

    source_options: Mapping[str, Any] | None = None
    target_options: Mapping[str, Any] | None = None
    workers: int = 16
    overwrite: bool = False
    dry_run: bool = False
    follow_links: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f'workers={self.workers}: at least one has to copy.')


@dataclasses.dataclass(frozen=True)
class CopyReport:
    """The result of a copy or, with ``dry_run``, its description.

    Attributes:
      step: of the checkpoint.
      path: the directory of the copy, as a path or URL.
      files: the number of files in the copy.
      nbytes: the bytes that were copied.
      checked_files: the number of files that were compared with their checksums.
      seconds: the duration.
      left_out: files that are not copied: the pin, and those of other programs.
    """

    step: int
    path: str
    files: int
    nbytes: int
    checked_files: int
    seconds: float
    left_out: tuple[str, ...] = ()


def in_flight(
    sizes: Mapping[str, int],
    copy: Callable[[str], _T],
    workers: int,
    before: Callable[[int], None] = lambda _: None,
    *,
    budget_bytes: int = IN_FLIGHT_BYTES,
) -> Iterator[_T]:
    """Calls ``copy`` with each name, in threads; the files in flight have at most ``budget_bytes``, or are one file.

    ``before`` is called with the size of each file; it may wait, or raise an error, which ends the iteration.
    """
    budget = ByteBudget(budget_bytes)

    def copy_one(name: str, size: int) -> _T:
        before(size)
        budget.acquire(size)
        try:
            return copy(name)
        finally:
            budget.release(size)

    with Pool(workers) as pool:
        for future in [pool.submit(copy_one, name, size) for name, size in sizes.items()]:
            yield future.result()


class Transfer:
    """One copy under way.

    Attributes:
      source_error: the first error of the storage that is copied from; None if it has not failed.
    """

    def __init__(
        self,
        source: Identity,
        storage: Storage,
        step: int,
        options: CopyOptions,
        progress: Progress | None = None,
        pace: Callable[[int], None] = lambda _: None,
        rate: float = SLOWEST_RATE,
    ):
        """Takes the checkpoint, the run and the step to write, and what is called as by :func:`in_flight`."""
        located = source.located
        self._source = source
        self._from = located.storage
        self._base = located.directory
        self._manifest_name = located.manifest
        self._to = storage
        self._step = step
        self._progress, self._pace, self._rate = progress, pace, rate
        self._entries: dict[str, FileEntry] = {}
        self._options = options
        self._files = CheckpointFiles.of(located)
        self.source_error: StorageError | None = None

    def run(self, clock: Clock = time.time) -> CopyReport:
        """Copies all files, and commits.

        Raises:
          CorruptCheckpointError: a file is missing or differs from its checksum. Nothing became visible.
          UnsafeSpecError: a symbolic link leads out of the checkpoint.
          StepTakenError: another process has written, replaced or deleted the step.
          StorageError: one of the storages failed. Nothing became visible.
        """
        started = time.monotonic()
        self._check_links()
        with self._reading_source():
            sizes = {key.removeprefix(f'{self._base}/'): size for key, size in self._from.walk(self._base)}
        left_out, is_part = {PINNED} & sizes.keys(), COPIES in sizes
        with self._reading_source():
            raw = read_raw(self._source.located)
        manifest, facts = raw.manifest or b'', raw.facts
        # The copy has the facts in its manifest, also those of the earlier layout.
        sizes = {key: size for key, size in sizes.items() if key != PINNED and not is_facts_file(key)}
        if facts is None:
            own_dirs = {'', *generations_in(manifest)}
            sizes = {key: size for key, size in sizes.items() if generation_of(key) in own_dirs}
            sizes = {key: sizes[key] for key in sizes.keys() - positions_for_t5x(sizes).keys()}
        checksums = self._file_checksums(facts, sizes)
        if facts is not None:
            # Without the files of other programs, those of other saves of the step, and T5X's names of positions.
            left_out |= {*foreign_keys(sizes)} - checksums.keys() - {self._manifest_name}
            own_files = {*checksums, self._manifest_name, *removal_marks(checksums)}
            sizes = {key: size for key, size in sizes.items() if key in own_files}
        self._compare(self._manifest_name, manifest, checksums)
        self._check_none_lost(checksums, sizes, is_part=is_part)
        names = sorted(set(sizes) - {self._manifest_name})

        def report(nbytes: int, checked: int) -> CopyReport:
            path, seconds = self._to.url(step_dir(self._step)), time.monotonic() - started
            return CopyReport(self._step, path, len(sizes), nbytes, checked, seconds, tuple(sorted(left_out)))

        if not self._to.commits_by_rename and has_placeholder(manifest):
            raise UnsupportedFormatError(
                f'{self._source.located.url} is a checkpoint of Orbax. Convert it: t5ckpt convert orbax.'
            )
        total = sum(self._size(name, sizes, checksums) or 0 for name in sizes)
        if self._options.dry_run:
            return report(total, 0)
        lasts = seconds_for(total, self._rate)
        options = TransactionOptions(lambda: self._options.overwrite, collects=True, seconds=lasts)
        with open_transaction(self._to, self._step, clock, options) as work:
            renamed = {name: relocated(name, work.generation) for name in names}
            with self._source.reading('copied'):
                moved = self._copy_all(
                    {name: join(work.directory, target) for name, target in renamed.items()},
                    {name: self._size(name, sizes, checksums) for name in names},
                    checksums,
                )
            work.positions = [without_generation(name) for name in names if is_position(name)]
            manifest, facts = work.relocated(manifest, facts, self._source.located.url)
            self._commit(work, manifest, facts, renamed)
        checked = sum(name in checksums for name in [*names, self._manifest_name])
        return report(moved + len(file_with_facts(manifest, facts)), checked)

    def _commit(self, work: Transaction, manifest: bytes, facts: bytes | None, renamed: Mapping[str, str]) -> None:
        """Commits. In a bucket, a copy of a step of T5X gets facts, which name its files and those of its iterators."""
        directories = parents_of(renamed.values())
        if facts is not None or not work.generation or not takes_facts(manifest):
            work.commit(manifest, facts, directories)
            return
        written = self._from.modified(join(self._base, self._manifest_name))
        base = Facts(completeness='unknown', created_unix=written and round(written, 3))
        files = {renamed[name]: entry for name, entry in self._entries.items() if not is_removal_mark(name)}
        work.commit_with_checksums(manifest, base, counts_of(files), files, directories)

    def _check_none_lost(self, checksums: FileChecksums, sizes: Mapping[str, Any], *, is_part: bool) -> None:
        removed = filter(is_position, checksums) if any(map(is_removal_mark, sizes)) else ()
        lost = sorted(checksums.keys() - sizes.keys() - {*removed})
        if lost:
            part = part_of(checksums.lists, sizes) if is_part else None
            if part is not None:
                raise CorruptCheckpointError(part_text(self._from.url(self._base), part))
            cure = 't5ckpt cp --trust-files' if is_file_checksums(lost[0]) else 't5ckpt cp --drop'
            raise CorruptCheckpointError(
                f'{self._from.url(join(self._base, lost[0]))} is missing. Copy an older step, or what is intact: {cure}.'
            )

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
            cure = 'Copy an older step, or leave out what is damaged: t5ckpt cp --drop.'
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
    def _size(name: str, sizes: Mapping[str, int | None], checksums: FileChecksums) -> int | None:
        size = sizes[name]
        return checksums[name][0] if size is None and name in checksums else size

    def _copy_all(self, targets: Mapping[str, str], sizes: Mapping[str, int | None], checksums: FileChecksums) -> int:
        for parent in parents_of(targets.values()):
            self._to.make_dir(parent)

        def copy(name: str) -> int:
            data = self._read(name, checksums)
            self._to.write(targets[name], data)
            self._entries[name] = entry_of(data)
            return len(data)

        done, total = 0, sum(filter(None, sizes.values()))
        reserved = {name: _UNKNOWN_BYTES if size is None else size for name, size in sizes.items()}
        for size in in_flight(reserved, copy, self._options.workers, self._pace):
            done += size
            if self._progress is not None and size:
                self._progress(done, max(total, done))
        return done

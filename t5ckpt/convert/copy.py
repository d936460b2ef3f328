"""Copies a checkpoint byte for byte, between any two storages.

Files are copied concurrently, and each is compared with its checksum if the checkpoint has checksums. The manifest is written
last, by the same commit as that of a save, so a copy is visible only when it is complete.

An interrupted or failed copy keeps the files that it has written. The next copy of the same checkpoint to the same run
resumes: each of these files is complete, since a write makes a file visible as a whole. The sidecar of the temporary directory
identifies the source: the manifest, the checksums and, for files without a checksum, size, time and inode. From a bucket, files
without a checksum are copied again. Other unfinished directories are left to the garbage collection of the next save.

Notes: memory holds the files in flight, 256 MiB or one file. Only the file checksums are decoded.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.catalog.locate import Located, locate, open_run_storage, refuse_within, with_links
from t5ckpt.commit.begin import resume
from t5ckpt.commit.occupancy import check_room
from t5ckpt.commit.superseded import is_of_one_save
from t5ckpt.commit.transaction import Transaction, writer_facts
from t5ckpt.commit.write_lease import StepTakenError
from t5ckpt.core.byte_budget import ByteBudget
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock, Progress
from t5ckpt.core.thread_pool import Pool
from t5ckpt.core.unknown_arguments import explains_fields
from t5ckpt.errors import CheckpointExistsError, CorruptCheckpointError, UnsupportedFormatError
from t5ckpt.format.checksum import digest
from t5ckpt.format.file_checksums import FileChecksums, entry_of
from t5ckpt.format.names import (
    DATASET_REMOVED,
    PINNED,
    SIDECAR,
    TRAIN_DS_PREFIX,
    foreign_keys,
    is_file_checksums,
    parse_step_dir,
    step_dir,
    superseded,
)
from t5ckpt.format.sidecar import decode_sidecar
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.identity import Identity
from t5ckpt.reading.raw_files import sidecar_name
from t5ckpt.storage import Storage, foreign_errors, split_path

__all__ = ['CopyOptions', 'CopyReport', 'copy_checkpoint']

_IN_FLIGHT_BYTES = 256 * 2**20
# Reserved for a file whose size neither the listing nor a checksum has.
_UNKNOWN_BYTES = 16 * 2**20
_ABSENT: Any = object()


@explains_fields
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
      nbytes: the bytes that this call copied, without those of an earlier attempt.
      resumed_files: the number of files that an earlier attempt copied.
      checked_files: the number of files that were compared with their checksums.
      seconds: the duration.
      left_out: files that are not copied: the pin.
    """

    step: int
    path: str
    files: int
    nbytes: int
    resumed_files: int
    checked_files: int
    seconds: float
    left_out: tuple[str, ...] = ()


def copy_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    step: int | None = None,
    *,
    options: CopyOptions | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Copies a checkpoint byte for byte to another run, on any storage; a pin is not copied.

    Args:
      source: a run's directory, a step's directory, or a manifest file.
      target: the directory of the run that gets the copy.
      step: which step, if ``source`` is a run's directory; None takes the latest.
      options: see :class:`CopyOptions`.
      progress: called with (bytes done, bytes in all), as far as they are known.

    Raises:
      CheckpointNotFoundError: the checkpoint does not exist.
      CheckpointExistsError: the target has this step already, or another process is writing it.
      CorruptCheckpointError: a file is missing or differs from its checksum. Nothing became visible.
      UnsafeSpecError: a symbolic link leads out of the checkpoint.
      StorageError: one of the storages failed. Nothing became visible, and a second call resumes the copy.
    """
    options = CopyOptions() if options is None else options
    started = time.monotonic()
    located = with_links(locate(source, step, options.source_options), options.follow_links)
    if not located.manifest:
        raise UnsupportedFormatError(
            f'{located.url} is a checkpoint of Orbax, which has no file that makes it complete. Convert it (t5ckpt convert '
            f'orbax {located.url} {os.fspath(target)}), or copy its directory with another tool.'
        )
    number = _step_of(located, target)
    storage = open_run_storage(target, options.target_options)
    refuse_within(storage, located)
    check_room(storage, number, overwrite=options.overwrite)
    source_now = Identity.now(located)
    try:
        with source_now.checked_on_failure('copied'):
            return _Copy(source_now, storage, number, progress, options).run(started)
    except StepTakenError as error:
        raise CheckpointExistsError(f'{error}. Copy to another run, or replace it (overwrite=True).') from error


def _step_of(located: Located, target: str | os.PathLike[str]) -> int:
    _, name = split_path(target)
    if parse_step_dir(name) is not None:
        raise ValueError(f'{os.fspath(target)} is a directory of a step. Give that of the run, its parent.')
    if located.step is None:
        raise UnsupportedFormatError(
            f'{located.url}: its directory has no step in its name, so the copy would have none. Rename it to '
            '"checkpoint_<step>".'
        )
    return located.step


class _Copy:
    """One copy under way."""

    def __init__(self, source: Identity, storage: Storage, step: int, progress: Progress | None, options: CopyOptions):
        located = source.located
        self._source = source
        self._from = located.storage
        self._base = located.directory
        self._manifest_name = located.manifest
        self._to = storage
        self._step = step
        self._progress = progress
        self._options = options
        self._budget = ByteBudget(_IN_FLIGHT_BYTES)
        self._done = 0
        self._files = CheckpointFiles.of(located)

    def run(self, started: float, clock: Clock = time.time) -> CopyReport:
        self._check_links()
        sizes = {key.removeprefix(f'{self._base}/'): size for key, size in self._from.walk(self._base)}
        left_out = () if sizes.pop(PINNED, _ABSENT) is _ABSENT else (PINNED,)
        manifest = self._read(self._manifest_name, None)
        name = sidecar_name(manifest, sizes)
        sidecar = self._read(name, None) if name in sizes else None
        checksums = self._file_checksums(sidecar, sizes)
        if sidecar is not None:
            # Without the files of a replaced checkpoint that are not removed yet.
            sizes = {key: sizes[key] for key in sizes.keys() - superseded(sizes, checksums) - {name}} | {
                SIDECAR: sizes[name]
            }
        self._compare(self._manifest_name, manifest, checksums)
        lost = sorted(set(checksums) - set(sizes))
        removed = [name for name in lost if name.startswith(f'{TRAIN_DS_PREFIX}-') and DATASET_REMOVED in sizes]
        if len(lost) > len(removed):
            gone = next(name for name in lost if name not in removed)
            raise CorruptCheckpointError(f'{self._from.url(join(self._base, gone))} is missing; it is not copied.')
        names = sorted(set(sizes) - {self._manifest_name, SIDECAR})
        path = self._to.url(step_dir(self._step))
        if self._options.dry_run:
            nbytes = sum(self._size(name, sizes, checksums) for name in sizes)
            return CopyReport(self._step, path, len(sizes), nbytes, 0, 0, time.monotonic() - started, left_out)
        unlisted = repr([self._identity(name) for name in names if name not in checksums]).encode()
        facts = writer_facts() | {'resume': digest(manifest + (sidecar or b'') + unlisted)}
        with resume(self._to, self._step, clock, facts) as work:
            work.replaces = self._options.overwrite
            work.kept_after = (BaseException,)
            kept = self._there(work, names, checksums)
            total = sum(self._size(name, sizes, checksums) for name in names)
            self._report(sum(self._size(name, sizes, checksums) for name in kept), total)
            waiting = {name: self._size(name, sizes, checksums) for name in names if name not in kept}
            with self._source.reading('copied'):
                moved = self._copy_all(work, waiting, total, checksums)
            parents = sorted({name.rpartition('/')[0] for name in names} - {''})
            work.commit(manifest, sidecar, parents)
        checked = sum(name in checksums for name in [*names, self._manifest_name])
        nbytes = moved + len(manifest) + len(sidecar or b'')
        return CopyReport(
            self._step, path, len(sizes), nbytes, len(kept), checked, time.monotonic() - started, left_out
        )

    def _read(self, name: str, checksums: FileChecksums | None) -> bytes:
        data = self._files.read(name)
        if checksums is not None:
            self._compare(name, data, checksums)
        return data

    def _compare(self, name: str, data: bytes, checksums: FileChecksums) -> None:
        if name in checksums:
            cure = 'A damaged checkpoint is not copied; copy an older step.'
            checksums.check(name, entry_of(data), self._from.url(join(self._base, name)), cure)

    def _file_checksums(self, sidecar: bytes | None, sizes: Mapping[str, int | None]) -> FileChecksums:
        """The recorded checksums of all files; empty for a checkpoint without checksums."""
        if sidecar is None:
            if lists := [name for name in sizes if is_file_checksums(name)]:
                raise CorruptCheckpointError(
                    f'{self._from.url(join(self._base, SIDECAR))} is missing, so no checksum of {lists[0]} can be compared. A '
                    'damaged checkpoint is not copied; repair it (t5ckpt repair), or copy an older step.'
                )
            return FileChecksums()
        where = self._from.url(join(self._base, SIDECAR))
        recorded = FileChecksums.recorded_by(decode_sidecar(sidecar, where), where)
        lists = {name: self._files.read(name) for name in recorded.lists if name in sizes}
        return recorded.merged(recorded.read_lists(lists, lambda name: self._from.url(join(self._base, name))))

    def _identity(self, name: str) -> tuple[str, int, int, int]:
        """Identifies a file without a checksum, to detect that it was replaced."""
        path = self._from.local_path(join(self._base, name))
        if path is None:
            return name, 0, 0, 0
        with foreign_errors(path):
            info = os.stat(path)
        return name, info.st_size, info.st_mtime_ns, info.st_ino

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

    def _there(self, work: Transaction, names: Sequence[str], checksums: FileChecksums) -> set[str]:
        """The files that an earlier attempt has copied; deletes the other files that it left."""
        found = {key.removeprefix(f'{work.directory}/'): size for key, size in self._to.walk(work.directory)}
        # A temporary directory has only files of this copy. The directory of a step may also have files of other programs.
        # It and its directories of other saves are left to the commit.
        others = set[str]() if work.is_temporary else {*foreign_keys(found), *filter(is_of_one_save, found)}
        for name in found.keys() - {*names, SIDECAR} - others:
            self._to.delete_file(join(work.directory, name))
        is_local = self._from.local_path(self._base) is not None
        known = {name for name in names if name in found and (is_local or name in checksums)}
        return {name for name in known if name not in checksums or found[name] in (None, checksums[name][0])}

    def _report(self, size: int, total: int) -> None:
        self._done += size
        if self._progress is not None and size:
            self._progress(self._done, max(total, self._done))

    def _copy_all(self, work: Transaction, waiting: Mapping[str, int], total: int, checksums: FileChecksums) -> int:
        for parent in sorted({name.rpartition('/')[0] for name in waiting}):
            self._to.make_dir(join(work.directory, parent))
        moved = 0
        with Pool(self._options.workers, 't5ckpt-copy') as pool:
            futures = [pool.submit(self._copy_one, work, name, size, checksums) for name, size in waiting.items()]
            try:
                for future in concurrent.futures.as_completed(futures):
                    size = future.result()
                    moved += size
                    self._report(size, total)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return moved

    def _copy_one(self, work: Transaction, name: str, size: int, checksums: FileChecksums) -> int:
        admitted = size or _UNKNOWN_BYTES
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

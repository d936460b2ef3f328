"""Copying a checkpoint as it is, between any two storages.

Files are copied many at a time, each compared with its checksum on the way where the checkpoint has checksums; the
manifest comes last, by the same commit as a save's, so that a copy is there whole or not at all.

A copy that was stopped or that failed leaves what it has written. The next one of the same checkpoint to the same place
goes on from there: a file that is there came whole, since none is visible before that. Its owner's sidecar says what it is
a copy of: the manifest, the checksums, and of files without a checksum size, time and inode, where the source is local; from
a bucket these are copied again. Other unfinished directories are left to the garbage collection of the next save.

Notes: memory is that of the files in flight, 256 MiB or one file. Nothing is decoded but the file checksums.
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
from t5ckpt.commit.transaction import Transaction, writer_facts
from t5ckpt.commit.write_lease import StepTakenError
from t5ckpt.core.byte_budget import ByteBudget
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock, Progress
from t5ckpt.core.thread_pool import Pool
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
# What a file counts whose size no listing and no checksum says.
_UNKNOWN_BYTES = 16 * 2**20
_ABSENT: Any = object()


@dataclasses.dataclass(frozen=True)
class CopyOptions:
    """How to copy.

    Attributes:
      source_options, target_options: of the two storages, see docs/storage.md.
      workers: how many files are under way at once.
      overwrite: replaces a complete checkpoint of the step, once the copy is whole.
      follow_links: files that are symbolic links out of the checkpoint are copied as what they lead to.
      dry_run: moves nothing; the report says what would be moved.
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
    """What was copied, or would be.

    Attributes:
      step: the checkpoint's.
      path: the copy's directory, as a user would write it.
      files: that the copy has.
      nbytes: that were moved, not counting what an earlier attempt had moved.
      resumed_files: that an earlier attempt had copied.
      checked_files: that were compared with their checksums.
      seconds: it took.
      left_out: files that do not come along: the pin.
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
    """Copies a checkpoint byte for byte to another run, on any storage; a pin does not come along.

    Args:
      source: a run's directory, a step's directory, or a manifest file.
      target: the run's directory that is to hold it.
      step: which step, where ``source`` is a run's directory; None takes the latest.
      options: storages, how many files at once, what to do with a step that is there; see :class:`CopyOptions`.
      progress: called with (bytes done, bytes in all), as far as they are known.

    Raises:
      CheckpointNotFoundError: there is no such checkpoint.
      CheckpointExistsError: the target has this step already, or somebody is writing it.
      CorruptCheckpointError: a file is missing or differs from its checksum. Nothing became visible.
      UnsafeSpecError: a symbolic link leads out of the checkpoint.
      StorageError: one of the storages refused. Nothing became visible, and a second call goes on from here.
    """
    options = CopyOptions() if options is None else options
    started = time.monotonic()
    located = with_links(locate(source, step, options.source_options), options.follow_links)
    if not located.manifest:
        raise UnsupportedFormatError(
            f'{located.url} is a checkpoint of Orbax, which has no file that makes it complete. Convert it, or copy its '
            'directory with another tool.'
        )
    number = _step_of(located, target)
    storage = open_run_storage(target, options.target_options)
    refuse_within(storage, located)
    check_room(storage, number, overwrite=options.overwrite)
    source_now = Identity.now(located)
    try:
        with source_now.told('copied'):
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
            # Files of a checkpoint that this one has replaced, and that are not removed yet.
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
        """The checksums of all files, as far as there are any."""
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
        """Tells a file from every other that may come to have its name, where nothing is known of its bytes."""
        path = self._from.local_path(join(self._base, name))
        if path is None:
            return name, 0, 0, 0
        with foreign_errors(path):
            info = os.stat(path)
        return name, info.st_size, info.st_mtime_ns, info.st_ino

    def _check_links(self) -> None:
        """A directory that is a link would be left out, and what is missing of others' checkpoints is not known.

        Raises:
          UnsupportedFormatError: there is one.
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
        """The files that an earlier attempt has copied; what it had besides goes."""
        found = {key.removeprefix(f'{work.directory}/'): size for key, size in self._to.walk(work.directory)}
        # A temporary directory is this copy's alone. In place, others may have put files beside.
        others = set[str]() if self._to.renames else set(foreign_keys(found))
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

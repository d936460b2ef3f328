"""Copies a checkpoint byte for byte, between any two storages; ``commit/transfer.py`` documents the method."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

from t5ckpt.catalog.layouts import is_orbax
from t5ckpt.catalog.locate import locate, open_target, with_links
from t5ckpt.commit.step_lease import taken_step_exists
from t5ckpt.commit.strategy import strategy_of
from t5ckpt.commit.transfer import Transfer, TransferOptions
from t5ckpt.core.argument_kinds import checks_kinds, checks_options
from t5ckpt.core.protocols import Progress
from t5ckpt.errors import UnsupportedFormatError
from t5ckpt.format.names import step_dir
from t5ckpt.reading.identity import Identity
from t5ckpt.storage import Storage


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


@checks_kinds
def copy_checkpoint(
    source: str | os.PathLike[str] | Storage,
    target: str | os.PathLike[str] | Storage,
    step: int | None = None,
    *,
    options: CopyOptions | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Copies a checkpoint byte for byte to another run, on any storage; pins and files of other programs are not copied.

    Args:
      source: a run's directory, a step's directory, or a manifest file; or a Storage with one of the first two as its root.
      target: the directory of the run that gets the copy, or a Storage with it as its root.
      step: which step, if ``source`` is a run's directory; None takes the latest.
      options: see :class:`CopyOptions`.
      progress: called with (bytes done, bytes in all), as far as they are known.

    Raises:
      CheckpointNotFoundError: the checkpoint does not exist.
      CheckpointExistsError: the target has this step already, or another process is writing it.
      CorruptCheckpointError: a file is missing or differs from its checksum. Nothing became visible.
      UnsafeSpecError: a symbolic link leads out of the checkpoint.
      StorageError: one of the storages failed. Nothing became visible.
    """
    options = CopyOptions() if options is None else options
    started = time.monotonic()
    located = with_links(locate(source, step, options.source_options), options.follow_links)
    if not located.manifest:
        where = target.url() if isinstance(target, Storage) else os.fspath(target)
        of_orbax = is_orbax(located.storage, located.directory)
        what, kind = ('a checkpoint of Orbax', 'orbax') if of_orbax else ('a tree of zarr arrays', 'zarr')
        raise UnsupportedFormatError(
            f'{located.url} is {what}, which has no manifest. Convert it (t5ckpt convert {kind} {located.url} {where}), or copy '
            'its directory with another tool.'
        )
    number = located.step_to_write()
    storage = open_target(target, options.target_options)
    strategy_of(storage).check_room(storage, number, overwrite=options.overwrite)
    source_now = Identity.now(located)
    how = TransferOptions(options.workers, options.overwrite, options.dry_run, progress)
    cure = 'Copy to another run, or replace it (overwrite=True).'
    with taken_step_exists(cure), source_now.checked_on_failure('copied'):
        done = Transfer(source_now, storage, number, how).run()
    path, seconds = storage.url(step_dir(number)), time.monotonic() - started
    return CopyReport(number, path, seconds=seconds, **vars(done))

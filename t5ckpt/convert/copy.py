"""Copies a checkpoint byte for byte, between any two storages; ``commit/transfer.py`` documents the method."""

from __future__ import annotations

import os

from t5ckpt.catalog.layouts import is_orbax
from t5ckpt.catalog.locate import locate, open_target, with_links
from t5ckpt.commit.occupancy import check_room
from t5ckpt.commit.taken_steps import taken_step_exists
from t5ckpt.commit.transfer import CopyOptions, CopyReport, Transfer
from t5ckpt.core.argument_kinds import checks_kinds
from t5ckpt.core.protocols import Progress
from t5ckpt.errors import UnsupportedFormatError
from t5ckpt.reading.identity import Identity
from t5ckpt.storage import Storage


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
      CheckpointExistsError: the target has this step already, or another process replaces or deletes it.
      CorruptCheckpointError: a file is missing or differs from its checksum. Nothing became visible.
      UnsafeSpecError: a symbolic link leads out of the checkpoint.
      StorageError: one of the storages failed. Nothing became visible.
    """
    options = CopyOptions() if options is None else options
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
    check_room(storage, number, overwrite=options.overwrite)
    source_now = Identity.now(located)
    cure = 'Copy to another run, or replace it (overwrite=True).'
    with taken_step_exists(cure), source_now.checked_on_failure('copied'):
        return Transfer(source_now, storage, number, options, progress).run()

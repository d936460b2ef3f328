"""Reads the part that a process has of a step, and sends the files of its lists to the run's storage, with their checksums."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.markers import seconds_for
from t5ckpt.commit.transaction import Transaction
from t5ckpt.commit.transfer import copy_files
from t5ckpt.core.keys import join, parents_of
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import FormatError, T5CkptError
from t5ckpt.format.file_checksums import FileEntry, damaged_text, entry_of
from t5ckpt.format.names import is_position, step_dir
from t5ckpt.storage import Storage
from t5ckpt.tiers.part import Part
from t5ckpt.tiers.upload import Copy, NotUploadableError, UnreadableStepError, reading

# An upload must not take all connections or the processor from the training.
_WORKERS = 4


def read_part(local: Storage, step: int) -> Part:
    """Reads a part, see :meth:`Part.read`.

    Raises:
      NotUploadableError: it is damaged.
      UnreadableStepError: the disk failed.
      CheckpointNotFoundError: a file of it that is not a chunk is not there.
    """
    try:
        with reading(local, step):
            return Part.read(local, step)
    except FormatError as error:
        raise NotUploadableError(str(error)) from error


def copy_alone(local: Storage, run: Storage, step: int, pace: Callable[[int], None], rate: float, clock: Clock) -> Copy:
    """Copies a step of a job of one process, for ``tiers/upload.upload``.

    Args:
      local: the local directory.
      run: the run's storage.
      step: the step.
      pace: as for :func:`send_lists`.
      rate: the bytes in a second that the upload takes at least.
      clock: unix seconds.
    """

    def copy(replaces: bool) -> int:
        part = read_part(local, step)
        if len(part.lists) < part.count:
            raise NotUploadableError(f'{local.url(step_dir(step))} has the files of some processes of the save')
        files = {name: size for entries in part.lists.values() for name, (size, _) in entries.items()}
        seconds, found = seconds_for(sum(files.values()), rate), collect(run, clock)
        with Transaction(run, step, clock, overwrite=replaces, seconds=seconds, listed=found) as work:
            directory = join(work.directory, work.generation)
            nbytes, work.positions = send_lists(part, run, directory, pace, None)
            manifest, facts = work.relocated(part.manifest, part.facts, run.url(directory))
            work.commit(manifest, facts, parents_of(files))
        return nbytes

    return copy


def send_lists(
    part: Part, run: Storage, directory: str, pace: Callable[[int], None], lost: Mapping[str, FileEntry] | None
) -> tuple[int, list[str]]:
    """Sends the files of the lists of a part; returns their bytes, and the positions of data iterators among them.

    Args:
      part: of this process.
      run: the run's storage.
      directory: of the upload.
      lost: further files, of the list of a lost disk; None if no disk is lost.
      pace: called with the size of each file before it is read; may raise.

    Raises:
      NotUploadableError: a file is damaged or gone.
      UnreadableStepError: the disk failed.
      StorageError: the run's storage failed.
    """
    files: dict[str, FileEntry | None] = dict(lost or {})
    for name, entries in part.lists.items():
        if lost is None or part.there.issuperset(entries):
            files |= {**entries, name: None}

    def read(name: str) -> bytes:
        source, entry = join(step_dir(part.step), name), files[name]
        try:
            with reading(part.storage, part.step):
                data = part.storage.read(source)
        except UnreadableStepError:
            raise
        except T5CkptError as error:
            raise NotUploadableError(f'{part.storage.url(source)} cannot be read: {error}') from error
        if entry is not None and (sent := entry_of(data)) != entry:
            raise NotUploadableError(damaged_text(part.storage.url(source), sent, entry))
        return data

    sizes = {name: 0 if entry is None else entry[0] for name, entry in files.items()}
    nbytes = sum(copy_files(read, sizes, run, directory, _WORKERS, pace))
    return nbytes, [name for name in files if is_position(name)]

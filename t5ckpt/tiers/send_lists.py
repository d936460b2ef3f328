"""Reads the part that a process has of a step, and sends the files of its lists to the run's storage, with their checksums."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from t5ckpt.commit.transfer import in_flight
from t5ckpt.core.keys import join, parents_of
from t5ckpt.errors import FormatError, StorageError, T5CkptError
from t5ckpt.format.file_checksums import FileEntry, damaged_text, entry_of
from t5ckpt.format.names import is_position, step_dir
from t5ckpt.storage import Storage
from t5ckpt.tiers.part import Part
from t5ckpt.tiers.upload import NotUploadableError, unreadable

_WORKERS = 4


def read_part(local: Storage, step: int) -> Part:
    """Reads a part, see :meth:`Part.read`.

    Raises:
      NotUploadableError: it is damaged.
      UnreadableStepError: the disk failed.
      CheckpointNotFoundError: a file of it that is not a chunk is not there.
    """
    try:
        return Part.read(local, step)
    except FormatError as error:
        raise NotUploadableError(str(error)) from error
    except StorageError as error:
        raise unreadable(local.url(step_dir(step)), error) from error


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
    for parent in parents_of(files):
        run.make_dir(join(directory, parent))

    def copy(name: str) -> int:
        source, entry = join(step_dir(part.step), name), files[name]
        try:
            data = part.storage.read(source)
        except StorageError as error:
            raise unreadable(part.storage.url(source), error) from error
        except T5CkptError as error:
            raise NotUploadableError(f'{part.storage.url(source)} cannot be read: {error}') from error
        if entry is not None and (sent := entry_of(data)) != entry:
            raise NotUploadableError(damaged_text(part.storage.url(source), sent, entry))
        run.write(join(directory, name), data)
        return len(data)

    sizes = {name: 0 if entry is None else entry[0] for name, entry in files.items()}
    nbytes = sum(in_flight(sizes, copy, _WORKERS, pace))
    return nbytes, [name for name in files if is_position(name)]

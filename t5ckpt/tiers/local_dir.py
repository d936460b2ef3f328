"""The local directory of a run: its lock, and the id that it shares with the run.

    <local_dir>/.t5ckpt/tier.json       the run's URL and id
    <local_dir>/.t5ckpt/to_persist/     one file per step that waits for its upload, see ``tiers/intents.py``
    <run>/.t5ckpt/run_id                the id, written before the first upload

If the run's storage loses the id, the next upload writes it again. A start does so if the storage has a save of this directory.
A directory with the steps of another run, or of an earlier run at the same URL, is refused. Its steps would be restored, and
uploaded, as if they were those of this run. ``flock`` on the directory keeps other processes out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from t5ckpt.catalog.listing import steps_in
from t5ckpt.errors import CheckpointNotFoundError, LocalDirError, StorageError
from t5ckpt.format.names import INDEX, TIER_RECORD as _RECORD
from t5ckpt.storage import Storage, open_storage
from t5ckpt.tiers.local_lock import LocalLock
from t5ckpt.tiers.part import save_in, save_of

_RUN_ID = f'{INDEX}/run_id'
_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class TierRecord:
    """The file ``tier.json``.

    Attributes:
      run: the URL of the run.
      id: of the run.
      is_shared: whether the run has this id in its storage.
      keep: ``local_keep`` of the process that wrote the record.
    """

    run: str
    id: str
    is_shared: bool = False
    keep: int = 2

    def encode(self) -> bytes:
        """The file's bytes."""
        return json.dumps({'format': 1, **dataclasses.asdict(self)}).encode()


def read_record(local: Storage) -> TierRecord | None:
    """Reads the record of a local directory; None if it has none.

    Raises:
      LocalDirError: the record is damaged.
    """
    if not local.is_file(_RECORD):
        return None
    try:
        fields: dict[str, Any] = json.loads(local.read(_RECORD))
        fields.pop('format')
        return TierRecord(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LocalDirError(
            f'{local.url(_RECORD)} is damaged ({error}), so the run of its steps is unknown. {_cures(local)}'
        ) from error


def open_local(path: str | os.PathLike[str], run: Storage) -> Storage:
    """Opens a local directory, which need not exist.

    Raises:
      ValueError: it is not on a file system, or it is the run's directory, lies in it, or contains it.
    """
    local = open_storage(path)
    where, other = local.local_path(''), run.local_path('')
    if where is None:
        raise ValueError(f'local_dir must be a directory of this machine, got {local.url()}.')
    if other is not None:
        paths = [os.path.join(os.path.realpath(each), '') for each in (where, other)]
        if paths[0].startswith(paths[1]) or paths[1].startswith(paths[0]):
            raise ValueError(f'local_dir={where} and checkpoints_dir={other} must not contain each other.')
    return local


class LocalDir:
    """The local directory of one checkpointer.

    Attributes:
      guard: held while the directory is opened or gets its record, and while the run's id is noted.
      lock: of the directory.
    """

    def __init__(self, local: Storage, run: Storage, keep: int, *, read_only: bool):
        """Reads and creates nothing."""
        self.storage = local
        self.run = run
        self._keep = keep
        self.read_only = read_only
        self._record: TierRecord | None = None
        self.guard = threading.RLock()
        self.lock = LocalLock(local)
        # The id that the run's storage has; '' if it has none, None before the first answer.
        self._run_id: str | None = None
        self._has_asked = False

    def open(self, *, create: bool) -> bool:
        """Locks the directory and checks its record. Returns False if it does not exist and is not to be created.

        Raises:
          LocalDirError: it is a file, another process has it, it cannot be locked, or its steps are those of another run. In a
            forked process, the directory is to be created.
        """
        local = self.storage
        kind = local.kind('')
        if kind == 'file':
            raise LocalDirError(
                f'{local.url()} is a file, and local_dir must be a directory. Pass another local_dir, or move the file away.'
            )
        # A forked process reads both tiers without the lock, which its parent has.
        self.read_only |= self.lock.is_forked
        if create:
            self.lock.check_not_forked()
            local.make_dir('')
        elif kind is None:
            return False
        lost = self._forget_removed()
        if not self.read_only:
            self.lock.take()
        if self._record is None:
            self._record = read_record(local)
            self._check_record()
        if self._record is None and lost is not None and not steps_in(local):
            self._write(lost)
        return True

    def _forget_removed(self) -> TierRecord | None:
        """Ends the lock of a directory that was removed while it was in use; returns the record that it had."""
        if not self.lock.is_of_removed():
            return None
        _log.error('t5ckpt: %s was removed while it was in use, and its steps with it', self.storage.url())
        record, self._record = self._record, None
        self.lock.release()
        return record

    def _check_record(self) -> None:
        local, record = self.storage, self._record
        text = None
        if record is None and steps_in(local):
            text = (
                f'{local.url()} has checkpoints, but no {_RECORD} that names their run. It may be the directory of a run itself. '
                'Pass another local_dir.'
            )
        if record is not None and record.run != self.run.url():
            text = f'{local.url()} has the local checkpoints of {record.run}, and this run is {self.run.url()}. {_cures(local)}'
        if text is not None:
            self._record = None
            self.lock.release()
            raise LocalDirError(text)

    def check_id(self) -> None:
        """Compares the id of the directory with that of the run, which one request reads.

        Raises:
          LocalDirError: they differ.
          StorageError: the run's storage does not answer.
        """
        self._has_asked = True
        if self._run_id is None:
            self._note_run_id(read_run_id(self.run))
        record = self._record
        if record is None or record.id == self._run_id or not (self._run_id or record.is_shared):
            return
        if not self._run_id and self._has_save_of(self.saves()):
            if self.read_only:
                return
            self._note_run_id(self._written_run_id(record.id))
            if self._run_id == record.id:
                return
        if self._run_id and not self.read_only and not steps_in(self.storage):
            self._write(TierRecord(self.run.url(), self._run_id, True, self._keep))
            return
        found = (
            f'has the id {self._run_id}: it is a new run, or another job began it at the same time'
            if self._run_id
            else 'has none, as if it was deleted'
        )
        raise LocalDirError(
            f'{self.storage.url()} has the local checkpoints of another run at {self.run.url()}: their run has the id '
            f'{record.id}, and the run there {found}. {_cures(self.storage)}'
        )

    def check_id_before_save(self) -> None:
        """As :meth:`check_id`. A storage that did not answer is not asked again before the next upload or listing."""
        if self._record is None or (self._has_asked and self._run_id is None):
            return
        with contextlib.suppress(StorageError):
            self.check_id()

    def saves(self) -> list[tuple[int, str]]:
        """The steps of the directory, each with what identifies its save."""
        return [(step, save) for step in steps_in(self.storage) if (save := save_of(self.storage, step))]

    def _has_save_of(self, saves: Iterable[tuple[int, str]]) -> bool:
        """Whether the run's storage has one of these saves, so that it is the same run."""
        steps = {*steps_in(self.run)}
        return any(step in steps and save_in(self.run, step) == save for step, save in sorted(saves, reverse=True))

    def _note_run_id(self, found: str) -> None:
        """Keeps the id that the run's storage has. That it has none counts only if no upload has written one since."""
        with self.guard:
            self._run_id = found or self._run_id or ''

    def _written_run_id(self, identity: str) -> str:
        """Writes the id to the run's storage, and returns it; or that of another process, which was faster."""
        self.run.make_dir(INDEX)
        is_written = self.run.replace(_RUN_ID, identity.encode(), None) is not None
        return identity if is_written else read_run_id(self.run)

    def known_id(self) -> tuple[str, bool]:
        """The id in the record, and whether the run has it, too; ('', False) without a record."""
        return ('', False) if self._record is None else (self._record.id, self._record.is_shared)

    def agreed_id(self, known: Sequence[tuple[str, bool]], saves: Iterable[tuple[int, str]]) -> tuple[str, bool]:
        """The id of a job of several processes, from :meth:`known_id` and :meth:`saves` of each; in process 0.

        Returns:
          The id, and whether the run has it.

        Raises:
          LocalDirError: the directories are of an earlier run at the same URL.
        """
        ids = sorted({each for each, _ in known if each})
        try:
            found = read_run_id(self.run)
            if found == '' and any(is_shared for _, is_shared in known) and self._has_save_of(saves):
                found = self._written_run_id(ids[0])
        except StorageError:
            found = None
        if found == '' and any(is_shared for _, is_shared in known):
            raise LocalDirError(
                f'the local directories have the checkpoints of another run at {self.run.url()}, and the run there has no id, '
                f'as if it was deleted. {_cures(self.storage)}'
            )
        agreed = found or (ids[0] if ids else secrets.token_hex(8))
        return agreed, found == agreed or any(each == agreed and is_shared for each, is_shared in known)

    def adopt(self, agreed: str, *, is_shared: bool) -> None:
        """Takes the id that the processes agreed on; ``is_shared`` is whether the run has it.

        Raises:
          LocalDirError: the directory has steps of a run with another id.
        """
        record = self._record
        if record is not None and record.id != agreed and steps_in(self.storage):
            raise LocalDirError(
                f'{self.storage.url()} has the local checkpoints of a run with the id {record.id}, and the other processes those '
                f'of the run {agreed} at {self.run.url()}. {_cures(self.storage)}'
            )
        if record is None or record.id != agreed:
            self._write(TierRecord(self.run.url(), agreed, is_shared, self._keep))
        elif is_shared:
            self.note_shared()

    def ensure_record(self) -> None:
        """Writes the record before the first local commit, with the run's id if its storage answers."""
        with self.guard:
            if self._record is not None:
                return
            found = self._run_id
            if found is None:
                # A run that cannot be reached gets the id later.
                with contextlib.suppress(StorageError):
                    found = read_run_id(self.run)
            self._write(TierRecord(self.run.url(), found or secrets.token_hex(8), bool(found), self._keep))
            self._run_id = found or None

    def share_id(self) -> None:
        """Writes the id to the run's storage, if it has none; before each upload.

        A storage may lose the id, for instance by a rule that deletes objects of an age. Before the first upload of a process, it
        is written again only if the storage has a save of this directory.

        Raises:
          LocalDirError: it has another one.
        """
        record = self._record
        if record is None:
            return
        found = read_run_id(self.run)
        if not found and (self._run_id == record.id or not record.is_shared):
            found = self._written_run_id(record.id)
        self._note_run_id(found)
        self.check_id()
        self.note_shared()

    def note_shared(self) -> None:
        """Records that the run has the id. Every process does, since the disks of the others may be lost."""
        record = self._record
        if record is None or record.is_shared:
            return
        try:
            self._write(dataclasses.replace(record, is_shared=True))
        except StorageError as error:
            # On a full disk, uploads make room.
            _log.warning(
                't5ckpt: %s could not be written; the next upload repeats it: %s', self.storage.url(_RECORD), error
            )

    def _write(self, record: TierRecord) -> None:
        self.storage.make_dir(INDEX)
        self.storage.write(_RECORD, record.encode())
        self.storage.sync_tree('', [])
        self._record = record

    def end(self) -> None:
        """Releases the lock; later calls only read."""
        self.read_only = True
        self.lock.release()


def read_run_id(run: Storage) -> str:
    """The id of a run; '' if its storage has none.

    Raises:
      StorageError: the storage does not answer.
    """
    try:
        return run.read(_RUN_ID).decode().strip()
    except CheckpointNotFoundError:
        return ''


def _cures(local: Storage) -> str:
    return (
        f'Pass another local_dir to start without its steps. Before you delete {local.url()}, copy the steps to keep to a run '
        '(t5ckpt cp): they may be the only copies.'
    )

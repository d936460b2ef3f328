"""Writing and deleting a step where nothing can be renamed: in place, under a marker that says whose it is.

Whoever writes or deletes ``checkpoint_<step>`` holds ``.t5ckpt/busy/<step>``: who, on which machine, and the time of the
last heartbeat, which a thread renews every minute. The marker is written before anything else and goes last, so that
every leftover of a crash has one, and nothing without one is ever swept.

    save     busy, arrays, sidecar, [is the marker still ours?], manifest, steps marker, -busy
    delete   busy, -manifest, [no pin?], [no read lease?], -steps marker, [is the marker still ours?], -everything, -busy

A marker is dead when its process has ended, which can be seen on the same machine, or when it has not been renewed for a
time: ten minutes for who wants to write this very step, an hour for who sweeps. What a dead one left is committed if the
manifest is there (then only its marker is made good), else removed.

A manifest whose PUT failed may still arrive, so its arrays stay where they are and the marker with them: either it
arrives, and the checkpoint is whole, or the next sweep removes both.

Notes: two writers of one step are told apart by reading the marker again after writing it. Between that and the other's
look at it lies a window of one request, in which both may go on; the one whose marker was written over drops its save
before its manifest. Clocks of machines that share a run may differ by less than these ten minutes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from t5ckpt.catalog.step_index import Index
from t5ckpt.core.protocols import Clock
from t5ckpt.core.thread_pool import start_thread
from t5ckpt.errors import CheckpointNotFoundError, T5CkptError
from t5ckpt.format.names import busy_marker, step_dir
from t5ckpt.format.sidecar import Sidecar, encode_sidecar
from t5ckpt.storage import Storage

__all__ = [
    'TAKE_OVER_SECONDS',
    'AlreadyCommittedError',
    'Owner',
    'WriteLease',
    'acquire_lease',
    'has_ended',
    'parse_owner',
    'process_facts',
    'read_owner',
    'sidecar_record',
]

TAKE_OVER_SECONDS = 600.0
_BEAT_SECONDS = 60.0
_log = logging.getLogger('t5ckpt')


class AlreadyCommittedError(Exception):
    """Another writer has this step, committed or under way."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """The contents of a write lease: ``place`` names the machine's boot and the container, in which ``pid`` is a process.

    ``host`` is for people alone: machines of one job may all have the same name.
    """

    nonce: str
    host: str
    place: str
    pid: int
    born: str
    beat: float

    def is_dead(self, now: float, stale_after: float) -> bool:
        """Whether nobody is at work under this marker; for one who holds the directory's claim in this process."""
        if self.place and self.place == _boot_id():
            return self.pid == os.getpid() or _process_start_time(self.pid) != self.born
        return now - self.beat > stale_after


# Half a marker cannot be, so one that is none of ours is somebody else's.
_UNKNOWN = Owner('', 'unknown', '', 0, '', math.inf)


def _boot_id() -> str:
    """Names this boot of this machine and its process ids; '' where that cannot be told."""
    try:
        with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as file:
            return f'{file.read().strip()}/{os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return ''


def _process_start_time(pid: int) -> str:
    """When a process began, in ticks since the boot; '' if there is none."""
    try:
        with open(f'/proc/{pid}/stat', encoding='utf-8', errors='replace') as file:
            return file.read().rpartition(')')[2].split()[19]
    except (OSError, IndexError):
        return ''


def process_facts() -> dict[str, Any]:
    """What tells this process from all others, for :func:`has_ended`."""
    return {'place': _boot_id(), 'born': _process_start_time(os.getpid())}


def has_ended(writer: Any) -> bool:
    """Whether a writer, by its facts in a finished sidecar, was a process of this machine that has ended."""
    if not isinstance(writer, Mapping) or not isinstance(writer.get('pid'), int) or not writer.get('place'):
        return False
    return writer['place'] == _boot_id() and (
        writer['pid'] == os.getpid() or _process_start_time(writer['pid']) != writer.get('born')
    )


def parse_owner(data: Any) -> Owner | None:
    """The owner that a decoded record names; None where it has not all of the facts."""
    names = {field.name for field in dataclasses.fields(Owner)}
    if not isinstance(data, Mapping) or not names <= data.keys():
        return None
    return Owner(**{name: data[name] for name in names})


def read_owner(storage: Storage, key: str) -> Owner | None:
    """The owner in a lease; None where there is none. One that cannot be parsed never dies."""
    try:
        data = storage.read(key)
    except CheckpointNotFoundError:
        return None
    try:
        record = json.loads(data)
    except ValueError:
        record = None
    return parse_owner(_owner_part(record)) or _UNKNOWN


def _owner_part(record: Any) -> Any:
    """In a marker the whole record; in the sidecar of an unfinished directory its entry ``writer``."""
    return record['writer'] if isinstance(record, Mapping) and 'writer' in record else record


def _encode_marker(owner: Mapping[str, Any]) -> bytes:
    return json.dumps(owner).encode()


def sidecar_record(writer: Mapping[str, Any], step: int) -> Callable[[Mapping[str, Any]], bytes]:
    """Makes the record of an owner that lies in the sidecar of an unfinished directory, with what ``writer`` adds."""
    return lambda owner: encode_sidecar(Sidecar(extra={'writer': {**writer, **owner}, 'step': step}))


class WriteLease:
    """A step or a directory that this process writes: the record of its owner, the heartbeat and the claim.

    The record is written anew each minute until the lease is closed or taken over.
    """

    def __init__(
        self, storage: Storage, key: str, clock: Clock, claim: Any, encode: Callable[[Mapping[str, Any]], bytes]
    ):
        """Writes the record, which ``encode`` makes of the owner's facts."""
        self._storage = storage
        self._key = key
        self._clock = clock
        self._claim = claim
        self._encode = encode
        self.nonce = secrets.token_hex(8)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._write()

    def _write(self) -> None:
        owner = Owner(
            self.nonce, socket.gethostname(), _boot_id(), os.getpid(), _process_start_time(os.getpid()), self._clock()
        )
        self._storage.write(self._key, self._encode(dataclasses.asdict(owner)))

    def start(self) -> None:
        """Begins to renew the record. Without a thread for it, the lease holds as long as the record is young."""
        if start_thread(self._renew, 't5ckpt-heart', daemon=True) is None:
            _log.info('t5ckpt: %s is not renewed: no thread could be started', self._storage.url(self._key))

    def _renew(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            try:
                with self._lock:
                    if self._ended.is_set() or not self.is_ours():
                        return
                    self._write()
            except T5CkptError as error:
                _log.warning('t5ckpt: could not renew %s: %s', self._storage.url(self._key), error)

    def is_ours(self) -> bool:
        """Whether the record is the one that was written here."""
        return self.rival() is None

    def rival(self) -> Owner | None:
        """The owner who has written over the record; one without a name where it is gone, None where it is ours."""
        owner = read_owner(self._storage, self._key)
        return None if owner is not None and owner.nonce == self.nonce else owner or _UNKNOWN

    def stop(self) -> None:
        """Ends the heartbeat, and leaves the record and the claim."""
        self._ended.set()
        with self._lock:
            # No heartbeat is under way any more.
            pass

    def close(self) -> None:
        """Lets go and leaves the record, for the next garbage collection."""
        self.stop()
        self._claim.close()

    def release(self) -> None:
        """Lets go and removes the record."""
        self.stop()
        with contextlib.closing(self._claim):
            try:
                self._storage.delete_file(self._key)
            except T5CkptError as error:
                _log.warning('t5ckpt: %s stays for the next save: %s', self._key, error)


def acquire_lease(storage: Storage, step: int, clock: Clock, index: Index | None = None) -> WriteLease:
    """Takes a step for writing or deleting. With the markers as they were just listed one request less is needed.

    Raises:
      AlreadyCommittedError: somebody else is at it.
    """
    claim = storage.claim(step_dir(step))
    if claim is None:
        raise AlreadyCommittedError(f'{storage.url(step_dir(step))} is being written by another save of this process')
    try:
        hold = _acquire(storage, step, clock, claim, index)
    except BaseException:
        claim.close()
        raise
    hold.start()
    return hold


def _acquire(storage: Storage, step: int, clock: Clock, claim: Any, index: Index | None) -> WriteLease:
    is_known_free = index is not None and index.is_fresh and step not in index.busy
    owner = None if is_known_free else read_owner(storage, busy_marker(step))
    if owner is not None and not owner.is_dead(clock(), TAKE_OVER_SECONDS):
        raise AlreadyCommittedError(_owned_by_other(storage, step, owner))
    hold = WriteLease(storage, busy_marker(step), clock, claim, _encode_marker)
    rival = hold.rival()
    if rival is not None:
        raise AlreadyCommittedError(_owned_by_other(storage, step, rival))
    return hold


def _owned_by_other(storage: Storage, step: int, owner: Owner) -> str:
    who = 'another writer' if owner is _UNKNOWN else f'process {owner.pid} on {owner.host}'
    return (
        f'{storage.url(step_dir(step))} is being written or deleted by {who}; if that one is dead, '
        f'{TAKE_OVER_SECONDS / 60:g} minutes after its end it no longer counts'
    )

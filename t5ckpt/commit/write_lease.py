"""Write leases: the record of the process that writes or deletes a step, with its heartbeat.

On object stores, where a step is written in place, the lease of ``checkpoint_<step>`` is the object ``.t5ckpt/busy/<step>``.
It names the process, its machine and the time of the last heartbeat; a thread renews it every minute. The lease is written
before anything else and removed last. Every leftover of a crash has a lease, and garbage collection removes nothing without
one.

    save     busy, arrays, sidecar, [is the lease still ours?], manifest, steps marker, -busy
    delete   busy, -manifest, [no pin?], [no read lease?], -steps marker, [is the lease still ours?], -everything, -busy

A lease ends with its process, which is visible on the same machine. Otherwise it expires without a heartbeat: after ten
minutes for another writer of the same step, and after an hour for garbage collection. If the manifest exists then, the step
is committed and gets its steps marker; otherwise its files are removed.

A manifest whose PUT failed may still arrive, so its arrays and the lease stay. If it arrives, the checkpoint is complete. If
not, garbage collection removes the arrays and the lease.

Notes: two writers of one step detect each other by reading the lease again after writing it. In a window of one request
both may go on; the writer whose lease was overwritten drops its save before its manifest. The clocks of machines that share
a run must differ by less than ten minutes.
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
    """Another writer has committed this step, or is writing it."""


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
        """Returns whether the lease has expired. The caller holds the lock of the directory in this process."""
        if self.place and self.place == _boot_id():
            return self.pid == os.getpid() or _process_start_time(self.pid) != self.born
        return now - self.beat > stale_after


# An object is never half written, so a record that does not parse is of another program.
_UNKNOWN = Owner('', 'unknown', '', 0, '', math.inf)


def _boot_id() -> str:
    """Returns the boot id of this machine and the pid namespace; '' where /proc has none."""
    try:
        with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as file:
            return f'{file.read().strip()}/{os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return ''


def _process_start_time(pid: int) -> str:
    """Returns the start time of a process in clock ticks since boot; '' if there is no such process."""
    try:
        with open(f'/proc/{pid}/stat', encoding='utf-8', errors='replace') as file:
            return file.read().rpartition(')')[2].split()[19]
    except (OSError, IndexError):
        return ''


def process_facts() -> dict[str, Any]:
    """Returns the facts that identify this process, for :func:`has_ended`."""
    return {'place': _boot_id(), 'born': _process_start_time(os.getpid())}


def has_ended(writer: Any) -> bool:
    """Returns whether the writer that a finished sidecar names was a process of this machine that has ended."""
    if not isinstance(writer, Mapping) or not isinstance(writer.get('pid'), int) or not writer.get('place'):
        return False
    return writer['place'] == _boot_id() and (
        writer['pid'] == os.getpid() or _process_start_time(writer['pid']) != writer.get('born')
    )


def parse_owner(data: Any) -> Owner | None:
    """Returns the owner of a decoded record; None where a field is missing."""
    names = {field.name for field in dataclasses.fields(Owner)}
    if not isinstance(data, Mapping) or not names <= data.keys():
        return None
    return Owner(**{name: data[name] for name in names})


def read_owner(storage: Storage, key: str) -> Owner | None:
    """Returns the owner in a lease; None where there is no lease. A lease that cannot be parsed never expires."""
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
    """The owner in a record: all of it in a lease object, the entry ``writer`` in the sidecar of an unfinished directory."""
    return record['writer'] if isinstance(record, Mapping) and 'writer' in record else record


def _encode_marker(owner: Mapping[str, Any]) -> bytes:
    return json.dumps(owner).encode()


def sidecar_record(writer: Mapping[str, Any], step: int) -> Callable[[Mapping[str, Any]], bytes]:
    """Returns a function that encodes an owner, merged with ``writer``, as the sidecar of an unfinished directory."""
    return lambda owner: encode_sidecar(Sidecar(extra={'writer': {**writer, **owner}, 'step': step}))


class WriteLease:
    """The write lease of this process on a step or a directory: the record, the heartbeat and the directory lock.

    The record is written anew each minute until the lease is closed or taken over.
    """

    def __init__(
        self, storage: Storage, key: str, clock: Clock, dir_lock: Any, encode: Callable[[Mapping[str, Any]], bytes]
    ):
        """Writes the record, which ``encode`` makes of the owner's facts."""
        self._storage = storage
        self._key = key
        self._clock = clock
        self._dir_lock = dir_lock
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
        """Returns whether the record on storage is the one that this lease wrote."""
        return self.rival() is None

    def rival(self) -> Owner | None:
        """Returns the owner that overwrote the record: None where it is ours, an owner without a name where it was deleted."""
        owner = read_owner(self._storage, self._key)
        return None if owner is not None and owner.nonce == self.nonce else owner or _UNKNOWN

    def stop(self) -> None:
        """Ends the heartbeat, and keeps the record and the lock."""
        self._ended.set()
        with self._lock:
            # Wait for a heartbeat that is being written.
            pass

    def close(self) -> None:
        """Releases the lock and keeps the record, for garbage collection."""
        self.stop()
        self._dir_lock.close()

    def release(self) -> None:
        """Removes the record and releases the lock."""
        self.stop()
        with contextlib.closing(self._dir_lock):
            try:
                self._storage.delete_file(self._key)
            except T5CkptError as error:
                _log.warning('t5ckpt: %s stays for the next save: %s', self._key, error)


def acquire_lease(storage: Storage, step: int, clock: Clock, index: Index | None = None) -> WriteLease:
    """Acquires the write lease of a step, for writing or deleting it.

    Args:
      storage: the run.
      step: the step.
      clock: unix seconds.
      index: the markers, if they were just listed; this saves one request.

    Raises:
      AlreadyCommittedError: another process has a lease that has not expired.
    """
    lock = storage.try_lock(step_dir(step))
    if lock is None:
        raise AlreadyCommittedError(f'{storage.url(step_dir(step))} is being written by another save of this process')
    try:
        lease = _acquire(storage, step, clock, lock, index)
    except BaseException:
        lock.close()
        raise
    lease.start()
    return lease


def _acquire(storage: Storage, step: int, clock: Clock, dir_lock: Any, index: Index | None) -> WriteLease:
    is_known_free = index is not None and index.is_fresh and step not in index.busy
    owner = None if is_known_free else read_owner(storage, busy_marker(step))
    if owner is not None and not owner.is_dead(clock(), TAKE_OVER_SECONDS):
        raise AlreadyCommittedError(_owned_by_other(storage, step, owner))
    lease = WriteLease(storage, busy_marker(step), clock, dir_lock, _encode_marker)
    rival = lease.rival()
    if rival is not None:
        raise AlreadyCommittedError(_owned_by_other(storage, step, rival))
    return lease


def _owned_by_other(storage: Storage, step: int, owner: Owner) -> str:
    who = 'another writer' if owner is _UNKNOWN else f'process {owner.pid} on {owner.host}'
    return (
        f'{storage.url(step_dir(step))} is being written or deleted by {who}; if that process is dead, '
        f'its write lease expires {TAKE_OVER_SECONDS / 60:g} minutes after its last heartbeat'
    )

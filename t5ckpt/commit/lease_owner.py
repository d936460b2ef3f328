"""Identifies the owner of a write lease, a process on a machine, and determines whether it has ended."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
from collections.abc import Mapping
from typing import Any

from t5ckpt.core.protocols import Clock
from t5ckpt.errors import AccessDeniedError, CheckpointNotFoundError
from t5ckpt.storage import Storage

SAVE = 'save'
"""The owner writes the step, in a directory of its own."""
DELETE = 'delete'
"""The owner is about to hide the step, or removes its files."""
REPLACE = 'replace'
"""The owner puts another checkpoint in the place of the step, or removes the files of its data iterators."""
COLLECT = 'mend'
"""The owner changes something of the step that no reader needs: garbage collection."""

# The names of fields in a record on storage, where they differ.
_RECORD_NAMES = {'boot_id': 'place', 'started': 'born', 'last_beat': 'beat'}
# The leases that this process holds, by nonce. A record of this process that is not among them was left behind.
_open_nonces: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Owner:
    """The contents of a write lease.

    Attributes:
      nonce: identifies the lease.
      host: only for messages, since machines of one job may all have the same name.
      boot_id: the boot of the machine, and the container, in which ``pid`` is a process.
      pid: the process.
      started: when the process started, in clock ticks since boot.
      last_beat: when the record was last written.
      action: one of those above.
    """

    nonce: str
    host: str
    boot_id: str
    pid: int
    started: str
    last_beat: float
    action: str = SAVE

    @property
    def is_local(self) -> bool:
        """Whether it is a process of this machine and container, which shows when it has ended."""
        return bool(self.boot_id) and self.boot_id == _boot_id()

    def is_dead(self, clock: Clock, stale_after: float) -> bool:
        """Returns whether the lease has expired, or its process or, in this process, the owner of the lease has ended.

        ``clock`` is a :func:`~t5ckpt.commit.lease_time.lease_clock`, and read only for a lease of another machine.
        """
        if self.is_local:
            if self.pid == os.getpid():
                return self.nonce not in _open_nonces
            return _process_start_time(self.pid) != self.started
        return clock() - self.last_beat > stale_after

    def record(self) -> dict[str, Any]:
        """The fields of the record on storage."""
        return {_RECORD_NAMES.get(name, name): value for name, value in dataclasses.asdict(self).items()}


# An object is never half written, so a record that does not parse is of another program.
UNKNOWN = Owner('', 'unknown', '', 0, '', math.inf, '')
# In every record that lingers: it has no owner, so that others may take the step and garbage collection inspects it.
EXPIRED = Owner('', '', '', 0, '', 0.0, COLLECT)


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
    """Returns whether the writer in the facts of a finished directory was a process of this machine that has ended."""
    if not isinstance(writer, Mapping) or not isinstance(writer.get('pid'), int) or not writer.get('place'):
        return False
    return writer['place'] == _boot_id() and (
        writer['pid'] == os.getpid() or _process_start_time(writer['pid']) != writer.get('born')
    )


def parse_owner(data: Any) -> Owner | None:
    """Returns the owner of a decoded record; None where a field is missing."""
    fields = {field.name: field.default for field in dataclasses.fields(Owner)}
    if not isinstance(data, Mapping):
        return None
    values = {name: data.get(_RECORD_NAMES.get(name, name), default) for name, default in fields.items()}
    return None if dataclasses.MISSING in values.values() else Owner(**values)


def read_owner(storage: Storage, key: str) -> Owner | None:
    """Returns the owner in a lease; None where there is no lease. A lease that cannot be parsed never expires."""
    try:
        data = storage.read(key)
    except CheckpointNotFoundError:
        return None
    except AccessDeniedError:
        if storage.modified(key) is None:
            raise
        # The file exists, and the umask of its user hides its contents. It must not prevent this process from saving other steps.
        return UNKNOWN
    try:
        record = json.loads(data)
    except ValueError:
        record = None
    owner = parse_owner(_owner_part(record))
    return UNKNOWN if owner is None else dated(storage, key, owner)


def dated(storage: Storage, key: str, owner: Owner) -> Owner:
    """Returns the owner with its last heartbeat by the clock of the file server, where files have times."""
    written = storage.modified(key)
    return owner if written is None else dataclasses.replace(owner, last_beat=written)


def _owner_part(record: Any) -> Any:
    """The owner in a record: all of it in a lease object, the entry ``writer`` in the facts of an unfinished directory."""
    return record['writer'] if isinstance(record, Mapping) and 'writer' in record else record


def new_owner(nonce: str, last_beat: float, action: str) -> Owner:
    """Returns this process as the owner of a lease, which ends with :func:`end_owner`."""
    _open_nonces.add(nonce)
    return Owner(
        nonce, socket.gethostname(), _boot_id(), os.getpid(), _process_start_time(os.getpid()), last_beat, action
    )


def end_owner(nonce: str) -> None:
    """Records that this process no longer holds a lease."""
    _open_nonces.discard(nonce)

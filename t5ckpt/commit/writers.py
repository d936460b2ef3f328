"""Identifies the process that writes or deletes a step, and determines whether it has ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from t5ckpt._version import __version__


def _boot_id() -> str:
    """Returns the boot id of this machine and the pid namespace; '' where /proc has none."""
    try:
        with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as file:
            return f'{file.read().strip()}/{os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return ''


def _process_start_time(pid: int) -> str:
    """The start time of a process in clock ticks since boot; 'ended' for one whose parent has not waited for it; '' for none."""
    try:
        with open(f'/proc/{pid}/stat', encoding='utf-8', errors='replace') as file:
            fields = file.read().rpartition(')')[2].split()
            return 'ended' if fields[0] in 'ZX' else fields[19]
    except (OSError, IndexError):
        return ''


def writer_facts() -> dict[str, Any]:
    """Returns what identifies this writer, for the facts of a checkpoint and for the garbage collection of other processes."""
    host, pid = socket.gethostname(), os.getpid()
    return {
        'name': 't5ckpt',
        'version': __version__,
        'host': host,
        'pid': pid,
        'place': _boot_id(),
        'born': _process_start_time(pid),
    }


def is_local(writer: Any) -> bool:
    """Whether a writer was a process of this machine and container, which shows when it has ended."""
    return isinstance(writer, Mapping) and bool(writer.get('place')) and writer['place'] == _boot_id()


open_nonces: set[str] = set()
"""Of the markers whose work this process has not ended."""


def has_ended(writer: Any, nonce: str) -> bool:
    """Whether a writer was a process of this machine that has ended; if it is this process, whether its work has."""
    pid = writer.get('pid') if is_local(writer) else None
    if not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    if pid == os.getpid():
        return nonce not in open_nonces
    born = _process_start_time(pid)
    if born:
        return born != writer.get('born')
    try:
        # /proc may hide the processes of other users.
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False

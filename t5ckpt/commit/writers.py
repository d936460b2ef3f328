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
    """Returns the start time of a process in clock ticks since boot; '' if there is no such process."""
    try:
        with open(f'/proc/{pid}/stat', encoding='utf-8', errors='replace') as file:
            return file.read().rpartition(')')[2].split()[19]
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
    if not isinstance(pid, int):
        return False
    if pid == os.getpid():
        return nonce not in open_nonces
    born = _process_start_time(pid)
    if born:
        return born != writer['born']
    try:
        # /proc may hide the processes of other users.
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False

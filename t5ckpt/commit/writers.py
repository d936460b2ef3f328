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


open_work: set[str] = set()
"""The work on file systems that this process has not ended: unique names of markers, and URLs of temporary directories."""


def has_ended(writer: Any, work: str) -> bool:
    """Whether a writer was a process of this machine that has ended; if it is this process, whether this work has."""
    pid = writer.get('pid') if is_local(writer) else None
    if pid == os.getpid():
        return work not in open_work
    return isinstance(pid, int) and _process_start_time(pid) != writer['born']

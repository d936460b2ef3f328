"""Resuming a copy or a conversion in the temporary directory of an earlier attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from t5ckpt.commit.garbage_collection import is_abandoned
from t5ckpt.commit.transaction import (
    Workspace,
    take_lease,
)
from t5ckpt.commit.write_lease import TAKE_OVER_SECONDS
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import FormatError
from t5ckpt.format.names import SIDECAR, parse_leftover
from t5ckpt.format.sidecar import decode_sidecar
from t5ckpt.storage import Storage

__all__ = ['resume_text', 'unfinished']


def unfinished(storage: Storage, step: int, clock: Clock, facts: Mapping[str, Any]) -> Workspace | None:
    """Takes over the directory of a killed write of the same contents, which ``facts['resume']`` identifies."""
    for entry in storage.entries() if storage.renames else ():
        leftover = parse_leftover(entry.name)
        if leftover is None or leftover.state != 'tmp' or leftover.step != step:
            continue
        lock = storage.try_lock(entry.name)
        if lock is None:
            continue
        is_same = lock.is_held and resume_text(storage, entry.name) == facts['resume']
        if is_same and is_abandoned(storage, leftover, clock(), TAKE_OVER_SECONDS, has_lock=True):
            work = Workspace(storage, step, entry.name, lock)
            take_lease(work, clock, facts)
            return work
        lock.close()
    return None


def resume_text(storage: Storage, directory: str) -> Any:
    """Returns the text that identifies what an unfinished directory was to become; None where its lease has none."""
    key = join(directory, SIDECAR)
    if storage.kind(key) != 'file':
        return None
    try:
        writer = decode_sidecar(storage.read(key), storage.url(key)).extra.get('writer')
    except FormatError:
        return None
    return writer.get('resume') if isinstance(writer, Mapping) else None

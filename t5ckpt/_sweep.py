"""Sweeping: what dead writers and deleters left is removed at the next save.

A leftover goes when nobody holds its lock and it is known to be dead: it is ours and was written on this host (the kernel
drops the lock of a dead process), it was being deleted, it is empty, or the second in its name is older than an hour,
which also covers what T5X leaves, since T5X takes no lock. Stores without rename have rules of their own (_in_place.py).
"""

from __future__ import annotations

import logging
import socket

from t5ckpt._in_place import sweep_in_place
from t5ckpt._layout import SIDECAR, Leftover, deleted_dir, join, parse_leftover
from t5ckpt._sidecar import decode_sidecar
from t5ckpt._types import Clock
from t5ckpt.errors import CheckpointNotFoundError, FormatError, T5CkptError
from t5ckpt.storage import Storage

__all__ = ['STALE_AFTER_SECONDS', 'sweep']

STALE_AFTER_SECONDS = 3600.0
_log = logging.getLogger('t5ckpt')


def sweep(storage: Storage, clock: Clock, stale_after: float = STALE_AFTER_SECONDS) -> list[str]:
    """Removes leftovers of dead writers and deleters.

    Returns:
      The names that were removed. One that cannot be removed is logged and does not stop the rest.
    """
    if not storage.renames:
        return sweep_in_place(storage, clock, stale_after)
    removed: list[str] = []
    for entry in storage.entries():
        leftover = parse_leftover(entry.name) if entry.is_dir else None
        if leftover is None:
            continue
        try:
            if _sweep_one(storage, entry.name, leftover, clock() - stale_after):
                removed.append(entry.name)
        except CheckpointNotFoundError:
            # Another sweep has removed it.
            continue
        except T5CkptError as error:
            _log.warning('t5ckpt: could not sweep %s: %s', storage.url(entry.name), error)
    if removed:
        _log.info('t5ckpt: swept %s from %s', ', '.join(removed), storage.url())
    return removed


def _sweep_one(storage: Storage, name: str, leftover: Leftover, stale_before: float) -> bool:
    claim = storage.claim(name)
    if claim is None:
        return False
    try:
        is_old = leftover.unix < stale_before
        # Without a lock that works only the age says anything.
        if is_old or (claim.is_held and (leftover.state == 'deleted' or _is_dead(storage, name))):
            storage.delete_tree(_renamed(storage, leftover))
            return True
        return False
    finally:
        claim.close()


def _renamed(storage: Storage, leftover: Leftover) -> str:
    """The name under which a leftover is removed: a removal that is killed may have taken what the rest is known by."""
    if leftover.state == 'deleted':
        return leftover.name
    unix = leftover.unix
    while storage.kind(deleted_dir(leftover.step, unix)) is not None:
        unix += 1
    storage.publish(leftover.name, deleted_dir(leftover.step, unix))
    return deleted_dir(leftover.step, unix)


def _is_dead(storage: Storage, name: str) -> bool:
    """Whether an unlocked temporary directory is ours, of this host (so its lock would be held), or empty."""
    entries = [entry.name for entry in storage.entries(name)]
    if not entries:
        return True
    if SIDECAR not in entries:
        # The crash came while the first file was being written; T5X and Orbax never make such a name.
        return all(entry.startswith(SIDECAR) for entry in entries)
    try:
        writer = decode_sidecar(storage.read(join(name, SIDECAR)), storage.url(name)).extra.get('writer', {})
    except FormatError:
        return False
    return isinstance(writer, dict) and writer.get('host') == socket.gethostname()

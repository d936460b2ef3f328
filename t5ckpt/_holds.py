"""A reader's hold on a step: a file beside the steps whose name says which and until when, see ``_layout.py``.

Who takes hold looks afterwards whether the step is still there; who deletes looks for holds after making it invisible.
Whichever comes second sees the other, so a held step is not deleted under its reader. A hold that was left by a crash
ends by itself.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator, Iterable

from t5ckpt._layout import HOLD_PREFIX, INDEX, Hold, hold_file, join, parse_hold
from t5ckpt._types import Clock
from t5ckpt.steps import has_step
from t5ckpt.storage import Storage

__all__ = ['held', 'held_steps', 'hold_dir', 'list_holds', 'live_steps']


@contextlib.contextmanager
def held(storage: Storage, step: int, seconds: float, clock: Clock) -> Generator[bool]:
    """Holds a step for so many seconds at most; gives False where it is gone already."""
    name = join(hold_dir(storage), hold_file(step, int(clock() + seconds) + 1, secrets.token_hex(8)))
    storage.write(name, b'')
    try:
        yield has_step(storage, step)
    finally:
        storage.delete_file(name)


def held_steps(storage: Storage, clock: Clock) -> set[int]:
    """The steps that readers ask not to be deleted now."""
    return live_steps(list_holds(storage), clock())


def live_steps(holds: Iterable[Hold], now: float) -> set[int]:
    """The steps of the leases that have not expired."""
    return {hold.step for hold in holds if hold.until >= now}


def list_holds(storage: Storage) -> list[Hold]:
    """All of them, also expired ones."""
    found = storage.names(hold_dir(storage), HOLD_PREFIX)
    return [hold for name in found if (hold := parse_hold(name)) is not None]


def hold_dir(storage: Storage) -> str:
    """The directory of the leases."""
    return '' if storage.renames else INDEX

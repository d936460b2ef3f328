"""Holds of readers: a file whose name has the step, the expiry and the duration, see ``format/names.py``.

It is in the run's directory or, on object stores, in ``.t5ckpt/``. A reader writes it and then looks for markers, a deleter
writes its marker and then looks for holds, so the later of the two sees the other (``commit/markers.py``). A reader that sees a
deleter waits until it has decided. So a held step is never hidden, and a deleter that is killed leaves it in place. A hold that
remains after a crash expires.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Generator, Iterable

from t5ckpt.catalog.listing import catalog_of, has_step
from t5ckpt.commit.markers import is_about_to_hide
from t5ckpt.commit.run_clock import CLOCK_SECONDS, run_clock, time_text
from t5ckpt.commit.taken_steps import attempts
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import AccessDeniedError
from t5ckpt.format.names import HOLD_PREFIX, Hold, hold_file, parse_hold
from t5ckpt.storage import Storage

# A deleter hides a step, or gives up, within a few requests.
_DELETER_SECONDS = 5.0
_log = logging.getLogger('t5ckpt')


@contextlib.contextmanager
def hold(storage: Storage, step: int, seconds: float, clock: Clock) -> Generator[bool]:
    """Holds a step for at most ``seconds``; yields False if the step was deleted before.

    Raises:
      AccessDeniedError: the run may be read and not be written.
    """
    file = hold_file(step, int(clock() + seconds) + 1, int(seconds) + 1, secrets.token_hex(8))
    name = join(catalog_of(storage).announcement_directory, file)
    try:
        storage.write(name, b'')
    except AccessDeniedError as error:
        raise AccessDeniedError(
            error.errno,
            f'{storage.url(name)}: step {step} cannot be kept from deletion: {error} Without permission to write to the run, '
            'leave hold_seconds out; a keep policy may then delete the step while it is read.',
        ) from error
    try:
        yield outlives_deleters(storage, step, clock)
    finally:
        storage.delete_file(name)


def outlives_deleters(storage: Storage, step: int, clock: Clock) -> bool:
    """Returns whether a step exists and no process hides it; False if a deleter has not decided after some seconds.

    Call it after the hold or the pin was written, which a later deleter finds.
    """
    now = run_clock(storage, clock)
    for has_time in attempts(_DELETER_SECONDS):
        if not is_about_to_hide(storage, step, now):
            return has_step(storage, step)
        if not has_time or not has_step(storage, step):
            break
    return False


def held_steps(storage: Storage, clock: Clock, holds: Iterable[Hold] | None = None) -> set[int]:
    """Returns the steps with a hold that has not expired, among some holds or all of the run."""
    now = run_clock(storage, clock)
    if holds is None:
        names = storage.names(catalog_of(storage).announcement_directory, HOLD_PREFIX)
        holds = filter(None, map(parse_hold, names))
    return {each.step for each in holds if expiry(storage, each) >= now()}


def expiry(storage: Storage, file: Hold) -> float:
    """The time at which a hold expires, by :func:`~t5ckpt.commit.run_clock.run_clock`."""
    # A reader writes its file once.
    written = storage.modified(join(catalog_of(storage).announcement_directory, file.name))
    return file.until + CLOCK_SECONDS if written is None else written + file.seconds


def warn_if_ahead(storage: Storage, file: Hold, now: float) -> None:
    """Warns of a hold that expires later than any new one would; it may keep its step for years."""
    expires = expiry(storage, file)
    if expires - now > file.seconds + 2 * CLOCK_SECONDS:
        _log.warning(
            't5ckpt: %s expires at %s, although it lasts %.0f s and now is %s: the clock of its owner or of this machine '
            'is wrong. Correct the clock. If the owner has ended, remove the file',
            storage.url(join(catalog_of(storage).announcement_directory, file.name)),
            time_text(expires),
            file.seconds,
            time_text(now),
        )

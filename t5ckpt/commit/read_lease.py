"""Read leases: a file beside the steps whose name has the step and the expiry, see ``format/names.py``.

    reader    +read lease, [no deleter?], [is the step there?], reads, -read lease
    deleter   +write lease, [no read lease?], hides the step, -write lease

Each announces itself before it looks for the other, so the later of the two sees the other. A reader that sees a deleter
waits until it has hidden the step or let it be. So a step with a read lease is never hidden, not even for a moment, and a
deleter that is killed leaves it where it is. A lease that a crash left expires.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator

from t5ckpt.catalog.listing import has_step
from t5ckpt.commit.lease_files import leased_directory, list_leases, live_steps
from t5ckpt.commit.lease_time import lease_clock
from t5ckpt.commit.write_lease import is_being_deleted
from t5ckpt.core.keys import join
from t5ckpt.core.polling import attempts
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import AccessDeniedError
from t5ckpt.format.names import read_lease_file
from t5ckpt.storage import Storage

__all__ = ['leased_steps', 'outlives_deleters', 'read_lease']

# A deleter hides a step, or lets it be, within a few requests.
_DELETER_SECONDS = 5.0


@contextlib.contextmanager
def read_lease(storage: Storage, step: int, seconds: float, clock: Clock) -> Generator[bool]:
    """Leases a step for at most ``seconds``; yields False where the step was deleted before.

    Raises:
      AccessDeniedError: the run may be read and not be written.
    """
    lease = read_lease_file(step, int(clock() + seconds) + 1, int(seconds) + 1, secrets.token_hex(8))
    name = join(leased_directory(storage), lease)
    try:
        storage.write(name, b'')
    except AccessDeniedError as error:
        raise AccessDeniedError(
            error.errno,
            f'{storage.url(name)}: step {step} cannot be kept from deletion: {error} Where the run may only be read, leave '
            'hold_seconds out; a keep policy may then delete the step while it is read.',
        ) from error
    try:
        yield outlives_deleters(storage, step, clock)
    finally:
        storage.delete_file(name)


def outlives_deleters(storage: Storage, step: int, clock: Clock) -> bool:
    """Returns whether a step is there and nobody hides it; False where a deleter has not decided after some seconds.

    To be called after what keeps the step, a read lease or a pin, was written: a later deleter finds that.
    """
    clock = lease_clock(storage, clock)
    for has_time in attempts(_DELETER_SECONDS):
        if not is_being_deleted(storage, step, clock):
            return has_step(storage, step)
        # A deleter keeps its lease while it removes the files of what it has hidden.
        if not has_time or not has_step(storage, step):
            break
    return False


def leased_steps(storage: Storage, clock: Clock) -> set[int]:
    """Returns the steps with a read lease that has not expired."""
    return live_steps(storage, list_leases(storage).of_readers, clock)

"""Read leases: a file in the run's directory whose name has the step and the expiry, see ``format/names.py``.

    reader    +read lease, [no deleter?], [is the step there?], reads, -read lease
    deleter   +write lease, [no read lease?], hides the step, -write lease

Each writes its lease before it looks for the other's, so the later of the two sees the other. A reader that sees a deleter
waits until the deleter has hidden the step or given up. So a step with a read lease is never hidden, and a deleter that is
killed leaves it in place. A lease that remains after a crash expires.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator

from t5ckpt.catalog.listing import catalog_of, has_step
from t5ckpt.commit.lease_files import leased_directory, live_steps
from t5ckpt.commit.lease_time import lease_clock
from t5ckpt.commit.step_lease import attempts, is_being_deleted
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import AccessDeniedError
from t5ckpt.format.names import read_lease_file
from t5ckpt.storage import Storage

# A deleter hides a step, or gives up, within a few requests.
_DELETER_SECONDS = 5.0


@contextlib.contextmanager
def read_lease(storage: Storage, step: int, seconds: float, clock: Clock) -> Generator[bool]:
    """Leases a step for at most ``seconds``; yields False if the step was deleted before.

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
            f'{storage.url(name)}: step {step} cannot be kept from deletion: {error} Without permission to write to the run, '
            'leave hold_seconds out; a keep policy may then delete the step while it is read.',
        ) from error
    try:
        yield outlives_deleters(storage, step, clock)
    finally:
        storage.delete_file(name)


def outlives_deleters(storage: Storage, step: int, clock: Clock) -> bool:
    """Returns whether a step exists and no process hides it; False if a deleter has not decided after some seconds.

    Call it after the read lease or the pin was written, which a later deleter finds.
    """
    now = lease_clock(storage, clock)
    for has_time in attempts(_DELETER_SECONDS):
        if not is_being_deleted(storage, step, now):
            return has_step(storage, step)
        # A deleter keeps its lease while it removes the files of what it has hidden.
        if not has_time or not has_step(storage, step):
            break
    return False


def leased_steps(storage: Storage, clock: Clock) -> set[int]:
    """Returns the steps with a read lease that has not expired."""
    return live_steps(storage, catalog_of(storage).leases().of_readers, clock)

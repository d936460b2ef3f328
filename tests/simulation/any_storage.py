"""The scenarios that every storage runs, for a user's storage.

Those of ``scenarios`` that copy or restore are not among them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from simulation.scenarios import SCENARIOS, Scenario
from t5ckpt.storage import Storage

FAULTS = ('crash', 'pause', 'delay', 'error', 'lost')
_STOPS = ('pause', 'delay')
_WITH_FAULTS = (
    *(
        'first-save',
        'save',
        'take-over',
        'prune',
        'remove',
        'remove-twice',
        'overwrite',
        'list',
        'keep',
        'again',
        'view',
    ),
    'stopped-remover',
)


def scenarios_of(make: Callable[[], Storage]) -> dict[str, Scenario]:
    """Returns savers, readers, deleters and pins on a user's storage, with faults, by name.

    Args:
      make: makes an empty storage.
    """
    scenarios = {name: dataclasses.replace(SCENARIOS[name], kind=make, faults=FAULTS) for name in _WITH_FAULTS}
    # A crash within it is not survived, see docs/reliability.md.
    return scenarios | {'late': dataclasses.replace(SCENARIOS['late'], kind=make, faults=_STOPS, checked_after=())}

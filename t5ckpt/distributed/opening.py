"""The first vote of a job, in which the processes also compare options that all of them must pass.

Its keys have neither the number of a round nor a phase: with other options, a process begins with another action, such as a vote
on its local directory. A process whose first action receives a message of the leader first compares its options with those of the
leader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from t5ckpt.core.text import some_of
from t5ckpt.errors import DisagreementError


@dataclasses.dataclass
class Opening:
    """The first vote of the rounds of one checkpointer.

    Attributes:
      prefix: of the keys.
      options: whether this process has each option.
      is_over: whether this process has voted.
      is_compared: whether this process has put its options, or compared them with those of the leader.
      has_failed: whether the options differ, so that all processes have failed, in different phases.
    """

    prefix: str
    options: dict[str, bool]
    is_over: bool = False
    is_compared: bool = False
    has_failed: bool = False

    def wrap(self, vote: Any) -> Any:
        """The vote with the options."""
        self.is_over = True
        return {'options': self.options, 'vote': vote}

    def unwrap(self, votes: Sequence[Any]) -> list[Any]:
        """The votes without the options.

        Raises:
          DisagreementError: some processes have an option and others do not.
        """
        for name in self.options:
            has, lacks = (
                [str(index) for index, vote in enumerate(votes) if vote['options'][name] is is_given]
                for is_given in (True, False)
            )
            if has and lacks:
                self.has_failed = True
                raise DisagreementError(
                    f'{name} is passed in {_some_processes(has)}, and not in {_some_processes(lacks)}. Pass {name} in all '
                    'processes of the job, or in none.'
                )
        return [vote['vote'] for vote in votes]


def _some_processes(indices: Sequence[str]) -> str:
    return f'{"process" if len(indices) == 1 else "processes"} {some_of(indices, 4)}'

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
      options: the values of this process by name, of JSON's types.
      is_over: whether this process has voted.
      is_compared: whether this process has put its options, or compared them with those of the leader.
      has_failed: whether the options differ, so that all processes have failed, in different phases.
    """

    prefix: str
    options: dict[str, Any]
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
          DisagreementError: some processes have an option of another value.
        """
        for name, value in self.options.items():
            by_value: dict[Any, list[str]] = {value: []}
            for index, vote in enumerate(votes):
                by_value.setdefault(vote['options'][name], []).append(str(index))
            if len(by_value) > 1:
                self.has_failed = True
                texts = [f'{each} in {_some_processes(indices)}' for each, indices in by_value.items()]
                raise DisagreementError(
                    f'{name} is {", and ".join(texts)}. Every process of the job has to pass it alike.'
                )
        return [vote['vote'] for vote in votes]


def _some_processes(indices: Sequence[str]) -> str:
    return f'{"process" if len(indices) == 1 else "processes"} {some_of(indices, 4)}'

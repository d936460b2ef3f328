"""The options of reads: memory maps, verification, symbolic links and the byte budget."""

from __future__ import annotations

import dataclasses

from t5ckpt.core.arguments import check_word

_VERIFY_LEVELS = ('auto', 'full', 'quick')


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """The options of a read; see ``Checkpointer`` for each field.

    Raises:
      ValueError: ``verify`` is none of 'auto', 'full' and 'quick'.
    """

    mmap: bool = False
    verify: str = 'auto'
    follow_links: bool = False
    share_replicated: bool = False
    budget_bytes: int = 4 * 10**9

    def __post_init__(self) -> None:
        check_word('verify', self.verify, _VERIFY_LEVELS)

    @property
    def verifies(self) -> bool:
        """Whether checksums are compared: of every file that is read whole, and with 'full' of each that is read at all."""
        return self.verify != 'quick'

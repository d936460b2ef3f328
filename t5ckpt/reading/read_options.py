"""The options of reads: memory maps, verification, symbolic links and the byte budget."""

from __future__ import annotations

import dataclasses

from t5ckpt.core.arguments import check_word
from t5ckpt.storage import Storage

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

    def verifies_checksums(self, storage: Storage, *, lazy: bool) -> bool:
        """Whether checksums are verified: always, never, or with 'auto' only for files that are read completely.

        On storage without local files, verification would fetch each file twice.
        """
        reads_whole_chunks = storage.is_file_system and not self.mmap and not lazy
        return self.verify == 'full' or (self.verify == 'auto' and reads_whole_chunks)

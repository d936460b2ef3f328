"""The argument ``local`` of ``Checkpointer``: the local directory of each process, and what follows from it."""

from __future__ import annotations

import dataclasses

from t5ckpt.core.arguments import check_kind, check_path, integer, number, set_fields
from t5ckpt.save_policies import SavePolicy
from t5ckpt.storage import PathOrStorage, Storage


@dataclasses.dataclass(frozen=True)
class LocalTier:
    """A directory of this machine to which saves are written, before they are uploaded to ``checkpoints_dir``.

    Uploads follow in the background, and ``restore`` takes the newest step of both. See docs/tiers.md.

    Attributes:
      directory: a path on a disk of this machine or in its memory, or a Storage; one for each process.
      keep: the number of latest checkpoints to keep in ``directory``; those that wait for their upload stay, too.
      persist: a SavePolicy that decides which saves are uploaded; None uploads every save.
      upload_gbps: the limit on the rate of a process' uploads, in gigabits (10^9 bits) per second; None sets none.
    """

    directory: PathOrStorage
    keep: int = 2
    persist: SavePolicy | None = None
    upload_gbps: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.directory, Storage):
            check_path('directory', self.directory)
        check_kind('persist', self.persist, SavePolicy, 'SaveEvery(1000)')
        set_fields(self, keep=integer('keep', self.keep, 1))
        if self.upload_gbps is not None:
            set_fields(self, upload_gbps=number('upload_gbps', self.upload_gbps))

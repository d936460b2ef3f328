"""A directory of a simulated disk. ``FileStorage`` runs unchanged over it."""

from __future__ import annotations

from typing import Any

from simulation import posix
from t5ckpt.storage import Storage
from t5ckpt.storage.file import FileStorage

LOCAL = f'{posix.ROOT}/local'
"""The local directory of the trainers of a world with two tiers."""


class _WithPaths:
    """A storage as ``link`` needs it."""

    def __init__(self, storage: Storage):
        self.local_path = storage.url


class SimulatedDirectory(FileStorage):
    """``FileStorage`` below ``/simulated``. Chunks are read through it, since TensorStore does not see the disk."""

    def __init__(self, name: str = 'run'):
        """Takes the name of the directory, which is created with the first save."""
        super().__init__(f'{posix.ROOT}/{name}'.rstrip('/'))

    def local_path(self, key: str) -> str | None:
        # A local directory has to be on this machine.
        return self.url() if self.url() == LOCAL and not key else None

    def link(self, source: str, target: str, of: Storage | None = None) -> bool:
        return super().link(source, target, _WithPaths(of or self))  # type: ignore[arg-type]


def open_at(bucket: str, path: str, given: Any) -> FileStorage:
    """Opens a path: a simulated directory below ``/simulated``."""
    del bucket, given
    if path != posix.ROOT and not path.startswith(f'{posix.ROOT}/'):
        return FileStorage(path)
    return SimulatedDirectory(path.removeprefix(posix.ROOT).strip('/'))

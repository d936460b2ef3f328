"""Identifies an opened checkpoint, so that its deletion or replacement is not reported as damage."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Generator, Mapping
from typing import Any

from t5ckpt.catalog.locate import Located
from t5ckpt.core.keys import join
from t5ckpt.errors import (
    ChangedMeanwhileError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    StorageError,
    T5CkptError,
)
from t5ckpt.format.safetensors import is_tensor_file


@dataclasses.dataclass(frozen=True)
class Identity:
    """Identifies the checkpoint that was opened.

    A step may be deleted by retention, or overwritten, while a reader has it open. Its chunk files are then missing, or hold
    other values, which must not be reported as damage. So every read of an opened checkpoint runs in :meth:`reading`.

    Attributes:
      located: where the checkpoint was found.
      versions: of its manifest or its tensor files, as ``Storage.version`` gave them when it was opened. Empty for an Orbax
        directory, of which only the deletion is detected.
    """

    located: Located
    versions: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    @classmethod
    def now(cls, located: Located) -> Identity:
        """Reads the identity of the checkpoint, for readers that do not use ``read_contents``."""
        name = located.manifest
        version = located.storage.version(join(located.directory, name)) if name else None
        return cls(located, {} if version is None else {name: version})

    @contextlib.contextmanager
    def checked_on_failure(self, doing: str = 'read') -> Generator[None]:
        """Distinguishes a deletion or an overwrite from damage. Costs nothing unless a read fails.

        Args:
          doing: the operation on the checkpoint, for the message.

        Raises:
          CheckpointNotFoundError: the checkpoint was deleted or overwritten in the meantime.
        """
        try:
            yield
        except ChangedMeanwhileError:
            raise
        except (FormatError, CheckpointNotFoundError, StorageError) as error:
            if isinstance(error, StorageError) and error.errno != errno.ESTALE:
                raise
            self.check(doing, error)
            raise

    @contextlib.contextmanager
    def reading(self, doing: str = 'read', file: str | None = None) -> Generator[None]:
        """As :meth:`checked_on_failure`, and raises for an overwrite even if no read fails: the values may mix both checkpoints.

        Args:
          doing: the operation on the checkpoint, for the message.
          file: the only tensor file that is read; None for all of them.

        Notes: costs one ``stat``, or one per tensor file; on an object store, one small request.
        """
        with self.checked_on_failure(doing):
            yield
        storage = self.located.storage
        for name in self.versions if file is None else (file,):
            version = storage.version(join(self.located.directory, name))
            if version != self.versions[name]:
                self.check(doing, has_read=version is None)

    def check(self, doing: str, cause: Exception | None = None, *, has_read: bool = False) -> None:
        """Checks that the checkpoint is still the one that was opened, or, with ``has_read``, was until its deletion.

        Raises:
          CheckpointNotFoundError: it is not; chained to ``cause``.
          StorageError: the check failed, so the cause of a CorruptCheckpointError is unknown.
        """
        try:
            change = self._change()
        except T5CkptError as error:
            if isinstance(error, StorageError) and isinstance(cause, CorruptCheckpointError):
                # The storage that fails now may also have caused the first error, so the file may be intact.
                raise error from cause
            # The check itself failed; the first error is more useful.
            return
        if change == 'deleted' and has_read and self.located.storage.commits_by_rename:
            return
        cure = 'Read another step, or pin a step to keep it' if change == 'deleted' else 'Open it again'
        if change == 'deleted' and is_tensor_file(self.located.manifest):
            cure = 'Copy it again'
        if change is not None:
            raise ChangedMeanwhileError(
                f'{self.located.url} was {change} while it was being {doing}. {cure}.'
            ) from cause

    def _change(self) -> str | None:
        storage, directory, manifest = self.located.storage, self.located.directory, self.located.manifest
        # Without a version there was no manifest before either, so only the directory can be checked.
        versions = {name: storage.version(join(directory, name)) for name in self.versions}
        if is_tensor_file(manifest) and None in versions.values():
            return 'deleted'
        if versions[manifest] is None if manifest in versions else storage.kind(directory) is None:
            return 'deleted'
        return None if versions == self.versions else 'replaced'

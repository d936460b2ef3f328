"""Unchanged arrays cost nothing: their chunk files are hard-linked from the previous checkpoint.

A chunk is taken over in one of three cases. The leaf is the very jax.Array that was saved last time and its memory is
XLA's own (then it is immutable, so nothing needs to be looked at, and nothing is staged); or, without a codec, the
chunk's xxh3-64 and size equal those of the file of the same name in the previous checkpoint, which also finds frozen
weights that went through a donating step, and works after a restart; or, with a codec, the xxh3-64 of its values equals
that of the values which this process encoded for the previous checkpoint.

Every checkpoint stays complete and may be deleted by itself: the file goes away with its last link. TensorStore writes
by rename and never into an existing file, so no save changes another's chunks. Where links do not work (another
device, a store without them, too many links, a file that is gone or of another size) the chunk is written.

Before a file is linked its checksum is compared, so damage is not handed on: such a chunk is written anew. A file whose
inode, size and times are those that this process saw after its write is not read again for it.
What a link cannot give is a second copy: a sector that rots later rots under all checkpoints that share it. The checksum
travels with the link, so each of them can notice. ``reuse_unchanged=False`` writes everything every time.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from t5ckpt.catalog.locate import listing
from t5ckpt.core.keys import join
from t5ckpt.core.private_memory import is_private
from t5ckpt.errors import T5CkptError
from t5ckpt.format.checksum import digest
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.names import SIDECAR, file_checksums_name, step_dir
from t5ckpt.planning.save_plan import ArrayWrite
from t5ckpt.storage import Storage
from t5ckpt.tree.leaf_values import is_jax_array

__all__ = ['PreviousCheckpoint', 'find_previous', 'leaves_of_writes']


@dataclasses.dataclass(frozen=True)
class PreviousCheckpoint:
    """A committed checkpoint to take chunks from.

    Attributes:
      directory: its directory in the same storage.
      digests: file to (bytes, xxh3-64 hex).
      stamp: digest of its sidecar, to notice that another checkpoint has taken its place.
      stamps: of the files when their checksums were last known to hold; see ``Storage.stamp``.
      values: of chunks whose files only the codec knows, file to the xxh3-64 of the values it was given.
      leaves: array directory to the leaf that was saved there, weakly, and how it was laid out.
    """

    directory: str
    digests: Mapping[str, tuple[int, str]]
    stamp: str = ''
    stamps: Mapping[str, tuple[int, ...] | None] = dataclasses.field(
        default_factory=dict[str, 'tuple[int, ...] | None']
    )
    leaves: Mapping[str, tuple[weakref.ref[Any], str]] = dataclasses.field(
        default_factory=dict[str, 'tuple[weakref.ref[Any], str]']
    )
    values: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    def is_same(self, write: ArrayWrite, with_metadata: bool) -> bool:
        """Whether this leaf is the object that was saved there, laid out as it is to be now, by this process."""
        held = self.leaves.get(write.array.location)
        if held is None or held[0]() is not write.leaf or held[1] != _layout_text(write):
            return False
        return all(name in self.digests for name in write.files(with_metadata=with_metadata))

    def is_there(self, storage: Storage) -> bool:
        """Whether the directory still holds the checkpoint that was committed, and not another of the same step."""
        try:
            return digest(storage.read(join(self.directory, SIDECAR))) == self.stamp
        except T5CkptError:
            return False


def _layout_text(write: ArrayWrite) -> str:
    # A codec chosen by sampling ends up in the array's metadata, not in the plan's, so it is left out here.
    return f'{write.array.shape} {write.dtype.name} {write.array.dtype.name} {tuple(write.array.metadata["chunks"])}'


def leaves_of_writes(writes: Iterable[ArrayWrite]) -> dict[str, tuple[weakref.ref[Any], str]]:
    """What the next save needs to know of the leaves of this one; held weakly, and taken before they are donated.

    An array of memory that somebody else may write to is not told by its identity.
    """
    return {
        write.array.location: (weakref.ref(write.leaf), _layout_text(write))
        for write in writes
        if is_jax_array(write.leaf) and is_private(write.leaf)
    }


def find_previous(storage: Storage) -> PreviousCheckpoint | None:
    """The latest checkpoint on storage for the first save after a start."""
    if storage.local_path('') is None:
        return None
    for step in [each.step for each in listing(storage).steps if each.is_t5x][-1:]:
        try:
            key = join(step_dir(step), file_checksums_name(0))
            files = FileChecksums.decode(storage.read(key), storage.url(key))
            return PreviousCheckpoint(step_dir(step), files, digest(storage.read(join(step_dir(step), SIDECAR))))
        except T5CkptError:
            # Written by T5X, or damaged: there is nothing to take over, and nothing is lost by writing it all.
            return None
    return None

"""Hard-links the chunk files of unchanged arrays from the previous checkpoint instead of writing them.

A chunk is linked in one of four cases:

- The leaf is the same jax.Array object as in the previous save, and its memory is XLA's own. Such an array is immutable,
  so it is neither staged nor hashed.
- The chunk has no codec, and its xxh3-64 and size equal those of the file of the same name in the previous checkpoint.
  This also finds frozen weights that passed through a donating step, and works after a restart.
- The chunk has a codec, and the xxh3-64 of its values equals that of the values that this process encoded for the
  previous checkpoint, which used the same codec. Then it is not encoded.
- The chunk has a codec, and its encoded bytes equal those in the previous checkpoint, as after a restart.

Every checkpoint stays complete and can be deleted independently: a file is removed with its last link. TensorStore writes
by rename and never into an existing file, so no save changes the chunks of another checkpoint. Where a link cannot be
made (another device, a store without links, too many links, a missing file or one of another size), the chunk is written.

The checksum of a file is verified before it is linked; a damaged chunk is written again. A file whose inode, size and times
are unchanged since this process wrote it is not read again. Linked checkpoints share one copy of the data: a sector that
fails later damages all of them. Each checkpoint records the checksum, so each detects the damage.
``reuse_unchanged=False`` writes every chunk in every save.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from t5ckpt.catalog.listing import listing
from t5ckpt.core.keys import join
from t5ckpt.core.private_memory import is_private
from t5ckpt.errors import T5CkptError
from t5ckpt.format.checksum import digest
from t5ckpt.format.dtypes import name_of
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.names import SIDECAR, file_checksums_name, step_dir
from t5ckpt.planning.save_plan import ArrayWrite
from t5ckpt.storage import Storage
from t5ckpt.tree.leaf_values import is_jax_array

__all__ = ['PreviousCheckpoint', 'find_previous', 'leaves_of_writes']


@dataclasses.dataclass(frozen=True)
class PreviousCheckpoint:
    """A committed checkpoint whose chunks can be linked.

    Attributes:
      directory: its directory in the same storage.
      digests: file to (bytes, xxh3-64 hex).
      sidecar_checksum: of its sidecar; differs once another checkpoint has replaced this one.
      file_versions: by file, from when its checksum was last verified; see ``Storage.stamp``.
      values: for chunks with a codec, file to the xxh3-64 of the values before encoding.
      codecs: array directory to the codec, if this process wrote the checkpoint.
      leaves: array directory to a weak reference to the leaf that was saved there, and its layout.
    """

    directory: str
    digests: Mapping[str, tuple[int, str]]
    sidecar_checksum: str = ''
    file_versions: Mapping[str, tuple[int, ...] | None] = dataclasses.field(
        default_factory=dict[str, 'tuple[int, ...] | None']
    )
    leaves: Mapping[str, tuple[weakref.ref[Any], str]] = dataclasses.field(
        default_factory=dict[str, 'tuple[weakref.ref[Any], str]']
    )
    values: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    codecs: Mapping[str, Any] | None = None

    def codec(self, storage: Storage, location: str) -> Any:
        """The codec of an array; None without one, or if the array is not there."""
        if self.codecs is not None:
            return self.codecs.get(location)
        try:
            return json.loads(storage.read(join(self.directory, location, '.zarray')))['compressor']
        except (T5CkptError, ValueError, LookupError, TypeError):
            return None

    def is_same(self, write: ArrayWrite, *, with_metadata: bool) -> bool:
        """Whether this process saved the same leaf object there, with the same layout."""
        saved = self.leaves.get(write.array.location)
        if saved is None or saved[0]() is not write.leaf or saved[1] != _layout_text(write):
            return False
        return all(name in self.digests for name in write.files(with_metadata=with_metadata))

    def link(self, storage: Storage, key: str, entry: tuple[int, str], target: str) -> bool:
        """Links one file to ``target`` if it still matches its checksum, so that damage is not copied.

        A file that is unchanged since this process wrote or read it is not read again.
        """
        source = join(self.directory, key)
        try:
            version = self.file_versions.get(key)
            is_known = version is not None and version == storage.stamp(source)
            if not is_known and (storage.size(source) != entry[0] or digest(storage.read(source)) != entry[1]):
                return False
        except T5CkptError:
            # Deleted in the meantime, or unreadable: the chunk is written.
            return False
        return storage.link(source, target)

    def is_there(self, storage: Storage) -> bool:
        """Whether the directory still holds this checkpoint, and not a later save of the same step."""
        try:
            return digest(storage.read(join(self.directory, SIDECAR))) == self.sidecar_checksum
        except T5CkptError:
            return False


def _layout_text(write: ArrayWrite) -> str:
    # Excludes the codec: one chosen by sampling is in the metadata of the array, not of the plan.
    return f'{write.array.shape} {name_of(write.dtype)} {name_of(write.array.dtype)} {tuple(write.array.metadata["chunks"])}'


def leaves_of_writes(writes: Iterable[ArrayWrite]) -> dict[str, tuple[weakref.ref[Any], str]]:
    """Weak references to the leaves of this save, for the next one; to be taken before the leaves are donated.

    An array whose memory has another owner is left out, since its values may change while its identity does not.
    """
    return {
        write.array.location: (weakref.ref(write.leaf), _layout_text(write))
        for write in writes
        if is_jax_array(write.leaf) and is_private(write.leaf)
    }


def find_previous(storage: Storage) -> PreviousCheckpoint | None:
    """The latest checkpoint on storage, for the first save of a process; None where it has no checksums."""
    if storage.local_path('') is None:
        return None
    for step in [each.step for each in listing(storage).steps if each.is_t5x][-1:]:
        try:
            key = join(step_dir(step), file_checksums_name(0))
            files = FileChecksums.decode(storage.read(key), storage.url(key))
            return PreviousCheckpoint(step_dir(step), files, digest(storage.read(join(step_dir(step), SIDECAR))))
        except T5CkptError:
            # Written by T5X, or damaged: nothing can be linked, so all chunks are written.
            return None
    return None

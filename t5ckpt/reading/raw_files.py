"""Reads the manifest, the facts and the files with the file checksums of a located checkpoint, without decoding them.

The file ``checkpoint`` holds manifest and facts. Steps of the earlier layout have the latter in a file
(``catalog/facts_files.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from t5ckpt.catalog.facts_files import facts_file, facts_files
from t5ckpt.catalog.locate import Located
from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from t5ckpt.format.facts import decode_facts
from t5ckpt.format.manifest import split_facts
from t5ckpt.format.names import is_file_checksums
from t5ckpt.format.safetensors import is_tensor_file
from t5ckpt.reading.checkpoint_files import CheckpointFiles, in_threads
from t5ckpt.reading.safetensors import read_tensors, refuse_shard


@dataclasses.dataclass(frozen=True)
class RawFiles:
    """The undecoded manifest, facts and file checksums; all empty for an Orbax directory.

    Attributes:
      manifest: the file ``checkpoint`` without the facts.
      facts: those of the checkpoint, if it has any.
      checksum_lists: the files with the file checksums by name, if checksums are to be compared.
      versions: of the file ``checkpoint``, or of tensor files, by name, see ``Storage.version``.
    """

    manifest: bytes | None = None
    facts: bytes | None = None
    checksum_lists: Mapping[str, bytes] | None = None
    versions: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def read_raw(located: Located, *, checksums: bool = False) -> RawFiles:
    """Reads a checkpoint's own files; with ``checksums`` also its file checksums.

    Raises:
      CheckpointNotFoundError: the checkpoint was deleted since it was located.
      UnsafeSpecError: a file is a symbolic link that leads out of the checkpoint.
    """
    storage, directory = located.storage, located.directory
    if not located.manifest:
        return RawFiles()
    if is_tensor_file(located.manifest):
        data, versions = read_tensors(storage, directory, located.manifest, follow_links=located.follow_links)
        return RawFiles(data, versions=versions)
    refuse_shard(located.manifest, located.url)
    files = CheckpointFiles.of(located)
    while True:
        data, version = files.read_with_version(located.manifest)
        manifest, facts = split_facts(data)
        if facts is not None:
            break
        facts = _read_facts_file(located, files, manifest)
        if facts is not None or storage.version(join(directory, located.manifest)) == version:
            break
        # A save has replaced a step of the earlier layout, and the file with its facts is gone.
    raw = RawFiles(manifest, facts, versions={located.manifest: version})
    return with_lists(located, raw) if checksums else raw


def _read_facts_file(located: Located, files: CheckpointFiles, manifest: bytes) -> bytes | None:
    names = facts_files(located.storage, located.directory)
    return files.read_if_there(facts_file(manifest, names)) if names else None


def with_lists(located: Located, raw: RawFiles) -> RawFiles:
    """Adds the lists of file checksums that the facts record; without facts, those in the directory."""
    files, facts = CheckpointFiles.of(located), raw.facts
    names: Collection[str] = ()
    if facts is None:
        names = [entry.name for entry in located.storage.entries(located.directory) if is_file_checksums(entry.name)]
    else:
        # Damaged facts are reported where they are decoded, as is a missing list.
        with contextlib.suppress(CorruptCheckpointError):
            names = decode_facts(facts, located.url).digests.lists
    lists: dict[str, bytes] = {}
    for name, data in in_threads(names, files.read, files.threads):
        if isinstance(data, bytes):
            lists[name] = data
        elif not isinstance(data, CheckpointNotFoundError):
            raise data
    return dataclasses.replace(raw, checksum_lists=lists)

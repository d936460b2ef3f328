"""Reads the manifest, the sidecar and the files with the file checksums of a located checkpoint, without decoding them.

The sidecar is ``t5ckpt.json`` in a directory, and ``t5ckpt.<checksum of the manifest>.json`` on an object store, see
``commit/by_manifest.py``. Each is read in the other place, too: copies and earlier versions have other names.

Notes: sends one request per file unless manifest and sidecar do not match.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from t5ckpt.catalog.layouts import sidecar_name, sidecars_in
from t5ckpt.catalog.locate import Located
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, T5CkptError
from t5ckpt.format.checksum import digest
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.names import SIDECAR, is_file_checksums, is_sidecar, sidecar_of
from t5ckpt.format.safetensors import is_tensor_file
from t5ckpt.format.sidecar import NO_SIDECAR, decode_sidecar
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.safetensors import read_tensors, refuse_shard

# The number of times that a step is read again if it is overwritten between the reads of its manifest and of its sidecar.
_OVERWRITES = 3


@dataclasses.dataclass(frozen=True)
class RawFiles:
    """The undecoded manifest, sidecar and file checksums; all empty for an Orbax directory.

    Attributes:
      manifest: the file ``checkpoint``.
      sidecar: ``t5ckpt.json``, if there is one.
      checksum_lists: the files with the file checksums by name, if checksums are to be compared.
      versions: of the manifest and of the sidecar, by name, see ``Storage.version``.
    """

    manifest: bytes | None = None
    sidecar: bytes | None = None
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
    raw = _read_pair(located, files)
    for _ in range(_OVERWRITES):
        if raw.manifest is None or raw.sidecar is None or is_sidecar_of(raw.manifest, raw.sidecar):
            break
        before, raw = raw, _read_pair(located, files)
        if raw == before:
            # The checkpoint is damaged, which its decoder reports.
            break
    return dataclasses.replace(raw, checksum_lists=_read_lists(located, files, raw.sidecar)) if checksums else raw


def _read_pair(located: Located, files: CheckpointFiles) -> RawFiles:
    """The manifest and its sidecar, or another one if there is only that: while a checkpoint is replaced, or if it is damaged."""
    storage = located.storage
    manifest, version = files.read_with_version(located.manifest)
    pair = RawFiles(manifest, versions={located.manifest: version})

    def with_sidecar(name: str) -> RawFiles | None:
        read = files.read_if_there(name)
        return (
            None
            if read is None
            else dataclasses.replace(pair, sidecar=read[0], versions={**pair.versions, name: read[1]})
        )

    with_another = None
    for name in (sidecar_of(digest(manifest)), SIDECAR):
        read = with_sidecar(name)
        if read is not None and is_sidecar_of(manifest, read.sidecar):
            return read
        with_another = read or with_another
    if with_another is None:
        # If the manifest is damaged, its sidecar has the checksum that it had.
        for name in sidecars_in(storage, located.directory):
            with_another = with_sidecar(name)
    return with_another or pair


def _read_lists(located: Located, files: CheckpointFiles, sidecar: bytes | None) -> dict[str, bytes]:
    """The files with the file checksums: those in the directory and those that the sidecar records."""
    names = {entry.name for entry in located.storage.entries(located.directory) if is_file_checksums(entry.name)}
    recorded: Collection[str] = ()
    with contextlib.suppress(CorruptCheckpointError):
        of_sidecar = NO_SIDECAR if sidecar is None else decode_sidecar(sidecar, SIDECAR)
        recorded = FileChecksums.recorded_by(of_sidecar, SIDECAR).lists
    lists: dict[str, bytes] = {}
    for name in [*sorted(names), *(name for name in recorded if name not in names)]:
        # A list that the sidecar does not record may belong to the replaced checkpoint, and be deleted before it is read.
        is_sure = name in names and (name in recorded or not recorded)
        with contextlib.suppress(*(() if is_sure else (CheckpointNotFoundError,))):
            lists[name] = files.read(name)
    return lists


def find_sidecar(files: CheckpointFiles, manifest: str, names: Collection[str]) -> str:
    """As ``sidecar_name``, for a manifest that was not read yet; it is read only if the directory has several sidecars."""
    has_several = sum(map(is_sidecar, names)) > 1
    with contextlib.suppress(T5CkptError):
        return sidecar_name(files.read(manifest) if has_several else b'', names)
    return SIDECAR


def is_sidecar_of(manifest: bytes, sidecar: bytes | None) -> bool:
    """Whether a sidecar records the checksum of a manifest; the sidecar is not decoded."""
    return sidecar is not None and digest(manifest).encode() in sidecar

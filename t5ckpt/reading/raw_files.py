"""Reads the manifest, the sidecar and the file checksums of a located checkpoint, undecoded.

The sidecar is ``t5ckpt.json`` in a directory, and ``t5ckpt.<checksum of the manifest>.json`` on an object store, see
``commit/by_manifest.py``. Each is read in the other place, too: copies and earlier versions have other names.

Notes: computes one checksum of the manifest, and sends one request per file unless manifest and sidecar do not match.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from t5ckpt.catalog.layouts import sidecars_in
from t5ckpt.catalog.locate import Located
from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, T5CkptError
from t5ckpt.format.checksum import digest
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.names import SIDECAR, is_file_checksums, is_sidecar, sidecar_of
from t5ckpt.format.safetensors import is_tensor_file
from t5ckpt.format.sidecar import NO_SIDECAR, decode_sidecar
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.safetensors import read_tensors

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
        data, found = read_tensors(storage, directory, located.manifest, follow_links=located.follow_links)
        return RawFiles(data, versions=found)
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
    versions, other = {located.manifest: version}, None
    own = sidecar_of(digest(manifest))
    for name in (SIDECAR, own) if storage.commits_by_rename else (own, SIDECAR):
        found = _sidecar_if_there(files, name)
        if found is not None and is_sidecar_of(manifest, found[0]):
            return RawFiles(manifest, found[0], None, {**versions, name: found[1]})
        if found is not None:
            other = name, *found
    if other is None:
        # If the manifest is damaged, its sidecar has the checksum that it had.
        for name in sidecars_in(storage, located.directory):
            found = _sidecar_if_there(files, name)
            other = None if found is None else (name, *found)
    return (
        RawFiles(manifest, None, None, versions)
        if other is None
        else RawFiles(manifest, other[1], None, {**versions, other[0]: other[2]})
    )


def _sidecar_if_there(files: CheckpointFiles, name: str) -> tuple[bytes, Any] | None:
    # In a bucket the read itself reports a missing file. In a directory it reports one that was deleted since.
    if files.storage.commits_by_rename:
        is_there = files.storage.is_file(join(files.directory, name))
        return files.read_with_version(name) if is_there else None
    try:
        return files.read_with_version(name)
    except CheckpointNotFoundError:
        return None


def _read_lists(located: Located, files: CheckpointFiles, sidecar: bytes | None) -> dict[str, bytes]:
    """The files with the file checksums: those in the directory and those that the sidecar records."""
    names = {entry.name for entry in located.storage.entries(located.directory) if is_file_checksums(entry.name)}
    recorded: Collection[str] = ()
    with contextlib.suppress(CorruptCheckpointError):
        of_sidecar = NO_SIDECAR if sidecar is None else decode_sidecar(sidecar, SIDECAR)
        recorded = FileChecksums.recorded_by(of_sidecar, SIDECAR).lists
    found: dict[str, bytes] = {}
    for name in [*sorted(names), *(name for name in recorded if name not in names)]:
        # A list that the sidecar does not record may be one of the checkpoint that was replaced, and be removed meanwhile.
        is_sure = name in names and (name in recorded or not recorded)
        with contextlib.suppress(*(() if is_sure else (CheckpointNotFoundError,))):
            found[name] = files.read(name)
    return found


def sidecar_name(manifest: bytes, names: Collection[str]) -> str:
    """The file with the sidecar of a manifest, among those of the step's directory.

    If the manifest is damaged, it is the only sidecar; if there is none, ``t5ckpt.json``.
    """
    own, there = sidecar_of(digest(manifest)), [name for name in names if is_sidecar(name)]
    return own if own in there else there[0] if len(there) == 1 else SIDECAR


def find_sidecar(files: CheckpointFiles, manifest: str, names: Collection[str]) -> str:
    """As :func:`sidecar_name`, for a manifest that was not read yet; it is read only if the directory has several sidecars."""
    there = [name for name in names if is_sidecar(name)]
    if len(there) > 1:
        with contextlib.suppress(T5CkptError):
            return sidecar_name(files.read(manifest), there)
    return there[0] if len(there) == 1 else SIDECAR


def is_sidecar_of(manifest: bytes, sidecar: bytes | None) -> bool:
    """Whether a sidecar records the checksum of a manifest; the sidecar is not decoded."""
    return sidecar is not None and digest(manifest).encode() in sidecar

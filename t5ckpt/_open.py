"""From a located checkpoint to its decoded contents; no array is read."""

from __future__ import annotations

import dataclasses

from t5ckpt._layout import SIDECAR, join
from t5ckpt._manifest import Manifest, decode_manifest
from t5ckpt._orbax import has_placeholders, read_orbax, resolve_placeholders
from t5ckpt._sidecar import Sidecar, decode_sidecar
from t5ckpt.steps import Located

__all__ = ['Contents', 'read_contents']


@dataclasses.dataclass(frozen=True)
class Contents:
    """A checkpoint's manifest and sidecar, and where it was found."""

    located: Located
    manifest: Manifest
    sidecar: Sidecar


def read_contents(located: Located) -> Contents:
    """Reads the manifest, of whichever layout, and the sidecar where there is one.

    Raises:
      FormatError: the manifest or the sidecar does not decode, or is of something else.
      CheckpointNotFoundError: gone since it was located.
    """
    storage, directory = located.storage, located.directory
    if not located.manifest:
        return Contents(located, read_orbax(storage, directory), Sidecar())
    manifest = decode_manifest(storage.read(join(directory, located.manifest)), located.url)
    if has_placeholders(manifest.state):
        resolved = resolve_placeholders(storage, directory, manifest.state)
        return Contents(located, dataclasses.replace(manifest, state=resolved), Sidecar())
    key = join(directory, SIDECAR)
    if storage.kind(key) != 'file':
        return Contents(located, manifest, Sidecar())
    return Contents(located, manifest, decode_sidecar(storage.read(key), storage.url(key)))

"""The facts of a step in t5ckpt's earlier layout: in a file beside the manifest, not in it.

``t5ckpt.json`` in a directory; ``t5ckpt.<checksum of the manifest>.json`` on an object store, where an overwrite left two of
them for a while.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.format.checksum import digest
from t5ckpt.format.names import MANIFEST
from t5ckpt.storage import Storage

_NAME = re.compile(r't5ckpt(\.[0-9a-f]{16})?\.json')


def facts_files(storage: Storage, directory: str) -> list[str]:
    """The names of the files in a step's directory; one request on an object store."""
    return [name for name in storage.names(directory, 't5ckpt.') if _NAME.fullmatch(name)]


def facts_file(manifest: bytes, names: Collection[str]) -> str:
    """The one that belongs to a manifest: the only one, also if the manifest is damaged, or that with its checksum."""
    there = [name for name in names if _NAME.fullmatch(name)]
    return there[0] if len(there) == 1 else f't5ckpt.{digest(manifest)}.json'


def read_facts_file(storage: Storage, directory: str) -> bytes:
    """The contents of the file; raises CheckpointNotFoundError if there is none."""
    names = facts_files(storage, directory)
    if not names:
        raise CheckpointNotFoundError(f'{storage.url(directory)} has no facts of t5ckpt')
    manifest = storage.read(join(directory, MANIFEST)) if len(names) > 1 else b''
    return storage.read(join(directory, facts_file(manifest, names)))

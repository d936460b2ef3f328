"""Renames the files of a step for a copy of it: on object stores all but the manifest are below a directory of the copy.

The values do not change, so neither do the files with them, nor their checksums. The lists of file checksums have names relative
to their own directory. Only the specs in the manifest, and the facts, are changed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack

from t5ckpt.core.keys import join
from t5ckpt.format.array_spec import is_spec, location_of
from t5ckpt.format.facts import decode_facts, encode_facts, save_id
from t5ckpt.format.file_checksums import FileChecksums, entry_of
from t5ckpt.format.manifest import unpack, version_of
from t5ckpt.format.names import MANIFEST, without_generation
from t5ckpt.tree.leaf_table import unique


def relocated(name: str, generation: str) -> str:
    """The name of a file of a step, or of an array's directory, in a copy with this ``generation_dir``, or '' without one."""
    return join(generation, without_generation(name))


def relocated_manifest(manifest: bytes, generation: str, where: str) -> bytes:
    """The manifest of a copy, without facts. It has the same bytes if no array has another name.

    Raises:
      FormatError: the manifest does not decode, or has a spec that is not accepted.
    """
    renamed: list[str] = []

    def relocated_map(items: list[tuple[Any, Any]]) -> Any:
        fields = unique(items)
        if not is_spec(fields):
            return fields
        location = location_of(fields, 'a spec')
        target = relocated(location, generation)
        if target == location:
            return fields
        renamed.append(target)
        # Before tensorstore 0.1.14, the path was at the top.
        fields.pop('path', None)
        return {**fields, 'kvstore': {**fields['kvstore'], 'path': f'{target}/'}}

    contents = unpack(manifest, where, msgpack.ExtType, relocated_map)
    if generation and isinstance(contents, dict) and 'version' in contents and version_of(manifest) is None:
        # The facts follow it; Flax sorts the keys.
        contents = {'version': contents['version'], **contents}
    elif not renamed:
        return manifest
    return msgpack.packb(contents) or b''


def relocated_facts(facts: bytes, manifest: bytes, generation: str, where: str) -> bytes:
    """The facts of a copy, which name the save that they are of.

    Args:
      facts: of the original.
      manifest: of the copy.
      generation: see :func:`relocated`.
      where: the path of the facts, for errors.

    Raises:
      FormatError: the facts do not decode.
    """
    decoded = decode_facts(facts, where)
    lists = {relocated(name, generation): decoded.digests[name] for name in decoded.digests.lists}
    digests = FileChecksums({**lists, MANIFEST: entry_of(manifest)})
    if (digests, generation) == (decoded.digests, decoded.positions_in):
        return facts
    return encode_facts(dataclasses.replace(decoded, digests=digests, positions_in=generation, save=save_id(facts)))

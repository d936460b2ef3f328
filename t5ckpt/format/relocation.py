"""Renames the files of a step for a copy of it: on object stores all but the manifest are below a directory of the copy.

The values do not change, so neither do the files with them, nor their checksums. The lists of file checksums have names relative
to their own directory. Only the specs in the manifest, and the facts, are changed.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import msgpack

from t5ckpt.core.keys import join
from t5ckpt.format.array_spec import is_spec, location_of
from t5ckpt.format.facts import decode_facts, encode_facts, save_id
from t5ckpt.format.file_checksums import FileChecksums, entry_of
from t5ckpt.format.manifest import STREAM_ITEM, unpack
from t5ckpt.format.names import MANIFEST, without_generation


def relocated(name: str, generation: str) -> str:
    """The name of a file of a step, or of an array's directory, in a copy with this ``generation_dir``, or '' without one."""
    return join(generation, without_generation(name))


def relocated_manifest(manifest: bytes, generation: str, where: str) -> bytes:
    """The manifest of a copy, without facts. It has the same bytes if no array has another name.

    Raises:
      FormatError: the manifest does not decode, or has a spec that is not accepted.
    """
    if manifest.startswith(STREAM_ITEM):
        # A stream of EasyLM has no specs.
        return manifest
    contents = unpack(manifest, where, msgpack.ExtType)
    changed = _relocated_specs(contents, generation, where)
    if generation and isinstance(changed, dict) and 'version' in changed:
        # The facts follow it; Flax sorts the keys.
        changed = {'version': changed['version'], **changed}
    return manifest if changed is contents else msgpack.packb(changed) or b''


def _relocated_specs(tree: Any, generation: str, where: str) -> Any:
    """The tree with other locations in its specs; the tree itself if there are none."""
    if isinstance(tree, list):
        changed = [_relocated_specs(item, generation, where) for item in tree]
        return changed if any(map(operator.is_not, changed, tree)) else tree
    if not isinstance(tree, Mapping):
        return tree
    if is_spec(tree):
        location = location_of(tree, where)
        if relocated(location, generation) == location:
            return tree
        spec = {key: value for key, value in tree.items() if key != 'path'}
        return {**spec, 'kvstore': {**tree['kvstore'], 'path': f'{relocated(location, generation)}/'}}
    items = {key: _relocated_specs(value, generation, where) for key, value in tree.items()}
    return items if any(items[key] is not value for key, value in tree.items()) else tree


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
    recorded = FileChecksums.recorded_by(decoded, where)
    lists = {relocated(name, generation): recorded[name] for name in recorded.keys() - {MANIFEST}}
    digests = {MANIFEST: entry_of(manifest), **lists}
    if digests == dict(recorded):
        return facts
    return encode_facts(
        dataclasses.replace(
            decoded,
            tree=decoded.tree.below(generation),
            digests=FileChecksums(digests).to_json(),
            positions_in=generation or None,
            save=save_id(facts),
        )
    )

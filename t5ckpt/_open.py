"""From a located checkpoint to its decoded contents; no array is read."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from t5ckpt._layout import SIDECAR, join
from t5ckpt._leaves import Empty, LeafTable, flatten_nested, nest
from t5ckpt._manifest import Manifest, decode_manifest
from t5ckpt._orbax import has_placeholders, read_orbax, resolve_placeholders
from t5ckpt._plan_restore import checkpoint_leaves, with_facts
from t5ckpt._sidecar import Sidecar, TreeFacts, decode_sidecar
from t5ckpt._specs import is_spec
from t5ckpt._types import Path, RestoreStateTransformationFn
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from t5ckpt.steps import Located

__all__ = ['Contents', 'RawFiles', 'leaves_of', 'read_contents', 'read_raw', 'still_there']


@dataclasses.dataclass(frozen=True)
class RawFiles:
    """The manifest and the sidecar, if there is one, as they lie there; of an Orbax directory nothing."""

    manifest: bytes | None = None
    sidecar: bytes | None = None


@dataclasses.dataclass(frozen=True)
class Contents:
    """A checkpoint's manifest and sidecar, and where it was found."""

    located: Located
    manifest: Manifest
    sidecar: Sidecar


def read_raw(located: Located) -> RawFiles:
    """Reads a checkpoint's own files.

    Raises:
      CheckpointNotFoundError: gone since it was located.
    """
    storage, directory = located.storage, located.directory
    if not located.manifest:
        return RawFiles()
    manifest = storage.read(join(directory, located.manifest))
    key = join(directory, SIDECAR)
    return RawFiles(manifest, storage.read(key) if storage.is_file(key) else None)


def read_contents(located: Located, raw: RawFiles | None = None) -> Contents:
    """Decodes the manifest, of whichever layout, and the sidecar where there is one.

    Args:
      located: the checkpoint.
      raw: its files, if somebody has read them already.

    Raises:
      FormatError: the manifest or the sidecar does not decode, or is of something else.
      CheckpointNotFoundError: gone since it was located.
    """
    raw = read_raw(located) if raw is None else raw
    storage, directory = located.storage, located.directory
    if raw.manifest is None:
        return Contents(located, read_orbax(storage, directory), Sidecar())
    manifest = decode_manifest(raw.manifest, located.url)
    if has_placeholders(manifest.state):
        resolved = resolve_placeholders(storage, directory, manifest.state)
        return Contents(located, dataclasses.replace(manifest, state=resolved), Sidecar())
    if raw.sidecar is None:
        return Contents(located, manifest, Sidecar())
    return Contents(located, manifest, decode_sidecar(raw.sidecar, storage.url(join(directory, SIDECAR))))


@contextlib.contextmanager
def still_there(located: Located) -> Generator[None]:
    """Says that a checkpoint was deleted while its arrays were read, where that looks like damage.

    Raises:
      CheckpointNotFoundError: instead of CorruptCheckpointError, if the manifest is gone by now.
    """
    try:
        yield
    except CorruptCheckpointError as error:
        if located.manifest and not located.storage.is_file(join(located.directory, located.manifest)):
            raise CheckpointNotFoundError(
                f'{located.url} was deleted while it was being read. Read another step, or pin one that is to stay.'
            ) from error
        raise


def leaves_of(
    contents: Contents, fns: Sequence[RestoreStateTransformationFn], target: Mapping[str, Any]
) -> tuple[LeafTable, TreeFacts]:
    """A checkpoint's leaves after the restore transforms, and the sidecar's facts at their new places.

    The transforms see what the state was: empty containers and text are put back before the first. A fact about a leaf
    (it was a Python number, it is PRNG keys) follows the object that stands for it, wherever a transform moves it.

    Raises:
      UnsupportedFormatError: a transform returned no state dict.
      FormatError: a spec that is not accepted.
    """
    manifest, facts = contents.manifest, contents.sidecar.facts
    if not fns:
        return checkpoint_leaves(manifest.state, manifest.version, facts), facts
    before = with_facts(flatten_nested(manifest.state, is_spec), facts)
    state: Any = nest({path: leaf.build() if isinstance(leaf, Empty) else leaf for path, leaf in before.items()})
    for fn in fns:
        state = fn(state, target)
        if not isinstance(state, Mapping):
            raise UnsupportedFormatError(
                f'the state transformation {fn!r:.80} returned {type(state).__name__}, expected the new state dict.'
            )
    origin = {id(leaf): path for path, leaf in before.items()}
    came_from = {path: origin[id(leaf)] for path, leaf in flatten_nested(state, is_spec).items() if id(leaf) in origin}
    moved = TreeFacts(python=_moved(facts.python, came_from), keys=_moved(facts.keys, came_from), stored=facts.stored)
    return checkpoint_leaves(state, manifest.version, moved), moved


def _moved(facts: Mapping[Path, str], came_from: Mapping[Path, Path]) -> dict[Path, str]:
    return {path: facts[old] for path, old in came_from.items() if old in facts}

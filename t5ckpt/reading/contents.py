"""Reads and decodes the manifest, the facts and the file checksums of a located checkpoint, without reading arrays.

The file ``checkpoint`` holds manifest and facts. Steps of the earlier layout have the latter in a file
(``catalog/facts_files.py``).

Notes: computes one checksum of the manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from t5ckpt.catalog.facts_files import facts_file, facts_files
from t5ckpt.catalog.layouts import is_levanter
from t5ckpt.catalog.locate import Located, foreign_bytes
from t5ckpt.core.gc_pause import paused
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.protocols import RestoreStateTransformationFn
from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from t5ckpt.format.array_spec import StoredArray, checkpoint_leaves
from t5ckpt.format.facts import NO_FACTS, Facts, TreeFacts, decode_facts
from t5ckpt.format.file_checksums import FileChecksums, entry_of
from t5ckpt.format.manifest import Manifest, begins_state, decode_manifest, refuse_pointer, split_facts
from t5ckpt.format.names import (
    COPIES,
    MANIFEST,
    is_file_checksums,
    parse_step_dir,
    part_of,
)
from t5ckpt.format.safetensors import is_tensor_file
from t5ckpt.reading.checkpoint_files import CheckpointFiles, in_threads
from t5ckpt.reading.identity import Identity
from t5ckpt.reading.orbax import read_orbax, resolve_placeholders
from t5ckpt.reading.safetensors import decode_tensors, read_tensors, refuse_shard
from t5ckpt.reading.zarr_tree import read_zarr_tree
from t5ckpt.storage import Storage
from t5ckpt.tree.leaf_table import LeafTable, flatten_nested, unflatten
from t5ckpt.tree.leaves import KeyData, as_key_data

_CURE = f'{CURE_OF_DAMAGE} If it was edited on purpose, leave its entry t5ckpt out and remove integrity.*.json.'


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


@dataclasses.dataclass(frozen=True)
class Contents:
    """A checkpoint's manifest and facts, and where it was found.

    Attributes:
      located: where.
      manifest, facts: decoded.
      checksums: the file checksums, if they were read with the manifest.
      raw: the files that were read.
      left_out: items of a step of Orbax, or arrays of a tree of zarr, that are not read.
    """

    located: Located
    manifest: Manifest
    facts: Facts
    checksums: FileChecksums | None = None
    raw: RawFiles = RawFiles()
    left_out: tuple[str, ...] = ()

    @property
    def identity(self) -> Identity:
        """The identity of the checkpoint."""
        return Identity(self.located, self.raw.versions)

    def read_checksums(self) -> FileChecksums | None:
        """The file checksums, read now if they were not read before; None if the checkpoint has none (T5X).

        Raises:
          CorruptCheckpointError: one of the files that hold them is missing or damaged.
        """
        if self.checksums is not None or self.raw.manifest is None or is_tensor_file(self.located.manifest):
            return self.checksums
        return _file_checksums(self.located, with_lists(self.located, self.raw), self.facts.digests)

    @property
    def part(self) -> str:
        """The sentence that the directory has only the part of one of several processes (``save/parts.py``), or ''."""
        return _part(self.located, self.facts.digests)

    def check_not_part(self) -> None:
        """Raises CorruptCheckpointError if the directory has only a part of the step; the text says how to restore it."""
        if self.part:
            raise CorruptCheckpointError(self.part)

    def leaves(self) -> LeafTable:
        """The leaves; raises FormatError for a spec that is not accepted."""
        return leaves_of(self, (), {})[0]


def read_raw(located: Located, *, checksums: bool = False) -> RawFiles:
    """Reads a checkpoint's own files; with ``checksums`` also its file checksums.

    Raises:
      CheckpointNotFoundError: the checkpoint was deleted since it was located.
      UnsafeSpecError: a file is a symbolic link that leads out of the checkpoint.
    """
    files = CheckpointFiles.of(located)
    if not located.manifest:
        return RawFiles()
    if is_tensor_file(located.manifest):
        data, versions = read_tensors(files, located.manifest)
        return RawFiles(data, versions=versions)
    refuse_shard(located.manifest, located.url)
    data, version = files.read_with_version(located.manifest)
    manifest, facts = split_facts(data)
    if facts is None and (names := facts_files(located.storage, located.directory)):
        with contextlib.suppress(CheckpointNotFoundError):
            facts = files.read(facts_file(manifest, names))
    raw = RawFiles(manifest, facts, versions={located.manifest: version})
    return with_lists(located, raw) if checksums else raw


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


def read_contents(located: Located, *, logs_items: bool = True) -> Contents:
    """Reads and decodes a checkpoint's manifest and facts; otherwise as :func:`decode_contents`."""
    return decode_contents(located, read_raw(located), logs_items=logs_items)


def decode_contents(
    located: Located, raw: RawFiles, *, logs_items: bool = True, wanted: Collection[str] = ()
) -> Contents:
    """Decodes the manifest, of any layout, and the facts if there are any.

    Args:
      located: the checkpoint.
      raw: its files, from :func:`read_raw`.
      logs_items: logs the items of Orbax and the arrays of zarr that are not read.
      wanted: see :func:`read_orbax`.

    Raises:
      FormatError: the manifest or the facts do not decode, or are in another format.
      CheckpointNotFoundError: the checkpoint was deleted since it was located.
    """
    with Identity(located, raw.versions).checked_on_failure():
        return _decoded(located, raw, logs_items, wanted)


def _decoded(located: Located, raw: RawFiles, logs_items: bool = True, wanted: Collection[str] = ()) -> Contents:
    files = CheckpointFiles.of(located)
    if raw.manifest is None:
        of_levanter = is_levanter(located.storage, located.directory)
        orbax = None if of_levanter else read_orbax(files, logs_items=logs_items, wanted=wanted)
        orbax = orbax or read_zarr_tree(files, logs_items=logs_items)
        return Contents(located, orbax.manifest, orbax.facts, left_out=orbax.left_out)
    if is_tensor_file(located.manifest):
        return Contents(located, decode_tensors(raw.manifest), NO_FACTS, None, raw)
    refuse_pointer(raw.manifest, located.url)
    facts = _facts(located, raw)
    facts.digests.check(located.manifest, entry_of(raw.manifest), located.url, _CURE)
    try:
        manifest = decode_manifest(raw.manifest, located.url)
    except CorruptCheckpointError as error:
        name = located.manifest
        if name == MANIFEST or parse_step_dir(name) is not None or begins_state(raw.manifest):
            raise
        # Only the path suggests that this file is a checkpoint, so the path is more likely to be wrong than the file.
        what = next((each for _, each in foreign_bytes(raw.manifest)), 'not a checkpoint. Check the path')
        raise UnsupportedFormatError(f'{located.url} is {what}.') from error
    orbax = resolve_placeholders(files, manifest)
    if orbax is not None:
        return Contents(located, orbax.manifest, orbax.facts, None, raw)
    return Contents(located, manifest, facts, _file_checksums(located, raw, facts.digests), raw)


def _facts(located: Located, raw: RawFiles) -> Facts:
    return NO_FACTS if raw.facts is None else decode_facts(raw.facts, located.url)


def check_opens(storage: Storage, directory: str, manifest: bytes, facts: bytes | None) -> None:
    """Decodes the files of a commit as a reader will: specs, facts and the manifest's checksum.

    Args:
      storage: of the run.
      directory: the temporary directory; for a copy of an Orbax checkpoint its arrays are opened.
      manifest: the bytes of the manifest.
      facts: the bytes of the facts, if there are any.

    Raises:
      FormatError: a reader could not open the checkpoint.
    """
    with paused():
        _decoded(Located(storage, directory, MANIFEST, None), RawFiles(manifest, facts)).leaves()


def _file_checksums(located: Located, raw: RawFiles, recorded: FileChecksums) -> FileChecksums | None:
    """The checkpoint's file checksums; None if they were not read, or if the checkpoint has none (T5X)."""
    lists = raw.checksum_lists
    if lists is None or (raw.facts is None and not lists):
        return None

    def where(name: str) -> str:
        return located.storage.url(join(located.directory, name))

    missing = sorted(set(recorded.lists) - lists.keys())
    if missing or raw.facts is None:
        if part := _part(located, recorded):
            raise CorruptCheckpointError(part)
        what = f'{", ".join(map(where, missing))} is missing' if missing else f'{located.url} has no facts of t5ckpt'
        raise CorruptCheckpointError(
            f'{what}, so no checksum can be compared. {CURE_OF_DAMAGE} Checkpointer, open_checkpoint and load_t5x_checkpoint '
            "read it with verify='quick'. t5ckpt cp --trust-files copies it with new checksums."
        )
    loaded = recorded.load_lists(lists.get, where).values()
    return FileChecksums({name: entry for entries in loaded for name, entry in entries.items()})


def _part(located: Located, recorded: FileChecksums) -> str:
    storage, directory = located.storage, located.directory
    if not storage.is_file_system or not storage.is_file(join(directory, COPIES)):
        return ''
    part = part_of(recorded.lists, {entry.name for entry in storage.entries(directory)})
    if part is None:
        return ''
    return (
        f'{storage.url(directory)} is the part of {part}: the other files are on the disks of the other processes. Restore it '
        'in a job of as many processes with Checkpointer(local=LocalTier(...)), or read the run to which its steps are uploaded.'
    )


def leaves_of(
    contents: Contents, transforms: Sequence[RestoreStateTransformationFn], template: Mapping[str, Any]
) -> tuple[LeafTable, TreeFacts]:
    """A checkpoint's leaves after the restore transforms, and the facts of its tree under their new paths.

    Empty containers and text are added before the first transform. A fact about a leaf (it was a Python number, or is PRNG
    keys) moves with the object that represents the leaf. Typed keys of a transform become their data and such a fact.

    Raises:
      UnsupportedFormatError: a transform did not return a state dict.
      FormatError: a spec is not accepted.
    """
    manifest, tree_facts = contents.manifest, contents.facts.tree
    before = checkpoint_leaves(manifest.leaves, manifest.version, tree_facts)
    if not transforms:
        return before, tree_facts
    state: Any = unflatten(before)
    for fn in transforms:
        state = fn(state, template)
        if not isinstance(state, Mapping):
            raise UnsupportedFormatError(
                f'the state transformation {fn!r:.80} returned {type(state).__name__}, expected the new state dict.'
            )
    table = flatten_nested(state)
    origin = {id(leaf): path for path, leaf in before.items()}
    for path, leaf in table.items():
        if isinstance(leaf, StoredArray) and id(leaf) not in origin:
            raise UnsupportedFormatError(
                f'{leaf_name(path)}: a state transformation put an array of another checkpoint there, which is not read from '
                'this one. Put its values there: t5ckpt.open_checkpoint(path)[leaf][...].'
            )
    came_from = {path: origin[id(leaf)] for path, leaf in table.items() if id(leaf) in origin}
    made_keys: dict[Path, str] = {}
    for path, leaf in table.items():
        key_data = as_key_data(leaf)
        if isinstance(key_data, KeyData):
            table[path], made_keys[path] = key_data.data, key_data.impl
    moved = TreeFacts(
        python=_moved(tree_facts.python, came_from),
        keys=_moved(tree_facts.keys, came_from) | made_keys,
    )
    return table, moved


def _moved(by_path: Mapping[Path, str], came_from: Mapping[Path, Path]) -> dict[Path, str]:
    return {path: by_path[old] for path, old in came_from.items() if old in by_path}

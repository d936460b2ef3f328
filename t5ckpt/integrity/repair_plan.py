"""Plans the repair of a checkpoint from the damages that a verification found; writes nothing.

Three repairs are possible. A ``.zarray`` is rebuilt from the manifest, if the result matches its checksum. The file checksums of
one process are rebuilt from the files, if the result matches the checksum in the facts. Damaged leaves that the caller names
are left out. ``trust_files`` accepts files whose checksums are lost, and rebuilds a ``.zarray`` that has none. Values are never
invented: a chunk that is missing or differs from its checksum cannot be repaired, nor can a damaged manifest.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from t5ckpt.catalog.locate import Located
from t5ckpt.core.argument_kinds import checks_options
from t5ckpt.core.arguments import check_patterns
from t5ckpt.core.leaf_path import Path, leaf_name, path_of
from t5ckpt.core.protocols import Clock, leaf_pattern
from t5ckpt.core.text import CURE_OF_DAMAGE, lines, some_of
from t5ckpt.errors import CorruptCheckpointError, UnsupportedFormatError, near_names
from t5ckpt.format.array_spec import StoredLeaf, is_spec
from t5ckpt.format.facts import NO_FACTS, Facts, TreeFacts
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.manifest import VERSION, Manifest, encode_manifest, version_of
from t5ckpt.format.names import MANIFEST, file_checksums_name, is_position
from t5ckpt.integrity.recovery_records import (
    ZARRAY,
    RecoveryRecords,
    Source,
    below,
    files_of,
    is_own,
    unrecoverable_text,
)
from t5ckpt.integrity.report import Damage, VerifyReport
from t5ckpt.reading.contents import Contents
from t5ckpt.tree.leaf_table import flatten_nested, unflatten


@checks_options
@dataclasses.dataclass(frozen=True)
class RepairOptions:
    """The options of a repair.

    Attributes:
      drop: patterns; a damaged leaf or file of a data iterator is left out if one of them matches its whole name.
      trust_files: accepts files whose checksums are lost, and rebuilds each lost ``.zarray`` without a checksum as T5X writes it.
        Their values may be wrong.
      add_checksums: writes file checksums for a checkpoint that has none, such as one of T5X.
      dry_run: writes nothing; the report describes the repair.
      source_options, target_options: of the storages of the checkpoint and of the copy, see docs/storage.md.
      clock: returns unix seconds.
    """

    drop: Sequence[str] = ()
    trust_files: bool = False
    add_checksums: bool = False
    dry_run: bool = False
    source_options: Mapping[str, Any] | None = None
    target_options: Mapping[str, Any] | None = None
    clock: Clock = time.time

    def __post_init__(self) -> None:
        check_patterns(self.drop, 'drop')


@dataclasses.dataclass(frozen=True)
class RepairPlan:
    """The plan of a repair.

    Attributes:
      source: the checkpoint as it was verified.
      manifest: the bytes of the new manifest, without the dropped leaves.
      facts: those of the checkpoint, or empty ones, without the dropped leaves.
      zarrays: the bytes of the rebuilt ``.zarray`` files, by name.
      rebuilt: the names of all rebuilt files: these, the manifest if facts were added, and file checksums.
      dropped: names of leaves and of iterator files.
      left_out: directories and files that are not copied.
      foreign: files that are copied and do not belong to the checkpoint; they get no checksums.
      has_checksums: whether the copy gets file checksums.
      notes: for the report.
      checksums: the recorded checksums, which files have to match.
      leaves: the remaining stored leaves.
    """

    source: Source
    manifest: bytes
    facts: Facts
    zarrays: dict[str, bytes]
    rebuilt: tuple[str, ...]
    dropped: tuple[str, ...]
    left_out: frozenset[str]
    foreign: frozenset[str]
    has_checksums: bool
    notes: tuple[str, ...]
    checksums: FileChecksums
    leaves: dict[str, StoredLeaf]


def plan_repair(located: Located, options: RepairOptions, report: VerifyReport) -> RepairPlan:
    """Plans the repair of a checkpoint.

    Args:
      located: the checkpoint.
      options: which losses are accepted.
      report: of a full verification.

    Raises:
      CorruptCheckpointError: it cannot be repaired, with each damage and the option that may help.
    """
    records = RecoveryRecords(located, report)
    contents = Contents(located, records.manifest, records.facts or NO_FACTS)
    table = {leaf_name(path): leaf for path, leaf in contents.leaves().items()}
    leaves = {name: leaf for name, leaf in table.items() if isinstance(leaf, StoredLeaf)}
    damages = [damage for damage in report.damages if damage.file not in records.unusable_lists]
    rebuildable = records.zarrays(leaves, damages)
    is_verified = records.reconstruct(rebuildable)
    zarrays = {name: data for name, data in rebuildable.items() if options.trust_files or name in records.checksums}
    lost = [damage for damage in damages if not _is_repaired(damage, leaves, zarrays, records.checksums, options.drop)]
    if is_verified and records.unusable_lists:
        # The rebuilt list verifies its files, so a difference from the damaged list is not a damage.
        lost = [damage for damage in lost if damage.file in records.intact]
    unverified = records.unverified(leaves, is_verified)
    if records.had_checksums and not options.trust_files and (unverified or not is_verified):
        raise _unverified_error(lost, sorted(records.unusable_lists) or unverified)
    if unproven := [
        damage for damage in lost if _is_repaired(damage, leaves, rebuildable, records.checksums, options.drop)
    ]:
        raise _unproven_error(unproven)
    dropped, iterators = _droppable(lost, {_named(damage) for damage in damages}, options.drop)
    manifest, tree_facts = records.source[0], contents.facts.tree
    if version_of(manifest[:64]) is None:
        # Of Flax; the facts of a copy stand after the version.
        manifest = encode_manifest(records.manifest.state)
    if dropped:
        manifest, tree_facts = _without(located, records.manifest, tree_facts, dropped)
    left_out = frozenset({*(leaves[name].array.location for name in dropped if name in leaves), *iterators})
    zarrays = {name: data for name, data in zarrays.items() if name.removesuffix(f'/{ZARRAY}') not in left_out}
    unverified = [name for name in unverified if name not in dropped | iterators]
    kept = {name: leaf for name, leaf in leaves.items() if name not in dropped}
    has_checksums = records.had_checksums or options.add_checksums
    added = (MANIFEST, file_checksums_name(0)) if has_checksums and not records.had_checksums else ()
    known_files = {*records.checksums, *zarrays, *unverified}
    return RepairPlan(
        source=records.source,
        manifest=manifest,
        facts=dataclasses.replace(contents.facts, tree=tree_facts),
        zarrays=zarrays,
        rebuilt=tuple(sorted({*zarrays, *records.unusable_lists, *added})),
        dropped=tuple(sorted({*dropped, *iterators})),
        left_out=left_out,
        foreign=_foreign(located, kept, known_files, records.checksums) - below(files_of(located), left_out),
        has_checksums=has_checksums,
        notes=(*(() if records.unusable_lists else report.notes), *records.notes(unverified, zarrays)),
        checksums=records.checksums,
        leaves=kept,
    )


def _unverified_error(lost: Sequence[Damage], names: Sequence[str]) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        lines(
            unrecoverable_text(lost),
            f'{some_of(names, 5)}: lost, or no longer verified by a checksum. The other files cannot verify them: '
            'files may have changed, be missing (also on purpose, for keep_dataset_checkpoints) or have been added. '
            f'{CURE_OF_DAMAGE} To take all files as they are, pass trust_files=True. Nothing was written.',
        )
    )


def _unproven_error(damages: Sequence[Damage]) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        lines(
            unrecoverable_text(damages),
            f'No checksum verifies a .zarray that is rebuilt. {CURE_OF_DAMAGE} To rebuild it as T5X and t5ckpt write it, pass '
            'trust_files=True. Nothing was written.',
        )
    )


def _foreign(
    located: Located, leaves: Mapping[str, StoredLeaf], known_files: Collection[str], checksums: FileChecksums
) -> frozenset[str]:
    """The files that do not belong to the checkpoint. All files in the directory of an array without checksums belong to it."""
    unlisted = {leaf.array.location for leaf in leaves.values() if not checksums.has_array(leaf.array)}
    unknown = {name for name in files_of(located) if name not in known_files and not is_own(name)}
    return frozenset(unknown - below(unknown, unlisted))


def _is_repaired(
    damage: Damage,
    leaves: Mapping[str, StoredLeaf],
    zarrays: Mapping[str, bytes],
    checksums: FileChecksums,
    drop: Sequence[str],
) -> bool:
    """Whether a rebuilt ``.zarray`` repairs a damage.

    The chunks of an array without checksums may be lost as well. So a leaf that ``drop`` names is left out if no checksum
    verifies its ``.zarray``.
    """
    if damage.leaf not in leaves:
        return False
    location = leaves[damage.leaf].array.location
    zarray = f'{location}/{ZARRAY}'
    is_left_out = zarray not in checksums and _is_named(damage.leaf, drop)
    return damage.file in {location, zarray} and zarray in zarrays and not is_left_out


def _named(damage: Damage) -> str:
    return damage.leaf or damage.file


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    return any(leaf_pattern(pattern).fullmatch(name) for pattern in patterns)


def _droppable(lost: Sequence[Damage], names: Collection[str], patterns: Sequence[str]) -> tuple[set[str], set[str]]:
    """The lost leaves and iterator files, all of which the caller allows to leave out.

    Raises:
      CorruptCheckpointError: others are lost, or a pattern matches none of the damaged ``names``.
    """
    unused = [pattern for pattern in patterns if not any(leaf_pattern(pattern).fullmatch(name) for name in names)]
    if unused:
        near = near_names(unused[0], names) or sorted(names)[:3]
        shown = f'damaged are {", ".join(near)}' if near else 'nothing has to be dropped'
        raise CorruptCheckpointError(f'drop={unused} names nothing that is damaged; {shown}. Nothing was written.')
    if left := [damage for damage in lost if not _is_named(_named(damage), patterns)]:
        raise unrecoverable_error(left)
    strange = [damage for damage in lost if not damage.leaf and not is_position(damage.file)]
    if strange:
        cure = 'These are not leaves, so they cannot be left out. Nothing was written.'
        raise CorruptCheckpointError(lines(unrecoverable_text(strange), cure))
    return {damage.leaf for damage in lost if damage.leaf}, {damage.file for damage in lost if not damage.leaf}


def unrecoverable_error(damages: Sequence[Damage]) -> CorruptCheckpointError:
    """The error of a repair that would lose leaves, with their names and the option to leave them out."""
    names = sorted({re.escape(_named(damage)) for damage in damages})
    return CorruptCheckpointError(
        lines(
            unrecoverable_text(damages),
            'These values are lost. Restore an older step, copy the checkpoint again, or leave them out '
            f'by naming them: drop={names[:3]}. Nothing was written.',
        )
    )


def _without(
    located: Located, manifest: Manifest, tree_facts: TreeFacts, dropped: Collection[str]
) -> tuple[bytes, TreeFacts]:
    """The manifest and the facts without some leaves."""
    if manifest.version != VERSION:
        raise UnsupportedFormatError(
            f'{located.url} is of version {manifest.version}, and is rewritten by a copy only: t5ckpt cp --drop.'
        )
    gone = set(map(path_of, dropped))
    table = flatten_nested(manifest.state, is_spec)
    kept = {path: leaf for path, leaf in table.items() if path not in gone}
    if not any(hasattr(leaf, 'dtype') or is_spec(leaf) for leaf in kept.values()):
        raise CorruptCheckpointError(
            f'{located.url}: nothing would be left. Restore an older step. Nothing was written.'
        )

    def of_kept(by_path: Mapping[Path, str]) -> dict[Path, str]:
        return {path: value for path, value in by_path.items() if path not in gone}

    tree_facts = dataclasses.replace(
        tree_facts, python=of_kept(tree_facts.python), keys=of_kept(tree_facts.keys), text=of_kept(tree_facts.text)
    )
    return encode_manifest(unflatten(kept)), tree_facts

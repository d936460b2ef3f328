"""What a repair can do about the damages of a checkpoint: a decision, without a byte written.

Three things can be made again: a ``.zarray``, which follows from the manifest; the lists of files and the sidecar, from
the files; and a checkpoint without the leaves that are lost, where the caller names them. Values are never made up: a
chunk that is gone or differs from its checksum is gone, and so is a damaged manifest. What is believed of the rest, and
why, is in ``integrity/recovery_records.py``.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from t5ckpt.catalog.locate import Located
from t5ckpt.core.arguments import check_patterns
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.protocols import Clock, leaf_pattern
from t5ckpt.core.text import lines
from t5ckpt.errors import CorruptCheckpointError, UnsupportedFormatError, near_names
from t5ckpt.format.array_spec import is_spec
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.manifest import VERSION, Manifest, encode_manifest
from t5ckpt.format.names import SIDECAR, TRAIN_DS_PREFIX, file_checksums_name
from t5ckpt.format.sidecar import Sidecar, TreeFacts
from t5ckpt.format.stored_leaf import StoredLeaf
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
from t5ckpt.reading.contents import Contents, leaves_of
from t5ckpt.tree.leaf_table import flatten_nested, unflatten

__all__ = ['RepairOptions', 'RepairPlan', 'plan_repair', 'unrecoverable_error']


@dataclasses.dataclass(frozen=True)
class RepairOptions:
    """What may be done.

    Attributes:
      drop: patterns; damaged leaves, and damaged files of data iterators, whose whole name one of them matches are left out.
      trust_files: take files as they are that no checksum vouches for any more, although there was one once. Values may be
        wrong then, and nobody can tell.
      add_checksums: give a checkpoint its lists of files that has none, such as one of T5X.
      dry_run: say what would be done, and do nothing.
      source_options, target_options: of the storages of the checkpoint and of the copy, see docs/storage.md.
      clock: unix seconds.
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
    """What will be done.

    Attributes:
      source: the checkpoint as it was verified.
      manifest: its bytes, without the leaves that are dropped.
      sidecar: what is known of the tree, likewise.
      zarrays: bytes by file.
      rebuilt: files that are made again: these, and lists of files.
      dropped: names of leaves and of iterator files.
      left_out: directories and files that the copy does not have.
      foreign: files that come along and are none of the checkpoint's: no list is to have them.
      has_books: whether the copy gets lists of its files.
      notes: for people.
      trusted: files with the checksums that they have to have.
      leaves: the stored leaves that stay.
    """

    source: Source
    manifest: bytes
    sidecar: Sidecar
    zarrays: dict[str, bytes]
    rebuilt: tuple[str, ...]
    dropped: tuple[str, ...]
    left_out: frozenset[str]
    foreign: frozenset[str]
    has_books: bool
    notes: tuple[str, ...]
    trusted: FileChecksums
    leaves: dict[str, StoredLeaf]


def plan_repair(
    located: Located, options: RepairOptions, report: VerifyReport, more: Sequence[Damage] = ()
) -> RepairPlan:
    """From what a verification found to what can be done about it.

    Args:
      located: the checkpoint.
      options: what may be done.
      report: of all its bytes.
      more: damages that came to light since.

    Raises:
      CorruptCheckpointError: it cannot be mended, with each damage and what could be dropped.
    """
    books = RecoveryRecords(located, report)
    contents = Contents(located, books.manifest, books.sidecar or Sidecar())
    table = {leaf_name(path): leaf for path, leaf in leaves_of(contents, (), {})[0].items()}
    leaves = {name: leaf for name, leaf in table.items() if isinstance(leaf, StoredLeaf)}
    damages = [damage for damage in (*report.damages, *more) if damage.file not in books.rebuilt]
    beyond_repair = {damage.leaf for damage in more}
    mendable = {name: leaf for name, leaf in leaves.items() if name not in beyond_repair}
    zarrays = books.zarrays(mendable, damages)
    # Which .zarray were damaged is what the proof says, if there is one. Others than ours may be spelled otherwise.
    proven = books.proven(zarrays)
    if proven is None:
        guess = zarrays | books.differing(mendable)
        proven = books.proven(guess)
        zarrays = zarrays if proven is None else guess
    # Once all files are proven whole, what a damaged list says of others is nothing.
    lost = [damage for damage in damages if damage.file in books.ledger or proven is None]
    lost = [damage for damage in lost if not _is_cured(damage, leaves, zarrays)]
    if proven is None and books.void and not options.trust_files:
        raise _unproven(lost, books.void)
    trusted = books.ledger.merged(proven or {})
    books.check_guesses(zarrays, leaves, trusted)
    loose, loose_files = books.loose(leaves, trusted)
    if not options.trust_files:
        books.check_claims(leaves.values())
        if books.had_checksums:
            lost += _unvouched({**{name: leaves[name].array.location for name in loose}, **_same(loose_files)}, options)
    dropped, iterators = _droppable(lost, {_named(damage) for damage in (*damages, *lost)}, options.drop)
    left_out = {*(leaves[name].array.location for name in dropped if name in leaves), *iterators}
    zarrays = {name: data for name, data in zarrays.items() if name.removesuffix(f'/{ZARRAY}') not in left_out}
    manifest, facts = books.source[0], contents.sidecar.facts
    if dropped:
        manifest, facts = _without(located, books.manifest, facts, dropped)
    kept = {name: leaf for name, leaf in leaves.items() if name not in dropped}
    has_books = books.had_checksums or options.add_checksums
    new_books = {SIDECAR, file_checksums_name(0)} if has_books and not books.had_checksums else set[str]()
    taken = [name for name in (*loose, *loose_files) if name not in dropped | iterators]
    return RepairPlan(
        books.source,
        manifest,
        dataclasses.replace(contents.sidecar, facts=facts),
        zarrays,
        tuple(sorted({*zarrays, *books.rebuilt, *new_books})),
        tuple(sorted({*dropped, *iterators})),
        frozenset(left_out),
        _foreign(located, kept, {*trusted, *zarrays, *taken}, trusted) - below(files_of(located), left_out),
        has_books,
        (*(() if books.void else report.notes), *books.notes(proven is None, taken, zarrays)),
        trusted,
        kept,
    )


def _same(names: Sequence[str]) -> dict[str, str]:
    return {name: name for name in names}


def _unproven(lost: Sequence[Damage], void: Collection[str]) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        lines(
            unrecoverable_text(lost),
            f'{", ".join(sorted(void))}: damaged or gone, and the files that are there do not give what '
            't5ckpt.json recorded: one or more of them have changed, or are missing (also on purpose, for '
            'keep_dataset_checkpoints), or were added, and nothing says which. Restore an older '
            'step, or copy the checkpoint again. To take all of it as it is, right or wrong: trust_files, --trust-files. '
            'Nothing was written.',
        )
    )


def _unvouched(files: Mapping[str, str], options: RepairOptions) -> list[Damage]:
    """What no checksum vouches for, by name, as damages that may be left out.

    Raises:
      CorruptCheckpointError: the caller does not name all of it.
    """
    names = [name for name in files if not _is_named(name, options.drop)]
    if names:
        raise CorruptCheckpointError(
            f't5ckpt wrote checksums of {", ".join(names[:5])} once, and none is left that vouches for them: values may have '
            'changed, and nothing would tell. Restore an older step, or copy the checkpoint again. To take them as they '
            'are, right or wrong: trust_files, --trust-files. Nothing was written.'
        )
    text = 'no checksum is left that vouches for it'
    return [Damage('checksum', file, text, '' if file == name else name) for name, file in files.items()]


def _foreign(
    located: Located, leaves: Mapping[str, StoredLeaf], known: Collection[str], trusted: FileChecksums
) -> frozenset[str]:
    """The files that belong to nothing. Of an array that no list has, whatever lies in its directory is its own."""
    unlisted = {leaf.array.location for leaf in leaves.values() if not trusted.has_array(leaf.array)}
    others = {name for name in files_of(located) if name not in known and not is_own(name)}
    return frozenset(others - below(others, unlisted))


def _is_cured(damage: Damage, leaves: Mapping[str, StoredLeaf], zarrays: Mapping[str, bytes]) -> bool:
    """Whether a new ``.zarray`` is all that it takes."""
    if damage.leaf not in leaves:
        return False
    location = leaves[damage.leaf].array.location
    return damage.file in {location, f'{location}/{ZARRAY}'} and f'{location}/{ZARRAY}' in zarrays


def _named(damage: Damage) -> str:
    return damage.leaf or damage.file


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    return any(leaf_pattern(pattern).fullmatch(name) for pattern in patterns)


def _droppable(lost: Sequence[Damage], names: Collection[str], patterns: Sequence[str]) -> tuple[set[str], set[str]]:
    """The leaves and the iterator files that are lost and may be left out.

    Raises:
      CorruptCheckpointError: others are lost, too, or a pattern is none of the ``names`` of what is damaged.
    """
    unused = [pattern for pattern in patterns if not any(leaf_pattern(pattern).fullmatch(name) for name in names)]
    if unused:
        near = near_names(unused[0], names) or sorted(names)[:3]
        shown = f'damaged are {", ".join(near)}' if near else 'nothing has to be dropped'
        raise CorruptCheckpointError(f'drop={unused} names nothing that is damaged; {shown}. Nothing was written.')
    if left := [damage for damage in lost if not _is_named(_named(damage), patterns)]:
        raise unrecoverable_error(left)
    strange = [damage for damage in lost if not damage.leaf and not damage.file.startswith(f'{TRAIN_DS_PREFIX}-')]
    if strange:
        cure = 'This is no leaf that could be left out. Nothing was written.'
        raise CorruptCheckpointError(lines(unrecoverable_text(strange), cure))
    return {damage.leaf for damage in lost if damage.leaf}, {damage.file for damage in lost if not damage.leaf}


def unrecoverable_error(damages: Sequence[Damage]) -> CorruptCheckpointError:
    """The error of a repair that would lose leaves; it names them, and the option that leaves them out."""
    names = sorted({re.escape(_named(damage)) for damage in damages})
    return CorruptCheckpointError(
        lines(
            unrecoverable_text(damages),
            'These values are lost. Restore an older step, copy the checkpoint again, or leave them out '
            f'by naming them: drop={names[:3]}. Nothing was written.',
        )
    )


def _without(
    located: Located, manifest: Manifest, facts: TreeFacts, dropped: Collection[str]
) -> tuple[bytes, TreeFacts]:
    """The manifest and the facts without some leaves."""
    if manifest.version != VERSION:
        raise UnsupportedFormatError(
            f'{located.url} is of version {manifest.version}, and is rewritten by a copy only: t5ckpt cp --drop.'
        )
    table = flatten_nested(manifest.state, is_spec)
    kept = {path: leaf for path, leaf in table.items() if leaf_name(path) not in dropped}
    if not any(hasattr(leaf, 'dtype') or is_spec(leaf) for leaf in kept.values()):
        raise CorruptCheckpointError(
            f'{located.url}: nothing would be left. Restore an older step. Nothing was written.'
        )

    def others(known: Any) -> dict[Path, str]:
        return {path: value for path, value in known.items() if leaf_name(path) not in dropped}

    facts = dataclasses.replace(facts, python=others(facts.python), keys=others(facts.keys), text=others(facts.text))
    return encode_manifest(unflatten(kept)), facts

"""What a repair can do about the damages of a checkpoint: a decision, without a byte written.

Three things can be made again: a ``.zarray``, which follows from the manifest; the lists of files and the sidecar, from
the files; and a checkpoint without the leaves that are lost, where the caller names them. Values are never made up: a
chunk that is gone or differs from its checksum is gone, and so is a damaged manifest.

A list of files that is damaged itself proves nothing. If the files that are there give the very list whose checksum the
sidecar has, all of them are whole, whatever the damaged one said.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from t5ckpt._damage import Damage, VerifyReport, listed
from t5ckpt._digest import digest
from t5ckpt._implied import is_listed
from t5ckpt._layout import (
    DATASET_REMOVED,
    MANIFEST,
    PINNED,
    SIDECAR,
    TRAIN_DS_PREFIX,
    integrity_file,
    is_inside,
    is_integrity_file,
)
from t5ckpt._leaves import flatten_nested, nest
from t5ckpt._ledger import Ledger, decode_ledger, encode_ledger, ledger_entries
from t5ckpt._manifest import VERSION, Manifest, decode_manifest, encode_manifest
from t5ckpt._open import Contents, leaves_of
from t5ckpt._plan_restore import StoredLeaf
from t5ckpt._scan import Scanner, in_threads
from t5ckpt._sidecar import Sidecar, TreeFacts, decode_sidecar
from t5ckpt._specs import StoredArray, is_spec
from t5ckpt._types import Clock, Path, check_patterns, leaf_name
from t5ckpt._write import zarray_bytes
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    StorageError,
    T5CkptError,
    UnsupportedFormatError,
    near_names,
)
from t5ckpt.steps import Located

__all__ = ['Cure', 'RepairOptions', 'cure_of', 'files_of', 'is_own', 'lost_error']

_ZARRAY = '.zarray'
_LOST_FACTS = (
    'the sidecar is lost: metrics and the keep policy are gone, empty containers, too, and what were Python numbers, strings, '
    'typed PRNG keys or dtypes that zarr does not know come back as T5X would see them'
)


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
class Cure:
    """What will be done.

    Attributes:
      source: the manifest's bytes as they were verified.
      manifest: its bytes, without the leaves that are dropped.
      sidecar: what is known of the tree, likewise.
      zarrays: bytes by file.
      rebuilt: files that are made again: these, and lists of files.
      dropped: names of leaves and of iterator files.
      left_out: directories and files that the copy does not have.
      notes: for people.
      trusted: files with the checksums that they have to have.
      leaves: the stored leaves that stay.
    """

    source: bytes
    manifest: bytes
    sidecar: Sidecar
    zarrays: dict[str, bytes]
    rebuilt: tuple[str, ...]
    dropped: tuple[str, ...]
    left_out: frozenset[str]
    notes: tuple[str, ...]
    trusted: Ledger
    leaves: dict[str, StoredLeaf]


def cure_of(located: Located, options: RepairOptions, report: VerifyReport, more: Sequence[Damage] = ()) -> Cure:
    """From what a verification found to what can be done about it.

    Args:
      located: the checkpoint.
      options: what may be done.
      report: of all its bytes.
      more: damages that came to light since.

    Raises:
      CorruptCheckpointError: it cannot be mended, with each damage and what could be dropped.
    """
    books = _Books(located, report)
    contents = Contents(located, books.manifest, books.sidecar or Sidecar())
    table = {leaf_name(path): leaf for path, leaf in leaves_of(contents, (), {})[0].items()}
    leaves = {name: leaf for name, leaf in table.items() if isinstance(leaf, StoredLeaf)}
    damages = [damage for damage in (*report.damages, *more) if damage.file not in books.rebuilt]
    beyond_repair = {damage.leaf for damage in more}
    mendable = {name: leaf for name, leaf in leaves.items() if name not in beyond_repair}
    zarrays = books.zarrays(mendable, damages)
    # Which .zarray were damaged is what the proof says, if there is one.
    guess = zarrays | books.differing(mendable)
    proven = books.proven(guess)
    zarrays = zarrays if proven is None else guess
    # Once all files are proven whole, what a damaged list says of others is nothing.
    lost = [damage for damage in damages if damage.file in books.ledger or proven is None]
    lost = [damage for damage in lost if not _is_cured(damage, leaves, zarrays)]
    if proven is None and books.void and not options.trust_files:
        what = f'{_hopeless(lost)}\n{", ".join(sorted(books.void))}'
        raise CorruptCheckpointError(
            f'{what}: damaged or gone, and the files that are there do not give what '
            't5ckpt.json recorded: one or more of them have changed, or are missing, and nothing says which. Restore an older '
            'step, or copy the checkpoint again. To take all of it as it is, right or wrong: trust_files, --trust-files. '
            'Nothing was written.'
        )
    trusted = {**books.ledger, **(proven or {})}
    loose = sorted(name for name, leaf in leaves.items() if not is_listed(leaf, trusted))
    named = all(any(re.fullmatch(pattern, name) for pattern in options.drop) for name in loose)
    if books.had_books and not options.trust_files and not named:
        raise _unvouched(loose)
    dropped, iterators = _droppable(lost, {_named(damage) for damage in damages}, options.drop)
    manifest, facts = books.data, contents.sidecar.facts
    if dropped:
        manifest, facts = _without(located, books.manifest, facts, dropped)
    wants_books = options.add_checksums and not books.had_books
    return Cure(
        books.data,
        manifest,
        dataclasses.replace(contents.sidecar, facts=facts),
        zarrays,
        tuple(sorted({*zarrays, *books.rebuilt, *({SIDECAR, integrity_file(0)} if wants_books else ())})),
        tuple(sorted({*dropped, *iterators})),
        frozenset({*(leaves[name].array.location for name in dropped if name in leaves), *iterators}),
        (*report.notes, *books.notes(located.manifest, proven is None, options.trust_files)),
        trusted,
        {name: leaf for name, leaf in leaves.items() if name not in dropped},
    )


def _unvouched(names: Sequence[str]) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f't5ckpt wrote checksums of {", ".join(names[:5])} once, and none is left that vouches for them: values may have '
        'changed, and nothing would tell. Restore an older step, or copy the checkpoint again. To take them as they are, '
        'right or wrong: trust_files, --trust-files. Nothing was written.'
    )


def _is_cured(damage: Damage, leaves: Mapping[str, StoredLeaf], zarrays: Mapping[str, bytes]) -> bool:
    """Whether a new ``.zarray`` is all that it takes."""
    if damage.leaf not in leaves:
        return False
    location = leaves[damage.leaf].array.location
    return damage.file in {location, f'{location}/{_ZARRAY}'} and f'{location}/{_ZARRAY}' in zarrays


class _Books:
    """The manifest, the sidecar and the lists of files, as far as they can be believed.

    Attributes:
      data, manifest: the manifest's bytes, and decoded.
      sidecar: None where it is missing or damaged.
      had_books: whether t5ckpt wrote lists of files at all.
      void: lists that are missing or damaged.
      ledger: what the other lists say.
      rebuilt: the sidecar and lists that have to be made again.
    """

    def __init__(self, located: Located, report: VerifyReport):
        self._located = located
        self._scanner = Scanner(located.storage, located.directory)
        wrong = {damage.file for damage in report.damages}
        _refuse(located, [damage for damage in report.damages if _is_hopeless(damage, located.manifest)])
        self.data = self._scanner.read(located.manifest)
        self.manifest: Manifest = decode_manifest(self.data, located.url)
        there = {entry.name for entry in located.storage.entries(located.directory)}
        raw = self._scanner.read(SIDECAR) if SIDECAR in there else b''
        self.sidecar = None if SIDECAR in wrong or not raw else decode_sidecar(raw, SIDECAR)
        lists = {name for name in (*there, *wrong) if is_integrity_file(name)}
        self.had_books = bool(lists) or SIDECAR in wrong or self.sidecar is not None
        self.void = lists & wrong
        self.rebuilt = self.void | ({SIDECAR} if self.sidecar is None and self.had_books else set[str]())
        self.ledger: Ledger = {}
        for name in sorted(lists - self.void):
            self.ledger |= decode_ledger(self._scanner.read(name), name)
        self._claims = _claims_of(raw)

    def zarrays(self, leaves: Mapping[str, StoredLeaf], damages: Sequence[Damage]) -> dict[str, bytes]:
        """The ``.zarray`` files that damages want, as far as the manifest says all of them."""
        found: dict[str, bytes] = {}
        for damage in damages:
            data = self._zarray(leaves[damage.leaf].array) if damage.leaf in leaves else None
            if data is not None and damage.file in {data[0], data[0].removesuffix(f'/{_ZARRAY}')}:
                found[data[0]] = data[1]
        return found

    def differing(self, leaves: Mapping[str, StoredLeaf]) -> dict[str, bytes]:
        """The ``.zarray`` files that no list vouches for and that are not as we write them, as we do."""
        made = [_made(leaf.array) for leaf in leaves.values()]
        unlisted = [(name, data) for name, data in filter(None, made) if name not in self.ledger]
        return {name: data for name, data in unlisted if self._read(name) != data}

    def _zarray(self, array: StoredArray) -> tuple[str, bytes] | None:
        made = _made(array)
        if made is None:
            return None
        name, data = made
        if name in self.ledger:
            return made if self.ledger[name] == (len(data), digest(data)) else None
        # One that says something else is no lost file: the array may be another's.
        return None if _is_json(self._read(name)) else made

    def _read(self, name: str) -> bytes:
        try:
            return self._scanner.read(name)
        except (CheckpointNotFoundError, FormatError):
            return b''

    def proven(self, zarrays: Mapping[str, bytes]) -> Ledger | None:
        """The files that the lost list had, if together they give the list whose checksum the sidecar has."""
        recorded = ledger_entries((self.sidecar or Sidecar()).extra.get('digests', {}), SIDECAR)
        if len(self.void) != 1 or not self.void <= recorded.keys():
            return None
        candidates = [file for file in files_of(self._located) if file not in self.ledger and not is_own(file)]
        found = dict(in_threads([file for file in candidates if file not in zarrays], self._scanner.digest))
        for entry in found.values():
            if isinstance(entry, StorageError):
                # A file that cannot be read now says nothing of what is in it.
                raise entry
            if isinstance(entry, T5CkptError):
                return None
        found |= {name: (len(data), digest(data)) for name, data in zarrays.items() if name not in self.ledger}
        data = encode_ledger(found)
        return found if (len(data), digest(data)) == recorded[next(iter(self.void))] else None

    def notes(self, manifest: str, unproven: bool, trusted: bool) -> list[str]:
        """What people have to know.

        Raises:
          CorruptCheckpointError: the damaged sidecar has another checksum of the manifest.
        """
        notes: list[str] = []
        if self.void and unproven:
            notes.append(f'nothing vouches for what {", ".join(sorted(self.void))} listed: it was taken as it is')
        if self.sidecar is not None or not self.had_books:
            return notes
        entry = self._claims.get(manifest)
        if entry is not None and entry != (len(self.data), digest(self.data)) and not trusted:
            raise CorruptCheckpointError(
                f'{SIDECAR} is damaged, and has another checksum of {manifest}: one of the two has changed, and nothing says '
                'which. Restore an older step, or copy the checkpoint again. To take the manifest as it is, right or wrong: '
                'trust_files, --trust-files. Nothing was written.'
            )
        notes.append(_LOST_FACTS)
        if entry is None:
            notes.append('nothing vouches for the values in the manifest: they were taken as they are')
        return notes


def _made(array: StoredArray) -> tuple[str, bytes] | None:
    """An array's ``.zarray`` by name, if the manifest says all of it."""
    metadata = {'dimension_separator': '.', 'order': 'C', **array.metadata}
    plain = array.container == 'dir' and (metadata['dimension_separator'], metadata['order']) == ('.', 'C')
    if not plain or not {'chunks', 'compressor'} <= set(metadata):
        return None
    return f'{array.location}/{_ZARRAY}', zarray_bytes(array)


def _is_json(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), Mapping)
    except (ValueError, RecursionError):
        return False


def _claims_of(raw: bytes) -> Ledger:
    """The checksums in a sidecar that may be damaged, as far as it can be read."""
    try:
        return ledger_entries(json.loads(raw)['digests'], SIDECAR)
    except (CorruptCheckpointError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def is_own(name: str) -> bool:
    return name in {MANIFEST, SIDECAR, PINNED, DATASET_REMOVED} or is_integrity_file(name)


def files_of(located: Located) -> list[str]:
    """Every file of the checkpoint, without what an interrupted write leaves beside."""
    found = [key.removeprefix(f'{located.directory}/') for key, _ in located.storage.walk(located.directory)]
    return [name for name in found if not name.endswith(('.__partial', '.__lock')) and is_inside(name)]


def _is_hopeless(damage: Damage, manifest: str) -> bool:
    return damage.file == manifest or damage.kind in {'contradiction', 'unsafe', 'unreadable'}


def _named(damage: Damage) -> str:
    return damage.leaf or damage.file


def _is_named(damage: Damage, patterns: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, _named(damage)) for pattern in patterns)


def _droppable(lost: Sequence[Damage], names: Collection[str], patterns: Sequence[str]) -> tuple[set[str], set[str]]:
    """The leaves and the iterator files that are lost and may be left out.

    Raises:
      CorruptCheckpointError: others are lost, too, or a pattern is none of the ``names`` of what is damaged.
    """
    unused = [pattern for pattern in patterns if not any(re.fullmatch(pattern, name) for name in names)]
    if unused:
        near = near_names(unused[0], names) or sorted(names)[:3]
        shown = f'damaged are {", ".join(near)}' if near else 'nothing has to be dropped'
        raise CorruptCheckpointError(f'drop={unused} names nothing that is damaged; {shown}. Nothing was written.')
    if left := [damage for damage in lost if not _is_named(damage, patterns)]:
        raise lost_error(left)
    strange = [damage for damage in lost if not damage.leaf and not damage.file.startswith(f'{TRAIN_DS_PREFIX}-')]
    if strange:
        text = f'{_hopeless(strange)}\nThis is no leaf that could be left out. Nothing was written.'
        raise CorruptCheckpointError(text)
    return {damage.leaf for damage in lost if damage.leaf}, {damage.file for damage in lost if not damage.leaf}


def lost_error(damages: Sequence[Damage]) -> CorruptCheckpointError:
    names = sorted({re.escape(_named(damage)) for damage in damages})
    return CorruptCheckpointError(
        f'{_hopeless(damages)}\nThese values are lost. Restore an older step, copy the checkpoint again, or leave them out by '
        f'naming them: drop={names[:3]}. Nothing was written.'
    )


def _hopeless(damages: Sequence[Damage]) -> str:
    return f'not to be repaired:\n{listed(damages)}'.rstrip()


def _refuse(located: Located, damages: Sequence[Damage]) -> None:
    if damages:
        raise CorruptCheckpointError(
            f'{located.url}: {_hopeless(damages)}\nRestore an older step, or copy the checkpoint again. Nothing was written.'
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
    return encode_manifest(nest(kept)), facts

"""What is known of a damaged checkpoint: its manifest, its sidecar and its lists of files, as far as they can be believed.

A list of files that is damaged itself proves nothing. If the files that are there give the very list whose checksum the
sidecar has, all of them are whole, whatever the damaged one said. Where the sidecar is lost, a list that is gone leaves no
trace: then nothing vouches for what no list has, and the manifest has to agree with the ``.zarray`` files that the lists have.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from t5ckpt.catalog.locate import Located
from t5ckpt.core.keys import is_inside
from t5ckpt.core.text import Lines, lines
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, StorageError, T5CkptError
from t5ckpt.format.array_spec import StoredArray, zarray_bytes
from t5ckpt.format.dtypes import dtype_from_typestr
from t5ckpt.format.file_checksums import FileChecksums, entry_of
from t5ckpt.format.manifest import Manifest, decode_manifest
from t5ckpt.format.names import DATASET_REMOVED, MANIFEST, PINNED, SIDECAR, TRAIN_DS_PREFIX, is_file_checksums
from t5ckpt.format.sidecar import Sidecar, decode_sidecar
from t5ckpt.format.stored_leaf import StoredLeaf
from t5ckpt.integrity.report import Damage, VerifyReport, listed
from t5ckpt.reading.file_hasher import Scanner, in_threads

__all__ = ['ZARRAY', 'RecoveryRecords', 'Source', 'below', 'files_of', 'is_own', 'source_of', 'unrecoverable_text']

ZARRAY = '.zarray'
_LOST_FACTS = (
    'the sidecar is lost: metrics and the keep policy are gone, empty containers, too, and what were Python numbers, strings, '
    'typed PRNG keys or dtypes that zarr does not know come back as T5X would see them'
)
_TRUST = (
    'Restore an older step, or copy the checkpoint again. To take all of it as it is, right or wrong: trust_files, '
    '--trust-files. Nothing was written.'
)

Source = tuple[bytes, bytes, float]
"""The manifest's bytes, the sidecar's, and when the manifest was written, where the storage says it."""


def source_of(located: Located) -> Source:
    """Tells a checkpoint from another that is saved in its place.

    Raises:
      CheckpointNotFoundError: there is no manifest.
    """
    scanner = Scanner(located.storage, located.directory)
    there = {entry.name: entry for entry in located.storage.entries(located.directory)}
    written = there[located.manifest].mtime if located.manifest in there else 0.0
    return scanner.read(located.manifest), _read(scanner, SIDECAR), written


class RecoveryRecords:
    """The manifest, the sidecar and the lists of files.

    Attributes:
      source: the checkpoint's own files as they were read.
      manifest: decoded.
      sidecar: None where it is missing or damaged.
      had_books: whether t5ckpt wrote lists of files at all.
      void: lists that are missing or damaged.
      ledger: what the other lists say.
      rebuilt: the sidecar and lists that have to be made again.
    """

    def __init__(self, located: Located, report: VerifyReport):
        """Takes the checkpoint and what a verification of all its bytes found.

        Raises:
          CorruptCheckpointError: something is damaged for which there is no cure.
        """
        self._located = located
        self._scanner = Scanner(located.storage, located.directory)
        wrong = {damage.file for damage in report.damages}
        _refuse(located, [damage for damage in report.damages if _is_hopeless(damage, located.manifest)])
        self.source = source_of(located)
        self.manifest: Manifest = decode_manifest(self.source[0], located.url)
        there = {entry.name for entry in located.storage.entries(located.directory)}
        raw = self.source[1]
        self.sidecar = None if SIDECAR in wrong or not raw else decode_sidecar(raw, SIDECAR)
        lists = {name for name in (*there, *wrong) if is_file_checksums(name)}
        self.had_checksums = bool(lists) or SIDECAR in wrong or self.sidecar is not None
        self.void = lists & wrong
        self.rebuilt = self.void | ({SIDECAR} if self.sidecar is None and self.had_checksums else set[str]())
        self.ledger = FileChecksums()
        self._lists = {name: self._scanner.read(name) for name in sorted(lists - self.void)}
        for name, data in self._lists.items():
            self.ledger = self.ledger.merged(FileChecksums.decode(data, name))
        self._claims = _claims_of(raw)
        self._digests: dict[str, Any] = {}

    @property
    def is_lost(self) -> bool:
        """Whether the sidecar is: then nobody knows which lists there were."""
        return self.had_checksums and self.sidecar is None

    def zarrays(self, leaves: Mapping[str, StoredLeaf], damages: Sequence[Damage]) -> dict[str, bytes]:
        """The ``.zarray`` files that damages want, as far as the manifest says all of them."""
        found: dict[str, bytes] = {}
        for damage in damages:
            data = self._zarray(leaves[damage.leaf].array) if damage.leaf in leaves else None
            if data is not None and damage.file in {data[0], data[0].removesuffix(f'/{ZARRAY}')}:
                found[data[0]] = data[1]
        return found

    def differing(self, leaves: Mapping[str, StoredLeaf]) -> dict[str, bytes]:
        """The ``.zarray`` files that no list vouches for and that are not as we write them, as we do."""
        made = [_made(leaf.array) for leaf in leaves.values()]
        unlisted = [(name, data) for name, data in filter(None, made) if name not in self.ledger]
        return {name: data for name, data in unlisted if _read(self._scanner, name) != data}

    def _zarray(self, array: StoredArray) -> tuple[str, bytes] | None:
        made = _made(array)
        if made is None:
            return None
        name, data = made
        if name in self.ledger:
            return made if self.ledger[name] == entry_of(data) else None
        # One that says something else is no lost file: the array may be another's.
        return None if _is_json(_read(self._scanner, name)) else made

    def proven(self, zarrays: Mapping[str, bytes]) -> FileChecksums | None:
        """The files that the lost list had, if together they give the list whose checksum the sidecar has."""
        recorded = FileChecksums.recorded_by(self.sidecar or Sidecar(), SIDECAR)
        if len(self.void) != 1 or not self.void <= recorded.keys():
            return None
        candidates = [file for file in files_of(self._located) if file not in self.ledger and not is_own(file)]
        waiting = [file for file in candidates if file not in self._digests]
        self._digests |= dict(in_threads(waiting, self._scanner.digest))
        found = {file: self._digests[file] for file in candidates if file not in zarrays}
        for entry in found.values():
            if isinstance(entry, StorageError):
                # A file that cannot be read now says nothing of what is in it.
                raise entry
            if isinstance(entry, T5CkptError):
                return None
        found |= {name: entry_of(data) for name, data in zarrays.items() if name not in self.ledger}
        rebuilt = FileChecksums(found)
        return rebuilt if entry_of(rebuilt.encode()) == recorded[next(iter(self.void))] else None

    def loose(self, leaves: Mapping[str, StoredLeaf], trusted: FileChecksums) -> tuple[list[str], list[str]]:
        """The leaves, and the files of data iterators, that no list vouches for."""
        names = sorted(name for name, leaf in leaves.items() if not trusted.has_array(leaf.array))
        # With a sidecar and all its lists there, an iterator's file that they lack is none of the checkpoint's.
        gone = self.is_lost or self.void
        files = files_of(self._located) if gone or not self.had_checksums else []
        return names, [file for file in files if file.startswith(f'{TRAIN_DS_PREFIX}-') and file not in trusted]

    def check_claims(self, leaves: Iterable[StoredLeaf]) -> None:
        """Holds what is left against what a lost sidecar still says, and the manifest against the lists.

        Raises:
          CorruptCheckpointError: they contradict each other.
        """
        if not self.is_lost:
            return
        for name, data in {self._located.manifest: self.source[0], **self._lists}.items():
            if self._claims.get(name, entry_of(data)) != entry_of(data):
                raise CorruptCheckpointError(
                    f'{SIDECAR} is damaged, and has another checksum of {name}: one of the two has changed, and nothing '
                    f'says which. {_TRUST}'
                )
        arrays = {f'{leaf.array.location}/{ZARRAY}': leaf.array for leaf in leaves}
        for name in sorted(name for name in self.ledger if name.endswith(f'/{ZARRAY}')):
            array = arrays.get(name)
            if array is None or not self._agrees(name, array):
                what = 'has no leaf of it' if array is None else 'says something else of the array'
                raise CorruptCheckpointError(
                    f'{name} is listed, and the manifest, for which nothing vouches, {what}: it has changed. {_TRUST}'
                )

    def _agrees(self, name: str, array: StoredArray) -> bool:
        """Whether a listed ``.zarray`` says of an array what the manifest does."""
        data, made = _read(self._scanner, name), _made(array)
        if entry_of(data) != self.ledger[name]:
            return made is None or entry_of(made[1]) == self.ledger[name]
        return _layout(data)[:2] == (list(array.shape), array.dtype.name) and (
            'chunks' not in array.metadata or _layout(data)[2] == list(array.metadata['chunks'])
        )

    def check_guesses(
        self, zarrays: Mapping[str, bytes], leaves: Mapping[str, StoredLeaf], trusted: Collection[str]
    ) -> None:
        """A ``.zarray`` that no list has is made as T5X and t5ckpt write it; what is left of the others must be so, too.

        Raises:
          CorruptCheckpointError: another program wrote them, with another order of bytes or elements.
        """
        if all(name in trusted for name in zarrays):
            return
        for leaf in leaves.values():
            name = f'{leaf.array.location}/{ZARRAY}'
            data = _read(self._scanner, name)
            if name not in zarrays and data and _layout(data)[3:] != ('C', '.', True):
                raise CorruptCheckpointError(
                    f'{name} is of another program than T5X, and nothing else says how the values of '
                    f'{", ".join(sorted(zarrays)[:3])} lie. Copy the checkpoint again. Nothing was written.'
                )

    def notes(self, unproven: bool, loose: Sequence[str], zarrays: Iterable[str]) -> list[str]:
        """What people have to know."""
        notes: list[str] = []
        guessed = sorted(name for name in zarrays if name not in self.ledger) if unproven else []
        if guessed:
            notes.append(f'{", ".join(guessed[:3])}: made as T5X and t5ckpt write them; nothing vouches for that')
        if self.void and unproven:
            notes.append(f'nothing vouches for what {", ".join(sorted(self.void))} listed: it was taken as it is')
        if self.is_lost:
            notes.append(_LOST_FACTS)
            if self._located.manifest not in self._claims:
                notes.append('nothing vouches for the values in the manifest: they were taken as they are')
        if loose and self.had_checksums:
            more = f' and {len(loose) - 5} more' if len(loose) > 5 else ''
            notes.append(f'nothing vouches for {", ".join(loose[:5])}{more}: taken as they are, right or wrong')
        return notes


def _read(scanner: Scanner, name: str) -> bytes:
    """A file's bytes; nothing where there is no such file, or no regular one."""
    try:
        return scanner.read(name)
    except (CheckpointNotFoundError, FormatError):
        return b''


def _made(array: StoredArray) -> tuple[str, bytes] | None:
    """An array's ``.zarray`` by name, if the manifest says all of it."""
    metadata = {'dimension_separator': '.', 'order': 'C', **array.metadata}
    plain = array.container == 'dir' and (metadata['dimension_separator'], metadata['order']) == ('.', 'C')
    if not plain or not {'chunks', 'compressor'} <= set(metadata):
        return None
    return f'{array.location}/{ZARRAY}', zarray_bytes(array)


def _layout(data: bytes) -> tuple[Any, str, Any, str, str, bool]:
    """Of a ``.zarray``: shape, dtype, chunks, order, separator, and whether its numbers are little-endian."""
    try:
        found: Any = json.loads(data)
        typestr = found['dtype']
        dtype = dtype_from_typestr(typestr)
        name = '' if dtype is None else dtype.name
        order, separator = found.get('order', 'C'), found.get('dimension_separator', '.')
        return found['shape'], name, found['chunks'], order, separator, not typestr.startswith('>')
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None, '', None, '', '', False


def _is_json(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), Mapping)
    except (ValueError, RecursionError):
        return False


def _claims_of(raw: bytes) -> FileChecksums:
    """The checksums in a sidecar that may be damaged, as far as it can be read."""
    try:
        return FileChecksums.from_json(json.loads(raw)['digests'], SIDECAR)
    except (CorruptCheckpointError, ValueError, TypeError, KeyError, RecursionError):
        return FileChecksums()


def is_own(name: str) -> bool:
    """Whether a file is none of the arrays' and iterators', but says what they are."""
    return name in {MANIFEST, SIDECAR, PINNED, DATASET_REMOVED} or is_file_checksums(name)


def files_of(located: Located) -> list[str]:
    """Every file of the checkpoint, without what an interrupted write leaves beside."""
    found = [key.removeprefix(f'{located.directory}/') for key, _ in located.storage.walk(located.directory)]
    return [name for name in found if not name.endswith(('.__partial', '.__lock')) and is_inside(name)]


def below(names: Iterable[str], places: Collection[str]) -> set[str]:
    """The files that are one of the places, or lie in one."""
    return {name for name in names if any(name == each or name.startswith(f'{each}/') for each in places)}


def unrecoverable_text(damages: Sequence[Damage]) -> Lines:
    """The damages for which there is no cure, as they are shown."""
    return lines('not to be repaired:', *([listed(damages)] if damages else []))


def _is_hopeless(damage: Damage, manifest: str) -> bool:
    return damage.file == manifest or damage.kind in {'contradiction', 'unsafe', 'unreadable'}


def _refuse(located: Located, damages: Sequence[Damage]) -> None:
    if damages:
        raise CorruptCheckpointError(
            lines(
                lines(located.url, unrecoverable_text(damages), between=': '),
                'Restore an older step, or copy the checkpoint again. Nothing was written.',
            )
        )

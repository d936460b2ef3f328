"""Verifies that a checkpoint is complete and undamaged.

A checkpoint of t5ckpt has file checksums (``format/file_checksums.py``). A quick verification reads and hashes the manifest and
the file checksums, and compares presence and size of all other files with one listing per directory. A full one reads every byte.

In a checkpoint of another program, every chunk that the metadata implies must exist and, with ``full``, decode.

Damages are reported, not raised. Nothing is written, and neither a device nor JAX is needed. The number of files limits the
number of chunks that are checked.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping
from typing import Any

from t5ckpt.catalog.facts_files import facts_file
from t5ckpt.catalog.locate import Located, locate, with_links
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import leaf_name
from t5ckpt.core.protocols import Progress
from t5ckpt.core.text import counted, some_of
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    StorageError,
    T5CkptError,
    UnsafeSpecError,
    UnsupportedFormatError,
)
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import ChunkGrid, ChunkIndex
from t5ckpt.format.facts import Facts, decode_facts
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, entry_of, size_text
from t5ckpt.format.manifest import split_facts
from t5ckpt.format.names import (
    COPIES,
    DATASET_REMOVED,
    FACTS_FILE,
    MANIFEST,
    PINNED,
    generation_of,
    is_file_checksums,
    is_position,
    parse_step_dir,
    part_of,
    positions_for_t5x,
    removal_marks,
    step_dir,
)
from t5ckpt.format.zarray import implied_metadata
from t5ckpt.integrity.implied_files import ArrayFiles, ImpliedFiles, has_checksums
from t5ckpt.integrity.report import Damage, VerifyReport
from t5ckpt.progress import Meter
from t5ckpt.reading.checkpoint_files import CheckpointFiles, in_threads
from t5ckpt.reading.contents import Contents, RawFiles, decode_contents
from t5ckpt.reading.identity import Identity
from t5ckpt.storage import Entry, PathOrStorage, Storage, means_damage, open_storage, split_path

_OWN = {MANIFEST, COPIES, PINNED}


def verify(
    path: PathOrStorage,
    step: int | None = None,
    *,
    full: bool = False,
    follow_links: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Checks that a checkpoint is complete and undamaged, and reports all damages.

    Args:
      path: a run's directory, a step's directory, or the manifest file; or a Storage with one of the first two as its root.
      step: which step, if ``path`` is a run's directory; None takes the latest.
      full: reads every byte and compares checksums; otherwise presence, sizes, and the manifest's checksum are compared.
      follow_links: symbolic links may lead out of the checkpoint's directory.
      storage_options: see docs/storage.md.
      progress: called with (bytes done, bytes in all) while files are read.

    Returns:
      The report. ``report.ok`` is False for a damaged checkpoint, and ``report.raise_if_damaged()`` raises its damages.

    Raises:
      CheckpointNotFoundError: there is no checkpoint, or it was deleted in the meantime.
      UnsupportedFormatError: t5ckpt does not read this format.
      StorageError: an object store failed or refused a request.

    Notes:
      Any checkpoint that can be restored can be verified, including checkpoints of T5X and Orbax. With ``full``, the disk limits
      the speed. In the local directory of one of several processes, its part of the step is verified.
    """
    located = with_links(_locate_or_broken(path, step, storage_options), follow_links)
    started = time.monotonic()
    check = _Check(located)
    identity = Identity.now(located)
    check.file_checksums()
    check.arrays()
    check.presence()
    if full:
        check.contents(progress)
    if check.damages:
        identity.check('verified')
    return VerifyReport(
        path=located.url,
        step=located.step,
        full=full,
        has_checksums=bool(check.checksums) or check.is_listed,
        damages=tuple(sorted(check.damages, key=lambda damage: (damage.file, damage.chunk or ()))),
        notes=tuple(check.notes),
        part=check.part,
        leaves=len(check.leaves),
        files=len(check.sizes),
        nbytes=sum(check.sizes.values()),
        seconds=time.monotonic() - started,
    )


def _locate_or_broken(
    path: PathOrStorage, step: int | None, storage_options: Mapping[str, Any] | None = None
) -> Located:
    """Locates a checkpoint, or a directory of t5ckpt whose manifest is missing, which other readers do not list."""
    try:
        return locate(path, step, storage_options)
    except CheckpointNotFoundError:
        if step is not None or isinstance(path, Storage):
            outer, name = open_storage(path, storage_options), '' if step is None else step_dir(step)
        else:
            parent, name = split_path(path)
            outer = open_storage(parent, storage_options)
        if not any(
            is_file_checksums(each) or each == FACTS_FILE or generation_of(each) for each in outer.names(name, '')
        ):
            raise
        return Located(outer, name, MANIFEST, parse_step_dir(name))


class _Check:
    """A verification under way.

    Attributes:
      damages: in the order in which they were found.
      notes: so far.
      leaves: name and stored leaf, by the directory of its array.
      checksums: the file checksums of all processes.
      part: the process whose files they are, if they are a part, which lacks the files of the others (``save/parts.py``).
      sizes: of the existing files that were checked.
      is_listed: whether the manifest's checksum is recorded.
    """

    def __init__(self, located: Located):
        self._located = located
        self._files = CheckpointFiles.of(located)
        self._implied = ImpliedFiles(self._files)
        self.damages: list[Damage] = []
        self.notes: list[str] = []
        self.leaves: dict[str, tuple[str, StoredArray]] = {}
        self.checksums = FileChecksums()
        self.part: str | None = None
        self.sizes: dict[str, int] = {}
        self.is_listed = False
        # The files of arrays without file checksums.
        self._unlisted: list[ArrayFiles] = []
        self._raw = RawFiles()
        self._dirs: set[str] = set()

    # --- the manifest and the file checksums --------------------------------------------------------------------------

    def file_checksums(self) -> None:
        """Reads the manifest and the file checksums, and compares them with the checksums in the facts."""
        everything = {entry.name: entry for entry in self._entries('')}
        self._dirs = {name for name, entry in everything.items() if entry.is_dir}
        top = everything.keys() - self._dirs
        facts = self._facts(top)
        recorded = FileChecksums() if facts is None else facts.digests
        lists = set(recorded.lists)
        if COPIES in top and (part := part_of(recorded.lists, top)) is not None:
            self.part = part
            lists = {COPIES, *(lists & top)}
        manifest = self._raw.manifest
        if facts is None and manifest is not None and not self.damages and any(map(is_file_checksums, top)):
            text = (
                'has no facts of t5ckpt, so nothing verifies integrity.*.json; without these it is read as T5X reads it'
            )
            self._add('contradiction', self._located.manifest, text)
        for name in sorted(lists):
            self._read_list(name, recorded)
        self.is_listed = self._located.manifest in recorded
        if manifest is not None:
            self._compare(self._located.manifest, manifest, recorded)

    def _facts(self, top: Collection[str]) -> Facts | None:
        """Reads the manifest and the facts in it or, in the earlier layout, beside it."""
        recorder, step = self._located.manifest, self._located.step
        data = self._read(recorder, FileChecksums()) if recorder else None
        manifest, encoded = (None, None) if data is None else split_facts(data)
        name = facts_file(manifest or b'', top)
        if recorder and encoded is None and name in top:
            recorder, encoded = name, self._read(name, FileChecksums())
        self._raw = RawFiles(manifest, encoded)
        try:
            facts = None if encoded is None else decode_facts(encoded, recorder)
        except CorruptCheckpointError as error:
            self._add('checksum', recorder, str(error))
            return None
        if facts is not None and step is not None and facts.step != step:
            self._add('contradiction', recorder, f'is of step {facts.step!r:.40}, the directory says {step}')
        return facts

    def _read_list(self, name: str, recorded: FileChecksums) -> None:
        data = self._read(name, recorded)
        if data is None:
            return
        try:
            entries = FileChecksums.decode(data, name, generation_of(name))
        except FormatError as error:
            self._failed(name, error)
            return
        self.checksums = FileChecksums({**self.checksums, **entries})

    def _read(self, name: str, recorded: FileChecksums) -> bytes | None:
        """A small file's bytes, compared with the recorded checksum; adds a damage and returns None if it cannot be read."""
        try:
            data = self._files.read(name)
        except T5CkptError as error:
            self._failed(name, error)
            return None
        self.sizes[name] = len(data)
        self._compare(name, data, recorded)
        return data

    def _compare(self, name: str, data: bytes, recorded: FileChecksums) -> None:
        if name in recorded and not recorded.matches(name, entry := entry_of(data)):
            self._differs(name, recorded[name], entry)

    # --- arrays -------------------------------------------------------------------------------------------------------

    def arrays(self) -> None:
        """Finds the stored leaves, and the files of leaves without file checksums."""
        if self._located.manifest and self._raw.manifest is None:
            return
        try:
            contents = self._contents()
            table = contents.leaves()
            if contents.left_out:
                self.notes.append(f'not verified: {some_of(contents.left_out, 8)}')
        except (FormatError, StorageError, CheckpointNotFoundError) as error:
            self._failed(self._located.manifest or '.', error)
            return
        leaves = self.leaves
        for path, leaf in table.items():
            if isinstance(leaf, StoredArray):
                leaves.setdefault(leaf.location, (leaf_name(path), leaf))
        if self.part is not None:
            # The checksums of the other files are on other disks.
            return
        unlisted = {location: item for location, item in leaves.items() if not has_checksums(item[1], self.checksums)}
        for location, files in in_threads(unlisted, lambda location: self._implied.files(*unlisted[location])):
            name, _ = leaves[location]
            if isinstance(files, T5CkptError):
                self._failed(location, files, name)
            else:
                self._unlisted.append(files)

    def _contents(self) -> Contents:
        try:
            return decode_contents(self._located, self._raw, logs_items=False)
        except CorruptCheckpointError:
            if self._raw.facts is None:
                raise
            # The damage of the facts is recorded already, and the manifest alone locates the arrays.
            return decode_contents(self._located, RawFiles(self._raw.manifest, None))

    # --- presence and sizes -------------------------------------------------------------------------------------------

    def presence(self) -> None:
        """Compares presence and size of every file, with one listing per directory."""
        expected = set(self.checksums)
        parents = {name.rpartition('/')[0] for name in expected}
        listed_sizes: dict[str, int] = {}
        for parent, entries in in_threads(parents, self._entries):
            if isinstance(entries, T5CkptError):
                raise entries
            for entry in entries:
                name = join(parent, entry.name)
                if not entry.is_dir:
                    # A listing without sizes; a full verification compares them.
                    recorded = self.checksums.get(name, (0,))[0]
                    listed_sizes[name] = recorded if entry.size is None else entry.size
        removed = {name for name in expected if self._is_removed(name, listed_sizes)}
        for name in sorted(expected - removed):
            size = self.checksums[name][0]
            if name not in listed_sizes:
                self._add('missing', name, f'{size:,} bytes are recorded')
            else:
                self.sizes[name] = listed_sizes[name]
                if listed_sizes[name] != size:
                    self._size_differs(name, listed_sizes[name], size)
        if removed:
            self.notes.append(
                f'{counted(len(removed), "data-iterator file was", "data-iterator files were")} removed on purpose '
                '(keep_dataset_checkpoints)'
            )
        for array in self._unlisted:
            self.sizes |= array.sizes
            self.damages += array.damages
        expected_files = {*expected, *self.sizes, *_OWN, *removal_marks(expected), *positions_for_t5x(expected)}
        used = {name.partition('/')[0] for name in (*self.checksums, *self.leaves)}
        unknown_files = [
            *(name for name in listed_sizes if name not in expected_files),
            *(f'{name}/' for name in self._dirs - used),
        ]
        if unknown_files and self.checksums:
            self.notes.append(
                f'{counted(len(unknown_files), "file belongs", "files belong")} to no leaf: {some_of(sorted(unknown_files), 5)}'
            )

    def _is_removed(self, name: str, sizes: Mapping[str, int]) -> bool:
        return (
            name not in sizes
            and is_position(name)
            and self._located.storage.kind(join(self._located.directory, generation_of(name), DATASET_REMOVED))
            == 'file'
        )

    def _entries(self, directory: str) -> list[Entry]:
        try:
            return self._located.storage.entries(join(self._located.directory, directory))
        except T5CkptError as error:
            self._failed(directory, error)
            return []

    # --- bytes --------------------------------------------------------------------------------------------------------

    def contents(self, progress: Progress | None) -> None:
        """Reads all files that have the recorded size."""
        wrong = {damage.file for damage in self.damages}
        listed = [name for name in self.checksums if name in self.sizes and name not in wrong]
        listed.sort(key=lambda name: -self.sizes[name])
        chunks = [(array, chunk_index) for array in self._unlisted for chunk_index in array.chunks]
        total = sum(self.sizes[name] for name in listed) + sum(array.chunk_bytes for array, _ in chunks)
        meter = Meter(progress, total)
        for name, result in in_threads(listed, self._files.digest):
            if isinstance(result, T5CkptError):
                self._failed(name, result)
            elif not self.checksums.matches(name, result):
                self._differs(name, self.checksums[name], result)
            meter.add(self.sizes[name])
        for (name, own), result in in_threads(
            positions_for_t5x(listed).items(), lambda item: self._files.digest(item[0])
        ):
            if not isinstance(result, T5CkptError) and not self.checksums.matches(own, result):
                self.notes.append(
                    f'T5X reads the position in the data from {name}, which is not that of {own}. Copy it there.'
                )
        for (array, chunk_index), result in in_threads(chunks, lambda item: self._implied.decode(*item)):
            if isinstance(result, T5CkptError):
                self._failed(array.file(chunk_index), result, array.name, chunk_index)
            meter.add(array.chunk_bytes)

    # --- damages ------------------------------------------------------------------------------------------------------

    def _differs(self, name: str, recorded: FileEntry, entry: FileEntry) -> None:
        """Adds a file whose size or checksum is not the recorded one; the message names another file with these bytes."""
        if entry[0] != recorded[0]:
            self._size_differs(name, entry[0], recorded[0])
            return
        text = f'xxh3-64 is {entry[1]}, expected {recorded[1]}'
        other = next((file for file, listed in self.checksums.items() if listed == entry and file != name), None)
        self._add('checksum', name, text if other is None else f'{text}; these are the bytes of {other}')

    def _size_differs(self, name: str, nbytes: int, recorded: int) -> None:
        self._add('size', name, size_text(nbytes, recorded))

    def _failed(self, name: str, error: T5CkptError, leaf: str = '', chunk_index: ChunkIndex | None = None) -> None:
        """Adds a file that cannot be read or decoded.

        Raises:
          UnsupportedFormatError: t5ckpt does not read the file's format.
          StorageError: an object store failed or refused the request, or this process cannot read the file, so its state is
            unknown. After an error of the disk, such as a bad sector, the other files are still verified.
        """
        if isinstance(error, StorageError) and not (self._files.storage.is_file_system and means_damage(error)):
            raise error
        if isinstance(error, UnsupportedFormatError) and all(damage.file != name for damage in self.damages):
            # It says nothing about the bytes, unless they are damaged.
            raise error
        match error:
            case UnsafeSpecError():
                kind = 'unsafe'
            case CheckpointNotFoundError():
                kind = 'missing'
            case StorageError():
                kind = 'unreadable'
            case _:
                kind = 'undecodable'
        self.damages.append(self._located_in_leaf(Damage(kind, name, str(error), leaf, chunk_index)))

    def _add(self, kind: str, name: str, text: str) -> None:
        """Adds a damage; see ``Damage`` for the kinds."""
        self.damages.append(self._located_in_leaf(Damage(kind, name, text)))

    def _located_in_leaf(self, damage: Damage) -> Damage:
        """Adds the leaf, and the chunk and the elements of the file."""
        parts = damage.file.split('/')
        for length in range(len(parts), 0, -1):
            location = '/'.join(parts[:length])
            if location not in self.leaves:
                continue
            name, leaf = self.leaves[location]
            text = damage.text
            if damage.file in implied_metadata(leaf, self.checksums):
                text = f'only t5ckpt opens the array without it, and t5ckpt cp writes it again: {text}'
            chunks = leaf.metadata.get('chunks')
            grid = ChunkGrid(leaf.shape, leaf.shape if chunks is None else tuple(chunks))
            # The manifest does not record the separator of another writer, which is '/'.
            index = grid.index('.'.join(parts[length:])) if damage.chunk is None else damage.chunk
            box = None if chunks is None or index is None else grid.box(index)
            return dataclasses.replace(damage, text=text, leaf=name, chunk=index, box=box)
        return damage

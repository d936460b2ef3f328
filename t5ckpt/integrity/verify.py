"""Verifies that a checkpoint is complete and undamaged.

A checkpoint of t5ckpt has file checksums (``format/file_checksums.py``). A quick verification reads and hashes the manifest and
the file checksums, and compares presence and size of all other files with one listing per directory. A full one reads every byte.

In a checkpoint of another program, every chunk that the metadata implies must exist and, with ``full``, decode.

Damages are reported, not raised. Nothing is written, and neither a device nor JAX is needed. The number of files limits the
number of chunks that are checked.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
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
)
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.facts import Facts, decode_facts
from t5ckpt.format.file_checksums import FileChecksums, entry_of
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
from t5ckpt.integrity.findings import Findings
from t5ckpt.integrity.implied_files import ArrayFiles, ImpliedFiles, has_checksums
from t5ckpt.integrity.report import VerifyReport
from t5ckpt.progress import Meter
from t5ckpt.reading.checkpoint_files import CheckpointFiles, in_threads
from t5ckpt.reading.contents import Contents, RawFiles, decode_contents
from t5ckpt.reading.identity import Identity
from t5ckpt.storage import Entry, Storage, open_storage, split_path

_OWN = {MANIFEST, COPIES, PINNED}


def verify(
    path: str | os.PathLike[str] | Storage,
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
    return verify_located(located, full=full, progress=progress)


def verify_located(located: Located, *, full: bool, progress: Progress | None = None) -> VerifyReport:
    """As :func:`verify`, for a directory that may not be a step yet.

    The part of one process may lack the files of the others, see ``save/parts.py``.
    """
    started = time.monotonic()
    files = CheckpointFiles.of(located)
    findings = Findings(files)
    implied = ImpliedFiles(files)
    check = _Check(located, files, findings, implied)
    identity = Identity.now(located)
    check.file_checksums()
    check.arrays()
    check.presence()
    if full:
        check.contents(progress)
    if findings.damages:
        identity.check('verified')
    return VerifyReport(
        path=located.url,
        step=located.step,
        full=full,
        has_checksums=bool(findings.checksums) or check.is_listed,
        damages=tuple(sorted(findings.damages, key=lambda damage: (damage.file, damage.chunk or ()))),
        notes=tuple(check.notes),
        part=check.part,
        leaves=len(findings.leaves),
        files=len(check.sizes),
        nbytes=sum(check.sizes.values()),
        seconds=time.monotonic() - started,
    )


def _locate_or_broken(
    path: str | os.PathLike[str] | Storage, step: int | None, storage_options: Mapping[str, Any] | None = None
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


@dataclasses.dataclass
class _Check:
    """A verification under way.

    Attributes:
      findings: the damages, the stored leaves and the file checksums so far.
      implied: lists the files of arrays without file checksums.
      part: the process whose files they are, if they are a part.
      notes: so far.
      unlisted: the files of arrays without file checksums.
      sizes: of the existing files that were checked.
      read: files whose bytes have been compared already.
      dirs: the subdirectories.
      is_listed: whether the manifest's checksum is recorded.
      recorder: the file with the facts: the manifest, or in the earlier layout ``t5ckpt.json``.
    """

    located: Located
    files: CheckpointFiles
    findings: Findings
    implied: ImpliedFiles
    part: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list[str])
    unlisted: list[ArrayFiles] = dataclasses.field(default_factory=list[ArrayFiles])
    sizes: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    read: set[str] = dataclasses.field(default_factory=set[str])
    raw: RawFiles = dataclasses.field(default_factory=RawFiles)
    dirs: set[str] = dataclasses.field(default_factory=set[str])
    is_listed: bool = False
    recorder: str = ''

    # --- the manifest and the file checksums --------------------------------------------------------------------------

    def file_checksums(self) -> None:
        """Reads the manifest and the file checksums, and compares them with the checksums in the facts."""
        everything = {entry.name: entry for entry in self._entries('')}
        self.dirs = {name for name, entry in everything.items() if entry.is_dir}
        top = {name: entry for name, entry in everything.items() if not entry.is_dir}
        facts = self._facts(top)
        recorded = FileChecksums() if facts is None else facts.digests
        if facts is not None:
            self._compare_step(facts)
        lists = {name for name in (*recorded, *top) if is_file_checksums(name)}
        if COPIES in top and (part := part_of(recorded.lists, top)) is not None:
            self.part = part
            lists = {COPIES, *(lists & top.keys())}
        manifest = self.raw.manifest
        if facts is None and lists and manifest is not None and not self.findings.damages:
            text = (
                'has no facts of t5ckpt, so nothing verifies integrity.*.json; without these it is read as T5X reads it'
            )
            self.findings.add('contradiction', self.located.manifest, text)
        for name in sorted(lists):
            if facts is None or name in recorded or name == COPIES:
                self._read_list(name, recorded, name in top)
            elif not any(map(generation_of, self.dirs)):
                self.findings.add(
                    'contradiction', name, f'{self.recorder} does not record it: it belongs to another checkpoint'
                )
        self.is_listed = self.located.manifest in recorded
        if manifest is not None:
            self._compare(self.located.manifest, manifest, recorded)

    def _facts(self, top: Mapping[str, Entry]) -> Facts | None:
        """Reads the manifest and the facts in it or, in the earlier layout, beside it."""
        self.recorder = self.located.manifest
        data = self._read(self.recorder, FileChecksums()) if self.recorder else None
        manifest, encoded = (None, None) if data is None else split_facts(data)
        name = facts_file(manifest or b'', top)
        if self.recorder and encoded is None and name in top:
            self.recorder, encoded = name, self._read(name, FileChecksums())
        self.raw = RawFiles(manifest, encoded)
        try:
            return None if encoded is None else decode_facts(encoded, self.recorder)
        except CorruptCheckpointError as error:
            self.findings.add('checksum', self.recorder, str(error))
            return None

    def _compare_step(self, facts: Facts) -> None:
        written = facts.step
        if self.located.step is not None and written != self.located.step:
            self.findings.add(
                'contradiction', self.recorder, f'is of step {written!r:.40}, the directory says {self.located.step}'
            )

    def _read_list(self, name: str, recorded: FileChecksums, is_there: bool) -> None:
        data = self._read(name, recorded) if is_there or name in recorded else None
        if data is None:
            return
        try:
            entries = FileChecksums.decode(data, name, generation_of(name))
        except FormatError as error:
            self.findings.failed(name, error)
            return
        twice = [file for file, entry in entries.items() if not self.findings.checksums.matches(file, entry)]
        if twice:
            self.findings.add(
                'contradiction', name, f'records another checksum of {min(twice)} than the other file checksums'
            )
        self.findings.checksums = FileChecksums({**self.findings.checksums, **entries})

    def _read(self, name: str, recorded: FileChecksums) -> bytes | None:
        """A small file's bytes, compared with the recorded checksum; adds a damage and returns None if it cannot be read."""
        try:
            data = self.files.read(name)
        except T5CkptError as error:
            self.findings.failed(name, error)
            return None
        self.sizes[name] = len(data)
        self.read.add(name)
        self._compare(name, data, recorded)
        return data

    def _compare(self, name: str, data: bytes, recorded: FileChecksums) -> None:
        if name in recorded and not recorded.matches(name, entry := entry_of(data)):
            self.findings.differs(name, recorded[name], entry)

    # --- arrays -------------------------------------------------------------------------------------------------------

    def arrays(self) -> None:
        """Finds the stored leaves, and the files of leaves without file checksums."""
        if self.located.manifest and self.raw.manifest is None:
            return
        try:
            contents = self._contents()
            table = contents.leaves()
            if contents.left_out:
                self.notes.append(
                    f'not verified: {some_of(contents.left_out, 8)}.'
                    + ('' if contents.unread else ' They are items of Orbax. Verify a tree by its path.')
                )
        except (FormatError, StorageError, CheckpointNotFoundError) as error:
            self.findings.failed(self.located.manifest or '.', error)
            return
        leaves = self.findings.leaves
        for path, leaf in table.items():
            if isinstance(leaf, StoredArray):
                leaves.setdefault(leaf.location, (leaf_name(path), leaf))
        if self.part is not None:
            # The checksums of the other files are on other disks.
            return
        unlisted = {
            location: item for location, item in leaves.items() if not has_checksums(item[1], self.findings.checksums)
        }
        for location, files in in_threads(unlisted, lambda location: self.implied.files(*unlisted[location])):
            name, _ = leaves[location]
            if isinstance(files, T5CkptError):
                self.findings.failed(location, files, name)
            else:
                self.unlisted.append(files)

    def _contents(self) -> Contents:
        try:
            return decode_contents(self.located, self.raw, logs_items=False)
        except CorruptCheckpointError:
            if self.raw.facts is None:
                raise
            # The damage of the facts is recorded already, and the manifest alone locates the arrays.
            return decode_contents(self.located, RawFiles(self.raw.manifest, None))

    # --- presence and sizes -------------------------------------------------------------------------------------------

    def presence(self) -> None:
        """Compares presence and size of every file, with one listing per directory."""
        expected = set(self.findings.checksums) - self.read
        parents = {name.rpartition('/')[0] for name in expected}
        listed_sizes: dict[str, int] = {}
        for parent, entries in in_threads(parents, self._entries):
            if isinstance(entries, T5CkptError):
                raise entries
            for entry in entries:
                name = join(parent, entry.name)
                if not entry.is_dir:
                    # A listing without sizes; a full verification compares them.
                    recorded = self.findings.checksums.get(name, (0,))[0]
                    listed_sizes[name] = recorded if entry.size is None else entry.size
        removed = {name for name in expected if self._is_removed(name, listed_sizes)}
        for name in sorted(expected - removed):
            size = self.findings.checksums[name][0]
            if name not in listed_sizes:
                self.findings.add('missing', name, f'{size:,} bytes are recorded')
            else:
                self.sizes[name] = listed_sizes[name]
                if listed_sizes[name] != size:
                    self.findings.size_differs(name, listed_sizes[name], size)
        if removed:
            self.notes.append(
                f'{counted(len(removed), "data-iterator file was", "data-iterator files were")} removed on purpose '
                '(keep_dataset_checkpoints)'
            )
        for array in self.unlisted:
            self.sizes |= array.sizes
            self.findings.damages += array.damages
        expected_files = {*expected, *self.sizes, *_OWN, *removal_marks(expected), *positions_for_t5x(expected)}
        used = {name.partition('/')[0] for name in (*self.findings.checksums, *self.findings.leaves)}
        unknown_files = [
            *(name for name in listed_sizes if name not in expected_files),
            *(f'{name}/' for name in self.dirs - used),
        ]
        if unknown_files and self.findings.checksums:
            self.notes.append(
                f'{counted(len(unknown_files), "file belongs", "files belong")} to no leaf: {some_of(sorted(unknown_files), 5)}'
            )

    def _is_removed(self, name: str, sizes: Mapping[str, int]) -> bool:
        return (
            name not in sizes
            and is_position(name)
            and self.located.storage.kind(join(self.located.directory, generation_of(name), DATASET_REMOVED)) == 'file'
        )

    def _entries(self, directory: str) -> list[Entry]:
        try:
            return self.located.storage.entries(join(self.located.directory, directory))
        except T5CkptError as error:
            self.findings.failed(directory, error)
            return []

    # --- bytes --------------------------------------------------------------------------------------------------------

    def contents(self, progress: Progress | None) -> None:
        """Reads all files that have the recorded size."""
        wrong = {damage.file for damage in self.findings.damages}
        listed = [
            name
            for name in self.findings.checksums
            if name in self.sizes and name not in wrong and name not in self.read
        ]
        listed.sort(key=lambda name: -self.sizes[name])
        chunks = [(array, chunk_index) for array in self.unlisted for chunk_index in array.chunks]
        total = sum(self.sizes[name] for name in listed) + sum(array.chunk_bytes for array, _ in chunks)
        meter = Meter(progress, total)
        for name, result in in_threads(listed, self.files.digest):
            if isinstance(result, T5CkptError):
                self.findings.failed(name, result)
            elif not self.findings.checksums.matches(name, result):
                self.findings.differs(name, self.findings.checksums[name], result)
            meter.add(self.sizes[name])
        for (name, own), result in in_threads(
            positions_for_t5x(listed).items(), lambda item: self.files.digest(item[0])
        ):
            if not isinstance(result, T5CkptError) and not self.findings.checksums.matches(own, result):
                self.notes.append(
                    f'T5X reads the position in the data from {name}, which is not that of {own}. Copy it there.'
                )
        for (array, chunk_index), result in in_threads(chunks, lambda item: self.implied.decode(*item)):
            if isinstance(result, T5CkptError):
                self.findings.failed(array.file(chunk_index), result, array.name, chunk_index)
            meter.add(array.chunk_bytes)

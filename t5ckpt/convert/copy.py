"""Copies a checkpoint to another run, byte for byte, between any two storages.

Files are copied concurrently, and each is compared with its checksum if the checkpoint has checksums. Metadata of arrays that the
manifest implies is written from it, so a lost or damaged ``.zarray`` costs nothing. The manifest is written last, by the same
commit as that of a save, so a copy is visible only when it is complete. In a bucket, the files are below a directory of the copy,
as those of a save, and the manifest names this directory (``format/relocation.py``).

A copy that was cut off leaves its files to garbage collection, and the next one begins again.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping

from t5ckpt.catalog.layouts import has_placeholder, is_orbax
from t5ckpt.catalog.locate import Located, locate, open_target, with_links
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.markers import seconds_for
from t5ckpt.commit.occupancy import check_room
from t5ckpt.commit.removal import directories_of
from t5ckpt.commit.taken_steps import taken_step_exists
from t5ckpt.commit.transaction import Transaction
from t5ckpt.commit.transfer import copy_files
from t5ckpt.convert.options import ConvertReport
from t5ckpt.core.arguments import integer
from t5ckpt.core.keys import join, parents_of
from t5ckpt.core.protocols import Progress
from t5ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.facts import Facts
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, entry_of
from t5ckpt.format.manifest import file_with_facts, version_of
from t5ckpt.format.names import (
    DATASET_REMOVED,
    FACTS_FILE,
    MANIFEST,
    PINNED,
    foreign_keys,
    generation_of,
    is_position,
    positions_for_t5x,
    removal_marks,
    step_dir,
    without_generation,
)
from t5ckpt.format.relocation import relocated
from t5ckpt.format.zarray import implied_metadata
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.contents import decode_contents, read_raw
from t5ckpt.reading.identity import Identity
from t5ckpt.storage import PathOrStorage, Storage

_CURE = 'Copy an older step, or leave out what is damaged: t5ckpt cp --drop.'


def copy_checkpoint(
    source: PathOrStorage,
    target: PathOrStorage,
    step: int | None = None,
    *,
    workers: int = 16,
    overwrite: bool = False,
    dry_run: bool = False,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Copies a checkpoint byte for byte to another run, on any storage; pins and files of other programs are not copied.

    Args:
      source: a run's directory, a step's directory, or a manifest file; or a Storage with one of the first two as its root.
      target: the directory of the run that gets the copy, or a Storage with it as its root.
      step: which step, if ``source`` is a run's directory; None takes the latest.
      workers: the number of files that are copied at once.
      overwrite: replaces a complete checkpoint of the step, after the copy is complete.
      dry_run: copies nothing; the report describes the copy.
      follow_links: symbolic links out of the checkpoint are followed, and their targets are copied.
      progress: called with (bytes done, bytes in all), as far as they are known.

    Raises:
      CheckpointNotFoundError: the checkpoint does not exist.
      CheckpointExistsError: the target has this step already, or another process replaces or deletes it.
      CorruptCheckpointError: a file is missing or differs from its checksum. Nothing became visible.
      UnsafeSpecError: a symbolic link leads out of the checkpoint.
      StorageError: one of the storages failed. Nothing became visible.
    """
    started, workers = time.monotonic(), integer('workers', workers, 1)
    located = with_links(locate(source, step), follow_links)
    if not located.manifest:
        where = target.url() if isinstance(target, Storage) else os.fspath(target)
        of_orbax = is_orbax(located.storage, located.directory)
        what, kind = ('a checkpoint of Orbax', 'orbax') if of_orbax else ('a tree of zarr arrays', 'zarr')
        raise UnsupportedFormatError(
            f'{located.url} is {what}, which has no manifest. Convert it (t5ckpt convert {kind} {located.url} {where}), or copy '
            'its directory with another tool.'
        )
    step, storage = located.step_to_write(), open_target(target)
    check_room(storage, step, overwrite=overwrite)
    now, cure = Identity.now(located), 'Copy to another run, or replace it (overwrite=True, or --force).'
    with taken_step_exists(cure), now.checked_on_failure('copied'):
        plan = _plan(now)
        nbytes = sum(plan.sizes.values()) + len(file_with_facts(plan.manifest, plan.facts))
        if not dry_run:
            nbytes = _carry_out(plan, storage, step, workers, progress, overwrite=overwrite)
    files, seconds = (*plan.sizes, MANIFEST), time.monotonic() - started
    path = storage.url(step_dir(step))
    return ConvertReport(step, path, nbytes, seconds, left_out=plan.left_out, files=files)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The files of a checkpoint that a copy has.

    Attributes:
      source: the checkpoint.
      manifest: its bytes without the facts.
      facts: the bytes of the facts; None if it has none.
      checksums: of its files, as far as they are known.
      implied: files whose bytes follow from the manifest, by name.
      sizes: of all files but the manifest, by name; 0 if unknown.
      left_out: files that are not copied: the pin, and those of other programs.
    """

    source: Identity
    manifest: bytes
    facts: bytes | None
    checksums: FileChecksums
    implied: Mapping[str, bytes]
    sizes: Mapping[str, int]
    left_out: tuple[str, ...]


def _plan(source: Identity) -> _Plan:
    """Lists the files of a checkpoint, and decodes its manifest.

    Raises:
      CorruptCheckpointError: a file is missing, or the manifest differs from its checksum.
      UnsupportedFormatError: a directory is a symbolic link, or Orbax wrote the checkpoint.
      StorageError: the storage failed.
    """
    located = source.located
    # The listing leaves out the files of linked directories.
    for parent, directories, _ in os.walk(located.storage.local_path(located.directory) or ''):
        for path in (os.path.join(parent, name) for name in directories):
            if os.path.islink(path):
                raise UnsupportedFormatError(
                    f'{path} is a symbolic link to a directory, which a copy does not follow. Put the directory there.'
                )
    listed = {key.removeprefix(f'{located.directory}/'): size for key, size in located.storage.walk(located.directory)}
    raw = read_raw(located, checksums=True)
    manifest = raw.manifest or b''
    if has_placeholder(manifest):
        raise UnsupportedFormatError(f'{located.url} is a checkpoint of Orbax. Convert it: t5ckpt convert orbax.')
    contents = decode_contents(located, raw)
    checksums = FileChecksums({**contents.facts.digests, **(contents.checksums or {})})
    implied: dict[str, bytes] = {}
    if raw.facts is None:
        # Also the files of other programs, but not those of other saves, nor T5X's names of positions.
        directories = directories_of(manifest)
        own = {name for name in listed if generation_of(name) in directories and name != FACTS_FILE}
        own -= {PINNED, *positions_for_t5x(own)}
    else:
        for array in contents.leaves().values():
            if isinstance(array, StoredArray):
                implied |= implied_metadata(array, checksums)
        own = {*listed, *implied} & {*checksums, *removal_marks(checksums.keys() - {located.manifest})}
    left_out = ({PINNED} & listed.keys()) | ({*foreign_keys(listed)} - own)
    sizes = {name: checksums.get(name, (listed.get(name),))[0] or 0 for name in sorted(own - {located.manifest})}
    plan = _Plan(source, manifest, raw.facts, checksums, implied, sizes, tuple(sorted(left_out)))
    has_removed = any(without_generation(name) == DATASET_REMOVED for name in own)
    for name in sorted(checksums.keys() - own):
        if not (has_removed and is_position(name)):
            raise CorruptCheckpointError(f'{located.storage.url(join(located.directory, name))} is missing. {_CURE}')
    return plan


def _carry_out(
    plan: _Plan, storage: Storage, step: int, workers: int, progress: Progress | None, *, overwrite: bool
) -> int:
    """Copies all files, and commits; returns their bytes.

    Raises:
      CorruptCheckpointError: a file differs from its checksum. Nothing became visible.
      UnsafeSpecError: a symbolic link leads out of the checkpoint.
      StepTakenError: another process has written, replaced or deleted the step.
      StorageError: one of the storages failed. Nothing became visible.
    """
    done, total = 0, sum(plan.sizes.values())
    lasts, found = seconds_for(total), collect(storage, time.time)
    with Transaction(storage, step, time.time, overwrite=overwrite, seconds=lasts, listed=found) as work:
        files, entries = CheckpointFiles.of(plan.source.located), dict[str, FileEntry]()

        def read_checked(name: str) -> bytes:
            # A damaged file may be larger than the memory.
            data = plan.implied.get(name)
            if data is None:
                data = files.read(name, limit=plan.checksums.get(name, (None,))[0])
            entries[relocated(name, work.generation)] = entry = entry_of(data)
            plan.checksums.check(name, entry, files.url(name), _CURE)
            return data

        with plan.source.reading('copied'):
            directory = join(work.directory, work.generation)
            for size in copy_files(read_checked, plan.sizes, storage, directory, workers):
                done += size
                if progress is not None:
                    progress(done, max(total, done))
        work.positions = [without_generation(name) for name in plan.sizes if is_position(name)]
        manifest, facts = work.relocated(plan.manifest, plan.facts, plan.source.located.url)
        _commit(work, plan.source.located, manifest, facts, entries)
    return done + len(file_with_facts(manifest, facts))


def _commit(
    work: Transaction, located: Located, manifest: bytes, facts: bytes | None, files: Mapping[str, FileEntry]
) -> None:
    """Commits. In a bucket, a copy of a step of T5X gets facts, which name its files and those of its iterators."""
    if facts is not None or not work.generation or version_of(manifest) is None:
        work.commit(manifest, facts, parents_of(files))
        return
    written = located.storage.modified(join(located.directory, located.manifest))
    sizes = [size for name, (size, _) in files.items() if '/' in without_generation(name)]
    created = written and max(0.0, written)
    base = Facts(knows_tree=False, created_unix=created, bytes=sum(sizes), files=len(sizes))
    work.commit_with_checksums(manifest, base, files, parents_of(files))

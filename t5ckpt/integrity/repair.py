"""Carries out the repair of a damaged checkpoint that ``integrity/repair_plan.py`` has planned.

Intact files are hard-linked into a temporary directory, or copied if links do not work. Rebuilt files are written there, arrays
without file checksums are decoded, and the result is committed like a save. A repair that is killed leaves the checkpoint
unchanged; with ``in_place``, the last operation exchanges the directories.

Notes: reads every byte twice, and decodes arrays without checksums. Does not need jax.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence

from t5ckpt.catalog.locate import Located, open_target
from t5ckpt.commit.occupancy import check_room, generations_in
from t5ckpt.commit.step_lease import taken_step_exists
from t5ckpt.commit.strategy import open_transaction
from t5ckpt.commit.transaction import Transaction, TransactionOptions
from t5ckpt.core.argument_kinds import checks_kinds
from t5ckpt.core.keys import join, parents_of
from t5ckpt.core.protocols import Clock, Progress
from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import (
    CorruptCheckpointError,
    T5CkptError,
    UnsupportedFormatError,
)
from t5ckpt.format.chunk_grid import ChunkIndex
from t5ckpt.format.facts import FORMAT
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, counts_of, entry_of
from t5ckpt.format.manifest import takes_facts
from t5ckpt.format.names import (
    PINNED,
    generation_of,
    is_position,
    is_removal_mark,
    step_dir,
    without_generation,
)
from t5ckpt.format.relocation import relocated
from t5ckpt.integrity.implied_files import ArrayFiles, ImpliedFiles
from t5ckpt.integrity.recovery_records import below, files_of, is_own, source_of
from t5ckpt.integrity.repair_plan import RepairOptions, RepairPlan, plan_repair, unrecoverable_error
from t5ckpt.integrity.report import Damage
from t5ckpt.integrity.verify import locate_or_broken, verify_located
from t5ckpt.reading.checkpoint_files import CheckpointFiles, in_threads
from t5ckpt.reading.identity import Identity
from t5ckpt.storage import Storage

__all__ = ['RepairOptions', 'RepairReport', 'repair']


@dataclasses.dataclass(frozen=True)
class RepairReport:
    """The result of a repair or, with ``dry_run``, its description.

    Attributes:
      path: the directory of the repaired checkpoint, as a path or URL; the original's if it needed no repair.
      step: of the checkpoint.
      rebuilt: files that were rebuilt.
      dropped: leaves, and files of data iterators, that were left out.
      notes: facts that were lost, and other observations.
      changed: whether a repaired checkpoint was written, or would be.
      files: the number of its files.
      seconds: the duration.
    """

    path: str
    step: int
    rebuilt: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]
    changed: bool
    files: int
    seconds: float


@checks_kinds
def repair(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    step: int | None = None,
    *,
    in_place: bool = False,
    options: RepairOptions | None = None,
    progress: Progress | None = None,
) -> RepairReport:
    """Writes a repaired copy of a checkpoint into another run, or replaces the damaged checkpoint by it.

    Args:
      path: a run's directory, a step's directory, or a manifest file.
      output: the directory of the run that gets the copy. It may be on another storage.
      step: which step, if ``path`` is a run's directory; None takes the latest.
      in_place: instead of ``output``: replaces the checkpoint in one atomic operation.
      options: which leaves may be left out, see :class:`RepairOptions`.
      progress: called with (bytes done, bytes in all) while the checkpoint is verified.

    Raises:
      CheckpointNotFoundError: there is no checkpoint.
      CorruptCheckpointError: a damage cannot be repaired, and no option accepts the loss. Nothing was written.
      CheckpointExistsError: the output has this step already.
      UnsupportedFormatError: the checkpoint is not in T5X's format.
    """
    options = RepairOptions() if options is None else options
    if not options.dry_run and (output is None) != in_place:
        raise ValueError('pass either output="other/run" or in_place=True.')
    started = time.monotonic()
    located = locate_or_broken(path, step, options.source_options)
    number = _step_of(located)
    report = verify_located(located, full=True, progress=progress)
    plan = plan_repair(located, options, report)
    has_changes = bool(plan.rebuilt or plan.dropped)
    where, files = located.storage.url(located.directory), 0
    if has_changes:
        target = located.storage if output is None else open_target(output, options.target_options)
        where = target.url(step_dir(number))
        if in_place:
            _check_in_place(located, number)
        elif output is not None:
            check_room(target, number)
        if not options.dry_run:
            files = _RepairWriter(located, plan, target, number, options.clock).run(in_place)
    seconds = time.monotonic() - started
    return RepairReport(where, number, plan.rebuilt, plan.dropped, plan.notes, has_changes, files, seconds)


def _step_of(located: Located) -> int:
    if not located.manifest or not located.storage.is_file(join(located.directory, located.manifest)):
        raise UnsupportedFormatError(
            f'{located.url}: there is no manifest, and no other file lists the leaves. {CURE_OF_DAMAGE}'
        )
    return located.step_to_write()


def _check_in_place(located: Located, step: int) -> None:
    storage, where = located.storage, located.storage.url(located.directory)
    local = storage.local_path(located.directory)
    if local is not None and os.path.islink(local):
        raise UnsupportedFormatError(f'{where} is a symbolic link. Repair the directory that it leads to.')
    if located.directory != step_dir(step):
        raise UnsupportedFormatError(
            f'{where} is not named {step_dir(step)}, as a repaired one would be. Rename it, or write the repaired copy to '
            'another run.'
        )


# --- the copy ---------------------------------------------------------------------------------------------------------


class _RepairWriter:
    """Writes one repaired copy."""

    def __init__(self, located: Located, plan: RepairPlan, target: Storage, step: int, clock: Clock):
        self._located = located
        self._plan = plan
        self._target = target
        self._step = step
        self._clock = clock
        self._files = CheckpointFiles.at(located.storage, located.directory)
        # The copied files that do not belong to the step.
        self._foreign: list[str] = []

    def run(self, in_place: bool) -> int:
        """Writes, verifies and commits; returns the number of files."""
        options = TransactionOptions(may_replace=lambda: in_place, collects=True)
        with (
            taken_step_exists('Write to another run.'),
            open_transaction(self._target, self._step, self._clock, options) as work,
        ):
            with Identity.now(self._located).checked_on_failure():
                files = self._fill(work)
                self._check_source()
                self._check(work)
                self._check_source()
                if in_place and not work.generation and self._target.is_file(join(self._located.directory, PINNED)):
                    # The step may have been pinned in the meantime.
                    self._target.write(join(work.directory, PINNED), self._files.read(PINNED))
            self._commit(work, files)
        return len(files) + len(self._foreign) + (2 if self._plan.has_checksums else 1)

    def _check_source(self) -> None:
        """Checks that no process has deleted or replaced the step in the meantime.

        Raises:
          CheckpointNotFoundError: it was deleted.
          CorruptCheckpointError: it was replaced.
        """
        if source_of(self._located) != self._plan.source:
            raise CorruptCheckpointError(f'{self._located.url} has changed since it was verified. Try again.')

    def _fill(self, work: Transaction) -> FileChecksums:
        """Writes all files except the manifest and the facts; returns their checksums."""
        source_files = files_of(self._located)
        # Without the files in a directory that has the name of a rebuilt file.
        gone = below(source_files, {*self._plan.left_out, *self._plan.zarrays})
        names = [name for name in source_files if name not in gone and (is_removal_mark(name) or not is_own(name))]
        names = self._of_the_step(names, in_bucket=bool(work.generation))
        self._foreign = [name for name in names if name in self._plan.foreign]
        for parent in parents_of(relocated(name, work.generation) for name in (*names, *self._plan.zarrays)):
            self._target.make_dir(join(work.directory, parent))
        files: dict[str, FileEntry] = {}
        for name, entry in in_threads(names, lambda name: self._take(work, name)):
            if isinstance(entry, T5CkptError):
                raise entry
            files[name] = entry
        for name, data in self._plan.zarrays.items():
            self._target.write(join(work.directory, relocated(name, work.generation)), data)
            files[name] = entry_of(data)
        own_files = {
            relocated(name, work.generation): entry
            for name, entry in files.items()
            if not is_own(name) and name not in self._plan.foreign
        }
        work.positions = [without_generation(name) for name in own_files if is_position(name)]
        return FileChecksums(own_files)

    def _of_the_step(self, names: Sequence[str], *, in_bucket: bool) -> list[str]:
        """Without files of other saves, and without those that would get the name of a file from the directory of the save.

        Foreign files stay where they are in a bucket, as in a copy.
        """
        plan = self._plan
        own_dirs = {'', plan.facts.positions_in, *generations_in(plan.manifest), *map(generation_of, plan.checksums)}
        left_out = {name for name in plan.foreign if in_bucket or generation_of(name)}
        kept = [name for name in names if generation_of(name) in own_dirs and name not in left_out]
        # T5X's copies of positions, and files of a checkpoint that was replaced.
        taken = {_top(without_generation(name)) for name in (*kept, *plan.zarrays) if generation_of(name)}
        return [name for name in kept if _top(name) not in taken]

    def _take(self, work: Transaction, name: str) -> FileEntry:
        source, target = (
            join(self._located.directory, name),
            join(work.directory, relocated(name, work.generation)),
        )
        if self._target.link_from(self._located.storage, source, target):
            entry = self._files.digest(name)
        else:
            data = self._files.read(name)
            self._target.write(target, data)
            entry = entry_of(data)
        if not self._plan.checksums.matches(name, entry):
            raise CorruptCheckpointError(
                f'{self._located.storage.url(source)} has changed since it was verified. Try again.'
            )
        return entry

    def _commit(self, work: Transaction, files: FileChecksums) -> None:
        plan = self._plan
        directories = parents_of((*files, *(relocated(name, work.generation) for name in self._foreign)))
        manifest, _ = work.relocated(plan.manifest, None, self._located.url)
        if not (plan.has_checksums or (work.generation and takes_facts(manifest))):
            work.commit(manifest, None, directories)
            return
        facts = (
            plan.facts if plan.facts.format else dataclasses.replace(plan.facts, format=FORMAT, completeness='unknown')
        )
        facts = dataclasses.replace(
            facts,
            tree=facts.tree.below(work.generation),
            created_unix=self._manifest_time() if facts.created_unix is None else facts.created_unix,
            repaired={
                'unix': round(self._clock(), 3),
                'rebuilt': list(plan.rebuilt),
                'dropped': list(plan.dropped),
            },
        )
        work.commit_with_checksums(manifest, facts, counts_of(files), files, directories)

    def _manifest_time(self) -> float:
        """The modification time of the manifest, or now on a storage without such times."""
        written = self._located.storage.modified(join(self._located.directory, self._located.manifest))
        return round(written or self._clock(), 3)

    def _check(self, work: Transaction) -> None:
        """Decodes the arrays of the copy that have no file checksums.

        Raises:
          CorruptCheckpointError: an array is damaged.
        """
        implied = ImpliedFiles(work.storage, work.directory)
        damages: list[Damage] = []
        chunks: list[tuple[ArrayFiles, ChunkIndex]] = []
        for name, leaf in self._plan.leaves.items():
            if not self._plan.checksums.has_array(leaf.array):
                array = dataclasses.replace(leaf.array, location=relocated(leaf.array.location, work.generation))
                files = implied.files(name, dataclasses.replace(leaf, array=array))
                damages += files.damages
                chunks += [(files, chunk_index) for chunk_index in files.chunks]
        for (array, chunk_index), error in in_threads(chunks, lambda item: implied.decode(*item)):
            if isinstance(error, T5CkptError):
                damages.append(Damage('undecodable', array.file(chunk_index), str(error), array.name, chunk_index))
        if damages:
            raise unrecoverable_error(damages)


def _top(name: str) -> str:
    """The first component of a name."""
    return name.partition('/')[0]

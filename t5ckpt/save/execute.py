"""Writes and commits a prepared save: of one process, of several into one directory, of several each to a storage of its own.

All processes vote at the end of each phase. ``PLAN``: all have the same plan, and process 0 decides whether the step is saved,
with which codecs, and where. ``WRITE``: each has written its files; process 0 makes the facts and commits. ``COMMIT``, only in a
save in parts (``save/parts.py``): each has committed its own directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.commit.deletion import rename_damaged
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.markers import Marker, seconds_for
from t5ckpt.commit.occupancy import occupant_of
from t5ckpt.commit.taken_steps import StepTakenError
from t5ckpt.commit.transaction import CommittedCheckpoint, Transaction, write_checksums
from t5ckpt.core.gc_pause import paused
from t5ckpt.core.keys import join, parents_of
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.loaded import WRITE_EVENT, record_duration
from t5ckpt.distributed.rounds import Phase
from t5ckpt.errors import CheckpointExistsError, SaveFailedError, StepMismatchWarning, T5CkptError
from t5ckpt.format.array_spec import StoredArray, spec_of
from t5ckpt.format.checksum import digest
from t5ckpt.format.facts import Facts, decode_facts, encode_facts
from t5ckpt.format.file_checksums import entry_of
from t5ckpt.format.manifest import encode_manifest
from t5ckpt.format.names import MANIFEST, file_checksums_name, is_position, step_dir
from t5ckpt.planning.save_plan import difference
from t5ckpt.save.chunk_reuse import WrittenArrays
from t5ckpt.save.parts import commit_part, send_positions, share_facts, write_copies, write_files
from t5ckpt.save.request import SaveRequest
from t5ckpt.save.stage import Staging
from t5ckpt.save.write import write_arrays
from t5ckpt.tree.leaf_table import LeafTable, unflatten
from t5ckpt.tree.train_state import OWN_STEPS

_log = logging.getLogger('t5ckpt')


class PreparedSave:
    """A planned save in one process, whose first wave is staged. It keeps no original of a staged array alive."""

    def __init__(
        self,
        request: SaveRequest,
        facts: Facts,
        staging: Staging,
        text: str = '',
        samples: Mapping[str, Any] | None = None,
        files_of_others: Collection[str] = (),
    ):
        """Makes the save, which :meth:`run` runs once.

        Args:
          request: of the save.
          facts: of the save, but for those of what is written.
          staging: the leaves, in waves.
          text: the plan as text, which the processes compare.
          samples: beginnings of arrays, from which process 0 chooses the codecs of all processes.
          files_of_others: in a save ``in_parts``, the files that this process writes and that are assigned to other processes.
        """
        self.request, self.staging = request, staging
        self._facts, self._text, self._samples, self._files_of_others = facts, text, samples, files_of_others
        self._context, self._round = request.context, request.round
        # Process 0 commits the directory of a job, and each process its own in a save in parts.
        self._commits = self._round.is_leader or request.in_parts
        # Without a commit, removes what was written.
        self._stack = contextlib.ExitStack()
        self._work: Transaction | None = None
        self._previous: WrittenArrays | None = None
        self._generation = ''
        self._positions: list[str] = []

    def run(self, check_not_interrupted: Callable[[], None]) -> CommittedCheckpoint | None:
        """Writes and commits.

        Args:
          check_not_interrupted: called once, after all values have been read from the caller's arrays; raises if the caller may
            have changed them before.

        Returns:
          The checkpoint; None if the step exists already.
        """
        try:
            with self._stack:
                done = self._save_step(check_not_interrupted)
        except BaseException:
            if not self._round.is_single_process:
                # The next save must not fail for the same reason.
                self._context.previous = None
            raise
        return None if done is None else self._after_commit(*done)

    def _save_step(self, check_not_interrupted: Callable[[], None]) -> tuple[dict[str, Any], WrittenArrays] | None:
        """Saves; returns what process 0 has decided, and what this process has written; None if the step exists already."""
        request, save_round = self.request, self._round
        with save_round.failing_together(Phase.PLAN):
            kept = request.find_kept() if self._commits else None
            if self._commits and kept is None:
                self._previous = self._context.find_previous(searches=save_round.is_single_process)
            is_kept = kept is not None or not self._commits
            vote = {'plan': digest(self._text.encode()), 'is_kept': is_kept, 'has_positions': bool(request.files)}
        started = save_round.reduce_on_leader(Phase.PLAN, vote, self._begin)
        self._check_agreement(started.get('different', ()))
        if started.get('skip'):
            if kept is not None:
                request.log_skipped(kept)
            return None
        self._stack.enter_context(self._marking_files_of_failure(started))
        with save_round.failing_together(Phase.WRITE):
            vote, written = self._write(started)
            arrays = {
                path: dataclasses.replace(array, location=join(self._generation, array.location))
                for path, array in written.arrays.items()
            }
            manifest = self._manifest(arrays) if self._commits else b''
            check_not_interrupted()
        directories = [array.location for array in arrays.values()]
        vote['manifest'] = digest(manifest)
        done = save_round.reduce_on_leader(
            Phase.WRITE, vote, lambda votes: self._seal(votes, arrays, manifest, directories)
        )
        if request.in_parts and self._work is not None:
            directories += parents_of(self._positions)
            facts = commit_part(request, self._work, done, manifest, directories)
            self._note_saved(decode_facts(facts, self._context.storage.url(step_dir(request.step))))
        return None if done.get('skip') else (done, written)

    def _begin(self, votes: Sequence[Any]) -> dict[str, Any]:
        """In process 0: decides whether to save, and where. Nothing is written before all plans agree."""
        different = [index for index, vote in enumerate(votes) if vote['plan'] != votes[0]['plan']]
        if different:
            return {'different': different}
        if all(vote['is_kept'] for vote in votes):
            return {'skip': True}
        previous, storage = self._previous, self._context.storage
        codecs = self._context.codec_selection.choose_from_samples(
            self._samples or {}, lambda location: None if previous is None else previous.codec(storage, location)
        )
        having = [index for index, vote in enumerate(votes) if vote['has_positions']]
        started = {'codecs': codecs, 'having': having, 'reuse': previous is not None}
        try:
            return started if self.request.in_parts else started | self._open()
        except StepTakenError as error:
            return self._drop(error)

    def _open(self) -> dict[str, Any]:
        """Makes the directory, where the other processes write, too, unless they have their own."""
        request, context = self.request, self._context
        storage, in_parts = context.storage, request.in_parts
        listed = collect(storage, context.clock)
        if context.retention is not None:
            context.retention.listed = listed
        is_put_aside = not request.overwrite and (in_parts or request.is_for_others())
        if is_put_aside and occupant_of(storage, request.step) is not None:
            # Also of a save that did not end, or of before a restore of an older step.
            aside = rename_damaged(storage, request.step, context.clock)
            text = (
                't5ckpt: local step %d, which not all processes of the job have, was renamed to %s: it is saved again'
            )
            _log.warning(text, request.step, storage.url(aside))
        seconds = seconds_for(self.staging.total_bytes)
        work = Transaction(
            storage,
            request.step,
            context.clock,
            overwrite=request.overwrite,
            seconds=seconds,
            listed=listed,
            is_shared=not (self._round.is_single_process or in_parts),
        )
        self._work = self._stack.enter_context(work)
        return {'directory': work.directory, 'generation': work.generation, 'seconds': seconds}

    def _write(self, started: dict[str, Any]) -> tuple[dict[str, Any], WrittenArrays]:
        """Writes the files of this process; returns its vote on them, and the report."""
        request, storage, of_others = self.request, self._context.storage, self._files_of_others
        if request.in_parts:
            # Before the disk may fail: another process waits for it.
            send_positions(request)
            started |= self._open()
        if not self._round.is_single_process:
            self._context.codec_selection.agreed = started['codecs']
        if not self._commits:
            self._context.previous = self._previous = self._context.previous if started['reuse'] else None
        self._generation = generation = started['generation']
        directory = join(started['directory'], generation)
        written = write_arrays(self._context, directory, self.staging, self._previous)
        files = write_files(storage, directory, request.files)
        own = {name: entry for name, entry in written.checksums.items() if name not in of_others}
        self._positions = list(files)
        if request.in_parts:
            copies = {name: written.checksums[name] for name in of_others}
            self._positions += write_copies(request, directory, copies, started['having'])
        listed = {join(generation, name): entry for name, entry in (own | files).items()}
        entry = write_checksums(storage, directory, self._round.processes.index, listed)
        vote = {
            'checksums': list(entry),
            'bytes': sum(size for size, _ in own.values()),
            'files': len(own),
            'others': list(files),
        }
        return vote, written

    def _seal(
        self, votes: Sequence[Any], arrays: Mapping[Path, StoredArray], manifest: bytes, directories: Sequence[str]
    ) -> dict[str, Any]:
        """In process 0, when all files are durable: makes the facts, and commits unless each process does."""
        request, work = self.request, self._work
        if work is None:
            raise SaveFailedError(f'the save of step {request.step} has no directory; nothing is committed.')
        files = {MANIFEST: entry_of(manifest)}
        files |= {file_checksums_name(index): tuple(vote['checksums']) for index, vote in enumerate(votes)}
        nbytes, count = (sum(vote[key] for vote in votes) for key in ('bytes', 'files'))
        expected = sum(1 + array.grid.num_chunks for array in arrays.values())
        if count != expected:
            raise SaveFailedError(
                f'all processes together wrote {count} files, but the arrays have {expected}; nothing is committed.'
            )
        facts = work.facts(dataclasses.replace(self._facts, bytes=nbytes, files=count), files)
        nbytes += sum(size for size, _ in files.values())
        encoded = encode_facts(facts)
        done: dict[str, Any] = {'bytes': nbytes, 'reason': request.upload_reason(), 'facts_checksum': digest(encoded)}
        if request.in_parts:
            return done | share_facts(request, votes, encoded, manifest)
        others = [name for vote in votes for name in vote['others']]
        work.positions = [name for name in others if is_position(name)]
        try:
            with request.around_commit(done['reason']):
                work.commit(manifest, encoded, [*directories, *parents_of(others)])
        except StepTakenError as error:
            return self._drop(error)
        self._note_saved(facts)
        return done

    def _note_saved(self, facts: Facts) -> None:
        if self._context.retention is not None:
            self._context.retention.note_saved(self.request.step, facts)

    def _drop(self, error: StepTakenError) -> dict[str, Any]:
        """Another writer has the step: a save is dropped, and a conversion fails."""
        if self._context.retention is None:
            cure = 'Write to another directory, or replace it (overwrite=True, or --force).'
            raise CheckpointExistsError(f'{error}. {cure}') from error
        _log.warning('t5ckpt: this save of step %d is dropped: %s', self.request.step, error)
        return {'skip': True}

    @contextlib.contextmanager
    def _marking_files_of_failure(self, started: Mapping[str, Any]) -> Generator[None]:
        """After an error, writes a marker of the files of this process, in a bucket that process 0 has a marker for.

        If it was stopped for hours, the files that the marker of process 0 names were collected before it wrote its last one.
        """
        step, storage, clock = self.request.step, self._context.storage, self._context.clock
        try:
            yield
        except BaseException:
            try:
                if not self._commits and started['generation']:
                    Marker(storage, step, clock, directories=[started['generation']], seconds=started['seconds'])
            except T5CkptError as error:
                where = storage.url(step_dir(step))
                _log.warning('t5ckpt: files of a failed save may stay in %s: %s', where, error)
            raise

    def _after_commit(self, done: Mapping[str, Any], written: WrittenArrays) -> CommittedCheckpoint:
        """After the commit: logs it and runs retention, once for each storage, and keeps the checkpoint for the next save."""
        request, context, step = self.request, self._context, self.request.step
        storage, retention = context.storage, context.retention
        seconds = time.monotonic() - request.started
        committed = CommittedCheckpoint(step, storage.url(step_dir(step)), done['bytes'], seconds)
        if retention is None:
            return committed
        record_duration(WRITE_EVENT, seconds)
        if self._commits:
            how = 'linked' if storage.links else 'copied in the store'
            linked = f', {written.linked_bytes} bytes of arrays {how}' if written.linked_bytes else ''
            text = 'Saved checkpoint for step %d to %s: %d bytes in %.2f s%s'
            _log.info(text, step, committed.path, committed.nbytes, seconds, linked)
            try:
                retention.carry_out(step)
            except T5CkptError as error:
                text = 't5ckpt: retention after the save of step %d failed; the save is complete: %s'
                _log.warning(text, step, error)
            except Exception:  # noqa: BLE001 - logged with its traceback
                # A policy is the user's code. The checkpoint is committed, so the save itself has succeeded.
                _log.exception('t5ckpt: retention after the save of step %d failed; the save is complete', step)
        # Unless it may have linked a damaged chunk: then ``discard_previous`` was called.
        if context.reuses and context.previous is self._previous:
            written.note_committed(storage, join(step_dir(step), self._generation), done['facts_checksum'])
            context.previous = written
        return committed

    def _manifest(self, arrays: Mapping[Path, StoredArray]) -> bytes:
        """The manifest: the staged inline leaves, and specs of the arrays."""
        table = self.staging.inline_leaves()
        table |= {path: spec_of(array, self._context.storage.driver) for path, array in arrays.items()}
        self._warn_of_other_step(table)
        with paused():
            return encode_manifest(unflatten(table))

    def _warn_of_other_step(self, table: LeafTable) -> None:
        """Warns if the step in the state differs from the step that it is saved as; a restored run continues from the former.

        Checked here because the step has been transferred; in the caller's thread the check would wait for the device.
        """
        request = self.request
        if not request.round.is_leader or not request.names_step:
            return
        value = np.asarray(next((table[path] for path in OWN_STEPS if path in table), None))
        if value.shape == () and value.dtype.kind in 'iu' and int(value) != request.step:
            text = (
                f'the state is saved as step {request.step}, but holds step {value}, from which a restored run continues. '
                f'Save it with save(state), or set the step in it to {request.step}.'
            )
            request.context.notices.warn('step', StepMismatchWarning(text), request.site)

    def _check_agreement(self, different: Sequence[int]) -> None:
        """Raises an error with the difference between the plans of process 0 and the first other, the same everywhere."""
        if not different:
            return
        pair = 0, different[0]
        if self._round.processes.index in pair:
            self._round.share('plan', self._text.encode())
        first, other = (self._round.receive('plan', process).decode() for process in pair)
        raise difference(first, other, different[0])

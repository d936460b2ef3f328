"""Writes and commits a prepared save."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.markers import Marker, seconds_for
from t5ckpt.commit.taken_steps import StepTakenError
from t5ckpt.commit.transaction import CommittedCheckpoint, Transaction, write_checksums
from t5ckpt.core.keys import join, parents_of
from t5ckpt.core.telemetry import WRITE_EVENT, record_duration
from t5ckpt.distributed.rounds import Phase
from t5ckpt.errors import DisagreementError, SaveFailedError, T5CkptError
from t5ckpt.format.checksum import digest
from t5ckpt.format.facts import encode_facts
from t5ckpt.format.file_checksums import FileEntry, entry_of
from t5ckpt.format.names import step_dir
from t5ckpt.planning.save_plan import difference
from t5ckpt.save.chunk_reuse import PreviousCheckpoint
from t5ckpt.save.manifest_and_facts import facts_of_save, manifest_bytes
from t5ckpt.save.prepare import PreparedSave
from t5ckpt.save.request import SaveRequest
from t5ckpt.save.write import WriteReport, write_arrays

_log = logging.getLogger('t5ckpt')


def run_save(prepared: PreparedSave, check_not_interrupted: Callable[[], None]) -> CommittedCheckpoint | None:
    """Writes and commits.

    Args:
      prepared: from :func:`prepare_save`.
      check_not_interrupted: called once, after all values have been read from the caller's arrays; raises if the caller may have
        changed them before.

    Returns:
      The checkpoint; None if the step exists already.
    """
    request, context = prepared.request, prepared.request.context
    try:
        with contextlib.ExitStack() as stack:
            leader = _Leader(prepared, stack)
            vote = {'plan': digest(prepared.text.encode())}
            started = request.round.reduce_on_leader(Phase.PLAN, vote, leader.begin)
            check_agreement(prepared, started.get('different', ()))
            if started.get('skip'):
                return None
            if not request.round.is_leader:
                stack.enter_context(_marking_files_of_failure(request, started))
            with request.round.failing_together(Phase.WRITE):
                written, report, entry = _write(prepared, started)
                manifest = manifest_bytes(prepared, report) if request.round.is_leader else b''
                check_not_interrupted()
            vote = {
                'checksums': list(entry),
                'bytes': report.file_bytes,
                'files': len(report.checksums),
                'positions': sorted(prepared.dataset),
            }
            done = request.round.reduce_on_leader(
                Phase.WRITE, vote, lambda votes: leader.commit(votes, report, manifest)
            )
    except BaseException:
        if context.reuse is not None and not request.round.is_single_process:
            # The next save must not fail for the same reason.
            context.reuse.previous = None
        raise
    if done.get('skip'):
        return None
    arrays = join(step_dir(request.step), started['generation'])
    return after_commit(prepared, written, arrays, done['facts_checksum'], done['bytes'])


class _Leader:
    """The work of process 0 for all processes: it makes the directory and commits it. Without a commit, ``stack`` rolls back."""

    def __init__(self, prepared: PreparedSave, stack: contextlib.ExitStack):
        self._prepared = prepared
        self._stack = stack
        self._work: Transaction | None = None

    def begin(self, votes: Sequence[Any]) -> dict[str, Any]:
        """Decides whether to save, and where. Nothing is written before all plans agree."""
        prepared, request, context = self._prepared, self._prepared.request, self._prepared.request.context
        different = [index for index, vote in enumerate(votes) if vote != votes[0]]
        if different:
            return {'different': different}
        is_single = request.round.is_single_process
        if not is_single and not request.decide_to_save():
            return {'skip': True}
        reuse = prepared.previous is not None and (is_single or prepared.previous.is_there(context.storage))
        codecs = agreed_codecs(prepared, prepared.previous if reuse else None)
        try:
            context.retention.listed = listed = collect(context.storage, context.clock)
            seconds = seconds_for(prepared.staging.total_bytes)
            work = Transaction(
                context.storage,
                request.step,
                context.clock,
                overwrite=request.call.overwrite,
                seconds=seconds,
                listed=listed,
                is_shared=not is_single,
            )
        except StepTakenError as error:
            return _skip_taken_step(request.step, error)
        self._work = self._stack.enter_context(work)
        location = {'directory': work.directory, 'generation': work.generation, 'seconds': seconds}
        return {**location, 'reuse': reuse, 'codecs': codecs}

    def commit(self, votes: Sequence[Any], report: WriteReport, manifest: bytes) -> dict[str, Any]:
        """Commits, after all processes have written their chunks."""
        request, work = self._prepared.request, self._work
        if work is None:
            raise SaveFailedError(f'the save of step {request.step} has no directory; nothing is committed.')
        work.positions = [name for vote in votes for name in vote['positions']]
        facts, nbytes = facts_of_save(self._prepared, work, votes, report, entry_of(manifest))
        encoded = encode_facts(facts)
        directories = [array.location for array in report.arrays.values()] + parents_of(work.positions)
        try:
            with request.around_commit(request.upload_reason()):
                work.commit(manifest, encoded, directories)
        except StepTakenError as error:
            return _skip_taken_step(request.step, error)
        request.context.retention.note_saved(request.step, facts)
        return {'bytes': nbytes, 'facts_checksum': digest(encoded)}


def agreed_codecs(prepared: PreparedSave, previous: PreviousCheckpoint | None) -> dict[str, Any]:
    """In process 0, the codecs by array directory that all processes use."""
    context = prepared.request.context

    def last_codec(location: str) -> Any:
        return None if previous is None else previous.codec(context.storage, location)

    return context.codec_selection.choose_from_samples(prepared.samples, last_codec)


def _previous_of(
    prepared: PreparedSave, directory: str, written: WriteReport, facts_checksum: str
) -> PreviousCheckpoint:
    """The committed checkpoint as the source of unchanged chunks for the next save; ``directory`` has its arrays."""
    storage, versions = prepared.request.context.storage, written.file_versions
    if storage.links:
        versions = {key: storage.stamp(join(directory, key), version) for key, version in versions.items()}
    codecs = {array.location: array.metadata['compressor'] for array in written.arrays.values()}
    return PreviousCheckpoint(directory, dict(written.checksums), facts_checksum, versions, written.values, codecs)


def check_agreement(prepared: PreparedSave, different: Sequence[int]) -> None:
    """Raises an error with the difference between the plan of process 0 and the first other plan; the same on all processes."""
    if not different:
        return
    save_round, process = prepared.request.round, different[0]
    if save_round.is_leader:
        save_round.put_for_peer('plan', prepared.text.encode())
    if save_round.processes.index != process:
        raise DisagreementError(save_round.get_from_peer('difference', process).decode())
    error = difference(save_round.get_from_peer('plan', 0).decode(), prepared.text, process)
    save_round.put_for_peer('difference', str(error).encode())
    raise error


def _write(prepared: PreparedSave, started: Mapping[str, Any]) -> tuple[WriteReport, WriteReport, FileEntry]:
    """Writes the chunks of this process.

    Returns:
      The report, relative to the directory of the arrays and to that of the step, and the size and checksum of the file with the
      chunks' checksums.
    """
    request, context, generation = prepared.request, prepared.request.context, started['generation']
    directory = join(started['directory'], generation)
    if not request.round.is_single_process:
        context.codec_selection.agree(started['codecs'])
    previous = prepared.previous if started['reuse'] else None
    written = write_arrays(
        context.storage, directory, prepared.staging, previous, context.progress, context.codec_selection
    )
    report = written.below(generation)
    positions = write_positions(prepared, directory, prepared.dataset)
    files = report.checksums | {join(generation, name): entry for name, entry in positions.items()}
    return written, report, write_checksums(context.storage, directory, request.round.processes.index, files)


def write_positions(prepared: PreparedSave, directory: str, positions: Mapping[str, bytes]) -> dict[str, FileEntry]:
    """Writes positions of data iterators into a directory."""
    storage = prepared.request.context.storage
    for name, data in positions.items():
        key = join(directory, name)
        if '/' in name:
            storage.make_dir(key.rpartition('/')[0])
        storage.write(key, data)
    return {name: entry_of(data) for name, data in positions.items()}


@contextlib.contextmanager
def _marking_files_of_failure(request: SaveRequest, started: Mapping[str, Any]) -> Generator[None]:
    """After an error, writes a marker of the files of this process, on an object store.

    If it was stopped for hours, the files that the marker of process 0 names were collected before it wrote its last one.
    """
    context, generation = request.context, started['generation']
    try:
        yield
    except BaseException:
        try:
            if generation:
                Marker(
                    context.storage, request.step, context.clock, directories=[generation], seconds=started['seconds']
                )
        except T5CkptError as error:
            where = context.storage.url(step_dir(request.step))
            _log.warning('t5ckpt: files of a failed save may stay in %s: %s', where, error)
        raise


def _skip_taken_step(step: int, error: StepTakenError) -> dict[str, Any]:
    _log.warning('t5ckpt: this save of step %d is dropped: %s', step, error)
    return {'skip': True}


def after_commit(
    prepared: PreparedSave,
    written: WriteReport,
    directory: str,
    facts_checksum: str,
    nbytes: int,
) -> CommittedCheckpoint:
    """After the commit: logs it and runs retention, once for each storage, and keeps the checkpoint for the next save.

    ``written`` is relative to ``directory``, that of the arrays.
    """
    request, context, step = prepared.request, prepared.request.context, prepared.request.step
    storage = context.storage
    done = CommittedCheckpoint(step, storage.url(step_dir(step)), nbytes, time.monotonic() - request.started)
    record_duration(WRITE_EVENT, done.seconds)
    if request.round.is_leader or request.in_parts:
        how = 'linked' if storage.links else 'copied in the store'
        linked = f', {written.linked_bytes} bytes of arrays {how}' if written.linked_bytes else ''
        _log.info(
            'Saved checkpoint for step %d to %s: %d bytes in %.2f s%s', step, done.path, nbytes, done.seconds, linked
        )
        try:
            context.retention.carry_out(step)
        except T5CkptError as error:
            _log.warning('t5ckpt: retention after the save of step %d failed; the save is complete: %s', step, error)
        except Exception:  # noqa: BLE001 - logged with its traceback
            # A policy is the user's code. The checkpoint is committed, so the save itself has succeeded.
            _log.exception('t5ckpt: retention after the save of step %d failed; the save is complete', step)
    if context.reuse is not None:
        context.reuse.take(_previous_of(prepared, directory, written, facts_checksum))
    return done

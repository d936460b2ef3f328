"""Writes and commits a save of several processes to storages of their own, such as the local disks of their hosts.

Each process writes every distinct shard of its devices, also the chunks that another process uploads. All directories get the
same manifest and the same facts, whose checksum therefore identifies the save:

    integrity.<process>.json    the checksums of the files that are assigned to this process, as in a shared directory
    copies.json                 those of its other files; a directory with this file has a part of a checkpoint
    train_ds-*                  its position, and that of the process half a job away

A directory is renamed to its final name only after all processes have agreed that all files are durable. A crash between the
first and the last rename leaves a step that some directories lack; ``tiers/shared_choice.py`` decides whether the others have all
of it.

Notes: agreement is by the coordination service, never by a device collective. Each process receives the facts from process 0,
and the manifest if its own differs.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from t5ckpt.commit.deletion import delete_step, rename_damaged
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.markers import seconds_for
from t5ckpt.commit.occupancy import occupant_of
from t5ckpt.commit.transaction import CommittedCheckpoint, Transaction, write_checksums
from t5ckpt.core.keys import join, parents_of
from t5ckpt.distributed.rounds import Phase
from t5ckpt.errors import CoordinationError, NotDurableError, ProcessMissingError, StorageError, T5CkptError
from t5ckpt.format.checksum import digest
from t5ckpt.format.facts import decode_facts, encode_facts
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, entry_of
from t5ckpt.format.names import COPIES, step_dir
from t5ckpt.save.execute import after_commit, agreed_codecs, check_agreement, write_positions
from t5ckpt.save.manifest_and_facts import facts_of_save, manifest_bytes
from t5ckpt.save.prepare import PreparedSave
from t5ckpt.save.request import SaveRequest
from t5ckpt.save.write import WriteReport, write_arrays

_log = logging.getLogger('t5ckpt')
# Larger positions are only on the disk of their own process: gRPC refuses messages above 4 MiB.
_MOST_POSITION_BYTES = 2**20


def save_parts(prepared: PreparedSave, check_not_interrupted: Callable[[], None]) -> CommittedCheckpoint | None:
    """Writes and commits, as :func:`run_save` does; each process in its own storage."""
    request, context = prepared.request, prepared.request.context
    try:
        with contextlib.ExitStack() as stack:
            with request.round.failing_together(Phase.PLAN):
                kept = request.find_kept()
                plan, has_positions = digest(prepared.text.encode()), bool(prepared.dataset)
                vote = {'plan': plan, 'is_free': kept is None, 'has_positions': has_positions}
            started = request.round.reduce_on_leader(Phase.PLAN, vote, lambda votes: _agreed(prepared, votes))
            check_agreement(prepared, started.get('different', ()))
            if started.get('skip'):
                if kept is not None:
                    request.log_skipped(kept)
                return None
            with request.round.failing_together(Phase.WRITE):
                # Before the disk may fail: another process waits for it.
                _send_positions(prepared)
                work = stack.enter_context(_opened(prepared))
                written, vote = _write(prepared, work, started)
                manifest = manifest_bytes(prepared, written)
                check_not_interrupted()
            vote['manifest'] = digest(manifest)
            done = request.round.reduce_on_leader(
                Phase.WRITE, vote, lambda votes: _sealed(prepared, work, votes, _own(prepared, written), manifest)
            )
            facts = _commit(prepared, work, done, manifest, _directories(prepared, written))
    except BaseException:
        if context.reuse is not None:
            # The next save must not fail for the same reason.
            context.reuse.previous = None
        raise
    directory = step_dir(request.step)
    context.retention.note_saved(request.step, decode_facts(facts, context.storage.url(directory)))
    return after_commit(prepared, written, directory, digest(facts), done['bytes'])


def _agreed(prepared: PreparedSave, votes: Sequence[Any]) -> dict[str, Any]:
    """On process 0: whether to save, with which codecs, and the processes that have positions of data iterators."""
    plans = [vote['plan'] for vote in votes]
    different = [index for index, plan in enumerate(plans) if plan != plans[0]]
    if different:
        return {'different': different}
    if not any(vote['is_free'] for vote in votes):
        return {'skip': True}
    having = [index for index, vote in enumerate(votes) if vote['has_positions']]
    return {'codecs': agreed_codecs(prepared, prepared.previous), 'positions': having}


def _opened(prepared: PreparedSave) -> Transaction:
    """Makes the directory of this process."""
    request, context = prepared.request, prepared.request.context
    listed = collect(context.storage, context.clock)
    if not request.call.overwrite and occupant_of(context.storage, request.step) is not None:
        # Others do not have it: it is of a save that did not end, or of before a restore of an older step.
        aside = rename_damaged(context.storage, request.step, context.clock)
        _log.warning('t5ckpt: not all processes had step %d; it was renamed to %s', request.step, aside)
    return Transaction(
        context.storage,
        request.step,
        context.clock,
        overwrite=request.call.overwrite,
        seconds=seconds_for(prepared.staging.total_bytes),
        listed=listed,
    )


def _write(prepared: PreparedSave, work: Transaction, started: dict[str, Any]) -> tuple[WriteReport, dict[str, Any]]:
    """Writes the files of this process, as decided by :func:`_agreed`.

    Returns:
      The report of all of them, and the vote on those that are assigned to this process.
    """
    context, storage = prepared.request.context, prepared.request.context.storage
    context.codec_selection.agree(started['codecs'])
    can_reuse = prepared.previous is not None and prepared.previous.is_there(storage)
    previous = prepared.previous if can_reuse else None
    written = write_arrays(
        storage, work.directory, prepared.staging, previous, context.progress, context.codec_selection
    )
    own = _own(prepared, written)
    positions = write_positions(prepared, work.directory, prepared.dataset)
    copies = {name: written.checksums[name] for name in prepared.files_of_others}
    copies |= write_positions(prepared, work.directory, _positions_of_peer(prepared, started['positions']))
    storage.write(join(work.directory, COPIES), FileChecksums(copies).encode())
    index = prepared.request.round.processes.index
    entry = write_checksums(storage, work.directory, index, own.checksums | positions)
    vote = {'checksums': list(entry), 'bytes': own.file_bytes, 'files': len(own.checksums)}
    return written, vote


def _own(prepared: PreparedSave, written: WriteReport) -> WriteReport:
    """The report of the files that are assigned to this process."""
    checksums = {name: entry for name, entry in written.checksums.items() if name not in prepared.files_of_others}
    return dataclasses.replace(written, checksums=checksums)


def _send_positions(prepared: PreparedSave) -> None:
    """Sends the position of the data iterator to the process half a job away, so that it is on two disks."""
    if not prepared.dataset:
        return
    is_small = sum(map(len, prepared.dataset.values())) <= _MOST_POSITION_BYTES
    own = {name: base64.b64encode(data).decode() for name, data in prepared.dataset.items()} if is_small else {}
    prepared.request.round.put_for_peer('positions', json.dumps(own).encode())


def _positions_of_peer(prepared: PreparedSave, having: Collection[int]) -> dict[str, bytes]:
    """The position of the data iterator of the process half a job away, if it is among those that have one."""
    request = prepared.request
    index, count = request.round.processes.index, request.round.processes.count
    peer = (index + count // 2) % count
    if peer not in having:
        return {}
    found = json.loads(request.round.get_from_peer('positions', peer))
    return {name: base64.b64decode(data) for name, data in found.items() if name not in prepared.dataset}


def _sealed(
    prepared: PreparedSave, work: Transaction, votes: Sequence[Any], own: WriteReport, manifest: bytes
) -> dict[str, Any]:
    """On process 0, when all files are durable: sends the facts, and the manifest if a process needs it."""
    request = prepared.request
    entry: FileEntry = entry_of(manifest)
    facts, nbytes = facts_of_save(prepared, work, votes, own, entry)
    request.round.share('facts', encode_facts(facts))
    if any(vote['manifest'] != votes[0]['manifest'] for vote in votes):
        request.round.share('manifest', manifest)
    return {'bytes': nbytes, 'manifest': votes[0]['manifest'], 'reason': request.upload_reason()}


def _commit(
    prepared: PreparedSave, work: Transaction, done: Mapping[str, Any], manifest: bytes, directories: Sequence[str]
) -> bytes:
    """Commits the directory of this process; returns the facts when all processes have committed theirs.

    If the commit of a process fails, all of them take the step back: they put back the checkpoint that it replaced, or delete it.
    If a process dies, the others leave it: it may be complete.
    """
    request = prepared.request
    with request.round.failing_together(Phase.COMMIT), contextlib.ExitStack() as stack:
        facts = request.round.receive('facts')
        if digest(manifest) != done['manifest']:
            manifest = request.round.receive('manifest')
        stack.enter_context(request.around_commit(done['reason']))
        try:
            work.commit(manifest, facts, directories)
        except NotDurableError as error:
            # The other processes take theirs back.
            with contextlib.suppress(T5CkptError):
                _take_back(request, work.replaced)
            raise StorageError(error.errno, error.strerror) from error
        work.keeps_files = True
        try:
            # After this vote, ``failing_together`` sends nothing.
            request.round.barrier(Phase.COMMIT)
        except (CoordinationError, ProcessMissingError):
            raise
        except T5CkptError:
            _take_back(request, work.replaced)
            work.keeps_files = False
            raise
    work.keeps_files = False
    return facts


def _take_back(request: SaveRequest, replaced: str | None) -> None:
    """Undoes the commit of this process."""
    context = request.context
    if replaced is None:
        delete_step(context.storage, request.step, context.clock, even_waiting=True)
    else:
        Transaction.take_back(context.storage, request.step, replaced, context.clock)


def _directories(prepared: PreparedSave, written: WriteReport) -> list[str]:
    return [array.location for array in written.arrays.values()] + parents_of(prepared.dataset)

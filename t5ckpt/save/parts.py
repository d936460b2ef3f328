"""Writes and commits a save of several processes to storages of their own, such as the local disks of their hosts.

Each process writes every distinct shard of its devices, also the chunks that another process uploads. All directories get the
same manifest and the same facts, whose checksum therefore identifies the save:

    integrity.<process>.json    the checksums of the files that are assigned to this process, as in a shared directory
    copies.json                 those of its other files; a directory with this file has a part of a checkpoint
    train_ds-*                  its position, and that of the process half a job away

A directory is renamed to its final name only after all processes have agreed that all files are durable. A crash between the
first and the last rename leaves a step that some directories lack; ``tiers/choice.py`` decides whether the others have all of it.

Notes: agreement is by the coordination service, never by a device collective. Each process receives the facts from process 0,
and the manifest if its own differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgpack

from t5ckpt.commit.deletion import delete_step
from t5ckpt.commit.transaction import Transaction
from t5ckpt.core.keys import join, parents_of
from t5ckpt.distributed.rounds import Phase
from t5ckpt.errors import CoordinationError, NotDurableError, ProcessMissingError, StorageError, T5CkptError
from t5ckpt.format.checksum import digest
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, entry_of
from t5ckpt.format.names import COPIES
from t5ckpt.save.request import SaveRequest
from t5ckpt.storage import Storage

# Larger positions are only on the disk of their own process: gRPC refuses messages above 4 MiB.
_MOST_POSITION_BYTES = 2**20


def write_files(storage: Storage, directory: str, files: Mapping[str, bytes]) -> dict[str, FileEntry]:
    """Writes small files, such as positions of data iterators, into a directory."""
    for parent in parents_of(files):
        storage.make_dir(join(directory, parent))
    for name, data in files.items():
        storage.write(join(directory, name), data)
    return {name: entry_of(data) for name, data in files.items()}


def send_positions(request: SaveRequest) -> None:
    """Sends the position of the data iterator to the process half a job away, so that it is on two disks."""
    if request.files:
        is_small = sum(map(len, request.files.values())) <= _MOST_POSITION_BYTES
        own = dict(request.files) if is_small else {}
        request.round.share('positions', msgpack.packb(own) or b'')


def write_copies(
    request: SaveRequest, directory: str, copies: Mapping[str, FileEntry], having: Collection[int]
) -> list[str]:
    """Writes the position of the data iterator of the process half a job away, if it is among those ``having`` one.

    Lists it with ``copies``, the files that are assigned to others; returns the names of its files.
    """
    storage = request.context.storage
    index, count = request.round.processes.index, request.round.processes.count
    peer = (index + count // 2) % count
    found = msgpack.unpackb(request.round.receive('positions', peer)) if peer in having else {}
    positions = {name: data for name, data in found.items() if name not in request.files}
    listed = {**copies, **write_files(storage, directory, positions)}
    storage.write(join(directory, COPIES), FileChecksums(listed).encode())
    return list(positions)


def share_facts(request: SaveRequest, votes: Sequence[Any], facts: bytes, manifest: bytes) -> dict[str, Any]:
    """On process 0: sends the facts, and the manifest if a process needs it; returns the checksum of the manifest."""
    request.round.share('facts', facts)
    if any(vote['manifest'] != votes[0]['manifest'] for vote in votes):
        request.round.share('manifest', manifest)
    return {'manifest': votes[0]['manifest']}


def commit_part(
    request: SaveRequest, work: Transaction, done: Mapping[str, Any], manifest: bytes, directories: Sequence[str]
) -> bytes:
    """Commits the directory of this process; returns the facts when all processes have committed theirs.

    If the commit of a process fails, all of them take the step back: they put back the checkpoint that it replaced, or delete it.
    If a process dies, the others leave it: it may be complete.
    """
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

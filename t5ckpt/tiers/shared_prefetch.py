"""Fetches the step to restore ahead, in a job of several processes.

The processes choose the step as a restore does, see ``tiers/shared_choice.py``. If the disks have it, each process reads its part
into memory. Files that a disk lacks are left to the restore: their exchange is a device collective, which may not come between
those of the program. If only the run's storage has the step, each process copies the chunk files that its template needs to a
part in its local directory, and the restore reads that.

Notes: the rounds are in a channel of their own, so they do not collide with those of the program. Process 0 reads the manifest,
the sidecar and the file checksums, and sends them to the others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from t5ckpt.catalog.listing import has_step
from t5ckpt.catalog.locate import Located, locate_step
from t5ckpt.core.keys import join, parents_of
from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.distributed.rounds import Phase
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.names import COPIES, MANIFEST, SIDECAR, TRAIN_DS_PREFIX, step_dir
from t5ckpt.format.sidecar import decode_sidecar
from t5ckpt.reading.raw_files import read_raw
from t5ckpt.restore.execute import files_to_read
from t5ckpt.restore.request import RestoreRequest
from t5ckpt.tiers.catalog import TierCatalog
from t5ckpt.tiers.fetch import Fetch
from t5ckpt.tiers.part import Part
from t5ckpt.tiers.prefetch import Check, read_ahead
from t5ckpt.tiers.provide import begin_part
from t5ckpt.tiers.shared_restore import SharedRestore

_log = logging.getLogger('t5ckpt')
_ACTION = 'a prefetch'


def fetch_together(
    catalog: TierCatalog, coordinator: Coordinator, restore: SharedRestore, request: RestoreRequest, check: Check
) -> None:
    """Fetches the newest step; every process calls it.

    Args:
      catalog: of the tiers.
      coordinator: for the rounds of this prefetch.
      restore: chooses the step, with the same coordinator.
      request: of the restore that is expected.
      check: raises if the prefetch is to end.
    """
    choice, _ = restore.choose(request)
    if choice.step is None:
        return
    if choice.save:
        read_ahead(catalog.local, choice.step, check)
        return
    files = _files_of_run(catalog, coordinator, choice.step)
    if files is None:
        return
    part = begin_part(catalog.local, choice.step, files.pop(MANIFEST), files.pop(SIDECAR), catalog.clock)
    recorded = FileChecksums.recorded_by(decode_sidecar(part.sidecar, SIDECAR), SIDECAR)
    checksums = FileChecksums.union((recorded, *recorded.load_lists(files.get, lambda name: name).values()))
    located = locate_step(catalog.run, choice.step)
    names = files_to_read(request, part.contents()) + _positions(located, request, coordinator)
    nbytes = _fetch(part, located, names, checksums, check)
    urls = catalog.run.url(), catalog.local.url()
    _log.info('t5ckpt: fetched step %d from %s to %s: %d bytes', choice.step, *urls, nbytes)


def _files_of_run(catalog: TierCatalog, coordinator: Coordinator, step: int) -> dict[str, bytes] | None:
    """The manifest, the sidecar and the file checksums of a step of the run, from process 0.

    None if a disk has a part of the step, of another save, or if the step has no checksums: the restore reads it then.
    """
    prefetch_round = coordinator.round(_ACTION)

    def decide(votes: Sequence[Any]) -> list[Any] | None:
        raw = None if any(votes) else read_raw(locate_step(catalog.run, step), checksums=True)
        if raw is None or raw.manifest is None or raw.sidecar is None or not raw.checksum_lists:
            return None
        files = {MANIFEST: raw.manifest, SIDECAR: raw.sidecar, **raw.checksum_lists}
        prefetch_round.share('files', b''.join(files.values()))
        return [[name, len(data)] for name, data in files.items()]

    with prefetch_round.failing_together(Phase.LOOK):
        is_there = has_step(catalog.local, step)
    sizes = prefetch_round.reduce_on_leader(Phase.LOOK, is_there, decide)
    if sizes is None:
        return None
    data, files = memoryview(prefetch_round.receive('files')), dict[str, bytes]()
    # Removes the keys of the files from the coordination service.
    coordinator.round(_ACTION).barrier(Phase.LOOK)
    for name, size in sizes:
        files[name], data = bytes(data[:size]), data[size:]
    return files


def _positions(located: Located, request: RestoreRequest, coordinator: Coordinator) -> list[str]:
    """The files of this process's position of the data iterator."""
    if request.dataset is None:
        return []
    prefix = request.dataset.prefix(coordinator.processes_of_job())
    return [name for name in located.storage.names(located.directory, TRAIN_DS_PREFIX) if name.startswith(prefix)]


def _fetch(part: Part, located: Located, names: Sequence[str], checksums: FileChecksums, check: Check) -> int:
    """Copies files of the run to a part; returns their bytes. After an error, the part has those that were copied."""
    fetch = Fetch(located, checksums, part.storage, step_dir(part.step))
    try:
        fetch.run(names, check)
    finally:
        entries = fetch.entries | part.write_metadata(parents_of(fetch.entries))
        part.storage.write(join(step_dir(part.step), COPIES), FileChecksums(entries).encode())
    return sum(size for size, _ in fetch.entries.values())

"""Repairs a damaged local step with the files of the run's storage, if it has the same save."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from t5ckpt.catalog.listing import has_step
from t5ckpt.catalog.locate import locate_step
from t5ckpt.errors import FormatError, StorageError
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.names import MANIFEST
from t5ckpt.integrity.verify import verify_located
from t5ckpt.reading.contents import read_contents
from t5ckpt.storage import Storage
from t5ckpt.tiers.fetch import Fetch
from t5ckpt.tiers.part import array_bytes, save_in, save_of

_log = logging.getLogger('t5ckpt')


def complete_from(run: Storage, local: Storage, step: int) -> int | None:
    """Replaces the damaged files of a local step by those of the run's storage; reads every local file to find them.

    Returns:
      The bytes of arrays that were read from the run's storage; None if it does not have this save, or the step is still damaged,
      such as on a full disk.

    Raises:
      StorageError: the run's storage does not answer.
    """
    if not has_step(run, step) or save_of(local, step) not in {save_in(run, step)} - {''}:
        return None
    located, source = locate_step(local, step), locate_step(run, step)
    damaged = sorted({damage.file for damage in verify_located(located, full=True).damages})
    if MANIFEST in damaged:
        # That of the run's storage may name another directory.
        return None
    try:
        fetch = Fetch(source, read_contents(source).read_checksums() or FileChecksums(), local, located.directory)
        has_written = _has_written(fetch, damaged, local.url(located.directory))
    except FormatError:
        # The copy in the run's storage is damaged, too, which its restore reports.
        return None
    if not has_written or not damaged or verify_located(located, full=True).damages:
        return None
    _log.warning(
        't5ckpt: %s: %d damaged or missing files were replaced by those of %s: %s',
        local.url(located.directory),
        len(damaged),
        run.url(),
        ', '.join(damaged[:5]),
    )
    return sum(array_bytes(name, size) for name, (size, _) in fetch.entries.items())


def _has_written(fetch: Fetch, names: Sequence[str], where: str) -> bool:
    """Fetches files; returns whether the local disk could be written."""
    try:
        fetch.run(names)
    except StorageError as error:
        if fetch.source_error is not None:
            raise
        _log.warning('t5ckpt: %s could not be repaired: %s', where, error)
        return False
    return True

"""Finds the checkpoint that a restore reads, the same in all processes."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import msgpack

from t5ckpt.catalog.locate import Located, locate, locate_step
from t5ckpt.core.keys import join
from t5ckpt.core.text import lines_of_error
from t5ckpt.errors import CheckpointNotFoundError, DisagreementError, RemoteError
from t5ckpt.reading.contents import Contents, RawFiles, decode_contents, read_raw
from t5ckpt.restore.request import RestoreRequest
from t5ckpt.storage import is_same_kind
from t5ckpt.tree.train_state import StateView, flatten_state

# The name of a file may have any bytes.
_UNICODE_ERRORS = 'surrogateescape'


def _locate(request: RestoreRequest) -> Located:
    step = request.step
    if request.path is not None:
        return _following(request, _locate_path(request, os.fspath(request.path), step))
    try:
        return _following(request, locate_step(request.storage, step))
    except CheckpointNotFoundError as error:
        if step is None or request.no_step is None:
            raise
        raise request.no_step(step) from error


def _following(request: RestoreRequest, located: Located) -> Located:
    return dataclasses.replace(located, follow_links=request.reading.follow_links or located.follow_links)


def _locate_path(request: RestoreRequest, url: str, step: int | None = None) -> Located:
    options = request.storage_options if is_same_kind(url, request.storage) else None
    return locate(url, step, options, tensors=True)


def _requested(request: RestoreRequest) -> str:
    if request.path is not None:
        return os.fsdecode(request.path) + ('' if request.step is None else f'@{request.step}')
    return f'{"the latest step" if request.step is None else f"step {int(request.step)}"} of {request.storage.url()}'


def _find(request: RestoreRequest) -> tuple[Located, RawFiles]:
    located = _locate(request)
    return located, read_raw(located, checksums=request.reading.verifies)


def contents_to_restore(request: RestoreRequest) -> tuple[Contents, StateView]:
    """Finds the checkpoint and reads its manifest and facts on process 0, which shares them with all processes.

    Returns:
      The contents, and the view of the template, whose keys may be items of Orbax.

    Raises:
      CheckpointNotFoundError: it does not exist, or it is a part of a checkpoint and ``request`` has no ``local_part``.
      FormatError: it is damaged, or of a newer version.
    """
    located, raw = _located_files(request)
    view, part = flatten_state(request.template), request.local_part
    contents = decode_contents(located, raw, wanted=dict.fromkeys(path[0] for path in view.table))
    if part is None:
        contents.check_not_part()
    elif request.reading.verifies:
        contents = dataclasses.replace(contents, checksums=part.checksums)
    return contents, view


def _located_files(request: RestoreRequest) -> tuple[Located, RawFiles]:
    if request.local_part is not None:
        return request.local_part.located, RawFiles(request.local_part.manifest, request.local_part.facts)
    if request.round.is_single_process:
        return _find(request)
    return _find_and_broadcast(request) if request.round.is_leader else _receive(request)


def _packed(found: dict[str, Any]) -> bytes:
    return msgpack.packb(found, unicode_errors=_UNICODE_ERRORS) or b''


def _find_and_broadcast(request: RestoreRequest) -> tuple[Located, RawFiles]:
    try:
        located, raw = _find(request)
        found = {
            'requested': _requested(request),
            'url': located.url,
            'location': [located.directory, located.manifest, located.step],
            'files': [raw.manifest, raw.facts, raw.checksum_lists],
            'versions': list(raw.versions),
        }
    except Exception as error:
        request.round.share('found', _packed({'error': lines_of_error(error)}))
        raise
    request.round.share('found', _packed(found))
    return located, raw


def _receive(request: RestoreRequest) -> tuple[Located, RawFiles]:
    found = msgpack.unpackb(request.round.receive('found'), unicode_errors=_UNICODE_ERRORS)
    if 'error' in found:
        raise RemoteError(f'process 0 found no checkpoint to restore: {found["error"]}', (0,))
    if found['requested'] != _requested(request):
        raise DisagreementError(
            f'process 0 was asked to restore {found["requested"]}, process {request.round.processes.index} '
            f'{_requested(request)}. Every process has to restore the same step of the same directory.'
        )
    located = (
        Located(request.storage, *found['location']) if request.path is None else _locate_path(request, found['url'])
    )
    located = _following(request, located)
    # A file system may number its files differently on each machine.
    versions = {name: located.storage.version(join(located.directory, name)) for name in found['versions']}
    return located, RawFiles(*found['files'], versions=versions)

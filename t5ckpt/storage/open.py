"""From a path or URL to a storage."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from t5ckpt.errors import UnsupportedFormatError
from t5ckpt.storage.absent import AbsentStorage
from t5ckpt.storage.base import Storage

__all__ = ['is_same_kind', 'open_storage', 'split_path']

_SCHEMES = ('gs', 'memory', 's3')
# One slash forgotten; who means a directory of that name writes './gs:'.
_HALF_SCHEME = re.compile(r'(file|gs|memory|s3):/(?!/)(.*)', re.DOTALL)
_SCHEME = re.compile(r'([A-Za-z][A-Za-z0-9+.\-]+)://(.*)', re.DOTALL)


def _scheme(path: str) -> tuple[str, str]:
    match = _SCHEME.fullmatch(path)
    return ('file', path) if match is None else (match.group(1).lower(), match.group(2))


def split_path(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Splits a path or URL into the parent's and the last component, ``('gs://bucket/run', 'checkpoint_5')``.

    A bucket has no parent: it comes back with the component ''.
    """
    text = os.fspath(path).rstrip('/')
    scheme, rest = _scheme(text)
    if scheme == 'file' and '://' not in text:
        parent, name = os.path.split(os.path.abspath(os.path.expanduser(text)))
        return parent, name
    if scheme != 'file' and '/' not in rest:
        return text, ''
    parent, _, name = rest.rpartition('/')
    return f'{scheme}://{parent}', name


def is_same_kind(path: str, storage: Storage) -> bool:
    """Whether a path or URL is on the same kind of storage; where no directory was given, any is."""
    return isinstance(storage, AbsentStorage) or _scheme(path)[0] == _scheme(storage.url())[0]


def open_storage(path: str | os.PathLike[str] | Storage, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """Opens the storage whose root is ``path``; nothing is created and nobody is asked.

    Args:
      path: a directory, ``file://`` with an absolute path, ``gs://bucket/prefix``, ``s3://bucket/prefix`` or
        ``memory://name/...``; a Storage is itself.
      storage_options: see docs/storage.md; not with a Storage, which has its own.

    Raises:
      UnsupportedFormatError: for a scheme that this version does not serve.
      ValueError: an option that this kind of storage does not have, no bucket, or one slash where two belong.
    """
    if isinstance(path, Storage):
        if storage_options:
            raise ValueError('storage_options: a Storage was opened with its own.')
        return path
    text = os.fspath(path)
    scheme, rest = _scheme(text)
    half = _HALF_SCHEME.fullmatch(text)
    if half is not None:
        raise ValueError(f'{text}: write {half.group(1)}://{half.group(2)}, with two slashes.')
    if scheme == 'file':
        from t5ckpt.storage.file import FileStorage
        from t5ckpt.storage.options import FileOptions, parse_options

        return FileStorage(rest, parse_options(FileOptions, storage_options, text))
    bucket, _, prefix = rest.strip('/').partition('/')
    if scheme in _SCHEMES and not bucket:
        raise ValueError(f'{text}: no bucket in it; write {scheme}://bucket/directory.')
    return _open_bucket(scheme, bucket, prefix, storage_options)


def _open_bucket(scheme: str, bucket: str, prefix: str, given: Mapping[str, Any] | None) -> Storage:
    from t5ckpt.storage.options import GcsOptions, MemoryOptions, S3Options, parse_options

    path = f'{scheme}://{bucket}/{prefix}'
    match scheme:
        case 'gs':
            from t5ckpt.storage.gcs import open_gcs

            return open_gcs(bucket, prefix, parse_options(GcsOptions, given, path))
        case 's3':
            from t5ckpt.storage.s3 import S3Storage

            return S3Storage(bucket, prefix, parse_options(S3Options, given, path))
        case 'memory':
            from t5ckpt.storage.memory import MemoryStorage

            parse_options(MemoryOptions, given, path)
            return MemoryStorage(bucket, prefix)
        case _:
            raise UnsupportedFormatError(
                f'{path}: {scheme!r} is not served, only {sorted(["file", *_SCHEMES])}. Copy the checkpoint to a disk first.'
            )

"""From a path or URL to a storage."""

from __future__ import annotations

import importlib
import os
import re

from t5ckpt.errors import UnsupportedFormatError
from t5ckpt.storage.base import Storage

__all__ = ['open_storage', 'split_path']

_CLASSES = {'file': ('file', 'FileStorage'), 'memory': ('memory', 'MemoryStorage')}
_SCHEME = re.compile(r'([A-Za-z][A-Za-z0-9+.\-]+)://(.*)', re.DOTALL)


def _scheme(path: str) -> tuple[str, str]:
    match = _SCHEME.fullmatch(path)
    return ('file', path) if match is None else (match.group(1).lower(), match.group(2))


def split_path(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Splits a path or URL into the parent's and the last component, ``('gs://bucket/run', 'checkpoint_5')``."""
    text = os.fspath(path).rstrip('/')
    scheme, rest = _scheme(text)
    if scheme == 'file' and '://' not in text:
        parent, name = os.path.split(os.path.abspath(os.path.expanduser(text)))
        return parent, name
    parent, _, name = rest.rpartition('/')
    return f'{scheme}://{parent}', name


def open_storage(path: str | os.PathLike[str] | Storage) -> Storage:
    """Opens the storage whose root is ``path``; nothing is created.

    Args:
      path: a directory, ``file://`` with an absolute path, or ``memory://name/...``; a Storage is itself.

    Raises:
      UnsupportedFormatError: for a scheme that this version does not serve.
    """
    if isinstance(path, Storage):
        return path
    scheme, rest = _scheme(os.fspath(path))
    if scheme not in _CLASSES:
        raise UnsupportedFormatError(
            f'{path}: {scheme!r} is not served, only {sorted(_CLASSES)}. Copy the checkpoint to a disk first.'
        )
    # Imported when it is needed: a listing on a disk does not wait for what the other backends load.
    module, name = _CLASSES[scheme]
    return getattr(importlib.import_module(f't5ckpt.storage.{module}'), name)(rest)

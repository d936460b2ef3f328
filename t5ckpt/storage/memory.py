"""Stores checkpoints in this process's memory, for tests and for passing a state between parts of a program.

TensorStore's ``memory://`` belongs to a Context, so one Context per name exists until the process ends: ``memory://a/run``
opened twice is the same store. It cannot rename, so checkpoints are written in place with the manifest last, as on an object
store.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import tensorstore as ts

from t5ckpt.storage.bucket import BucketStorage
from t5ckpt.storage.connection import Connection
from t5ckpt.storage.options import MemoryOptions, parse_options

_contexts: dict[str, ts.Context] = {}
_guard = threading.Lock()


def _context_of(name: str) -> ts.Context:
    with _guard:
        if name not in _contexts:
            _contexts[name] = ts.Context({'cache_pool': {'total_bytes_limit': 0}})
        return _contexts[name]


class MemoryStorage(BucketStorage):
    """A prefix of a named in-memory store."""

    is_shared = False
    driver = 'file'
    _compares_deletions = True

    def __init__(self, bucket: str, prefix: str):
        """Takes the name of the store and the prefix."""
        super().__init__(bucket, prefix, Connection({'driver': 'memory'}, lambda _: _context_of(bucket)))

    def url(self, key: str = '') -> str:
        return f'memory://{self._bucket}/{self._key(key)}'.rstrip('/')

    def _size_of(self, key: str) -> int | None:
        return self.size(key)


def open_at(name: str, prefix: str, given: Mapping[str, Any] | None) -> MemoryStorage:
    """Opens ``memory://name/prefix``, which has no ``storage_options``."""
    parse_options(MemoryOptions, given, f'memory://{name}/{prefix}')
    return MemoryStorage(name, prefix)

"""Checkpoints in this process's memory, for tests and for handing a state from one part of a program to another.

TensorStore's ``memory://`` belongs to a Context, so one Context is kept per name for the life of the process:
``memory://a/run`` opened twice is the same place. There is no rename, so checkpoints are written in place and the
manifest comes last, exactly as on an object store.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorstore as ts

from t5ckpt._layout import join
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.storage._errors import foreign_errors
from t5ckpt.storage.base import Entry, Storage

__all__ = ['MemoryStorage']

_contexts: dict[str, ts.Context] = {}
_guard = threading.Lock()


def _context_of(name: str) -> ts.Context:
    with _guard:
        if name not in _contexts:
            _contexts[name] = ts.Context({'cache_pool': {'total_bytes_limit': 0}})
        return _contexts[name]


_claims: set[str] = set()


class _Claim:
    """A name in the set of directories that are being written in this process."""

    is_held = True

    def __init__(self, url: str):
        self._url = url

    def close(self) -> None:
        with _guard:
            _claims.discard(self._url)


class MemoryStorage(Storage):
    """A prefix of a named in-memory store."""

    renames = False
    is_shared = False
    driver = 'file'

    def __init__(self, rest: str):
        """Takes what follows ``memory://``: a name and a prefix."""
        self._name, _, prefix = rest.strip('/').partition('/')
        self._prefix = prefix.strip('/')
        self._kv: Any = None

    def _kvstore(self) -> Any:
        if self._kv is None:
            self._kv = ts.KvStore.open({'driver': 'memory'}, context=self.context()).result()
        return self._kv

    def _key(self, key: str) -> str:
        return join(self._prefix, key)

    def _below(self, key: str) -> str:
        full = self._key(key)
        return f'{full}/' if full else ''

    def _keys(self, key: str) -> list[str]:
        below = self._below(key)
        with foreign_errors(self.url(key)):
            names = self._kvstore().list(_range(below)).result()
        return sorted(name.decode()[len(below) :] for name in names)

    def url(self, key: str = '') -> str:
        return f'memory://{join(self._name, self._prefix, key)}'

    def read(self, key: str) -> bytes:
        with foreign_errors(self.url(key)):
            found = self._kvstore().read(self._key(key)).result()
        if found.state != 'value':
            raise CheckpointNotFoundError(f'{self.url(key)}: no such key')
        return bytes(found.value)

    def write(self, key: str, data: bytes) -> None:
        with foreign_errors(self.url(key)):
            self._kvstore().write(self._key(key), data).result()

    def kind(self, key: str) -> str | None:
        full = self._key(key)
        if full and self._kvstore().read(full).result().state == 'value':
            return 'file'
        return 'dir' if self._keys(key) else None

    def size(self, key: str) -> int | None:
        found = self._kvstore().read(self._key(key)).result()
        return len(found.value) if found.state == 'value' else None

    def entries(self, key: str = '') -> list[Entry]:
        found: dict[str, Entry] = {}
        for name in self._keys(key):
            first, slash, _ = name.partition('/')
            size = 0 if slash else len(self.read(join(key, first)))
            found.setdefault(first, Entry(first, bool(slash), size))
        return [found[name] for name in sorted(found)]

    def walk(self, key: str) -> Iterator[tuple[str, int]]:
        for name in self._keys(key):
            below = join(key, name)
            yield below, len(self.read(below))

    def make_dir(self, key: str, exclusive: bool = False) -> bool:
        return not (exclusive and self._keys(key))

    def claim(self, key: str) -> Any:
        with _guard:
            if self.url(key) in _claims:
                return None
            _claims.add(self.url(key))
        return _Claim(self.url(key))

    def sync_tree(self, key: str, below: Sequence[str]) -> None:
        del key, below

    def publish(self, source: str, target: str) -> None:
        raise NotImplementedError(f'{self.url()} cannot rename {source} to {target}; write in place')

    def delete_file(self, key: str) -> None:
        with foreign_errors(self.url(key)):
            self._kvstore().write(self._key(key), None).result()

    def delete_tree(self, key: str) -> None:
        with foreign_errors(self.url(key)):
            self._kvstore().delete_range(_range(self._below(key))).result()

    def array_kvstore(self, key: str) -> dict[str, Any]:
        return {'driver': 'memory', 'path': self._below(key)}

    def context(self) -> ts.Context:
        return _context_of(self._name)


def _range(prefix: str) -> Any:
    if not prefix:
        return ts.KvStore.KeyRange()
    return ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))

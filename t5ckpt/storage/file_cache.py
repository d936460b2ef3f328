"""A bounded directory of files fetched from an object store, for notebooks that read the same chunks repeatedly.

An entry is one file: a line of JSON with the name and the checksum of the original, then its bytes. It is written under a
temporary name and renamed, and its checksum is verified at every read, so a damaged entry is ignored. When the directory exceeds
its limit, the least recently used entries are removed until nine tenths of the limit remain.

Several processes may share a directory; a process that misses an entry fetches the file again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable

import xxhash

_FULL, _AFTER = 1.0, 0.9
_SUFFIX = '.chunk'
# The names of entries and of their partial files; no other file is ever removed.
_DIRECTORY = re.compile('[0-9a-f]{2}')
_ENTRY = re.compile(r'[0-9a-f]{62}\.chunk(\.[0-9]+\.[0-9]+)?')


@dataclasses.dataclass(frozen=True)
class CachedFile:
    """A file as it was fetched; ``version`` is the store's identifier of its contents, such as an ETag."""

    data: bytes
    version: bytes


class FileCache:
    """The directory. Safe from any thread and process."""

    def __init__(self, directory: str, limit_bytes: int):
        """Takes the directory, which is created with the first entry, and its limit in bytes."""
        self._directory = os.path.abspath(os.path.expanduser(directory))
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._grown: int | None = None

    def read(
        self, url: str, is_good: Callable[[bytes], bool] | None, fetch: Callable[[bytes | None], CachedFile | None]
    ) -> bytes:
        """Returns the bytes of a file, from the cache if they are valid; else the file is fetched and kept.

        Args:
          url: the name of the file.
          is_good: returns whether cached bytes are those of the file; None compares its version instead.
          fetch: reads the file from the store; with a version, returns None if that is the file's version.
        """
        cached = self.get(url)
        if cached is not None and is_good is not None and is_good(cached.data):
            return cached.data
        fetched = fetch(cached.version if cached is not None and is_good is None else None)
        if fetched is not None:
            self.put(url, fetched)
            return fetched.data
        if cached is None:
            raise AssertionError(f'{url}: not fetched')
        return cached.data

    def get(self, url: str) -> CachedFile | None:
        """The entry of a file, if it is undamaged."""
        path = self._path(url)
        try:
            with open(path, 'rb') as file:
                head, data = file.readline(), file.read()
            # The modification time is the time of last use.
            os.utime(path)
        except OSError:
            return None
        try:
            header = json.loads(head)
            good = header['url'] == url and header['xxh3'] == xxhash.xxh3_64_hexdigest(data)
            return CachedFile(data, bytes.fromhex(header['generation'])) if good else None
        except (ValueError, TypeError, KeyError):
            return None

    def put(self, url: str, file: CachedFile) -> None:
        """Adds a file, unless it is larger than the limit; ignores errors, such as a full disk."""
        header = {'url': url, 'generation': file.version.hex(), 'xxh3': xxhash.xxh3_64_hexdigest(file.data)}
        head = json.dumps(header).encode() + b'\n'
        if len(head) + len(file.data) > self._limit:
            return
        path = self._path(url)
        partial = f'{path}.{os.getpid()}.{threading.get_ident()}'
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(partial, 'wb') as out:
                out.write(head)
                out.write(file.data)
            os.replace(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            return
        self._make_room(len(head) + len(file.data))

    def _path(self, url: str) -> str:
        name = hashlib.sha256(url.encode('utf-8', 'surrogatepass')).hexdigest()
        return os.path.join(self._directory, name[:2], f'{name[2:]}{_SUFFIX}')

    def _make_room(self, added: int) -> None:
        with self._lock:
            self._grown = self._used() if self._grown is None else self._grown + added
            if self._grown <= self._limit * _FULL:
                return
            # Other processes may have added or removed entries, so the size is computed again.
            entries = sorted(self._entries())
            used = sum(size for _, size, _ in entries)
            for _, size, path in entries:
                if used <= self._limit * _AFTER:
                    break
                with contextlib.suppress(OSError):
                    os.unlink(path)
                used -= size
            self._grown = used

    def _used(self) -> int:
        return sum(size for _, size, _ in self._entries())

    def _entries(self) -> list[tuple[int, int, str]]:
        """(last use in nanoseconds, bytes, path) of each entry and partial file."""
        files: list[tuple[int, int, str]] = []
        for parent in _names_in(self._directory, _DIRECTORY):
            for path in _names_in(parent, _ENTRY):
                with contextlib.suppress(OSError):
                    info = os.lstat(path)
                    files.append((info.st_mtime_ns, info.st_size, path))
        return files


def _names_in(directory: str, pattern: re.Pattern[str]) -> list[str]:
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory) if pattern.fullmatch(name)]
    except OSError:
        return []

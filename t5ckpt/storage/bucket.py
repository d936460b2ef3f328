"""The base of all object stores: keys and prefixes through TensorStore's KvStore, and waits that end.

There is no rename, so checkpoints are written in place, with the manifest last. A PUT is atomic. If its reply is lost it may
have been applied, so after a failed write the key is read and compared.

Conditions: TensorStore sends Google's ``ifGenerationMatch`` with writes and deletions, and S3's ``If-Match`` and
``If-None-Match`` with writes. Its S3 driver deletes without a condition (``DeleteTask`` in kvstore/s3/s3_key_value_store.cc of
TensorStore 0.1.86), so ``storage/s3.py`` sends such deletions. Some servers ignore or refuse the headers. The first key that a
process creates shows it: the same write is sent again, and must be refused.

Notes: checking whether a key exists costs one HEAD request. A listing has no sizes. TensorStore's pages through all keys below a
prefix, since it has no delimiter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorstore as ts

from t5ckpt.core.keys import join
from t5ckpt.errors import AccessDeniedError, CheckpointNotFoundError, StorageError, T5CkptError
from t5ckpt.format.file_checksums import FileEntry, entry_of
from t5ckpt.storage.base import Entry, Storage
from t5ckpt.storage.error_mapping import (
    TENSORSTORE_ERRORS,
    UNMET_CONDITION,
    bucket_errors,
    map_bucket_error,
    transient_answer,
)
from t5ckpt.storage.forked import use_tensorstore
from t5ckpt.storage.options import retry_context, stall_seconds
from t5ckpt.storage.server_requests import RefusedError, ServerRequests, is_conflict, retried

ABSENT = b'\x02'
"""TensorStore's version of a key that does not exist."""
_PROBE = '.t5ckpt/probe'
# Part of TensorStore's error if the server does not support a header.
_NOT_IMPLEMENTED = "[http_response_code='501']"
# The status in TensorStore's error for a range of bytes beyond the end of the file.
_BEYOND_THE_END = 'OUT_OF_RANGE'
# The range of bytes of a read that only checks whether a key exists.
_NOTHING = slice(0, 0)
# A probe repeats its request itself, so that it sees each answer.
_PROBE_RETRIES = {'max_retries': 1, 'initial_delay': '1ms', 'max_delay': '1ms'}
_FIRST_PROBE_SECONDS = 1.0
_REPEAT_SECONDS, _MAX_REPEAT_SECONDS = 0.1, 2.0
_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class _Outage:
    """A server that is silent or fails each request.

    Attributes:
      since: the start of the first wait without an answer, in seconds of the monotonic clock.
      seconds: the duration of the next probe.
      answer: the latest answer to a probe; empty if the server was silent.
    """

    since: float
    seconds: float
    answer: str = ''


class BucketStorage(Storage):
    """A prefix of a bucket.

    Safe from any thread. A subclass has ``scheme`` and ``driver``, and its module ``open_at``.
    """

    commits_by_rename = False
    scheme: str
    """Of its URLs."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        spec: Mapping[str, Any],
        patience: float = 0.0,
        *,
        resources: Mapping[str, Any] = MappingProxyType({}),
        requests: ServerRequests | None = None,
    ):
        """Sends nothing yet.

        Args:
          bucket: its name.
          prefix: of the keys.
          spec: the kvstore spec of the bucket's root.
          patience: seconds in which the requests of one operation end, and the longest wait for a silent server; 0 without
            a server.
          resources: further resources of TensorStore's contexts, such as credentials.
          requests: those of t5ckpt itself.
        """
        self._bucket, self._prefix = bucket, prefix.strip('/')
        self._spec, self._patience, self._resources, self._requests = spec, patience, resources, requests
        # Never written. Reading it shows whether the server answers and grants access.
        self._probe_key = self._key(_PROBE)
        self._lock = threading.RLock()
        self._context: ts.Context | None = None
        self._kv: Any = None
        self._probe_kv: Any = None
        self._outage: _Outage | None = None
        # Whether the bucket is known to exist.
        self._is_found = False
        # Whether the server ignores all conditions, None if unknown; and whether it has that of a new key, but of no other.
        self._ignores_conditions: bool | None = None
        self._refuses_changes = False

    def url(self, key: str = '') -> str:
        return f'{self.scheme}://{self._bucket}/{self._key(key)}'.rstrip('/')

    def _key(self, key: str) -> str:
        return join(self._prefix, key)

    def _below(self, key: str) -> str:
        full = self._key(key)
        return f'{full}/' if full else ''

    # Reads.

    def _start_read(self, key: str, start: int = 0, stop: int | None = None) -> Any:
        return self._kvstore().read(self._key(key), byte_range=slice(start, stop))

    def _finish_read(self, key: str, future: Any) -> Any:
        with bucket_errors(self.url(key)):
            result = self.wait(future)
        if result.state == 'missing':
            raise CheckpointNotFoundError(f'{self.url(key)}: no such key')
        return result

    def _finish_range(self, key: str, future: Any, start: int, stop: int | None) -> bytes:
        try:
            return bytes(self._finish_read(key, future).value)
        except StorageError as error:
            if _BEYOND_THE_END not in str(error):
                raise
            # The file is shorter than the range.
            return b'' if stop is None else self.read(key, start)[: stop - start]

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._finish_range(key, self._start_read(key, start, stop), start, stop)

    def read_with_version(self, key: str) -> tuple[bytes, Any]:
        result = self._finish_read(key, self._start_read(key))
        return bytes(result.value), result.stamp.generation

    def version(self, key: str) -> Any:
        try:
            return self._finish_read(key, self._start_read(key, 0, 0)).stamp.generation
        except CheckpointNotFoundError:
            return None

    def heads(self, keys: Sequence[str], nbytes: int) -> list[bytes | None]:
        futures = [self._start_read(key, 0, nbytes) for key in keys]
        heads: list[bytes | None] = []
        for key, future in zip(keys, futures, strict=True):
            try:
                heads.append(self._finish_range(key, future, 0, nbytes))
            except CheckpointNotFoundError:
                heads.append(None)
        return heads

    def kind(self, key: str) -> str | None:
        if self._key(key) and self.is_file(key):
            return 'file'
        return 'dir' if self._children(key) else None

    def size(self, key: str) -> int | None:
        del key
        return -1

    # Writes and deletions.

    def write(self, key: str, data: bytes) -> None:
        try:
            with bucket_errors(self.url(key), 'writing'):
                self.write_chunk(key, data)
        except StorageError as error:
            if isinstance(error, AccessDeniedError) or not self._has_data(key, data):
                raise

    def write_chunk(self, key: str, data: Any) -> tuple[FileEntry, Any]:
        copied = bytes(data)
        return entry_of(copied), self.wait(self._kvstore().write(self._key(key), copied)).generation

    def _has_data(self, key: str, data: bytes) -> bool:
        try:
            return self._version_with(key, data) is not None
        except T5CkptError:
            return False

    def _version_with(self, key: str, data: bytes) -> Any:
        """The version of a key if it has this data, else None; if it cannot be read, neither is known: an error."""
        try:
            current, version = self.read_with_version(key)
        except CheckpointNotFoundError:
            return None
        return version if current == data else None

    def replace(self, key: str, data: bytes, version: Any) -> Any:
        try:
            written = self._change(key, data, ABSENT if version is None else version)
        except StorageError as error:
            if isinstance(error, AccessDeniedError) or not self._has_data(key, data):
                raise
            written = b''
        if written is None:
            return super().replace(key, data, version)
        # If the first attempt was applied and its reply was lost, the retry finds its own version.
        written = written or self._version_with(key, data)
        if written is not None and version is None and self._ignores_conditions is None:
            # Now, with a marker, which only its owner deletes: a manifest that is written twice may come back after a deletion.
            again = self._changed(key, data, ABSENT)
            self._note_conditions(is_ignored=bool(again))
            written = again or written
        return written

    @property
    def compares_versions(self) -> bool:
        return self._compares(b'')

    def _compares(self, version: bytes) -> bool:
        """Whether the server compares this version, ``ABSENT`` or that of an object, as far as is known."""
        return not (self._ignores_conditions or (self._refuses_changes and version != ABSENT))

    def _change(self, key: str, data: bytes | None, version: bytes) -> bytes | None:
        """Writes or deletes a key that has this version.

        Returns:
          The new version, b'' if the server refused it, None if the server does not compare this version.

        Raises:
          StorageError: the request failed; it may have been applied.
        """
        if not self._compares(version):
            return None
        try:
            return self._changed(key, data, version)
        except StorageError as error:
            if _NOT_IMPLEMENTED in str(error.__cause__):
                self._refuses_changes = True
                if self._ignores_conditions is None:
                    self._note_conditions(is_ignored=True)
            if self._compares(version):
                raise
            return None

    def _changed(self, key: str, data: bytes | None, version: bytes) -> bytes:
        def attempt() -> bytes:
            request = self._kvstore().write(self._key(key), data, if_equal=version)
            try:
                return self.wait(request, is_conditional=True).generation
            except ValueError as error:
                # TensorStore does not repeat a request that the server refused because another one was under way.
                if is_conflict(str(error)):
                    raise RefusedError(409, str(error)) from error
                raise

        with bucket_errors(self.url(key), 'deleting' if data is None else 'writing'):
            return retried(attempt, self._patience)

    def _note_conditions(self, *, is_ignored: bool) -> None:
        self._ignores_conditions = is_ignored
        if is_ignored:
            _log.warning(
                't5ckpt: the server of %s does not check the conditions of writes (If-None-Match, ifGenerationMatch), so '
                'only one program may write to this run, and no step can be replaced; see docs/storage.md',
                self.url(),
            )

    def delete_unchanged(self, key: str, version: Any) -> bool:
        try:
            is_done = self._delete_if_unchanged(key, version)
        except AccessDeniedError:
            raise
        except StorageError as error:
            # The reply may have been lost.
            with contextlib.suppress(StorageError):
                if not self.is_file(key):
                    return True
            raise StorageError(error.errno, f'{error} It may disappear, if the request arrives later.') from error
        return super().delete_unchanged(key, version) if is_done is None else bool(is_done) or not self.is_file(key)

    def _delete_if_unchanged(self, key: str, version: Any) -> bool | bytes | None:
        """Deletes a key that has this version; returns what ``_change`` does."""
        return self._change(key, None, version)

    @property
    def copies(self) -> bool:
        return self._requests is not None and self._requests.copies

    def copy_unchanged(self, source: str, target: str, version: Any) -> Any:
        return None if self._requests is None else self._requests.copy(self._key(source), self._key(target), version)

    def delete_files(self, keys: Sequence[str]) -> None:
        self._delete([self._key(key) for key in keys])

    def delete_tree(self, key: str) -> None:
        self._delete([raw.decode() for raw in self._listed(self._below(key), self.url(key))])

    def _delete(self, keys: Sequence[str]) -> None:
        where = self.url() if len(keys) != 1 else self.url(keys[0].removeprefix(self._below('')))
        with bucket_errors(where, 'deleting'):
            if self._requests is not None and len(keys) > 1 and self._requests.delete_many(keys):
                return
            kvstore = self._kvstore()
            for future in [kvstore.write(key, None) for key in keys]:
                self.wait(future)

    # Listings.

    def entries(self, key: str = '') -> list[Entry]:
        return [Entry(name, is_dir, 0 if is_dir else None) for name, is_dir in self._children(key).items()]

    def walk(self, key: str) -> Iterator[tuple[str, int | None]]:
        for name in self._keys(key):
            yield join(key, name), None

    def make_dir(self, key: str) -> None:
        """Does nothing: a bucket has no directories."""

    def _children(self, key: str) -> dict[str, bool]:
        """The names directly below ``key``, in order, and whether each is a directory."""
        below = self._below(key)
        names = self._delimited(below)
        keys = self._keys(key) if names is None else [name[len(below) :] for name in names]
        children: dict[str, bool] = {}
        for name in keys:
            # Consoles create keys that end with a slash to show a directory. A file and a directory may have one name.
            first, slash, _ = name.partition('/')
            if first:
                children[first] = bool(slash) and children.get(first, True)
        return dict(sorted(children.items()))

    def _delimited(self, prefix: str) -> list[str] | None:
        """The children of a prefix; None if TensorStore is to list all keys below it, which also explains a failure."""
        if self._requests is None:
            return None
        # Checks the name of the bucket.
        self._kvstore()
        started = time.monotonic()
        if self._outage is not None:
            self._probe(started)
        try:
            children = self._requests.children(prefix)
        except RefusedError as error:
            if error.is_transient:
                self._probe(started)
            return None
        self._is_found = True
        return children

    def _keys(self, key: str) -> list[str]:
        """Returns the keys below ``key``, relative to it, in order."""
        below = self._below(key)
        names = [raw.decode()[len(below) :] for raw in self._listed(below, self.url(key))]
        return sorted(name for name in names if name and not name.endswith('/'))

    def _listed(self, prefix: str, where: str) -> Sequence[bytes]:
        with bucket_errors(where, 'listing'):
            try:
                keys = self._list(prefix)
            except TENSORSTORE_ERRORS:
                # S3's driver parses a refusal as a listing, so its error does not name the cause.
                self._explain(AccessDeniedError)
                raise
            if not keys:
                self._check_nothing()
        self._is_found = True
        return keys

    def _list(self, prefix: str, start: bytes | None = None) -> Sequence[bytes]:
        """The keys that begin with a prefix, from ``start``."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ''
        keys = ts.KvStore.KeyRange(prefix if start is None else start, end)
        return self.wait(self._kvstore().list(keys))

    def _explain(self, kind: type[T5CkptError] = T5CkptError) -> None:
        """Reads a key that does not exist, which needs the same permission as a listing; raises a refusal of this kind."""
        try:
            self.wait(self._kvstore().read(self._probe_key, byte_range=_NOTHING))
        except TENSORSTORE_ERRORS as error:
            if isinstance(map_bucket_error(error, self.url()), kind):
                raise

    def _check_nothing(self) -> None:
        """Raises if an empty listing does not mean that there are no keys."""

    def array_kvstore(self, key: str) -> dict[str, Any]:
        return {**self._spec, 'path': self._below(key)}

    # The connection.

    def context(self) -> ts.Context:
        use_tensorstore()
        with self._lock:
            if self._context is None:
                self._context = self._new_context(retry_context(self._patience))
            return self._context

    def _new_context(self, retries: Mapping[str, Any]) -> ts.Context:
        # TensorStore's HTTP client has no other setting for silent connections, and reads it before its first request.
        os.environ.setdefault('TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS', str(stall_seconds(self._patience)))
        os.environ.setdefault('TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES', '1')
        own = {f'{self._spec["driver"]}_request_retries': dict(retries)}
        return ts.Context({**own, **self._resources})

    def _kvstore(self) -> Any:
        """The kvstore of the bucket's root."""
        context = self.context()
        with self._lock:
            if self._kv is None:
                with bucket_errors(self.url()):
                    self._kv = self._open(context)
            return self._kv

    def _open(self, context: ts.Context, *, is_probe: bool = False) -> Any:
        """The kvstore of the bucket's root; that of the probes repeats no request."""
        del is_probe
        return ts.KvStore.open(dict(self._spec), context=context).result()

    def wait(self, future: Any, *, is_conditional: bool = False) -> Any:
        """Returns the result of a TensorStore future.

        TensorStore ends a request that fails or stalls in bounded time, but neither a request that cannot connect nor
        one that queues behind such a request. If a future has no result after half of the patience, a small probe is sent,
        which does not wait in the queue. If the server answers it in the other half, the wait continues.

        After an outage, every wait begins with a probe. The time for its answer is short at first and grows from one
        failure to the next. So no operation is refused without a request, and the many requests of one operation do not
        each wait for all of the patience. An answer after which TensorStore tries again, such as a 503, does not end
        the outage, and the error repeats this answer.

        Args:
          future: of a request.
          is_conditional: whether the request has a condition.

        Raises:
          StorageError: the server is silent or fails each request; the future is not cancelled.
          ValueError: an error of TensorStore, which the caller maps; also for an answer that a condition is not met if the
            request has none. TensorStore reports such a write as done and such a read as empty.
        """
        while True:
            started = time.monotonic()
            if self._outage is not None and not future.done():
                self._probe(started)
            try:
                result = future.result(timeout=self._patience / 2) if self._patience else future.result()
                break
            except TimeoutError:
                self._probe(started)
        if not is_conditional and _is_unmet(result):
            raise ValueError(UNMET_CONDITION)
        return result

    def _probe(self, started: float) -> None:
        """Sends a probe in an outage, or for a request without an answer that ``started`` then; raises if there is none."""
        outage = self._outage or _Outage(started, self._patience / 2)
        with self._lock:
            if self._probe_kv is None:
                self._probe_kv = self._open(self._new_context(_PROBE_RETRIES), is_probe=True)
            kv = self._probe_kv
        answer = self._answer(kv, outage.seconds)
        if answer is None:
            self._outage = None
            return
        half = self._patience / 2
        with self._lock:
            before = self._outage or _Outage(outage.since, _FIRST_PROBE_SECONDS / 2)
            since, seconds = min(before.since, outage.since), min(2 * before.seconds, half)
            self._outage = outage = _Outage(since, seconds, answer or before.answer)
            # Requests that cannot connect block the queues for minutes, so the next requests get new queues.
            self._context = self._kv = self._probe_kv = None
        wait = 'the storage option retry_seconds sets the wait.'
        seconds = f'{time.monotonic() - outage.since:.0f} s'
        if outage.answer:
            text = f'all requests have failed for {seconds}; the latest reply is: {outage.answer}. Check the server; {wait}'
        else:
            text = f'the server has not replied for {seconds}. Check the endpoint and the network; {wait}'
        raise StorageError(errno.ETIMEDOUT, f'{self.url()}: {text}')

    def _answer(self, kv: Any, seconds: float) -> str | None:
        """Repeats a small request until the server answers it, for some seconds at most.

        Returns:
          None if the server answered, including a refusal. Else its answer to the last request; empty if it was silent.
        """
        deadline, last, pause = time.monotonic() + seconds, '', _REPEAT_SECONDS
        while True:
            try:
                kv.read(self._probe_key, byte_range=_NOTHING).result(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return last
            except TENSORSTORE_ERRORS as error:
                answer = transient_answer(error)
                if answer is None:
                    return None
                last = answer
            else:
                return None
            left = deadline - time.monotonic()
            if left <= 0:
                return last
            # The total time, which the error names.
            time.sleep(min(pause, left))
            # A server that throttles gets few requests.
            pause = min(2 * pause, _MAX_REPEAT_SECONDS)


def _is_unmet(result: Any) -> bool:
    """Whether a server answered that the condition of a request is not met (HTTP 304 or 412)."""
    if isinstance(result, ts.KvStore.ReadResult):
        return result.state == 'unspecified'
    return isinstance(result, ts.KvStore.TimestampedStorageGeneration) and result.generation == b''

"""A bucket in memory. ``BucketStorage`` runs unchanged over it.

Every request is applied at once, in one order for all processes. A request may fail, be applied without its reply, or be
reported as failed and be applied later. Requests that a process has sent but not waited for are lost when it dies.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

from simulation.scheduler import Decision, active, current_task, wait_until
from t5ckpt.storage.bucket import ABSENT, BucketStorage

_SCHEME = 'gs'
_FAILED = 'UNAVAILABLE: injected: the server does not answer'


class Bucket:
    """The server: objects and their versions.

    Attributes:
      is_away: whether all requests fail.
      objects: bytes and version by key.
      changed: called with the keys after each change.
      versions: the numbers of the next ones.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, bytes]] = {}
        self.is_away = False
        self.changed: Callable[[tuple[str, ...]], None] = lambda keys: None
        self.versions = itertools.count(1)

    def files(self) -> dict[str, bytes]:
        """All objects by key."""
        return {key: data for key, (data, _) in self.objects.items()}

    def put(self, key: str, data: bytes | None, if_equal: bytes | None = None) -> bytes:
        """Writes or, for None, deletes an object; returns its version, or no bytes if it does not have the expected one.

        As in TensorStore, the version ``ABSENT`` means that the object must not exist.
        """
        before = self.objects.get(key)
        if if_equal is not None and if_equal != (ABSENT if before is None else before[1]):
            return b''
        if data is None:
            if before is not None:
                del self.objects[key]
                self.changed((key,))
            return ABSENT
        version = b'\1%d' % next(self.versions)
        self.objects[key] = (data, version)
        self.changed((key,))
        return version


class _Request:
    """A request that was sent; it is applied when its sender waits for it."""

    def __init__(self, bucket: Bucket, text: str, apply: Callable[[], Any], *, changes: bool):
        self._bucket, self.text, self._apply, self._changes = bucket, text, apply, changes
        self._result: Any = None
        self._is_done = False

    def done(self) -> bool:
        return self._is_done

    def result(self, timeout: float | None = None) -> Any:
        del timeout
        if not self._is_done:
            scheduler = active()
            fault = None if scheduler is None else scheduler.point(self.text)
            if fault is not None:
                self._fail(fault)
            if self._bucket.is_away:
                raise ValueError(_FAILED)
            self._result, self._is_done = self._apply(), True
        return self._result

    def _fail(self, fault: Decision) -> None:
        if fault.action == 'lost' and self._changes:
            self._apply()
        elif fault.action == 'late' and self._changes:
            self._arrive_later(float(fault.value))
        raise ValueError(_FAILED)

    def _arrive_later(self, seconds: float) -> None:
        scheduler = active()
        assert scheduler is not None

        def arrive() -> None:
            wait_until(lambda: False, seconds)
            scheduler.point(f'late: {self.text}')
            self._apply()

        # The schedule ends after it has arrived.
        task = scheduler.start(scheduler.processes['network'], arrive, 'late request')
        task.is_main, task.sender = True, current_task().process


class _Client:
    """The part of TensorStore's ``KvStore`` that t5ckpt uses."""

    def __init__(self, bucket: Bucket):
        self._bucket = bucket

    def read(self, key: str, *, byte_range: slice | None = None) -> _Request:
        def apply() -> Any:
            stored = self._bucket.objects.get(key)
            if stored is None:
                return _read('missing', b'', ABSENT)
            data, version = stored
            return _read('value', data if byte_range is None else data[byte_range], version)

        return _Request(self._bucket, f'{"HEAD" if byte_range == slice(0, 0) else "GET"} {key}', apply, changes=False)

    def write(self, key: str, value: Any, *, if_equal: bytes | None = None, **_: Any) -> _Request:
        data = None if value is None else bytes(value)

        def apply() -> Any:
            return types.SimpleNamespace(generation=self._bucket.put(key, data, if_equal))

        verb = 'DELETE' if data is None else 'PUT'
        condition = '' if if_equal is None else ' if it is unchanged' if if_equal != ABSENT else ' if it does not exist'
        return _Request(self._bucket, f'{verb} {key}{condition}', apply, changes=True)

    def list(self, keys: Any) -> _Request:
        return _Request(self._bucket, f'LIST {keys.inclusive_min.decode()}', lambda: self._within(keys), changes=False)

    def _within(self, keys: Any) -> list[bytes]:
        low, high = keys.inclusive_min, keys.exclusive_max
        return [
            raw for key in sorted(self._bucket.objects) if (raw := key.encode()) >= low and (not high or raw < high)
        ]


def _read(state: str, value: bytes, version: bytes) -> Any:
    return types.SimpleNamespace(state=state, value=value, stamp=types.SimpleNamespace(generation=version))


_mounted: list[Bucket] = []


def mount(bucket: Bucket) -> None:
    """Makes the URLs of Google's storage those of a bucket."""
    _mounted[:] = [bucket]


def open_at(bucket: str, prefix: str, given: Any) -> SimulatedBucket:
    """Opens a URL of Google's storage."""
    del bucket, given
    return SimulatedBucket(_mounted[0], prefix)


class SimulatedBucket(BucketStorage):
    """``BucketStorage`` over a :class:`Bucket`."""

    driver = 'gcs'

    def __init__(self, bucket: Bucket, prefix: str = 'run'):
        """Takes the server and the run's prefix."""
        self._client = _Client(bucket)
        super().__init__('bucket', prefix, {'driver': 'simulated'})

    def context(self) -> Any:
        return None

    def _kvstore(self) -> Any:
        return self._client

    def url(self, key: str = '') -> str:
        return f'{_SCHEME}://{self._bucket}/{self._key(key)}'.rstrip('/')

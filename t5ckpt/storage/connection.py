"""The connection of an object store: TensorStore's contexts, the bucket's kvstore, and waits that end.

Waits for a server that does not answer are bounded, see :meth:`Connection.wait`.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorstore as ts

from t5ckpt.errors import StorageError
from t5ckpt.storage.error_mapping import UNMET_CONDITION, bucket_errors
from t5ckpt.storage.forked import use_tensorstore
from t5ckpt.storage.options import Retries, retries_within, stall_environment
from t5ckpt.storage.outage import PROBE_RETRIES, Outage, probe

NOTHING = slice(0, 0)
"""The range of bytes of a read that only checks whether a key exists."""
# TensorStore's counters by the method of the request. A deletion counts as a write.
_METRICS = {'PUT': 'write', 'GET': 'read', 'LIST': 'list'}


def http_contexts(
    patience: float, resources: Callable[[Retries], dict[str, Any]]
) -> Callable[[Retries | None], ts.Context]:
    """Returns a function that makes the context of an HTTP store.

    Args:
      patience: seconds in which the requests of one operation end; determines the usual retries.
      resources: TensorStore's context resources for some retries: concurrency, retries, credentials.
    """
    usual = retries_within(patience)

    def new_context(retries: Retries | None) -> ts.Context:
        for name, value in stall_environment(usual).items():
            # TensorStore's HTTP client has no other setting for it, and reads it before its first request.
            os.environ.setdefault(name, value)
        return ts.Context({'cache_pool': {'total_bytes_limit': 0}, **resources(retries or usual)})

    return new_context


class Connection:
    """TensorStore's access to one bucket. Safe from any thread.

    Attributes:
      deletions: how many keys were deleted one by one.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        new_context: Callable[[Retries | None], ts.Context],
        patience: float | None = None,
    ):
        """Sends nothing yet.

        Args:
          spec: the kvstore spec of the bucket's root.
          new_context: makes a TensorStore context with some retries; None for the usual ones.
          patience: the longest wait for a silent server, in seconds; None for any time.
        """
        self.spec = dict(spec)
        self.patience = patience
        # Set by the storage: its address for errors, and a key that is never written.
        self.url = ''
        self.probe_key = ''
        self.deletions = 0
        self._new_context = new_context
        self._lock = threading.Lock()
        self._context: ts.Context | None = None
        self._kv: Any = None
        self._probe_kv: Any = None
        self._outage: Outage | None = None

    def context(self) -> ts.Context:
        """Returns the TensorStore context of all requests; an error in a process forked after a first use."""
        use_tensorstore()
        with self._lock:
            if self._context is None:
                self._context = self._new_context(None)
            return self._context

    def kvstore(self) -> Any:
        """Returns the kvstore of the bucket's root."""
        context = self.context()
        with self._lock:
            if self._kv is None:
                with bucket_errors(self.url):
                    self._kv = self._open(context)
            return self._kv

    def _open(self, context: ts.Context, *, is_probe: bool = False) -> Any:
        """The kvstore of the bucket's root; that of the probes repeats no request."""
        del is_probe
        return ts.KvStore.open(self.spec, context=context).result()

    def delete(self, key: str, **condition: Any) -> Any:
        """Starts to delete a key; returns the future."""
        self.deletions += 1
        return self.kvstore().write(key, None, **condition)

    def requests(self) -> dict[str, int]:
        """TensorStore's requests to servers of this kind so far, by method, in all of the process; retries are not counted.

        A GET may have been a HEAD. A deletion through another connection counts as a PUT.
        """
        group = f'/tensorstore/kvstore/{self.spec["driver"]}/'
        metrics = {
            metric['name'].removeprefix(group): metric['values']
            for metric in ts.experimental_collect_matching_metrics(group)
        }
        sent = {method: metrics[name][0]['value'] for method, name in _METRICS.items() if name in metrics}
        return sent | {'PUT': sent['PUT'] - self.deletions, 'DELETE': self.deletions} if 'PUT' in sent else sent

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
        result = self._result(future)
        if not is_conditional and _is_unmet(result):
            raise ValueError(UNMET_CONDITION)
        return result

    def _result(self, future: Any) -> Any:
        if self.patience is None:
            return future.result()
        while True:
            started = time.monotonic()
            outage = self._outage
            if outage is not None and not future.done() and not self._answers(outage.seconds, outage.since):
                raise self._silence()
            try:
                return future.result(timeout=self.patience / 2)
            except TimeoutError:
                if not self._answers(self.patience / 2, started):
                    raise self._silence() from None

    def check(self, started: float | None = None) -> None:
        """Raises the error of an outage that goes on, or of one since a request that another client ``started``."""
        self.kvstore()
        outage = self._outage
        if started is not None and outage is None:
            outage = Outage(started, started + (self.patience or 0) - time.monotonic())
        if outage is not None and not self._answers(outage.seconds, outage.since):
            raise self._silence()

    def _answers(self, seconds: float, since: float) -> bool:
        """Sends a probe; ``since`` is the start of the last wait without an answer."""
        with self._lock:
            if self._probe_kv is None:
                self._probe_kv = self._open(self._new_context(PROBE_RETRIES), is_probe=True)
            kv = self._probe_kv
        failure = probe(lambda: kv.read(self.probe_key, byte_range=NOTHING), seconds)
        if failure is None:
            self._outage = None
            return True
        with self._lock:
            self._outage = Outage.after(self._outage, since, self.patience or 0, failure)
            # Requests that cannot connect block the queues for minutes, so the next requests get new queues.
            self._context = self._kv = self._probe_kv = None
        return False

    def _silence(self) -> StorageError:
        outage = self._outage
        if outage is None:
            outage = Outage(time.monotonic() - (self.patience or 0), 0)
        return StorageError(errno.ETIMEDOUT, f'{self.url}: {outage.text(time.monotonic())}')


def _is_unmet(result: Any) -> bool:
    """Whether a server answered that the condition of a request is not met (HTTP 304 or 412)."""
    if isinstance(result, ts.KvStore.ReadResult):
        return result.state == 'unspecified'
    return isinstance(result, ts.KvStore.TimestampedStorageGeneration) and result.generation == b''

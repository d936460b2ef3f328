"""Stores checkpoints in this process's memory, for tests and for passing a state between parts of a program.

TensorStore's ``memory://`` belongs to a Context, so one Context per name exists until the process ends: ``memory://a/run``
opened twice is the same store. It cannot rename, so checkpoints are written in place with the manifest last, as on an object
store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorstore as ts

from t5ckpt.storage.bucket import BucketStorage
from t5ckpt.storage.options import MemoryOptions

_contexts: dict[str, ts.Context] = {}


class MemoryStorage(BucketStorage):
    """A prefix of a named in-memory store."""

    scheme = 'memory'
    is_shared = False
    driver = 'file'

    def __init__(self, bucket: str, prefix: str, options: MemoryOptions = MemoryOptions()):  # noqa: B008 - frozen
        """Takes the name of the store and the prefix."""
        del options
        super().__init__(bucket, prefix, {'driver': 'memory'})

    def _new_context(self, retries: Mapping[str, Any]) -> ts.Context:
        del retries
        return _contexts.setdefault(self._bucket, ts.Context())


open_at = MemoryStorage

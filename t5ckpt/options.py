"""The options of a checkpointer that are rarely changed."""

from __future__ import annotations

import dataclasses
import time

from t5ckpt.core.arguments import check_callables, check_flags, check_word, integer, number
from t5ckpt.core.byte_budget import bytes_of_gb
from t5ckpt.core.leaf_patterns import Patterns
from t5ckpt.core.protocols import Clock
from t5ckpt.datasets import MapPositions
from t5ckpt.distributed.processes import DEFAULT_TIMEOUT_SECONDS, Processes
from t5ckpt.format.codecs import CODECS
from t5ckpt.planning.leaf_choice import LeafPatterns
from t5ckpt.planning.save_plan import SaveOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointerOptions:
    """Options of ``Checkpointer`` that are rarely changed. A function that only reads uses those of reading.

    Attributes:
      compression: None, 'lz4', 'zstd', 'gzip', 'blosc', or 'auto', which chooses the codec of each leaf by the time that it
        saves; 'default' is 'auto' on object stores and None on disks. See docs/storage.md.
      chunk_bytes: the desired largest size of a chunk file; 64 MiB by default.
      inline_bytes: leaves up to this many bytes (16 KiB) are stored in the manifest instead of an array directory.
      reuse_unchanged: chunks that equal those of the previous checkpoint are hard-linked from it, or copied inside the object
        store.
      strict_save: ``save`` raises an error for a state that does not match the template, instead of a warning.
      cast_leaves: patterns for whole leaf names, such as ``'model/.*'``: ``save_dtype`` and ``restore_dtype`` then apply to the
        matching leaves instead. Each has to match a floating leaf.
      verify: the check of what is read: 'auto', checksums of chunks that are read whole; 'full', also of those that are mapped
        or read in part; 'quick', sizes.
      mmap: memory-maps local chunk files that are plain, instead of reading them; a restore does so on the CPU backend. See
        docs/mapped-restore.md.
      follow_links: symbolic links may lead out of a checkpoint's directory, as in the cache of Hugging Face.
      share_replicated: with several processes, ``restore`` reads replicated arrays once; see docs/many-hosts.md.
      restore_concurrent_gb: gigabytes (10^9 bytes) of host memory for values that are not on the devices yet; a larger leaf is
        read alone.
      map_positions: called in a restore with another number of data shards: takes {shard: state} of the checkpoint, and returns
        the state of this process's shard, or None to leave the iterator unchanged; see docs/data-iterators.md.
      processes: of the job; by default those of ``jax.distributed``. All of them save and restore together.
      process_timeout: seconds that a process waits for the others, whenever they coordinate (saves, restores, deletions).
      clock: returns unix seconds.

    Raises:
      ValueError: an option has no meaning; the error names it and the value.
    """

    compression: str | None = 'default'
    chunk_bytes: int = SaveOptions.chunk_bytes
    inline_bytes: int = SaveOptions.inline_bytes
    reuse_unchanged: bool = True
    strict_save: bool = False
    cast_leaves: Patterns | None = None
    verify: str = 'auto'
    mmap: bool = False
    follow_links: bool = False
    share_replicated: bool = False
    restore_concurrent_gb: float = 4
    map_positions: MapPositions | None = None
    processes: Processes | None = None
    process_timeout: float = DEFAULT_TIMEOUT_SECONDS
    clock: Clock = time.time

    def __post_init__(self) -> None:
        flags = ('reuse_unchanged', 'strict_save', 'mmap', 'follow_links', 'share_replicated')
        check_flags(**{name: getattr(self, name) for name in flags})
        check_word('compression', self.compression, ('default', *CODECS))
        check_word('verify', self.verify, ('auto', 'full', 'quick'))
        integer('chunk_bytes', self.chunk_bytes, 1)
        integer('inline_bytes', self.inline_bytes)
        LeafPatterns(self.cast_leaves, 'cast_leaves')
        bytes_of_gb(self.restore_concurrent_gb, 'restore_concurrent_gb')
        number('process_timeout', self.process_timeout)
        check_callables(clock=self.clock, map_positions=self.map_positions)

    @property
    def verifies(self) -> bool:
        """Whether checksums are compared: of every file that is read whole, and with 'full' of each that is read at all."""
        return self.verify != 'quick'

"""One process of the job of ``tier_restart.py``: orders on standard input, answers on standard output, in JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import Any

import google.auth.transport.requests
import jax
import jaxlib.mlir.dialects.mhlo
import numpy as np
import probe
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import t5ckpt
import t5ckpt.storage.gcs
import t5ckpt.tiers.tier

# Imported once, before the processes are forked: a restart's seconds are not those of Python's compiler.
_IMPORTED = (google.auth.transport.requests, jaxlib.mlir.dialects.mhlo, t5ckpt.storage.gcs, t5ckpt.tiers.tier)
_ROWS, _COLUMNS = 1024, 1024
STEP = 1


def main(arguments: list[int]) -> None:
    """Joins the job, and carries out its orders; the arguments are the port, the number of processes, and this one's."""
    port, count, index = arguments
    jax.distributed.initialize(f'127.0.0.1:{port}', count, index, heartbeat_timeout_seconds=100)
    # Every job compiles programs. In the first exchange of a process, the start of the compiler would take seconds and 80 MB.
    jax.jit(lambda value: value + 1)(1.0).block_until_ready()
    _answer('ready')
    for line in sys.stdin:
        name, options = json.loads(line)
        try:
            answer = {'save': save, 'restore': restore}[name](**options)
        except Exception:  # noqa: BLE001 - the benchmark ends with the text
            answer = {'error': traceback.format_exc()}
        _answer(answer)


def _answer(value: object) -> None:
    sys.stdout.write(f'ANSWER {json.dumps(value)}\n')
    sys.stdout.flush()


def _barrier(name: str) -> None:
    distributed.global_state.client.wait_at_barrier(name, 120_000)


def _sharding() -> NamedSharding:
    """Every shard is on the devices of two processes: 0 and 2, or 1 and 3."""
    devices = np.array(jax.devices()).reshape(2, -1)
    return NamedSharding(Mesh(devices, ('data', 'model')), PartitionSpec('model'))


def _values(leaf: int) -> np.ndarray:
    """The values of a leaf: the same random ones, plus its number."""
    if not hasattr(_values, 'base'):
        _values.base = np.random.default_rng(0).random((_ROWS, _COLUMNS), np.float32)
    return _values.base + np.float32(leaf)


def _state(leaves: int) -> dict[str, Any]:
    made = {}
    for leaf in range(leaves):
        values = _values(leaf)
        made[f'w{leaf}'] = jax.make_array_from_callback(values.shape, _sharding(), lambda index, of=values: of[index])
    return {'params': made, 'step': np.int32(STEP)}


def _template(leaves: int) -> dict[str, Any]:
    leaf = jax.ShapeDtypeStruct((_ROWS, _COLUMNS), np.float32, sharding=_sharding())
    return {'params': {f'w{number}': leaf for number in range(leaves)}, 'step': np.int32(0)}


def _own_bytes(leaves: int) -> int:
    """The bytes of the arrays that the devices of this process hold."""
    return 4 * leaves * _ROWS * _COLUMNS // (len(jax.devices()) // 2) * len(jax.local_devices())


def save(leaves: int, plain: str, run: str, local: str, concurrent_gb: float) -> dict[str, Any]:
    """Saves to a shared directory, then to the local directories, and uploads; the peaks of memory above the state."""
    state, peaks = jax.block_until_ready(_state(leaves)), {}
    for kind, directory, tiers in (('plain', plain, {}), ('local', run, {'local': t5ckpt.LocalTier(local)})):
        with t5ckpt.Checkpointer(state, None, directory, **tiers) as checkpointer:
            _barrier(f'save {kind}')
            peak = probe.PeakMemory()
            checkpointer.save(state, step=STEP, concurrent_gb=concurrent_gb)
            peaks[kind] = peak.above_start()
            if tiers:
                checkpointer.wait_until_persisted(STEP)
                peaks['upload'] = peak.above_start()
    return {'peaks': peaks, 'own_bytes': _own_bytes(leaves)}


class _Sources(logging.Handler):
    """Keeps the line of the log with the bytes by source."""

    line = ''

    def emit(self, record: logging.LogRecord) -> None:
        if 'restored step' in record.getMessage():
            self.line = record.getMessage()


def restore(leaves: int, run: str, local: str | None, concurrent_gb: float) -> dict[str, Any]:
    """Restores as a process that starts does; the seconds from the constructor to the state, and the peak above the arrays."""
    template, sources = _template(leaves), _Sources()
    logger = logging.getLogger('t5ckpt')
    logger.addHandler(sources)
    logger.setLevel(logging.INFO)
    tier = None if local is None else t5ckpt.LocalTier(local, persist=t5ckpt.SaveAt([]))
    _barrier('restore')
    peak, began = probe.PeakMemory(), time.perf_counter()
    checkpointer = t5ckpt.Checkpointer(
        template, None, run, local=tier, options=t5ckpt.CheckpointerOptions(restore_concurrent_gb=concurrent_gb)
    )
    restored = jax.block_until_ready(checkpointer.restore())
    seconds, above = time.perf_counter() - began, peak.above_start() - _own_bytes(leaves)
    for leaf in range(leaves):
        for shard in restored['params'][f'w{leaf}'].addressable_shards:
            if not np.array_equal(np.asarray(shard.data), _values(leaf)[shard.index]):
                raise AssertionError(f'w{leaf}: other values than were saved')
    checkpointer.close()
    return {'seconds': seconds, 'peak': above, 'line': sources.line}

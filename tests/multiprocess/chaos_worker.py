"""One process of the training job that chaos.py breaks: `chaos_worker.py ADDRESS COUNT INDEX RUN LOG`.

It restores the newest step, checks its values, and saves step after step until something ends it. LOG has a line a save. Exit
code 3: another process is missing, so the job has to start anew. Exit code 4: values or an error that must not occur.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import sys
import traceback

import jax
import numpy as np
from chaos_state import HEARTBEAT_SECONDS, LEAVES, PROCESS_TIMEOUT, values
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import t5ckpt
from t5ckpt.errors import CoordinationError, ProcessMissingError, RemoteError, StorageError

MISSING, BROKEN = 3, 4


def global_array(name: str, step: int) -> jax.Array:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ('data',)), PartitionSpec(*LEAVES[name][1]))
    whole = values(name, step)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def state(step: int) -> dict:
    return {'params': {name: global_array(name, step) for name in LEAVES}, 'step': step}


def check(restored: dict, step: int) -> None:
    assert int(restored['step']) == step
    for name in LEAVES:
        for shard in restored['params'][name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values(name, step)[shard.index])


def train(run: str, log: int) -> None:
    def say(*words: object) -> None:
        os.write(log, (' '.join(map(str, words)) + '\n').encode())

    checkpointer = t5ckpt.Checkpointer(
        state(0),
        None,
        run,
        keep=3,
        options=t5ckpt.CheckpointerOptions(process_timeout=PROCESS_TIMEOUT, chunk_bytes=2**16, inline_bytes=256),
    )
    restored = t5ckpt.restore_or_init(checkpointer, lambda: state(0))
    first = 0 if checkpointer.restored_step is None else checkpointer.restored_step
    check(restored, first)
    say('restored', first)
    for step in itertools.count(first + 1):
        try:
            if step % 2:
                checkpointer.save(state(step), step=step)
            else:
                checkpointer.save_async(state(step), step=step).result()
            say('saved', step)
        except (StorageError, RemoteError) as error:
            say('failed', step, type(error).__name__)


def main() -> None:
    address, count, index, run, log = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1)
    sys.stdin.readline()  # the network is there
    with open(log, 'ab', buffering=0) as file:
        try:
            jax.distributed.initialize(
                address, int(count), int(index), heartbeat_timeout_seconds=HEARTBEAT_SECONDS, initialization_timeout=60
            )
            train(run, file.fileno())
        except (CoordinationError, ProcessMissingError):
            traceback.print_exc()
            code = MISSING
        except BaseException:  # noqa: BLE001 - the parent looks at the log
            traceback.print_exc()
            code = BROKEN
    sys.stderr.flush()
    # An orderly end of jax.distributed waits for processes that may be gone.
    os._exit(code)


if __name__ == '__main__':
    main()

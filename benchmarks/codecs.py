"""What codecs save and cost: bytes and seconds, on the disk and behind a network of limited speed.

    python benchmarks/codecs.py [MB] [ROUNDS] [PART...] [STATE...]

PART is disk, gs or s3; by default disk and gs.

Each part saves and restores states of MB megabytes: bfloat16, float32, master weights (float32 that holds bfloat16 values), and
the states of Adam and Adafactor; STATE is adam, adafactor, bfloat16, float32 or master, and by default each. The least seconds of
ROUNDS turns are shown. 64 MB and one round take less than five minutes on two quiet cores.

`disk` compares with Orbax (OCDBT with zstd), T5X's zstd and gzip, safetensors, and ZipNN where it is installed, which compresses
in memory.

`gs` and `s3` pass the requests to the server of the tests through a proxy that lets 100 MB/s, then 1 GB/s pass in each
direction. "x" is how much faster a save or restore is than its uncompressed bytes at that rate. The servers are slower than the
services: their own rate is the first row, without a limit.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'tests'))

import peers
from listing import BUCKET, store

import t5ckpt

_PEERS = ('orbax-pytree', 't5x-zstd', 't5x-gzip', 'safetensors')
_WIDTH = 1024
_Tree = dict[str, Any]


def _weights(megabytes: int, seed: int, itemsize: int = 4) -> np.ndarray:
    rows = max(64, megabytes * 10**6 // itemsize // _WIDTH)
    return 0.02 * np.random.default_rng(seed).standard_normal((rows, _WIDTH), dtype=np.float32)


def _adam(megabytes: int, seed: int) -> _Tree:
    gradients = _weights(megabytes // 2, seed)
    return {'mu': 0.1 * gradients, 'nu': 1e-3 * np.square(gradients) * _weights(megabytes // 2, seed + 1) ** 2}


def _adafactor(megabytes: int, seed: int) -> _Tree:
    squares = np.square(_weights(megabytes, seed)).reshape(-1)
    return {f'v_{number}': part for number, part in enumerate(np.array_split(squares, 4))}


STATES: dict[str, Callable[[int, int], _Tree]] = {
    'bfloat16': lambda megabytes, seed: {'w': _weights(megabytes, seed, 2).astype(jnp.bfloat16)},
    'float32': lambda megabytes, seed: {'w': _weights(megabytes, seed)},
    'master': lambda megabytes, seed: {'w': _weights(megabytes, seed).astype(jnp.bfloat16).astype(np.float32)},
    'adam': _adam,
    'adafactor': _adafactor,
}


def _state(name: str, megabytes: int, seed: int) -> _Tree:
    return jax.block_until_ready(jax.device_put(STATES[name](megabytes, seed)))


def _nbytes(state: _Tree) -> int:
    return sum(leaf.nbytes for leaf in state.values())


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _same(found: _Tree, state: _Tree) -> None:
    for name, leaf in state.items():
        assert np.asarray(found[name]).tobytes() == np.asarray(leaf).tobytes(), name


def _ours(compression: str | None) -> type[peers.Peer]:
    class Ours(peers.T5ckpt):
        name = f't5ckpt {compression}'
        options: ClassVar[dict[str, Any]] = {'compression': compression}

    return Ours


def disk(megabytes: int, rounds: int, names: Sequence[str]) -> None:
    """Each state with each peer."""
    makers = [_ours(compression) for compression in (None, 'auto', 'lz4', 'zstd')] + [
        peers.PEERS[name] for name in _PEERS
    ]
    for name in names:
        for make in makers:
            least, size, nbytes = [float('inf')] * 2, 0, 0
            for seed in range(rounds):
                with tempfile.TemporaryDirectory() as directory:
                    state = _state(name, megabytes, 10 * seed)
                    nbytes = _nbytes(state)
                    abstract = jax.tree.map(
                        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
                    )
                    peer = make(pathlib.Path(directory), abstract, abstract)
                    saved = _seconds(lambda peer=peer, state=state: peer.save(state, 1))
                    size = sum(path.stat().st_size for path in pathlib.Path(directory).rglob('*') if path.is_file())
                    restored = _seconds(lambda peer=peer: jax.block_until_ready(peer.restore(1)))
                    _same(peer.restore(1), state)
                    peer.close()
                    least = [min(least[0], saved), min(least[1], restored)]
            _show(name, make.name, size / nbytes, *least)
        if importlib.util.find_spec('zipnn'):
            _zipnn(name, megabytes)


def _zipnn(name: str, megabytes: int) -> None:
    """ZipNN, in memory."""
    import zipnn

    size = seconds = back = nbytes = 0
    for values in STATES[name](megabytes, 0).values():
        kind = 'bfloat16' if values.dtype == jnp.bfloat16 else 'float32'
        codec = zipnn.ZipNN(bytearray_dtype=kind)
        data = bytearray(values.tobytes())
        packed: list[Any] = []
        seconds += _seconds(lambda codec=codec, data=data, packed=packed: packed.append(codec.compress(data)))
        back += _seconds(lambda codec=codec, packed=packed: codec.decompress(packed[0]))
        size, nbytes = size + len(packed[0]), nbytes + values.nbytes
    _show(name, 'zipnn, in memory', size / nbytes, seconds, back)


def _show(state: str, who: str, ratio: float, saved: float, restored: float) -> None:
    print(f'{state:10} {who:18} {ratio:6.3f} of the bytes, save {saved:6.2f} s, restore {restored:6.2f} s', flush=True)


class _Line:
    """Lets bytes pass at a rate, whatever the number of connections."""

    def __init__(self, rate: float):
        self._rate = rate
        self._lock = threading.Lock()
        self._free = 0.0
        self.carried = 0

    def take(self, nbytes: int) -> None:
        """Waits until the line has carried the bytes."""
        with self._lock:
            self.carried += nbytes
            self._free = max(self._free, time.perf_counter()) + nbytes / self._rate
            end = self._free
        time.sleep(max(0.0, end - time.perf_counter()))


def _limit(front: Any, rate: float) -> _Line:
    """Has a proxy carry bodies at a rate in each direction; the line of what is sent."""
    front.reset()
    up, down = _Line(rate), _Line(rate)
    front.watch = lambda *request: up.take(len(request[-1]))
    front.record = lambda request: down.take(request.received)
    return up


def network(megabytes: int, rounds: int, names: Sequence[str], scheme: str) -> None:
    """Saves and restores through the proxy: plain chunks, the default, and the zstd of T5X and Orbax."""
    with tempfile.TemporaryDirectory() as directory, store(scheme, pathlib.Path(directory)) as front:
        for rate in (float('inf'), 1e8, 1e9):
            for name in names if rate < float('inf') else names[:1]:
                for compression in (None, 'default', 'zstd'):
                    up, least, nbytes = _limit(front, rate), [float('inf')] * 2, 0
                    for seed in range(rounds):
                        state = _state(name, megabytes, 10 * seed)
                        nbytes += _nbytes(state)
                        url = f'{scheme}://{BUCKET}/{name}{rate}{compression}{seed}'
                        with t5ckpt.Checkpointer(
                            state, checkpoints_dir=url, compression=compression, chunk_bytes=4 * 2**20
                        ) as ck:
                            saved = _seconds(lambda ck=ck, state=state: ck.save(state, step=1))
                            restored = _seconds(lambda ck=ck: jax.block_until_ready(ck.restore()))
                            _same(ck.restore(), state)
                            ck.delete(1)
                        least = [min(least[0], saved), min(least[1], restored)]
                    plain = nbytes / rounds / rate
                    print(
                        f'{scheme} {rate / 1e6:5.0f} MB/s {name:9} {compression!s:8} {up.carried / nbytes:6.3f} of the bytes, '
                        f'save {least[0]:6.2f} s ({plain / least[0]:4.2f}x), '
                        f'restore {least[1]:6.2f} s ({plain / least[1]:4.2f}x)',
                        flush=True,
                    )


def main() -> None:
    """See the top."""
    megabytes, rounds, *words = (*sys.argv[1:], *('64', '1')[len(sys.argv) - 1 :])
    names = [word for word in words if word in STATES] or list(STATES)
    for part in [word for word in words if word not in STATES] or ('disk', 'gs'):
        if part == 'disk':
            disk(int(megabytes), int(rounds), names)
        else:
            network(int(megabytes), int(rounds), names, part)


if __name__ == '__main__':
    main()

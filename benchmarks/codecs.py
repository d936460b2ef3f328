"""What codecs save and cost: bytes and seconds, on the disk and behind a network of limited speed.

    python benchmarks/codecs.py [MB] [ROUNDS] [PART...] [STATE...] [RATE...] [PROGRAM...]

PART is disk or store; by default both.

Each part saves and restores states of MB megabytes: bfloat16, float32, master weights (float32 that holds bfloat16 values), and
the states of Adam and Adafactor; STATE is adam, adafactor, bfloat16, float32 or master, and by default each. The least seconds of
ROUNDS turns are shown. 64 MB and one round take less than five minutes on two quiet cores.

`disk` compares with Orbax (OCDBT with zstd), T5X's zstd and gzip, safetensors, and ZipNN where it is installed, which compresses
in memory.

`store` saves to a bucket of `light_store.py`, which lets RATE MB/s pass in each direction: 100, then 1000, then 0 (no limit).
PROGRAM is t5ckpt, orbax, t5x, safetensors or zipnn. "x" is how much faster a save or restore is than its uncompressed bytes at
that rate; then follow its requests. A state has twelve arrays. The arrays of Orbax and T5X are written by TensorStore with their
specs, without their manifests, since their own programs have no test server. A file of safetensors, and the arrays that ZipNN
compressed, are one object each.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'tests'))

import peers
from light_store import counts, light_store
from listing import BUCKET

import t5ckpt

_PEERS = ('orbax-pytree', 't5x-zstd', 't5x-gzip', 'safetensors')
_PROGRAMS = ('t5ckpt', 'orbax', 't5x', 'safetensors', 'zipnn')
_WIDTH = 1024
_LEAVES = 12
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


def _abstract(state: _Tree) -> _Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


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
                    abstract = _abstract(state)
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


class _Arrays:
    """Arrays as another checkpointer has TensorStore write them to Google's storage; without its manifest."""

    def __init__(self, name: str, compressor: _Tree, *, ocdbt: bool = False):
        self.name, self._compressor, self._ocdbt = name, compressor, ocdbt

    def _open(self, url: str, name: str, leaf: Any, context: ts.Context, **how: Any) -> ts.TensorStore:
        base, key = {'driver': 'gcs', 'bucket': BUCKET}, url.removeprefix(f'gs://{BUCKET}/')
        kvstore = {**base, 'path': f'{key}/{name}/'}
        if self._ocdbt:
            # As orbax/checkpoint/_src/serialization/tensorstore_utils.py of 0.12.8 makes it.
            config = {'max_inline_value_bytes': 1024, 'max_decoded_node_bytes': 10**8, 'manifest_kind': 'single'}
            kvstore = {'driver': 'ocdbt', 'base': {**base, 'path': f'{key}/'}, 'path': f'{name}/', 'config': config}
            kvstore |= {'target_data_file_size': 400 * 2**20, 'assume_config': True, 'cache_pool': 'cache_pool#ocdbt'}
        metadata = {'compressor': self._compressor, 'shape': leaf.shape, 'chunks': leaf.shape}
        spec = {'driver': 'zarr', 'dtype': leaf.dtype.name, 'kvstore': kvstore, 'metadata': metadata}
        return ts.open(spec, open=True, context=context, **how).result()

    def save(self, url: str, state: _Tree) -> None:
        """Writes all arrays at once."""
        context = ts.Context({'cache_pool#ocdbt': {'total_bytes_limit': 10**8}})
        transaction = ts.Transaction(atomic=True) if self._ocdbt else None
        how = {'create': True, 'transaction': transaction}
        stores = {name: self._open(url, name, leaf, context, **how) for name, leaf in state.items()}
        for written in [stores[name].write(np.asarray(leaf)) for name, leaf in state.items()]:
            written.result()
        if transaction is not None:
            transaction.commit_async().result()

    def restore(self, url: str, template: _Tree) -> _Tree:
        """Reads all arrays at once."""
        context = ts.Context({'cache_pool#ocdbt': {'total_bytes_limit': 10**8}})
        reads = {name: self._open(url, name, leaf, context).read() for name, leaf in template.items()}
        return jax.block_until_ready({name: jax.device_put(read.result()) for name, read in reads.items()})


class _File:
    """A file that is made in memory and sent in one request: safetensors, or ZipNN's parts."""

    def __init__(self, name: str, pack: Callable[[_Tree], bytes], unpack: Callable[[bytes, _Tree], _Tree]):
        self.name, self._pack, self._unpack = name, pack, unpack

    def _bucket(self) -> ts.KvStore:
        return ts.KvStore.open({'driver': 'gcs', 'bucket': BUCKET}).result()

    def save(self, url: str, state: _Tree) -> None:
        """Sends the file."""
        self._bucket().write(url.removeprefix(f'gs://{BUCKET}/'), self._pack(state)).result()

    def restore(self, url: str, template: _Tree) -> _Tree:
        """Reads the file."""
        data = self._bucket().read(url.removeprefix(f'gs://{BUCKET}/')).result().value
        return jax.block_until_ready(jax.device_put(self._unpack(data, template)))


class _Saved:
    """t5ckpt, with its default size of chunks."""

    def __init__(self, name: str, compression: str | None):
        self.name, self._compression = name, compression

    def save(self, url: str, state: _Tree) -> None:
        """As users do, to a run with a step."""
        with t5ckpt.Checkpointer(
            state, checkpoints_dir=url, options=t5ckpt.CheckpointerOptions(compression=self._compression)
        ) as ck:
            ck.save(state, step=1)

    def begin(self, url: str) -> None:
        """Saves a small step, because the first save of a run looks for steps of other programs."""
        t5ckpt.Checkpointer({'x': 1}, checkpoints_dir=url).save({'x': 1}, step=0)

    def restore(self, url: str, template: _Tree) -> _Tree:
        """As users do."""
        with t5ckpt.Checkpointer(template, checkpoints_dir=url) as ck:
            return jax.block_until_ready(ck.restore())


def _safetensors() -> _File:
    import safetensors.flax

    def unpack(data: bytes, template: _Tree) -> _Tree:
        # safetensors.flax.load of 0.8.0 does not know bfloat16.
        start = 8 + int.from_bytes(data[:8], 'little')
        places = {name: np.add(start, entry['data_offsets']) for name, entry in json.loads(data[8:start]).items()}
        parts = {name: data[first:last] for name, (first, last) in places.items()}
        return {name: np.frombuffer(parts[name], leaf.dtype).reshape(leaf.shape) for name, leaf in template.items()}

    return _File('safetensors', safetensors.flax.save, unpack)


def _zipped() -> _File:
    import zipnn

    def codec(leaf: Any) -> Any:
        return zipnn.ZipNN(bytearray_dtype='bfloat16' if leaf.dtype == jnp.bfloat16 else 'float32')

    def pack(state: _Tree) -> bytes:
        parts = [codec(leaf).compress(bytearray(np.asarray(leaf).tobytes())) for leaf in state.values()]
        return b''.join(len(part).to_bytes(8, 'little') + part for part in parts)

    def unpack(data: bytes, template: _Tree) -> _Tree:
        found, start = {}, 0
        for name, leaf in template.items():
            end = start + 8 + int.from_bytes(data[start : start + 8], 'little')
            values = np.frombuffer(codec(leaf).decompress(data[start + 8 : end]), leaf.dtype)
            found[name], start = values.reshape(leaf.shape), end
        return found

    return _File('zipnn', pack, unpack)


def _stores() -> list[Any]:
    found: list[Any] = [_Saved('t5ckpt None', None), _Saved('t5ckpt default', 'default'), _Saved('t5ckpt zstd', 'zstd')]
    found += [_Arrays('orbax ocdbt', {'id': 'zstd', 'level': 1}, ocdbt=True), _Arrays('t5x zstd', {'id': 'zstd'})]
    found += [_Arrays('t5x gzip', {'id': 'gzip'}), _safetensors()]
    return [*found, _zipped()] if importlib.util.find_spec('zipnn') else found


def _divided(state: _Tree) -> _Tree:
    """The state with each leaf in several parts, as a model has many."""
    parts = max(1, _LEAVES // len(state))
    return {
        f'{name}_{number}': part
        for name, leaf in state.items()
        for number, part in enumerate(np.array_split(leaf, parts))
    }


def store(
    megabytes: int, rounds: int, names: Sequence[str], rates: Sequence[float], programs: Sequence[str] = _PROGRAMS
) -> None:
    """Each state with each peer at each rate."""
    with tempfile.TemporaryDirectory() as directory, light_store(pathlib.Path(directory)) as address:
        for rate in rates:
            for name in names:
                for peer in [each for each in _stores() if each.name.split()[0] in programs]:
                    least, sent, plain, asked = [float('inf')] * 2, 0, 0.0, ['', '']
                    for seed in range(rounds):
                        state = jax.block_until_ready(jax.device_put(_divided(STATES[name](megabytes, 10 * seed))))
                        template = _abstract(state)
                        url = f'gs://{BUCKET}/{name}{rate}{peer.name}{seed}'.replace(' ', '-')
                        if isinstance(peer, _Saved):
                            peer.begin(url)
                        counts(address, rate)
                        saved = _seconds(lambda peer=peer, url=url, state=state: peer.save(url, state))
                        counted = counts(address, rate)
                        sent, asked[0] = counted['sent'], _kinds(counted)
                        found: list[_Tree] = []
                        restored = _seconds(
                            lambda peer=peer, url=url, to=template, found=found: found.append(peer.restore(url, to))
                        )
                        _same(found[0], state)
                        asked[1] = _kinds(counts(address, rate, forget=True))
                        least = [min(least[0], saved), min(least[1], restored)]
                        plain = _nbytes(state) / rate if rate else 0.0
                    speeds = [f'{plain / seconds:5.2f}x' if plain else '' for seconds in least]
                    print(
                        f'{rate / 1e6:5.0f} MB/s {name:9} {peer.name:15} {sent / _nbytes(state):6.3f} of the bytes, '
                        f'save {least[0]:6.2f} s {speeds[0]} ({asked[0]}), restore {least[1]:6.2f} s {speeds[1]} ({asked[1]})',
                        flush=True,
                    )


def _kinds(counted: dict[str, int]) -> str:
    return ', '.join(f'{counted[kind]} {kind}' for kind in ('PUT', 'COPY', 'GET', 'LIST', 'DELETE') if kind in counted)


def main() -> None:
    """See the top."""
    megabytes, rounds, *words = (*sys.argv[1:], *('64', '1')[len(sys.argv) - 1 :])
    names = [word for word in words if word in STATES] or list(STATES)
    rates = [float(word) * 1e6 for word in words if word.isdecimal()] or [1e8, 1e9, 0.0]
    parts = [word for word in words if word in ('disk', 'store')] or ['disk', 'store']
    if 'disk' in parts:
        disk(int(megabytes), int(rounds), names)
    if 'store' in parts:
        store(int(megabytes), int(rounds), names, rates, [word for word in words if word in _PROGRAMS] or _PROGRAMS)


if __name__ == '__main__':
    main()

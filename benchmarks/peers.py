"""The checkpointers that are compared, each behind the same three calls and used the way its documentation shows.

Options stay at their defaults. A peer that needs to be told what to restore is told, as its documentation advises.
Objects a training loop would make once, like a checkpointer, are made once, outside the measured time.
"""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import functools
import os
from typing import TYPE_CHECKING, Any, ClassVar

import cases
import jax
import numpy as np

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    Wait = Callable[[], object]


class Peer(abc.ABC):
    """Saves and restores one kind of state under a directory of its own.

    Attributes:
        name: on the command line and in the results.
        label: in tables and plots.
        packages: what has to be installed.
        asynchronous: whether `save_async` exists and leaves the caller free to donate the state at once.
        only: the cases in which an option of t5ckpt makes a difference; empty for a peer of its own.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    asynchronous: ClassVar[bool] = False
    only: ClassVar[tuple[str, ...]] = ()

    def __init__(self, root: pathlib.Path, source: cases.Tree, target: cases.Tree):
        """`source` and `target` are the abstract states that are saved and restored."""
        self.root = root
        self.source = source
        self.target = target
        self.open()

    def at(self, step: int) -> pathlib.Path:
        """The directory of one checkpoint."""
        return self.root / f'checkpoint_{step}'

    def open(self) -> None:  # noqa: B027 - most peers make nothing once a training loop
        """Makes what a training loop makes once."""

    def close(self) -> None:  # noqa: B027
        """Releases it."""

    @abc.abstractmethod
    def save(self, state: cases.Tree, step: int) -> None:
        """Saves and returns when the peer says it is done."""

    def save_async(self, state: cases.Tree, step: int) -> Wait:
        """Starts a save; the result waits until the peer says it is done."""
        raise NotImplementedError(self.name)

    @abc.abstractmethod
    def restore(self, step: int) -> cases.Tree:
        """Restores to `target`."""


class T5ckpt(Peer):
    """This project."""

    name = 't5ckpt'
    label = 't5ckpt'
    packages = ('t5ckpt',)
    asynchronous = True
    options: ClassVar[dict[str, Any]] = {}

    def open(self) -> None:
        import t5ckpt

        make = functools.partial(
            t5ckpt.Checkpointer,
            checkpoints_dir=os.fspath(self.root),
            options=t5ckpt.CheckpointerOptions(**self.options),
        )
        self._writer = make(self.source)
        self._reader = self._writer if self.source is self.target else make(self.target)

    def close(self) -> None:
        self._writer.close()
        self._reader.close()

    def save(self, state: cases.Tree, step: int) -> None:
        self._writer.save(state, step=step)

    def save_async(self, state: cases.Tree, step: int) -> Wait:
        return self._writer.save_async(state, step=step).result

    def restore(self, step: int) -> cases.Tree:
        return self._reader.restore(step=step)


class T5ckptMapped(T5ckpt):
    """This project, restoring by mapping the files: pages are read when they are first used."""

    name = 't5ckpt-mapped'
    label = 't5ckpt, mmap=True'
    only = ('s1', 'big')
    options: ClassVar[dict[str, Any]] = {'mmap': True}


class T5ckptAuto(T5ckpt):
    """This project, compressing the leaves where a sample says that it pays."""

    name = 't5ckpt-auto'
    label = "t5ckpt, compression='auto'"
    only = ('zeros',)
    options: ClassVar[dict[str, Any]] = {'compression': 'auto'}


class OrbaxPyTree(Peer):
    """Orbax, `PyTreeCheckpointer`, and the `AsyncCheckpointer` that its documentation pairs with the same handler."""

    name = 'orbax-pytree'
    label = 'Orbax PyTreeCheckpointer'
    packages = ('orbax-checkpoint',)
    asynchronous = True

    def open(self) -> None:
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._blocking = ocp.PyTreeCheckpointer()
        self._async = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def close(self) -> None:
        self._blocking.close()
        self._async.close()

    def save(self, state: cases.Tree, step: int) -> None:
        self._blocking.save(self.at(step), state)

    def save_async(self, state: cases.Tree, step: int) -> Wait:
        self._async.save(self.at(step), args=self._ocp.args.PyTreeSave(state))
        return self._async.wait_until_finished

    def restore(self, step: int) -> cases.Tree:
        arguments = self._ocp.checkpoint_utils.construct_restore_args(self.target)
        return self._blocking.restore(self.at(step), item=self.target, restore_args=arguments)


class OrbaxStandard(Peer):
    """Orbax, `StandardCheckpointer`, which always saves in the background."""

    name = 'orbax-standard'
    label = 'Orbax StandardCheckpointer'
    packages = ('orbax-checkpoint',)
    asynchronous = True

    def open(self) -> None:
        import orbax.checkpoint as ocp

        self._checkpointer = ocp.StandardCheckpointer()

    def close(self) -> None:
        self._checkpointer.close()

    def save(self, state: cases.Tree, step: int) -> None:
        self.save_async(state, step)()

    def save_async(self, state: cases.Tree, step: int) -> Wait:
        self._checkpointer.save(self.at(step), state)
        return self._checkpointer.wait_until_finished

    def restore(self, step: int) -> cases.Tree:
        return self._checkpointer.restore(self.at(step), self.target)


class OrbaxV1(Peer):
    """Orbax, the functions of its v1 interface."""

    name = 'orbax-v1'
    label = 'Orbax v1'
    packages = ('orbax-checkpoint',)
    asynchronous = True

    def open(self) -> None:
        import orbax.checkpoint.experimental.v1 as ocp

        self._ocp = ocp

    def save(self, state: cases.Tree, step: int) -> None:
        self._ocp.save(self.at(step), state)

    def save_async(self, state: cases.Tree, step: int) -> Wait:
        return self._ocp.save_async(self.at(step), state).result

    def restore(self, step: int) -> cases.Tree:
        return self._ocp.load(self.at(step), self.target)


class JaxManager(Peer):
    """JAX's own `GlobalAsyncCheckpointManager`: one zarr array a leaf, and no tree, which its caller has to keep."""

    name = 'jax-manager'
    label = 'jax GlobalAsyncCheckpointManager'
    packages = ('tensorstore',)
    asynchronous = True

    def open(self) -> None:
        from jax.experimental.array_serialization import serialization

        self._manager = serialization.GlobalAsyncCheckpointManager()

    def save(self, state: cases.Tree, step: int) -> None:
        self.save_async(state, step)()

    def save_async(self, state: cases.Tree, step: int) -> Wait:
        flat = cases.flatten(state)
        being_written = self.at(step).with_suffix('.tmp')
        paths = [os.fspath(being_written / path) for path in flat]
        commit = functools.partial(being_written.rename, self.at(step))
        self._manager.serialize_with_paths(list(flat.values()), paths, on_commit_callback=commit)
        return self._manager.wait_until_finished

    def restore(self, step: int) -> cases.Tree:
        flat = cases.flatten(self.target)
        paths = [os.fspath(self.at(step) / path) for path in flat]
        known = [(leaf.sharding, leaf.shape, leaf.dtype) for leaf in flat.values()]
        shardings, shapes, dtypes = map(list, zip(*known, strict=True))
        arrays = self._manager.deserialize_with_paths(shardings, paths, shapes, dtypes)
        return cases.nest(dict(zip(flat, arrays, strict=True)))


class JaxPyTree(Peer):
    """JAX's own `pytree_serialization`.

    Its `nonblocking_save` reads the arrays after it has returned, so the caller must not donate them until the save is
    over: no asynchronous save in the sense of this comparison.
    """

    name = 'jax-pytree'
    label = 'jax pytree_serialization'
    packages = ('tensorstore', 'flatbuffers')

    def open(self) -> None:
        from jax.experimental.array_serialization import pytree_serialization

        self._module = pytree_serialization

    def save(self, state: cases.Tree, step: int) -> None:
        self._module.save(state, self.at(step))

    def restore(self, step: int) -> cases.Tree:
        return self._module.load(self.at(step), self.target)


class T5x(Peer):
    """What T5X does with sharded jax.Arrays: JAX's serialization per leaf, zarr with zstd, a chunk a shard, a manifest.

    T5X itself needs gin, seqio and TensorFlow to import. These are its calls, in its order, from `t5x/checkpoints.py`.
    """

    name = 't5x-zstd'
    label = 'T5X, zarr zstd'
    packages = ('tensorstore', 'flax')

    def save(self, state: cases.Tree, step: int) -> None:
        from flax import serialization

        being_written = self.at(step).with_suffix('.tmp')
        being_written.mkdir(parents=True)
        flat = cases.flatten(state)
        specs = {path: self._spec(path, leaf) for path, leaf in flat.items()}
        asyncio.run(self._write_all(being_written, flat, specs))
        manifest = serialization.msgpack_serialize({'version': 3, 'optimizer': cases.nest(specs)})
        (being_written / 'checkpoint').write_bytes(manifest)
        being_written.rename(self.at(step))

    def _spec(self, path: str, leaf: jax.Array) -> dict[str, Any]:
        return {
            'driver': 'zarr',
            'dtype': leaf.dtype.name,
            'kvstore': {'driver': 'file', 'path': path.replace('/', '.')},
            'metadata': self._metadata(leaf),
        }

    def _metadata(self, leaf: jax.Array) -> dict[str, Any]:
        chunks = [max(1, size) for size in leaf.sharding.shard_shape(leaf.shape)]
        return {'compressor': {'id': 'zstd'}, 'shape': list(leaf.shape), 'chunks': chunks}

    async def _write_all(self, directory: pathlib.Path, flat: cases.Tree, specs: cases.Tree) -> None:
        await asyncio.gather(*(self._write(leaf, _anchor(specs[path], directory)) for path, leaf in flat.items()))

    async def _write(self, leaf: jax.Array, spec: dict[str, Any]) -> None:
        from jax.experimental.array_serialization import serialization

        await serialization.async_serialize(leaf, spec)

    def restore(self, step: int) -> cases.Tree:
        from flax import serialization

        directory = self.at(step)
        manifest = serialization.msgpack_restore((directory / 'checkpoint').read_bytes())
        return asyncio.run(self._read_all(directory, manifest['optimizer']))

    async def _read_all(self, directory: pathlib.Path, specs: cases.Tree) -> cases.Tree:
        from jax.experimental.array_serialization import serialization

        async def read(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            *parents, name = path.split('/')
            node = functools.reduce(lambda tree, parent: tree[parent], parents, specs)
            spec = _anchor(node[name], directory)
            return await serialization.async_deserialize(leaf.sharding, spec, leaf.shape, leaf.dtype)

        flat = cases.flatten(self.target)
        arrays = await asyncio.gather(*(read(path, leaf) for path, leaf in flat.items()))
        return cases.nest(dict(zip(flat, arrays, strict=True)))


class T5xGzip(T5x):
    """What T5X does with leaves that are not jax.Arrays on save: gathered to the host, zarr with gzip, 64 MiB chunks."""

    name = 't5x-gzip'
    label = 'T5X, zarr gzip'

    def _metadata(self, leaf: jax.Array) -> dict[str, Any]:
        chunks = _greedy_chunks(leaf.shape, (64 << 20) // leaf.dtype.itemsize)
        return {'compressor': {'id': 'gzip'}, 'shape': list(leaf.shape), 'chunks': chunks}

    async def _write(self, leaf: jax.Array, spec: dict[str, Any]) -> None:
        import tensorstore as ts

        context = ts.Context({'file_io_concurrency': {'limit': 128}})
        store = await ts.open(spec, create=True, open=True, context=context)
        await store.write(np.asarray(leaf))


def _greedy_chunks(shape: tuple[int, ...], elements: int) -> list[int]:
    """T5X's rule: while the chunk is too large, its largest dimension goes down to that dimension's next divisor."""
    chunk = list(shape)
    while int(np.prod(chunk)) > elements:
        largest = chunk.index(max(chunk))
        chunk[largest] = next(n for n in range(chunk[largest] - 1, 0, -1) if shape[largest] % n == 0)
    return chunk


def _anchor(spec: dict[str, Any], directory: pathlib.Path) -> dict[str, Any]:
    """The relative spec of a manifest with an absolute path."""
    return spec | {'kvstore': spec['kvstore'] | {'path': os.fspath(directory / spec['kvstore']['path'])}}


class Safetensors(Peer):
    """Safetensors: one file. Arrays are gathered to the host to be saved, and each shard is read as a slice."""

    name = 'safetensors'
    label = 'safetensors'
    packages = ('safetensors',)

    def save(self, state: cases.Tree, step: int) -> None:
        from safetensors import flax

        self.at(step).mkdir(parents=True)
        flax.save_file(cases.flatten(state), self.at(step) / 'model.safetensors')

    def restore(self, step: int) -> cases.Tree:
        import safetensors

        flat = {}
        with safetensors.safe_open(self.at(step) / 'model.safetensors', framework='numpy') as file:
            for path, leaf in cases.flatten(self.target).items():
                part = file.get_slice(path)
                flat[path] = jax.make_array_from_callback(leaf.shape, leaf.sharding, part.__getitem__)
            jax.block_until_ready(flat)
        return cases.nest(flat)


class Limit(Peer):
    """Plain files: what the machine can do at most."""

    name = 'limit'
    label = 'raw files (the limit)'
    asynchronous = True

    def open(self) -> None:
        import limit

        self._raw = limit
        self._copy = jax.jit(lambda state: jax.tree.map(jax.numpy.copy, state))
        self._pool = concurrent.futures.ThreadPoolExecutor(1)

    def close(self) -> None:
        self._pool.shutdown()

    def save(self, state: cases.Tree, step: int) -> None:
        self._raw.write(self.at(step), state)

    def save_async(self, state: cases.Tree, step: int) -> Wait:
        return self._pool.submit(self._raw.write, self.at(step), self._copy(state)).result

    def restore(self, step: int) -> cases.Tree:
        return self._raw.read(self.at(step), self.target)


_OURS = (T5ckpt, T5ckptMapped, T5ckptAuto)
_OTHERS = (OrbaxPyTree, OrbaxStandard, OrbaxV1, JaxManager, JaxPyTree, T5x, T5xGzip, Safetensors, Limit)
PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (*_OURS, *_OTHERS)}
ORBAX = tuple(name for name in PEERS if name.startswith('orbax'))

"""Plans the save of a huge model as each of many hosts would, without hosts, devices or files.

    python benchmarks/scaling.py                                10 trillion parameters on 1,024 hosts of 8 devices
    python benchmarks/scaling.py --hosts 8 --tensor 8 --layers 2 --all     small, every host planned

The planner is the real one (`t5ckpt.planning.save_plan.plan_save`); what it is given are stand-ins that answer as jax.Array,
NamedSharding and Device do, because no machine has 8,192 devices to make real ones from. The state is a decoder with a
gated MLP and Adam's two moments, sharded over `fsdp` and `tensor` and replicated over `data`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import statistics
import sys
import time
from typing import Any

import numpy as np

from t5ckpt.format.array_spec import spec_of
from t5ckpt.format.dtypes import is_storable
from t5ckpt.format.manifest import encode_manifest
from t5ckpt.planning.save_plan import SaveOptions, SavePlan, plan_save, plan_text
from t5ckpt.planning.write_assignment import WriteAssignment
from t5ckpt.tree.leaf_table import unflatten
from t5ckpt.tree.leaves import leaves_to_save

_AXES = ('data', 'fsdp', 'tensor')
_DEVICES_PER_HOST = 8
# An entry of integrity.<process>.json: '"target.layers_100.mlp.wi_0/12.34":[4194304,"0123456789abcdef"],'
_INTEGRITY_BYTES = 70


@dataclasses.dataclass(frozen=True, eq=False)
class Device:
    """One of a host's devices."""

    process_index: int
    id: int


@dataclasses.dataclass(frozen=True, eq=False)
class Mesh:
    """As jax.sharding.Mesh."""

    devices: np.ndarray
    axis_names: tuple[str, ...] = _AXES


@dataclasses.dataclass(frozen=True)
class Sharding:
    """As jax.sharding.NamedSharding."""

    mesh: Mesh
    spec: tuple[Any, ...]

    @property
    def num_devices(self) -> int:
        return self.mesh.devices.size

    @property
    def device_set(self) -> list[Device]:
        return self.mesh.devices.flat

    def _parts(self, entry: Any) -> int:
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        return math.prod(self.mesh.devices.shape[_AXES.index(name)] for name in names)

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        spec = (*self.spec, *[None] * (len(shape) - len(self.spec)))
        return tuple(size // self._parts(entry) for size, entry in zip(shape, spec, strict=True))

    def index(self, shape: tuple[int, ...], position: tuple[int, ...]) -> tuple[slice, ...]:
        """What the device at a position of the mesh holds; each axis of the mesh divides one of the array at most."""
        found = []
        for size, part, entry in zip(shape, self.shard_shape(shape), (*self.spec, None, None), strict=False):
            at = 0 if entry is None else position[_AXES.index(entry)]
            found.append(slice(at * part, at * part + part) if part < size else slice(None))
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class Shard:
    """As jax.Shard, without data."""

    device: Device
    index: tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Array:
    """As a jax.Array on one host of many."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    own: tuple[tuple[Device, tuple[int, ...]], ...]
    is_fully_addressable = False
    committed = True

    @property
    def is_fully_replicated(self) -> bool:
        return not any(self.sharding.spec)

    @property
    def addressable_shards(self) -> list[Shard]:
        return [Shard(device, self.sharding.index(self.shape, position)) for device, position in self.own]

    def is_deleted(self) -> bool:
        return False


def leaves(layers: int, width: int, hidden: int, vocabulary: int) -> dict[str, tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Shape and PartitionSpec by name."""
    matrices = {'embedding': ((vocabulary, width), ('tensor', 'fsdp')), 'final_norm': ((width,), ())}
    for layer in range(layers):
        at = f'layers_{layer}'
        matrices |= {f'{at}/{name}_norm': ((width,), ()) for name in ('attention', 'mlp')}
        matrices |= {
            f'{at}/attention/{name}': ((width, width), ('fsdp', 'tensor')) for name in ('query', 'key', 'value')
        }
        matrices[f'{at}/attention/out'] = ((width, width), ('tensor', 'fsdp'))
        matrices |= {f'{at}/mlp/{name}': ((width, hidden), ('fsdp', 'tensor')) for name in ('wi_0', 'wi_1')}
        matrices[f'{at}/mlp/wo'] = ((hidden, width), ('tensor', 'fsdp'))
    return {f'{group}/{name}': leaf for group in ('target', 'state/mu', 'state/nu') for name, leaf in matrices.items()}


class World:
    """All hosts."""

    def __init__(
        self, hosts: int, shape: tuple[int, int, int], state: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]]
    ):
        devices = [Device(number // _DEVICES_PER_HOST, number) for number in range(hosts * _DEVICES_PER_HOST)]
        self.hosts = hosts
        self.mesh = Mesh(np.array(devices, object).reshape(shape))
        self.state = state
        self._processes = np.array([device.process_index for device in devices]).reshape(shape)

    def arrays(self, host: int) -> dict[tuple[str, ...], Array]:
        """The state, as one host sees it."""
        own = tuple((self.mesh.devices[tuple(at)], tuple(at.tolist())) for at in np.argwhere(self._processes == host))
        dtype = np.dtype(np.float32)
        shardings = {spec: Sharding(self.mesh, spec) for _, spec in self.state.values()}
        return {
            tuple(name.split('/')): Array(shape, dtype, shardings[spec], own)
            for name, (shape, spec) in self.state.items()
        }

    def plan(self, host: int, *, with_copies: bool = False) -> tuple[SavePlan, float]:
        """One host's plan, and the processor seconds it took, with the text that the hosts compare."""
        table = self.arrays(host)
        gc.collect()
        started = time.process_time()
        assignment = WriteAssignment(host, self.hosts, with_copies=with_copies)
        plan = plan_save(leaves_to_save(table, is_storable), {}, SaveOptions(), assignment)
        plan_text(plan, [])
        return plan, time.process_time() - started


def simulate(world: World, hosts: list[int]) -> dict[str, Any]:
    """Plans for some hosts and says what would be written."""
    seconds, nbytes, files = [], [], []
    plan = None
    for host in hosts:
        plan, took = world.plan(host)
        seconds.append(took)
        nbytes.append(sum(write.chunk_bytes * len(write.chunks) for write in plan.writes))
        files.append(sum(len(write.chunks) for write in plan.writes))
    if plan is None:
        raise ValueError('no host to plan for')
    files_by_directory = [write.array.grid.num_chunks for write in plan.writes]
    manifest = encode_manifest(unflatten({write.path: spec_of(write.array, 'file') for write in plan.writes}))
    return {
        'hosts': world.hosts,
        'devices': world.mesh.devices.size,
        'leaves': len(world.state),
        'parameters': sum(math.prod(shape) for name, (shape, _) in world.state.items() if name.startswith('target')),
        'state_bytes': sum(4 * math.prod(shape) for shape, _ in world.state.values()),
        'hosts_planned': len(hosts),
        'plan_seconds_median': statistics.median(seconds),
        'plan_seconds_max': max(seconds),
        'bytes_per_host_min': min(nbytes),
        'bytes_per_host_max': max(nbytes),
        'files_per_host_max': max(files),
        'files': sum(files_by_directory),
        'files_per_directory_max': max(files_by_directory),
        'directories': len(plan.writes),
        'manifest_bytes': len(manifest),
        'integrity_bytes_per_host': max(files) * _INTEGRITY_BYTES,
        'barriers': 2,
    }


def main() -> None:
    """Prints the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--hosts', type=int, default=1024)
    parser.add_argument('--replicas', type=int, default=2, help='length of the mesh axis data')
    parser.add_argument('--tensor', type=int, default=64, help='length of the mesh axis tensor')
    parser.add_argument('--layers', type=int, default=580)
    parser.add_argument('--width', type=int, default=32_768)
    parser.add_argument('--hidden', type=int, default=131_072)
    parser.add_argument('--all', action='store_true', help='plan for every host, not for 8 of them')
    options = parser.parse_args()
    devices = options.hosts * _DEVICES_PER_HOST
    if devices % (options.replicas * options.tensor):
        parser.error(f'{devices} devices do not divide by {options.replicas} replicas x {options.tensor} tensor parts')
    shape = (options.replicas, devices // options.replicas // options.tensor, options.tensor)
    world = World(options.hosts, shape, leaves(options.layers, options.width, options.hidden, 256_000))
    some = range(options.hosts) if options.all else np.linspace(0, options.hosts - 1, 8).astype(int).tolist()
    json.dump(simulate(world, list(some)), sys.stdout, indent=1)
    sys.stdout.write('\n')


if __name__ == '__main__':
    main()

"""What the processes of a job do to exchange boxes of arrays; as scenarios.py."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
import random
import shutil
import time

import jax
import numpy as np
import scenarios
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5ckpt.core.byte_budget import ByteBudget
from t5ckpt.format.dtypes import DTYPES
from t5ckpt.options import CheckpointerOptions
from t5ckpt.planning.casts import Cast
from t5ckpt.planning.leaf_choice import LeafPatterns
from t5ckpt.planning.restore_plan import RestoreOptions, plan_restore
from t5ckpt.reading.array_reader import ArrayReader, open_contents
from t5ckpt.reading.contents import leaves_of
from t5ckpt.storage import open_storage
from t5ckpt.tiers.exchange import plan_moves, read_with_moves
from t5ckpt.tree.leaves import explicit_transfers
from t5ckpt.tree.train_state import flatten_state, leaf_templates

# By leaf: the shape when it is saved and when it is restored, the dtype, and the axes; None is a host array.
LEAVES = {
    'both': ((64, 4096), (64, 4096), 'float32', ('data', 'model')),
    'rows': ((64, 512), (64, 512), 'bfloat16', ('model', None)),
    'columns': ((64, 512), (64, 512), 'int8', (None, 'model')),
    'data': ((6, 10_001), (6, 10_001), 'bool', ('data',)),
    'all': ((64, 511), (64, 511), 'float8_e4m3fn', (('model', 'data'),)),
    'everywhere': ((501, 701), (501, 701), 'uint16', ()),
    'nibbles': ((64, 128), (64, 128), 'int4', ('data', 'model')),
    'odd': ((3, 5), (3, 5), 'int32', ()),
    'part': ((64, 1000), (64, 1000), 'uint32', ('part',)),
    'mixed': ((64, 1000), (64, 1000), 'float32', ('mixed',)),
    'one': ((200, 100), (200, 100), 'float16', ('one',)),
    'longer': ((48, 1000), (80, 1000), 'float32', ('model', None)),
    'shorter': ((80, 1000), (48, 900), 'float32', ('data', 'model')),
    'cast': ((64, 1000), (64, 1000), 'float32', ('model',)),
    'host': ((300, 300), (300, 300), 'float64', None),
}


def _values(name):
    shape, dtype = LEAVES[name][0], DTYPES[LEAVES[name][2]]
    rng = np.random.default_rng([*name.encode()])
    if name == 'cast' or dtype.itemsize == 8:
        return rng.standard_normal(shape).astype(dtype)
    if LEAVES[name][2] in ('bool', 'int4'):
        return rng.integers(0, 2, shape).astype(dtype)
    # All bits: also NaNs with payloads.
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def _restored(name):
    """The values that the restored leaf has."""
    values, shape = _values(name), LEAVES[name][1]
    if name == 'cast':
        return values.astype(DTYPES['bfloat16'])
    found = np.zeros(shape, values.dtype)
    common = tuple(slice(min(sizes)) for sizes in zip(values.shape, shape, strict=True))
    found[common] = values[common]
    return found


def _sharding(axes):
    devices = np.array(jax.devices())
    if axes == ('part',):
        return NamedSharding(Mesh(devices[1:5], ('part',)), PartitionSpec(*axes))
    if axes == ('mixed',):
        # Process 0 has the first two quarters, process 1 the first and the third, process 2 the second and the third.
        pairs = devices[[0, 2, 1, 4, 3, 5, 6, 7]].reshape(4, 2)
        return NamedSharding(Mesh(pairs, ('mixed', 'twice')), PartitionSpec(*axes))
    if axes == ('one',):
        return NamedSharding(Mesh(devices[6:], ('one',)), PartitionSpec(*axes))
    return NamedSharding(scenarios.mesh(), PartitionSpec(*axes))


def _saved():
    """The state that is saved."""
    tree = {}
    for name, (shape, _, _, axes) in LEAVES.items():
        values = _values(name)
        tree[name] = (
            values
            if axes is None
            else jax.make_array_from_callback(
                shape, _sharding(axes), lambda index, values=values: values[index], dtype=values.dtype
            )
        )
    return {'target': tree}


def _template():
    return {
        'target': {
            name: np.zeros(shape)
            if axes is None
            else jax.ShapeDtypeStruct(shape, DTYPES['bfloat16' if name == 'cast' else dtype], sharding=_sharding(axes))
            for name, (_, shape, dtype, axes) in LEAVES.items()
        }
    }


def _reads(directory):
    """The contents of the step, and what the template needs of it."""
    contents = open_contents(directory, 1, None, CheckpointerOptions())
    template = _template()
    view = flatten_state(template)
    leaves, tree_facts = leaves_of(contents, (), template)
    options = RestoreOptions(
        Cast.of('bfloat16', 'target/cast', 'restore_dtype'),
        keys=tree_facts.keys,
        resize=LeafPatterns(['target/longer', 'target/shorter'], 'resize'),
    )
    return contents, plan_restore(leaves, leaf_templates(view, template, None), options, 'here').stored


def exchange_save(directory, disks):
    """Saves a step, and copies to the disk of this process what it needs of it."""
    with scenarios.checkpointer(directory, _saved(), inline_bytes=16, chunk_bytes=50_000) as ck:
        ck.save(_saved(), step=1)
    _, reads = _reads(directory)
    assert {read.path[-1] for read in reads} == {*LEAVES}
    disk = pathlib.Path(disks[jax.process_index()])
    for read in reads:
        for file in [f'{read.leaf.location}/.zarray', *read.chunk_files(whole=False)]:
            (disk / 'checkpoint_1' / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(f'{directory}/checkpoint_1/{file}', disk / 'checkpoint_1' / file)


def exchange_restore(directory, roles, lacks, budget, mesh, leaves, disk):
    """Restores from the disks; what was moved, and the seconds."""
    contents, reads = _reads(directory)
    reads = [read for read in reads if read.path[-1] in leaves]
    index, count = jax.process_index(), jax.process_count()
    reader = ArrayReader(
        dataclasses.replace(contents.located, storage=open_storage(disk)), checksums=contents.read_checksums
    )
    moves, missing = plan_moves(
        reads,
        {int(role): process for role, process in roles.items()},
        {int(role): lacks[role] for role in lacks},
        count,
    )
    if missing:
        return {'missing': missing}
    done = [(0, 0)]
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if mesh:
            stack.enter_context(jax.set_mesh(scenarios.mesh()))
            stack.enter_context(jax.transfer_guard('disallow'))
        stack.enter_context(explicit_transfers())
        values = read_with_moves(reader, reads, moves, index, ByteBudget(budget), lambda *each: done.append(each))
    seconds = time.monotonic() - began
    assert done[-1][0] == done[-1][1] > 0
    assert {path[-1] for path in values} == {*leaves}
    for path, value in values.items():
        expected = _restored(path[-1])
        if isinstance(value, np.ndarray):
            assert value.tobytes() == expected.tobytes(), path
            # It keeps no memory of other leaves.
            assert value.base is None or value.base.nbytes < 2 * value.nbytes
            continue
        assert value.shape == expected.shape
        for shard in value.addressable_shards:
            assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes(), path
    return {
        'missing': missing,
        'pairs': sorted({(move.source, move.target) for move in moves}),
        'received': sum(move.nbytes for move in moves if move.target == index),
        'seconds': seconds,
    }


def exchange_plans(directory, first, plans):
    """Plans the moves of disks that are anywhere, and lack anything; the digest of all plans."""
    _, reads = _reads(directory)
    count = jax.process_count()
    digest = hashlib.sha256()
    needs = [read.source_boxes_by_process(count) for read in reads]
    assert [needs[leaf][jax.process_index()] for leaf in range(len(reads))] == [read.source_boxes for read in reads]
    for seed in range(first, first + plans):
        rng = random.Random(seed)
        roles = dict(zip(range(count), rng.sample(range(count), count), strict=True))
        for role in rng.sample(range(count), rng.choice([0, 0, 1, 2, count])):
            del roles[role]
        often = rng.choice([0, 0.2, 0.7])
        lacks = {role: {read.leaf.location for read in reads if rng.random() < often} for role in roles}
        moves, missing = plan_moves(reads, roles, lacks, count)
        _check_plan(reads, needs, roles, lacks, moves, missing)
        digest.update(repr((moves, missing)).encode())
    return digest.hexdigest()


def _check_plan(reads, needs, roles, lacks, moves, missing):
    role_at = {process: role for role, process in roles.items()}
    has = [
        {
            role: set(boxes)
            for role, boxes in enumerate(needs[leaf])
            if role in roles and read.leaf.location not in lacks[role]
        }
        for leaf, read in enumerate(reads)
    ]
    moved = {(move.leaf, move.box, move.target): move for move in moves}
    assert len(moved) == len(moves)
    assert [move.leaf for move in moves] == sorted(move.leaf for move in moves)
    lost = set()
    for leaf, read in enumerate(reads):
        for process, boxes in enumerate(needs[leaf]):
            for box in boxes:
                move = moved.pop((leaf, box, process), None)
                is_own = box in has[leaf].get(role_at.get(process), ())
                is_lost = not any(box in held for held in has[leaf].values())
                assert (move is None) == (is_own or is_lost)
                lost |= {read.name} if is_lost else set()
                if move is not None:
                    role = role_at[move.source]
                    assert box in has[leaf][role]
                    assert move.nbytes == box.size * read.dtype.itemsize
                    # The disk that this process wrote is the first choice.
                    assert role == process or box not in has[leaf].get(process, ())
    assert not moved
    assert sorted(missing) == sorted(lost)

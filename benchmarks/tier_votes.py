"""The votes of 1,024 hosts with local directories, at a save and at a restart: bytes and seconds, with the real planner.

    python benchmarks/tier_votes.py                        a tenth of the layers of scaling.py, and one lost disk
    python benchmarks/tier_votes.py --layers 580           all of them
    python benchmarks/tier_votes.py --clients 256          the rounds of a save and of a restart, with real clients

The model has 1.0 trillion parameters in 58 layers, where that of scaling.py has 10 trillion in 580. Each shard is on two hosts.
Three hosts are planned: host 0, whose disk is lost, host 512, which has the same shards, and host 256, which stands for the other
1,022. Of the chunks of host 0, these have only those that are on all hosts. Seconds are those of a processor:

    state                    what is saved
    save                     the facts that process 0 sends to all
    restart                  all disks are intact. The votes say which steps a disk has; process 0 decides (``decide_seconds``)
    restart_with_a_lost_disk
        map                  each disk reports its chunks as a bitmap, which takes a process ``map_seconds_per_disk``
        merge                process 0 computes their union
        need                 what host 0 lacks, its own vote, which process 0 sends to all
        offer                each process reports which of these chunks it has
        plan                 process 0 assigns the chunks to senders; ``plan_bytes`` are their bitmaps, of which each gets its own

With ``--clients``, each host is a thread with its own client of JAX's coordination service on the loopback, so the seconds until
the last client has ended are those of all hosts on one machine. The service is in another process than the clients:
``service_seconds`` are the processor seconds of its process, and the bytes are those that its sockets send, with gRPC's
compression. 1,024 clients are 4,000 threads, which two cores do not run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scaling import World, leaves

from t5ckpt.distributed.processes import _Coordinated
from t5ckpt.distributed.rounds import Channel, Phase
from t5ckpt.planning.save_plan import SavePlan
from t5ckpt.tiers.coverage import (
    ChunkNumbers,
    DiskStep,
    candidates,
    decode_bits,
    encode_bits,
    num_bits,
    plan_sends,
    union,
)

# What the facts record for each process, see ``FileChecksums.to_json``.
_LIST_BYTES = 60
_TIMEOUT = 600


@dataclasses.dataclass(frozen=True)
class Model:
    """The job and its state.

    Attributes:
      hosts: of eight devices.
      replicas, tensor: lengths of the mesh axes ``data`` and ``tensor``; the rest is ``fsdp``.
      layers: of the decoder.
    """

    hosts: int = 1024
    replicas: int = 2
    tensor: int = 64
    layers: int = 58

    def world(self) -> World:
        """All hosts."""
        shape = (self.replicas, self.hosts * 8 // self.replicas // self.tensor, self.tensor)
        return World(self.hosts, shape, leaves(self.layers, 32_768, 131_072, 256_000))


SHORT = Model(hosts=8, tensor=8, layers=2)


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """The result of an action, and its processor seconds."""
    started = time.process_time()
    result = action()
    return result, round(time.process_time() - started, 3)


def files_of(plan: SavePlan) -> list[str]:
    """The chunk files on a host's disk."""
    return [file for write in plan.writes for file in write.chunk_files]


def simulate(world: World, replica: int, other: int) -> dict[str, Any]:
    """The votes of a restart.

    Args:
      world: all hosts; the disk of the first is lost.
      replica: the host that has the same shards.
      other: a host that stands for all others.
    """
    lost, *rest = (world.plan(host, with_copies=True)[0] for host in (0, replica, other))
    numbers = ChunkNumbers({write.array.location: write.array.grid for write in lost.writes})
    facts = [
        DiskStep('0' * 16, host, world.hosts, ((host, world.hosts),), world.hosts, 1.7e9 + 0.125)
        for host in range(world.hosts)
    ]
    looks = [json.dumps([part.vote(1000), part.vote(2000)]) for part in facts]
    found, deciding = timed(lambda: candidates(dict(map(DiskStep.of, json.loads(text))) for text in looks))
    assert not found[0].missing
    return {
        'state': {
            'hosts': world.hosts,
            'parameters': sum(
                math.prod(shape) for name, (shape, _) in world.state.items() if name.startswith('target')
            ),
            'arrays': len(world.state),
            'chunks': numbers.count,
            'chunks_per_disk': len(files_of(lost)),
        },
        'save': {
            'facts_bytes_per_process': world.hosts * _LIST_BYTES,
            'facts_bytes': world.hosts**2 * _LIST_BYTES,
        },
        'restart': {
            'vote_bytes_per_disk': max(map(len, looks)),
            'vote_bytes': sum(map(len, looks)),
            'decide_seconds': deciding,
        },
        'restart_with_a_lost_disk': _with_a_lost_disk(world.hosts, numbers, files_of(lost), replica, rest),
    }


def _with_a_lost_disk(
    hosts: int, numbers: ChunkNumbers, lost: list[str], replica: int, plans: list[SavePlan]
) -> dict[str, Any]:
    """The further votes; ``plans`` are those of the replica and of another host."""
    made = [timed(lambda plan=plan: encode_bits(numbers.bits(files_of(plan)))) for plan in plans]
    of_replica, of_other = (text for text, _ in made)
    maps = ['', *(of_replica if host == replica else of_other for host in range(1, hosts))]
    _, merging = timed(lambda: union(maps, numbers.count))
    lacking = numbers.bits(lost)
    need = encode_bits(lacking)

    def offer_of(text: str) -> str:
        return encode_bits(decode_bits(text, numbers.count) & lacking)

    offer_of_replica, offer_of_other = offer_of(of_replica), offer_of(of_other)
    offers = ['', *(offer_of_replica if host == replica else offer_of_other for host in range(1, hosts))]
    plan, planning = timed(lambda: plan_sends(lacking, offers, numbers.count))
    return {
        'map_bytes_per_disk': max(map(len, maps)),
        'map_bytes': sum(map(len, maps)),
        'map_seconds_per_disk': max(seconds for _, seconds in made),
        'merge_seconds': merging,
        'need_bytes': len(need),
        'need_bytes_sent': hosts * len(need),
        'offer_bytes_of_replica': len(offer_of_replica),
        'offer_bytes_of_others': len(offer_of_other),
        'offer_bytes': sum(map(len, offers)),
        'plan_seconds': planning,
        'plan_bytes': sum(map(len, plan.sends)),
        'senders': sum(map(bool, plan.sends)),
        'chunks_lacking': num_bits(lacking),
        'chunks_nowhere': num_bits(plan.nowhere),
    }


def sent(port: int) -> int:
    """The bytes that the sockets of this process at a port have sent, from the kernel's tcpi_bytes_acked."""
    total = 0
    for name in os.listdir('/proc/self/fd'):
        try:
            if not os.readlink(f'/proc/self/fd/{name}').startswith('socket:'):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                is_service = each.family in (socket.AF_INET, socket.AF_INET6) and each.getsockname()[1] == port
                if is_service and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0:
                    info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += int.from_bytes(info[120:128], 'little')
        except OSError:
            continue
    return total


def _connected(port: int, count: int) -> list[Any]:
    """The clients of the service at a port."""
    from jax._src.lib import _jax

    clients = [
        _jax.get_distributed_runtime_client(
            f'127.0.0.1:{port}',
            index,
            init_timeout=_TIMEOUT,
            use_compression=True,
            heartbeat_timeout=_TIMEOUT,
            shutdown_on_destruction=False,
        )
        for index in range(count)
    ]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda client: client.connect(), clients))
    return clients


def save(channel: Channel, lists: Mapping[str, list[Any]]) -> None:
    """The rounds of ``save/parts.py``."""
    at = channel.round('a save')
    at.reduce_on_leader(Phase.PLAN, {'plan': '0' * 16, 'is_free': True}, lambda _: {'codecs': {}})
    vote = {'checksums': [10**6, '0' * 16], 'bytes': 10**9, 'files': 14_319, 'manifest': '0' * 16}
    at.reduce_on_leader(Phase.WRITE, vote, lambda _: at.share('facts', json.dumps(lists).encode()) and None)
    at.receive('facts')
    at.reduce_on_leader(Phase.COMMIT, None, lambda _: None)


def restart(channel: Channel, index: int, count: int) -> None:
    """The rounds of a restart with intact disks: the join, the choice of the step, the needs, and the end."""
    positions = ((index, count), ((index + count // 2) % count, count))
    part = DiskStep('0' * 16, index, count, positions, count, 1.7e9 + 0.125)
    votes, saves = [part.vote(1000), part.vote(2000)], [[1000, '0' * 16], [2000, '0' * 16]]
    joined = {'id': ['0' * 16, True], 'saves': saves, 'replaced': [], 'waiting': [], 'parts': votes}
    channel.round('the join').reduce_on_leader(Phase.LOOK, joined, lambda _: {'id': '0' * 16})

    def decide(votes: Any) -> int:
        return len(candidates(dict(map(DiskStep.of, vote)) for vote in votes))

    channel.round('the choice').reduce_on_leader(Phase.LOOK, votes, decide)
    at = channel.round('a restore')
    at.reduce_on_leader(Phase.NEED, ['', None], lambda _: None)
    at.reduce_on_leader(Phase.RESTORE, None, lambda _: None)


def _coordinate(port: int, count: int, pipe: Any, turns: int = 3) -> None:
    """The process of the clients. Asks the process of the service for its numbers before and after each turn."""

    def spent() -> np.ndarray:
        pipe.send(None)
        return np.array([time.perf_counter(), *pipe.recv()])

    clients = _connected(port, count)
    lists = {f'integrity.{index}.json': [10**6 + index, secrets.token_hex(8)] for index in range(count)}
    channels = [Channel(_Coordinated(index, count, each), 'bench', _TIMEOUT) for index, each in enumerate(clients)]
    found: dict[str, Any] = {'clients': count, 'facts_bytes_per_process': len(json.dumps(lists))}
    actions = {
        'save': lambda index: save(channels[index], lists),
        'restart': lambda index: restart(channels[index], index, count),
    }
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for name, action in actions.items():
            differences = list[np.ndarray]()
            for _ in range(turns):
                before = spent()
                list(pool.map(action, range(count)))
                differences.append(spent() - before)
            seconds, nbytes, processor = np.median(differences, axis=0).tolist()
            found[name] = {'seconds': round(seconds, 3), 'service_seconds': round(processor, 3), 'bytes': round(nbytes)}
    pipe.send(found)
    # The clients are not closed one by one, which would take minutes.
    os._exit(0)


def coordinate(count: int) -> dict[str, Any]:
    """The rounds with real clients."""
    from jax._src.lib import _jax

    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    service = _jax.get_distributed_runtime_service(
        f'127.0.0.1:{port}', count, heartbeat_timeout=_TIMEOUT, shutdown_timeout=1
    )
    context = multiprocessing.get_context('spawn')
    pipe, other = context.Pipe()
    process = context.Process(target=_coordinate, args=(port, count, other))
    process.start()
    other.close()
    while (found := pipe.recv()) is None:
        pipe.send((sent(port), time.process_time()))
    process.join()
    service.shutdown()
    return found


def table(found: dict[str, Any], of_clients: dict[str, Any]) -> list[str]:
    """The lines of a table in Markdown."""
    state, save_, restart_, lost = (found[key] for key in ('state', 'save', 'restart', 'restart_with_a_lost_disk'))
    count = of_clients['clients']
    made = [
        (
            f'Votes of {state["hosts"]:,} hosts, simulated ({state["parameters"] / 1e12:.1f} trillion parameters, '
            f'{state["chunks"]:,} chunks, {state["chunks_per_disk"]:,} on each disk); seconds are those of a processor:'
        ),
        '',
        '| votes and notes | each | all | seconds |',
        '|---|---:|---:|---:|',
        f'| a save: the facts | {_size(save_["facts_bytes_per_process"])} | {_size(save_["facts_bytes"])} | |',
        (
            f'| a restart: the steps on each disk | {_size(restart_["vote_bytes_per_disk"])} | {_size(restart_["vote_bytes"])} '
            f'| {restart_["decide_seconds"]:.3f} to decide |'
        ),
        (
            f'| with a lost disk: the chunks on each disk | {_size(lost["map_bytes_per_disk"])} | {_size(lost["map_bytes"])} '
            f'| {lost["map_seconds_per_disk"]:.2f} each, {lost["merge_seconds"]:.2f} to merge |'
        ),
        f'| what the new disk lacks, from process 0 | {_size(lost["need_bytes"])} | {_size(lost["need_bytes_sent"])} | |',
        f'| which of these chunks each disk has | {_size(lost["offer_bytes_of_others"])} | {_size(lost["offer_bytes"])} | |',
        (
            f'| who sends which, from process 0 to {lost["senders"]} senders | | {_size(lost["plan_bytes"])} '
            f'| {lost["plan_seconds"]:.2f} to plan |'
        ),
        '',
        f'The rounds with {count} real clients on this machine:',
        '',
        '| rounds | sent by process 0 | seconds of all on this machine | processor seconds of the service |',
        '|---|---:|---:|---:|',
    ]
    made += [
        f'| {name} | {_size(row["bytes"])} | {row["seconds"]:.2f} | {row["service_seconds"]:.2f} |'
        for name, row in ((name, of_clients[name]) for name in ('save', 'restart'))
    ]
    return made


def _size(nbytes: int) -> str:
    if nbytes < 1000:
        return f'{nbytes} B'
    return f'{nbytes / 1e3:.1f} kB' if nbytes < 1e6 else f'{nbytes / 1e6:.2f} MB'


def run(model: Model, clients: int) -> tuple[list[str], dict[str, Any]]:
    """Computes the votes and measures the rounds; the lines of the tables, and the numbers."""
    found, of_clients = simulated(model), coordinate(clients)
    return table(found, of_clients), {**found, 'clients': of_clients}


def simulated(model: Model) -> dict[str, Any]:
    """:func:`simulate` without the first disk."""
    return simulate(model.world(), model.hosts // model.replicas, model.hosts // 4)


def main() -> None:
    """Prints the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--hosts', type=int, default=1024)
    parser.add_argument('--replicas', type=int, default=2, help='length of the mesh axis data')
    parser.add_argument('--tensor', type=int, default=64, help='length of the mesh axis tensor')
    parser.add_argument('--layers', type=int, default=58)
    parser.add_argument(
        '--clients', type=int, default=0, help='real clients of the coordination service; 0 for the planner alone'
    )
    options = parser.parse_args()
    if options.clients:
        found = coordinate(options.clients)
    else:
        found = simulated(Model(options.hosts, options.replicas, options.tensor, options.layers))
    json.dump(found, sys.stdout, indent=1)
    sys.stdout.write('\n')


if __name__ == '__main__':
    main()

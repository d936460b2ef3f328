"""The votes of 1,024 hosts with local directories, at a save and at a restart: bytes and seconds, with the real planner.

    python benchmarks/tier_votes.py                     a tenth of the model of scaling.py, and one lost disk
    python benchmarks/tier_votes.py --hosts 8 --tensor 8 --layers 2
    python benchmarks/tier_votes.py --clients 1024      the rounds of a save and of a restart, with real clients

Some hosts are planned, and the others vote as these do. Seconds are those of the processor of process 0, without the network.
With ``--clients``, each host is a thread of this process with its own client of JAX's coordination service on the loopback, so
the seconds are those of all hosts on one machine. The bytes are those that the service in process 0 sends, with its compression.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import secrets
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

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

# What a sidecar has for each process, see ``FileChecksums.to_json``.
_LIST_BYTES = 60


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """The result of an action, and its processor seconds."""
    started = time.process_time()
    result = action()
    return result, round(time.process_time() - started, 3)


def files_of(plan: SavePlan) -> list[str]:
    """The chunk files on a host's disk."""
    return [file for write in plan.writes for file in write.chunk_files]


def simulate(world: World, hosts: list[int]) -> dict[str, Any]:
    """The votes of a restart without disk 0, whose chunks are on the disks of replicas."""
    plans = [world.plan(host, with_copies=True)[0] for host in hosts]
    grids = {write.array.location: write.array.grid for write in plans[0].writes}
    numbers, numbering = timed(lambda: ChunkNumbers(grids))
    facts = [
        DiskStep('0' * 16, host, world.hosts, ((host, world.hosts),), world.hosts) for host in range(1, world.hosts)
    ]
    looks = [json.dumps([part.vote(1000), part.vote(2000)]) for part in facts]
    found, looking = timed(lambda: candidates(dict(map(DiskStep.of, json.loads(text))) for text in looks))
    maps, encoding = zip(
        *(timed(lambda plan=plan: encode_bits(numbers.bits(files_of(plan)))) for plan in plans), strict=True
    )
    # Disk 0 is lost. Its replica is planned as the last host of ``hosts``, so that the union of those that are planned has it.
    votes = ['', *(maps[1 + number % (len(maps) - 1)] for number in range(world.hosts - 1))]
    merged, merging = timed(lambda: union(votes, numbers.count))
    lacking = numbers.bits(files_of(plans[0]))
    need = encode_bits(lacking)
    having = ['' if not vote else encode_bits(decode_bits(vote, numbers.count) & lacking) for vote in maps]
    offers = ['', *(having[1 + number % (len(having) - 1)] for number in range(world.hosts - 1))]
    plan, planning = timed(lambda: plan_sends(lacking, offers, numbers.count))
    return {
        'hosts': world.hosts,
        'leaves': len(world.state),
        'chunks': numbers.count,
        'chunks_per_disk': len(files_of(plans[0])),
        'hosts_planned': len(hosts),
        'candidates': len(found),
        'missing_indices': len(found[0].missing),
        'sidecar_bytes_to_each_per_save': world.hosts * _LIST_BYTES,
        'restart': {
            'look_bytes_per_disk': max(map(len, looks)),
            'look_bytes': sum(map(len, looks)),
            'look_seconds': looking,
        },
        'restart_with_a_lost_disk': {
            'number_seconds': numbering,
            'map_bytes_per_disk': max(map(len, maps)),
            'map_bytes': sum(map(len, votes)),
            'map_seconds_per_disk': statistics.median(encoding),
            'merge_seconds': merging,
            'chunks_found': num_bits(merged),
            'need_bytes': len(need),
            'send_plan_seconds': planning,
            'send_plan_bytes': sum(map(len, plan.sends)),
            'chunks_nowhere': num_bits(plan.nowhere),
        },
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


def connected(count: int) -> tuple[Any, list[Any], int]:
    """A coordination service, its clients, and its port."""
    from jax._src.lib import _jax

    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    address = f'127.0.0.1:{port}'
    timeout = 600
    service = _jax.get_distributed_runtime_service(address, count, heartbeat_timeout=timeout, shutdown_timeout=5)
    make = _jax.get_distributed_runtime_client
    clients = [
        make(
            address,
            index,
            init_timeout=timeout,
            use_compression=True,
            heartbeat_timeout=timeout,
            shutdown_on_destruction=False,
        )
        for index in range(count)
    ]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda client: client.connect(), clients))
    return service, clients, port


def save(channel: Channel, lists: dict[str, list[Any]]) -> None:
    """The rounds of ``save/parts.py``."""
    at = channel.round('a save')
    at.reduce_on_leader(Phase.PLAN, {'plan': '0' * 16, 'is_free': True}, lambda _: {'codecs': {}})
    vote = {'checksums': [10**6, '0' * 16], 'bytes': 10**9, 'files': 14_319, 'manifest': '0' * 16}
    at.reduce_on_leader(Phase.WRITE, vote, lambda _: at.share('sidecar', json.dumps(lists).encode()) and None)
    at.receive('sidecar')
    at.reduce_on_leader(Phase.COMMIT, None, lambda _: None)


def restart(channel: Channel, index: int, count: int) -> None:
    """The rounds of a restart with intact disks: opening, the look, the check of the parts, and the needs."""
    at = channel.round('opening')
    at.reduce_on_leader(Phase.LOOK, {'id': ['0' * 16, True], 'waiting': []}, lambda _: {'id': '0' * 16})
    at.reduce_on_leader(Phase.COMMIT, None, lambda _: None)
    part = DiskStep('0' * 16, index, count, ((index, count), ((index + count // 2) % count, count)), count)

    def decide(votes: Any) -> int:
        return len(candidates(dict(map(DiskStep.of, vote)) for vote in votes))

    channel.round('the look').reduce_on_leader(Phase.LOOK, [part.vote(1000), part.vote(2000)], decide)
    channel.round('a restore').reduce_on_leader(Phase.LOOK, False, any)
    at = channel.round('a restore')
    at.reduce_on_leader(Phase.NEED, ['', None], lambda _: None)
    at.reduce_on_leader(Phase.RESTORE, None, lambda _: None)


def coordinate(clients: list[Any], port: int, turns: int = 3) -> dict[str, Any]:
    """The rounds with real clients: the seconds until the last one has ended, and the bytes that the service has sent."""
    count = len(clients)
    lists = {f'integrity.{index}.json': [10**6 + index, secrets.token_hex(8)] for index in range(count)}
    channels = [Channel(_Coordinated(index, count, each), 'bench', 600.0) for index, each in enumerate(clients)]
    found: dict[str, Any] = {'clients': count, 'sidecar_bytes': len(json.dumps(lists))}
    actions = {
        'save': lambda index: save(channels[index], lists),
        'restart': lambda index: restart(channels[index], index, count),
    }
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for name, action in actions.items():
            seconds, nbytes = list[float](), list[int]()
            for _ in range(turns):
                began, before = time.perf_counter(), sent(port)
                list(pool.map(action, range(count)))
                seconds.append(round(time.perf_counter() - began, 3))
                nbytes.append(sent(port) - before)
            found |= {f'{name}_seconds': statistics.median(seconds), f'{name}_bytes': statistics.median(nbytes)}
    return found


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
        _service, clients, port = connected(options.clients)
        json.dump(coordinate(clients, port), sys.stdout, indent=1)
        sys.stdout.write('\n')
        sys.stdout.flush()
        # A client whose service has ended aborts the process, so the service is kept until here.
        os._exit(0)
    devices = options.hosts * 8
    shape = (options.replicas, devices // options.replicas // options.tensor, options.tensor)
    world = World(options.hosts, shape, leaves(options.layers, 32_768, 131_072, 256_000))
    # The first, one in the middle, and the replica of the first.
    hosts = [0, options.hosts // 4, options.hosts // options.replicas]
    json.dump(simulate(world, hosts), sys.stdout, indent=1)
    sys.stdout.write('\n')


if __name__ == '__main__':
    main()

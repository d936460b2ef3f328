"""The votes of 1,024 hosts with local directories, at a save and at a restart: bytes and seconds, with the real planner.

    python benchmarks/tier_votes.py                     a tenth of the model of scaling.py, and one lost disk
    python benchmarks/tier_votes.py --hosts 8 --tensor 8 --layers 2

Some hosts are planned, and the others vote as these do. Seconds are those of the processor of process 0, without the network.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from scaling import World, leaves

from t5ckpt.planning.save_plan import SavePlan
from t5ckpt.tiers.coverage import (
    ChunkNumbers,
    DiskStep,
    candidates,
    decode_bits,
    encode_bits,
    num_bits,
    plan_gifts,
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
    facts = [DiskStep('0' * 16, host, world.hosts, ((host, world.hosts),)) for host in range(1, world.hosts)]
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
    gives = ['', *(having[1 + number % (len(having) - 1)] for number in range(world.hosts - 1))]
    gifts, giving = timed(lambda: plan_gifts(lacking, gives, numbers.count))
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
            'give_seconds': giving,
            'give_bytes': sum(map(len, gifts.gives)),
            'chunks_nowhere': num_bits(gifts.nowhere),
        },
    }


def main() -> None:
    """Prints the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--hosts', type=int, default=1024)
    parser.add_argument('--replicas', type=int, default=2, help='length of the mesh axis data')
    parser.add_argument('--tensor', type=int, default=64, help='length of the mesh axis tensor')
    parser.add_argument('--layers', type=int, default=58)
    options = parser.parse_args()
    devices = options.hosts * 8
    shape = (options.replicas, devices // options.replicas // options.tensor, options.tensor)
    world = World(options.hosts, shape, leaves(options.layers, 32_768, 131_072, 256_000))
    # The first, one in the middle, and the replica of the first.
    hosts = [0, options.hosts // 4, options.hosts // options.replicas]
    json.dump(simulate(world, hosts), sys.stdout, indent=1)
    sys.stdout.write('\n')


if __name__ == '__main__':
    main()

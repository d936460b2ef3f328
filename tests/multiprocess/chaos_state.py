"""What the processes of the chaos run save, and how long they wait for each other."""

import numpy as np

PROCESS_TIMEOUT = 4.0
HEARTBEAT_SECONDS = 10
# By leaf: shape, and how it is sharded over the processes.
LEAVES = {'sharded': ((64, 2048), ('data',)), 'replicated': ((33, 1000), ()), 'small': ((5,), ())}


def values(name: str, step: int) -> np.ndarray:
    """The values of a leaf at a step."""
    return np.random.default_rng([step, *name.encode()]).standard_normal(LEAVES[name][0], dtype=np.float32)

"""Scenarios of storages that this test has written: a good one, and one that ignores the versions of conditional writes."""

import uuid

from t5ckpt.storage.memory import MemoryStorage
from t5ckpt.testing.simulation.programs import after, saver
from t5ckpt.testing.simulation.scenarios import Scenario


class Careless(MemoryStorage):
    def replace(self, key, data, version):
        del version
        self.write(key, data)
        return self.version(key)


def start(world):
    return [
        world.start('one', saver(world, 1, [7]), machine='a'),
        world.start('two', after(650.0, saver(world, 2, [7])), machine='b'),
    ]


def before(world):
    return [world.start('before', saver(world, 5, [1]))]


SCENARIOS = {
    kind.__name__: Scenario(
        start, before, kind=lambda kind=kind: kind(uuid.uuid4().hex, 'run'), faults=('pause', 'lost')
    )
    for kind in (MemoryStorage, Careless)
}

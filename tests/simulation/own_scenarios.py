"""Scenarios of storages that this test has written: good ones, and three whose conditions do not exclude another writer."""

import itertools
import uuid

from simulation.any_storage import scenarios_of
from simulation.own_storage import point
from simulation.programs import after, saver
from simulation.scenarios import Scenario
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.storage import Entry, Storage
from t5ckpt.storage.memory import MemoryStorage


class Careless(MemoryStorage):
    def __init__(self):
        super().__init__(uuid.uuid4().hex, 'run')

    def replace(self, key, data, version):
        del version
        self.write(key, data)
        return self.version(key)


class Plain(Storage):
    """No subclass of ours: a dictionary. Checkpoints are committed by their manifest."""

    commits_by_rename = False
    driver = 'file'

    def __init__(self):
        self.files = {}
        self.versions = itertools.count(1)

    def url(self, key=''):
        return f'plain://{key}'

    def read(self, key, start=0, stop=None):
        if key not in self.files:
            raise CheckpointNotFoundError(f'{self.url(key)} does not exist.')
        return self.files[key][0][start:stop]

    def version(self, key):
        return self.files[key][1] if key in self.files else None

    def write(self, key, data):
        self.files[key] = bytes(data), next(self.versions)

    def kind(self, key):
        return 'file' if key in self.files else 'dir' if any(self.walk(key)) else None

    def size(self, key):
        return len(self.files[key][0]) if key in self.files else None

    def walk(self, key):
        yield from [(name, self.size(name)) for name in sorted(self.files) if name.startswith(f'{key}/' if key else '')]

    def entries(self, key=''):
        names = sorted({name[len(key) :].lstrip('/').split('/')[0] for name, _ in self.walk(key)})
        return [Entry(name, f'{key}/{name}'.lstrip('/') not in self.files) for name in names]

    def make_dir(self, key):
        pass

    def delete_files(self, keys):
        for key in keys:
            self.files.pop(key, None)

    def delete_tree(self, key):
        for name, _ in self.walk(key):
            del self.files[name]

    def context(self):
        raise NotImplementedError('The simulator reads chunks through the storage.')

    array_kvstore = context


class Twofold(Plain):
    """Compares and writes in two requests."""

    def replace(self, key, data, version):
        if self.version(key) != version:
            return None
        point(f'writes {key}, which it has compared')
        self.write(key, data)
        return self.version(key)

    def delete_unchanged(self, key, version):
        return self.version(key) == version and super().delete_unchanged(key, version)


class Unconditional(Plain):
    """Deletes a key whatever its version, as the base class does."""


def memory():
    return MemoryStorage(uuid.uuid4().hex, 'run')


def start(world):
    return [
        world.start('one', saver(world, 1, [7]), machine='a'),
        world.start('two', after(650.0, saver(world, 2, [7])), machine='b'),
    ]


def before(world):
    return [world.start('before', saver(world, 5, [1]))]


SCENARIOS = {
    kind.__name__: Scenario(start, before, kind=kind, faults=('pause', 'lost', 'error')) for kind in (Plain, Careless)
}
for kind in (memory, Careless, Twofold, Unconditional):
    SCENARIOS |= {f'{kind.__name__}-{name}': scenario for name, scenario in scenarios_of(kind).items()}

"""``save(..., overwrite=True)`` where nothing can be renamed: one write of the manifest swaps the old checkpoint for the new."""

import contextlib
import itertools
import logging
import threading
import time
import uuid

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from flax import serialization
from support import independent_reader
from support.options import with_options

import t5ckpt
from t5ckpt import Checkpointer
from t5ckpt.cli.app import run as run_cli
from t5ckpt.commit.deletion import delete_step
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.holds import hold
from t5ckpt.commit.taken_steps import StepTakenError
from t5ckpt.commit.transaction import Transaction
from t5ckpt.errors import (
    AccessDeniedError,
    ChangedMeanwhileError,
    CheckpointNotFoundError,
    StepKeptError,
    StorageError,
    T5CkptError,
    UnsupportedFormatError,
)
from t5ckpt.format.checksum import digest
from t5ckpt.format.manifest import encode_manifest, split_facts
from t5ckpt.format.names import foreign_keys, generation_of
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock, FaultyStorage

OPTIONS = {'inline_bytes': 64, 'chunk_bytes': 2048}


def state(value):
    return {
        'w': np.full((32, 32), value, np.float32),
        'f8': np.full((16, 16), value, ml_dtypes.float8_e4m3fn),
        'small': np.full(3, value, np.float32),
        'n': int(value),
        'nothing': {},
    }


def checkpointer(url, **options):
    return Checkpointer(state(0), checkpoints_dir=url, **with_options(**OPTIONS, **options))


class Position:
    """A data iterator whose state is one number."""

    def __init__(self, value=0):
        self.value = value

    def save(self, filename):
        with open(f'{filename}.index', 'w', encoding='utf-8') as file:
            file.write(str(self.value))

    def load(self, filename):
        with open(f'{filename}.index', encoding='utf-8') as file:
            self.value = int(file.read())


def save(url, value, step=1, **options):
    clock, iterator = options.pop('clock', FakeClock()), options.pop('iterator', None)
    with checkpointer(url, clock=clock, dataset_iterator=iterator) as ck:
        return ck.save(state(value), step=step, **options)


def position_of(url):
    iterator = Position()
    with checkpointer(url, dataset_iterator=iterator) as ck:
        ck.restore(1)
    return iterator.value


def value_of(url, step=1):
    """The value that all leaves of a restored step have."""
    with checkpointer(url) as ck:
        found = ck.restore(step)
    values = {float(np.asarray(found[name]).reshape(-1)[0]) for name in ('w', 'f8', 'small', 'n')}
    assert found['nothing'] == {}
    assert len(values) == 1, f'a mixed checkpoint: {found}'
    return values.pop()


@pytest.fixture
def url():
    return f'memory://{uuid.uuid4().hex}/run'


@pytest.fixture(params=['memory', 'gs', 's3'])
def run(request, url):
    return url if request.param == 'memory' else request.getfixturevalue(request.param).url()


def keys(storage, below='checkpoint_1'):
    return {key.removeprefix(f'{below}/') for key, _ in storage.walk(below)}


def markers(storage):
    return [key for key, _ in storage.walk('.t5ckpt/busy')]


def kept_markers(storage):
    """Those that garbage collection leaves when all are due."""
    collect(storage, FakeClock(2**31))
    return markers(storage)


# --- what it gives ---------------------------------------------------------------------------------------------------


def test_overwrite(run, capsys):
    storage = open_storage(run)
    save(run, 1, metrics={'loss': 1.0})
    first = keys(storage)
    for value in (2, 3):
        assert save(run, value) is None
        assert save(run, value, overwrite=True, metrics={'loss': float(value)}).step == 1
        assert value_of(run) == value
        report = t5ckpt.verify(run, 1, full=True)
        assert report.ok
        assert report.has_checksums
        assert not report.notes
        assert t5ckpt.all_steps(run) == [1]
        assert len(keys(storage)) == len(first)
        assert not keys(storage).intersection(first) - {'checkpoint'}
        assert not kept_markers(storage)
    with checkpointer(run) as ck:
        assert ck.metrics(1) == {'loss': 3.0}
        # Where nothing is there it is a save.
        assert ck.save(state(5), step=2, overwrite=True).step == 2
        assert any(key.endswith('/w/.zarray') for key in keys(storage, 'checkpoint_2'))
        ck.delete(1)
    assert keys(storage) == set()
    with pytest.raises(SystemExit, match='0'):
        run_cli(['ls', run])
    assert capsys.readouterr().out.count('complete') == 1


def test_tensorstore_reads_the_manifest(run):
    """As T5X does: the path in the manifest, below the step's directory, and nothing else."""
    save(run, 1)
    save(run, 2, overwrite=True)
    storage = open_storage(run)
    manifest = serialization.msgpack_restore(storage.read('checkpoint_1/checkpoint'))
    spec = manifest['optimizer']['w']
    spec['kvstore'] = storage.array_kvstore(f'checkpoint_1/{spec["kvstore"]["path"]}')
    values = ts.open(spec, open=True, context=storage.context()).result().read().result()
    np.testing.assert_array_equal(values, state(2)['w'])


def test_a_copy_on_a_disk(url, tmp_path):
    save(url, 1)
    save(url, 2, overwrite=True)
    t5ckpt.copy_checkpoint(url, tmp_path)
    assert value_of(tmp_path) == 2
    assert t5ckpt.verify(tmp_path, full=True).ok
    np.testing.assert_array_equal(independent_reader.read(tmp_path / 'checkpoint_1')['w'], state(2)['w'])
    # There an overwrite is a rename, and the directory goes as a whole.
    save(tmp_path, 3, overwrite=True)
    assert value_of(tmp_path) == 3
    assert not list((tmp_path / 'checkpoint_1').glob('t5ckpt-*'))


def test_names():
    own = ['checkpoint', 't5ckpt.json', 't5ckpt.0123456789abcdef.json', 't5ckpt-0123456789abcdef/integrity.3.json']
    own += ['t5ckpt-0123456789abcdef/a.b/.zarray', 't5ckpt-0123456789abcdef/a.b/0.1', 'a.b/0.1', 'integrity.0.json']
    own += [
        't5ckpt-0123456789abcdef/a.b/0/1',
        'a.b/1.0a1b2c3d.__partial',
        'PINNED',
        'checkpoint.damaged',
        'copies.json',
    ]
    others = ['t5ckpt-0123456789abcdef/notes.txt', 't5ckpt-01/w/x', 't5ckpt.01.json', 't5ckpt-0123456789abcdef/a/b/c']
    others += ['a/b/0.1', 'PINNED/x', 'integrity.00.json', 'a.b/zarr.json', '0']
    assert foreign_keys([*own, *others]) == others
    positions = [
        't5ckpt-0123456789abcdef/train_ds-000-of-001.index',
        'train_ds-000-of-001.index',
        'train_ds-001-of-002',
    ]
    assert foreign_keys([*own, *positions]) == []
    # In a directory without a manifest, arrays in other directories are of another program.
    deep = ['group/w/.zarray', 'group/w/0.0']
    assert (foreign_keys(deep), foreign_keys(['checkpoint', *deep])) == (deep, [])
    # Of writers that were killed: of small files, of direct I/O and of TensorStore.
    partial = [
        'checkpoint.0a1b2c3d.__partial',
        'a.b/0.1.__lock',
        'a.b/0.1_1d7c4c5f0f55db75.__lock',
        'w/.zarray_fb69e2c5.__lock',
    ]
    assert foreign_keys([*own, *partial]) == []


# --- what is there ----------------------------------------------------------------------------------------------------


def test_a_step_without_facts_is_overwritten_too(url):
    """As one that T5X wrote: the write of the manifest replaces it, and then its files go."""
    save(url, 1)
    storage = open_storage(url)
    storage.write('checkpoint_1/checkpoint', split_facts(storage.read('checkpoint_1/checkpoint'))[0])
    storage.write('checkpoint_1/target.x/.zarray', b'{}')
    save(url, 2, overwrite=True)
    assert not kept_markers(storage)
    assert len({generation_of(key.removeprefix('checkpoint_1/')) for key, _ in storage.walk('checkpoint_1')}) == 2
    assert not storage.is_file('checkpoint_1/target.x/.zarray')


@pytest.mark.parametrize(
    ('name', 'layout'),
    [
        ('checkpoint_1/_METADATA', 'orbax'),
        ('checkpoint_1/state/_METADATA', 'orbax'),
        ('1/default/_METADATA', 'orbax'),
        ('checkpoint_1/checkpoint', 'orbax'),
        ('checkpoint_1', 'flax'),
        ('checkpoint_0001/checkpoint', 't5x-padded'),
    ],
)
def test_a_step_in_another_layout_is_not_replaced(url, name, layout):
    save(url, 1, step=2)
    storage = open_storage(url)
    array = 'PLACEHOLDER://w' if name == 'checkpoint_1/checkpoint' else 1
    storage.write(name, serialization.msgpack_serialize({'w': array}))
    before = {key for key, _ in storage.walk('')}
    with pytest.raises(UnsupportedFormatError, match=f'is in the layout of {layout}, which .* not replace'):
        save(url, 2, overwrite=True)
    # Another program may write it after the first look of a save.
    with pytest.raises(StepTakenError):
        Transaction(storage, 1, FakeClock(), overwrite=True)
    assert {key for key, _ in storage.walk('')} == before


class Acting(FaultyStorage):
    """Does something once, before or after an operation on a key."""

    def __init__(self, inner, when, act, *, after=False):
        super().__init__(inner)
        self.when, self.act, self.after = when, act, after

    def replace(self, key, data, version):
        found = super().replace(key, data, version)
        if self.after and self.act is not None and key == 'checkpoint_1/checkpoint':
            self.act, act = None, self.act
            act()
        return found

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if not self.after and self.act is not None and name == self.when and 'checkpoint_1' in key:
            self.act, act = None, self.act
            act()


@pytest.mark.parametrize(
    ('keeps', 'when'),
    [*itertools.product(['pin', 'reader'], ['before', 'write']), ('T5X', 'write')],
)
def test_what_is_kept_while_it_is_replaced(url, keeps, when):
    """T5X pins without looking for a writer."""
    save(url, 1)
    steps = t5ckpt.checkpoints_iterator(url, timeout=0, hold_seconds=60)
    keep = {
        'pin': lambda: t5ckpt.pin_checkpoint(f'{url}/checkpoint_1'),
        'reader': lambda: next(steps),
        'T5X': lambda: open_storage(url).write('checkpoint_1/PINNED', b'1'),
    }[keeps]

    before = keys(open_storage(url))
    if when == 'before':
        keep()
    acting = Acting(open_storage(url), when, None if when == 'before' else keep)
    with checkpointer(acting) as ck:
        with pytest.raises(StepKeptError, match='was not replaced'):
            ck.save(state(2), step=1, overwrite=True)
        assert acting.act is None
    assert value_of(url) == 1
    assert keys(open_storage(url)) - {'PINNED'} == before
    assert t5ckpt.verify(url, full=True).ok
    t5ckpt.unpin_checkpoint(f'{url}/checkpoint_1')
    steps.close()
    assert save(url, 2, overwrite=True).step == 1


@pytest.mark.parametrize('when', ['replace', 'after replace'])
def test_a_reader_waits_while_the_manifest_is_replaced(url, when):
    """So it has the new checkpoint, and the overwrite is not taken back under it."""
    save(url, 1)
    storage, read = open_storage(url), []

    def evaluate():
        with hold(storage, 1, 60, time.time) as is_there:
            read.append(is_there and value_of(url))

    reader = threading.Thread(target=evaluate)

    def arrive():
        reader.start()
        while not read and not [key for key, _ in storage.walk('.t5ckpt') if '/held_1.' in key]:
            time.sleep(0.01)
        time.sleep(0.1)
        assert not read

    acting = Acting(storage, when, arrive, after=when == 'after replace')
    with checkpointer(acting) as ck:
        assert ck.save(state(2), step=1, overwrite=True).step == 1
    reader.join()
    assert read == [2]
    assert t5ckpt.verify(url, full=True).ok


def test_a_step_that_another_program_deletes_while_it_is_overwritten(url):
    """It is saved nevertheless."""
    save(url, 1)
    acting = Acting(open_storage(url), 'replace', lambda: open_storage(url).delete_file('checkpoint_1/checkpoint'))
    with checkpointer(acting) as ck:
        assert ck.save(state(2), step=1, overwrite=True).step == 1
    assert value_of(url) == 2
    assert t5ckpt.verify(url, full=True).ok


# --- readers ----------------------------------------------------------------------------------------------------------


def test_readers_at_each_operation(url, tmp_path):
    """A restore, a verification and a copy between any two requests of an overwrite find the one or the other, whole."""
    save(url, 1)
    found, turns = [], threading.Lock()

    class Watched(FaultyStorage):
        def before_operation(self, name, key):
            super().before_operation(name, key)
            # Chunks are written by several threads.
            with turns:
                copy = tmp_path / str(len(found))
                t5ckpt.copy_checkpoint(url, copy)
                found.append(value_of(url))
                assert t5ckpt.verify(url, full=True).ok
                assert t5ckpt.verify(copy, full=True).ok
                assert value_of(copy) == found[-1]
                assert not list(copy.glob('checkpoint_1/t5ckpt.*.json'))

    with checkpointer(Watched(open_storage(url))) as ck:
        ck.save(state(2), step=1, overwrite=True)
    assert found == sorted(found)
    assert set(found) == {1, 2}


@pytest.mark.parametrize('reads', ['a chunk', 'an array'])
def test_a_reader_over_the_swap(run, reads):
    save(run, 1)
    view = t5ckpt.open_checkpoint(run)
    save(run, 2, overwrite=True)
    with pytest.raises(CheckpointNotFoundError, match=r'was replaced while it was being read. Open it again'):
        view['w'][:1] if reads == 'a chunk' else view['w'].get()
    assert t5ckpt.open_checkpoint(run)['w'][0, 0] == 2


def test_a_reader_of_the_earlier_layout_over_the_swap(url):
    """Another process replaces the step between the reads of its manifest and of the file with its facts, which then is gone."""
    save(url, 1)
    storage = open_storage(url)
    manifest, facts = split_facts(storage.read('checkpoint_1/checkpoint'))
    storage.write('checkpoint_1/checkpoint', manifest)
    storage.write(f'checkpoint_1/t5ckpt.{digest(manifest)}.json', facts)

    class Late(FaultyStorage):
        overwritten = False

        def names(self, key, prefix):
            if prefix == 't5ckpt.' and not self.overwritten:
                self.overwritten = True
                save(url, 2, overwrite=True)
            return self._inner.names(key, prefix)

    late = Late(storage)
    with checkpointer(late) as ck:
        with pytest.raises(ChangedMeanwhileError, match='was replaced while it was being read'):
            ck.restore(1)
        assert late.overwritten
        assert ck.restore(1)['n'] == 2


# --- crashes ----------------------------------------------------------------------------------------------------------


class Applied(FaultyStorage):
    """Fails an operation after it was applied: its reply is lost."""

    def _late(self, operation, name, key, *arguments):
        index, operations = len(self.operations), self.operations
        self.operations = []
        fail_at, self._fail_at = self._fail_at, None
        try:
            found = operation(key, *arguments)
        finally:
            self.operations, self._fail_at = operations, fail_at
        assert len(operations) == index
        self.before_operation(name, key)
        return found

    def write(self, key, data):
        self._late(super().write, 'write', key, data)

    def replace(self, key, data, version):
        return self._late(super().replace, 'replace', key, data, version)

    def delete_file(self, key):
        self._late(super().delete_file, 'delete_file', key)


def operations_of(kind, **options):
    url = f'memory://{uuid.uuid4().hex}/run'
    save(url, 1)
    storage = kind(open_storage(url))
    save(storage, 2, overwrite=True, **options)
    return len(storage.operations)


@pytest.mark.slow
@pytest.mark.parametrize('kind', [FaultyStorage, Applied])
@pytest.mark.parametrize('sticky', [False, True])
@pytest.mark.parametrize('iterates', [False, True])
def test_a_failure_at_each_operation(kind, sticky, iterates, caplog):
    """The step is the old checkpoint or the new one, whole, with its position; what is left over goes with the next save."""
    caplog.set_level(logging.CRITICAL, 't5ckpt')
    old, new = ({'iterator': Position(value)} if iterates else {} for value in (1, 2))
    count, found = operations_of(kind, **new), []
    for fail_at in range(count):
        url = f'memory://{uuid.uuid4().hex}/run'
        save(url, 1, **old)
        clean = keys(open_storage(url))
        storage = kind(open_storage(url), fail_at, sticky=sticky)
        try:
            saved = save(storage, 2, overwrite=True, **new) is not None
        except StorageError:
            saved = False
        value = value_of(url)
        assert not iterates or position_of(url) == value
        found.append(value)
        assert value == 2 or not saved
        assert t5ckpt.verify(url, full=True).ok, storage.operations[fail_at]
        assert t5ckpt.all_steps(url) == [1]
        # The process has ended; another one saves the next step.
        collect(open_storage(url), FakeClock(2**31))
        assert value_of(url) == value
        left = keys(open_storage(url))
        if iterates:
            assert position_of(url) == int(open_storage(url).read('checkpoint_1/train_ds-000-of-001.index')) == value
        assert len(left) == len(clean), (storage.operations[fail_at], left)
        report = t5ckpt.verify(url, full=True)
        assert report.ok
        assert not report.notes
        assert not kept_markers(open_storage(url))
    assert set(found) == {1, 2}


def _killed(url, at):
    """An overwrite that ended at its n-th operation."""
    save(url, 1)
    with contextlib.suppress(StorageError):
        save(FaultyStorage(open_storage(url), at, sticky=True), 2, overwrite=True)
    return open_storage(url)


def _manifest_put(url):
    save(url, 1)
    storage = FaultyStorage(open_storage(url))
    save(storage, 2, overwrite=True)
    return storage.operations.index(('replace', 'checkpoint_1/checkpoint'))


@pytest.mark.parametrize('then', ['skip', 'overwrite', 'delete', 'keep_dataset_checkpoints'])
def test_the_files_of_a_killed_overwrite_are_collected(url, then):
    """Whatever is done with the step meanwhile, its leftovers go."""
    at = _manifest_put(f'memory://{uuid.uuid4().hex}/run')
    storage = _killed(url, at)
    assert any(key.startswith('t5ckpt-') for key in keys(storage))
    assert markers(storage)
    if then == 'delete':
        with checkpointer(url) as ck:
            ck.delete(1)
    elif then == 'keep_dataset_checkpoints':
        with checkpointer(url, dataset_iterator=Position(), keep_dataset_checkpoints=1) as ck:
            ck.save(state(4), step=4)
    else:
        save(url, 3, overwrite=then == 'overwrite')
    save(url, 5, step=5, clock=FakeClock(2**31))
    if then == 'delete':
        assert not keys(storage)
    else:
        assert value_of(url) == (3 if then == 'overwrite' else 1)
        assert t5ckpt.verify(url, 1, full=True).notes == ()
    assert not kept_markers(storage)


# --- two writers ------------------------------------------------------------------------------------------------------


def test_two_overwriters(run, caplog):
    """One stalls until another has overwritten the step: the manifest is no longer the one it read."""
    save(run, 1)

    class Stalled(FaultyStorage):
        def replace(self, key, data, version):
            if key != 'checkpoint_1/checkpoint':
                return super().replace(key, data, version)
            with other:
                assert other.save(state(2), step=1, overwrite=True).step == 1
            return super().replace(key, data, version)

    other = Checkpointer(state(0), checkpoints_dir=open_storage(run), **with_options(**OPTIONS))
    assert save(Stalled(open_storage(run)), 3, overwrite=True) is None
    assert value_of(run) == 2
    assert t5ckpt.verify(run, full=True).ok
    assert 'was replaced or deleted by another writer' in caplog.text


def test_a_store_that_refuses(url):
    save(url, 1)

    class Refusing(FaultyStorage):
        def replace(self, key, data, version):
            raise AccessDeniedError(13, 'refused')

    before = keys(open_storage(url))
    with pytest.raises(AccessDeniedError):
        save(Refusing(open_storage(url)), 2, overwrite=True)
    assert keys(open_storage(url)) == before
    assert not kept_markers(open_storage(url))


@pytest.mark.parametrize('when', ['replace', 'after replace'])
def test_a_pin_that_comes_after_the_look_pins_the_new_checkpoint(url, when):
    """T5X pins without looking for a writer, and a manifest is not put back."""
    save(url, 1)

    def pin():
        open_storage(url).write('checkpoint_1/PINNED', b'1')

    save(Acting(open_storage(url), when, pin, after=when == 'after replace'), 2, overwrite=True)
    save(url, 3, step=3, clock=FakeClock(2**31))
    assert value_of(url) == 2
    assert t5ckpt.verify(url, 1, full=True).notes == ()
    assert t5ckpt.is_pinned_checkpoint(f'{url}/checkpoint_1')


def test_a_step_whose_manifest_is_damaged_keeps_its_files(url):
    storage = _killed(url, _manifest_put(f'memory://{uuid.uuid4().hex}/run'))
    manifest = storage.read('checkpoint_1/checkpoint')
    for damaged in manifest + b'\0', manifest[:-1], manifest[:100], b'':
        storage.write('checkpoint_1/checkpoint', damaged)
        save(url, 5, step=5, overwrite=True)
        with pytest.raises(T5CkptError):
            value_of(url)
        storage.write('checkpoint_1/checkpoint', manifest)
        assert t5ckpt.verify(url, 1, full=True).ok


def test_a_text_with_the_name_of_a_directory_is_not_one(url):
    """A step of T5X with such a text counted as deleted, since its directory is empty, and a save replaced it."""
    text = b'copied from checkpoint_7/t5ckpt-0123456789abcdef/ and "t5ckpt-0123456789abcdef"'
    storage = open_storage(url)
    storage.write('checkpoint_1/checkpoint', encode_manifest({'w': np.frombuffer(text, np.uint8)}))
    with t5ckpt.Checkpointer({'w': np.zeros(2)}, checkpoints_dir=url) as ck:
        assert ck.save({'w': np.zeros(2)}, step=1) is None
        assert ck.save({'w': np.zeros(2)}, step=2, custom_metadata={'from': text.decode()}) is not None
    assert t5ckpt.load_t5x_checkpoint(url, 1)['w'].tobytes() == text
    for step in (1, 2):
        delete_step(storage, step, time.time)
        assert not list(storage.walk(f'checkpoint_{step}'))


def test_a_text_that_begins_as_a_placeholder_of_orbax_is_not_one(url):
    """Such a step was called one of Orbax, which is neither replaced nor deleted."""
    tree = {'w': np.zeros(2), 'note': 'PLACEHOLDER://w'}
    with t5ckpt.Checkpointer(tree, checkpoints_dir=url, keep=1) as ck:
        for step in (1, 2):
            ck.save(tree, step=step, custom_metadata={'from': 'PLACEHOLDER://x'})
        assert ck.save(tree, step=2, overwrite=True) is not None
    assert t5ckpt.all_steps(url) == [2]

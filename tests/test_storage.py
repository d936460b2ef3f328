"""Every backend passes the conformance suite, looked at from outside."""

import pathlib
import uuid

import pytest
import tensorstore as ts

import t5ckpt
from t5ckpt import errors
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage, StorageConformance


class TestFile(StorageConformance):
    def make(self, tmp_path):
        return open_storage(tmp_path / 'deep' / 'root')

    def raw(self, storage, key):
        path = pathlib.Path(storage.local_path(key))
        return path.read_bytes() if path.exists() else None

    def test_permissions_are_the_umask(self, tmp_path):
        storage = self.make(tmp_path)
        storage.make_dir('')
        storage.write('x', b'')
        assert pathlib.Path(storage.local_path('x')).stat().st_mode & 0o777 == 0o644

    def test_a_failed_write_leaves_the_old_bytes(self, tmp_path):
        storage = self.make(tmp_path)
        storage.make_dir('')
        storage.write('x', b'old')
        pathlib.Path(storage.local_path('x.__partial')).mkdir()
        with pytest.raises(errors.StorageError, match='x'):
            storage.write('x', b'new')
        assert storage.read('x') == b'old'


class TestMemory(StorageConformance):
    def make(self, tmp_path):
        return open_storage(f'memory://{uuid.uuid4().hex}/run')

    def raw(self, storage, key):
        store = ts.KvStore.open({'driver': 'memory'}, context=storage.context()).result()
        found = store.read(f'run/{key}').result()
        return found.value if found.state == 'value' else None


class TestFaulty(TestFile):
    """The wrapper is transparent as long as nothing is to fail."""

    def make(self, tmp_path):
        return FaultyStorage(super().make(tmp_path))


def test_unknown_schemes_are_refused():
    with pytest.raises(errors.UnsupportedFormatError, match='ftp'):
        t5ckpt.Checkpointer({'x': 1}, checkpoints_dir='ftp://host/run')


@pytest.mark.parametrize('url', ['gs:/bucket/run', 's3:/bucket/run', 'memory:/run', 'file:/tmp/run'])
def test_a_slash_that_was_forgotten_makes_no_directory(url):
    with pytest.raises(ValueError, match=f'write {url.replace(":/", "://")}'):
        t5ckpt.Checkpointer({'x': 1}, checkpoints_dir=url)


def test_a_step_is_no_run(tmp_path):
    """What is saved within a checkpoint is found by nobody."""
    state = {'x': 1}
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path).save(state, step=4)
    step = tmp_path / 'checkpoint_4'
    for opened in (lambda: t5ckpt.Checkpointer(state, checkpoints_dir=step), lambda: t5ckpt.open_run(step)):
        with pytest.raises(errors.CheckpointNotFoundError, match=f'is step 4 of a run.*Give the run: {tmp_path}$'):
            opened()
    # Only a name, so far.
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'checkpoint_5').save(state, step=1)

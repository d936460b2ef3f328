"""The test suite of all storages; the test class of a backend inherits it.

    class TestMyStorage(StorageConformance):
        def make(self, tmp_path): return MyStorage(tmp_path)
        def raw(self, storage, key): ...   # the bytes, read with another tool than the storage, or None

``raw`` reads with another tool, so that a storage that is only consistent with itself fails.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
import tensorstore as ts

from t5ckpt.errors import CheckpointNotFoundError, T5CkptError
from t5ckpt.format.file_checksums import entry_of
from t5ckpt.storage import Storage


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


class StorageConformance:
    """The tests of a storage. Each gets a storage with an empty root."""

    def make(self, tmp_path: pathlib.Path) -> Storage:
        """Returns a storage with an empty root."""
        raise NotImplementedError

    def raw(self, storage: Storage, key: str) -> bytes | None:
        """Returns the bytes of a key, read with another tool; None if the key does not exist."""
        raise NotImplementedError

    def test_write_then_read(self, tmp_path: pathlib.Path) -> None:
        """The storage and another tool read the bytes that were written, also after an overwrite."""
        storage = self.make(tmp_path)
        storage.make_dir('a')
        for data in (b'', b'one', bytes(range(256)) * 999):
            storage.write('a/x', data)
            _check(storage.read('a/x') == data == self.raw(storage, 'a/x'), f'{len(data)} bytes did not come back')
            _check(storage.size('a/x') in (len(data), -1), 'size is wrong')

    def test_read_range(self, tmp_path: pathlib.Path) -> None:
        """A range of bytes is read, up to the end of the file; for a missing file, the error names the key."""
        storage = self.make(tmp_path)
        storage.make_dir('a')
        data = bytes(range(256)) * 40
        storage.write('a/x', data)
        end = len(data)
        for start, stop in (
            (0, end),
            (0, 8),
            (255, 4099),
            (8, 8),
            (end - 3, end),
            (end - 3, 2 * end),
            (end + 1, 2 * end),
        ):
            data_read = storage.read('a/x', start, stop)
            _check(data_read == data[start:stop], f'bytes {start} to {stop} are wrong, got {len(data_read)} bytes')
        try:
            storage.read('a/none', 0, 8)
        except CheckpointNotFoundError as error:
            _check('a/none' in str(error), f'the error does not name the key: {error}')
        else:
            raise AssertionError('reading a range of nothing did not fail')

    def test_nothing_there(self, tmp_path: pathlib.Path) -> None:
        """An empty root lists as empty, and the error of a read names the missing key."""
        storage = self.make(tmp_path)
        _check(storage.entries('no') == [] and list(storage.walk('no')) == [], 'something is listed')
        _check(storage.kind('no') is None and storage.size('no') in (None, -1), 'something is there')
        try:
            storage.read('no/such')
        except CheckpointNotFoundError as error:
            _check('no/such' in str(error), f'the error does not name the key: {error}')
        else:
            raise AssertionError('reading nothing did not fail')
        storage.delete_file('no')
        storage.delete_tree('no')

    def test_listing(self, tmp_path: pathlib.Path) -> None:
        """``entries`` lists the names directly below a key with sizes, and ``walk`` all files below it."""
        storage = self.make(tmp_path)
        for key, data in (('r/b/deep/x', b'12'), ('r/a', b'1'), ('r/b/y', b'123'), ('other', b'')):
            storage.make_dir(key.rpartition('/')[0])
            storage.write(key, data)
        listed = [(entry.name, entry.is_dir, entry.size) for entry in storage.entries('r')]
        kinds = [(name, is_dir) for name, is_dir, _ in listed]
        _check(kinds == [('a', False), ('b', True)], f'entries: {listed}')
        _check(listed[0][2] in (1, None) and listed[1][2] == 0, f'entries: {listed}')
        walked = list(storage.walk('r'))
        _check([key for key, _ in walked] == ['r/a', 'r/b/deep/x', 'r/b/y'], f'walk: {walked}')
        _check(
            all(size in (None, expected) for (_, size), expected in zip(walked, (1, 2, 3), strict=True)), f'{walked}'
        )
        _check([storage.kind(key) for key in ('r', 'r/a', 'r/c')] == ['dir', 'file', None], 'kinds are wrong')
        _check(storage.are_files(['r', 'r/a', 'r/c', 'r/b/y']) == [False, True, False, True], 'are_files is wrong')
        names = [storage.names('r', beginning) for beginning in ('', 'b', 'c')]
        _check(names == [['a', 'b'], ['b'], []], f'names: {names}')

    def test_delete(self, tmp_path: pathlib.Path) -> None:
        """A tree is deleted completely; keys with the same prefix stay."""
        storage = self.make(tmp_path)
        for key in ('t/a', 't/b/c', 't2/a', 'ta'):
            storage.make_dir(key.rpartition('/')[0])
            storage.write(key, b'x')
        storage.delete_tree('t')
        _check([key for key, _ in storage.walk('')] == ['t2/a', 'ta'], 'the wrong keys are gone')
        storage.delete_file('ta')
        _check(self.raw(storage, 'ta') is None and self.raw(storage, 't2/a') == b'x', 'delete_file took the wrong key')

    def test_replace(self, tmp_path: pathlib.Path) -> None:
        """A key is written where it has the version that was read, and nowhere else."""
        storage = self.make(tmp_path)
        storage.make_dir('r')
        storage.write('r/a', b'one')
        _, first = storage.read_with_version('r/a')
        second = storage.replace('r/a', b'second', first)
        _check(second is not None and second == storage.version('r/a'), 'replace gave another version')
        _check(self.raw(storage, 'r/a') == b'second', 'replace wrote something else')
        _check(storage.replace('r/none', b'x', first) is None, 'replace wrote a key that is not there')
        _check(self.raw(storage, 'r/none') is None, 'replace wrote a key that is not there')
        made = storage.replace('r/new', b'x', None)
        _check(made is not None and made == storage.version('r/new'), 'replace did not create a key')
        _check(storage.replace('r/new', b'y', None) is None, 'replace created a key that is there')
        _check(self.raw(storage, 'r/new') == b'x', 'replace created a key that is there')
        _check(storage.delete_unchanged('r/new', made), 'delete_unchanged did not delete a key that is unchanged')
        _check(self.raw(storage, 'r/new') is None, 'delete_unchanged did not delete a key that is unchanged')

    def test_locks_exclude_each_other(self, tmp_path: pathlib.Path) -> None:
        """A lock has one owner at a time."""
        storage = self.make(tmp_path)
        if not storage.commits_by_rename:
            return
        storage.make_dir('c')
        first = storage.try_lock('c')
        if first is None or storage.try_lock('c') is not None:
            raise AssertionError('the directory was locked twice, or not at all')
        first.close()
        again = storage.try_lock('c')
        if again is None:
            raise AssertionError('a lock was not released')
        again.close()

    def test_publish(self, tmp_path: pathlib.Path) -> None:
        """``publish`` renames a whole directory, and never replaces one; an error names the source if it does not exist."""
        storage = self.make(tmp_path)
        if not storage.commits_by_rename:
            return
        for key in ('tmp', 'taken'):
            storage.make_dir(key)
            storage.write(f'{key}/x', key.encode())
        storage.make_dir('tmp/a/b')
        storage.sync_tree('tmp', ['a/b'])
        storage.publish('tmp', 'final')
        _check(self.raw(storage, 'final/x') == b'tmp' and storage.kind('tmp') is None, 'publish did not move')
        try:
            storage.publish('final', 'taken')
        except OSError:
            _check(self.raw(storage, 'taken/x') == b'taken', 'publish wrote over something')
        else:
            raise AssertionError('publish took a name that was taken')
        try:
            storage.publish('gone', 'elsewhere')
        except T5CkptError as error:
            _check(
                'gone' in str(error) and 'elsewhere' not in str(error), f'the error does not name the source: {error}'
            )
        else:
            raise AssertionError('publish of nothing did not fail')

    def test_chunks(self, tmp_path: pathlib.Path) -> None:
        """Files written by ``write_chunk`` can be read, also by TensorStore; their entry and version are returned."""
        storage = self.make(tmp_path)
        storage.make_dir('arrays')
        entry, version = storage.write_chunk('arrays/w/0.0', np.frombuffer(b'chunk', np.uint8))
        _check(entry == entry_of(b'chunk'), 'the checksum is another one')
        _check(
            version in (storage.stamp('arrays/w/0.0'), storage.version('arrays/w/0.0')), 'the version is another one'
        )
        _check(storage.read('arrays/w/0.0') == b'chunk' == self.raw(storage, 'arrays/w/0.0'), 'places differ')
        _check({name for name, _ in storage.walk('arrays')} == {'arrays/w/0.0'}, 'a listing has something else')
        metadata = {'zarr_format': 2, 'shape': [4], 'chunks': [4], 'dtype': '<i4', 'order': 'C'}
        metadata |= {'compressor': None, 'fill_value': None, 'filters': None}
        storage.make_dir('arrays/z')
        storage.write('arrays/z/.zarray', json.dumps(metadata).encode())
        storage.write('arrays/z/0', np.array([1, 2, 3, 4], np.int32).tobytes())
        spec = {'driver': 'zarr', 'kvstore': storage.array_kvstore('arrays/z')}
        values = storage.wait(ts.open(spec, open=True, context=storage.context())).read().result()
        _check(values.tolist() == [1, 2, 3, 4], 'zarr files are elsewhere')

    def test_link(self, tmp_path: pathlib.Path) -> None:
        """A link is a second name, which survives the deletion of the first, or it is refused."""
        storage = self.make(tmp_path)
        storage.make_dir('one')
        storage.write('one/x', b'data')
        _check(storage.link('one/none', 'two/none') is False, 'a link to nothing was made')
        if storage.link('one/x', 'two/x'):
            storage.delete_tree('one')
            _check(self.raw(storage, 'two/x') == b'data', 'the second name went with the first')

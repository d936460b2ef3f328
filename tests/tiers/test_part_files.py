"""The files of a part whose disk fails in a restore."""

import errno
import time

import numpy as np
import pytest

import t5ckpt
from t5ckpt.errors import StorageError
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage
from t5ckpt.tiers.local_reads import LocalReads
from t5ckpt.tiers.part import Part, parts_in
from t5ckpt.tiers.part_files import PartFiles


class Disk(FaultyStorage):
    """A disk whose reads of some files fail until a time."""

    key, error, ends = '', errno.EIO, float('inf')

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if name == 'read' and self.key and self.key in key and time.monotonic() < self.ends:
            raise StorageError(self.error, 'injected: the disk failed')


@pytest.fixture
def disk(tmp_path):
    """A disk with step 1."""
    values = {'w': np.arange(2**12, dtype=np.float32), 'step': np.int32(1)}
    with t5ckpt.Checkpointer(values, None, tmp_path, chunk_bytes=2**12, inline_bytes=64) as ck:
        ck.save(values)
    return Disk(open_storage(tmp_path))


def reads_of(disk, name):
    return disk.operations.count(('read', f'checkpoint_1/{name}'))


def part_files(disk, reads):
    return PartFiles(parts_in(disk, reads).parts[1], reads)


@pytest.mark.parametrize('error', [errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA])
def test_a_disk_that_fails_for_a_moment_is_read_again(disk, error):
    disk.key, disk.error, disk.ends = 'checkpoint_1/w/0', error, time.monotonic() + 0.3
    files = part_files(disk, LocalReads())
    assert files.read('w/0') == disk.read('checkpoint_1/w/0')
    assert not files.has_lost


def test_files_that_cannot_be_read_take_two_seconds_in_all_and_stay(disk):
    """A later choice of the same restore does not count them as there; a file that is replaced is there again."""
    disk.key, reads = 'checkpoint_1/w/', LocalReads()
    files, started = part_files(disk, reads), time.monotonic()
    assert [files.read(name) for name in ('w/0', 'w/1', 'w/2')] == [None] * 3
    assert 2 <= time.monotonic() - started < 10
    assert (reads_of(disk, 'w/1'), reads_of(disk, 'w/2')) == (1, 1)
    assert all(disk.is_file(f'checkpoint_1/w/{index}') for index in range(4))
    files = part_files(disk, reads)
    assert files.has_lost is False
    assert {'w/0', 'w/1', 'w/2'}.isdisjoint(files.there)
    assert 'w/3' in files.there
    disk.key = ''
    files.write('w/1', files.entries['w/1'], disk.read('checkpoint_1/w/1'))
    assert 'w/1' in part_files(disk, reads).there
    assert 'w/0' in part_files(disk, LocalReads()).there


@pytest.mark.parametrize('error', [errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.ESTALE])
def test_an_error_that_is_not_of_the_disk_is_raised_at_once(disk, error):
    disk.key, disk.error = 'checkpoint_1/w/0', error
    files = part_files(disk, LocalReads())
    with pytest.raises(StorageError):
        files.read('w/0')
    assert reads_of(disk, 'w/0') == 1
    assert 'w/0' in files.there
    disk.key = 'checkpoint_1/checkpoint'
    with pytest.raises(StorageError):
        parts_in(disk)


def test_a_damaged_file_is_deleted_and_one_that_is_gone_is_forgotten(disk):
    files = part_files(disk, LocalReads())
    data = disk.read('checkpoint_1/w/0')
    disk.write('checkpoint_1/w/0', data[:-1] + bytes([data[-1] ^ 1]))
    disk.delete_file('checkpoint_1/w/1')
    assert files.read('w/0') is files.read('w/1') is None
    assert files.has_lost
    assert not disk.is_file('checkpoint_1/w/0')
    assert {'w/0', 'w/1'}.isdisjoint(files.there)


def test_metadata_that_cannot_be_read_is_written_again(disk):
    reads = LocalReads()
    data, before = disk.read('checkpoint_1/w/.zarray'), len(disk.operations)
    disk.key = '.zarray'
    assert part_files(disk, reads).read('w/.zarray') is None
    disk.key = ''
    assert ('write', 'checkpoint_1/w/.zarray') not in disk.operations[before:]
    part_files(disk, reads).replace_unreadable_metadata()
    assert ('write', 'checkpoint_1/w/.zarray') in disk.operations[before:]
    assert disk.read('checkpoint_1/w/.zarray') == data
    assert Part.read(disk, 1).there == part_files(disk, reads).there

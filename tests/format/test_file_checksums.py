"""`FileChecksums`: from the facts over the processes' lists to one file."""

import numpy as np
import pytest

from t5ckpt import errors
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.facts import Facts, decode_facts, encode_facts
from t5ckpt.format.file_checksums import FileChecksums, entry_of
from t5ckpt.format.names import file_checksums_name
from t5ckpt.integrity.implied_files import has_checksums


def url(name):
    return f'/run/checkpoint_1/{name}'


def two_processes():
    lists = {
        file_checksums_name(index): FileChecksums(files).encode()
        for index, files in enumerate([{'w/.zarray': (3, 'a' * 16)}, {'w/0.0': (9, 'b' * 16)}])
    }
    files = {'checkpoint': b'manifest'} | lists
    recorded = FileChecksums({name: entry_of(data) for name, data in files.items()})
    return decode_facts(encode_facts(Facts(digests=recorded)), url('checkpoint')).digests, lists


def test_from_the_facts_to_each_file():
    recorded, lists = two_processes()
    assert recorded.lists == ['integrity.0.json', 'integrity.1.json']
    loaded = recorded.load_lists(lists.get, url)
    assert list(loaded) == ['integrity.0.json', 'integrity.1.json']
    files = FileChecksums({**loaded['integrity.0.json'], **loaded['integrity.1.json']})
    assert dict(files) == {'w/.zarray': (3, 'a' * 16), 'w/0.0': (9, 'b' * 16)}
    assert files.encode() == FileChecksums(dict(sorted(files.items(), reverse=True))).encode()


def test_a_damaged_list_and_a_damaged_file_have_one_message():
    recorded, lists = two_processes()
    damaged = {**lists, 'integrity.1.json': lists['integrity.1.json'] + b' '}
    with pytest.raises(
        errors.CorruptCheckpointError, match=r'checkpoint_1/integrity.1.json is damaged: it has 65 bytes.*expected 64'
    ):
        recorded.load_lists(damaged.get, url)
    del damaged['integrity.1.json']
    assert list(recorded.load_lists(damaged.get, url)) == ['integrity.0.json']
    files = recorded.load_lists(lists.get, url)['integrity.1.json']
    assert files.matches('w/0.0', (9, 'b' * 16))
    assert not files.matches('w/0.0', (8, 'c' * 16))
    files.check('w/0.0', (9, 'b' * 16), 'w')
    files.check('unknown', (1, 'c' * 16), 'unknown')
    with pytest.raises(errors.CorruptCheckpointError) as caught:
        files.check('w/0.0', (8, 'c' * 16), 'w: w/0.0', 'Take another.')
    assert str(caught.value) == (
        f'w: w/0.0 is damaged: it has 8 bytes with xxh3-64 {"c" * 16}, expected 9 bytes with {"b" * 16}. Take another.'
    )


def test_an_array_is_listed_when_all_its_files_are():
    array = StoredArray('w', (4, 4), np.dtype('float32'), np.dtype('float32'), {'chunks': (4, 2), 'compressor': None})
    files = FileChecksums({'w/.zarray': (3, 'a' * 16), 'w/0.0': (9, 'b' * 16)})
    assert not has_checksums(array, files)
    assert has_checksums(array, FileChecksums({**files, 'w/0.1': (9, 'b' * 16)}))
    assert not has_checksums(array, FileChecksums())

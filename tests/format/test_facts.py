"""The facts: what t5ckpt has written is read into fields, and written again byte for byte, without unknown fields."""

import dataclasses
import itertools
import json
import math

import pytest
from support.damage import with_fields
from support.golden import TESTDATA

from t5ckpt import errors
from t5ckpt.core.text import finite_json
from t5ckpt.format.facts import FORMAT, NO_FACTS, Facts, TreeFacts, decode_facts, encode_facts
from t5ckpt.format.file_checksums import FileChecksums

WRITTEN = {path.stem: path.read_bytes() for path in sorted((TESTDATA / 'sidecars').glob('*.json'))}
WRITER = {'name': 't5ckpt', 'version': '0.1.0', 'host': 'host', 'pid': 1234, 'place': 'boot/pid:[1]', 'born': '56789'}
KEEP = {
    'keep': 'KeepAny',
    'policies': [
        {'count': 3, 'keep': 'KeepLatest'},
        {
            'count': 2,
            'keep': 'KeepBest',
            'keep_without_metric': None,
            'metric': 'loss',
            'mode': 'min',
            'period': None,
        },
    ],
}


@pytest.mark.parametrize('name', WRITTEN)
def test_every_field_that_was_written_is_a_field_and_the_bytes_stay_the_same(name):
    facts = decode_facts(WRITTEN[name], name)
    # Earlier programs wrote NaN, which JSON lacks.
    metrics = finite_json(json.loads(WRITTEN[name]).get('metrics'))
    expected = with_fields(WRITTEN[name], metrics=metrics) if 'nan' in str(metrics) else WRITTEN[name]
    if name == 'repaired':
        expected = without_fields(expected, 'aa_new', 'zz_new', 'repaired')
    if name.startswith('rewritten'):
        # What a copy was made from, which no program read.
        expected = without_fields(expected, 'source')
    if name == 'overwritten_in_place':
        # In a bucket, that layout had the directory of the save in each name.
        directory = 't5ckpt-074e217ae24b59a5/'
        assert [*facts.digests] == ['checkpoint', f'{directory}integrity.0.json']
        expected = with_fields(expected.replace(directory.encode(), b''))
    assert encode_facts(facts) == expected


def test_names_below_the_directory_of_a_save():
    manifest, checksums = (1, 'a' * 16), (2, 'b' * 16)
    digests = FileChecksums({'checkpoint': manifest, 'integrity.0.json': checksums})
    facts = Facts(TreeFacts(stored={'u': 'uint4'}), digests=digests)
    directory = 't5ckpt-074e217ae24b59a5'
    moved = decode_facts(encode_facts(dataclasses.replace(facts, positions_in=directory)), '')
    assert moved.tree.stored == {f'{directory}/u': 'uint4'}
    assert moved.digests == {'checkpoint': manifest, f'{directory}/integrity.0.json': checksums}
    assert decode_facts(encode_facts(dataclasses.replace(moved, positions_in='')), '') == facts


def without_fields(data, *fields):
    contents = {field: value for field, value in json.loads(data).items() if field not in (*fields, 'checksum')}
    text = json.dumps({'checksum': '', **contents}, indent=1, sort_keys=True).encode()
    return with_fields(text + b'\n')


def test_the_fields_of_a_save():
    saved = json.loads(WRITTEN['saved'])
    assert decode_facts(WRITTEN['saved'], '') == Facts(
        TreeFacts(
            empty={('e',): 'dict', ('l',): 'list'},
            python={('b',): 'bool', ('f',): 'float', ('n',): 'int'},
            keys={('k',): 'threefry2x32'},
            text={('t',): 'text'},
            stored={'u': 'uint16'},
        ),
        writer=WRITER,
        step=1,
        created_unix=1_700_000_000.0,
        bytes=345845,
        files=7,
        digests=FileChecksums.parse(saved['digests']),
        metrics={'acc': 0.5, 'loss': 1.0},
        devices=4,
        custom_metadata={'a': [1, {'b': None}]},
        keep=KEEP,
    )


def test_the_fields_of_the_other_writers():
    rewritten, lost = (decode_facts(WRITTEN[name], '') for name in ('rewritten', 'rewritten_lost'))
    assert (rewritten.knows_tree, rewritten.keep) == (True, KEEP)
    assert (lost.knows_tree, lost.keep) == (False, {})
    assert math.isnan(decode_facts(WRITTEN['overwritten_in_place'], '').metrics['nan'])
    unfinished = decode_facts(WRITTEN['unfinished'], '')
    assert unfinished.writer['resume'] == 'abc'
    assert (unfinished.program, NO_FACTS.program) == ('t5ckpt 0.1.0', '')


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('bytes', -1),
        ('bytes', 2**63),
        ('created_unix', '2024'),
        ('created_unix', 1e12),
        ('created_unix', float('nan')),
        ('custom_metadata', [1]),
        ('devices', 'all'),
        ('digests', 'none'),
        ('keep', 'all'),
        ('metrics', 'low'),
        ('positions_in', 5),
        ('step', 'one'),
        *itertools.product(['bytes', 'created_unix', 'devices', 'files', 'step'], [True, False]),
        ('writer', 'somebody'),
    ],
)
def test_a_value_of_another_type_does_not_decode(field, value):
    data = with_fields(WRITTEN['saved'], **{field: value})
    with pytest.raises(errors.CorruptCheckpointError, match=f'here does not decode .*{field} is '):
        decode_facts(data, 'here')


def test_metrics_that_are_no_numbers_and_other_directories_are_left_out():
    data = with_fields(WRITTEN['saved'], metrics={'loss': 'low', 'acc': 1}, positions_in='../elsewhere')
    assert (decode_facts(data, '').metrics, decode_facts(data, '').positions_in) == ({'acc': 1}, '')


def test_a_newer_format_is_refused():
    newer = with_fields(WRITTEN['saved'], format=FORMAT + 1)
    with pytest.raises(
        errors.UnsupportedFormatError, match=f'here: it has facts of version {FORMAT + 1}.* Update t5ckpt'
    ):
        decode_facts(newer, 'here')
    with pytest.raises(errors.CorruptCheckpointError, match='does not decode'):
        decode_facts(with_fields(WRITTEN['saved'], format='two'), 'here')


def test_damaged_facts_are_refused():
    with pytest.raises(errors.CorruptCheckpointError, match='does not match its own checksum'):
        decode_facts(WRITTEN['saved'].replace(b'"step": 1', b'"step": 2'), 'here')
    with pytest.raises(errors.CorruptCheckpointError, match='does not decode'):
        decode_facts(with_fields(WRITTEN['saved'], tree={'python': [[['w'], 'IntEnum']]}), 'here')


def test_names_with_the_directory_of_the_save_are_read_without_it_twice():
    """Facts of a bucket had both until 28 November 2026."""
    where = 't5ckpt-0123456789abcdef'
    digests = FileChecksums({f'{where}/integrity.0.json': (5, 'a' * 16)})
    facts = Facts(TreeFacts(stored={f'{where}/a': 'uint4'}), digests=digests, positions_in=where)
    full = with_fields(encode_facts(facts), digests=digests, tree={'stored': [[[f'{where}/a'], 'uint4']]})
    assert decode_facts(full, 'facts') == decode_facts(encode_facts(facts), 'facts')
    assert decode_facts(full, 'facts').digests == digests

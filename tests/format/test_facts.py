"""The facts: what t5ckpt has written is read into fields, and written again byte for byte."""

import json
import math

import pytest
from support.damage import with_fields
from support.golden import TESTDATA

from t5ckpt import errors
from t5ckpt.core.text import finite_json
from t5ckpt.format.facts import FORMAT, NO_FACTS, Facts, TreeFacts, decode_facts, encode_facts, newer_format
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
    assert encode_facts(facts) == expected
    assert set(facts.other) == ({'aa_new', 'zz_new', 'repaired'} if name == 'repaired' else set())


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
        format=FORMAT,
        writer=WRITER,
        step=1,
        created_unix=1_700_000_000.0,
        bytes=345845,
        files=7,
        digests=saved['digests'],
        metrics={'acc': 0.5, 'loss': 1.0},
        devices=4,
        custom_metadata={'a': [1, {'b': None}]},
        keep=KEEP,
    )


def test_the_fields_of_the_other_writers():
    rewritten, lost = (decode_facts(WRITTEN[name], '') for name in ('rewritten', 'rewritten_lost'))
    assert (rewritten.completeness, rewritten.keep, rewritten.source['format']) == (None, KEEP, 't5x')
    assert (lost.completeness, lost.keep) == ('unknown', {})
    assert math.isnan(decode_facts(WRITTEN['overwritten_in_place'], '').metrics['nan'])
    repaired = decode_facts(WRITTEN['repaired'], '')
    assert repaired.other['repaired']['rebuilt'] == ['w/.zarray']
    assert repaired.other == {**repaired.other, 'aa_new': 5, 'zz_new': {'a': [1]}}
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
        ('facts', 'known'),
        ('keep', 'all'),
        ('metrics', {'loss': 'low'}),
        ('step', 'one'),
        ('writer', 'somebody'),
    ],
)
def test_a_value_that_is_not_usable_is_as_if_it_were_missing_and_is_written_again(field, value):
    data = with_fields(WRITTEN['saved'], **{field: value})
    facts = decode_facts(data, '')
    attribute = 'completeness' if field == 'facts' else field
    assert getattr(facts, attribute) == getattr(Facts(), attribute)
    assert encode_facts(facts) == data
    if field == 'digests':
        with pytest.raises(errors.CorruptCheckpointError, match='here: the file checksums are str, expected an object'):
            FileChecksums.recorded_by(facts, 'here')


def test_a_newer_format_stays_one():
    newer = with_fields(WRITTEN['saved'], format=FORMAT + 1)
    assert newer_format(encode_facts(decode_facts(newer, ''))) == FORMAT + 1
    assert newer_format(WRITTEN['saved']) is None
    assert decode_facts(with_fields(WRITTEN['saved'], format='two'), '').format == FORMAT


def test_damaged_facts_are_refused():
    with pytest.raises(errors.CorruptCheckpointError, match='does not match its own checksum'):
        decode_facts(WRITTEN['saved'].replace(b'"step": 1', b'"step": 2'), 'here')
    with pytest.raises(errors.CorruptCheckpointError, match='does not decode'):
        decode_facts(with_fields(WRITTEN['saved'], tree={'python': [[['w'], 'IntEnum']]}), 'here')

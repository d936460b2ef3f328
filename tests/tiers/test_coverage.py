"""Which step a set of disks covers, and which process sends which chunk: the pure part."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from t5ckpt.format.chunk_grid import ChunkGrid
from t5ckpt.tiers.coverage import (
    ChunkNumbers,
    DiskStep,
    candidates,
    decode_bits,
    encode_bits,
    interrupted_uploads,
    num_bits,
    plan_sends,
    union,
)
from t5ckpt.tiers.mixed_overwrites import saves_to_put_back

COUNT = 13


def packed(chunks):
    bits = np.zeros(COUNT, bool)
    bits[list(chunks)] = True
    return np.packbits(bits)


def chunks_of(bits):
    return set(np.flatnonzero(np.unpackbits(bits, count=COUNT)).tolist())


def disk(**steps):
    return {int(name[1:]): DiskStep(*facts) for name, facts in steps.items()}


def test_all_indices_of_one_save_cover_a_step_in_any_order():
    disks = [disk(s5=('a', 1, 3)), disk(s5=('a', 2, 3)), {}, disk(s5=('a', 0, 3), s4=('b', 0, 1))]
    newest, older = candidates(disks)
    assert (newest.step, newest.save, newest.missing) == (5, 'a', ())
    assert (older.step, older.missing) == (4, ())


def test_an_index_that_no_disk_has_is_missing():
    """Two saves of one step are not mixed; the more complete one comes first."""
    disks = [disk(s5=('a', 0, 3)), disk(s5=('b', 1, 3)), disk(s5=('b', 2, 3)), disk(s5=('b', -1, 3))]
    assert [(each.save, each.missing) for each in candidates(disks)] == [('b', (0,)), ('a', (1, 2))]


def test_positions_that_no_disk_has():
    disks = [disk(s5=('a', 0, 2, ((0, 2), (1, 2)), 2)), disk(s5=('a', 1, 2, ((1, 2),), 2))]
    assert candidates(disks)[0].positions == 0
    assert candidates(disks[1:])[0].positions == 1
    assert candidates([disk(s5=('a', -1, 2, (), 2))])[0].positions == 2
    # The list of process 0 is complete without a position: it had no iterator.
    assert candidates([disk(s5=('a', 0, 2, (), 2))])[0].positions == 1
    assert candidates([disk(s5=('a', 0, 2, (), 2)), disk(s5=('a', 1, 2, ((1, 2),), 2))])[0].positions == 0
    # The positions may be those of another number of shards than processes.
    assert candidates([disk(s5=('a', 0, 2, (), 4))])[0].positions == 4
    assert candidates([disk(s5=('a', 0, 2))])[0].positions == 0


def test_uploads_that_are_dropped_have_a_reason():
    """Step 5 is uploaded. Of step 4, process 0 has another save; of 3, two disks are lost; of 2, there is only a record."""
    disks = [
        disk(s5=('a', 0, 2), s4=('c', 0, 3), s3=('d', 0, 3)),
        disk(s5=('a', 1, 2), s4=('b', 0, 2)),
        disk(s4=('b', 1, 2)),
    ]
    parts = [[each.vote(step) for step, each in found.items()] for found in disks]
    found = interrupted_uploads([[(step, False) for step in (2, 3, 4, 5)], [], []], parts)
    assert (found['waiting'], found['incomplete']) == ([5], [])
    assert found['dropped'] == [
        [2, 'no disk has a part of it that can be read'],
        [3, 'the disks with the files of processes 1, 2 of the save are lost'],
        [4, 'process 0 has no part of this save, and step 5 is newer'],
    ]


@given(st.integers(0, 10**9), st.text('0123456789abcdef', min_size=16, max_size=16), st.integers(-1, 5))
def test_a_vote_has_60_bytes(step, save, index):
    facts = DiskStep(save, index, 6, created=1795622542.125)
    assert DiskStep.of(facts.vote(step)) == (step, facts)
    assert len(str(facts.vote(step))) <= 70


def test_the_numbers_of_chunks():
    numbers = ChunkNumbers({'b': ChunkGrid((4, 4), (2, 2)), 'a': ChunkGrid((), ()), 'c': ChunkGrid((5,), (2,))})
    assert numbers.count == 1 + 4 + 3
    names = ['a/0', 'b/0.0', 'b/0.1', 'b/1.0', 'b/1.1', 'c/0', 'c/1', 'c/2']
    for number, name in enumerate(names):
        bits = numbers.bits([name, 'b/.zarray', 'b/2.0', 'd/0', 'train_ds-000-of-001'])
        assert np.flatnonzero(np.unpackbits(bits)).tolist() == [number]
        assert numbers.chosen(names, bits) == [name]
    assert numbers.chosen(names, numbers.bits([])) == []


SETS = st.sets(st.integers(0, COUNT - 1))


@given(SETS)
def test_bitmaps_survive_their_text(chunks):
    text = encode_bits(packed(chunks))
    assert chunks_of(decode_bits(text, COUNT)) == chunks
    assert num_bits(packed(chunks)) == len(chunks)
    assert (text == '') == (not chunks)


@pytest.mark.parametrize('count', [0, 5, 100, -1, 2**40])
def test_a_bitmap_of_another_length_is_refused(count):
    with pytest.raises(ValueError, match=r'bytes|chunks'):
        decode_bits(encode_bits(packed({1, 12})), count)


@given(SETS, st.lists(SETS, max_size=5))
def test_each_lacking_chunk_comes_from_one_holder(lacking, held):
    votes = [encode_bits(packed(chunks & lacking)) for chunks in held]
    plan = plan_sends(packed(lacking), votes, COUNT)
    sends = [chunks_of(decode_bits(text, COUNT)) for text in plan.sends]
    everywhere = set().union(*held) & lacking
    assert sorted(chunk for each in sends for chunk in each) == sorted(everywhere)
    assert all(sent <= chunks for sent, chunks in zip(sends, held, strict=True))
    assert chunks_of(plan.nowhere) == lacking - everywhere
    assert chunks_of(union(votes, COUNT)) == everywhere


def test_holders_of_the_same_chunks_share_the_work():
    votes = [encode_bits(packed(range(COUNT)))] * 4
    plan = plan_sends(packed(range(COUNT)), votes, COUNT)
    assert [len(chunks_of(decode_bits(text, COUNT))) for text in plan.sends] == [4, 4, 4, 1]


@pytest.mark.parametrize(
    ('current', 'replaced', 'expected'),
    [
        # No process died: only leftovers of ended replacements.
        ([{1: 'new'}, {1: 'new'}], [{1: ['old']}, {1: ['old']}], {}),
        # Process 1 died before its commit, with the new one elsewhere or under the other name.
        ([{1: 'new'}, {1: 'old'}], [{1: ['old']}, {}], {1: 'old'}),
        ([{1: 'new'}, {1: 'new'}, {1: 'old'}], [{1: ['old']}, {1: ['old']}, {1: ['new']}], {1: 'new'}),
        ([{1: 'old'}, {1: 'old'}, {1: 'new'}], [{1: ['new']}, {1: ['new']}, {1: ['old']}], {1: 'old'}),
        # The disk of process 1 is new, or has a third save.
        ([{1: 'new'}, {}], [{1: ['old']}, {}], {}),
        ([{1: 'new'}, {1: 'third'}], [{1: ['old']}, {}], {}),
        # A removed copy cannot be put back; garbage collection puts back the one of a step that is missing.
        ([{1: 'new'}, {1: 'old'}], [{}, {1: ['new']}], {1: 'new'}),
        ([{}, {}], [{2: ['old']}, {}], {}),
    ],
)
def test_all_disks_get_the_same_save_after_an_overwrite_that_was_cut_off(current, replaced, expected):
    assert saves_to_put_back(current, replaced) == expected


@pytest.mark.parametrize('newer', ['a', 'b'])
def test_of_two_saves_with_as_many_missing_indices_the_newer_one_comes_first(newer):
    times = {'a': 100.0, 'b': 100.0} | {newer: 100.125}
    disks = [disk(s5=('a', 0, 2, (), 0, times['a'])), disk(s5=('b', 1, 2, (), 0, times['b']))]
    votes = [[each.vote(step) for step, each in found.items()] for found in disks]
    first, _ = candidates(dict(DiskStep.of(vote) for vote in vote_list) for vote_list in votes)
    assert (first.save, first.created) == (newer, 100.125)
    disks.append(disk(s5=('a', 1, 2, (), 0, times['a'])))
    assert candidates(disks)[0].save == 'a'

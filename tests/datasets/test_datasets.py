"""Data iterators in checkpoints: what is accepted, what the files hold, and what is said when it does not fit."""

import collections
import json
import logging
import pathlib
import random
import re
import time
import uuid
from typing import Any

import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, strategies as st
from support.bits import assert_same
from support.options import with_options

import t5ckpt
from t5ckpt import errors
from t5ckpt.commit.holds import hold
from t5ckpt.datasets import as_dataset_iterator, decode_state, encode_state
from t5ckpt.storage import open_storage

STATE = {'w': np.arange(6.0)}


class GetSet:
    """Grain's way, a shuffled pass over numbers; `generator` says where it stands."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)
        self.seen = 0

    def __next__(self) -> int:
        self.seen += 1
        return int(self.generator.integers(10**9))

    def get_state(self) -> dict[str, Any]:
        return {'seen': self.seen, 'generator': self.generator.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.seen = state['seen']
        self.generator.bit_generator.state = state['generator']

    # Grain's iterators have these, too, for Orbax; they write nothing before they are awaited.
    async def save(self, directory: Any) -> None:
        raise NotImplementedError

    async def load(self, directory: Any) -> None:
        raise NotImplementedError


class StateDict:
    """torch's way; the state is a tuple inside an OrderedDict."""

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __next__(self) -> float:
        return self.generator.random()

    def state_dict(self) -> dict[str, Any]:
        return collections.OrderedDict(generator=self.generator.getstate())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.setstate(state['generator'])


class Files:
    """T5X's and CLU's way, with a file in a directory of its own."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> int:
        self.position += 1
        return self.position

    def save(self, filename: str) -> None:
        pathlib.Path(filename).mkdir()
        pathlib.Path(filename, 'position.json').write_text(json.dumps(self.position))

    def load(self, filename: str) -> None:
        self.position = json.loads(pathlib.Path(filename, 'position.json').read_text())


class NewerFiles:
    """CLU since 0.0.10: `load` is called `restore`, and `load` itself complains."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> int:
        self.position += 1
        return self.position

    def save(self, filename: str) -> None:
        pathlib.Path(filename).write_text(str(self.position))

    def restore(self, filename: str) -> None:
        self.position = int(pathlib.Path(filename).read_text())

    def load(self, filename: str) -> None:
        raise DeprecationWarning


def checkpointer(run_dir: Any, iterator: Any = None, **options: Any) -> t5ckpt.Checkpointer:
    return t5ckpt.Checkpointer(STATE, checkpoints_dir=run_dir, dataset_iterator=iterator, **with_options(**options))


@pytest.mark.parametrize('how', ['save', 'save_async'])
@pytest.mark.parametrize('kind', [GetSet, StateDict, Files, NewerFiles])
@pytest.mark.parametrize('where', ['disk', 'memory'])
def test_the_next_batch_is_the_next_batch(run_dir, request, kind, how, where):
    place = run_dir if where == 'disk' else f'memory://{request.node.name}/run'
    iterator = kind()
    for _ in range(3):
        next(iterator)
    with checkpointer(place, iterator) as ck:
        pending = getattr(ck, how)(STATE, step=1)
        expected = [next(iterator) for _ in range(5)]
        if how == 'save_async':
            pending.result()
    again = kind()
    with checkpointer(place, again) as ck:
        assert_same(ck.restore()['w'], STATE['w'])
    assert [next(again) for _ in range(5)] == expected


# ---- the state's file ----

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.sampled_from([np.int64(-3), np.float32(0.1), np.bool_(True), np.zeros((0, 2)), np.arange(6).reshape(2, 3)]),
    st.sampled_from(
        [np.array(['a', 'bc']), np.array(5, '>i4'), np.asfortranarray(np.ones((2, 3))), np.datetime64(1, 's')]
    ),
)
KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.dictionaries(KEYS, inner), st.tuples(inner), st.tuples(inner, inner, inner)
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other)


@given(STATES)
def test_a_state_comes_back_with_its_types(state):
    decoded, name = decode_state(encode_state(state, 'module.Class'), 'there')
    assert same(decoded, state)
    assert name == 'module.Class'


def test_arrays_of_a_state_may_be_written_to():
    decoded, _ = decode_state(encode_state({'buffer': np.zeros(3)}, 'x'), 'there')
    decoded['buffer'][:] = 1


@given(st.data())
def test_a_damaged_file_is_an_error_and_never_another_position(data):
    state = {'position': 12345, 'generator': np.random.default_rng(0).bit_generator.state}
    good = encode_state(state, 'module.Class')
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decoded, _ = decode_state(bytes(bad), 'there')
    except errors.CorruptCheckpointError:
        return
    # Only the iterator's name is not covered, which is for messages.
    assert same(decoded, state)


@given(st.binary(max_size=60))
def test_other_objects_than_states_are_an_error(noise):
    with pytest.raises(errors.CorruptCheckpointError):
        decode_state(noise, 'there')


@pytest.mark.parametrize('size', [0, 1, 20, -1])
def test_a_file_cut_short_is_an_error(size):
    with pytest.raises(errors.CorruptCheckpointError):
        decode_state(encode_state({'a': 1}, 'x')[:size], 'there')


def test_a_file_cannot_make_objects():
    array = msgpack.packb(['|O', [1], b'12345678'])
    state = msgpack.packb(msgpack.ExtType(3, array))
    data = msgpack.packb({'format': 1, 'iterator': 'x', 'digest': t5ckpt_digest(state), 'state': state})
    with pytest.raises(errors.CorruptCheckpointError, match='dtype'):
        decode_state(data, 'there')


def t5ckpt_digest(data: bytes) -> str:
    from t5ckpt.format.checksum import digest

    return digest(data)


def endless() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ('state', 'where'),
    [
        ({'a': [1, {'f': open}]}, r"state\['a'\]\[1\]\['f'\] is of type builtins.builtin_function"),
        ({frozenset(): 1}, 'the key frozenset'),
        (np.array([object()]), 'state has the dtype object'),
        (np.zeros(2, 'i4,f8'), 'state has the dtype'),
        (endless(), 'nested too deeply'),
        ({'replay buffer': bytes(2**32)}, r'4 GiB.*(bytes object is too large).*leaves of the train state'),
        ({'file': 'caf\udce9.txt'}, r'text that is not valid Unicode \(.caf\\udce9.txt.: surrogates'),
    ],
)
def test_what_a_state_cannot_hold_is_named(state, where):
    with pytest.raises(errors.DatasetStateError, match=where):
        encode_state(state, 'x')


# ---- what does not fit ----


@pytest.mark.parametrize('iterator', [iter([1]), [1], 5, 'text', range(3)])
def test_what_has_no_position_is_refused(run_dir, iterator):
    with pytest.raises(errors.UnsupportedLeafError, match='cannot return its position'):
        checkpointer(run_dir, iterator)


class Broken(GetSet):
    """Its state holds what no file does."""

    def get_state(self) -> dict[str, Any]:
        return {'open file': open}


class Failing(Files):
    def save(self, filename: str) -> None:
        raise RuntimeError('worker 3 is gone')


class Forgetful(Files):
    def save(self, filename: str) -> None:
        pathlib.Path(filename).parent.joinpath('elsewhere').write_text('1')


@pytest.mark.parametrize(
    ('kind', 'text'),
    [(Broken, 'open file'), (Failing, 'worker 3 is gone')],
)
@pytest.mark.parametrize('how', ['save', 'save_async'])
def test_an_iterator_that_cannot_be_saved_fails_the_save_and_leaves_nothing(run_dir, kind, text, how):
    with checkpointer(run_dir, kind()) as ck:
        with pytest.raises(errors.DatasetStateError, match=text):
            getattr(ck, how)(STATE, step=1)
        assert not run_dir.exists() or list(run_dir.iterdir()) == []
    with checkpointer(run_dir) as ck:
        assert ck.save(STATE, step=1) is not None


def test_an_iterator_that_writes_nothing_is_saved_without(run_dir, caplog):
    with caplog.at_level(logging.WARNING, 't5ckpt'), checkpointer(run_dir, Forgetful()) as ck:
        assert ck.save(STATE, step=1) is not None
    assert 'save(filename) of Forgetful wrote no file' in caplog.text
    assert list(run_dir.glob('checkpoint_1/train_ds-*')) == []


def test_an_iterator_of_another_kind_is_an_error(run_dir):
    with checkpointer(run_dir, Files()) as ck:
        ck.save(STATE, step=1)
    with (
        checkpointer(run_dir, GetSet()) as ck,
        pytest.raises(errors.DatasetStateError, match='another kind of iterator'),
    ):
        ck.restore()


def test_an_iterator_that_refuses_the_state_is_named_with_who_wrote_it(run_dir):
    with checkpointer(run_dir, StateDict()) as ck:
        ck.save(STATE, step=1)
    with (
        checkpointer(run_dir, GetSet()) as ck,
        pytest.raises(errors.DatasetStateError, match=r'GetSet rejected the state that .*StateDict has written'),
    ):
        ck.restore()


def test_a_damaged_position_fails_the_restore_and_leaves_the_iterator(run_dir):
    iterator = GetSet()
    next(iterator)
    with checkpointer(run_dir, iterator) as ck:
        ck.save(STATE, step=1)
        path = run_dir / 'checkpoint_1' / 'train_ds-000-of-001.msgpack'
        path.write_bytes(path.read_bytes()[:-1])
        next(iterator)
        with pytest.raises(errors.CorruptCheckpointError, match='train_ds-000-of-001'):
            ck.restore()
    assert iterator.seen == 2


# ---- with and without ----


def test_a_checkpoint_without_position_leaves_the_iterator_and_says_so(run_dir, caplog):
    iterator = GetSet()
    next(iterator)
    with checkpointer(run_dir) as ck:
        ck.save(STATE, step=1)
    with caplog.at_level(logging.WARNING, 't5ckpt'), checkpointer(run_dir, iterator) as ck:
        ck.restore()
    assert iterator.seen == 1
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 'checkpoint_1 has no data-iterator state, so the position' in record.getMessage()


@pytest.mark.parametrize('below', ['dataset', 'dataset/process_0-of-1'])
@pytest.mark.parametrize('on_bucket', [False, True])
def test_the_position_of_a_step_that_t5x_saved_through_orbax(run_dir, below, on_bucket, caplog):
    """T5X's DatasetCheckpointHandler: the item `dataset`, of several processes with a directory for each."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        orbax.save(run_dir / 'checkpoint_4' / 'state', STATE)
    written = Files()
    written.position = 9
    (run_dir / 'checkpoint_4' / below).mkdir(parents=True)
    written.save(str(run_dir / 'checkpoint_4' / below / 'train_ds-000-of-001'))
    place = run_dir
    if on_bucket:
        place = open_storage(f'memory://orbax_{below.count("/")}')
        for path in run_dir.rglob('*'):
            if path.is_file():
                place.write(path.relative_to(run_dir).as_posix(), path.read_bytes())
    iterator = Files()
    with caplog.at_level(logging.INFO, 't5ckpt'), checkpointer(place, iterator) as ck:
        ck.restore()
        assert (ck.latest_step(), iterator.position) == (4, 9)
    # Not that the item is not read.
    assert 'not read' not in caplog.text
    assert caplog.messages[-1].endswith('; data iterator continues') or on_bucket


@pytest.mark.parametrize('moves', [True, False])
@pytest.mark.parametrize('how', [None, 'here', 'not here'])
def test_one_line_says_what_a_restore_did(run_dir, caplog, how, moves):
    state = {'w': np.zeros(50_000, np.float32), 'b': np.zeros(4, np.float32), 'step': 3, 'none': None, 'empty': {}}
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=run_dir, dataset_iterator=GetSet() if how == 'here' else None
    ) as ck:
        ck.save(state)
    iterator = None if how is None else GetSet()
    with t5ckpt.Checkpointer(state, checkpoints_dir=run_dir, dataset_iterator=iterator) as ck:
        caplog.set_level(logging.INFO, 't5ckpt')
        caplog.clear()
        ck.restore(restore_iterator=moves)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    beginning, _, end = line.partition(', in ')
    assert beginning == f't5ckpt: restored step 3 from {run_dir}/checkpoint_3: 3 leaves, 200.0 kB'
    data = '' if how is None else 'continues' if how == 'here' and moves else 'is unchanged'
    assert re.fullmatch(rf'[0-9]+\.[0-9][0-9] s{f"; data iterator {data}" if data else ""}', end), line


def test_a_lazy_restore_and_a_path_elsewhere_say_what_they_did(run_dir, caplog):
    with checkpointer(run_dir) as ck:
        ck.save(STATE, step=1)
        caplog.set_level(logging.INFO, 't5ckpt')
        caplog.clear()
        ck.restore(lazy_parameters=True)
        ck.restore(path=run_dir / 'checkpoint_1' / 'checkpoint')
    lazy, elsewhere = caplog.messages
    assert f'restored step 1 from {run_dir}/checkpoint_1: 1 leaf, not read yet' in lazy
    assert f'restored step 1 from {run_dir}/checkpoint_1: 1 leaf, 48 B' in elsewhere


def test_a_reader_is_not_told_that_it_has_no_iterator(run_dir, caplog):
    with checkpointer(run_dir, GetSet()) as ck:
        ck.save(STATE, step=1)
    with caplog.at_level(logging.WARNING, 't5ckpt'), checkpointer(run_dir, read_only=True) as ck:
        ck.restore()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_trainer_without_iterator_leaves_the_position_and_says_so(run_dir, caplog):
    with checkpointer(run_dir, GetSet()) as ck:
        ck.save(STATE, step=1)
    with caplog.at_level(logging.WARNING, 't5ckpt'), checkpointer(run_dir) as ck:
        ck.restore()
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 'has data-iterator state (train_ds-000-of-001), but this trainer has no' in record.getMessage()


def test_a_restore_from_another_run_without_iterator_is_not_warned_of(run_dir, tmp_path, caplog):
    with checkpointer(run_dir, GetSet()) as ck:
        ck.save(STATE, step=1)
    with caplog.at_level(logging.INFO, 't5ckpt'), checkpointer(tmp_path / 'new') as ck:
        ck.restore(path=run_dir)
    (record,) = [record for record in caplog.records if 'data-iterator state' in record.message]
    assert record.levelno == logging.INFO


@pytest.mark.parametrize('iterator', [None, GetSet()])
def test_nothing_is_said_when_both_have_one_or_neither(run_dir, caplog, iterator):
    with caplog.at_level(logging.WARNING, 't5ckpt'), checkpointer(run_dir, iterator) as ck:
        ck.save(STATE, step=1)
        ck.restore()
    assert caplog.records == []


def test_nothing_is_said_when_the_position_is_left_on_purpose(run_dir, caplog):
    iterator = GetSet()
    with caplog.at_level(logging.WARNING, 't5ckpt'), checkpointer(run_dir, iterator) as ck:
        ck.save(STATE, step=1)
        next(iterator)
        ck.restore(restore_iterator=False)
    assert iterator.seen == 1
    assert caplog.records == []


def test_an_adapter_is_made_once():
    iterator = Files()
    assert as_dataset_iterator(iterator) is iterator
    adapted = as_dataset_iterator(GetSet())
    assert as_dataset_iterator(adapted) is adapted


def test_positions_are_kept_for_the_latest_steps_only(run_dir):
    with checkpointer(run_dir, GetSet(), keep_dataset_checkpoints=1) as ck:
        for step in range(3):
            ck.save(STATE, step=step)
        assert ck.all_steps() == [0, 1, 2]
        assert ck.all_dataset_checkpoint_steps() == [2]
    assert open_storage(run_dir).kind('checkpoint_1/train_ds-000-of-001.msgpack') is None


@pytest.mark.parametrize('kind', ['file', 'memory'])
def test_a_held_step_keeps_its_position(kind, run_dir, caplog):
    caplog.set_level('INFO', 't5ckpt')
    place = run_dir if kind == 'file' else f'memory://{uuid.uuid4().hex}/run'
    with checkpointer(place, GetSet(), keep_dataset_checkpoints=1) as ck:
        ck.save(STATE, step=0)
        with hold(open_storage(place), 0, 60, time.time) as is_there:
            assert is_there
            ck.save(STATE, step=1)
            assert ck.all_dataset_checkpoint_steps() == [0, 1]
        assert 'is held by a reader, so it was not stripped of its iterator state' in caplog.text
        ck.save(STATE, step=2)
        assert ck.all_dataset_checkpoint_steps() == [2]


def test_a_pinned_step_keeps_its_position(run_dir):
    """T5X's rule (checkpoint_utils.remove_dataset_checkpoint): it counts among the latest, and its files stay."""
    with checkpointer(run_dir, GetSet()) as ck:
        for step in range(3):
            ck.save(STATE, step=step)
        t5ckpt.pin_checkpoint(run_dir / 'checkpoint_1')
        ck.keep_dataset_checkpoints = 1
        ck.save(STATE, step=3)
        assert ck.all_steps() == [0, 1, 2, 3]
        assert ck.all_dataset_checkpoint_steps() == [1, 3]

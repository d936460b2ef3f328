"""Checkpoints written leaf by leaf: what converters and rewriters share."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import uuid

import jax
import numpy as np
import pytest
from support.bits import assert_same
from support.leaf_by_leaf import ARRAYS, SMALL_CHUNKS, Source, request_for

import t5ckpt
from t5ckpt import errors
from t5ckpt.catalog.locate import locate
from t5ckpt.lazy import LazyThreadPoolArray
from t5ckpt.planning.casts import Cast
from t5ckpt.planning.save_plan import SaveOptions
from t5ckpt.reading.contents import read_contents
from t5ckpt.save.linked_arrays import LinkedArray, linked_leaves
from t5ckpt.save.prepare import write_stream
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock, FaultyStorage


def check(place, arrays=ARRAYS, step=12):
    view = t5ckpt.open_checkpoint(place, step)
    assert set(view) == {'/'.join(path) for path in arrays}
    for path, value in arrays.items():
        assert_same(view['/'.join(path)].get(), value, str(path))
    restored = t5ckpt.load_t5x_checkpoint(place, step)
    assert_same(restored['target']['a'], arrays['target', 'a'])


@pytest.mark.parametrize('compression', [None, 'zstd', 'auto'])
@pytest.mark.parametrize('kind', ['file', 'memory'])
def test_leaves_come_back(tmp_path, kind, compression):
    place = str(tmp_path / 'run') if kind == 'file' else f'memory://{uuid.uuid4().hex}/run'
    seen = []
    options = dataclasses.replace(SMALL_CHUNKS, codec=compression)
    source = Source(ARRAYS, whole={('state', 'v')})
    done = write_stream(
        source.table, request_for(place, options=options, progress=lambda *numbers: seen.append(numbers))
    )
    check(place)
    assert done.step == 12
    assert t5ckpt.all_steps(place) == [12]
    assert source.reads.count(('state', 'v')) == 1
    assert source.reads.count(('target', 'a')) > 3, 'in slices'
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def test_checksums_are_in_a_list(tmp_path):
    write_stream(Source(ARRAYS).table, request_for(tmp_path))
    listed = json.loads((tmp_path / 'checkpoint_12' / 'integrity.0.json').read_text())['files']
    found = {
        str(path.relative_to(tmp_path / 'checkpoint_12')): path.stat().st_size
        for path in (tmp_path / 'checkpoint_12').glob('*/*')
    }
    assert {name: size for name, (size, _) in listed.items()} == found


def test_values_in_flight_are_bounded(tmp_path):
    """64 MB go through less than 4: a tenth would be a leak."""
    arrays = {('target', str(i)): np.full((2048, 1024), i, np.float32) for i in range(8)}
    options = SaveOptions(chunk_bytes=2**18)
    tracemalloc.start()
    try:
        write_stream(Source(arrays).table, request_for(tmp_path, options=options, budget_bytes=4 * 2**20))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 2**18 < peak < 4 * 2**20


def test_a_cast_touches_floats_of_target_alone(tmp_path):
    options = dataclasses.replace(SMALL_CHUNKS, cast=Cast(np.dtype(np.float16)))
    arrays = {('target', 'w'): np.ones((50, 60), np.float32), ('state', 'v'): np.ones((50, 60), np.float32)}
    write_stream(Source(arrays).table, request_for(tmp_path, options=options))
    loaded = t5ckpt.load_t5x_checkpoint(tmp_path)
    assert (loaded['target']['w'].dtype, loaded['state']['v'].dtype) == (np.float16, np.float32)


# ---- what is there already ----


def test_a_step_that_is_there(tmp_path):
    write_stream(Source(ARRAYS).table, request_for(tmp_path))
    other = {('target', 'a'): np.zeros((300, 200), np.float32)}
    again = Source(other)
    with pytest.raises(errors.CheckpointExistsError, match='checkpoint_12 exists already'):
        write_stream(again.table, request_for(tmp_path))
    assert again.reads == []
    check(tmp_path)
    write_stream(again.table, request_for(tmp_path, overwrite=True))
    check(tmp_path, other)
    assert [path.name for path in tmp_path.iterdir()] == ['checkpoint_12']


def test_a_pinned_step_is_not_replaced(tmp_path):
    write_stream(Source(ARRAYS).table, request_for(tmp_path))
    t5ckpt.pin_checkpoint(tmp_path / 'checkpoint_12')
    with pytest.raises(errors.CheckpointExistsError, match='pinned'):
        write_stream(Source(ARRAYS).table, request_for(tmp_path, overwrite=True))


def test_one_write_replaces_a_step_where_nothing_can_be_renamed():
    place = f'memory://{uuid.uuid4().hex}/run'
    write_stream(Source(ARRAYS).table, request_for(place))
    other = {name: np.zeros_like(value) for name, value in ARRAYS.items()}
    write_stream(Source(other).table, request_for(place, overwrite=True))
    check(place, other)


def test_python_numbers_text_keys_and_empty_containers_are_taken_over(tmp_path):
    state = {'n': 5, 'x': 0.5, 'flag': True, 'name': 'run', 'none': None, 'empty': {}, 'w': np.ones((50, 60))}
    state |= {'key': jax.random.key(3), 'keys': jax.random.split(jax.random.key(1), 400)}
    t5ckpt.Checkpointer(
        state, checkpoints_dir=tmp_path / 'a', options=t5ckpt.CheckpointerOptions(inline_bytes=64)
    ).save(state, step=12)
    write_stream(borrowed(tmp_path / 'a'), request_for(tmp_path / 'b'))
    back = t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'b').restore()
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert [type(back[key]) for key in ('n', 'x', 'flag', 'name')] == [int, float, bool, str]
    assert (jax.random.key_data(back['keys']) == jax.random.key_data(state['keys'])).all()
    assert back['key'] == state['key']
    assert (back['empty'], back['n']) == ({}, 5)


def test_a_source_that_fails_leaves_nothing(tmp_path):
    def fail(_index):
        raise errors.CorruptCheckpointError('the source is broken')

    table = Source(ARRAYS).table | {('target', 'z'): LazyThreadPoolArray((300, 200), np.float32, None, fail)}
    with pytest.raises(errors.CorruptCheckpointError, match='the source is broken'):
        write_stream(table, request_for(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_source_of_another_shape(tmp_path):
    for leaf in (
        LazyThreadPoolArray((300, 200), np.float32, None, lambda _: np.zeros((2, 2), np.float32)),
        LazyThreadPoolArray((300, 200), np.float32, lambda: np.zeros((2, 2), np.float32)),
    ):
        with pytest.raises(errors.UnsupportedLeafError, match=r'target/w: a LazyArray.*\(2, 2\)'):
            write_stream({('target', 'w'): leaf}, request_for(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(('kind', 'overwrite'), [('file', False), ('file', True), ('memory', False)])
def test_a_fault_at_every_operation(tmp_path, kind, overwrite):
    """Whatever fails: the checkpoint that was there is there, or the new one is, and the next write works."""
    old = {('target', 'a'): np.zeros((300, 200), np.float32)}

    def prepared(name):
        place = str(tmp_path / name) if kind == 'file' else f'memory://{uuid.uuid4().hex}/run'
        if overwrite:
            write_stream(old, request_for(place, clock=FakeClock()))
        return place

    def write(storage):
        return write_stream(Source(ARRAYS).table, request_for(storage, overwrite=overwrite, clock=FakeClock()))

    counting = FaultyStorage(open_storage(prepared('count')))
    write(counting)
    raised = 0
    for fail_at in range(len(counting.operations)):
        place = prepared(str(fail_at))
        try:
            write(FaultyStorage(open_storage(place), fail_at))
        except errors.T5CkptError as error:
            raised += 'injected' in str(error)
            if overwrite:
                check(place, old)
            else:
                assert t5ckpt.all_steps(place) == []
            write(open_storage(place))
        check(place)
    assert raised > 15


# ---- writes that end early ----

STOPPED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from support.leaf_by_leaf import ARRAYS, Source, request_for
from t5ckpt.lazy import LazyThreadPoolArray
from t5ckpt.save.prepare import write_stream
# A shell starts what runs in the background with interrupts ignored, and Python keeps that.
signal.signal(signal.SIGINT, signal.default_int_handler)
source = Source(ARRAYS)
def die(index):
    os.kill(os.getpid(), {signal})
table = source.table | {{('target', 'z'): LazyThreadPoolArray((300, 200), 'float32', None, die)}}
write_stream(table, request_for({place!r}, budget_bytes=1))
"""


@pytest.mark.slow
@pytest.mark.parametrize('stop', [signal.SIGKILL, signal.SIGINT])
def test_a_write_that_was_stopped_is_not_visible(tmp_path, stop):
    """An interrupt removes what was written; after a kill, the next write does."""
    code = STOPPED.format(tests=str(pathlib.Path(__file__).parents[1]), place=str(tmp_path), signal=int(stop))
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
    assert done.returncode in {-stop, 1}, done.stderr
    assert (len([*tmp_path.glob('*/*/*')]) > 10) == (stop == signal.SIGKILL)
    assert t5ckpt.all_steps(tmp_path) == []
    write_stream(Source(ARRAYS).table, request_for(tmp_path))
    check(tmp_path, ARRAYS)
    assert [path.name for path in tmp_path.iterdir()] == ['checkpoint_12']


# ---- arrays of another checkpoint ----


def borrowed(place, step=12):
    return linked_leaves(read_contents(locate(place, step)))


def test_arrays_that_stay_are_linked(tmp_path):
    write_stream(Source(ARRAYS).table, request_for(tmp_path / 'a'))
    table = {('target', 'new', *path): leaf for path, leaf in borrowed(tmp_path / 'a').items()}
    assert isinstance(table['target', 'new', 'target', 'a'], LinkedArray)
    write_stream(table, request_for(tmp_path / 'b', step=3))
    view = t5ckpt.open_checkpoint(tmp_path / 'b')
    for path, value in ARRAYS.items():
        assert_same(view['/'.join(('target', 'new', *path))].get(), value)
    for path in (tmp_path / 'b' / 'checkpoint_3').glob('*/[0-9]*'):
        assert path.stat().st_nlink == 2, path


class Interrupted(FaultyStorage):
    """Ctrl-C comes with the third chunk; no file can be linked, and each takes a while."""

    chunks = 0
    guard = threading.Lock()

    def link(self, source, target, of=None):
        return False

    def write_chunk(self, key, data):
        if not key.endswith('.zarray'):
            with self.guard:
                self.chunks += 1
                is_third = self.chunks == 3
            if is_third:
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        return super().write_chunk(key, data)


def test_an_interrupt_ends_the_copy_of_an_array_between_two_chunks(tmp_path):
    large = {('target', 'a'): np.arange(100 * 64, dtype=np.float32).reshape(100, 64)}
    options = dataclasses.replace(SMALL_CHUNKS, chunk_bytes=256)
    write_stream(Source(large).table, request_for(tmp_path / 'a', options=options))
    table, target = linked_leaves(read_contents(locate(tmp_path / 'a'))), Interrupted(open_storage(tmp_path / 'b'))
    # A shell ignores Ctrl-C in what it runs in the background.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            write_stream(table, request_for(target, step=3))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert target.chunks < 50
    assert t5ckpt.all_steps(tmp_path / 'b') == []


def test_a_cast_array_is_read(tmp_path):
    write_stream(Source(ARRAYS).table, request_for(tmp_path / 'a'))
    leaf = borrowed(tmp_path / 'a')['target', 'b', 'kernel'].astype(np.float32)
    write_stream({('w',): leaf}, request_for(tmp_path / 'b'))
    assert_same(t5ckpt.load_t5x_checkpoint(tmp_path / 'b')['w'], ARRAYS['target', 'b', 'kernel'].astype(np.float32))


def test_where_links_do_not_work_the_bytes_are_copied(tmp_path):
    write_stream(Source(ARRAYS).table, request_for(tmp_path / 'a'))
    place = f'memory://{uuid.uuid4().hex}/run'
    write_stream(borrowed(tmp_path / 'a'), request_for(place))
    check(place)


def test_damage_is_not_handed_on(tmp_path):
    write_stream(Source(ARRAYS).table, request_for(tmp_path / 'a'))
    victim = tmp_path / 'a' / 'checkpoint_12' / 'target.a' / '1.0'
    whole = victim.read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1], None):
        if damaged is None:
            os.unlink(victim)
        else:
            victim.write_bytes(damaged)
        with pytest.raises(errors.CorruptCheckpointError, match=r'target/a: .*target\.a/1\.0'):
            write_stream(borrowed(tmp_path / 'a'), request_for(tmp_path / 'b'))
        assert not any((tmp_path / 'b').iterdir())

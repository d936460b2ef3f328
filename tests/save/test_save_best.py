"""Best by metrics in TensorBoard's files: T5X's own runs replayed, files as they grow, break and lie."""

import json
import math
import os
import pathlib
import random
import struct
import subprocess
import sys
import tarfile
import uuid

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.options import with_options
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2, tensor_pb2

import t5ckpt
from t5ckpt import Checkpointer, KeepBest, SaveBestCheckpointer, TensorBoardMetrics, all_steps, pin_checkpoint
from t5ckpt.errors import StorageError
from t5ckpt.metrics.event_file import EventScan, masked_crc32c
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage

ARCHIVE = pathlib.Path(__file__).parents[2] / 'testdata' / 'case09_savebest.tar.gz'


@pytest.fixture(scope='module')
def golden(tmp_path_factory):
    root = tmp_path_factory.mktemp('golden')
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(root, filter='data')
    return root / 'case09_savebest'


def configurations():
    with tarfile.open(ARCHIVE) as tar:
        return json.load(tar.extractfile('case09_savebest/savebest.json'))


CONFIGURATIONS = configurations()


OPEN = []


@pytest.fixture(autouse=True)
def _close_files():
    yield
    while OPEN:
        OPEN.pop().close()


class Log:
    """An event file, written by tensorboardX."""

    def __init__(self, directory, suffix=''):
        os.makedirs(directory, exist_ok=True)
        self._writer = EventsWriter(os.path.join(directory, 'events'), suffix)
        self.path = pathlib.Path(self._writer._file_name)
        OPEN.append(self._writer)
        self.flush()

    def add(self, step, *values):
        """One event with values of (tag, number or TensorProto)."""
        shown = [
            summary_pb2.Summary.Value(tag=tag, tensor=value)
            if isinstance(value, tensor_pb2.TensorProto)
            else summary_pb2.Summary.Value(tag=tag, simple_value=value)
            for tag, value in values
        ]
        self._writer.write_event(event_pb2.Event(step=step, wall_time=1.0, summary=summary_pb2.Summary(value=shown)))
        return self

    def flush(self):
        self._writer.flush()
        return self


def tensor(dtype, shape=(), **values):
    dims = [{'size': size} for size in shape]
    return tensor_pb2.TensorProto(dtype=dtype, tensor_shape={'dim': dims}, **values)


def save(ck, step):
    ck.save({'target': {'w': np.full(8, step, np.float32)}}, step=step)


# --- T5X's runs -------------------------------------------------------------------------------------------------------


# In some of T5X's runs no metric comes at all.
@pytest.mark.filterwarnings('ignore::t5ckpt.errors.MissingMetricWarning')
@pytest.mark.parametrize('name', CONFIGURATIONS)
def test_the_retained_sets_are_those_of_t5x_after_every_save(name, tmp_path):
    case = CONFIGURATIONS[name]
    config = case['config']
    log = Log(tmp_path / config['run']) if config['metrics'] else None
    state = {'target': {'w': np.zeros(8, np.float32)}}
    options = {
        'metric_name_to_monitor': config['metric_name_to_monitor'],
        'metric_mode': config['mode'],
        'keep_checkpoints_without_metrics': config['kwm'],
        'force_keep_period': config.get('period'),
    }
    trace = []
    with SaveBestCheckpointer(state, None, tmp_path, keep=config['keep'], **with_options(**options)) as ck:
        for step in config['steps']:
            metric = config['metrics'].get(str(step))
            events = [] if metric is None else [metric, *filter(None, [config.get('rewrite', {}).get(str(step))])]

            def write(at=step, values=events):
                for value in values:
                    log.add(at, (config['tag'], value)).flush()

            if config.get('before'):
                write()
            save(ck, step)
            trace.append({'saved': step, 'after': ck.all_steps()})
            if step in config.get('pin', []):
                pin_checkpoint(tmp_path / f'checkpoint_{step}')
            if not config.get('before'):
                write()
    if name == 'nan_max':
        # T5X's order of NaN is that of its sort; here NaN is worse than any number, and the end is the same.
        assert [entry['after'] for entry in trace][3:6] == [[10, 30, 40], [10, 30, 50], [30, 50, 60]]
    else:
        assert trace == case['trace']
    assert ck.all_steps() == case['retained']


@pytest.mark.parametrize('name', CONFIGURATIONS)
def test_t5xs_own_event_files_give_what_t5x_reads(name, golden):
    case = CONFIGURATIONS[name]
    config = case['config']
    found = TensorBoardMetrics(golden / name).by_step(config['metric_name_to_monitor'], config['steps'])
    expected = {int(step): value for step, value in case['metrics_read_at_end'].items()}
    assert found.keys() == expected.keys()
    assert all(found[step] == pytest.approx(expected[step], nan_ok=True, abs=0) for step in expected)


def test_it_is_a_checkpointer_and_overrides_no_method():
    assert issubclass(SaveBestCheckpointer, Checkpointer)
    own = {name for name, value in vars(SaveBestCheckpointer).items() if callable(value)}
    assert own == {'__init__'}


def test_arguments_are_t5xs(tmp_path):
    with pytest.raises(ValueError, match='metric_mode'):
        SaveBestCheckpointer({'w': np.ones(3)}, None, tmp_path, keep=1, metric_mode='best')
    with pytest.raises(ValueError, match='checkpoints_dir is empty'):
        SaveBestCheckpointer({'w': np.ones(3)}).save({'w': np.ones(3)}, step=1)
    ck = SaveBestCheckpointer({'w': np.ones(3)}, None, str(tmp_path), None, keep=2, save_dtype=np.float32)
    assert ck.keep == 2


def test_metrics_given_to_save_count_before_the_files(tmp_path):
    Log(tmp_path / 'train').add(1, ('accuracy', 0.9)).add(2, ('accuracy', 0.1)).flush()
    with SaveBestCheckpointer({'w': np.ones(3)}, None, tmp_path, keep=1) as ck:
        for step, accuracy in ((1, 0.2), (2, None), (3, 0.3), (4, 0.0)):
            metrics = None if accuracy is None else {'train/accuracy': accuracy}
            ck.save({'w': np.ones(3)}, step=step, metrics=metrics)
    assert all_steps(tmp_path) == [3, 4]


class Unreadable:
    """A source whose files are on a disk that is gone."""

    def by_step(self, metric, steps):
        raise StorageError(f'no {metric} of {len(steps)} steps')


def test_metrics_that_cannot_be_read_delete_nothing(tmp_path, caplog):
    policy = KeepBest(1, 'train/accuracy', keep_without_metric=False)
    state = {'w': np.ones(3)}
    with Checkpointer(state, checkpoints_dir=tmp_path, keep_policy=policy, metric_source=Unreadable()) as ck:
        for step in range(4):
            assert ck.save(state, step=step) is not None
        assert ck.all_steps() == [0, 1, 2, 3]
    assert 'retention after the save of step 3 failed' in caplog.text


# --- files that grow --------------------------------------------------------------------------------------------------


def test_every_split_of_the_name(tmp_path):
    Log(tmp_path / 'a').add(1, ('b/c', 1.0)).add(2, ('b/c', 2.0)).flush()
    Log(tmp_path / 'a' / 'b').add(2, ('c', 20.0)).add(3, ('c', 30.0)).flush()
    Log(tmp_path).add(4, ('a/b/c', 40.0)).flush()
    assert TensorBoardMetrics(tmp_path).by_step('a/b/c', [1, 2, 3, 4]) == {1: 1.0, 2: 2.0, 3: 30.0}
    assert TensorBoardMetrics(tmp_path).by_step('c', [1, 2, 3, 4]) == {}
    assert TensorBoardMetrics(tmp_path / 'none').by_step('a/b', [1]) == {}


def test_the_last_value_of_the_last_file_counts_and_every_value_of_an_event(tmp_path):
    Log(tmp_path / 'r', '.1').add(1, ('x', 9.0), ('m', 1.0)).add(1, ('m', 2.0)).add(2, ('m', 5.0)).flush()
    second = Log(tmp_path / 'r', '.2').add(2, ('m', 6.0)).flush()
    metrics = TensorBoardMetrics(tmp_path)
    assert metrics.by_step('r/m', [1, 2]) == {1: 2.0, 2: 6.0}
    second.add(1, ('m', 7.0)).flush()
    assert metrics.by_step('r/m', [1, 2]) == {1: 7.0, 2: 6.0}
    assert metrics.by_step('r/m', [2]) == {2: 6.0}


@pytest.mark.parametrize(
    ('value', 'expected'),
    [
        (tensor(1, float_val=[0.5]), 0.5),
        (tensor(1, (1,), float_val=[0.5]), 0.5),
        (tensor(1, tensor_content=struct.pack('<f', -0.25)), -0.25),
        (tensor(1, (1, 1), tensor_content=struct.pack('<f', math.inf)), math.inf),
        # No scalars: TensorFlow and TensorBoard write each as float32.
        (tensor(2, double_val=[1 / 3]), None),
        (tensor(3, int_val=[-7]), None),
        (tensor(19, half_val=[0x3A00]), None),
        (tensor(1, (2,), float_val=[0.5, 0.5]), None),
        (tensor(1, (0,)), None),
        (tensor(1), None),
        (tensor(7, string_val=[b'x']), None),
        (tensor(1, tensor_content=b'abc'), None),
        (tensor(99, float_val=[1.0]), None),
    ],
)
def test_values_as_tensors(tmp_path, value, expected):
    Log(tmp_path / 'r').add(3, ('m', value)).flush()
    assert TensorBoardMetrics(tmp_path).by_step('r/m', [3]) == ({} if expected is None else {3: expected})


def test_only_what_is_new_is_read(tmp_path):
    log = Log(tmp_path / 'r')
    for step in range(20_000):
        log.add(step, ('metric', float(step)))
    log.flush()
    reads = []

    def read(start, count):
        with log.path.open('rb') as file:
            file.seek(start)
            data = file.read(count)
        reads.append(len(data))
        return data

    # Not a single letter: the event that begins a file holds the time, whose bytes may be any.
    scan = EventScan(b'metric')
    assert sum(1 for _ in scan.records(log.path.stat().st_size, read)) == 20_000
    reads.clear()
    assert list(scan.records(log.path.stat().st_size, read)) == []
    assert reads == []
    before = log.path.stat().st_size
    log.add(20_000, ('metric', 1.0)).flush()
    after = log.path.stat().st_size
    assert sum(1 for _ in scan.records(after, read)) == 1
    assert sum(reads) <= 2 * (after - before)


def test_a_file_in_a_bucket_is_read_once_after_each_change(tmp_path):
    log = Log(tmp_path / 'r').add(1, ('m', 1.0)).flush()
    storage = FaultyStorage(open_storage(f'memory://{uuid.uuid4().hex}/run'))
    metrics = TensorBoardMetrics(storage)
    storage.write('r/' + log.path.name, log.path.read_bytes())
    assert metrics.by_step('r/m', [1, 2]) == {1: 1.0}
    assert metrics.by_step('r/m', [1, 2]) == {1: 1.0}
    log.add(2, ('m', 2.0)).flush()
    storage.write('r/' + log.path.name, log.path.read_bytes())
    assert metrics.by_step('r/m', [1, 2]) == {1: 1.0, 2: 2.0}
    assert [name for name, _ in storage.operations].count('read') == 2
    assert 'size' not in [name for name, _ in storage.operations]
    storage.delete_files(['r/' + log.path.name])
    assert metrics.by_step('r/m', [1, 2]) == {}


def test_a_file_may_be_read_at_any_moment_of_its_growth(tmp_path):
    """Cut at every byte, a file gives the events that are whole, and goes on from there."""
    log = Log(tmp_path / 'source')
    for step in range(6):
        log.add(step, ('m', float(step)))
    log.flush()
    data = log.path.read_bytes()
    metrics = TensorBoardMetrics(tmp_path)
    (tmp_path / 'r').mkdir()
    target = tmp_path / 'r' / log.path.name
    counts = []
    with target.open('wb', buffering=0) as file:
        for at in range(len(data)):
            file.write(data[at : at + 1])
            counts.append(len(metrics.by_step('r/m', range(6))))
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert metrics.by_step('r/m', range(6)) == {step: float(step) for step in range(6)}


def test_another_file_of_the_same_name_is_read_from_its_beginning(tmp_path):
    log = Log(tmp_path / 'r').add(1, ('m', 1.0)).flush()
    metrics = TensorBoardMetrics(tmp_path)
    assert metrics.by_step('r/m', [1, 2]) == {1: 1.0}
    other = Log(tmp_path / 'elsewhere').add(2, ('m', 2.0)).add(2, ('m', 3.0)).flush()
    os.replace(other.path, log.path)
    assert metrics.by_step('r/m', [1, 2]) == {2: 3.0}
    log.path.write_bytes(b'')
    assert metrics.by_step('r/m', [1, 2]) == {}


def test_a_storage_without_files(tmp_path):
    log = Log(tmp_path / 'r').add(1, ('m', 1.0)).flush()
    storage = open_storage('memory://t5ckpt-metrics/run')
    storage.write('r/' + log.path.name, log.path.read_bytes())
    metrics = TensorBoardMetrics(storage)
    assert metrics.by_step('r/m', [1, 2]) == {1: 1.0}
    log.add(2, ('m', 2.0)).flush()
    storage.write('r/' + log.path.name, log.path.read_bytes())
    assert metrics.by_step('r/m', [1, 2]) == {1: 1.0, 2: 2.0}


# --- files that lie ---------------------------------------------------------------------------------------------------


def record(data, length=None):
    head = struct.pack('<Q', len(data) if length is None else length)
    return head + struct.pack('<I', masked_crc32c(head)) + data + struct.pack('<I', masked_crc32c(data))


def scanned(data, marker=b''):
    scan = EventScan(marker)
    return scan, list(scan.records(len(data), lambda start, count: data[start : start + count]))


def test_the_checksum_is_the_one_of_the_standard():
    """RFC 3720, B.4."""

    def unmasked(data):
        rotated = (masked_crc32c(data) - 0xA282EAD8) & 0xFFFFFFFF
        return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF

    assert unmasked(bytes(32)) == 0x8A9136AA
    assert unmasked(b'\xff' * 32) == 0x62A8AB43
    assert unmasked(bytes(range(32))) == 0x46DD794E


@pytest.mark.parametrize('length', [2**63, 2**64 - 1, 2**40, 100])
def test_a_length_that_lies_costs_nothing(length):
    scan, found = scanned(record(b'one') + record(b'two', length))
    assert found == [b'one']
    assert not scan.ended, 'it may still be written'


def test_long_records_are_passed_over(tmp_path):
    data = record(b'one') + record(bytes(5 * 2**20)) + record(b'two')
    assert scanned(data)[1] == [b'one', b'two']
    assert scanned(record(bytes(2**20)) * 9 + record(b'x' * 1000) * 9000)[0].broken == 0


def test_a_broken_record_is_left_out_and_a_broken_length_ends_the_file(tmp_path, caplog):
    log = Log(tmp_path / 'r')
    for step in range(3):
        log.add(step, ('m', float(step)))
    log.flush()
    data = bytearray(log.path.read_bytes())
    at = data.index(b'm', len(data) // 2)
    broken = bytes(data[:at]) + b'm' + bytes([data[at + 1] ^ 1]) + bytes(data[at + 2 :])
    log.path.write_bytes(broken)
    found = TensorBoardMetrics(tmp_path).by_step('r/m', range(3))
    assert len(found) == 2
    assert 'is damaged' in caplog.text
    scan, found = scanned(record(b'one') + b'\x05' + record(b'two')[1:] + record(b'three'))
    assert (found, scan.ended) == ([b'one'], True)


def scalars(data):
    scan, whole = EventScan(), record(data)
    return scan, list(scan.scalars(len(whole), lambda start, count: whole[start : start + count]))


@given(st.binary(max_size=300))
def test_any_bytes_are_an_event_or_counted_as_broken(data):
    scan, found = scalars(data)
    assert not (scan.broken and found)
    assert all(isinstance(each.step, int) and isinstance(each.value, float) for each in found)


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_a_mutated_event_is_an_event_or_counted_as_broken(seed, flips):
    value = summary_pb2.Summary.Value(tag='m', tensor=tensor(1, (1, 1), tensor_content=b'abcd', half_val=[3]))
    data = bytearray(event_pb2.Event(step=7, summary={'value': [value, value]}).SerializeToString())
    chance = random.Random(seed)
    for _ in range(flips):
        data[chance.randrange(len(data))] = chance.randrange(256)
    scan, found = scalars(bytes(data))
    assert not (scan.broken and found)
    assert all(-(2**63) <= each.step < 2**63 for each in found)


def test_without_any_library_event_files_are_read(tmp_path):
    """tensorboardX loads torch where that is installed, for six seconds."""
    Log(tmp_path / 'r').add(1, ('m', 1.0)).flush()
    code = (
        'import sys, t5ckpt; sys.modules |= dict.fromkeys(("tensorboardX", "tensorboard", "tensorflow", "torch"))\n'
        f'print(t5ckpt.TensorBoardMetrics({str(tmp_path)!r}).by_step("r/m", [1]))'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '{1: 1.0}'


def test_public_names():
    assert t5ckpt.SaveBestCheckpointer is SaveBestCheckpointer

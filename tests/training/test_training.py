"""The helpers of a training loop, each as a loop would use it."""

import json
import logging
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import textwrap
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from support import partitioner, states

import t5ckpt
from t5ckpt import errors
from t5ckpt.training import (
    MetricWriter,
    ProfilerWindow,
    Watchdog,
    peak_flops,
    state_summary,
    write_hlo,
    write_state_summary,
)


def run(code: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program; pytest's own time-out uses the timer that a watchdog does."""
    env = {**os.environ, 'PYTHONPATH': str(pathlib.Path(t5ckpt.__file__).parents[1])}
    return subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, check=False, **kwargs)


# ---- watchdog ----


def test_a_hang_shows_every_stack():
    done = run("""
import threading, time
from t5ckpt.training import Watchdog
def worker_waits(): time.sleep(1.5)
def loop_hangs(): time.sleep(1)
with Watchdog(0.2, first_seconds=60) as watchdog:
    threading.Thread(target=worker_waits).start()
    watchdog.beat()
    loop_hangs()
""")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('Timeout') >= 2, 'a second dump says whether anything moved'
    assert 'in loop_hangs' in done.stderr
    assert 'in worker_waits' in done.stderr


def test_a_hang_that_holds_the_interpreter_lock_shows_too():
    done = run("""
import ctypes
from t5ckpt.training import Watchdog
def library_hangs(): ctypes.PyDLL(None).usleep(900_000)
with Watchdog(0.2) as watchdog:
    watchdog.beat()
    library_hangs()
""")
    assert 'in library_hangs' in done.stderr


@pytest.mark.slow
def test_steps_in_time_show_nothing():
    done = run("""
import time
from t5ckpt.training import Watchdog
end = time.monotonic() + 3.3
with Watchdog(3, first_seconds=60) as watchdog:
    while time.monotonic() < end:
        watchdog.beat()
        time.sleep(0.01)
with Watchdog(0.2, first_seconds=60) as watchdog:
    watchdog.beat()
time.sleep(0.5)
""")
    assert (done.returncode, done.stderr) == (0, '')


def test_the_first_step_may_take_longer():
    done = run("""
import time
from t5ckpt.training import Watchdog
with Watchdog(0.1, first_seconds=60): time.sleep(0.5)
with Watchdog(1): time.sleep(1.2)
with Watchdog(60, first_seconds=0.1): time.sleep(0.5)
""")
    assert done.stderr.count('most recent call first') >= 1
    assert '"<string>", line 4 ' not in done.stderr
    assert '"<string>", line 5 ' not in done.stderr
    assert '"<string>", line 6 ' in done.stderr


def test_a_watchdog_may_kill(tmp_path):
    log = tmp_path / 'stacks.txt'
    done = run(f"""
import time
from t5ckpt.training import Watchdog
def loop_hangs(): time.sleep(30)
with open({str(log)!r}, 'w') as file, Watchdog(0.2, file=file, kill=True) as watchdog:
    watchdog.beat()
    loop_hangs()
""")
    assert done.returncode == 1
    assert 'in loop_hangs' in log.read_text()


@pytest.mark.parametrize('seconds', [0, -1, float('nan')])
def test_a_watchdog_needs_time(seconds):
    with pytest.raises(ValueError, match='above 0'):
        Watchdog(seconds)
    with pytest.raises(ValueError, match='above 0'):
        Watchdog(1, first_seconds=seconds)


# ---- summary ----


def test_the_summary_names_every_leaf():
    mesh = partitioner.mesh((4, 2), ('data', 'model'))
    sharded = jax.device_put(jnp.ones((8, 6)), NamedSharding(mesh, P('data', None)))
    state = {
        'params': {'w': sharded, 'b': jax.ShapeDtypeStruct((6,), jnp.bfloat16)},
        'slots': {'w': np.zeros((8, 6), np.float64)},
        'step': 7,
        'nothing': None,
        'later': {},
    }
    lines = state_summary(state).splitlines()
    cells = {line.split()[0]: line for line in lines if line}
    assert cells['params/w'].split(maxsplit=3)[:2] == ['params/w', 'float32']
    assert "(8, 6)  192    ('data', None) over mesh (data 4, model 2)" in cells['params/w']
    assert 'bfloat16' in cells['params/b']
    assert cells['slots/w'].endswith('host')
    assert cells['step'].split()[1:] == ['int', '7']
    assert cells['later'].split()[1:] == ['empty', 'dict']
    # 192 + 12 + 384 bytes; of w a device holds a quarter.
    assert '6 leaves, 588 bytes, 444 bytes on each device' in lines
    assert lines[-1] == '54 parameters (params)'


def test_the_summary_of_a_t5x_state_counts_the_target():
    flat = states.adafactor_arrays()
    parts = partitioner.Partitioner(partitioner.mesh(), partitioner.t5x_rules)
    text = state_summary(states.t5x_state(flat, parts.mesh))
    expected = sum(array.size for name, array in flat.items() if name.startswith('target/'))
    assert f'{expected:,} parameters (target)' in text


def test_the_summary_is_a_file_of_the_run(run_dir):
    state = {'w': np.zeros(3)}
    write_state_summary(run_dir, state)
    write_state_summary(run_dir, state)
    assert (run_dir / 'trainer_state_tree.txt').read_text() == state_summary(state)


# ---- metrics ----


def events(directory: pathlib.Path) -> list[Any]:
    """All events of a run in the order written, with their checksums left to test_dataset_libraries.py."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(directory.glob('events.out.tfevents.*'), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            (length,) = struct.unpack_from('<Q', data, at)
            found.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + length]))
            at += 12 + length + 4
    return found


def test_scalars_and_histograms_are_written(tmp_path):
    with MetricWriter(tmp_path / 'train') as writer:
        writer.write(3, {'loss': jnp.float32(0.5), 'lr': 1e-3, 'grads': {'w': jnp.arange(6.0)}, 'absent': None})
        writer.flush()
        flushed = events(tmp_path / 'train')
        writer.write(4, {'loss': np.float64('nan')})
    first, second, third = events(tmp_path / 'train')
    assert flushed == [first, second]
    assert first.file_version == 'brain.Event:2'
    assert second.step == 3
    values = {value.tag: value for value in second.summary.value}
    assert set(values) == {'loss', 'lr', 'grads/w'}
    assert values['loss'].simple_value == 0.5
    assert values['lr'].simple_value == np.float32(1e-3)
    histogram = values['grads/w'].histo
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (0, 5, 6, 15)
    assert histogram.sum_squares == 55
    assert sum(histogram.bucket) == 6
    assert np.isnan(third.summary.value[0].simple_value)


def test_keep_policies_read_what_was_written(tmp_path):
    with MetricWriter(tmp_path / 'eval') as writer:
        for step in (10, 20):
            writer.write(step, {'accuracy': jnp.float32(step / 100), 'grads': jnp.arange(6.0)})
        writer.flush()
        metrics = t5ckpt.TensorBoardMetrics(tmp_path)
        assert metrics.by_step('eval/accuracy', [10, 20, 30]) == {10: np.float32(0.1), 20: np.float32(0.2)}
        writer.write(30, {'accuracy': 1})
    assert metrics.by_step('eval/accuracy', [30]) == {30: 1.0}
    assert metrics.by_step('eval/grads', [10]) == {}


def test_starts_in_one_second_write_to_files_of_their_own(tmp_path):
    for step in range(3):
        with MetricWriter(tmp_path, resume_at=step) as writer:
            writer.write(step, {'loss': step})
    assert len(list(tmp_path.iterdir())) == 3
    steps = [event.step for event in events(tmp_path) if event.HasField('summary')]
    assert steps == [0, 1, 2]
    starts = [event for event in events(tmp_path) if event.HasField('session_log')]
    assert [event.step for event in starts] == [0, 1, 2]
    assert {event.session_log.status for event in starts} == {1}


def test_values_that_are_not_finite_are_left_out_of_a_histogram(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, 't5ckpt'), MetricWriter(tmp_path) as writer:
        writer.write(1, {'some': np.array([1.0, np.nan, np.inf]), 'none': np.array([np.nan]), 'empty': np.zeros(0)})
    _, event = events(tmp_path)
    (value,) = event.summary.value
    assert (value.tag, value.histo.num) == ('some', 1)
    assert 'histogram some: 2 of 3 values' in caplog.text


@pytest.mark.parametrize('value', ['text', object(), np.array(['a'])])
def test_values_that_are_not_numbers_are_named(tmp_path, value):
    with MetricWriter(tmp_path) as writer, pytest.raises(errors.UnsupportedLeafError, match='losses/total'):
        writer.write(1, {'losses': {'total': value}})


# ---- profiler ----


@pytest.mark.slow
def test_a_window_of_steps_is_traced_and_lies_where_the_run_does(run_dir):
    step_fn = jax.jit(lambda x: x @ x)
    x = jnp.ones((64, 64))
    with ProfilerWindow(run_dir, start=2, count=2) as window:
        for step in range(6):
            window.before(step, x)
            assert run_dir.exists() == (step >= 4)
            x = step_fn(x)
    (trace,) = run_dir.glob('plugins/profile/*/*.xplane.pb')
    assert trace.stat().st_size > 1000


@pytest.mark.slow
def test_a_run_that_ends_inside_the_window_has_its_trace(run_dir, tmp_path, caplog):
    with ProfilerWindow(run_dir, start=0, count=100) as window:
        window.before(0)
    assert list(run_dir.glob('plugins/profile/*/*.xplane.pb'))
    # A place that cannot be written to does not end the run, and the trace is not lost.
    blocked = tmp_path / 'file'
    blocked.write_text('')
    with caplog.at_level(logging.WARNING, 't5ckpt'), ProfilerWindow(blocked, start=0) as window:
        window.before(0)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    kept = pathlib.Path(record.args[0])
    assert list(kept.glob('plugins/profile/*/*.xplane.pb'))
    shutil.rmtree(kept)


def test_no_window_no_trace(run_dir):
    with ProfilerWindow(run_dir, start=10) as window:
        for step in (0, 1, 13, 14):
            window.before(step)
    assert not run_dir.exists()
    with pytest.raises(ValueError, match='at least 1'):
        ProfilerWindow(run_dir, start=0, count=0)


# ---- HLO ----


def compiled() -> Any:
    return jax.jit(lambda x: jnp.tanh(x @ x).sum()).lower(jnp.ones((8, 8))).compile()


needs_graphviz = pytest.mark.skipif(
    shutil.which('dot') is None and os.environ.get('CI') != 'true', reason='needs Graphviz: apt-get install graphviz'
)


@needs_graphviz
def test_the_picture_is_an_svg_of_the_optimised_module(run_dir):
    text, picture = map(pathlib.Path, write_hlo(run_dir, 'step', compiled()))
    assert text.read_text().startswith('HloModule')
    root = ElementTree.fromstring(picture.read_text())  # noqa: S314 - Graphviz wrote it
    assert root.tag.endswith('svg')
    assert picture.read_text().startswith('<svg')
    assert 'dot' in ''.join(root.itertext()), 'the matrix product is in it'


@needs_graphviz
def test_a_picture_that_takes_too_long_is_left_out(run_dir, caplog):
    with caplog.at_level(logging.WARNING, 't5ckpt'):
        written = write_hlo(run_dir, 'step', compiled(), seconds=0)
    assert [pathlib.Path(path).name for path in written] == ['step.txt']
    assert 'step.svg is not written' in caplog.text


def test_without_graphviz_there_is_the_text(run_dir, monkeypatch, caplog):
    monkeypatch.setenv('PATH', '/nowhere')
    with caplog.at_level(logging.WARNING, 't5ckpt'):
        (text,) = write_hlo(run_dir, 'step', compiled())
    assert 'HloModule' in pathlib.Path(text).read_text()
    assert 'Graphviz is not installed' in caplog.text


# ---- FLOPs ----


class Device:
    """As much of a jax.Device as is looked at."""

    def __init__(self, kind: str):
        self.device_kind = kind


@pytest.mark.parametrize(
    ('kind', 'tera'),
    [
        ('NVIDIA A100-SXM4-80GB', 312),
        ('NVIDIA H100 80GB HBM3', 989.5),
        ('NVIDIA H100 PCIe', 756.5),
        ('NVIDIA H200', 989.5),
        ('NVIDIA L4', 121),
        ('NVIDIA L40S', 362),
        ('TPU v2', 22.5),
        ('TPU v4', 275),
        ('TPU v5 lite', 197),
        ('TPU v5p', 459),
        ('TPU v6 lite', 918),
        ('AMD Instinct MI300X', 1307.4),
    ],
)
def test_known_chips(kind, tera):
    assert peak_flops(Device(kind)) == pytest.approx(tera * 1e12, rel=1e-12)


@pytest.mark.parametrize('kind', ['cpu', 'NVIDIA L400', 'TPU v50', 'NVIDIA A1000', 'Tesla V100-SXM2-16GB', ''])
def test_a_chip_that_is_not_known_has_no_number(kind, caplog):
    with caplog.at_level(logging.WARNING, 't5ckpt'):
        assert peak_flops(Device(kind)) is None
    assert repr(kind) in caplog.text


def test_the_first_device_by_default():
    assert peak_flops() is None, 'these tests run on CPU devices'


def test_the_helpers_load_no_jax():
    done = run('import sys, json, t5ckpt.training; print(json.dumps(sorted(sys.modules)))')
    assert not {'jax', 'tensorboardX', 'tensorflow'} & set(json.loads(done.stdout))


@pytest.mark.slow
def test_a_writer_of_metrics_while_another_thread_imports_jax(tmp_path):
    """Until the import is done, ``sys.modules`` has a module that lacks most of its names."""
    done = run(
        textwrap.dedent("""
        import importlib, sys, threading, time
        from t5ckpt.training import MetricWriter
        has_begun = threading.Event()
        class Slow:
            def find_spec(name, path, target=None):
                if name.startswith('jax.') and not has_begun.is_set():
                    has_begun.set()
                    time.sleep(2)
        assert 'jax' not in sys.modules
        sys.meta_path.insert(0, Slow)
        threading.Thread(target=importlib.import_module, args=('jax',)).start()
        has_begun.wait()
        MetricWriter('logs')
        """),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr

"""Progress, events and the log line."""

import contextlib
import errno
import io
import logging
import sys

import jax
import numpy as np
import pytest

import t5ckpt

STATE = {'a': np.arange(300_000, dtype=np.float32), 'b': np.ones(200_000, np.float32), 'step': 3}


def test_a_line_says_bytes_seconds_rate_and_what_is_left():
    stream, times = io.StringIO(), iter([0.0, 2.0, 4.0])
    report = t5ckpt.ProgressReporter('save', stream, clock=lambda: next(times))
    for done in (0, 500_000_000, 1_000_000_000):
        report(done, 1_000_000_000)
    assert stream.getvalue().split('\r')[1:] == [
        'save 0 B of 1.0 GB (0 %), 0.0 s',
        'save 500.0 MB of 1.0 GB (50 %), 2.0 s, 250.0 MB/s, 2 s left',
        'save 1.0 GB of 1.0 GB (100 %), 4.0 s, 250.0 MB/s\n',
    ]


def test_lines_come_at_intervals_and_at_the_end():
    stream, now = io.StringIO(), [0.0]
    report = t5ckpt.ProgressReporter('x', stream, every=1.0, clock=lambda: now[0])
    for done in range(101):
        now[0] = done / 20
        report(done, 100)
    assert stream.getvalue().count('\r') == 6


class Full(io.StringIO):
    def flush(self):
        raise OSError(errno.ENOSPC, 'No space left on device')


class Ascii(io.TextIOWrapper):
    def __init__(self):
        super().__init__(io.BytesIO(), 'ascii')


@pytest.mark.parametrize('stream', ['closed', 'full', 'none', 'ascii'])
def test_a_line_that_cannot_be_written_ends_no_save(tmp_path, stream):
    """As where the terminal has gone, or in a program without a console."""
    out = {'closed': io.StringIO, 'full': Full, 'none': lambda: None, 'ascii': Ascii}[stream]()
    if stream == 'closed':
        out.close()
    report = t5ckpt.ProgressReporter('tráin', out, every=0.0)
    console = contextlib.redirect_stderr(None if stream == 'none' else sys.stderr)
    with console, t5ckpt.Checkpointer(STATE, checkpoints_dir=tmp_path, progress=report) as ck:
        ck.save(STATE)
        assert ck.restore()['step'] == 3


def test_saves_and_restores_report_all_bytes(tmp_path):
    seen = []
    ck = t5ckpt.Checkpointer(STATE, checkpoints_dir=tmp_path, progress=lambda done, total: seen.append((done, total)))
    ck.save(STATE)
    assert seen[-1] == (2_000_000, 2_000_000)
    assert seen == sorted(seen)
    seen.clear()
    ck.restore()
    assert seen[-1] == (2_000_000, 2_000_000)
    assert seen == sorted(seen)


def test_events_and_one_log_line(tmp_path, caplog):
    events = []

    def listen(event, seconds, **_):
        events.append((event, seconds))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        ck = t5ckpt.Checkpointer(STATE, checkpoints_dir=tmp_path)
        with caplog.at_level(logging.INFO, 't5ckpt'):
            ck.save(STATE)
        lines = [record.getMessage() for record in caplog.records]
        ck.restore()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    ours = [event for event, seconds in events if event.startswith('/jax/checkpoint/') and seconds > 0]
    assert ours == ['/jax/checkpoint/write/durations_sec', '/jax/checkpoint/read/durations_sec']
    assert len(lines) == 1
    assert lines[0].startswith(f'Saved checkpoint for step 3 to {tmp_path}/checkpoint_3: ')


def test_the_time_that_is_left_is_not_guessed_from_the_first_bytes():
    stream, times = io.StringIO(), iter([0.0, 10.0, 20.0, 40.0])
    report = t5ckpt.ProgressReporter('save', stream, every=0.0, clock=lambda: next(times))
    for done in (0, 4, 10_000, 50_000_000):
        report(done, 1_000_000)
    assert [line.rpartition(', ')[2] for line in stream.getvalue().split('\r')[2:]] == [
        '0 B/s',
        '33 min left',
        '1.2 MB/s\n',
    ]

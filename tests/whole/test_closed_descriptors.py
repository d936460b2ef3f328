"""A daemon whose descriptors 0 to 2 are closed: no file gets them, so what C code logs does not land in a chunk."""

import subprocess
import sys
import textwrap

import pytest

import t5ckpt

# A thread of a C library that logs to all three, while the program saves, copies and restores.
PROGRAM = """
    import ctypes, os, pathlib, sys, threading, time
    import numpy as np
    import t5ckpt

    run, when, how, direct_bytes = sys.argv[1:]
    state = {str(number): np.full(100_000, number, np.float32) for number in range(10)} | {'step': 0}
    options, direct = t5ckpt.CheckpointerOptions(reuse_unchanged=False), {'direct_bytes': int(direct_bytes)}
    ck = t5ckpt.Checkpointer(state, checkpoints_dir=run, keep=3, storage_options=direct, options=options)
    if when == 'later':
        ck.save(state, step=0)
        for number in range(3):
            os.close(number)
    libc, is_over = ctypes.CDLL(None), threading.Event()

    def log():
        while not is_over.is_set():
            for number in range(3):
                libc.write(number, b'W0000 log line\\n', 15)
            time.sleep(0.0002)

    threading.Thread(target=log, daemon=True).start()
    found = []
    try:
        for step in range(1, 6):
            if how == 'save':
                ck.save(state, step=step)
            else:
                ck.save_async(state, step=step).result()
            restored = ck.restore(step)
            found.append(all((restored[name] == leaf).all() for name, leaf in state.items() if name != 'step'))
        t5ckpt.copy_checkpoint(run + '/checkpoint_5', run + '-copy')
        ck.close()
    except BaseException as error:
        found.append(repr(error))
    finally:
        is_over.set()
        pathlib.Path(run + '.found').write_text(str(found))
"""


CLOSED = '0<&- 1>&- 2>&-'


@pytest.mark.slow
@pytest.mark.parametrize(
    ('when', 'how', 'direct_bytes'),
    [
        (CLOSED, 'save', 2**40),
        (CLOSED, 'save_async', 2**40),
        (CLOSED, 'save', 1),
        ('0<&- 2>&-', 'save', 2**40),
        ('later', 'save_async', 2**40),
    ],
)
def test_no_file_gets_a_closed_standard_descriptor(tmp_path, when, how, direct_bytes):
    run = str(tmp_path / 'run')
    words = [sys.executable, '-c', textwrap.dedent(PROGRAM), run, when, how, str(direct_bytes)]
    closes = '' if when == 'later' else when
    subprocess.run(['bash', '-c', f'exec "$@" {closes}', 'bash', *words], check=True, capture_output=True, timeout=120)
    assert (tmp_path / 'run.found').read_text() == str([True] * 5)
    for place, steps in ((run, [3, 4, 5]), (run + '-copy', [5])):
        assert t5ckpt.all_steps(place) == steps
        for step in steps:
            assert t5ckpt.verify(place, step=step, full=True).ok

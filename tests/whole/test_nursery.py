"""The processes that the tests fork (support/nursery.py) end as programs of their own do, and none changes the next one."""

import contextlib
import os
import signal
import subprocess
import textwrap
from collections.abc import Iterator

import pytest
from support.nursery import CRASHED, ROOT, Nursery

PROGRAM = """
    import atexit, os, sys, threading, time, warnings

    def main(what):
        if what == 'exit':
            sys.exit(3)
        if what == 'number':
            print(0)
            print(0, file=sys.stderr, flush=True)
            os.write(1, b'0\\n')
            sys.exit(3)
        if what == 'raise':
            raise ValueError('told')
        if what == 'warn':
            warnings.warn('old', DeprecationWarning)
        if what == 'exit function':
            atexit.register(lambda: os.write(2, b'at exit'))
        if what == 'thread':
            threading.Thread(target=lambda: (time.sleep(0.2), os.write(2, b'the thread has ended'))).start()
        if what == 'wait':
            sys.stdin.read()
        if what == 'tell':
            print(sys.stdin.readline().strip(), dict(os.environ), os.getcwd())
        if what == 'state':
            assert not hasattr(sys, 'left'), 'another process has left something'
            sys.left = os.environ['LEFT'] = 'x'
            os.chdir('/')
"""


@pytest.fixture
def nursery(tmp_path) -> Iterator[Nursery]:
    (tmp_path / 'program_of_a_test.py').write_text(textwrap.dedent(PROGRAM))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    with contextlib.closing(Nursery('program_of_a_test', {'PYTHONPATH': path}, ['-W', 'error'])) as made:
        yield made


@pytest.mark.parametrize('what', ['exit', 'number'])
def test_a_printed_number_is_not_taken_for_an_exit_code(nursery, what):
    assert [nursery.run(what) for _ in range(2)] == [3, 3]


@pytest.mark.parametrize(('what', 'said'), [('raise', 'ValueError: told'), ('warn', 'DeprecationWarning: old')])
def test_an_error_has_an_exit_code_of_its_own_and_its_traceback_in_the_log(nursery, what, said):
    assert nursery.run(what) == CRASHED
    assert said in nursery.log()


@pytest.mark.parametrize(('what', 'said'), [('exit function', 'at exit'), ('thread', 'the thread has ended')])
def test_threads_and_exit_functions_end_as_in_any_program(nursery, what, said):
    assert nursery.run(what) == 0
    assert said in nursery.log()


def test_several_run_at_once_and_each_says_how_it_has_ended(nursery):
    waiting = [nursery.start('wait', stdin=subprocess.PIPE) for _ in range(3)]
    assert nursery.run('exit') == 3
    assert [process.poll() for process in waiting] == [None] * 3
    with pytest.raises(subprocess.TimeoutExpired):
        waiting[0].wait(0.01)
    waiting[1].kill()
    assert waiting[1].wait() == -signal.SIGKILL
    for process in waiting:
        process.stdin.close()
    assert [process.wait() for process in waiting] == [0, -signal.SIGKILL, 0]


def test_a_test_that_was_stopped_between_start_and_end_blocks_no_other(nursery):
    nursery.start('exit')
    assert [nursery.run(what) for what in ('state', 'exit')] == [0, 3]


def test_a_process_may_end_while_it_is_sent_a_signal(nursery):
    for _ in range(100):
        process = nursery.start('exit')
        while process.poll() is None:
            process.send_signal(signal.SIGCONT)
        assert process.returncode == 3


def test_streams_variables_and_directory_are_those_that_were_asked_for(nursery, tmp_path):
    process = nursery.start(
        'tell', stdin=subprocess.PIPE, stdout=subprocess.PIPE, environment={'ONLY': 'this'}, directory=tmp_path
    )
    with process:
        process.stdin.write('said\n')
        process.stdin.flush()
        assert process.stdout.read() == f"said {{'ONLY': 'this'}} {tmp_path}\n"
    with (tmp_path / 'output').open('w+') as file:
        assert nursery.run('tell', stdout=file, environment={}) == 0
        assert (tmp_path / 'output').read_text().startswith(' {} ')
    assert nursery.log() == ''


def test_a_process_leaves_nothing_to_the_next(nursery):
    assert [nursery.run('state') for _ in range(3)] == [0, 0, 0]

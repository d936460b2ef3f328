"""Chunk files that are written past the page cache: the same bytes, no trace in the cache, and nothing else changed."""

import contextlib
import ctypes
import errno
import functools
import gc
import mmap
import os
import pathlib
import random
import resource
import signal
import textwrap
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import forked
from support.options import with_options

import t5ckpt
from t5ckpt import errors
from t5ckpt.core.thread_pool import Pool
from t5ckpt.storage import open_storage
from t5ckpt.storage.direct_io import write_new

_MB = 2**20
_SIZES = [0, 1, 511, 4095, 4096, 4097, 2 * _MB - 1, 2 * _MB, 2 * _MB + 1, 5 * _MB + 4097]
_ALL = {'direct_bytes': 1}


def resident_pages(path):
    """How many of a file's pages the page cache has (mincore(2))."""
    size = path.stat().st_size
    with path.open('r+b') as file, mmap.mmap(file.fileno(), size) as data:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        here = ctypes.c_char.from_buffer(data)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        assert libc.mincore(ctypes.addressof(here), size, pages) == 0, os.strerror(ctypes.get_errno())
        del here
        return sum(page & 1 for page in pages)


@pytest.fixture
def disk(tmp_path):
    """A directory of a file system with direct writes; one in memory has none, or keeps everything in the cache."""
    probe = tmp_path / 'probe'
    write_new(str(probe), np.ones(4 * _MB, np.uint8), is_direct=True)
    if resident_pages(probe) > 16:
        pytest.skip(f'the file system of {tmp_path} writes through the page cache: set TMPDIR to a disk')
    probe.unlink()
    return tmp_path


@pytest.mark.parametrize('size', _SIZES)
def test_every_size_is_written_whole(tmp_path, size):
    data = np.frombuffer(random.Random(size).randbytes(size + 1), np.uint8)[1:]
    path = tmp_path / 'a' / 'b'
    write_new(str(path), data, is_direct=True)
    assert path.read_bytes() == data.tobytes()
    assert path.stat().st_mode & 0o777 == 0o644
    # A shorter one in its place leaves nothing of it.
    write_new(str(path), data[: size // 2], is_direct=True)
    assert path.read_bytes() == data[: size // 2].tobytes()


def test_in_memory(tmp_path):
    """tmpfs takes direct writes or refuses them, depending on the kernel."""
    memory = pathlib.Path('/dev/shm')  # noqa: S108 - a name of this test's own below it
    if not os.access(memory, os.W_OK):
        pytest.skip('there is no /dev/shm that can be written to')
    path = memory / f't5ckpt-{os.getpid()}-{tmp_path.name}'
    try:
        data = np.frombuffer(random.Random(0).randbytes(3 * _MB + 5), np.uint8)
        write_new(str(path), data, is_direct=True)
        assert path.read_bytes() == data.tobytes()
    finally:
        path.unlink(missing_ok=True)


def test_a_signal_handler_that_writes_leaves_the_write_that_it_interrupts_alone(tmp_path):
    """An export writes chunks in the main thread, where handlers run."""
    data, other = np.ones(64 * _MB, np.uint8), np.full(_MB, 2, np.uint8)
    calls = 0

    def handle(*_):
        nonlocal calls
        calls += 1
        write_new(str(tmp_path / 'other'), other, is_direct=True)
        # On a busy disk, handlers that interrupt handlers have no end.
        signal.setitimer(signal.ITIMER_REAL, 0.003)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.003)
        for turn in range(4):
            write_new(str(tmp_path / f'{turn}'), data, is_direct=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls > 4
    for turn in range(4):
        assert np.array_equal(np.fromfile(tmp_path / f'{turn}', np.uint8), data)


def test_other_names_of_the_file_keep_their_bytes(tmp_path):
    """A chunk that was linked from another checkpoint, and is written after all."""
    (tmp_path / 'old').write_bytes(b'old')
    os.link(tmp_path / 'old', tmp_path / 'hard')
    os.symlink('old', tmp_path / 'soft')
    for name in ('hard', 'soft'):
        write_new(str(tmp_path / name), np.ones(5000, np.uint8), is_direct=True)
        assert (tmp_path / name).read_bytes() == b'\1' * 5000
        assert not (tmp_path / name).is_symlink()
    assert (tmp_path / 'old').read_bytes() == b'old'


def test_what_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / 'file').write_bytes(b'')
    (tmp_path / 'dir').mkdir()
    for path, wrong in [('file/below', errno.ENOTDIR), ('dir', errno.EISDIR)]:
        with pytest.raises(OSError, match=path.split('/')[0]) as caught:
            write_new(str(tmp_path / path), np.ones(5000, np.uint8), is_direct=True)
        assert caught.value.errno == wrong
    assert sorted(path.name for path in tmp_path.iterdir()) == ['dir', 'file']


@pytest.mark.parametrize('direct_bytes', [2**20, None])
@pytest.mark.parametrize('method', ['save', 'save_async'])
def test_which_saves_leave_the_page_cache_alone(disk, direct_bytes, method):
    state = {'large': jnp.arange(_MB, dtype=jnp.float32), 'small': jnp.ones(_MB // 8, jnp.float32)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=disk, storage_options={'direct_bytes': direct_bytes}) as ck:
        getattr(ck, method)(state, step=1)
    chunk = disk / 'checkpoint_1' / 'large' / '0'
    pages = chunk.stat().st_size // mmap.PAGESIZE
    assert pages == 4 * _MB // mmap.PAGESIZE
    assert (resident_pages(chunk) < pages / 8) is (direct_bytes is not None)
    # Half a megabyte is not worth it.
    assert resident_pages(disk / 'checkpoint_1' / 'small' / '0') == _MB // 2 // mmap.PAGESIZE
    assert t5ckpt.verify(disk, full=True).ok


@pytest.mark.parametrize('compression', [None, 'zstd', 'auto'])
def test_all_kinds_of_leaves(tmp_path, compression):
    rng = np.random.default_rng(0)
    state = {
        'rows': rng.standard_normal((700, 1000), dtype=np.float32),
        'bfloat16': jnp.asarray(rng.standard_normal(3 * _MB + 5), jnp.bfloat16),
        'float8': jnp.asarray(rng.standard_normal(100_000), jnp.float8_e4m3fn),
        'int4': jnp.asarray(rng.integers(-8, 8, 60_000), jnp.int4),
        'zeros': jnp.zeros((1000, 1000)),
        'columns': jnp.asarray(rng.standard_normal((64, 3001))).T,
    }
    options = {'chunk_bytes': _MB, 'compression': compression, 'inline_bytes': 0, 'storage_options': _ALL}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, **with_options(**options)) as ck:
        for step in (1, 2):
            # The second one links what it can.
            ck.save_async({**state, 'rows': state['rows'] + step}, step=step)
    for step in (1, 2):
        assert t5ckpt.verify(tmp_path, step, full=True).ok
        loaded = t5ckpt.load_t5x_checkpoint(tmp_path, step)
        for name, leaf in {**state, 'rows': state['rows'] + step}.items():
            assert np.asarray(loaded[name]).tobytes() == np.asarray(leaf).tobytes(), name


def test_it_is_an_option_of_directories(tmp_path):
    for options, message in [
        ({'direct_bytes': 0}, 'direct_bytes=0 is not an integer above 0, or None'),
    ]:
        with pytest.raises(ValueError, match=message):
            open_storage(tmp_path, options)
    with pytest.raises(ValueError, match='no option direct_bytes'):
        open_storage('memory://run', {'direct_bytes': None})


@contextlib.contextmanager
def files_of_at_most(size):
    """The limit of a process stands for the disk's: the write that crosses it is cut short, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_says_so(tmp_path):
    state = {'x': jnp.arange(2 * _MB, dtype=jnp.float32)}
    ck = t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, storage_options=_ALL)
    ck.save(state, step=1)
    with files_of_at_most(5 * _MB + 100), pytest.raises(errors.StorageError, match='x'):
        ck.save({'x': state['x'] + 1}, step=2)
    assert t5ckpt.all_steps(tmp_path) == [1]
    assert ck.save({'x': state['x'] + 1}, step=2) is not None


def test_a_failed_save_keeps_nothing_alive(tmp_path):
    """Its error is kept for whoever asks, without the frames of the threads that wrote."""
    leaf = jnp.arange(2 * _MB, dtype=jnp.float32)
    alive = weakref.ref(leaf)
    model = {'x': jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)}
    ck = t5ckpt.Checkpointer(model, checkpoints_dir=tmp_path)
    with files_of_at_most(5 * _MB + 100):
        pending = ck.save_async({'x': leaf}, step=1)
        pending.wait()
    del leaf
    gc.collect()
    assert alive() is None
    with pytest.raises(errors.StorageError):
        pending.result()


def test_where_there_are_no_more_threads_the_caller_writes(tmp_path):
    """A thread whose stack does not fit into the address space cannot be started."""
    before = threading.stack_size(2**46)
    try:
        workers = Pool(4)
        futures = [workers.submit(functools.partial((tmp_path / str(number)).write_text, 'x')) for number in range(3)]
        with pytest.raises(FileNotFoundError):
            workers.submit(functools.partial((tmp_path / 'no' / 'x').write_text, 'x')).result()
        workers.shutdown(wait=False)
    finally:
        threading.stack_size(before)
    assert all(future.done() for future in futures)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_forked_process_has_memory_of_its_own(tmp_path):
    """Both write at once, after this thread's aligned buffer was made."""
    write_new(str(tmp_path / 'first'), np.zeros(2**21, np.uint8), is_direct=True)
    ready, go = os.pipe()
    with warnings.catch_warnings():
        # The child calls nothing of JAX's.
        warnings.simplefilter('ignore')
        child = os.fork()
    value = 1 if child else 2
    data, wrong, is_done = np.full(2**22, value, np.uint8), 0, False
    try:
        os.write(go, b'.') if child else os.read(ready, 1)
        for number in range(20):
            path = tmp_path / f'{value}.{number}'
            write_new(str(path), data, is_direct=True)
            wrong += (np.fromfile(path, np.uint8) != value).any()
        is_done = True
    finally:
        if not child:
            os._exit(int(wrong > 0 or not is_done))
    assert (wrong, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) == (0, 0)
    os.close(ready)
    os.close(go)


CLOSED = """
    import ctypes, os, sys, threading, time
    import numpy as np
    import t5ckpt

    options = t5ckpt.CheckpointerOptions(reuse_unchanged=False)
    ck = t5ckpt.Checkpointer({'x': np.zeros(9)}, checkpoints_dir='run', options=options) if 'early' in sys.argv else None
    for number in range(3):
        os.close(number)
    state = {str(number): np.full(100_000, number, np.float32) for number in range(20)}
    libc, is_over = ctypes.CDLL(None), threading.Event()

    def log():
        while not is_over.is_set():
            libc.write(1, b'a line', 6)
            libc.write(2, b'a line', 6)

    thread = threading.Thread(target=log)
    thread.start()
    try:
        ck = ck or t5ckpt.Checkpointer(state, checkpoints_dir='run', options=options)
        for step in range(0, 6, 2):
            ck.save(state, step=step)
            ck.save_async(state, step=step + 1).result()
    finally:
        is_over.set()
        thread.join()
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize('when', ['early', 'late'])
def test_no_file_gets_the_descriptors_of_closed_standard_streams(tmp_path, monkeypatch, when):
    """Whatever C code writes to standard error would be in a chunk."""
    monkeypatch.chdir(tmp_path)
    code = 'import warnings; warnings.simplefilter("ignore")\n' + textwrap.dedent(CLOSED)
    assert forked.run(code, when).returncode == 0
    for step in range(6):
        report = t5ckpt.verify('run', step=step, full=True)
        assert report.ok, str(report)

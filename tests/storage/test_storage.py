"""Every backend passes the conformance suite, looked at from outside."""

import errno
import os
import pathlib
import re
import resource
import subprocess
import sys
import textwrap
import threading
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorstore as ts
from support import forked

import t5ckpt
from t5ckpt import errors
from t5ckpt.storage import foreign_errors, open_storage
from t5ckpt.storage.memory import MemoryStorage
from t5ckpt.testing import FaultyStorage, StorageConformance


class TestFile(StorageConformance):
    def make(self, tmp_path):
        return open_storage(tmp_path / 'deep' / 'root')

    def raw(self, storage, key):
        path = pathlib.Path(storage.local_path(key))
        return path.read_bytes() if path.exists() else None

    def test_permissions_are_the_umask(self, tmp_path):
        storage = self.make(tmp_path)
        storage.make_dir('')
        storage.write('x', b'')
        assert pathlib.Path(storage.local_path('x')).stat().st_mode & 0o777 == 0o644

    def test_a_failed_write_leaves_the_old_bytes(self, tmp_path):
        storage = self.make(tmp_path)
        storage.make_dir('')
        storage.write('x', b'old')
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        try:
            with pytest.raises(errors.StorageError, match='x'):
                storage.write('x', b'new' * 10)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert storage.read('x') == b'old'
        assert os.listdir(storage.local_path('')) == ['x']

    def test_two_writers_of_a_key_do_not_disturb_each_other(self, tmp_path):
        storage = self.make(tmp_path)
        storage.make_dir('')
        contents = [bytes([number]) * 100 for number in range(2)]
        storage.write('x', contents[0])
        ended = threading.Event()

        def write(data):
            for _ in range(300):
                storage.write('x', data)

        def read():
            seen = set()
            while not ended.is_set():
                seen.add(storage.read('x'))
            return seen

        with ThreadPoolExecutor(3) as pool:
            reader = pool.submit(read)
            writers = [pool.submit(write, data) for data in contents]
            try:
                for writer in writers:
                    writer.result()
            finally:
                ended.set()
            assert reader.result() <= {*contents}


class TestMemory(StorageConformance):
    def make(self, tmp_path):
        return open_storage(f'memory://{uuid.uuid4().hex}/run')

    def raw(self, storage, key):
        store = ts.KvStore.open({'driver': 'memory'}, context=storage.context()).result()
        found = store.read(f'run/{key}').result()
        return found.value if found.state == 'value' else None


class TestFaulty(TestFile):
    """The wrapper is transparent as long as nothing is to fail."""

    def make(self, tmp_path):
        return FaultyStorage(super().make(tmp_path))


class Mine(MemoryStorage):
    """A storage whose URLs no function opens."""

    def url(self, key=''):
        return f'mine://{self._bucket}/{self._key(key)}'.rstrip('/')


def test_what_reads_a_path_reads_a_storage_of_ones_own(tmp_path):
    name, state = uuid.uuid4().hex, {'w': np.arange(2.0**12, dtype=np.float32)}
    run = Mine(name, 'run')
    with t5ckpt.Checkpointer(state, checkpoints_dir=run) as ck:
        ck.save(state, step=1)
        ck.save({'w': -state['w']}, step=2)
    assert t5ckpt.all_steps(run) == list(t5ckpt.open_run(run)) == [1, 2]
    for sign, found in [
        (1, t5ckpt.open_checkpoint(run, 1)),
        (-1, t5ckpt.open_checkpoint(run)),
        (1, t5ckpt.open_checkpoint(Mine(name, 'run/checkpoint_1'))),
        (1, t5ckpt.open_run(run)[1]),
        (-1, t5ckpt.load_t5x_checkpoint(run)),
        (1, t5ckpt.load_t5x_checkpoint(run, 1)),
    ]:
        assert np.array_equal(found['w'], sign * state['w'])
    assert t5ckpt.verify(run, full=True).step == 2
    assert t5ckpt.copy_checkpoint(
        Mine(name, 'run/checkpoint_1'), tmp_path / 'copy', t5ckpt.ConvertOptions(step=1)
    ).path.endswith('checkpoint_1')
    assert t5ckpt.copy_checkpoint(run, tmp_path / 'latest').step == 2
    assert t5ckpt.copy_checkpoint(tmp_path / 'copy', Mine(name, 'copies')).path == f'mine://{name}/copies/checkpoint_1'
    assert t5ckpt.verify(Mine(name, 'copies'), full=True).ok
    for read in (t5ckpt.open_checkpoint, t5ckpt.load_t5x_checkpoint, t5ckpt.verify):
        with pytest.raises(errors.CheckpointNotFoundError, match='step 3 does not exist, complete steps are: 1, 2'):
            read(run, 3)
        with pytest.raises(
            errors.CheckpointNotFoundError, match=f'mine://{name}/none: there is no such file or directory'
        ):
            read(Mine(name, 'none'))
    run.delete_file('checkpoint_2/checkpoint')
    assert not t5ckpt.verify(run, 2).ok
    assert not t5ckpt.verify(Mine(name, 'run/checkpoint_2')).ok
    with pytest.raises(ValueError, match='a Storage was opened with its own'):
        t5ckpt.open_checkpoint(run, storage_options={'endpoint': 'x'})


def test_unknown_schemes_are_refused():
    with pytest.raises(errors.UnsupportedFormatError, match='ftp'):
        t5ckpt.Checkpointer({'x': 1}, checkpoints_dir='ftp://host/run')


@pytest.mark.parametrize(
    ('url', 'cure'),
    [
        ('https://box.s3.amazonaws.com/run?X-Amz-Credential=HIDDEN&X-Amz-Signature=HIDDEN', 's3://.*AWS_PROFILE'),
        ('https://box.s3.amazonaws.com/run?AWSAccessKeyId=HIDDEN&Signature=HIDDEN', 's3://.*AWS_PROFILE'),
        ('s3://box/run?x-amz-security-token=HIDDEN', 's3://.*AWS_PROFILE'),
        ('s3://KEY:HIDDEN/HIDDEN@box/run', 's3://.*AWS_PROFILE'),
        ('https://storage.googleapis.com/box/run?X-Goog-Signature=HIDDEN', 'gs://.*GOOGLE_APPLICATION_CREDENTIALS'),
        ('https://storage.googleapis.com/box/run?GoogleAccessId=me&Signature=HIDDEN', 'gs://.*GOOGLE_APPLICATION'),
        ('gs://box/run?Signature=HIDDEN', 'gs://.*GOOGLE_APPLICATION_CREDENTIALS'),
    ],
    ids=['s3', 's3-v2', 's3-token', 's3-keys', 'gs', 'gs-v2', 'gs-url'],
)
def test_keys_and_signatures_in_a_url_are_refused_and_not_shown(url, cure, elsewhere):
    for act in (open_storage, t5ckpt.all_steps, lambda path: t5ckpt.Checkpointer({'x': 1}, checkpoints_dir=path)):
        with pytest.raises(errors.InvalidPathError, match=cure) as caught:
            act(url)
        assert 'HIDDEN' not in ''.join(traceback.format_exception(caught.value))
    assert not [*elsewhere.iterdir()]


def test_errors_show_neither_passwords_nor_queries():
    with pytest.raises(errors.UnsupportedFormatError, match='https://host/run: ') as caught:
        open_storage('https://me:HIDDEN@host/run?token=HIDDEN')
    assert 'HIDDEN' not in str(caught.value)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A current directory and a home, in which nothing may appear."""
    home = tmp_path / 'home'
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv('HOME', str(home))
    return home


PATHS = {
    'gs:/bucket/run': 'write gs://bucket/run',
    's3:/bucket/run': 'write s3://bucket/run',
    'S3:bucket/run': 'write S3://bucket/run',
    'memory:/run': 'write memory://run',
    'gs:///run': 'no bucket in it',
    's3://b/a/../c': 'Write s3://b/c$',
    's3://b/./c/': 'Write s3://b/c$',
    'gs://b//x': 'Write gs://b/x$',
    'gs://b/a//x': 'Write gs://b/a/x$',
    's3://../x': "no '.', '..' or empty",
    'memory://a/../b': 'Write memory://a/b$',
    'file:///tmp/run': 'write the path alone',
    'FILE:run': 'write the path alone',
    'run\0': 'NUL',
    'a/b\0/c': 'NUL',
    b'run\0': 'NUL',
    b'run-\xff': 'not UTF-8',
    'run-\udcff': 'not UTF-8',
    's3://bucket/\udcff': 'not UTF-8',
    'run\\a': 'reads as a slash',
    '$T5CKPT_RUNS/run': r'\$T5CKPT_RUNS, .*os\.path\.expandvars',
    '${T5CKPT_RUNS}/run': 'os.path.expandvars',
    '/of-$T5CKPT_RUNS.d/run': r'no /of-\$T5CKPT_RUNS\.d, .*os\.path\.expandvars',
    '~/$T5CKPT_RUNS': 'os.path.expandvars',
    '~no-such-user/run': 'no home directory for ~no-such-user. Write ./~no-such-user/run',
}


@pytest.mark.slow
@pytest.mark.parametrize(('below', 'given'), [('', 'läufe/run'), ('', b'l\xc3\xa4ufe/run'), ('läufe', 'run')])
def test_a_locale_that_has_no_such_names(tmp_path, below, given):
    (tmp_path / 'läufe').mkdir()
    program = f"""
        import t5ckpt
        try:
            t5ckpt.Checkpointer({{'x': 1}}, checkpoints_dir={given!a})
        except t5ckpt.errors.InvalidPathError as error:
            print(error)
    """
    environment = {**os.environ, 'LC_ALL': 'POSIX', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}
    words = [sys.executable, '-c', textwrap.dedent(program)]
    done = subprocess.run(words, cwd=tmp_path / below, env=environment, capture_output=True, text=True, check=True)
    assert re.search(
        r'ufe/run.*: the locale of this process has only ascii in names of files. Set PYTHONUTF8=1', done.stdout
    )


def test_a_relative_path_in_a_directory_that_is_not_utf8(tmp_path, monkeypatch):
    where = os.fsencode(tmp_path) + b'/\xff'
    os.mkdir(where)
    monkeypatch.chdir(where)
    with pytest.raises(errors.InvalidPathError, match='not UTF-8'):
        t5ckpt.open_run('run')


@pytest.mark.parametrize(('path', 'words'), PATHS.items())
def test_a_path_without_a_directory_creates_nothing(elsewhere, path, words):
    state = {'x': 1}
    ways = [
        lambda: t5ckpt.Checkpointer(state, checkpoints_dir=path),
        lambda: t5ckpt.all_steps(path),
        lambda: t5ckpt.open_checkpoint(path),
        lambda: t5ckpt.open_run(path),
        lambda: t5ckpt.verify(path),
        lambda: t5ckpt.copy_checkpoint(path, elsewhere / 'copy'),
        lambda: t5ckpt.pin_checkpoint(path),
    ]
    for way in ways:
        with pytest.raises(errors.InvalidPathError, match=words):
            way()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    'url', ['s3://Bad_Bucket!/run', 's3://Bad_Bucket/run', 's3://a..b/run', 's3://ab/run', 'gs://Bad_Bucket!/run']
)
def test_a_name_that_no_bucket_can_have(url):
    with pytest.raises(
        errors.InvalidPathError, match=f'{url}.* a bucket cannot have the name "[A-Za-z_!.]+". Check the URL'
    ):
        t5ckpt.all_steps(url)


@pytest.mark.slow
@pytest.mark.parametrize('server', ['http://127.0.0.1:abc', 'http://127.0.0.1:99999', 'http://[::1'])
@pytest.mark.parametrize(
    ('url', 'variable'), [('az://box/run', 'AZURE_STORAGE_ENDPOINT'), ('s3://box/run', 'AWS_ENDPOINT_URL')]
)
def test_an_address_of_a_server_that_is_none(url, variable, server, monkeypatch):
    """Found without the waits for a server."""
    monkeypatch.setenv('AZURE_STORAGE_CONNECTION_STRING', '')
    with pytest.raises((ValueError, errors.StorageError), match=rf'{url}: .*(Port|IPv6).*(endpoint|https://)'):
        t5ckpt.all_steps(url, storage_options={'endpoint': server, 'retry_seconds': 1})
    monkeypatch.setenv(variable, server)
    with pytest.raises((ValueError, errors.StorageError), match=f'{url}: .*(Port|IPv6)'):
        t5ckpt.all_steps(url, storage_options={'retry_seconds': 1})


def test_an_error_of_the_system_says_it_once(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(errors.NotADirectoryStorageError) as caught:
        t5ckpt.Checkpointer({'w': 1}, checkpoints_dir=tmp_path / 'file').save({'w': 1}, step=1)
    assert str(caught.value).count('in the place of a directory') == 1, caught.value


def test_an_empty_path_is_not_the_current_directory(elsewhere):
    for way in (t5ckpt.all_steps, t5ckpt.open_checkpoint, t5ckpt.open_run, t5ckpt.latest_step):
        with pytest.raises(errors.InvalidPathError, match='is empty'):
            way('')


def test_a_path_is_text_or_bytes_and_may_be_relative(elsewhere, tmp_path):
    root = tmp_path / 'a b' / 'r%n#?'
    state = {'x': 1}
    for number, path in enumerate([root, str(root).encode(), os.path.relpath(root)]):
        with t5ckpt.Checkpointer(state, checkpoints_dir=path) as ck:
            assert ck.checkpoints_dir == str(root)
            ck.save(state, step=number)
        assert t5ckpt.all_steps(path) == list(range(number + 1))
        assert t5ckpt.find_checkpoint(path, number) == f'{root}/checkpoint_{number}/checkpoint'
    assert list(elsewhere.iterdir()) == []


def test_a_tilde_is_the_home_directory_in_paths_alone(elsewhere):
    state = {'x': 1}
    t5ckpt.Checkpointer(state, checkpoints_dir='~/run').save(state, step=1)
    assert t5ckpt.all_steps(pathlib.Path('~/run')) == [1]
    assert t5ckpt.all_steps(elsewhere / 'run') == [1]
    t5ckpt.Checkpointer(state, checkpoints_dir='./~').save(state, step=2)
    assert t5ckpt.all_steps(elsewhere / '~') == [2]


def test_a_dollar_is_part_of_a_name_that_exists_or_of_a_url(elsewhere, monkeypatch):
    monkeypatch.setenv('T5CKPT_RUNS', str(elsewhere))
    state = {'x': 1}
    with pytest.raises(errors.InvalidPathError, match='expandvars'):
        t5ckpt.Checkpointer(state, local=t5ckpt.LocalTier('$T5CKPT_RUNS/local'), checkpoints_dir='run')
    path = os.path.expandvars('$T5CKPT_RUNS/run')
    t5ckpt.Checkpointer(state, checkpoints_dir=path).save(state, step=1)
    assert t5ckpt.all_steps(elsewhere / 'run') == [1]
    (elsewhere / '$T5CKPT_RUNS').mkdir()
    for number, name in enumerate(('$T5CKPT_RUNS/run', '$', 'a$/b', 'cost-$5')):
        t5ckpt.Checkpointer(state, checkpoints_dir=name).save(state, step=number)
        assert t5ckpt.all_steps(name) == [number]
    url = 'memory://dollars/$A'
    t5ckpt.Checkpointer(state, checkpoints_dir=url).save(state, step=1)
    assert t5ckpt.all_steps(url) == [1]


def test_a_step_is_not_a_run(tmp_path):
    """A step inside a checkpoint's directory would not be found."""
    state = {'x': 1}
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path).save(state, step=4)
    step = tmp_path / 'checkpoint_4'
    for opened in (lambda: t5ckpt.Checkpointer(state, checkpoints_dir=step), lambda: t5ckpt.open_run(step)):
        with pytest.raises(
            errors.CheckpointNotFoundError,
            match=f'checkpoint_4 is a checkpoint, not a run.*Pass the directory of the run, such as {tmp_path},',
        ):
            opened()
    # Only a name, so far.
    with pytest.raises(
        errors.CheckpointNotFoundError, match=f'is the path of a step.*directory of the run, {tmp_path}'
    ):
        t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'checkpoint_5').save(state, step=1)


# By number: our error, and words of its cure.
NUMBERS = {
    'EMFILE': (errors.StorageError, 'ulimit -n'),
    'ENFILE': (errors.StorageError, 'fs.file-max'),
    'EFBIG': (errors.StorageError, 'ulimit -f'),
    'ENAMETOOLONG': (errors.StorageError, 'shorter path'),
    'ELOOP': (errors.StorageError, 'Symbolic links'),
    'ESTALE': (errors.StorageError, 'mount it again'),
    'ENOMEM': (errors.StorageError, 'no memory'),
    'EBUSY': (errors.StorageError, 'Another program'),
    'EIO': (errors.StorageError, 'dmesg'),
    'ENOSPC': (errors.NoSpaceError, 'Free space'),
    'EDQUOT': (errors.NoSpaceError, 'quota'),
    'EROFS': (errors.AccessDeniedError, 'read-only'),
    'EACCES': (errors.AccessDeniedError, 'permissions'),
    'EPERM': (errors.AccessDeniedError, 'permissions'),
    'ENOTDIR': (errors.NotADirectoryStorageError, 'in the place of'),
    'EISDIR': (errors.NotADirectoryStorageError, 'in the place of'),
}


@pytest.mark.parametrize('writing', [True, False])
@pytest.mark.parametrize(('name', 'expected'), NUMBERS.items())
def test_what_the_system_says_by_number(name, expected, writing):
    """The same, whether Python or TensorStore was told; and never a damaged checkpoint."""
    number, (kind, words) = getattr(errno, name), expected
    from_python = OSError(number, os.strerror(number))
    code = 'UNKNOWN: ' if number == errno.ELOOP else ''
    from_tensorstore = ValueError(f'{code}Failed to open: "/a": {os.strerror(number)} [os_error_code=\'{number}\']')
    for error in (from_python, from_tensorstore):
        with pytest.raises(errors.StorageError) as caught, foreign_errors('/run/a', writing=writing):
            raise error
        assert type(caught.value) is kind
        assert caught.value.errno == number
        assert words in str(caught.value)
        assert str(caught.value).startswith(f'[Errno {number}] /run/a: ')
        assert 'os_error_code' not in str(caught.value)


LIMITED = """
import resource, sys
import jax, numpy as np, t5ckpt
run, limit = sys.argv[1:]
state = {'w': np.ones((64, 64)), 'step': 1}
ck = t5ckpt.Checkpointer(state, checkpoints_dir=run, options=t5ckpt.CheckpointerOptions(inline_bytes=64))
jax.devices()
ck.save(state, step=1)
if limit == 'files':
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
else:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
try:
    ck.save({**state, 'w': np.zeros((64, 64))}, step=2)
except t5ckpt.errors.StorageError as error:
    text = str(error)
finally:
    resource.setrlimit(resource.RLIMIT_NOFILE if limit == 'files' else resource.RLIMIT_FSIZE, before)
print(ck.all_steps(), text)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(('limit', 'words'), [('files', 'ulimit -n'), ('size', 'ulimit -f')])
def test_a_limit_of_the_process_is_not_blamed_on_the_disk(tmp_path, limit, words):
    done = forked.run(LIMITED, tmp_path / 'run', limit)
    assert done.stdout.startswith('[1] '), done.stderr
    assert words in done.stdout
    assert 'dmesg' not in done.stdout


@pytest.mark.parametrize(('url', 'cure'), [('gcs://b/run', 'write gs://b/run'), ('s3a://b/run', 'write s3://b/run')])
def test_the_spelling_of_another_program_is_named(url, cure):
    with pytest.raises(errors.UnsupportedFormatError, match=cure):
        t5ckpt.all_steps(url)

"""Checkpoints made by an attacker: a typed error, in little memory and time, and nothing read elsewhere."""

import contextlib
import importlib.util
import json
import os
import pathlib
import random
import resource
import subprocess
import sys
import time
import zlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import t5ckpt
from t5ckpt import errors

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / 'fuzz'))

import run as fuzz_run  # noqa: E402
import targets  # noqa: E402

HUGE = 2**40
ZARRAY = {'dtype': '<f4', 'fill_value': None, 'filters': None, 'order': 'C', 'zarr_format': 2}


def spec_of(shape, chunks, compressor=None, **changes):
    metadata = {'shape': shape, 'chunks': chunks, 'compressor': compressor}
    spec = {'driver': 'zarr', 'dtype': 'float32', 'kvstore': {'driver': 'file', 'path': 'w/'}, 'metadata': metadata}
    return spec | changes


def write(step_dir, spec, chunk=b'\0' * 64, **zarray):
    """A checkpoint with one stored leaf, and what lies in its directory."""
    (step_dir / 'w').mkdir(parents=True)
    (step_dir / 'checkpoint').write_bytes(msgpack.packb({'version': 3, 'optimizer': {'w': spec}}))
    (step_dir / 'w' / '.zarray').write_text(json.dumps({**ZARRAY, **spec['metadata'], **zarray}))
    (step_dir / 'w' / '0').write_bytes(chunk)
    (step_dir / 'w' / '0.0').write_bytes(chunk)
    return step_dir


# Memory of the process is bounded from outside: what asks for more fails, and is then no typed error.
CHILD = """
import resource, sys, time
import numpy, tensorstore, t5ckpt, t5ckpt.load, t5ckpt.inspection.view, t5ckpt.integrity.verify
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.monotonic()
path = sys.argv[1]
ways = [
    lambda: t5ckpt.load_t5x_checkpoint(path),
    lambda: t5ckpt.open_checkpoint(path)['w'][...], lambda: t5ckpt.open_checkpoint(path)['w'].get(),
    lambda: t5ckpt.verify(path, full=True).raise_if_damaged(),
]
for way in ways:
    try:
        way()
        print('read')
    except t5ckpt.errors.T5CkptError as error:
        print(type(error).__name__)
    except KeyError:
        print('KeyError')
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(f'{grown // 1024} MB, {time.monotonic() - started:.1f} s')
assert grown < 400 * 1024, grown
assert time.monotonic() - started < 20
"""


def attempts(path):
    """Reads a checkpoint in every way, in a process of its own; the outcomes."""
    done = subprocess.run(
        [sys.executable, '-c', CHILD, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout.split()


BLOSC_BOMB = bytes([2, 1, 0x21, 4]) + (2**31 - 17).to_bytes(4, 'little') * 2 + (64).to_bytes(4, 'little') + bytes(48)
CLAIMS = {
    'shape': (spec_of([HUGE, HUGE], [HUGE, HUGE]), b'\0' * 64, {}),
    'shape, small chunks': (spec_of([2**20, 2**20], [1, 1]), b'\0' * 4, {}),
    'chunk of a small array': (spec_of([4, 4], [HUGE, 2**19]), b'\0' * 64, {}),
    'packed shape': (spec_of([HUGE], [HUGE], {'id': 'zlib', 'level': 1}), b'x' * 64, {}),
    'packed chunk': (spec_of([16], [HUGE], {'id': 'zstd', 'level': 1}), b'x' * 64, {}),
    'packed chunk of gigabytes': (spec_of([16], [2**30], {'id': 'gzip', 'level': 1}), b'x' * 64, {}),
    'blosc': (spec_of([16], [16], {'id': 'blosc', 'cname': 'lz4', 'clevel': 1, 'shuffle': 0}), BLOSC_BOMB, {}),
    'shape beyond int64': (spec_of([2**62, 2**62], [2**62, 2**62]), b'', {}),
}


@pytest.mark.slow
@pytest.mark.parametrize('claim', CLAIMS)
def test_nothing_is_allocated_by_a_claim(tmp_path, claim):
    spec, chunk, zarray = CLAIMS[claim]
    words = attempts(write(tmp_path / 'checkpoint_1', spec, chunk, **zarray))
    assert 'read' not in words, words


# bz2.compress(bytes(2**31)), which takes most of a minute.
ZEROS_BZ2 = zlib.decompress(
    bytes.fromhex(
        '78da738acab034748c540b8ee4e37c749f31becf81e10003038702834183af9bd302d5955c0dd347e547e547e547e5'
        '47e507b37cc386173c8c224b1d1a80f22c601567583597794c54dc08c48fde792ce712922e4e357600008c91cabc'
    )
)


def zeros_gzip(size: int) -> bytes:
    """The same in gzip (RFC 1951, 1952): after a full flush the next megabyte is packed into the same bytes again."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    megabyte = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    check = 0
    for _ in range(size >> 20):
        check = zlib.crc32(bytes(2**20), check)
    tail = check.to_bytes(4, 'little') + (size % 2**32).to_bytes(4, 'little')
    return bytes.fromhex('1f8b08000000000000ff') + megabyte * (size >> 20) + b'\3\0' + tail


@pytest.mark.slow
@pytest.mark.parametrize('codec', ['gzip', 'zstd', 'bz2'])
def test_bombs(tmp_path, codec):
    """Gigabytes of zeros where the metadata promises 64 bytes."""
    size = 2**31
    if codec == 'zstd':
        # A frame of blocks that each repeat one byte 2^17 times (RFC 8878).
        blocks = size >> 17
        bomb = bytes.fromhex('28b52ffd0050') + b''.join(
            ((1 << 20) | 2 | (n == blocks - 1)).to_bytes(3, 'little') + b'\0' for n in range(blocks)
        )
    else:
        bomb = zeros_gzip(size) if codec == 'gzip' else ZEROS_BZ2
    words = attempts(write(tmp_path / 'checkpoint_1', spec_of([16], [16], {'id': codec, 'level': 1}), bomb))
    assert 'read' not in words, words


def test_msgpack_bombs():
    """Headers that claim more than follows, at every depth, and nesting without end."""
    array, mapping = b'\xdd\xff\xff\xff\xff', b'\xdf\xff\xff\xff\xff'
    bombs = [array * 400, mapping * 400, b'\xc6\xff\xff\xff\xff', b'\xc9\xff\xff\xff\xff\x01', b'\x91' * 10**6]
    bombs += [
        b'\x81\xa1a' * 10**5 + b'\x01',
        b'\xdd\x00\x0f\xff\xff' * 1000 + bytes(2**20),
        b'\xc1',
        b'\xdc\xff\xff' * 500,
    ]
    head = msgpack.packb({'version': 3, 'optimizer': {}})[:-1]
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    for bomb in bombs:
        for data in (bomb, head + bomb, msgpack.packb({'a': msgpack.ExtType(1, bomb)})):
            with pytest.raises(errors.FormatError):
                targets.manifest(data)
    assert time.monotonic() - started < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


@pytest.mark.parametrize(
    'chunks',
    [{'0': 'text'}, {'0': b'bytes'}, {'0': 3}, {'0': None}, {}, {'1': 1}, [1], {'0': {'0': 1}}, 'x', {'0': [1, 2, 3]}],
)
def test_chunked_arrays_of_something_else(chunks):
    value = {'__msgpack_chunked_array__': True, 'shape': {'0': 3}, 'chunks': chunks}
    with pytest.raises(errors.FormatError):
        targets.manifest(msgpack.packb({'version': 3, 'optimizer': {'w': value}}))


SPECS = {
    'driver': {'driver': 'n5'},
    'array driver': {'driver': 'array'},
    'json driver': {'driver': 'json'},
    'cast': {'driver': 'cast', 'base': spec_of([4], [4])},
    'stack': {'driver': 'stack', 'layers': [spec_of([4], [4])]},
    'downsample': {'driver': 'downsample', 'base': spec_of([4], [4])},
    'base': {'base': spec_of([4], [4])},
    'http': {'kvstore': {'driver': 'http', 'base_url': 'http://127.0.0.1:9', 'path': 'w/'}},
    'url': {'kvstore': 'file:///etc/'},
    'ocdbt': {'kvstore': {'driver': 'ocdbt', 'base': 'file:///etc/', 'path': 'w/'}},
    'zip': {'kvstore': {'driver': 'zip', 'base': 'file:///etc/x.zip', 'path': 'w/'}},
    'nested base': {'kvstore': {'driver': 'file', 'path': 'w/', 'base': {'driver': 'file', 'path': '/etc/'}}},
    'absolute': {'kvstore': {'driver': 'file', 'path': '/etc/'}},
    'home': {'kvstore': {'driver': 'file', 'path': '../w/'}},
    'up and down': {'kvstore': {'driver': 'file', 'path': 'w/../../w/'}},
    'in the old field': {'path': '../w'},
    'file url': {'kvstore': {'driver': 'file', 'path': 'file:///etc/'}},
    'backslash': {'kvstore': {'driver': 'file', 'path': '..\\w/'}},
    'nul': {'kvstore': {'driver': 'file', 'path': 'w\0/'}},
}


@pytest.mark.parametrize('what', SPECS)
def test_specs_that_lead_elsewhere(tmp_path, what):
    step_dir = write(tmp_path / 'checkpoint_1', spec_of([4], [4]) | SPECS[what])
    for read in (
        lambda: t5ckpt.load_t5x_checkpoint(step_dir),
        lambda: t5ckpt.open_checkpoint(step_dir),
        lambda: t5ckpt.verify(step_dir, full=True).raise_if_damaged(),
    ):
        with pytest.raises(errors.FormatError):
            read()
    assert t5ckpt.verify(step_dir).damages[0].kind in ('unsafe', 'undecodable')


def test_an_ocdbt_database_cannot_name_other_directories(tmp_path):
    """TensorStore's file store refuses keys that lead up, and joins absolute ones to its root."""
    import tensorstore as ts

    (tmp_path / 'secret').write_bytes(b'secret')
    (tmp_path / 'inside').mkdir()
    store = ts.KvStore.open({'driver': 'file', 'path': f'{tmp_path}/inside/'}).result()
    for key in ('../secret', 'x/../../secret', str(tmp_path / 'secret')):
        try:
            found = store.read(key).result().state
        except ValueError:
            found = 'refused'
        assert found in ('refused', 'missing')


@pytest.mark.parametrize('umask', [0o022, 0o027, 0o077, 0o002])
def test_files_get_the_umasks_permissions(tmp_path, umask):
    state = {'w': np.arange(2.0**14), 'b': np.ones(2)}
    before = os.umask(umask)
    try:
        with t5ckpt.Checkpointer(
            state, checkpoints_dir=tmp_path / 'run', options=t5ckpt.CheckpointerOptions(inline_bytes=64)
        ) as ck:
            ck.save(state, step=1)
        t5ckpt.pin_checkpoint(tmp_path / 'run' / 'checkpoint_1')
    finally:
        os.umask(before)
    for path in [tmp_path / 'run', *(tmp_path / 'run').rglob('*')]:
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        assert path.stat().st_mode & 0o777 == expected, path


def test_a_planted_link_does_not_lead_a_write_away(tmp_path):
    step_dir = tmp_path / 'run' / 'checkpoint_1'
    state = {'w': np.ones(4)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run') as ck:
        ck.save(state, step=1)
    (tmp_path / 'victim').write_text('mine')
    (step_dir / 'PINNED').symlink_to(tmp_path / 'victim')
    t5ckpt.pin_checkpoint(step_dir)
    assert (tmp_path / 'victim').read_text() == 'mine'
    assert not (step_dir / 'PINNED').is_symlink()


# ---- fuzzing: the short run; `make fuzz` is the long one ----


@pytest.mark.slow
@pytest.mark.parametrize('target', targets.TARGETS)
def test_the_corpus_and_a_short_fuzz(target):
    runs = {'checkpoint': 200, 'orbax': 200, 'events': 1000, 'tf_index': 1000, 'flax_file': 1000}.get(target, 3000)
    rng, seeds = random.Random(5), targets.corpus(target)
    for number in range(runs):
        data = seeds[number] if number < len(seeds) else fuzz_run.mutated(rng.choice(seeds), seeds, rng)
        try:
            targets.TARGETS[target](data)
        except errors.T5CkptError:
            pass
        except BaseException:
            raise


@pytest.mark.slow
def test_a_short_fuzz_that_is_guided_by_coverage():
    if importlib.util.find_spec('atheris') is None and os.environ.get('CI') != 'true':
        pytest.skip("needs atheris: pip install 't5ckpt[fuzz]'")
    command = [sys.executable, str(ROOT / 'fuzz' / 'run.py'), '--target', 'manifest', '--runs', '5000']
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, 'PYTHONPATH': str(ROOT)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'guided by coverage' in done.stdout


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.dictionaries(
    st.sampled_from(['driver', 'kvstore', 'metadata', 'path', 'dtype', 'transform', 'shape', 'chunks', 'compressor']),
    JSON,
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(fields=FIELDS)
def test_specs_of_any_json(fields):
    with contextlib.suppress(errors.T5CkptError):
        targets.spec(json.dumps(fields).encode())


MSGPACK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=16)
    | st.builds(msgpack.ExtType, st.integers(0, 5), st.binary(max_size=24)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ['driver', 'kvstore', 'metadata', 'shape', 'chunks', '__msgpack_chunked_array__', '0', 'a']
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=16,
)


@settings(max_examples=300)
@given(tree=MSGPACK, version=st.sampled_from([None, 1, 2, 3, 4, -1]))
def test_manifests_of_any_msgpack(tree, version):
    contents = tree if version is None else {'version': version, 'optimizer': tree}
    with contextlib.suppress(errors.T5CkptError):
        targets.manifest(msgpack.packb(contents))

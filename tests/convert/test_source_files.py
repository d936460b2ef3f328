"""Files of other programs: what is no file does not block an import, and what a header claims is compared with what is there."""

import json
import os
import resource
import struct
import time

import numpy as np
import pytest

import t5ckpt
from t5ckpt import errors
from t5ckpt.convert import convert_checkpoint
from t5ckpt.convert.huggingface.config import read_config
from t5ckpt.convert.seqax import write_seqax
from t5ckpt.convert.tf import open_tf
from t5ckpt.convert.tf.bundle import read_bundle


def fifo(path):
    os.mkfifo(path)
    return path


def hugging_face(tmp_path, name):
    root = tmp_path / 'model'
    root.mkdir()
    index = {'weight_map': {'shared.weight': 'shard.safetensors'}}
    (root / 'model.safetensors.index.json').write_text(json.dumps(index))
    (root / name).unlink(missing_ok=True)
    fifo(root / name)
    return root


OPENED = {
    'safetensors': lambda tmp_path: t5ckpt.convert_checkpoint(
        'safetensors', fifo(tmp_path / 'x.safetensors'), tmp_path / 'run'
    ),
    'endless': lambda tmp_path: t5ckpt.convert_checkpoint('safetensors', '/dev/zero', tmp_path / 'run'),
    'config': lambda tmp_path: read_config(fifo(tmp_path / 'config.json')),
    'endless config': lambda _: read_config('/dev/zero'),
    'shard': lambda tmp_path: t5ckpt.convert_checkpoint(
        'hf', hugging_face(tmp_path, 'shard.safetensors'), tmp_path / 'run'
    ),
    'index': lambda tmp_path: t5ckpt.convert_checkpoint(
        'hf', hugging_face(tmp_path, 'model.safetensors.index.json'), tmp_path / 'run'
    ),
    'flax': lambda tmp_path: convert_checkpoint('flax', fifo(tmp_path / 'checkpoint_1'), tmp_path / 'run'),
    'tensorflow': lambda tmp_path: read_bundle(str(fifo(tmp_path / 'm.index').with_suffix(''))),
}


@pytest.mark.parametrize('what', OPENED)
def test_other_things_than_files_are_refused_at_once(tmp_path, what):
    started = time.monotonic()
    with pytest.raises(errors.T5CkptError):
        OPENED[what](tmp_path)
    assert time.monotonic() - started < 5
    assert not (tmp_path / 'run').exists()


def tensor(start, stop, shape=(2,)):
    return {'dtype': 'F32', 'shape': list(shape), 'data_offsets': [start, stop]}


@pytest.mark.parametrize(
    'header',
    [
        {'a': tensor(0, 8), 'b': tensor(4, 12)},
        {'a': tensor(0, 8), 'b': tensor(12, 20)},
        {'a': tensor(-8, 0)},
        {'a': tensor(0, 10**18, (25 * 10**16,))},
        {'a': tensor(0, 8, (10**18,))},
        {'a': tensor(0, 8, (-2,))},
        {'a': tensor(8, 0)},
        {'a': tensor(0, 8, (2**40, 2**40))},
        {'a': tensor(0, 2**63, (2**61,))},
    ],
)
def test_safetensors_that_lie(tmp_path, header):
    text = json.dumps(header).encode()
    (tmp_path / 'x.safetensors').write_bytes(struct.pack('<Q', len(text)) + text + bytes(20))
    with pytest.raises(errors.CorruptCheckpointError):
        t5ckpt.convert_checkpoint('safetensors', tmp_path / 'x.safetensors', tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('header', 'values'),
    [
        (
            {'a': tensor(0, 8), 'long' * 40: tensor(4, 20, (4,))},
            'offsets are 4 to 20, and the tensor before it ends at 8',
        ),
        ({'a': tensor(0, 8), 'b': tensor(8, 16)}, r'end at byte \d+ of \d+'),
        ({'long' * 40: tensor(0, 8, (3,))}, r'shape is \(3,\) of .F32., its offsets are 0 to 8'),
        ({'a': tensor(0, 24, (6,))}, r'end at byte \d+ of \d+'),
        ({'a': tensor(0, 8, (-2,))}, r'a: its shape is \(-2,\)'),
    ],
)
def test_lies_are_named_with_what_the_file_holds(tmp_path, header, values):
    text = json.dumps(header).encode()
    (tmp_path / 'x.safetensors').write_bytes(struct.pack('<Q', len(text)) + text + bytes(20))
    with pytest.raises(errors.CorruptCheckpointError, match=values):
        t5ckpt.convert_checkpoint('safetensors', tmp_path / 'x.safetensors', tmp_path / 'run')


def huge(path, beginning=b''):
    """A file that no memory holds, of one hole."""
    with open(path, 'wb') as file:
        file.write(beginning)
        file.truncate(2**42)
    return path


def seqax_step(tmp_path):
    step = tmp_path / 'seqax' / '0000000001'
    write_seqax(step.parent, 1, {'w': np.ones(3, np.float32), 'b': np.ones(2, np.float32)})
    return step


def replaced(path, make):
    path.unlink()
    return make(path)


DESCRIPTIONS = {
    'seqax array': lambda at, make: t5ckpt.convert_checkpoint(
        'seqax', replaced(seqax_step(at) / "['w']" / '.zarray', make).parents[1], at / 'run'
    ),
    'zarr array': lambda at, make: t5ckpt.open_checkpoint(
        replaced(seqax_step(at) / "['w']" / '.zarray', make).parents[1]
    ),
    'seqax attributes': lambda at, make: t5ckpt.convert_checkpoint(
        'seqax', replaced(seqax_step(at) / '.zattrs', make).parent, at / 'run'
    ),
    'tensorflow index': lambda at, make: read_bundle(str(make(at / 'm.index').with_suffix(''))),
    'tensorflow state': lambda at, make: open_tf(make(at / 'checkpoint').parent),
    'safetensors index': lambda at, make: t5ckpt.open_checkpoint(make(at / 'model.safetensors.index.json')),
    'configuration': lambda at, make: read_config(make(at / 'config.json')),
}


@pytest.mark.parametrize('make', [fifo, huge], ids=['fifo', 'huge'])
@pytest.mark.parametrize('what', DESCRIPTIONS)
def test_what_describes_other_files_is_small_and_a_file(tmp_path, what, make):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(errors.T5CkptError) as caught:
        DESCRIPTIONS[what](tmp_path, make)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024
    assert not (tmp_path / 'run').exists()
    if make is huge and 'attributes' not in what:
        assert f'{2**42:,}' in str(caught.value)


def test_a_fifo_among_the_chunks_of_seqax(tmp_path):
    replaced(seqax_step(tmp_path) / "['w']" / '0', fifo)
    with pytest.raises(errors.CorruptCheckpointError, match='regular file'):
        t5ckpt.convert_checkpoint('seqax', tmp_path / 'seqax', tmp_path / 'run')
    assert t5ckpt.all_steps(tmp_path / 'run') == []


@pytest.mark.parametrize('lost', ['.zarray', '.zarray 0', 'link'])
def test_an_array_of_seqax_without_its_description_is_not_left_out(tmp_path, lost):
    step = seqax_step(tmp_path)
    if lost == 'link':
        replaced(step / "['w']" / '.zarray', lambda path: path.symlink_to(tmp_path / 'elsewhere'))
    else:
        for name in lost.split():
            (step / "['w']" / name).unlink()
    with pytest.raises(errors.CorruptCheckpointError, match=r"\['w'\].*\.zarray"):
        t5ckpt.convert_checkpoint('seqax', step, tmp_path / 'run')


@pytest.mark.parametrize('length', [0, 7, 10**18, 2**64 - 1])
def test_safetensors_with_a_length_that_lies(tmp_path, length):
    (tmp_path / 'x.safetensors').write_bytes(struct.pack('<Q', length) + b'{}')
    with pytest.raises(errors.CorruptCheckpointError, match=str(length) if length > 7 else 'header'):
        t5ckpt.convert_checkpoint('safetensors', tmp_path / 'x.safetensors', tmp_path / 'run')

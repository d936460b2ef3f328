"""Run by test_tf_peer.py: checkpoints that TensorFlow writes, through our reader and through its own."""

import pathlib
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import t5ckpt
from t5ckpt.convert.tf import open_tf
from t5ckpt.errors import UnsupportedFormatError, UnsupportedLeafError

folder, golden = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
rng = np.random.default_rng(7)
DTYPES = (
    'float32',
    'float64',
    'float16',
    'int8',
    'int16',
    'int32',
    'int64',
    'uint8',
    'uint16',
    'uint32',
    'uint64',
    'bool',
)


def save(prefix, tensors, slices=None):
    names = list(tensors)
    slices = [''] * len(names) if slices is None else slices
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=names,
        shape_and_slices=slices,
        tensors=[tf.constant(v) for v in tensors.values()],
    )


def same(prefix, tensors):
    found = open_tf(prefix).tensors
    assert set(found) == set(tensors), set(found) ^ set(tensors)
    for name, value in tensors.items():
        got = found[name].get()
        assert (got.dtype, got.shape) == (value.dtype, value.shape), name
        assert got.tobytes() == value.tobytes(), name
        if value.ndim:
            assert found[name][1:].tobytes() == value[1:].tobytes(), name
    return found


# Every dtype, scalars, empty arrays, and so many names that the index has several blocks; in two files.
first = {f'{name}/value': rng.integers(0, 2, (3, 5)).astype(name) for name in DTYPES}
first |= {
    'bfloat16': rng.standard_normal((7, 3)).astype(ml_dtypes.bfloat16),
    'complex64': np.ones((2, 2), np.complex64),
}
second = {f'block_{i:05d}/some/long/name/of/a/variable': np.full((2, i % 4), i, np.float32) for i in range(5000)}
second['scalar'] = np.array(5, np.int64)
save(folder / 'part0', first)
save(folder / 'part1', second)
prefixes = [str(folder / 'part0'), str(folder / 'part1')]
tf.raw_ops.MergeV2Checkpoints(
    checkpoint_prefixes=prefixes, destination_prefix=str(folder / 'merged'), delete_old_dirs=False
)
assert len(list(folder.glob('merged.data-*-of-00002'))) == 2
found = same(folder / 'merged', first | second)
assert all(leaf.is_sliceable for leaf in found.values())

# A variable that was saved in parts.
whole = np.arange(24, dtype=np.float32).reshape(6, 4)
prefix = str(folder / 'partitioned')
tf.raw_ops.SaveV2(
    prefix=prefix,
    tensor_names=['w', 'w'],
    shape_and_slices=['6 4 0,2:0,4', '6 4 2,4:0,4'],
    tensors=[tf.constant(whole[:2]), tf.constant(whole[2:])],
)
with pytest.raises(UnsupportedFormatError, match=r'saved in parts.*tf\.train\.load_checkpoint'):
    open_tf(prefix)

# TensorFlow's own reader returns the same.
ours = open_tf(shutil.copytree(golden, folder / 'golden'))
theirs = tf.train.load_checkpoint(ours.prefix)
assert set(ours.tensors) == set(theirs.get_variable_to_shape_map())
for name, tensor in ours.tensors.items():
    a, b = tensor.get(), theirs.get_tensor(name)
    assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()), name

# A tensor of text has no place in a checkpoint; the rule that the error names drops it.
save(folder / 'text-7', {'w': whole, 'vocab': np.array([b'a', b'bc'], object)})
rules = t5ckpt.CheckpointTranslator()
rules.add('(.*)')(lambda _, key, value, name: (f'target/{name}', value))
with pytest.raises(
    UnsupportedLeafError,
    match=r'^vocab: .*object.*a rule of translator= \(--rules FILE.py\) that returns \(None, None\)\.$',
):
    t5ckpt.convert_checkpoint('tf', folder / 'text-7', folder / 'run', t5ckpt.ConvertOptions(translator=rules))
rules = t5ckpt.CheckpointTranslator()
rules.add('vocab')(lambda *_: (None, None))
rules.add('(w)')(lambda _, key, value, name: (f'target/{name}', value))
done = t5ckpt.convert_checkpoint('tf', folder / 'text-7', folder / 'run', t5ckpt.ConvertOptions(translator=rules))
assert done.dropped == ('vocab',)
assert t5ckpt.load_t5x_checkpoint(folder / 'run')['target']['w'].tobytes() == whole.tobytes()

"""Safetensors files as the source of a restore: byte ranges straight to the devices that need them."""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import partitioner
from support.options import with_options

import t5ckpt
from t5ckpt import Checkpointer, WarmStart, restore_or_init
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingLeaves,
    ShapeMismatch,
    UnexpectedLeaves,
    UnsafeSpecError,
    UnsupportedFormatError,
)

safetensors = pytest.importorskip('safetensors.numpy')

TENSORS = {
    'model.embed.weight': np.arange(64 * 512, dtype=np.float32).reshape(64, 512),
    'model.layers.0.weight': np.arange(256 * 512, dtype=np.float32).reshape(256, 512) / 7,
    'model.norm': np.arange(5, dtype=np.int32),
    'model.scale': np.array(3, np.float32),
    'model.none': np.zeros((0, 4), np.float32),
}
NAMES = [
    ('params/embed', 'model.embed.weight'),
    (r'params/layer_(\d+)', r'model.layers.\1.weight'),
    ('params/(norm|scale|none)', r'model.\1'),
]
rename = functools.partial(t5ckpt.apply_assignment_map, assignment_map=NAMES)


def sharded(shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(partitioner.mesh((4,), ('x',)), PartitionSpec(*spec))
    )


def template(**changes):
    params = {
        'embed': sharded((64, 512), 'x'),
        'layer_0': sharded((256, 512), None, 'x'),
        'norm': np.zeros(5, np.int32),
        'scale': jnp.zeros(()),
        'none': np.zeros((0, 4), np.float32),
    }
    return {'params': params | changes}


def restore(path, model=None, options=None, **arguments):
    arguments = {'state_transformation_fns': [rename]} | arguments
    return Checkpointer(template() if model is None else model, **with_options(**options or {})).restore(
        path=path, **arguments
    )


def check(params):
    np.testing.assert_array_equal(params['embed'], TENSORS['model.embed.weight'])
    np.testing.assert_array_equal(params['layer_0'], TENSORS['model.layers.0.weight'])
    np.testing.assert_array_equal(params['norm'], TENSORS['model.norm'])
    assert float(params['scale']) == 3
    assert params['none'].shape == (0, 4)


@pytest.fixture
def one_file(tmp_path) -> pathlib.Path:
    path = tmp_path / 'weights' / 'model.safetensors'
    path.parent.mkdir()
    safetensors.save_file(TENSORS, path)
    return path


@pytest.fixture
def shards(tmp_path) -> pathlib.Path:
    """Two files and their index, as Hugging Face writes them."""
    weight_map = {}
    (tmp_path / 'sharded').mkdir()
    for number, names in enumerate((list(TENSORS)[:2], list(TENSORS)[2:]), 1):
        file = f'model-{number:05}-of-00002.safetensors'
        safetensors.save_file({name: TENSORS[name] for name in names}, tmp_path / 'sharded' / file)
        weight_map |= dict.fromkeys(names, file)
    path = tmp_path / 'sharded' / 'model.safetensors.index.json'
    path.write_text(json.dumps({'metadata': {}, 'weight_map': weight_map}))
    return path


def test_one_file_with_a_name_map(one_file):
    for path in (one_file, one_file.parent):
        restored = restore(path)['params']
        check(restored)
        assert restored['layer_0'].sharding.spec == PartitionSpec(None, 'x')


def test_several_files_with_an_index(shards):
    for path in (shards, shards.parent):
        check(restore(path)['params'])
    # The index of a variant, as transformers and diffusers name it; a directory may have several, so its path is the file's.
    variant = shards.rename(shards.with_name('model.safetensors.index.fp16.json'))
    check(restore(variant)['params'])
    t5ckpt.convert_checkpoint('safetensors', variant, shards.parent / 'run')
    assert len(t5ckpt.open_checkpoint(shards.parent / 'run')) == len(TENSORS)
    with pytest.raises(CheckpointNotFoundError, match=f'{variant.name} is a safetensors file.* restore'):
        restore(shards.parent)
    variant.unlink()
    with pytest.raises(
        CheckpointNotFoundError,
        match=r'one of several safetensors files, .*copy their index \(\.safetensors\.index\.json\), too',
    ):
        restore(shards.parent)


def test_it_is_a_checkpoint_like_any_other(one_file, shards, tmp_path):
    for path in (one_file, shards):
        view = t5ckpt.open_checkpoint(path)
        assert set(view) == set(TENSORS)
        np.testing.assert_array_equal(
            view['model.embed.weight'][3:60:5, -1:2:-3], TENSORS['model.embed.weight'][3:60:5, -1:2:-3]
        )
        assert view['model.scale'][()] == 3
        loaded = t5ckpt.load_t5x_checkpoint(path)
        assert all(np.array_equal(loaded[name], TENSORS[name]) for name in TENSORS)
        check(restore(path, lazy_parameters=True)['params'])
        with Checkpointer(template(), checkpoints_dir=tmp_path / 'run') as checkpointer:
            check(restore_or_init(checkpointer, dict, initial_checkpoint=WarmStart(path, rename=NAMES))['params'])


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float64', 'float8_e4m3fn', 'bool', 'uint8', 'int64'])
def test_dtypes(tmp_path, dtype):
    values = np.arange(96).reshape(12, 8).astype(jnp.dtype(dtype))
    exported = {'w': values}
    with Checkpointer(
        exported, checkpoints_dir=tmp_path / 'run', options=t5ckpt.CheckpointerOptions(inline_bytes=0)
    ) as checkpointer:
        checkpointer.save(exported, step=1)
    t5ckpt.convert_checkpoint('to-safetensors', tmp_path / 'run', tmp_path / 'w.safetensors')
    restored = Checkpointer({'w': np.zeros((12, 8), values.dtype)}).restore(path=tmp_path / 'w.safetensors')['w']
    assert (restored.dtype, restored.tobytes()) == (values.dtype, values.tobytes())


def test_casts_and_other_sizes(one_file):
    model = template(
        embed=sharded((80, 512), 'x', dtype=jnp.bfloat16), layer_0=sharded((256, 512), None, 'x', dtype=jnp.bfloat16)
    )
    restored = restore(one_file, model, {'restore_dtype': 'template'}, resize='params/embed')['params']
    assert restored['embed'].dtype == restored['layer_0'].dtype == jnp.bfloat16
    expected = TENSORS['model.embed.weight'].astype(jnp.bfloat16)
    np.testing.assert_array_equal(restored['embed'][:64], expected)
    assert not restored['embed'][64:].any()
    np.testing.assert_array_equal(restored['layer_0'], TENSORS['model.layers.0.weight'].astype(jnp.bfloat16))


def test_errors_name_the_leaf_or_the_file(one_file, shards, caplog):
    with pytest.raises(ShapeMismatch, match=r'params/embed: checkpoint \(64, 512\), template \(8, 512\)'):
        restore(one_file, template(embed=sharded((8, 512), 'x')))
    with pytest.raises(MissingLeaves, match='params/new'):
        restore(one_file, template(new=np.zeros(3)))
    model = template()
    del model['params']['none']
    rules = [*NAMES[:2], ('params/(norm|scale)', r'model.\1')]
    with pytest.raises(UnexpectedLeaves, match=r'model\.none'):
        restore(
            one_file,
            model,
            state_transformation_fns=[functools.partial(t5ckpt.apply_assignment_map, assignment_map=rules)],
        )
    index = json.loads(shards.read_text())
    index['weight_map']['model.norm'] = 'model-00001-of-00002.safetensors'
    shards.write_text(json.dumps(index))
    with pytest.raises(
        CorruptCheckpointError, match=r'model\.norm is in model-00001.* by the index, and in model-00002'
    ):
        restore(shards)
    index['weight_map'] |= {'model.norm': '../weights/model.safetensors'}
    shards.write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match='not below its directory'):
        restore(shards)
    shards.write_text('{')
    with pytest.raises(CorruptCheckpointError, match='does not decode'):
        restore(shards)
    data = one_file.read_bytes()
    one_file.write_bytes(data[:-1])
    with pytest.raises(CorruptCheckpointError, match='tensors end at byte'):
        restore(one_file)


def test_missing_files_links_and_buckets(shards, tmp_path):
    second = shards.parent / 'model-00002-of-00002.safetensors'
    second.rename(tmp_path / 'blob')
    with pytest.raises(CheckpointNotFoundError, match=r'model-00002-of-00002\.safetensors is missing'):
        restore(shards)
    # As in the cache of Hugging Face.
    second.symlink_to(tmp_path / 'blob')
    with pytest.raises(UnsafeSpecError, match='follow_links=True'):
        restore(shards)
    check(restore(shards, options={'follow_links': True})['params'])


def test_from_a_bucket(s3, one_file, shards):
    """And no byte twice, of a part no more than the part."""
    url = s3.url()
    for file in (*shards.parent.iterdir(), one_file):
        s3.put(f'{url}/{file.name}', file.read_bytes())
    for file in (one_file, shards):
        path = f'{url}/{file.name}'
        s3.proxy.clear()
        check(restore(path)['params'])
        assert received(s3) < 1.05 * sum(values.nbytes for values in TENSORS.values()) + 4096
        view = t5ckpt.open_checkpoint(path)
        np.testing.assert_array_equal(
            view['model.embed.weight'][3:60:5, -1:2:-3], TENSORS['model.embed.weight'][3:60:5, -1:2:-3]
        )
        assert view['model.scale'][()] == 3
    # 16 of 256 rows, and no embedding.
    s3.proxy.clear()
    some = template(embed=..., layer_0=sharded((16, 512), 'x'))
    restored = restore(f'{url}/{one_file.name}', some, resize='params/layer_0')['params']['layer_0']
    np.testing.assert_array_equal(restored, TENSORS['model.layers.0.weight'][:16])
    assert received(s3) < 16 * 2048 + 8192
    s3.put(f'{url}/short.safetensors', one_file.read_bytes()[:-9])
    with pytest.raises(CorruptCheckpointError, match=r'short\.safetensors ends before byte'):
        restore(f'{url}/short.safetensors')
    with pytest.raises(CheckpointNotFoundError):
        restore(f'{url}/none.safetensors')


@pytest.mark.slow
@pytest.mark.parametrize('files', ['one_file', 'shards'])
def test_a_directory_with_a_model_is_read_on_a_bucket_as_on_a_disk(bucket, request, files):
    url, path = bucket.url(), request.getfixturevalue(files)
    for file in path.parent.iterdir():
        bucket.put(f'{url}/hub/{file.name}', file.read_bytes())
    for place in (f'{url}/hub', path.parent):
        check(restore(place)['params'])
        assert set(t5ckpt.open_checkpoint(place)) == set(t5ckpt.load_t5x_checkpoint(place)) == set(TENSORS)
        # It is not a run: nothing of it is listed.
        assert t5ckpt.all_steps(place) == []
        with pytest.raises(
            CheckpointNotFoundError,
            match='t5ckpt convert safetensors makes a checkpoint of it',
        ):
            t5ckpt.find_checkpoint(place)
        with pytest.raises(CheckpointNotFoundError, match='step 7 does not exist'):
            t5ckpt.open_checkpoint(place, 7)
        beginning = Checkpointer({'w': np.ones(2)}, checkpoints_dir=place)
        with beginning, pytest.raises(CheckpointNotFoundError, match='no complete checkpoint there'):
            t5ckpt.restore_or_init(beginning, lambda: {'w': np.ones(2)})
    # A run that holds an export is the run.
    with Checkpointer({'w': np.ones(2)}, checkpoints_dir=f'{url}/run') as checkpointer:
        checkpointer.save({'w': np.ones(2)}, step=3)
        for file in path.parent.iterdir():
            bucket.put(f'{url}/run/{file.name}', file.read_bytes())
        checkpointer.save({'w': np.ones(2)}, step=4)
    assert t5ckpt.open_checkpoint(f'{url}/run').step == 4


def received(bucket) -> int:
    """The bytes that the server has sent since the last call."""
    return sum(request.received for request in bucket.proxy.clear())


@pytest.mark.parametrize('shape', [(), (7,), (0, 3), (5, 4, 6), (3, 1, 40000)])
def test_every_part_of_an_array_in_a_bucket(shape):
    """Blocks, rows and single runs; where the rows are far apart each is a request of its own."""
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape)
    storage = t5ckpt.storage.open_storage('memory://parts')
    storage.write('w.safetensors', safetensors.save({'a': np.ones(3, np.uint8), 'w': values, 'z': np.ones(5)}))
    view = t5ckpt.open_checkpoint('memory://parts/w.safetensors')
    for index in (
        ...,
        (slice(1, None),) * len(shape),
        (slice(None, None, -2),) * len(shape),
        (..., slice(2, 3))[: len(shape)],
    ):
        np.testing.assert_array_equal(view['w'][index], values[index])


def test_only_the_ranges_that_are_needed_are_read(one_file, caplog):
    """What the template leaves out, and the columns of other devices, are holes in the file: reading them is seen."""
    assert bytes_read(lambda: restore(one_file)) < 1.1 * sum(values.nbytes for values in TENSORS.values())
    # 16 of 256 rows, and no embedding.
    some = template(embed=..., layer_0=sharded((16, 512), 'x'))
    assert bytes_read(lambda: restore(one_file, some, resize='params/layer_0')) < 16 * 2048 + 10_000
    # A quarter of the columns: rows of 512 bytes each.
    columns = template(embed=..., layer_0=sharded((256, 128), None, 'x'))
    for options in ({}, {'restore_dtype': 'template'}):
        columns['params']['layer_0'] = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)
        read = bytes_read(lambda options=options: restore(one_file, columns, options, resize='params/layer_0'))
        assert 256 * 512 <= read < 256 * 512 + 10_000


def bytes_read(action) -> int:
    """What this process read by read calls while an action ran; /proc says so."""
    action()

    def count() -> int:
        return int(pathlib.Path('/proc/self/io').read_text().split()[1])

    overhead = -count() + count()
    before = count()
    action()
    return count() - before - overhead


def test_what_needs_a_checkpoint_refuses_it(one_file, tmp_path):
    for refused in (t5ckpt.verify, lambda path: t5ckpt.copy_checkpoint(path, tmp_path / 'copy')):
        with pytest.raises(UnsupportedFormatError, match='is a safetensors file, not a checkpoint'):
            refused(one_file)
    assert t5ckpt.open_checkpoint(one_file).stats()


@pytest.mark.parametrize('in_place', [True, False])
def test_a_file_that_is_replaced_or_deleted_meanwhile(shards, one_file, tmp_path, in_place):
    """Sizes and names stay: nothing but the file itself tells that values are of two checkpoints."""
    second = shards.parent / 'model-00002-of-00002.safetensors'
    for path, file, name in ((one_file, one_file, 'model.embed.weight'), (shards, second, 'model.norm')):
        view, lazy = t5ckpt.open_checkpoint(path), t5ckpt.load_t5x_checkpoint(path, lazy_parameters=True)
        view[name][:3]
        held = file.read_bytes()
        changed = held[:-4] + b'\0\0\1\0'
        if in_place:
            file.write_bytes(changed)
        else:
            (tmp_path / 'other').write_bytes(changed)
            (tmp_path / 'other').replace(file)
        for read in (lambda v=view, n=name: v[n][:3], lazy[name].get, view.stats):
            with pytest.raises(CheckpointNotFoundError, match=r'was replaced while it was being read\. Open it again'):
                read()
        if path == shards:
            # The other file is the one that was opened.
            assert view['model.embed.weight'][0, 1] == 1
        file.unlink()
        with pytest.raises(CheckpointNotFoundError, match=r'was deleted while it was being read\. Copy it again'):
            view[name][:3]


def test_a_file_that_is_replaced_during_a_restore(one_file):
    data = one_file.read_bytes()

    def rewrite(state, _):
        one_file.write_bytes(data[:-4] + b'\0\0\1\0')
        return state

    with pytest.raises(CheckpointNotFoundError, match='was replaced'):
        restore(one_file, state_transformation_fns=[rename, rewrite])


def test_an_index_names_one_of_several_files_and_none_for_a_tensor(shards):
    index = json.loads(shards.read_text())
    first, second = (f'model-0000{number}-of-00002.safetensors' for number in (1, 2))
    extra = {'model.norm': np.full(5, 9, np.int32)}
    safetensors.save_file({name: TENSORS[name] for name in list(TENSORS)[:2]} | extra, shards.parent / first)
    for file, value in ((first, 9), (second, 0)):
        index['weight_map']['model.norm'] = file
        shards.write_text(json.dumps(index))
        assert t5ckpt.open_checkpoint(shards)['model.norm'][0] == value
    # Not listed, and in two files: none of the model's.
    del index['weight_map']['model.norm']
    shards.write_text(json.dumps(index))
    assert set(t5ckpt.open_checkpoint(shards)) == set(TENSORS) - {'model.norm'}
    # Not listed, and in one file.
    del index['weight_map']['model.scale']
    shards.write_text(json.dumps(index))
    assert t5ckpt.open_checkpoint(shards)['model.scale'][()] == 3
    index['weight_map'] |= {'model.norm': second, 'model.gone': second}
    shards.write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match=f'gone is in {second} by the index, and in no file by'):
        restore(shards)
    shards.write_text(json.dumps({'weight_map': {'model.norm': '\ud800'}}))
    with pytest.raises(CorruptCheckpointError, match='does not decode'):
        restore(shards)


@pytest.mark.parametrize(
    ('names', 'text'),
    [
        (('a\\b', 'a\\\\b'), 'have the same place in a tree'),
        (('a', 'a/b'), r"model\.safetensors: a '/' in a name begins a level.*a/b: its path goes through another leaf"),
    ],
)
def test_names_that_no_tree_has_side_by_side(tmp_path, names, text):
    path = tmp_path / 'model.safetensors'
    safetensors.save_file({name: np.full(number + 1, number) for number, name in enumerate(names)}, path)
    with pytest.raises(UnsupportedFormatError, match=text):
        t5ckpt.open_checkpoint(path)


def raw_file(path, tensors, **metadata):
    """A file of (dtype, shape, bytes) by name; returns its path."""
    entries, data = dict(metadata), b''
    for name, (dtype, shape, values) in tensors.items():
        entries[name] = {'dtype': dtype, 'shape': shape, 'data_offsets': [len(data), len(data) + len(values)]}
        data += values
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, 'little') + header + data)
    return path


def test_a_tensor_whose_dtype_numpy_lacks_is_left_out_and_said(tmp_path, caplog):
    fnuz = np.arange(6).astype(jnp.float8_e4m3fnuz)
    others = {'f4': ('F4', [3, 4], bytes(6)), 'f6': ('F6_E2M3', [4], bytes(3)), 'new': ('F2_NEW', [7], bytes(5))}
    read = {'w': ('F32', [2], np.float32([1, 2]).tobytes()), 'fnuz': ('F8_E4M3FNUZ', [6], fnuz.tobytes())}
    path = raw_file(tmp_path / 'model.safetensors', others | read | {'none': ('F32', [0, 3], b'')})
    for place in (path, tmp_path):
        view = t5ckpt.open_checkpoint(place)
        assert set(view) == {'w', 'fnuz', 'none'}
        assert (view['w'][...].tolist(), view['fnuz'][...].dtype) == ([1, 2], fnuz.dtype)
        assert view['fnuz'][...].tobytes() == fnuz.tobytes()
        assert 'left out: f4 (F4), f6 (F6_E2M3), new (F2_NEW)' in caplog.text
        caplog.clear()
    t5ckpt.convert_checkpoint('safetensors', path, tmp_path / 'run')
    assert t5ckpt.load_t5x_checkpoint(tmp_path / 'run')['w'].tolist() == [1, 2]
    with pytest.raises(MissingLeaves, match='f4'):
        Checkpointer({'f4': np.zeros((3, 4), np.float32)}).restore(path=path, strict='contains')
    with pytest.raises(UnsupportedFormatError, match=r'f4 \(F4\).*no other tensor\. Load the file.*init_fn'):
        t5ckpt.open_checkpoint(raw_file(tmp_path / 'f4.safetensors', {'f4': others['f4']}))


def test_metadata_that_is_null_counts_as_absent(tmp_path):
    path = raw_file(tmp_path / 'a.safetensors', {'w': ('U8', [2], b'ab')}, __metadata__=None)
    assert safetensors.load_file(path)['w'].tolist() == t5ckpt.open_checkpoint(path)['w'][...].tolist() == [97, 98]


def test_one_shard_is_not_taken_for_the_model(shards, tmp_path):
    shard = shards.parent / 'model-00001-of-00002.safetensors'
    for refused in (
        t5ckpt.open_checkpoint,
        restore,
        lambda path: t5ckpt.convert_checkpoint('safetensors', path, tmp_path / 'run'),
    ):
        with pytest.raises(UnsupportedFormatError, match=r'is one of 2 files of a model\. Pass its directory'):
            refused(shard)
    # The cures that the error names.
    shutil.copy(shard, tmp_path / 'first.safetensors')
    assert set(t5ckpt.open_checkpoint(tmp_path / 'first.safetensors')) == set(list(TENSORS)[:2])
    for number, path in enumerate((shards.parent, shards)):
        report = t5ckpt.convert_checkpoint('safetensors', path, tmp_path / 'run', t5ckpt.ConvertOptions(step=number))
        assert len(report.mapped) == len(TENSORS)
        loaded = t5ckpt.load_t5x_checkpoint(tmp_path / 'run', step=number)
        assert all(np.array_equal(loaded[name], TENSORS[name]) for name in TENSORS)


def test_of_a_file_and_an_index_all_readers_take_the_file_as_transformers_does(shards, tmp_path):
    safetensors.save_file({'model.norm': np.arange(3)}, shards.parent / 'model.safetensors')
    assert set(t5ckpt.open_checkpoint(shards.parent)) == {'model.norm'}
    assert set(t5ckpt.convert_checkpoint('safetensors', shards.parent, tmp_path / 'run').mapped) == {'model.norm'}


def test_an_import_of_an_index_reads_nothing_outside_and_no_incomplete_model(shards, tmp_path):
    second = shards.parent / 'model-00002-of-00002.safetensors'
    second.rename(tmp_path / 'blob')
    with pytest.raises(CheckpointNotFoundError, match=r'model-00002-of-00002\.safetensors is missing'):
        t5ckpt.convert_checkpoint('safetensors', shards.parent, tmp_path / 'run')
    index = json.loads(shards.read_text())
    for outside in ('../blob', str(tmp_path / 'blob')):
        index['weight_map']['model.norm'] = outside
        shards.write_text(json.dumps(index))
        with pytest.raises(CorruptCheckpointError, match='not below its directory'):
            t5ckpt.convert_checkpoint('safetensors', shards.parent, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_a_directory_of_pickles_is_named_with_the_way_out(tmp_path):
    (tmp_path / 'pytorch_model-00001-of-00002.bin').write_bytes(b'PK')
    for refused in (
        t5ckpt.open_checkpoint,
        lambda path: t5ckpt.convert_checkpoint('safetensors', path, tmp_path / 'run'),
    ):
        with pytest.raises(CheckpointNotFoundError, match='load it with PyTorch and save safetensors'):
            refused(tmp_path)


def test_a_warm_start_opens_it_as_a_restore_does(shards, tmp_path):
    second = shards.parent / 'model-00002-of-00002.safetensors'
    second.rename(tmp_path / 'blob')
    second.symlink_to(tmp_path / 'blob')
    with Checkpointer(
        template(), checkpoints_dir=tmp_path / 'run', options=t5ckpt.CheckpointerOptions(follow_links=True)
    ) as checkpointer:
        check(restore_or_init(checkpointer, dict, initial_checkpoint=WarmStart(shards, rename=NAMES))['params'])

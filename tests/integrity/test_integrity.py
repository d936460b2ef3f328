"""`verify`: whatever happens to a checkpoint's files is found, and named."""

import json
import random
import resource
import shutil

import jax
import msgpack
import numpy as np
import pytest
from support import forked, partitioner
from support.damage import W, copied, files_of, flip, save, some_file, state_of
from support.golden import nest

import t5ckpt
from t5ckpt import errors


def the_damage(report):
    (damage,) = report.damages
    return damage


@pytest.mark.parametrize('compression', [None, 'zstd', 'gzip', 'blosc'])
@pytest.mark.parametrize('full', [False, True])
def test_a_whole_checkpoint(run_dir, compression, full):
    step_dir = save(run_dir, compression=compression)
    report = t5ckpt.verify(run_dir, full=full)
    assert report.ok
    assert report.has_checksums
    assert report.full == full
    assert (report.step, report.leaves, report.notes) == (1, 4, ())
    assert report.files == len(files_of(step_dir))
    assert report.nbytes == sum(path.stat().st_size for path in files_of(step_dir))
    report.raise_if_damaged()
    assert f'{report.path}: {"complete and intact" if full else "complete"} (' in str(report)


def test_every_kind_of_path(run_dir):
    step_dir = save(run_dir)
    for path, step in [(run_dir, None), (run_dir, 1), (step_dir, None), (step_dir / 'checkpoint', None)]:
        assert t5ckpt.verify(path, step).ok
    for path, step in [(run_dir / 'nothing', None), (run_dir, 2)]:
        with pytest.raises(errors.CheckpointNotFoundError):
            t5ckpt.verify(path, step)


@pytest.mark.parametrize('compression', [None, 'zstd', 'gzip'])
@pytest.mark.parametrize('flips', [50, pytest.param(334, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found(run_dir, compression, flips):
    step_dir = save(run_dir, compression=compression)
    rng = random.Random(flips)
    for _ in range(flips):
        path = some_file(step_dir, rng)
        before = flip(path, rng)
        report = t5ckpt.verify(step_dir, full=True)
        assert path.relative_to(step_dir).as_posix() in {damage.file for damage in report.damages}
        path.write_bytes(before)
    assert t5ckpt.verify(step_dir, full=True).ok


@pytest.mark.parametrize('how', ['missing', 'truncated', 'empty', 'longer', 'zeros', 'hole'])
def test_damage_to_each_file(run_dir, how):
    """In every file of a checkpoint, one after the other; all but zeros without reading what is not small."""
    step_dir = save(run_dir)
    for path in files_of(step_dir):
        before = path.read_bytes()
        match how:
            case 'missing':
                path.unlink()
            case 'truncated':
                path.write_bytes(before[:-1])
            case 'empty':
                path.write_bytes(b'')
            case 'longer':
                path.write_bytes(before + b'\0')
            case 'zeros':
                path.write_bytes(bytes(len(before)))
            case 'hole':
                path.write_bytes(before[: len(before) // 2] + bytes(len(before) - len(before) // 2))
        report = t5ckpt.verify(step_dir, full=how in ('zeros', 'hole'))
        found = [damage for damage in report.damages if damage.file == path.relative_to(step_dir).as_posix()]
        assert found, (path, how)
        with pytest.raises(errors.CorruptCheckpointError, match=path.name):
            report.raise_if_damaged()
        path.write_bytes(before)
    assert t5ckpt.verify(step_dir, full=True).ok


def test_what_is_said_of_a_chunk(run_dir):
    step_dir = save(run_dir)
    chunk = step_dir / 'params.w' / '1.0'
    data = chunk.read_bytes()
    chunk.write_bytes(data[:1000])
    damage = the_damage(t5ckpt.verify(step_dir))
    assert (damage.kind, damage.leaf, damage.file) == ('size', 'params/w', 'params.w/1.0')
    assert damage.chunk == (1, 0)
    assert f'1,000 bytes, expected {len(data):,}' in damage.text
    assert damage.box[0][0] > 0
    assert np.prod([stop - start for start, stop in damage.box]) * 4 == len(data)
    chunk.write_bytes((step_dir / 'params.w' / '2.0').read_bytes())
    assert t5ckpt.verify(step_dir).ok, 'only the checksum can tell'
    damage = the_damage(t5ckpt.verify(step_dir, full=True))
    assert damage.kind == 'checksum'
    assert 'params.w/2.0' in damage.text


def test_swapped_chunks(run_dir):
    step_dir = save(run_dir)
    a, b = step_dir / 'params.w' / '0.0', step_dir / 'params.w' / '1.0'
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    report = t5ckpt.verify(step_dir, full=True)
    assert {damage.file for damage in report.damages} == {'params.w/0.0', 'params.w/1.0'}


def test_files_of_another_step(run_dir):
    """Each file of one checkpoint in the place of another's, and all of them."""
    first, second = save(run_dir, 1, 1), save(run_dir, 2, 2)
    for path in files_of(first):
        target = second / path.relative_to(first)
        before = target.read_bytes()
        if path.read_bytes() == before:
            continue
        shutil.copyfile(path, target)
        report = t5ckpt.verify(second, full=True)
        assert not report.ok, path
        target.write_bytes(before)
    shutil.rmtree(second)
    shutil.copytree(first, second)
    assert the_damage(t5ckpt.verify(second)).kind == 'contradiction'


def test_iterator_state_that_is_gone_on_purpose(run_dir):
    for step in (1, 2, 3):
        save(run_dir, step, keep_dataset_checkpoints=1)
    assert t5ckpt.all_dataset_checkpoint_steps(run_dir) == [3]
    report = t5ckpt.verify(run_dir, 1, full=True)
    assert report.ok
    assert 'on purpose' in report.notes[0]
    (run_dir / 'checkpoint_3' / 'train_ds-000-of-001.txt').unlink()
    assert the_damage(t5ckpt.verify(run_dir, 3)).kind == 'missing'


def test_unknown_files_are_a_note(run_dir):
    step_dir = save(run_dir)
    (step_dir / 'params.w' / 'old').write_text('')
    t5ckpt.pin_checkpoint(step_dir)
    report = t5ckpt.verify(step_dir, full=True)
    assert report.ok
    assert 'params.w/old' in report.notes[0]


def test_a_checkpoint_of_several_shards(run_dir):
    """Chunks as devices wrote them."""
    mesh = partitioner.mesh()
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data', 'model'))
    state = nest({'target/w': jax.device_put(W, sharding)})
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=str(run_dir), options=t5ckpt.CheckpointerOptions(inline_bytes=0)
    ) as ck:
        ck.save(state, step=5)
    assert t5ckpt.verify(run_dir, full=True).ok
    chunk = max((run_dir / 'checkpoint_5' / 'target.w').iterdir())
    chunk.unlink()
    damage = the_damage(t5ckpt.verify(run_dir))
    assert damage.leaf == 'target/w'
    assert damage.file.endswith(chunk.name)


def test_a_checkpoint_that_is_deleted_meanwhile(run_dir):
    step_dir = save(run_dir)

    def delete(done, total):
        del done, total
        shutil.rmtree(step_dir, ignore_errors=True)

    chunk = step_dir / 'params.w' / '0.0'
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    with pytest.raises(errors.CheckpointNotFoundError, match='deleted'):
        t5ckpt.verify(step_dir, full=True, progress=delete)


def test_progress(run_dir):
    save(run_dir)
    seen = []
    report = t5ckpt.verify(run_dir, full=True, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] <= report.nbytes


def test_in_memory():
    state = state_of()
    with t5ckpt.Checkpointer(
        state, checkpoints_dir='memory://verify/run', options=t5ckpt.CheckpointerOptions(inline_bytes=1024)
    ) as ck:
        ck.save(state, step=3)
    report = t5ckpt.verify('memory://verify/run', full=True)
    assert report.ok
    assert report.leaves == 4


# ---- checkpoints of others ----

CASES = ['case01_adafactor', 'case06_numpy_gzip_chunks', 'case11_dtypes_numpy', 'case14_codecs_written_by_others/blosc']


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES)
def test_what_t5x_wrote(golden, tmp_path, case):
    step_dir = copied(golden, tmp_path, case)
    for full in (False, True):
        report = t5ckpt.verify(step_dir, full=full)
        assert report.ok
        assert not report.has_checksums
        assert report.leaves > 10
    chunks = [path for path in files_of(step_dir) if path.parent != step_dir and path.name != '.zarray']
    for chunk in random.Random(0).sample(chunks, 5):
        data = chunk.read_bytes()
        chunk.unlink()
        damage = the_damage(t5ckpt.verify(step_dir))
        assert damage.kind == 'missing'
        assert damage.file == chunk.relative_to(step_dir).as_posix()
        assert damage.leaf
        chunk.write_bytes(data[: len(data) // 2])
        damage = the_damage(t5ckpt.verify(step_dir, full=True))
        assert damage.file == chunk.relative_to(step_dir).as_posix()
        assert damage.chunk is not None
        chunk.write_bytes(data)


def test_a_zarray_of_t5x_that_is_gone_or_broken(golden, tmp_path):
    step_dir = copied(golden, tmp_path, 'case01_adafactor')
    zarray = next(path for path in files_of(step_dir) if path.name == '.zarray')
    text = zarray.read_text()
    zarray.unlink()
    # We read the array all the same, T5X does not.
    damage = the_damage(t5ckpt.verify(step_dir, full=True))
    assert (damage.kind, damage.file) == ('missing', zarray.relative_to(step_dir).as_posix())
    zarray.write_text(text[:40])
    assert the_damage(t5ckpt.verify(step_dir)).kind == 'undecodable'


def test_a_broken_manifest_of_t5x(golden, tmp_path):
    step_dir = copied(golden, tmp_path, 'case01_adafactor')
    manifest = step_dir / 'checkpoint'
    manifest.write_bytes(manifest.read_bytes()[:-10])
    assert the_damage(t5ckpt.verify(step_dir)).kind == 'undecodable'


@pytest.mark.parametrize('ocdbt', [True, False])
@pytest.mark.parametrize('zarr3', [True, False])
def test_what_orbax_wrote(tmp_path, ocdbt, zarr3):
    import orbax.checkpoint as ocp

    tree = {'a': {'w': np.arange(6000.0).reshape(60, 100)}, 'b': np.int32(3)}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / 'c', tree)
    for full in (False, True):
        report = t5ckpt.verify(tmp_path / 'c', full=full)
        assert report.ok
        assert report.leaves == 2
    largest = max(files_of(tmp_path / 'c'), key=lambda path: path.stat().st_size)
    data = largest.read_bytes()
    largest.write_bytes(data[: len(data) // 2])
    report = t5ckpt.verify(tmp_path / 'c', full=True)
    assert [damage.leaf for damage in report.damages] == ['a/w'] or (ocdbt and not report.ok)
    largest.unlink()
    assert not t5ckpt.verify(tmp_path / 'c', full=ocdbt).ok


def test_an_array_whose_metadata_has_a_huge_shape(golden, tmp_path):
    """The search for chunks ends with the files that are there."""
    step_dir = copied(golden, tmp_path, 'case01_adafactor')
    leaf = next(path.parent for path in files_of(step_dir) if path.name == '.zarray')
    spec = {'driver': 'zarr', 'dtype': 'float32', 'kvstore': {'driver': 'file', 'path': f'{leaf.name}/'}}
    spec['metadata'] = {'shape': [2**40, 2**20], 'chunks': [1, 1], 'compressor': None}
    zarray = json.loads((leaf / '.zarray').read_text()) | spec['metadata'] | {'dtype': '<f4'}
    (leaf / '.zarray').write_text(json.dumps(zarray))
    (step_dir / 'checkpoint').write_bytes(msgpack.packb({'version': 3, 'optimizer': {'w': spec}}))
    report = t5ckpt.verify(step_dir, full=True)
    damage = the_damage(report)
    assert (damage.kind, damage.leaf) == ('undecodable', 'w')
    assert 'describes 1,152,921,504,606,846,976 chunks' in damage.text


def test_the_verb(run_dir):
    """As a shell calls it: words, exit codes, JSON."""
    step_dir = save(run_dir)
    words = 'verify', run_dir, '--full'
    done = forked.run(None, *words)
    assert (done.returncode, done.stderr) == (0, '')
    assert 'complete and intact (every byte read' in done.stdout
    flip(step_dir / 'params.w' / '0.0', random.Random(0))
    done = forked.run(None, *words, '--json')
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report['ok']
    assert [(damage['leaf'], damage['file']) for damage in report['damages']] == [('params/w', 'params.w/0.0')]
    done = forked.run(None, 'verify', run_dir / 'none')
    assert done.returncode == 3


def test_names_do_not_reach_the_terminal_as_they_are():
    assert '\x1b' not in str(t5ckpt.integrity.report.Damage('missing', 'a\x1b]0;title\x07', 'text'))


def test_the_database_of_orbax_is_counted_and_a_large_chunk_is_not_damage(tmp_path):
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / 'c', {'w': np.zeros((300, 2**20), np.uint8), 'b': np.arange(3)})
    files = [path for path in files_of(tmp_path / 'c') if path.name == 'manifest.ocdbt' or path.parent.name == 'd']
    for full in (False, True):
        report = t5ckpt.verify(tmp_path / 'c', full=full)
        assert report.ok, report
        assert (report.files, report.nbytes) == (len(files), sum(path.stat().st_size for path in files))


def test_items_of_orbax_that_are_not_verified_are_named(tmp_path):
    import orbax.checkpoint as ocp

    tree = {'w': np.arange(6.0)}
    with ocp.CheckpointManager(tmp_path / 'run') as manager:
        items = {'state': ocp.args.StandardSave(tree), 'ema': ocp.args.StandardSave(tree)}
        manager.save(1, args=ocp.args.Composite(**items, config=ocp.args.JsonSave({'a': 1})), metrics={'loss': 1.0})
    report = t5ckpt.verify(tmp_path / 'run', full=True)
    assert [note for note in report.notes if 'config, ema' in note]
    assert t5ckpt.verify(tmp_path / 'run/1/ema', full=True).notes == ()


def test_a_process_that_cannot_open_files_finds_no_damage(tmp_path):
    """The state of the files is unknown then."""
    state = {f'w{index}': np.arange(90_000.0) + index for index in range(200)} | {'step': 1}
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path).save(state)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def exhaust(*_):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))

    try:
        with pytest.raises(errors.StorageError, match='ulimit -n'):
            t5ckpt.verify(tmp_path, full=True, progress=exhaust)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert t5ckpt.verify(tmp_path, full=True).ok

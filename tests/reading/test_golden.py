"""Checkpoints that real T5X wrote read back to the bit, by every way in."""

import asyncio
import concurrent.futures
import functools
import pathlib
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support import golden as cases, partitioner, states
from support.bits import assert_same
from support.golden import CASES, Expected, by_name, flatten

import t5ckpt
from t5ckpt import errors

T5X_CASES = [case for case in CASES if not case.orbax]
each_case = pytest.mark.parametrize('case', CASES, ids=lambda case: case.name)
ADAFACTOR = by_name('case01')


def assert_tree(tree, expected: Expected, got=lambda leaf: leaf) -> None:
    """A nested state dict holds exactly what is expected, None and {} included."""
    flat = flatten(tree)
    assert set(flat) == {*expected.arrays, *expected.none_keys, *expected.empty_keys}
    for key in expected.none_keys:
        assert flat[key] is None, key
    for key in expected.empty_keys:
        assert flat[key] == {}, key
    for key, array in expected.arrays.items():
        assert_same(got(flat[key]), array, key)


def template(expected: Expected, make) -> partitioner.T5XState:
    """A train state of the expected structure with make(key, array) for every array."""
    arrays = {key: make(key, array) for key, array in expected.arrays.items()}
    return partitioner.T5XState(Expected(arrays, expected.none_keys, expected.empty_keys).tree())


def spec_like(_, array) -> jax.ShapeDtypeStruct:
    """What T5X hands over: shape and dtype, no sharding."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


# ---- load_t5x_checkpoint ----


@each_case
@pytest.mark.parametrize('remap', [True, False])
def test_load(golden, case, remap):
    tree = t5ckpt.load_t5x_checkpoint(str(case.run_dir(golden)), step=case.step, remap=remap)
    assert_tree(tree, case.expected(golden))


@each_case
def test_load_lazy(golden, case):
    expected = case.expected(golden)
    tree = t5ckpt.load_t5x_checkpoint(str(case.step_dir(golden)), lazy_parameters=True)
    for key, leaf in flatten(tree).items():
        if key in expected.arrays:
            assert isinstance(leaf, t5ckpt.LazyArray), key
            assert tuple(leaf.shape) == expected.arrays[key].shape, key
            assert np.dtype(leaf.dtype) == expected.arrays[key].dtype, key
    assert_tree(tree, expected, lambda leaf: leaf.get())


@pytest.mark.parametrize('case', T5X_CASES, ids=lambda case: case.name)
def test_load_from_every_kind_of_path(golden, case):
    """The run directory, the step directory, the bare file; as text or as a Path."""
    expected = case.expected(golden)
    for path in (case.run_dir(golden), case.step_dir(golden), case.step_dir(golden) / 'checkpoint'):
        assert_tree(t5ckpt.load_t5x_checkpoint(str(path)), expected)
    assert_tree(t5ckpt.load_t5x_checkpoint(case.step_dir(golden)), expected)


def test_load_takes_the_named_step(golden):
    case = by_name('case07')
    for step in (3, 4, 5, 6):
        tree = t5ckpt.load_t5x_checkpoint(str(case.run_dir(golden)), step=step)
        assert_same(tree['state']['step'], np.asarray(step, np.int32))
    assert t5ckpt.all_steps(str(case.run_dir(golden))) == [3, 4, 5, 6]
    assert t5ckpt.latest_step(str(case.run_dir(golden))) == 6
    assert t5ckpt.all_dataset_checkpoint_steps(str(case.run_dir(golden))) == [5, 6]


def test_load_restore_dtype_touches_only_floats_of_target(golden):
    case = by_name('case02')
    expected = case.expected(golden)
    flat = flatten(t5ckpt.load_t5x_checkpoint(str(case.step_dir(golden)), restore_dtype=np.float32))
    for key, array in expected.arrays.items():
        assert_same(flat[key], array.astype(np.float32) if key.startswith('target/') else array, key)


def test_lazy_leaves_are_cast_when_taken(golden):
    expected = ADAFACTOR.expected(golden)
    flat = flatten(
        t5ckpt.load_t5x_checkpoint(str(ADAFACTOR.step_dir(golden)), restore_dtype=np.float16, lazy_parameters=True)
    )
    for key, array in expected.arrays.items():
        want = array.astype(np.float16) if key.startswith('target/') else array
        assert np.dtype(flat[key].dtype) == want.dtype, key
        assert_same(flat[key].get(), want, key)


def test_load_with_transforms(golden):
    """Each sees what the one before it returned; the target state dict is empty, as in T5X."""
    seen = []

    def rename(state_dict, target_state_dict):
        assert not target_state_dict
        seen.append(sorted(state_dict))
        return {'renamed': state_dict['target'], 'state': state_dict['state']}

    def drop(state_dict, target_state_dict):
        seen.append(sorted(state_dict))
        return {'renamed': {'decoder': state_dict['renamed']['decoder']}}

    path = str(ADAFACTOR.step_dir(golden))
    flat = flatten(t5ckpt.load_t5x_checkpoint(path, state_transformation_fns=[rename, drop]))
    assert seen == [['state', 'target'], ['renamed', 'state']]
    assert list(flat) == ['renamed/decoder/logits_dense/kernel']
    want = ADAFACTOR.expected(golden).arrays['target/decoder/logits_dense/kernel']
    assert_same(flat['renamed/decoder/logits_dense/kernel'], want)


def test_load_inside_a_running_event_loop(golden):
    async def load():
        return t5ckpt.load_t5x_checkpoint(str(ADAFACTOR.step_dir(golden)))

    assert_tree(asyncio.run(load()), ADAFACTOR.expected(golden))


# ---- open_checkpoint ----


@each_case
def test_open(golden, case):
    expected = case.expected(golden)
    view = t5ckpt.open_checkpoint(str(case.run_dir(golden)), step=case.step)
    assert set(expected.arrays) <= set(view)
    for key, array in expected.arrays.items():
        assert tuple(view[key].shape) == array.shape, key
        assert np.dtype(view[key].dtype) == array.dtype, key
        assert_same(view[key].get(), array, key)
        assert_same(np.asarray(view[key]), array, key)


@each_case
def test_slices(golden, case):
    """NumPy's basic indexing, on stored and on inline leaves."""
    view = t5ckpt.open_checkpoint(case.step_dir(golden))
    for key, array in case.expected(golden).arrays.items():
        for index in ((Ellipsis,), (slice(1, None),), (slice(None), slice(0, 3)), (-1,), (slice(None, None, 2),)):
            if sum(i is not Ellipsis for i in index) > array.ndim or (index == (-1,) and array.shape[0] == 0):
                continue
            assert_same(np.asarray(view[key][index]), array[index], f'{key}{index}')


def test_a_slice_reads_only_its_chunks(golden, tmp_path):
    """Every chunk but those of the first column of chunks is gone, and the first columns can still be read."""
    key = 'target/encoder/layers_0/mlp/wi_0/kernel'
    array = ADAFACTOR.expected(golden).arrays[key]
    step_dir = shutil.copytree(ADAFACTOR.step_dir(golden), tmp_path / 'checkpoint_42')
    for column in (1, 2, 3):
        (step_dir / key.replace('/', '.') / f'0.{column}').unlink()
    view = t5ckpt.open_checkpoint(step_dir)
    assert_same(np.asarray(view[key][:, :32]), array[:, :32])
    assert_same(np.asarray(view[key][3:5, 7]), array[3:5, 7])
    with pytest.raises(errors.CorruptCheckpointError, match=key):
        np.asarray(view[key][:, :33])


def test_the_view_names_what_is_near(golden):
    view = t5ckpt.open_checkpoint(ADAFACTOR.step_dir(golden))
    with pytest.raises(KeyError, match='target/encoder/encoder_norm/scale'):
        view['target/encoder/encoder_norm/scales']
    assert len(view) == len(list(view))


def test_views_in_an_event_loop_and_in_threads(golden):
    expected = ADAFACTOR.expected(golden)

    async def read():
        view = t5ckpt.open_checkpoint(ADAFACTOR.step_dir(golden))
        return {key: np.asarray(view[key]) for key in expected.arrays}

    view = t5ckpt.open_checkpoint(ADAFACTOR.step_dir(golden))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        threaded = dict(zip(expected.arrays, pool.map(lambda key: view[key].get(), expected.arrays), strict=True))
    for got in (asyncio.run(read()), threaded):
        for key, array in expected.arrays.items():
            assert_same(got[key], array, key)


# ---- Checkpointer.restore ----


@each_case
def test_restore_with_a_partitioner(golden, case):
    """As T5X does it: the train state is shapes, the mesh axes say where each array goes."""
    expected = case.expected(golden)
    for rules in (partitioner.t5x_rules, partitioner.other_rules):
        on_devices = not case.wide
        parts = partitioner.Partitioner(partitioner.mesh(), rules, params_on_devices=on_devices)
        with t5ckpt.Checkpointer(template(expected, spec_like), parts, str(case.run_dir(golden))) as ck:
            restored = ck.restore(step=case.step)
        assert isinstance(restored, partitioner.T5XState)
        assert_tree(restored.state_dict(), expected)
        for key, leaf in flatten(restored.state_dict()).items():
            axes = rules(key, expected.arrays[key].shape) if key in expected.arrays else None
            if on_devices and axes is not None:
                assert leaf.sharding.is_equivalent_to(NamedSharding(parts.mesh, axes), leaf.ndim), key


@each_case
def test_restore_by_the_leaves_shardings(golden, case):
    """Without a partitioner: onto the sharding that each leaf of the train state has; NumPy stays NumPy."""
    expected = case.expected(golden)
    mesh = partitioner.mesh()

    def make(key, array):
        blank = np.zeros(array.shape, array.dtype)
        too_wide = array.dtype.itemsize // (2 if array.dtype.kind == 'c' else 1) > 4
        return (
            blank if too_wide or key == 'state/step' else partitioner.shard(blank, mesh, partitioner.other_rules, key)
        )

    wanted = template(expected, make)
    with t5ckpt.Checkpointer(wanted, checkpoints_dir=str(case.run_dir(golden))) as ck:
        restored = ck.restore(step=case.step)
    assert_tree(restored.state_dict(), expected)
    for key, leaf in flatten(wanted.state_dict()).items():
        got = flatten(restored.state_dict())[key]
        assert isinstance(got, jax.Array) == isinstance(leaf, jax.Array), key
        if isinstance(leaf, jax.Array):
            assert got.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), key


@each_case
def test_restore_to_numpy(golden, case):
    expected = case.expected(golden)
    wanted = template(expected, lambda _, array: np.zeros(array.shape, array.dtype))
    with t5ckpt.Checkpointer(wanted, checkpoints_dir=str(case.run_dir(golden))) as ck:
        restored = ck.restore(step=case.step).state_dict()
    assert_tree(restored, expected)
    assert not any(isinstance(leaf, jax.Array) for leaf in flatten(restored).values())


@each_case
def test_restore_lazily(golden, case):
    expected = case.expected(golden)
    parts = partitioner.Partitioner(partitioner.mesh(), partitioner.t5x_rules, params_on_devices=False)
    with t5ckpt.Checkpointer(template(expected, spec_like), parts, str(case.run_dir(golden))) as ck:
        restored = ck.restore(step=case.step, lazy_parameters=True).state_dict()
    for key, leaf in flatten(restored).items():
        assert (key in expected.arrays) == isinstance(leaf, t5ckpt.LazyArray), key
    assert_tree(restored, expected, lambda leaf: leaf.get())


@pytest.mark.parametrize('case', T5X_CASES, ids=lambda case: case.name)
def test_restore_from_every_kind_of_path(golden, case, run_dir):
    """`path=` is somewhere else than the directory the checkpointer saves to."""
    expected = case.expected(golden)
    wanted = template(expected, lambda _, array: np.zeros(array.shape, array.dtype))
    with t5ckpt.Checkpointer(wanted, checkpoints_dir=str(run_dir)) as ck:
        for path in (case.run_dir(golden), case.step_dir(golden), case.step_dir(golden) / 'checkpoint'):
            assert_tree(ck.restore(path=str(path)).state_dict(), expected)


def test_restore_takes_the_latest(golden):
    case = by_name('case07')
    wanted = template(case.expected(golden), spec_like)
    parts = partitioner.Partitioner(partitioner.mesh(), partitioner.t5x_rules)
    with t5ckpt.Checkpointer(wanted, parts, str(case.run_dir(golden))) as ck:
        assert int(ck.restore().step) == 6
        assert int(ck.restore(step=3).step) == 3
        assert list(ck.all_steps()) == [3, 4, 5, 6]
        assert ck.latest_step() == 6
        with pytest.raises(ValueError, match=r'step.*path|path.*step'):
            ck.restore(step=3, path=str(case.step_dir(golden)))
        with pytest.raises(errors.CheckpointNotFoundError, match='7'):
            ck.restore(step=7)


def test_lazy_parameters_need_a_partitioner_off_the_devices(golden):
    wanted = template(ADAFACTOR.expected(golden), spec_like)
    parts = partitioner.Partitioner(partitioner.mesh(), partitioner.t5x_rules, params_on_devices=True)
    ck = t5ckpt.Checkpointer(wanted, parts, str(ADAFACTOR.run_dir(golden)))
    with ck, pytest.raises(ValueError, match='params_on_devices'):
        ck.restore(lazy_parameters=True)


@pytest.mark.parametrize('name', ['case01', 'case05b'])
def test_restore_dtype_casts_only_floats_of_target(golden, name):
    case = by_name(name)
    expected = case.expected(golden)
    parts = partitioner.Partitioner(partitioner.mesh(), partitioner.t5x_rules, params_on_devices=False)
    bf16 = states.np_dtype('bfloat16')
    with t5ckpt.Checkpointer(template(expected, spec_like), parts, str(case.run_dir(golden)), restore_dtype=bf16) as ck:
        flat = flatten(ck.restore().state_dict())
    for key, array in expected.arrays.items():
        assert_same(flat[key], array.astype(bf16) if key.startswith('target/') else array, key)


def test_restore_through_an_assignment_map(golden):
    """case08a was saved with layers_0 renamed to block_0 and without the embedder's optimizer state."""
    case = by_name('case08a')
    stored = case.expected(golden).arrays
    dropped = 'state/param_states/token_embedder/embedding'
    want = {key.replace('/block_0/', '/layers_0/'): array for key, array in stored.items()}
    fresh = {
        f'{dropped}/{name}': np.full(n, 7, np.float32) for name, n in (('v_row', 3), ('v_col', 2), ('v', 1), ('m', 1))
    }
    assert not any(key.startswith(dropped) for key in want)
    model = template(Expected(want | fresh), spec_like)
    assign = functools.partial(t5ckpt.apply_assignment_map, assignment_map=[(r'(.*)/layers_0/(.*)', r'\1/block_0/\2')])
    parts = partitioner.Partitioner(partitioner.mesh(), partitioner.t5x_rules)
    with t5ckpt.Checkpointer(model, parts, str(case.run_dir(golden))) as ck:
        with pytest.raises(errors.TreeMismatchError, match=dropped):
            ck.restore(state_transformation_fns=[assign])
        restored = ck.restore(state_transformation_fns=[assign], fallback_state=cases.nest(fresh))
    assert_tree(restored.state_dict(), Expected(want | fresh))


def test_fallback_fills_only_what_the_checkpoint_lacks(golden):
    expected = ADAFACTOR.expected(golden)
    model = Expected(expected.arrays | {'target/new/kernel': np.arange(6, dtype=np.float32)})
    fallback = template(model, lambda _, array: array + array.dtype.type(1)).state_dict()
    wanted = template(model, lambda _, array: np.zeros(array.shape, array.dtype))
    with t5ckpt.Checkpointer(wanted, checkpoints_dir=str(ADAFACTOR.run_dir(golden))) as ck:
        restored = ck.restore(fallback_state=fallback)
    added = {'target/new/kernel': np.arange(1, 7, dtype=np.float32)}
    assert_tree(restored.state_dict(), Expected(expected.arrays | added))


def test_restore_transforms_see_the_models_state_dict(golden):
    """A renamed leaf, found through the target; the functions run in order."""
    expected = ADAFACTOR.expected(golden)
    key, new = 'target/decoder/logits_dense/kernel', 'target/decoder/head/kernel'
    arrays = {new if k == key else k: v for k, v in expected.arrays.items()}
    order = []

    def rename(state_dict, target_state_dict):
        order.append('rename')
        (name,) = set(target_state_dict['target']['decoder']) - set(state_dict['target']['decoder'])
        state_dict['target']['decoder'] = {name: state_dict['target']['decoder']['logits_dense']}
        return state_dict

    def look(state_dict, target_state_dict):
        order.append('look')
        assert sorted(state_dict['target']['decoder']) == ['head']
        return state_dict

    parts = partitioner.Partitioner(partitioner.mesh(), partitioner.t5x_rules)
    with t5ckpt.Checkpointer(template(Expected(arrays), spec_like), parts, str(ADAFACTOR.run_dir(golden))) as ck:
        restored = ck.restore(state_transformation_fns=[rename, look])
    assert order == ['rename', 'look']
    assert_tree(restored.state_dict(), Expected(arrays))


def test_step_zero_is_a_step(golden, tmp_path):
    """T5X takes step 0 for no step at all."""
    run = tmp_path / 'run'
    shutil.copytree(ADAFACTOR.step_dir(golden), run / 'checkpoint_0')
    expected = ADAFACTOR.expected(golden)
    assert t5ckpt.latest_step(str(run)) == 0
    assert_tree(t5ckpt.load_t5x_checkpoint(str(run)), expected)
    assert_tree(t5ckpt.load_t5x_checkpoint(str(run), step=0), expected)
    wanted = template(expected, lambda _, array: np.zeros(array.shape, array.dtype))
    with t5ckpt.Checkpointer(wanted, checkpoints_dir=str(run)) as ck:
        assert_tree(ck.restore().state_dict(), expected)


@pytest.mark.parametrize('name', ['case01', 'case06', 'case14_codecs_written_by_others/none'])
def test_a_missing_zarray_is_made_up_from_the_manifest(golden, tmp_path, name):
    case = next(case for case in CASES if case.name.startswith(name))
    step_dir = shutil.copytree(case.step_dir(golden), tmp_path / f'checkpoint_{case.step}')
    gone = list(step_dir.glob('*/.zarray'))
    assert gone
    for path in gone:
        path.unlink()
    assert_tree(t5ckpt.load_t5x_checkpoint(step_dir), case.expected(golden))


def test_a_spec_without_a_dtype_is_refused(golden, tmp_path):
    """T5X writes it into every spec, or into the metadata in it."""
    step_dir = shutil.copytree(ADAFACTOR.step_dir(golden), tmp_path / f'checkpoint_{ADAFACTOR.step}')
    _without_dtypes(step_dir)
    with pytest.raises(t5ckpt.errors.UnsupportedFormatError, match=r'/scale/v: its spec has the dtype None'):
        t5ckpt.load_t5x_checkpoint(step_dir)


def _without_dtypes(step_dir) -> None:
    """Takes the dtype out of every spec of a manifest."""
    from flax import serialization
    from support import independent_reader

    contents = independent_reader.manifest(step_dir)
    leaves = independent_reader.flat_leaves(contents['optimizer'])
    specs = {key: leaf for key, leaf in leaves.items() if independent_reader.is_spec(leaf)}
    assert specs
    for spec in specs.values():
        del spec['dtype']
        spec['metadata'].pop('dtype', None)
    (step_dir / 'checkpoint').write_bytes(serialization.msgpack_serialize(contents))


def test_find_checkpoint(golden):
    manifest = str(ADAFACTOR.step_dir(golden) / 'checkpoint')
    for path in (ADAFACTOR.run_dir(golden), ADAFACTOR.step_dir(golden), manifest):
        assert str(t5ckpt.find_checkpoint(str(path))) == manifest
    assert str(t5ckpt.find_checkpoint(str(ADAFACTOR.run_dir(golden)), 42)) == manifest
    with pytest.raises(ValueError, match='41'):
        t5ckpt.find_checkpoint(str(ADAFACTOR.run_dir(golden)), 41)


def test_nothing_is_written_by_reading(golden):
    """Not even with keep=1, nor a time stamp."""
    case = ADAFACTOR
    before = _listing(case.run_dir(golden))
    t5ckpt.load_t5x_checkpoint(str(case.run_dir(golden)))
    wanted = template(case.expected(golden), spec_like)
    parts = partitioner.Partitioner(partitioner.mesh(), partitioner.t5x_rules)
    with t5ckpt.Checkpointer(wanted, parts, str(case.run_dir(golden)), keep=1) as ck:
        ck.restore()
    assert _listing(case.run_dir(golden)) == before


def _listing(root: pathlib.Path) -> dict[str, int]:
    return {str(p.relative_to(root)): p.stat().st_mtime_ns for p in root.rglob('*')}

"""Four real processes save and restore together."""

import json
import pathlib

import numpy as np
import pytest
import scenarios
from support import independent_reader, t5x_rules
from support.bits import assert_same

import t5ckpt

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def files_of(step_dir: pathlib.Path) -> list[dict]:
    """What each process wrote, by its own account: file -> [bytes, digest]."""
    found = sorted(step_dir.glob('integrity.*.json'), key=lambda path: int(path.name.split('.')[1]))
    return [json.loads(path.read_text())['files'] for path in found]


@pytest.fixture(scope='module')
def saved(four, tmp_path_factory):
    """A directory with one step that the four processes saved, and their answers."""
    directory = tmp_path_factory.mktemp('run')
    return directory, four.run('save', directory)


def test_t5x_and_others_read_it(saved):
    directory, _ = saved
    t5x_rules.check(directory / 'checkpoint_1')
    t5x_rules.check_run_dir(directory)
    found = independent_reader.read(directory / 'checkpoint_1')
    values = scenarios.expected()
    assert set(found) == set(values)
    for name in values:
        assert_same(found[name], values[name], name)


def test_two_barriers_after_that_of_the_options_and_one_answer(saved):
    _, answers = saved
    assert [barriers for barriers, _ in answers] == [1 + 2] * 4
    assert all(done == answers[0][1] for _, done in answers)


def test_every_file_has_one_writer(saved):
    directory, _ = saved
    step_dir = directory / 'checkpoint_1'
    accounts = files_of(step_dir)
    names = [name for account in accounts for name in account]
    assert len(names) == len(set(names))
    on_disk = {
        str(path.relative_to(step_dir)) for path in step_dir.rglob('*') if path.is_file() and path.parent != step_dir
    }
    assert on_disk == set(names)
    for account in accounts:
        for name, (size, _) in account.items():
            assert (step_dir / name).stat().st_size == size


@pytest.mark.parametrize('leaf', ['everywhere', 'odd', 'both', 'rows', 'bfloat'])
def test_each_process_writes_its_share(saved, leaf):
    """A quarter of the bytes, also of an array that is replicated, and of one that no axis of which four divides."""
    directory, _ = saved
    accounts = files_of(directory / 'checkpoint_1')
    own = [sum(size for name, (size, _) in account.items() if f'target.{leaf}/' in name) for account in accounts]
    if leaf == 'bfloat':
        # 128 KB: cutting it up would cost more than it saves.
        assert max(own) <= 2**20
    else:
        assert max(own) < 1.2 * sum(own) / 4


def test_the_bytes_of_all_leaves_are_balanced(saved):
    directory, _ = saved
    own = [sum(size for size, _ in account.values()) for account in files_of(directory / 'checkpoint_1')]
    assert max(own) < 1.15 * sum(own) / 4


@pytest.mark.parametrize('shape', [(2, 4), (8, 1), (1, 8)])
@pytest.mark.parametrize('swap', [False, True])
def test_restore_to_any_mesh(four, saved, shape, swap):
    directory, _ = saved
    answers = four.run('restore', directory, shape, swap)
    assert [barriers for _, barriers in answers] == [1 + 1] * 4


def test_each_process_reads_what_it_needs(four, saved):
    """The manifest is read by process 0 alone, and a quarter of an array that is sharded over all devices by each."""
    directory, _ = saved
    read = [size for size, _ in four.run('restore', directory)]
    sizes = {name: values.nbytes for name, values in scenarios.expected().items()}
    needed = sizes['target/both'] / 4 + sizes['target/rows'] / 2 + sizes['target/bfloat'] / 2
    needed += sizes['target/everywhere'] + sizes['target/odd']
    assert all(size < 1.1 * needed + 100_000 for size in read)


def test_replicated_arrays_read_once_in_the_job(four, saved):
    """Each process reads a quarter of those that the number of devices divides; the network does the rest."""
    directory, _ = saved
    alone = [size for size, _ in four.run('restore', directory)]
    shared = [size for size, _ in four.run('restore', directory, (2, 4), False, {'share_replicated': True})]
    everywhere = scenarios.expected()['target/everywhere'].nbytes
    for before, after in zip(alone, shared, strict=True):
        assert abs(before - after - 0.75 * everywhere) < 0.1 * everywhere


def test_restore_in_another_number_of_processes(two, saved):
    directory, _ = saved
    two.run('restore', directory)
    two.run('restore', directory, (4, 2), True)


def test_restore_in_one_process(saved):
    directory, _ = saved
    tree = t5ckpt.load_t5x_checkpoint(str(directory), remap=False)
    flat = {f'{group}/{leaf}': value for group, leaves in tree.items() for leaf, value in leaves.items()}
    for name, values in scenarios.expected().items():
        assert_same(np.asarray(flat[name]), values, name)


@pytest.mark.parametrize('compression', ['zstd', 'auto'])
def test_with_a_codec(four, tmp_path, compression):
    four.run('save', tmp_path, 1, 0, {'compression': compression})
    t5x_rules.check(tmp_path / 'checkpoint_1')
    four.run('restore', tmp_path, (2, 4), True)


def test_in_the_background_of_steps_with_collectives(four, tmp_path):
    assert four.run('train', tmp_path, 6, timeout=180) == [list(range(6))] * 4
    for step in range(6):
        found = independent_reader.read(tmp_path / f'checkpoint_{step}')
        assert (found['w'] == step).all()
        assert (found['r'] == step).all()


def test_host_leaves_are_process_0s(four, tmp_path):
    four.run('save_numpy', tmp_path)
    found = independent_reader.read(tmp_path / 'checkpoint_1')
    assert (found['big'] == 0).all()
    assert found['number'] == 0
    assert found['scalar'] == np.float32(0.5)


def test_arrays_that_some_hold_nothing_of(four, tmp_path):
    four.run('save_odd', tmp_path)
    for step in (0, 1):
        t5x_rules.check(tmp_path / f'checkpoint_{step}')


def test_the_order_of_the_leaves_may_differ(four, tmp_path):
    four.run('save_in_any_order', tmp_path)
    found = independent_reader.read(tmp_path / 'checkpoint_1')
    for name, values in scenarios.expected().items():
        if name.startswith('target/'):
            assert_same(found[name], values, name)


def test_facts_of_the_tree(four, tmp_path):
    four.run('save_transformed', tmp_path)


def test_unchanged_arrays_are_linked_by_each_writer(four, tmp_path):
    for step in (1, 2, 3):
        four.run('save_frozen', tmp_path, step, step)
    # Chunks are copied and compared; each .zarray is written.
    for pattern in ('frozen/[0-9]*', 'replicated/[0-9]*'):
        paths = list((tmp_path / 'checkpoint_1').glob(pattern))
        assert paths
        assert [path.stat().st_nlink for path in paths] == [3] * len(paths)
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / 'checkpoint_3' / 'new').glob('0.*'))
    for step in (1, 2, 3):
        t5x_rules.check(tmp_path / f'checkpoint_{step}')
        assert len(files_of(tmp_path / f'checkpoint_{step}')) == 4


def test_process_0_keeps_what_the_policy_says(four, tmp_path):
    assert four.run('many_saves', tmp_path, 2) == [[2, 3]] * 4


def test_a_step_that_is_there_is_skipped_by_all(four, tmp_path):
    four.run('save', tmp_path, 1, 0)
    assert four.run('save', tmp_path, 1, 5) == [[1 + 1, None]] * 4
    four.run('restore', tmp_path)


@pytest.mark.parametrize('shards', [4, 2, 1])
def test_each_data_shard_has_its_iterator(four, tmp_path, shards):
    four.run('save_iterators', tmp_path, shards)
    names = sorted(path.name for path in (tmp_path / 'checkpoint_1').glob('train_ds-*'))
    assert names == [f'train_ds-{shard:03}-of-{shards:03}' for shard in range(shards)]
    first = [100 + process - process % (4 // shards) for process in range(4)]
    assert four.run('restore_iterators', tmp_path, shards) == first


@pytest.mark.parametrize('partitioned', [True, False])
def test_factors_without_axes_are_in_process_0s_manifest(four, tmp_path, partitioned):
    """T5X's rule. What process 0 does not hold whole is an array: T5X would keep process 0's part of it alone."""
    four.run('save_factors', tmp_path, partitioned)
    manifest = t5x_rules.check(tmp_path / 'checkpoint_1')
    stored = {key for key, leaf in manifest.items() if independent_reader.is_spec(leaf)}
    assert stored == {'target/w', 'state/param_states/v_col'}
    found = independent_reader.read(tmp_path / 'checkpoint_1')
    for name in ('v_row', 'v_col'):
        assert_same(found[f'state/param_states/{name}'], scenarios.full(name, (32_128,), 'float32'), name)


def test_without_a_partitioner_each_process_has_a_data_shard(four, tmp_path):
    four.run('save_iterators', tmp_path, None)
    names = sorted(path.name for path in (tmp_path / 'checkpoint_1').glob('train_ds-*'))
    assert names == [f'train_ds-{shard:03}-of-004' for shard in range(4)]
    assert four.run('restore_iterators', tmp_path, None) == [100, 101, 102, 103]


@pytest.mark.parametrize('kind', ['Counter', 'States'])
def test_one_position_of_all_processes_continues_in_any_number(four, two, tmp_path, kind):
    """Data that all processes read alike."""
    four.run('save_iterators', tmp_path / 'four', None, kind, 0)
    assert two.run('restore_iterators', tmp_path / 'four', None, kind) == [100, 100]
    assert '4 processes saved one position, at which this job of 2 continues' in two.log(0)
    two.run('save_iterators', tmp_path / 'two', None, kind, 0)
    assert four.run('restore_iterators', tmp_path / 'two', None, kind) == [100] * 4


@pytest.mark.parametrize(('saved', 'restored', 'apart'), [(2, 4, 1), (None, None, 1), (2, 1, 0)])
def test_positions_of_other_shards(four, two, tmp_path, saved, restored, apart):
    """They differ, or the partitioner says that the shards have other data."""
    four.run('save_iterators', tmp_path, saved, 'Counter', apart)
    for kind, text in (four if restored == 4 else two).errors('restore_iterators', tmp_path, restored):
        assert kind in ('DatasetStateError', 'RemoteError')
        assert 'has no iterator state train_ds-00' in text
        assert 'map_positions' in text


@pytest.mark.parametrize(
    ('kind', 'mapped', 'expected'), [('States', 'sum', [406, 407]), ('Counter', 'last', [103, 103])]
)
def test_positions_are_mapped_to_other_shards(four, two, tmp_path, kind, mapped, expected):
    four.run('save_iterators', tmp_path, None, kind)
    assert two.run('restore_iterators', tmp_path, None, kind, mapped) == expected
    assert two.run('restore_iterators', tmp_path, None, kind, 'none') == [0, 0]
    # Not with the same shards.
    assert four.run('restore_iterators', tmp_path, None, kind, mapped) == [100, 101, 102, 103]
    found = t5ckpt.open_checkpoint(tmp_path).data_positions()
    if kind == 'States':
        assert found == {shard: {'position': 100 + shard} for shard in range(4)}
    else:
        assert [pathlib.Path(path).read_text() for path in found.values()] == ['100', '101', '102', '103']


# The step in it is a number for the comparison, as the other leaves are.
@pytest.mark.filterwarnings('ignore::t5ckpt.errors.StepMismatchWarning')
def test_a_seed_checkpoint_of_one_process(four, tmp_path):
    values = {tuple(name.split('/')): value for name, value in scenarios.expected().items()}
    seed = {'target': {leaf: value for (group, leaf), value in values.items() if group == 'target'}}
    seed['state'] = {'step': values['state', 'step']}
    with t5ckpt.Checkpointer(seed, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save(seed, step=0)
    assert four.run('train_from_seed', tmp_path) == [[0, [0, 1]]] * 4


def test_two_checkpoints_are_merged_in_a_new_run(four, tmp_path):
    for seed, name in enumerate(('one', 'two')):
        four.run('save', tmp_path / name, 1, seed)
    assert four.run('start_from_two', tmp_path / 'new', tmp_path / 'one', tmp_path / 'two') == [None] * 4


def test_each_process_reads_its_ranges_of_a_safetensors_file(four, tmp_path):
    values = {name: scenarios.expected()[f'target/{name}'] for name in ('both', 'rows')}
    with t5ckpt.Checkpointer(values, checkpoints_dir=tmp_path / 'run') as checkpointer:
        checkpointer.save(values, step=1)
    t5ckpt.convert_checkpoint('to-safetensors', tmp_path / 'run', tmp_path / 'w.safetensors')
    total = sum(value.nbytes for value in values.values())
    assert all(total / 8 <= read < 0.6 * total for read in four.run('restore_safetensors', tmp_path / 'w.safetensors'))
    assert four.run('restore_lazily', tmp_path / 'w.safetensors') == [float(values['both'].sum())] * 4


def test_replace_and_delete(four, tmp_path):
    answers = four.run('replace_and_delete', tmp_path)
    rest = [True, [[4, False, 4]]]
    assert answers[0] == [*rest, 'CheckpointNotFoundError', [1, 4], {'by': 0}]
    assert answers[1:] == [[*rest, 'RemoteError', [1, 4], {'by': 0}]] * 3

"""A step that retention deletes, or a save replaces, while a reader has it open: the error names this, and not damage."""

import pathlib
import shutil
import threading
import time

import numpy as np
import pytest
from support.options import with_options

import t5ckpt
from t5ckpt import errors
from t5ckpt.commit.deletion import delete_step
from t5ckpt.storage import open_storage

DELETED = r'was deleted while it was being'
REPLACED = r'was replaced while it was being read'


def tree(seed):
    values = np.random.default_rng(seed).standard_normal((8, 16), dtype=np.float32)
    return {'target': {'w': values, 'v': values + 1}, 'b': np.full(3, seed, np.float32)}


def save(run, seed, *, overwrite=False, compression=None):
    options = {'inline_bytes': 16, 'chunk_bytes': 256, 'compression': compression}
    if overwrite:
        delete(run)
    with t5ckpt.Checkpointer(tree(seed), checkpoints_dir=run, **with_options(**options)) as ck:
        ck.save(tree(seed), step=1)


def delete(run):
    delete_step(open_storage(run), 1, time.time)


@pytest.fixture(params=['disk', 'zstd', 'memory'])
def run(request, tmp_path):
    url = f'memory://{tmp_path.name}/run' if request.param == 'memory' else str(tmp_path / 'run')
    save(url, 0, compression='zstd' if request.param == 'zstd' else None)
    return url


READS = {
    'slice': lambda view: view['target/w'][2:3],
    'whole': lambda view: view['target/w'].get(),
    'numpy': lambda view: np.asarray(view['target/v']),
    'advanced': lambda view: view['target/w'][[1, 2]],
    'stats': lambda view: view.stats(),
    'diff': lambda view: t5ckpt.diff(view, view),
}


@pytest.mark.parametrize('what', READS)
@pytest.mark.parametrize('mmap', [True, False])
def test_a_view_of_a_deleted_step(run, what, mmap):
    view = t5ckpt.open_checkpoint(run, options=t5ckpt.CheckpointerOptions(mmap=mmap))
    READS[what](view)
    delete(run)
    with pytest.raises(errors.CheckpointNotFoundError, match=DELETED) as caught:
        READS[what](view)
    assert 'older step' not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize('what', READS)
@pytest.mark.parametrize('mmap', [True, False])
def test_a_view_of_a_step_that_was_saved_anew(run, what, mmap):
    """The chunks have the names and the sizes of the old ones: nothing but this look tells."""
    view = t5ckpt.open_checkpoint(run, options=t5ckpt.CheckpointerOptions(mmap=mmap))
    save(run, 1, overwrite=True, compression='zstd' if run.endswith('zstd') else None)
    with pytest.raises(errors.CheckpointNotFoundError, match=REPLACED):
        READS[what](view)
    np.testing.assert_array_equal(t5ckpt.open_checkpoint(run)['target/w'], tree(1)['target']['w'])


def test_lazy_loads_and_restores(run):
    loaded = t5ckpt.load_t5x_checkpoint(run, lazy_parameters=True)
    with t5ckpt.Checkpointer(tree(0), checkpoints_dir=run) as ck:
        restored = ck.restore(lazy_parameters=True)
    delete(run)
    for state in (loaded, restored):
        with pytest.raises(errors.CheckpointNotFoundError, match=DELETED):
            state['target']['w'].get()


def test_checksums_and_a_chunk_that_is_missing_from_a_step_that_stays(run):
    full = t5ckpt.open_checkpoint(run, options=t5ckpt.CheckpointerOptions(verify='full'))
    delete(run)
    with pytest.raises(errors.CheckpointNotFoundError, match=DELETED):
        full['target/w'].get()


def test_damage_stays_damage(tmp_path):
    save(tmp_path, 0)
    view = t5ckpt.open_checkpoint(tmp_path)
    next((tmp_path / 'checkpoint_1' / 'target.w').glob('[0-9]*')).unlink()
    with pytest.raises(errors.CorruptCheckpointError, match='target/w'):
        view['target/w'].get()
    with pytest.raises(errors.CorruptCheckpointError):
        view.stats()


def test_a_pin_and_a_second_name_change_nothing(tmp_path):
    save(tmp_path, 0)
    view = t5ckpt.open_checkpoint(tmp_path)
    t5ckpt.pin_checkpoint(tmp_path / 'checkpoint_1')
    (tmp_path / 'again').hardlink_to(tmp_path / 'checkpoint_1' / 'checkpoint')
    np.testing.assert_array_equal(view['target/w'], tree(0)['target']['w'])


def test_a_read_from_a_bucket_looks_once(gs):
    """One request for no bytes; many reads that belong together share it."""
    url = gs.url()
    save(url, 0)
    view = t5ckpt.open_checkpoint(url)
    gs.proxy.clear()
    view['target/w'].get()
    assert sum(request.key.endswith('/checkpoint') for request in gs.proxy.clear()) == 1
    view.stats()
    assert sum(request.key.endswith('/checkpoint') for request in gs.proxy.clear()) == 1


def during(meter_of, change):
    """Runs something with a progress callback that makes the change at its first call."""
    done = []

    def report(_, __):
        if not done:
            done.append(change())

    return meter_of(report)


def test_deleted_and_replaced_between_two_blocks(tmp_path):
    state = {f'w{i}': np.random.default_rng(i).standard_normal(2**21, dtype=np.float32) for i in range(6)}

    def saved(values, *, overwrite=False):
        if overwrite:
            delete(tmp_path / 'run')
        with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run') as ck:
            ck.save(values, step=1)

    saved(state)
    with pytest.raises(errors.CheckpointNotFoundError, match=REPLACED):
        during(
            lambda report: t5ckpt.open_checkpoint(tmp_path / 'run').stats(progress=report),
            lambda: saved({name: value + 1 for name, value in state.items()}, overwrite=True),
        )
    with pytest.raises(errors.CheckpointNotFoundError, match=DELETED):
        during(
            lambda report: t5ckpt.convert_checkpoint(
                'to-safetensors',
                tmp_path / 'run',
                tmp_path / 'out.safetensors',
                t5ckpt.ConvertOptions(progress=report, concurrent_gb=2**22 / 1e9),
            ),
            lambda: shutil.rmtree(tmp_path / 'run' / 'checkpoint_1'),
        )
    assert not (tmp_path / 'out.safetensors').exists()


@pytest.mark.parametrize(
    'copy',
    [
        lambda run, out, report: t5ckpt.copy_checkpoint(run, out / 'copy', t5ckpt.ConvertOptions(progress=report)),
        lambda run, out, report: t5ckpt.convert_checkpoint(
            'to-safetensors', run, out / 'x.safetensors', t5ckpt.ConvertOptions(progress=report)
        ),
        lambda run, out, report: t5ckpt.convert_checkpoint(
            'to-orbax', run, out / 'orbax', t5ckpt.ConvertOptions(progress=report)
        ),
    ],
)
def test_copies_of_a_step_that_goes(tmp_path, copy):
    state = {f'w{i}': np.arange(2**14, dtype=np.float32) + i for i in range(160)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run') as ck:
        ck.save(state, step=1)
    step_dir = tmp_path / 'run' / 'checkpoint_1'
    with pytest.raises(errors.CheckpointNotFoundError, match=DELETED):
        during(
            lambda report: copy(tmp_path / 'run', tmp_path, report),
            lambda: step_dir.rename(tmp_path / 'run' / 'checkpoint_1.deleted-1'),
        )


def test_series_leave_out_what_goes(tmp_path):
    options = {'inline_bytes': 16}
    with t5ckpt.Checkpointer(tree(0), checkpoints_dir=tmp_path, **with_options(**options)) as ck:
        for step in (1, 2, 3):
            ck.save(tree(step), step=step)
    run = t5ckpt.open_run(tmp_path)

    def first(leaf):
        if run.steps == [1, 2, 3]:
            shutil.rmtree(tmp_path / 'checkpoint_2')
        return float(np.asarray(leaf)[0, 0])

    assert list(run.series('target/w', first)) == [1, 3]
    with pytest.raises(KeyError) as caught:
        run[2]
    assert isinstance(caught.value, errors.CheckpointNotFoundError)
    assert 'complete steps are: 1, 3' in str(caught.value)

    def all_go(leaf):
        for path in tmp_path.glob('checkpoint_*'):
            shutil.rmtree(path)
        return float(np.asarray(leaf)[0, 0])

    with pytest.raises(errors.CheckpointNotFoundError):
        run.series('target/w', all_go)


def test_a_key_error_of_the_callers_function_is_his(tmp_path):
    save(tmp_path, 0)
    with pytest.raises(KeyError, match='mine'):
        t5ckpt.open_run(tmp_path).series('target/w', lambda _: {}['mine'])


def test_readers_beside_a_writer_that_overwrites(tmp_path):
    """Each value read is of one checkpoint, or an error says that the step was replaced."""
    save(tmp_path, 0)
    ended = threading.Event()
    failures: list[str] = []
    reads = [0, 0]

    def read():
        while not ended.is_set():
            try:
                view = t5ckpt.open_checkpoint(tmp_path)
                b = float(view['b'][0])
                values = view['target/w'].get()
                reads[0] += 1
            except errors.CheckpointNotFoundError:
                reads[1] += 1
                continue
            if not np.array_equal(values, tree(int(b))['target']['w']):
                failures.append(f'mixed values of {b}')

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    try:
        for seed in range(1, 12):
            save(tmp_path, seed, overwrite=True)
    finally:
        ended.set()
        for thread in readers:
            thread.join()
    assert failures == []
    assert reads[0] > 0


def test_verify_of_a_step_that_goes(tmp_path):
    # More files than are read ahead.
    state = {'w': np.arange(2**16, dtype=np.float32)}
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(chunk_bytes=1024)
    ) as ck:
        ck.save(state, step=1)
    directory = pathlib.Path(tmp_path, 'checkpoint_1')
    with pytest.raises(errors.CheckpointNotFoundError, match='being verified'):
        during(
            lambda report: t5ckpt.verify(tmp_path, full=True, progress=report),
            lambda: directory.rename(tmp_path / 'checkpoint_1.deleted-1'),
        )

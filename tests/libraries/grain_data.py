"""Grain and t5ckpt: python grain_data.py <empty directory>."""

import json
import pathlib
import sys
from collections.abc import Callable, Iterator

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest

import t5ckpt
from t5ckpt.errors import DatasetStateError, UnsupportedLeafError

WORK = pathlib.Path(sys.argv[1])
STATE = {'w': np.ones(3, np.float32)}


def dataset() -> Iterator:
    """Shuffled, repeated, random augmentation, batches, read ahead by threads."""
    source = grain.MapDataset.source(range(50)).seed(7).shuffle().repeat()
    return iter(source.random_map(lambda x, rng: x + rng.integers(1000)).batch(4).to_iter_dataset())


def packed() -> Iterator:
    """A window shuffle behind a filter, whose state is a tree."""
    source = grain.MapDataset.source(range(300)).repeat().to_iter_dataset()
    kept = source.filter(lambda x: x % 3 > 0)
    return iter(grain.experimental.WindowShuffleIterDataset(kept, window_size=10, seed=3).batch(5))


def loader() -> Iterator:
    """The older interface, whose state is bytes."""
    sampler = grain.samplers.IndexSampler(60, shuffle=True, seed=3, num_epochs=20)
    operations = [grain.transforms.Batch(5)]
    return iter(grain.DataLoader(data_source=range(60), sampler=sampler, operations=operations, worker_count=0))


def main() -> None:
    """Whatever is read after a restore is what would have been read."""
    for make in (dataset, packed, loader):
        run = WORK / make.__name__
        check(run, make)
        check_orbax(WORK / f'{make.__name__}-orbax', make)
    with pytest.raises(UnsupportedLeafError, match=r'iter\(dataset\)'):
        t5ckpt.Checkpointer(STATE, checkpoints_dir=WORK / 'x', dataset_iterator=grain.MapDataset.source(range(3)))


def check(run: pathlib.Path, make: Callable[[], Iterator]) -> None:
    """Saves twice in the background, and restores both."""
    iterator = make()
    expected = {}
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=run, dataset_iterator=iterator) as ck:
        for step in (0, 7):
            for _ in range(step):
                next(iterator)
            pending = ck.save_async(STATE, step=step)
            # JSON, because the batches of some pipelines are reused.
            expected[step] = [json.dumps(np.asarray(next(iterator)).tolist()) for _ in range(60)]
            pending.result()
    for step, batches in expected.items():
        again = make()
        with t5ckpt.Checkpointer(STATE, checkpoints_dir=run, dataset_iterator=again) as ck:
            ck.restore(step=step)
        assert [json.dumps(np.asarray(next(again)).tolist()) for _ in range(60)] == batches, (run, step)


def check_orbax(run: pathlib.Path, make: Callable[[], Iterator]) -> None:
    """Orbax saves, t5ckpt restores."""
    iterator = make()
    with ocp.CheckpointManager(run) as manager:
        for _ in range(5):
            next(iterator)
        items = {'state': ocp.args.StandardSave(STATE), 'data': grain.checkpoint.CheckpointSave(iterator)}
        manager.save(5, args=ocp.args.Composite(**items))
        batches = [json.dumps(np.asarray(next(iterator)).tolist()) for _ in range(20)]
    again = make()
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=run, dataset_iterator=again) as ck:
        ck.restore()
        assert [json.dumps(np.asarray(next(again)).tolist()) for _ in range(20)] == batches, run
        (state,) = run.glob('5/data/process_0-of-1.json')
        state.rename(state.with_name('process_0-of-2.json'))
        with pytest.raises(DatasetStateError, match=r'no iterator state .*-000-of-001, only process_0-of-2\.json'):
            ck.restore()
        # All processes read the same data.
        data = (run / '5' / 'data' / 'process_0-of-2.json').read_bytes()
        (run / '5' / 'data' / 'process_1-of-2.json').write_bytes(data)
        ck.restore()
        assert [json.dumps(np.asarray(next(again)).tolist()) for _ in range(20)] == batches, run


if __name__ == '__main__':
    main()

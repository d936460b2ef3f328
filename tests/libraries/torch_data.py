"""torchdata's StatefulDataLoader and t5ckpt: python torch_data.py <empty directory>."""

import pathlib
import sys
import warnings

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import t5ckpt

WORK = pathlib.Path(sys.argv[1])
STATE = {'w': np.ones(3, np.float32)}


class Stream(torch.utils.data.IterableDataset):
    """Numbers that carry their own state: a tensor, a generator's, and a count."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.count = 0

    def __iter__(self) -> 'Stream':
        return self

    def __next__(self) -> torch.Tensor:
        if self.count == 40:
            raise StopIteration
        self.count += 1
        return torch.randint(1000, (2,), generator=self.generator)

    def state_dict(self) -> dict:
        """All of it."""
        return {'count': self.count, 'generator': self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        """The inverse."""
        self.count = state['count']
        self.generator.set_state(state['generator'])


def loader(kind: str, workers: int) -> StatefulDataLoader:
    """A fresh loader; always the same."""
    # torchdata 0.11 calls what torch 2.13 has deprecated.
    with warnings.catch_warnings(action='ignore', category=UserWarning):
        if kind == 'stream':
            return StatefulDataLoader(Stream(), batch_size=4)
        generator = torch.Generator().manual_seed(0)
        shuffle = kind == 'shuffled'
        return StatefulDataLoader(
            list(range(80)),
            batch_size=4,
            shuffle=shuffle,
            num_workers=workers,
            # JAX's threads do not survive a fork.
            multiprocessing_context='spawn' if workers else None,
            generator=generator if shuffle else None,
        )


def main() -> None:
    """The rest of an epoch is the rest of the epoch."""
    for kind, workers in (('plain', 0), ('shuffled', 0), ('stream', 0), ('plain', 2)):
        run = WORK / f'{kind}-{workers}'
        data = loader(kind, workers)
        batches = iter(data)
        for _ in range(3):
            next(batches)
        with t5ckpt.Checkpointer(STATE, checkpoints_dir=run, dataset_iterator=data) as ck:
            ck.save(STATE, step=1)
        expected = [batch.tolist() for batch in batches]
        again = loader(kind, workers)
        with t5ckpt.Checkpointer(STATE, checkpoints_dir=run, dataset_iterator=again) as ck:
            ck.restore()
        assert [batch.tolist() for batch in again] == expected, (kind, workers)
        assert expected


if __name__ == '__main__':
    main()

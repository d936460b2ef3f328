"""Saves and restores the positions of data iterators: a protocol, adapters, and the files of each data shard."""

from __future__ import annotations

from t5ckpt.datasets.adapters import StateIterator, TfDataIterator, as_dataset_iterator
from t5ckpt.datasets.positions import by_shard, positions_in
from t5ckpt.datasets.shards import DatasetState, MapPositions, warn_of_unused
from t5ckpt.datasets.state_file import decode_state, encode_state

__all__ = [
    'DatasetState',
    'MapPositions',
    'StateIterator',
    'TfDataIterator',
    'as_dataset_iterator',
    'by_shard',
    'decode_state',
    'encode_state',
    'positions_in',
    'warn_of_unused',
]

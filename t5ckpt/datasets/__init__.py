"""Saves and restores the positions of data iterators: a protocol, adapters, and the files of each data shard."""

from __future__ import annotations

from t5ckpt.datasets.adapters import StateIterator, TfDataIterator, as_dataset_iterator
from t5ckpt.datasets.shards import DatasetState, warn_of_unused
from t5ckpt.datasets.state_file import decode_state, encode_state

__all__ = [
    'DatasetState',
    'StateIterator',
    'TfDataIterator',
    'as_dataset_iterator',
    'decode_state',
    'encode_state',
    'warn_of_unused',
]

"""The arguments of a save: its step, given or found in the state, and the metadata."""

import jax
import numpy as np
import pytest
from flax import jax_utils

import t5ckpt

REPLICATED = {'w': np.ones((1, 4), np.float32), 'step': np.array([3], np.int32)}


def test_the_error_for_the_step_of_a_replicated_state_names_cures_that_work(tmp_path):
    with t5ckpt.Checkpointer(REPLICATED, checkpoints_dir=tmp_path) as ck:
        with pytest.raises(ValueError, match=r'got array.* Pass step=, or save one of its copies.*unreplicate'):
            ck.save(REPLICATED)
        assert ck.save(REPLICATED, step=3)
    one = jax.device_get(jax_utils.unreplicate(REPLICATED))
    with t5ckpt.Checkpointer(one, checkpoints_dir=tmp_path / 'one') as ck:
        assert ck.save(one)
        assert ck.all_steps() == [3]


def test_the_error_for_a_step_that_was_passed_proposes_nothing_about_the_state(tmp_path):
    with t5ckpt.Checkpointer(REPLICATED, checkpoints_dir=tmp_path) as ck, pytest.raises(ValueError, match=r'got -1\.$'):
        ck.save(REPLICATED, step=-1)


def test_the_error_for_a_deleted_array_in_the_metadata_names_its_path(tmp_path):
    deleted = jax.numpy.ones(3)
    deleted.delete()
    with t5ckpt.Checkpointer(REPLICATED, checkpoints_dir=tmp_path) as ck, pytest.raises(ValueError, match='a/b: Array'):
        ck.save(REPLICATED, step=1, custom_metadata={'a': {'b': deleted}})

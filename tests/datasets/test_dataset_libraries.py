"""The real tf.data, Grain and torchdata, each in a process of its own: their threads and warnings stay theirs."""

import pytest
from support.libraries import needs, run


@pytest.mark.slow
@needs('tensorflow', 'tensorflow-cpu')
def test_tf_data(golden, tmp_path):
    run('tf_data.py', golden / 'case07_dataset_iterator', tmp_path)


@pytest.mark.slow
@needs('torchdata', 'torchdata')
def test_torch_stateful_data_loader(tmp_path):
    run('torch_data.py', tmp_path)


@pytest.mark.slow
def test_grain(tmp_path):
    run('grain_data.py', tmp_path)

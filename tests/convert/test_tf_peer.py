"""What TensorFlow itself writes, read by us to the bit; in a process of its own, which imports it once."""

import pytest
from support.libraries import needs, run


@pytest.mark.slow
@needs('tensorflow', 'tensorflow-cpu')
def test_checkpoints_that_tensorflow_writes(tf_golden, tmp_path):
    run('tf_checkpoints.py', tmp_path, tf_golden / 'tf_t5_1_1_gated')

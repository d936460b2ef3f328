"""A directory in memory: a slow disk would only make these tests wait, and what it forgets is the replay's business."""

import os
import pathlib
import tempfile

import pytest


@pytest.fixture
def memory_dir(tmp_path):
    """Not there yet; on /dev/shm where there is one."""
    shm = pathlib.Path('/dev/shm')  # noqa: S108 - mkdtemp below
    if not os.access(shm, os.W_OK):
        yield tmp_path / 'run'
        return
    with tempfile.TemporaryDirectory(prefix='t5ckpt-crowd-', dir=shm) as directory:
        yield pathlib.Path(directory) / 'run'

"""Jobs live for a whole module: a process takes seconds to start."""

import pytest
from job import Job
from tier_disks import Place


@pytest.fixture(scope='module')
def four():
    """Four processes with two devices each."""
    job = Job(4, 2)
    yield job
    job.close()


@pytest.fixture(scope='module')
def two():
    """Two processes with four devices each."""
    job = Job(2, 4)
    yield job
    job.close()


@pytest.fixture
def place(tmp_path):
    """A run's directory, and the local directories of the four."""
    return Place(tmp_path)

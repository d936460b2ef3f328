"""Jobs live for a whole module: a process takes seconds to start."""

import pytest
from job import Job


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

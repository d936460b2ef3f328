"""A minute of the chaos run, with stops that JAX's heartbeat notices and no longer ones; `make soak` takes ten minutes."""

import json
import subprocess
import sys

import chaos
import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_a_job_that_is_broken_at_random_loses_nothing():
    if why := chaos.missing():
        pytest.skip(why)
    command = [sys.executable, chaos.__file__, '--seconds', '60', '--seed', '2', '--longest', '15']
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts['saves'] > 0
    assert counts['steps verified'] > 0

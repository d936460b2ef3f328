"""Two minutes of the chaos run; `make soak` takes ten."""

import json
import subprocess
import sys

import chaos
import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_a_job_that_is_broken_at_random_loses_nothing():
    if why := chaos.missing():
        pytest.skip(why)
    command = [sys.executable, chaos.__file__, '--seconds', '120', '--seed', '2']
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts['saves'] > 0
    assert counts['steps verified'] > 0

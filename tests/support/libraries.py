"""Programs that need a library of datasets."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


PROGRAMS = ROOT / 'tests' / 'libraries'


def needs(module: str, package: str) -> pytest.MarkDecorator:
    """Skips where a library is not installed, but never in CI, which installs it."""
    absent = importlib.util.find_spec(module) is None and os.environ.get('CI') != 'true'
    return pytest.mark.skipif(absent, reason=f"needs {package}: pip install 't5ckpt[peers]'")


def path_of(directory: str) -> str:
    """PYTHONPATH for a version of a library that has a directory of its own; skips without it, but never in CI."""
    home = pathlib.Path(os.environ.get('T5CKPT_VERSIONS', sys.prefix)) / directory
    if not home.is_dir():
        words = f'no {home}: `make {directory}`'
        assert os.environ.get('CI') != 'true', words
        pytest.skip(words)
    return os.pathsep.join([str(home), os.environ.get('PYTHONPATH', '')])


def run(program: str, *arguments: object) -> None:
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
    command = [sys.executable, str(PROGRAMS / program), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

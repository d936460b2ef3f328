"""Runs the program of a page in a fork of a process that has imported the libraries of the pages once; see nursery.py."""

import os
import pathlib
import runpy
import sys

# What the pages import at their first lines: two to four seconds, for each of thirty pages.
import equinox  # noqa: F401
import flax.linen
import flax.training.train_state  # noqa: F401
import matplotlib as mpl  # noqa: F401
import optax  # noqa: F401
import orbax.checkpoint  # noqa: F401
import pandas as pd  # noqa: F401
from flax import nnx  # noqa: F401

import t5ckpt  # noqa: F401


def main(arguments: list[str]) -> None:
    """Runs a program as Python does.

    Args:
      arguments: the program, and the PATH.
    """
    program, os.environ['PATH'] = arguments
    sys.argv = [program]
    sys.path[0] = str(pathlib.Path(program).parent)
    runpy.run_path(program, run_name='__main__')

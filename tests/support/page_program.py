"""Runs the program of a page in a fork of a process that has imported the libraries of the pages once; see nursery.py."""

import os
import pathlib
import runpy
import sys
import traceback

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
    """Runs a program in a directory, as Python does, with its output and its traceback in a file.

    Args:
      arguments: the program, the directory, the file, and the PATH.
    """
    program, directory, log, path = arguments
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(directory)
    os.environ['PATH'] = path
    sys.argv = [program]
    sys.path[0] = str(pathlib.Path(program).parent)
    try:
        runpy.run_path(program, run_name='__main__')
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()

"""Runs the command line in a fork of a process that has imported the libraries of all verbs; see nursery.py."""

import importlib
import os
import sys

import flax.serialization  # noqa: F401
import jax  # noqa: F401
import tensorstore as ts  # noqa: F401

import t5ckpt
import t5ckpt.cli.app
from t5ckpt.cli import VERBS, main as cli

for _name in t5ckpt.__all__:
    getattr(t5ckpt, _name)
for _name in VERBS.values():
    importlib.import_module(f't5ckpt.cli.{_name}')


def main(given: dict) -> None:
    """Runs ``t5ckpt words...``.

    Args:
      given: the words, the environment and the directory of the process, and the files of its input and outputs.
    """
    os.environ.clear()
    os.environ.update(given['environment'])
    os.chdir(given['directory'])
    for number, name in enumerate(given['files']):
        file = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    # The one before has read ahead in what the tests send to the parent.
    sys.stdin = open(0, encoding='utf-8', closefd=False)  # noqa: SIM115 - open until the end
    sys.argv = ['t5ckpt', *given['words']]
    cli()

"""Runs the command line, or the code of a test, in a fork of a process that has imported the libraries; see nursery.py."""

import importlib
import sys
import warnings

import jax  # noqa: F401

from t5ckpt.cli import VERBS, main as cli

for _name in set(VERBS.values()):
    importlib.import_module(f't5ckpt.cli.{_name}')


def main(given: tuple[str | None, list[str]]) -> None:
    """Runs ``python -c code words...``, or, without code, ``python -W error -m t5ckpt words...``."""
    code, words = given
    if code is None:
        sys.argv = ['t5ckpt', *words]
        cli()
        return
    sys.argv = ['-c', *words]
    # Python's own filters.
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter('ignore', category)
    exec(compile(code, '<string>', 'exec'), {'__name__': '__main__'})  # noqa: S102 - the test's own

"""The command line, ``t5ckpt VERB ...``.

A verb is one module of this package with a click command named ``command``; ``VERBS`` says which. A module is imported
when its verb is called, so that ``t5ckpt ls`` loads neither jax nor tensorstore. Nothing is decided here: verbs parse
words, call the library and print.

Exit codes, the same for every verb: 0 it worked; 1 it worked, and the answer is no (damage, differences, nothing
there to do it with); 2 invalid arguments, or a question was answered with no; 3 no such checkpoint, or one that
cannot be read; 4 the storage refused; 130 interrupted.
"""

from __future__ import annotations

import importlib.util
import sys

__all__ = ['VERBS', 'main']

VERBS = {
    'convert': 'convert',
    'ls': 'ls',
    'best': 'best',
    'show': 'show',
    'cat': 'cat',
    'stats': 'stats',
    'diff': 'diff',
    'export': 'export',
    'import': 'import_',
    'cp': 'cp',
    'rm': 'rm',
    'prune': 'prune',
    'pin': 'pin',
    'unpin': 'unpin',
    'verify': 'verify',
    'repair': 'repair',
}


def main() -> None:
    """The program: parses ``sys.argv`` and exits."""
    missing = [name for name in ('click', 'rich') if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"t5ckpt: the command line needs {' and '.join(missing)}: pip install 't5ckpt[cli]'")
    from t5ckpt.cli.app import run

    run()

"""The command line, ``t5ckpt VERB ...``.

A verb is a module of this package with a click command named ``command``, see ``VERBS``. A module is imported when its verb is
called, so that ``t5ckpt ls`` loads neither jax nor tensorstore. Verbs parse arguments, call the library and print the result.

The exit codes are those of :class:`t5ckpt.cli.verb.Exit`, the same for every verb.
"""

from __future__ import annotations

import os
import signal
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
    'report': 'report',
    'export': 'export',
    'import': 'import_',
    'cp': 'cp',
    'rm': 'rm',
    'prune': 'prune',
    'pin': 'pin',
    'unpin': 'unpin',
    'verify': 'verify',
}
_LACKING = 5


def main() -> None:
    """The program: parses ``sys.argv`` and exits."""
    interrupts = None
    try:
        # Imported here, so that an interrupt meets the handler, or this try, as early as possible.
        from t5ckpt.cli.interrupts import Interrupts

        interrupts = Interrupts()
        interrupts.install()
        import importlib.util

        from t5ckpt.cli.streams import open_streams

        open_streams()
        missing = [name for name in ('click', 'rich') if importlib.util.find_spec(name) is None]
        if missing:
            _end(
                f'the command line needs {" and ".join(missing)}: pip install {" ".join(missing)}, '
                "or pip install 't5ckpt[cli]'",
                _LACKING,
            )
        from t5ckpt.cli.app import run

        run(interrupts=interrupts)
    except BaseException as error:
        if interrupts is None and isinstance(error, KeyboardInterrupt):
            os.write(2, b't5ckpt: interrupted\n')
            os._exit(130)
        if interrupts is not None and (interrupts.was_received or isinstance(error, KeyboardInterrupt)):
            interrupts.end()
        raise
    finally:
        # The verb is done. An interrupt of Python's last flush would only change the exit code.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(text: str, code: int) -> None:
    sys.stderr.write(f't5ckpt: {text}\n')
    sys.exit(code)

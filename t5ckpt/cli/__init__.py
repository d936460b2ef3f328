"""The command line, ``t5ckpt VERB ...``.

``VERBS`` has the module of each verb. A module is imported when its verb is called, so that ``t5ckpt ls`` loads neither jax nor
tensorstore. Verbs parse arguments, call the library and print the result; ``cli/verb.py`` has what they share.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ['VERBS', 'main']

VERBS = {
    'convert': 'convert',
    'ls': 'ls',
    'best': 'ls',
    'show': 'show',
    'cat': 'show',
    'stats': 'show',
    'diff': 'diff',
    'report': 'report',
    'cp': 'convert',
    'rm': 'delete',
    'prune': 'delete',
    'pin': 'pin',
    'unpin': 'pin',
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
        from t5ckpt.cli.streams import open_streams

        open_streams()
        from t5ckpt.cli.app import run

        run(interrupts=interrupts)
    except BaseException as error:
        if interrupts is None and isinstance(error, KeyboardInterrupt):
            os.write(2, b't5ckpt: interrupted\n')
            os._exit(130)
        if interrupts is not None and (interrupts.was_received or isinstance(error, KeyboardInterrupt)):
            interrupts.end()
        if isinstance(error, ImportError) and error.name == 'click':
            sys.stderr.write("t5ckpt: the command line needs click: pip install click, or pip install 't5ckpt[cli]'\n")
            sys.exit(_LACKING)
        raise
    finally:
        # The verb is done. An interrupt of Python's last flush would only change the exit code.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

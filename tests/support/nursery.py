"""Starts trainers of the example named on the command line: it is imported once, and each trainer is a fork of this process.

Reads a line of JSON, the trainer's arguments, from standard input; forks; answers with the child's pid, and, when it has
ended, with its wait status. JAX's backends start in the child, so it is a process like any other, to be killed like any.
"""

import importlib
import json
import os
import sys

example = importlib.import_module(sys.argv[1])
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        # Whatever happens, the child must not go on reading the parent's commands.
        code = 1
        try:
            example.main(json.loads(line))
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    sys.stdout.write(f'{pid}\n')
    sys.stdout.flush()
    sys.stdout.write(f'{os.waitpid(pid, 0)[1]}\n')
    sys.stdout.flush()

"""One process of a job, forked by job.py: orders on standard input, answers on standard output."""

import json
import sys
import traceback

import exchange_scenarios
import jax
import scenarios
import tier_scenarios


def main(arguments: list[int]) -> None:
    """Joins the job, and does as it is told.

    Args:
      arguments: the port, the number of processes, this one's, and the seconds of the heartbeat.
    """
    port, count, index, heartbeat = arguments
    jax.distributed.initialize(f'127.0.0.1:{port}', count, index, heartbeat_timeout_seconds=heartbeat)
    _answer('ready')
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            modules = scenarios, tier_scenarios, exchange_scenarios
            module = next(module for module in modules if hasattr(module, name))
            answer = getattr(module, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            answer = {'error': [type(error).__name__, str(error)]}
            traceback.print_exc()
        _answer(answer)


def _answer(value: object) -> None:
    sys.stdout.write(f'ANSWER {json.dumps(value)}\n')
    sys.stdout.flush()

"""The costs of two tiers: saves in a training loop, and restarts of four processes.

    python benchmarks/tiers.py                           all parts, less than six minutes on two quiet cores
    python benchmarks/tiers.py restart                   one of them
    python benchmarks/tiers.py --directory /mnt/ssd      on another disk
    python benchmarks/tiers.py --short                   only shows that everything works

Prints a table in Markdown for each part, and all numbers as one line of JSON. ``tier_loop.py`` and
``tier_restart.py`` say what the numbers are.
Times are compared within a part: plain saves and restores are in each of them, twice,
so that the table also says how much two equal ones differ.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import time
from typing import Any

import tier_loop
import tier_restart

_PARTS = ('loop', 'restart')


def _run(part: str, directory: pathlib.Path, *, short: bool) -> tuple[list[str], dict[str, Any]]:
    if part == 'loop':
        return tier_loop.run(*((4, 1) if short else (256, 16)), directory)
    if part != 'restart':
        raise SystemExit(f'unknown part: {part}')
    return tier_restart.run(*((8, 1) if short else (512, 8)), directory)


def main() -> None:
    """Prints the tables and the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('parts', nargs='*', metavar='PART', help=', '.join(_PARTS))
    parser.add_argument('--directory', type=pathlib.Path, default=pathlib.Path(__file__).parent)
    parser.add_argument('--short', action='store_true')
    options = parser.parse_args()
    found: dict[str, Any] = {'load_before': round(os.getloadavg()[0], 1)}
    for part in options.parts or _PARTS:
        began = time.perf_counter()
        lines, numbers = _run(part, options.directory, short=options.short)
        found[part] = numbers | {'took_seconds': round(time.perf_counter() - began)}
        print('\n'.join(lines), end='\n\n', flush=True)
    found['load_after'] = round(os.getloadavg()[0], 1)
    print(json.dumps(found))


if __name__ == '__main__':
    main()

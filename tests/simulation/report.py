"""A directory with the results so far, which later runs continue: a file of counts and one of states for each scenario."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_VARIANT = re.compile('^disk-|-faults$')


@dataclasses.dataclass
class Explored:
    """The results of one scenario.

    Attributes:
      first: the first seed.
      following: the first seed that was not explored.
      points: the number of operations.
      states: the number of different sets of keys that the storage had.
      faults: the number of each, and 'run' for switches.
    """

    first: int = 0
    following: int = 0
    points: int = 0
    states: int = 0
    faults: dict[str, int] = dataclasses.field(default_factory=dict[str, int])

    @property
    def schedules(self) -> int:
        """The number of explored schedules."""
        return self.following - self.first

    @classmethod
    def read(cls, directory: str | os.PathLike[str], name: str, first: int = 0) -> Explored:
        """Reads the results in a directory; ``first`` is the first seed if it has none."""
        path = Path(directory, f'{name}.json')
        if not path.exists():
            return cls(first, first)
        return cls(**json.loads(path.read_text(encoding='utf-8')))

    def write(self, directory: str, name: str, states: Iterable[int]) -> None:
        """Writes it, with the states of one more part, so that a kill at any moment leaves a report that can be continued.

        A kill between the two files leaves states of seeds that are not counted. They are the same when these run again.
        """
        Path(directory).mkdir(parents=True, exist_ok=True)
        path = Path(directory, f'{name}.npy')
        before = np.load(path) if path.exists() else np.empty(0, np.int64)
        after = np.union1d(before, np.fromiter(states, np.int64))
        data = io.BytesIO()
        np.save(data, after)
        _replace(path, data.getvalue())
        self.states = len(after)
        _replace(Path(directory, f'{name}.json'), json.dumps(vars(self)).encode())


def _replace(path: Path, data: bytes) -> None:
    """Replaces a file in one operation."""
    partial = path.with_name(f'{path.name}.partial')
    partial.write_bytes(data)
    partial.replace(path)


def table(directory: str | os.PathLike[str]) -> str:
    """A row for each family of scenarios: those on a disk and in a bucket, with and without faults."""
    families: dict[str, list[Explored]] = {}
    for path in sorted(Path(directory).glob('*.json')):
        families.setdefault(_VARIANT.sub('', _VARIANT.sub('', path.stem)), []).append(
            Explored.read(directory, path.stem)
        )
    kinds = ('crash', 'power', 'pause', 'delay', 'error', 'lost', 'late')
    heads = ('scenario', 'schedules', 'states', 'operations', *kinds)
    rows = [[name, *_row(parts, kinds)] for name, parts in families.items()]
    rows.append(['all', *_row([part for parts in families.values() for part in parts], kinds)])
    return '\n'.join([_line(heads), _line(['---'] * len(heads)), *map(_line, rows)])


def _row(parts: Iterable[Explored], kinds: Iterable[str]) -> list[str]:
    parts = [*parts]
    counts = [sum(getattr(part, field) for part in parts) for field in ('schedules', 'states', 'points')]
    return [f'{count:,}' for count in [*counts, *(sum(part.faults.get(kind, 0) for part in parts) for kind in kinds)]]


def _line(cells: Iterable[str]) -> str:
    return f'| {" | ".join(cells)} |'

"""Writes a report of a step, with the facts about its run that the caller passes."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt._version import __version__
from t5ckpt.commit.output_files import check_output, local_output, output
from t5ckpt.core.arguments import integer
from t5ckpt.core.protocols import Progress
from t5ckpt.core.text import printable
from t5ckpt.inspection.leaf_tree import LeafInfo
from t5ckpt.inspection.report.facts import BINS, leaf_facts
from t5ckpt.inspection.report.page import check_plotly, page
from t5ckpt.inspection.stats import Viewed, checkpoint_stats
from t5ckpt.storage import foreign_errors

SAMPLE_BYTES = 512_000_000


@dataclasses.dataclass(frozen=True)
class SelectedLeaves:
    """The leaves of a view that a page lists, for :func:`checkpoint_stats`."""

    view: Viewed
    leaves: Sequence[LeafInfo]

    @property
    def path(self) -> str:
        """The view's."""
        return self.view.path

    def infos(self) -> list[LeafInfo]:
        """The ones that are listed."""
        return list(self.leaves)

    def __getitem__(self, name: str) -> Any:
        return self.view[name]


def checked_output(path: str | os.PathLike[str], force: bool, sample_bytes: int | None) -> str:
    """The absolute path of the page; checks the arguments before anything is read.

    Raises:
      ValueError: ``sample_bytes`` is not a positive integer.
      OutputExistsError: it exists.
      MissingDependencyError: plotly is not installed.
    """
    if sample_bytes is not None:
        integer('sample_bytes', sample_bytes, 1, 'None reads everything.')
    local = local_output(path)
    check_output(local, force)
    check_plotly()
    return local


def step_report(
    view: Viewed, leaves: Sequence[LeafInfo], sample_bytes: int | None, progress: Progress | None
) -> dict[str, Any]:
    """The facts of one checkpoint: its leaves and their statistics.

    Args:
      view: the checkpoint, for many reads.
      leaves: those to list.
      sample_bytes: about how many bytes to read; None reads everything.
      progress: called with (bytes read, bytes to read).
    """
    stats = checkpoint_stats(SelectedLeaves(view, leaves), BINS, progress, sample_bytes=sample_bytes)
    everything = view.infos()
    return {
        'path': printable(view.path),
        'leaves': leaf_facts(leaves, stats),
        'all_leaves': len(everything),
        'size': sum(info.size for info in everything),
        'bytes': sum(info.nbytes for info in everything),
        'sample_bytes': sample_bytes,
    }


def shared(progress: Progress | None, before: int, after: int) -> Progress | None:
    """The progress of one part of the work; ``before`` and ``after`` are the bytes of the parts around it."""
    if progress is None:
        return None
    return lambda done, total: progress(before + done, before + total + after)


def write_report(local: str, path: str, facts: Mapping[str, Any], force: bool) -> str:
    """Writes the page atomically.

    Args:
      local: the path that :func:`checked_output` returned.
      path: of the run or the checkpoint; the last two keys are the title.
      facts: ``steps``, ``step``, ``checkpoint`` and ``changes``.
      force: replaces a file.

    Returns:
      The path.
    """
    made = f'{datetime.datetime.now(datetime.UTC):%Y-%m-%d}'
    name = '/'.join(path.split('/')[-2:]).strip('/')
    of_page = {'name': printable(name), 'path': printable(path), 'made': made, 'version': __version__}
    text = page(f'{name} · t5ckpt report', {**of_page, **facts})
    with (
        output(local, force) as temporary,
        foreign_errors(local, writing=True),
        open(temporary, 'w', encoding='utf-8') as file,
    ):
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return local

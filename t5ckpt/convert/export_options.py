"""What all exports and imports take and tell."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

from t5ckpt.core.arguments import given_step
from t5ckpt.core.protocols import Progress
from t5ckpt.errors import OutputExistsError
from t5ckpt.format.dtypes import Cast
from t5ckpt.storage import foreign_errors

__all__ = ['LAYOUT_KEY', 'ExportOptions', 'ExportReport', 'ImportOptions', 'refuse_inside', 'refuse_options', 'stamp']

LAYOUT_KEY = 't5ckpt'
"""In a Hugging Face file's metadata: how T5X kept the arrays, for the way back."""


class _Checked:
    """The step and the cast that the options of an export or an import ask for; checked when they are made."""

    step: int | None
    dtype: Any
    cast_leaves: str | re.Pattern[str] | None

    def __post_init__(self) -> None:
        given_step(self.step)
        _ = self.cast

    @property
    def cast(self) -> Cast | None:
        """The cast, checked."""
        return Cast.of(self.dtype, self.cast_leaves, 'dtype')


@dataclasses.dataclass(frozen=True)
class ExportOptions(_Checked):
    """How to export.

    Attributes:
      step: which step, where the path is a run's directory; None takes the latest.
      dtype: floating arrays of ``target`` and ``params``, or all of a Hugging Face model, are cast to it; None casts nothing.
      cast_leaves: a pattern for the whole names of the arrays that are cast instead. Not for Hugging Face models.
      select: a regular expression; only arrays whose name it is found in are exported. Not for Hugging Face models.
      max_shard_bytes: of a Hugging Face model's files; a larger tensor has a file of its own.
      force: replaces what an earlier export wrote.
      dry_run: says what would be written, and writes nothing.
      piece_bytes: of what is read at once, as long as no chunk is larger.
      progress: called with (bytes done, bytes in all).
    """

    step: int | None = None
    dtype: Any = None
    select: str | None = None
    max_shard_bytes: int = 5 * 10**9
    force: bool = False
    dry_run: bool = False
    piece_bytes: int = 128 * 2**20
    progress: Progress | None = None
    cast_leaves: str | re.Pattern[str] | None = None


@dataclasses.dataclass(frozen=True)
class ImportOptions(_Checked):
    """How to import.

    Attributes:
      step: to save as; None takes the step that an export wrote down, or 0.
      dtype: floating arrays of ``target`` and ``params`` are cast to it; None casts nothing.
      cast_leaves: a pattern for the whole names, in the checkpoint, of the arrays that are cast instead.
      scanned: all layers in one array, as scalable_t5 has them; None: as before an export, else only for UMT5.
      split_heads: an axis for heads; None: as for ``scanned``.
      force: replaces a complete checkpoint of that step.
      dry_run: says what would be written, and writes nothing.
      progress: called with (bytes done, bytes in all).
    """

    step: int | None = None
    dtype: Any = None
    scanned: bool | None = None
    split_heads: bool | None = None
    force: bool = False
    dry_run: bool = False
    progress: Progress | None = None
    cast_leaves: str | re.Pattern[str] | None = None


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What an export or an import did, or with ``dry_run`` would do.

    Attributes:
      output: the file, the directory or the checkpoint.
      kind: 'safetensors', 'npz', or the model's type in Hugging Face's words.
      files: written, below ``output`` where that is a directory.
      bytes: of all values.
      mapped: for each array of the T5X checkpoint, the names on the other side.
      dropped: what was there and is not in the output: the optimizer's state, what is no array, doubles.
      seconds: taken.
      dry_run: nothing was written.
    """

    output: str
    kind: str
    files: tuple[str, ...]
    bytes: int
    mapped: dict[str, tuple[str, ...]]
    dropped: tuple[str, ...]
    seconds: float = 0.0
    dry_run: bool = False


def refuse_options(options: ExportOptions | ImportOptions, names: Sequence[str], kind: str) -> None:
    """Refuses options that a format has no use for.

    Raises:
      ValueError: naming those that are set.
    """
    defaults = type(options)()
    idle = [name for name in names if getattr(options, name) != getattr(defaults, name)]
    if idle:
        raise ValueError(f'{", ".join(idle)}: no effect on {kind}. Leave it out.')


def refuse_inside(output: str, source: str | None) -> None:
    """Keeps an export from replacing the checkpoint it reads, or a directory with that in it.

    Raises:
      OutputExistsError: naming both.
    """
    if source is None:
        return
    inner, outer = os.path.realpath(source), os.path.realpath(output)
    if os.path.commonpath([inner, outer]) == outer:
        raise OutputExistsError(f'{output}: the checkpoint {source} is in it. Write somewhere else.')


def stamp(path: str) -> list[Any]:
    """What an input file is known by, should its import have to be taken up again."""
    with foreign_errors(path):
        status = os.stat(path)
    return [os.path.abspath(path), status.st_size, status.st_mtime_ns]

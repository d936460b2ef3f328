"""The options and the result of all exports and imports."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

from t5ckpt.core.arguments import given_step
from t5ckpt.core.protocols import Progress
from t5ckpt.core.text import short_repr
from t5ckpt.errors import OutputExistsError
from t5ckpt.planning.casts import Cast
from t5ckpt.storage import foreign_errors

LAYOUT_KEY = 't5ckpt'
"""The key in a Hugging Face file's metadata that describes T5X's layout of the arrays, for a later import."""


class _Checked:
    """The step and the cast in the options of an export or an import; checked when the options are made."""

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
    """The options of an export.

    Attributes:
      step: which step, if the path is a run's directory; None takes the latest.
      dtype: floating arrays of ``target`` and ``params``, or all of a Hugging Face model, are cast to it; None casts nothing.
      cast_leaves: a pattern for the whole names of the arrays that are cast instead. Not for Hugging Face models.
      select: a regular expression; only arrays with a match in their names are exported. Not for Hugging Face models.
      max_shard_bytes: the size of a Hugging Face model's files; a larger tensor has a separate file.
      force: replaces the output of an earlier export.
      dry_run: writes nothing; the result describes the export.
      piece_bytes: the bytes that are read at once, unless one chunk is larger.
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
    """The options of an import.

    Attributes:
      step: the step of the new checkpoint; None takes the step that an export recorded, or 0.
      dtype: floating arrays of ``target`` and ``params`` are cast to it; None casts nothing.
      cast_leaves: a pattern for the whole names, in the checkpoint, of the arrays that are cast instead.
      scanned: all layers in one array, as in scalable_t5; None: as before an export, else only for UMT5.
      split_heads: a separate axis for heads; None: as for ``scanned``.
      force: replaces a complete checkpoint of that step.
      dry_run: writes nothing; the result describes the import.
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


@dataclasses.dataclass(frozen=True, repr=False)
class ExportReport:
    """The result of an export or an import or, with ``dry_run``, its description.

    Attributes:
      output: the file, the directory or the checkpoint.
      kind: 'safetensors', or Hugging Face's ``model_type``.
      files: the files that were written, relative to ``output`` if that is a directory.
      bytes: of all values.
      mapped: for each array of the T5X checkpoint, its names in the other format.
      dropped: names that are not in the output: the optimizer's state, leaves that are not arrays, duplicates.
      seconds: the duration.
      dry_run: whether nothing was written.
    """

    output: str
    kind: str
    files: tuple[str, ...]
    bytes: int
    mapped: dict[str, tuple[str, ...]]
    dropped: tuple[str, ...]
    seconds: float = 0.0
    dry_run: bool = False

    def __repr__(self) -> str:
        return short_repr(self)


def refuse_options(options: ExportOptions | ImportOptions, names: Sequence[str], kind: str) -> None:
    """Raises ValueError if one of these options, which have no effect for a format, is set."""
    defaults = type(options)()
    idle = [name for name in names if getattr(options, name) != getattr(defaults, name)]
    if idle:
        raise ValueError(f'{", ".join(idle)}: no effect on {kind}. Leave it out.')


def refuse_inside(output: str, source: str | None) -> None:
    """Raises OutputExistsError if an export would replace the checkpoint that it reads, or a parent directory."""
    if source is None:
        return
    inner, outer = os.path.realpath(source), os.path.realpath(output)
    if os.path.commonpath([inner, outer]) == outer:
        raise OutputExistsError(f'{output} contains the checkpoint to export, {source}. Pass another output.')


def stamp(path: str) -> list[Any]:
    """The identity of an input file, by which an interrupted import is resumed: path, size, modification time in ns."""
    with foreign_errors(path):
        status = os.stat(path)
    return [os.path.abspath(path), status.st_size, status.st_mtime_ns]

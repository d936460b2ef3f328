"""The options, the last step and the result of all converters to T5X's format."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from t5ckpt.catalog.locate import open_target
from t5ckpt.convert.export_options import ImportOptions
from t5ckpt.core.arguments import check_word, given_step
from t5ckpt.core.byte_budget import bytes_of_gb
from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.protocols import Progress
from t5ckpt.core.text import short_repr
from t5ckpt.errors import NoEffectWarning
from t5ckpt.format.codecs import CODECS
from t5ckpt.format.facts import Facts
from t5ckpt.format.names import step_dir
from t5ckpt.planning.casts import Cast
from t5ckpt.planning.save_plan import SaveOptions
from t5ckpt.save.prepare import rehearse, write_stream
from t5ckpt.save.request import STREAM_BYTES, SaveContext, SaveRequest
from t5ckpt.storage import Storage
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.train_state import MAX_STEP


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """The options of a conversion.

    Attributes:
      step: the step of the new checkpoint; None takes the source's.
      save_dtype: floating leaves of ``target`` and ``params`` are cast to it; None casts nothing.
      cast_leaves: a pattern for the whole names, in the new checkpoint, of the leaves that are cast instead.
      compression: as in ``Checkpointer``.
      optimizer: False leaves the optimizer's state out.
      concurrent_gb: gigabytes (10^9 bytes) of values in flight.
      overwrite: replaces a complete checkpoint of the step, after the new one is complete.
      dry_run: reads no tensor and writes nothing; the result describes the conversion.
      progress: called with (bytes done, bytes in all).
    """

    step: int | None = None
    save_dtype: Any = None
    compression: str | None = None
    optimizer: bool = True
    concurrent_gb: float = STREAM_BYTES / 10**9
    overwrite: bool = False
    dry_run: bool = False
    progress: Progress | None = None
    cast_leaves: str | re.Pattern[str] | None = None

    def __post_init__(self) -> None:
        _ = self.cast
        check_word('compression', self.compression, tuple(CODECS))
        bytes_of_gb(self.concurrent_gb)
        step = given_step(self.step)
        if step is not None and step >= MAX_STEP:
            raise ValueError(f'step must be below 10^18, got {step}.')

    @property
    def cast(self) -> Cast | None:
        """The cast, checked."""
        return Cast.of(self.save_dtype, self.cast_leaves, 'save_dtype')

    @property
    def recorded(self) -> dict[str, Any]:
        """The options that change what is written, in JSON types, as a conversion records them beside its source."""
        pattern = self.cast_leaves
        given = {
            'save_dtype': None if self.cast is None else str(self.cast.dtype),
            'cast_leaves': pattern.pattern if isinstance(pattern, re.Pattern) else pattern,
            'compression': self.compression,
            'optimizer': None if self.optimizer else False,
        }
        options = {name: value for name, value in given.items() if value is not None}
        return {'options': options} if options else {}


@dataclasses.dataclass(frozen=True, repr=False)
class Conversion:
    """The result of a conversion or, with ``dry_run``, its description.

    Attributes:
      step: of the checkpoint.
      path: its directory.
      nbytes: bytes of its arrays and its manifest, of Orbax's all files; 0 if nothing was written.
      seconds: the duration.
      mapped: from the name in the source to the name of the leaf.
      added: leaves that the source does not have.
      dropped: names in the source that were left out.
      without_effect: the names of options that had no effect: 'optimizer'.
      left_out: parts of the source that were not converted: items of a step of Orbax, arrays of zarr of unknown dtypes; if the
        result is one of Orbax, positions in the data and pins.
    """

    step: int
    path: str
    nbytes: int
    seconds: float
    mapped: Mapping[str, str]
    added: tuple[str, ...]
    dropped: tuple[str, ...]
    without_effect: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return short_repr(self)


@dataclasses.dataclass(frozen=True)
class Found:
    """A source of a conversion: names, shapes and dtypes, without values.

    Attributes:
      table: the leaves to write.
      step: the source's, or None.
      source: the identity of the source, of JSON's types; an interrupted conversion of the same source is resumed.
      mapped: from the name in the source to the name of the leaf.
      added: leaves that the source does not have.
      dropped: names in the source that are left out.
      files: other files of the step, by name in its directory: the state of a data iterator.
      facts: those to copy: metrics, the keep policy.
      inline: leaves in the source's manifest, which the copy keeps in its manifest whatever their size: T5X cannot restore a
        stored leaf without mesh axes.
      without_effect: the names of options that have no effect.
      left_out: see :class:`Conversion`.
    """

    table: LeafTable
    step: int | None
    source: Mapping[str, Any]
    mapped: Mapping[str, str]
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict[str, bytes])
    facts: Facts = dataclasses.field(default_factory=Facts)
    inline: Collection[Path] = ()
    without_effect: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def warn_no_optimizer(roots: Sequence[str]) -> None:
    """Warns that ``optimizer=False`` found no optimizer state in a tree with these roots."""
    warn_caller(
        NoEffectWarning(
            f"optimizer=False has no effect: no leaf is under 'opt_state', 'param_states' or 'opt'; the tree has "
            f'{", ".join(roots[:8])}. Name other leaves with Changes(drop=...).'
        )
    )


def finish(found: Found, directory: str | os.PathLike[str] | Storage, options: ConvertOptions) -> Conversion:
    """Writes a source as ``checkpoint_<step>`` in a run's directory.

    Raises:
      ValueError: neither the source nor the options have a step.
      CheckpointExistsError, UnsupportedLeafError, StorageError: see ``write_stream``.
    """
    step = found.step if options.step is None else options.step
    if step is None:
        raise ValueError('the path of the source names no step. Pass ConvertOptions(step=...).')
    storage = open_target(directory)
    request = SaveRequest(
        SaveContext(storage, SaveOptions(options.cast, options.compression), progress=options.progress),
        step,
        bytes_of_gb(options.concurrent_gb),
        options.overwrite,
        dataclasses.replace(found.facts, source={**found.source, **options.recorded}),
        found.files,
    )
    t5x_inlines = dict.fromkeys(found.inline, True)
    names = (dict(found.mapped), found.added, found.dropped, found.without_effect, found.left_out)
    if options.dry_run:
        rehearse(found.table, request, t5x_inlines)
        return Conversion(step, storage.url(step_dir(step)), 0, 0.0, *names)
    done = write_stream(found.table, request, t5x_inlines)
    return Conversion(step, done.path, done.nbytes, done.seconds, *names)


def write_import(
    table: LeafTable,
    step: int,
    directory: str | os.PathLike[str],
    options: ImportOptions,
    source: Mapping[str, Any],
) -> str:
    """Writes imported arrays as ``checkpoint_<step>`` in a run's directory, or with ``dry_run`` checks that it could.

    Returns:
      The path of the checkpoint.

    Raises:
      CheckpointExistsError, UnsupportedLeafError, StorageError: see ``write_stream``.
      CheckpointNotFoundError: the directory is the directory of a step.
    """
    storage = open_target(directory)
    context = SaveContext(storage, SaveOptions(options.cast), progress=options.progress)
    request = SaveRequest(context, step, STREAM_BYTES, options.force, Facts(source=source))
    rehearse(table, request)
    return storage.url(step_dir(step)) if options.dry_run else write_stream(table, request).path

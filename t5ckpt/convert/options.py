"""The options and the report of all conversions, exports, imports and copies, and which options each format takes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from t5ckpt.core.arguments import check_flags, check_word, given_step
from t5ckpt.core.byte_budget import bytes_of_gb
from t5ckpt.core.leaf_patterns import Patterns, leaf_pattern
from t5ckpt.core.protocols import Progress
from t5ckpt.core.text import short_repr
from t5ckpt.format.codecs import CODECS
from t5ckpt.planning.casts import Cast
from t5ckpt.planning.leaf_choice import TakenLeaves
from t5ckpt.save.request import STREAM_BYTES
from t5ckpt.translate import CheckpointTranslator
from t5ckpt.tree.train_state import MAX_STEP

_STREAM = frozenset({'concurrent_gb', 'compression', 'cast_leaves'})
_NAMED = frozenset({'cast_leaves', 'take', 'leave'})
COPY = 'a copy'
TAKES: Mapping[str, frozenset[str]] = {
    'tf': _STREAM | _NAMED | {'translator'},
    **dict.fromkeys(('orbax', 'flax', 'seqax', 'zarr', 'safetensors'), _STREAM | _NAMED),
    'hf': _STREAM | {'config', 'scanned', 'split_heads'},
    'to-orbax': _NAMED | {'concurrent_gb'},
    'to-hf': frozenset({'concurrent_gb', 'config', 'max_shard_bytes'}),
    'to-safetensors': _NAMED | {'concurrent_gb'},
    'to-seqax': _NAMED | {'like'},
    COPY: _STREAM | _NAMED | {'rename', 'follow_links', 'trust_files'},
}
"""The options that have an effect for a format. All take ``step``, ``save_dtype``, ``overwrite``, ``dry_run``, ``progress``."""
FORMATS = tuple(TAKES.keys() - {COPY})


@dataclasses.dataclass(frozen=True)
class ConvertOptions(TakenLeaves):
    r"""The options of a conversion or a copy. One that has no effect for a format is an error. Patterns match whole names.

    Attributes:
      step: of the checkpoint in T5X's format: the step to write, None for the source's; with a format 'to-...' the step to read,
        None for the latest.
      save_dtype: floating leaves of ``target`` and ``params``, and all of a Hugging Face model, are cast to it.
      take: patterns of the leaves to convert, by their names in the source; of TensorFlow by those of T5X.
      leave: patterns of the leaves to leave out, although ``take`` matches them, such as :data:`t5ckpt.OPTIMIZER`; of a copy also
        of files of data iterators.
      cast_leaves: patterns of the leaves that are cast instead, by their names in the new checkpoint or file.
      compression: as in ``Checkpointer``.
      concurrent_gb: gigabytes (10^9 bytes) of values in flight.
      overwrite: replaces a complete checkpoint of the step, or the output of an earlier conversion, when the new one is complete.
      dry_run: writes nothing; the report describes the conversion.
      progress: called with (bytes done, bytes in all).
      rename: (pattern, replacement) pairs; in a copy, the first pattern that matches a leaf's name determines its new name, with
        ``\1`` for groups. With ``take=r'opt_state/0/ema/.*'``, ``rename=[(r'opt_state/0/ema/(.*)', r'params/\1')]`` makes moving
        averages the parameters.
      follow_links: follows symbolic links out of a checkpoint to copy, and copies their targets.
      trust_files: copies also a checkpoint with a lost or damaged list of checksums. Then only the checksum of the manifest is
        compared, the values may be wrong, and the copy has new checksums.
      translator: rules for names of TensorFlow; None takes those of T5.
      config: entries of a Hugging Face model's ``config.json`` that the weights do not determine: a mapping, JSON text, or a
        file, such as a model's original ``config.json``. Needed for LongT5 with local attention
        (``{"model_type": "longt5", "encoder_attention_type": "local"}``), which has T5's names, and for another activation
        than relu or gelu (UL2: ``{"feed_forward_proj": "gated-silu"}``).
      max_shard_bytes: the size of a Hugging Face model's files; a larger tensor has a separate file.
      scanned: all layers of a Hugging Face model in one array, as in scalable_t5; None: as before an export, else only of UMT5.
      split_heads: a separate axis for heads; None: as for ``scanned``.
      like: the state that seqax will load into, with the same leaves, which may be jax.ShapeDtypeStruct. It determines which
        parts of a name are attributes and which are keys of dicts; None makes all attributes.
    """

    step: int | None = None
    save_dtype: Any = None
    cast_leaves: Patterns | None = None
    compression: str | None = None
    concurrent_gb: float = STREAM_BYTES / 10**9
    overwrite: bool = False
    dry_run: bool = False
    progress: Progress | None = None
    rename: Sequence[tuple[str | re.Pattern[str], str]] = ()
    follow_links: bool = False
    trust_files: bool = False
    translator: CheckpointTranslator | None = None
    config: Any = None
    max_shard_bytes: int = 5 * 10**9
    scanned: bool | None = None
    split_heads: bool | None = None
    like: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(overwrite=self.overwrite, dry_run=self.dry_run)
        _ = self.cast
        check_word('compression', self.compression, tuple(CODECS))
        step = given_step(self.step)
        if step is not None and step >= MAX_STEP:
            raise ValueError(f'step must be below 10^18, got {step}.')
        _ = self.budget_bytes
        for pattern, new in self.rename:
            try:
                leaf_pattern(pattern, 'rename').sub(new, '')
            except (re.error, IndexError) as error:
                raise ValueError(f'rename: {new!r} does not fit the pattern {pattern!r}: {error}.') from error

    @property
    def cast(self) -> Cast | None:
        """The cast, checked."""
        return Cast.of(self.save_dtype, self.cast_leaves, 'save_dtype')

    @property
    def budget_bytes(self) -> int:
        """The bytes of values in flight, checked."""
        return bytes_of_gb(self.concurrent_gb)

    @property
    def piece_bytes(self) -> int:
        """The bytes of an array that an export reads at once, unless one chunk is larger."""
        return max(1, self.budget_bytes // 4)


def check_options(options: ConvertOptions, kind: str) -> None:
    """Raises ValueError if an option is set that has no effect for a format."""
    taken = {'step', 'save_dtype', 'overwrite', 'dry_run', 'progress'} | TAKES[kind]
    others = [(field.name, field.default) for field in dataclasses.fields(options) if field.name not in taken]
    given = {name: getattr(options, name) for name, _ in others}
    idle = [name for name, default in others if type(given[name]) is not type(default) or given[name] != default]
    if idle:
        raise ValueError(f'{", ".join(idle)}: no effect on {kind}. Leave it out.')


@dataclasses.dataclass(frozen=True, repr=False)
class ConvertReport:
    """The result of a conversion or a copy or, with ``dry_run``, its description.

    Attributes:
      step: of the checkpoint in T5X's format.
      path: the directory or the file that was written.
      nbytes: what was written: bytes of the arrays and the manifest, of an export the values, of Orbax and a copy all files.
      seconds: the duration.
      mapped: from the name in the source, or in an export the name in the output, to the name of the leaf.
      added: leaves that the source does not have.
      dropped: names in the source that were left out.
      left_out: parts of the source that were not converted: items of a step of Orbax, arrays of zarr of unknown dtypes, positions
        in the data, pins, files of other programs.
      files: the files of an export or a copy, relative to ``path`` if that is a directory.
    """

    step: int | None
    path: str
    nbytes: int = 0
    seconds: float = 0.0
    mapped: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    files: Collection[str] = ()

    def __repr__(self) -> str:
        return short_repr(self)

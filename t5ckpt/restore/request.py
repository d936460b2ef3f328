"""The request of one restore."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.core.leaf_path import Path
from t5ckpt.core.protocols import Progress
from t5ckpt.distributed.rounds import CoordinationRound
from t5ckpt.format.dtypes import Cast
from t5ckpt.planning.resizing import Resize
from t5ckpt.reading.open_reader import ReadOptions
from t5ckpt.save.notices import Notices
from t5ckpt.storage import Storage

__all__ = ['RestoreRequest']


@dataclasses.dataclass(frozen=True)
class RestoreRequest:
    """The arguments of a restore without the template; see ``Checkpointer.restore`` for each field.

    With ``only`` the result is a table of these leaves instead of a state.
    """

    storage: Storage
    storage_options: Mapping[str, Any] | None
    round: CoordinationRound
    cast: Cast | None
    progress: Progress | None
    reading: ReadOptions
    notices: Notices
    resize: Resize
    strict: str
    transforms: Sequence[Any]
    step: int | None = None
    path: str | os.PathLike[str] | None = None
    fallback: Mapping[str, Any] | None = None
    lazy: bool = False
    donate: bool = False
    leaves_iterator: bool = False
    only: frozenset[Path] | None = None

"""Keywords of a checkpointer, or of a function that reads a checkpoint, without telling its options apart."""

import dataclasses
from typing import Any

from t5ckpt.options import CheckpointerOptions

_NAMES = frozenset(field.name for field in dataclasses.fields(CheckpointerOptions))


def with_options(**keywords: Any) -> dict[str, Any]:
    """The keywords, with those of ``CheckpointerOptions`` in ``options=``."""
    options = {name: value for name, value in keywords.items() if name in _NAMES}
    others = {name: value for name, value in keywords.items() if name not in _NAMES}
    return others | ({'options': CheckpointerOptions(**options)} if options else {})

"""Maps what decoders of Python raise for damaged bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import CorruptCheckpointError, FormatError

# Also what allocates as much as the header of a list says.
_DAMAGED = (ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError, MemoryError)


@contextlib.contextmanager
def decoding(where: str, cure: str = CURE_OF_DAMAGE) -> Generator[None]:
    """Raises CorruptCheckpointError if bytes are not of their format, or if a value in them has another type.

    ``where`` is added to the text of an error of t5ckpt.
    """
    try:
        yield
    except FormatError as error:
        raise type(error)(f'{where}: {error}') from error
    except _DAMAGED as error:
        raise CorruptCheckpointError(
            f'{where} does not decode ({type(error).__name__}: {error!s:.300}). {cure}'
        ) from error

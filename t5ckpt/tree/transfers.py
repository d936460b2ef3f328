"""Transfers between host and devices under ``jax.transfer_guard``, which forbids those that a program makes by accident."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from t5ckpt.core.loaded import loaded
from t5ckpt.errors import T5CkptError

_DIRECTIONS = ('host_to_device', 'device_to_host', 'device_to_device')


@contextlib.contextmanager
def explicit_transfers() -> Generator[None]:
    """Makes all transfers in a block explicit, as ``jax.device_put`` and ``jax.device_get`` are: the caller of a save wants them.

    Not every JAX function for them has an explicit form (``jax.make_array_from_callback``). The guard is that of the thread.

    Raises:
      T5CkptError: the guard forbids explicit transfers, too ('disallow_explicit').
    """
    jax: Any = loaded('jax')
    if jax is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for direction in _DIRECTIONS:
            if getattr(jax.config, f'jax_transfer_guard_{direction}') in ('disallow', 'log'):
                stack.enter_context(getattr(jax, f'transfer_guard_{direction}')('allow'))
        try:
            yield
        except RuntimeError as error:
            if 'Disallowed' not in str(error):
                raise
            raise T5CkptError(
                f"jax.transfer_guard('disallow_explicit') forbids a transfer of this save or restore: {error!s:.200}. Call it "
                "inside jax.transfer_guard('disallow')."
            ) from error

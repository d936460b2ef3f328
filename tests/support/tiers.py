"""The local tier of a checkpointer, from a directory."""

import t5ckpt


def tier_of(local):
    """A LocalTier as it is; that with the defaults for a path or a Storage."""
    return local if isinstance(local, t5ckpt.LocalTier) else t5ckpt.LocalTier(local)

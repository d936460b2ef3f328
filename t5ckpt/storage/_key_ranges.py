"""Ranges of keys in the order in which an object store lists them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ['after', 'gaps']


def after(prefix: str) -> str:
    """The first key after all keys that begin with a prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def gaps(prefix: str, without: Sequence[str]) -> list[tuple[str, str]]:
    """The ranges of keys that begin with ``prefix`` and are in none of the directories ``without``."""
    starts = [prefix, *(after(directory) for directory in sorted(without))]
    ends = [*sorted(without), after(prefix)]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]

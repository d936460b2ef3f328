"""Keys of a storage: relative paths with slashes."""

from __future__ import annotations

from collections.abc import Iterable


def join(*parts: str) -> str:
    """Joins key components with '/', leaving out empty ones."""
    return '/'.join([stripped for part in parts if (stripped := part.strip('/'))])


def parents_of(keys: Iterable[str]) -> list[str]:
    """The directories of keys, each once and in order; keys without a directory have none."""
    return sorted({key.rpartition('/')[0] for key in keys} - {''})


def is_inside(name: str) -> bool:
    """Whether a relative name that was read from a file stays below its directory, on all operating systems."""
    components = name.split('/')
    return not any(part in ('', '.', '..') or '\0' in part or '\\' in part for part in components)

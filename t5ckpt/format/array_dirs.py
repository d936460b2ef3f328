"""Names the directories of stored arrays. No files are read or written here."""

from __future__ import annotations

import collections
import hashlib
import re
from collections.abc import Iterable

# Other files of a step, see ``format/names.py``, in any case.
_RESERVED = re.compile(r'(?i:(checkpoint|copies\.json|dataset_removed|pinned)$|integrity\.|t5ckpt[-.]|train_ds-)')
# One component of a file key. Slashes, control characters and leading dots are not written to disk.
_SAFE = re.compile(
    rf'(?!{_RESERVED.pattern})[A-Za-z0-9_\-+=@,:~()\[\] ][A-Za-z0-9_.\-+=@,:~()\[\] ]{{0,199}}(?<![. ])(?<!\.__lock)'
)


def array_dirs(names: Iterable[str]) -> dict[str, str]:
    """Assigns a separate directory to each stored leaf.

    Some names get a suffix from a hash of the leaf's name: those that T5X would map to one directory ('a.b/c' and 'a/b.c'), those
    that differ only in case (one file on macOS), and those that no file system accepts ('..', 300 letters). Readers take the
    path from the spec, so they do not depend on this mapping.

    Args:
      names: leaf names or explicit array names, each with '/' between components.

    Returns:
      From the name to the directory, without a trailing slash.
    """
    plain = {name: name.replace('/', '.') for name in names}
    seen = collections.Counter(map(str.casefold, plain.values()))
    return {
        name: text if seen[text.casefold()] == 1 and _SAFE.fullmatch(text) else _hashed(name, text)
        for name, text in plain.items()
    }


def _hashed(name: str, text: str) -> str:
    cleaned = re.sub(r'[^A-Za-z0-9_.\-]', '_', text).strip('.')[:120]
    digest = hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:12]
    # A directory with the prefix of data iterators would be deleted with their files.
    start = 'leaf_' if _RESERVED.match(cleaned) else ''
    return f'{start}{cleaned or "leaf"}~{digest}'

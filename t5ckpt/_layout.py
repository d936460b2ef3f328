"""Names on disk. Pure text: nothing here touches a file.

The layout is T5X's (t5x/checkpoints.py): ``checkpoint_<step>/checkpoint`` is the manifest,
``checkpoint_<step>.tmp-<unix seconds>`` is being written, ``train_ds-SSS-of-NNN*`` is a data iterator's state, and a
stored array lies in the directory of its name with ``/`` turned into ``.``. Ours are ``t5ckpt.json``,
``integrity.<process>.json``, ``DATASET_REMOVED``, which says that the iterator files are gone on purpose,
``checkpoint_<step>.deleted-<unix seconds>``, which is on its way out, ``checkpoint_<step>.damaged-<unix seconds>``, which
could not be restored, and ``held_<step>.<unix seconds>.<who>``, with which a reader asks until that second that the step
not be deleted. On object stores also
``.t5ckpt/steps/<step>`` and ``.t5ckpt/busy/<step>``, see ``_index.py``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable

__all__ = [
    'DATASET_REMOVED',
    'HOLD_PREFIX',
    'INDEX',
    'INDEX_COMPLETE',
    'MANIFEST',
    'PINNED',
    'SIDECAR',
    'STEP_PREFIX',
    'TRAIN_DS_PREFIX',
    'Hold',
    'Leftover',
    'array_dirs',
    'busy_marker',
    'damaged_dir',
    'dataset_prefix',
    'deleted_dir',
    'hold_file',
    'integrity_file',
    'is_inside',
    'is_integrity_file',
    'join',
    'parse_damaged',
    'parse_hold',
    'parse_index',
    'parse_leftover',
    'parse_step_dir',
    'step_dir',
    'step_marker',
    'tmp_dir',
]

MANIFEST = 'checkpoint'
SIDECAR = 't5ckpt.json'
PINNED = 'PINNED'
DATASET_REMOVED = 'DATASET_REMOVED'
TRAIN_DS_PREFIX = 'train_ds'
_OF_OURS = (f'{TRAIN_DS_PREFIX}-', 'integrity.')
STEP_PREFIX = 'checkpoint_'
INDEX = '.t5ckpt'
HOLD_PREFIX = 'held_'
INDEX_COMPLETE = '.t5ckpt/complete'

_INTEGRITY = re.compile(r'integrity\.(0|[1-9][0-9]{0,9})\.json')
_STEP = re.compile(r'checkpoint_(0|[1-9][0-9]{0,17})')
_LEFTOVER = re.compile(r'checkpoint_(0|[1-9][0-9]{0,17})\.(tmp|deleted)-([0-9]{1,12})')
_DAMAGED = re.compile(r'checkpoint_(0|[1-9][0-9]{0,17})\.damaged-[0-9]{1,12}')
_HOLD = re.compile(r'held_(0|[1-9][0-9]{0,17})\.([0-9]{1,12})\.([0-9a-z]{1,32})')
_MARKER = re.compile(r'\.t5ckpt/(steps|busy)/(0|[1-9][0-9]{0,17})')
# One component of a file key. Everything else (a slash, a control character, a leading dot) is not put on disk.
_SAFE = re.compile(r'[A-Za-z0-9_\-+=@,:~()\[\] ][A-Za-z0-9_.\-+=@,:~()\[\] ]*')
_MAX_COMPONENT = 200


@dataclasses.dataclass(frozen=True)
class Leftover:
    """A directory that is no checkpoint: being written, or being deleted, or left by a crash while it was.

    Attributes:
      name: the directory's name.
      step: its step.
      state: ``'tmp'`` or ``'deleted'``.
      unix: the second in the name.
    """

    name: str
    step: int
    state: str
    unix: int


@dataclasses.dataclass(frozen=True)
class Hold:
    """A reader's wish that a step not be deleted.

    Attributes:
      name: the file's name.
      step: the step.
      until: the unix second at which the wish ends.
    """

    name: str
    step: int
    until: int


def join(*parts: str) -> str:
    """Joins key components with '/', leaving out empty ones."""
    return '/'.join(part.strip('/') for part in parts if part.strip('/'))


def is_inside(name: str) -> bool:
    """Whether a relative name from a file stays below the directory it is taken from, on every system."""
    components = name.split('/')
    return not any(part in ('', '.', '..') or '\0' in part or '\\' in part for part in components)


def step_dir(step: int) -> str:
    """The directory's name of a complete checkpoint."""
    return f'checkpoint_{step}'


def tmp_dir(step: int, unix: int) -> str:
    """The directory's name while the checkpoint is being written."""
    return f'checkpoint_{step}.tmp-{unix}'


def deleted_dir(step: int, unix: int) -> str:
    """The directory's name while the checkpoint is being removed."""
    return f'checkpoint_{step}.deleted-{unix}'


def damaged_dir(step: int, unix: int) -> str:
    """The directory's name of a checkpoint that could not be restored and is out of the way."""
    return f'checkpoint_{step}.damaged-{unix}'


def parse_damaged(name: str) -> int | None:
    """The step in :func:`damaged_dir`, or None for any other name."""
    match = _DAMAGED.fullmatch(name)
    return None if match is None else int(match.group(1))


def hold_file(step: int, until: int, who: str) -> str:
    """The file, beside the steps, with which a reader holds a step."""
    return f'held_{step}.{until}.{who}'


def parse_hold(name: str) -> Hold | None:
    """What a hold's name says, or None for any other name."""
    match = _HOLD.fullmatch(name)
    return None if match is None else Hold(name, int(match.group(1)), int(match.group(2)))


def step_marker(step: int) -> str:
    """The key that says that a step was committed."""
    return f'{INDEX}/steps/{step}'


def busy_marker(step: int) -> str:
    """The key that says that a step is being written or deleted, and by whom."""
    return f'{INDEX}/busy/{step}'


def parse_index(key: str) -> tuple[str, int] | None:
    """``('steps', 5)`` or ``('busy', 5)``, or None for any other key."""
    match = _MARKER.fullmatch(key)
    return None if match is None else (match.group(1), int(match.group(2)))


def parse_step_dir(name: str) -> int | None:
    """The step in ``checkpoint_<step>``, or None for any other name."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match.group(1))


def parse_leftover(name: str) -> Leftover | None:
    """What a temporary or deleted directory's name says, or None for any other name."""
    match = _LEFTOVER.fullmatch(name)
    return None if match is None else Leftover(name, int(match.group(1)), match.group(2), int(match.group(3)))


def integrity_file(process: int) -> str:
    """The checksum sidecar of one process."""
    return f'integrity.{process}.json'


def is_integrity_file(name: str) -> bool:
    """Whether a name is that of such a sidecar."""
    return _INTEGRITY.fullmatch(name) is not None


def dataset_prefix(shard_id: int, num_shards: int) -> str:
    """The prefix of a data shard's iterator files, T5X's ``train_ds-000-of-001``."""
    return f'{TRAIN_DS_PREFIX}-{shard_id:03}-of-{num_shards:03}'


def array_dirs(names: Iterable[str]) -> dict[str, str]:
    """Gives each stored leaf a directory of its own.

    Names that T5X would map to one directory ('a.b/c' and 'a/b.c'), that differ only in case (one file on macOS),
    or that no file system takes as they are ('..', 300 letters) get a suffix from a hash of the leaf's name. Readers
    never depend on it: a leaf's path comes from its spec.

    Args:
      names: leaf names or explicit array names, each with '/' between components.

    Returns:
      From the name to the directory, without a trailing slash.
    """
    ordered = list(names)
    plain = {name: name.replace('/', '.') for name in ordered}
    seen: dict[str, int] = {}
    for text in plain.values():
        seen[text.casefold()] = seen.get(text.casefold(), 0) + 1
    return {
        name: text if seen[text.casefold()] == 1 and _is_safe(text) else _hashed(name, text)
        for name, text in plain.items()
    }


def _is_safe(text: str) -> bool:
    return (
        len(text) <= _MAX_COMPONENT
        and _SAFE.fullmatch(text) is not None
        and not text.endswith(('.__lock', '.', ' '))
        and text.casefold() not in {MANIFEST, SIDECAR, PINNED.casefold(), DATASET_REMOVED.casefold()}
        and not text.casefold().startswith(_OF_OURS)
    )


def _hashed(name: str, text: str) -> str:
    cleaned = re.sub(r'[^A-Za-z0-9_.\-]', '_', text).strip('.')[:120]
    digest = hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:12]
    # What begins like a data iterator's file is deleted with them.
    start = 'leaf_' if cleaned.casefold().startswith(_OF_OURS) else ''
    return f'{start}{cleaned or "leaf"}~{digest}'

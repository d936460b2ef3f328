"""Builds and parses the names of files and directories. No files are read or written here.

T5X's names (t5x/checkpoints.py):

    checkpoint_<step>/checkpoint           the manifest
    checkpoint_<step>.tmp-<unix seconds>   a step that is being written
    train_ds-SSS-of-NNN*                   the state of a data iterator
    <leaf's name with . instead of />/     a stored array

t5ckpt's names:

    integrity.<process>.json               the file checksums of a process
    t5ckpt.json                            in the earlier layout, the facts of the step
    copies.json                            in a local directory, the checksums of the files that others upload
    DATASET_REMOVED                        retention has deleted the files of data iterators beside it
    checkpoint_<step>.tmp-<number>         a step that is being written, or was replaced by the one that was
    checkpoint_<step>.deleted-<number>     a step that is being deleted
    checkpoint_<step>.damaged-<unix>       a step that could not be restored
    checkpoint_<step>.foreign-<unix>       a directory with files of other programs that had the name of a step
    checkpoint_<step>/t5ckpt-<hex>/        on object stores, all files of one save but the manifest
    checkpoint_<step>/t5ckpt.<hex>.json    on object stores, in the earlier layout, the facts of one save
    held_<step>.<unix>.<who>s<seconds>     a hold of a reader, for <seconds>, until <unix>: the step is not deleted
    busy_<step>.<unix>.<who>               a marker: the step is being written or deleted, see ``commit/markers.py``
    .t5ckpt/                               on object stores, markers and holds, see ``commit/markers.py``

:func:`foreign_keys` is the only place that decides which files in a step's directory belong to T5X or t5ckpt.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable

from t5ckpt.core.keys import join
from t5ckpt.core.text import numbered

MANIFEST = 'checkpoint'
DAMAGED_MANIFEST = 'checkpoint.damaged'
"""The manifest of a damaged step whose directory cannot be renamed."""
FACTS_FILE = 't5ckpt.json'
"""The facts of a step in the earlier layout."""
COPIES = 'copies.json'
PINNED = 'PINNED'
DATASET_REMOVED = 'DATASET_REMOVED'
TRAIN_DS_PREFIX = 'train_ds-'
STEP_PREFIX = 'checkpoint_'
INDEX = '.t5ckpt'
TIER_RECORD = '.t5ckpt/tier.json'
TO_PERSIST = '.t5ckpt/to_persist'
HOLD_PREFIX = 'held_'
BUSY_PREFIX = 'busy_'

_GENERATION = re.compile(r't5ckpt-[0-9a-f]{16}')
_FILE_CHECKSUMS = re.compile(r'(t5ckpt-[0-9a-f]{16}/)?integrity\.(0|[1-9][0-9]{0,9})\.json')
_HOLD = re.compile(r'held_(0|[1-9][0-9]{0,17})\.([0-9]{1,12})\.[0-9a-f]{16}s([0-9]{1,12})')
_MARKER = re.compile(r'(?:\.t5ckpt/busy/|busy_)(0|[1-9][0-9]{0,17})\.([0-9]{1,12})\.([0-9a-f]{1,16})')
# In an array's directory; '/' may separate the indices of a chunk.
_IN_ARRAY = re.compile(r'\.zarray|[0-9]+([./][0-9]+)*')
# The metadata of an array may be deleted already, or not written yet.
_OWN = re.compile(
    r'checkpoint(\.damaged)?|copies\.json|PINNED|DATASET_REMOVED|t5ckpt(\.[0-9a-f]{16})?\.json|integrity\.(0|[1-9][0-9]{0,9})\.json'
    r'|(?s:train_ds-.*)|[^/]+/(\.zarray|[0-9]+(\.[0-9]+)*)'
)
PARTIAL_SUFFIX = '.__partial'
# Of ``storage/file.py``, of ``storage/direct_io.py``, and of TensorStore.
_PARTIAL = re.compile(r'((_[0-9a-f]{1,16})?\.__lock)?(\.[0-9a-f]{8}\.__partial)?$')


@dataclasses.dataclass(frozen=True)
class Hold:
    """A file with which a reader keeps a step from being deleted.

    Attributes:
      name: of the file.
      step: the number of the step.
      until: the expiry, in unix seconds of the reader's clock.
      seconds: the duration.
    """

    name: str
    step: int
    until: int
    seconds: int


@dataclasses.dataclass(frozen=True)
class MarkerName:
    """The name of a marker of a process that writes or deletes a step.

    Attributes:
      key: the file's.
      step: the step.
      due: when other processes may remove what the work has left, in unix seconds.
      nonce: hexadecimal digits that no other marker has.
    """

    key: str
    step: int
    due: int
    nonce: str


def _number_in(pattern: str) -> Callable[[str], int | None]:
    """A parser of names that match a pattern, to the number in its first group with one."""
    fullmatch = re.compile(pattern).fullmatch
    return lambda name: None if (match := fullmatch(name)) is None else int(match[match.lastindex or 0])


parse_step_dir = _number_in(r'checkpoint_(0|[1-9][0-9]{0,17})')
"""The step in ``checkpoint_<step>``, or None for any other name."""
parse_step_name = _number_in(r'([0-9]{1,18})|checkpoint_(0|[1-9][0-9]{0,17})')
"""The step in ``checkpoint_<step>`` or in ``<step>``, the name in an Orbax CheckpointManager; else None."""
parse_padded_step = _number_in(r'checkpoint_(0[0-9]{1,17})')
"""The step in ``checkpoint_<step>`` with leading zeros, which T5X lists as the step; else None."""
parse_prefixed_step = _number_in(r'(?:[A-Za-z][A-Za-z0-9_\-]*[_\-])?([0-9]{1,18})')
"""The step in the names of :func:`parse_step_name`, in ``<prefix>_<step>`` or ``<prefix>-<step>``; else None.

Other directories may have such names; callers check that Orbax or Levanter wrote the directory.
"""


def step_dir(step: int, digits: int = 0) -> str:
    """The directory of a complete checkpoint; ``digits`` pads the number with zeros, as T5X can list but not write it."""
    return f'checkpoint_{step:0{digits}d}'


def flax_number(name: str) -> float | None:
    """The number in the name of a file that Flax wrote for a step that is not an integer of at least 0, else None."""
    try:
        is_other = name.startswith(STEP_PREFIX) and parse_step_dir(name) is None
        return float(name.removeprefix(STEP_PREFIX)) if is_other else None
    except ValueError:
        return None


def aside_dir(step: int, state: str, unix: int) -> str:
    """The directory of a step that no listing shows.

    Args:
      step: its number.
      state: 'tmp' while it is written, 'deleted' while it is deleted; 'damaged' for one that could not be restored, and
        'foreign' for one with files of other programs, which were renamed.
      unix: the time, in unix seconds; of the first two, a number of their own.
    """
    return f'checkpoint_{step}.{state}-{unix}'


def hold_file(step: int, until: int, seconds: int, nonce: str) -> str:
    """The file of a hold, in the run's directory or, on object stores, in ``.t5ckpt/``.

    It lasts ``seconds``, ``until`` a time of the reader's clock; ``nonce`` is 16 hexadecimal digits that no other hold has.
    """
    return f'held_{step}.{until}.{nonce}s{seconds}'


def parse_hold(name: str) -> Hold | None:
    """Parses :func:`hold_file`; None for any other name."""
    match = _HOLD.fullmatch(name)
    return None if match is None else Hold(name, *map(int, match.groups()))


def to_persist_file(step: int) -> str:
    """The file of a local directory that says that a step waits for its upload."""
    return f'{TO_PERSIST}/{step}'


def busy_key(step: int, due: int, nonce: str, *, in_bucket: bool) -> str:
    """The key of a marker: the step is being written or deleted."""
    return f'{f"{INDEX}/busy/" if in_bucket else BUSY_PREFIX}{step}.{due}.{nonce}'


def work_dirs(step: int, nonce: str) -> tuple[str, str]:
    """The directories of the owner of a marker, where they can be renamed: of a new step, and of one that it hides."""
    return aside_dir(step, 'tmp', int(nonce, 16)), aside_dir(step, 'deleted', int(nonce, 16))


def parse_marker(key: str) -> MarkerName | None:
    """Parses :func:`busy_key`; None for any other key."""
    match = _MARKER.fullmatch(key)
    return None if match is None else MarkerName(key, int(match[1]), int(match[2]), match[3])


def file_checksums_name(process: int) -> str:
    """The file with the file checksums of one process."""
    return f'integrity.{process}.json'


def is_file_checksums(name: str) -> bool:
    """Whether a name is a :func:`file_checksums_name`."""
    return _FILE_CHECKSUMS.fullmatch(name) is not None


def generation_dir(nonce: str) -> str:
    """The directory, below the step's, of one save on an object store; ``nonce`` is 16 hexadecimal digits of no other save."""
    return f't5ckpt-{nonce}'


def generation_of(key: str) -> str:
    """The first component of a key where it is a :func:`generation_dir`, else ''."""
    top = key.partition('/')[0]
    return top if _GENERATION.fullmatch(top) else ''


def without_generation(key: str) -> str:
    """A key of a step without its :func:`generation_dir`."""
    return key.removeprefix(f'{generation_of(key)}/')


def is_position(key: str) -> bool:
    """Whether a file of a step is the state of a data iterator, under T5X's name or in a :func:`generation_dir`."""
    return without_generation(key).startswith(TRAIN_DS_PREFIX)


def removal_marks(files: Collection[str]) -> set[str]:
    """The names of the files that say that the states of data iterators beside them are gone on purpose."""
    return {join(generation_of(file), DATASET_REMOVED) for file in files}


def positions_for_t5x(keys: Collection[str]) -> dict[str, str]:
    """From T5X's name of the state of a data iterator to the key of the save's own, for those in a :func:`generation_dir`."""
    return {without_generation(key): key for key in keys if generation_of(key) and is_position(key)}


def part_of(lists: Collection[str], names: Collection[str]) -> str | None:
    """The process whose part of a step a local directory has, as 'process 2 of 4'; None if it has the lists of all processes.

    Args:
      lists: the files with the file checksums of all processes.
      names: the files in the directory.
    """
    indices = [index for index in range(len(lists)) if file_checksums_name(index) in names]
    if len(indices) == len(lists):
        return None
    if not indices:
        return f'copies of the files of {len(lists)} processes'
    return f'{numbered("process", indices, "processes")} of {len(lists)}'


def dataset_prefix(shard_id: int, num_shards: int) -> str:
    """The prefix of a data shard's iterator files, T5X's ``train_ds-000-of-001``."""
    return f'{TRAIN_DS_PREFIX}{shard_id:03}-of-{num_shards:03}'


def foreign_keys(keys: Iterable[str]) -> list[str]:
    """The files in a step's directory that neither T5X nor t5ckpt writes, decided by their names.

    T5X and t5ckpt write the manifest, the facts, the file checksums, ``PINNED``, ``DATASET_REMOVED``, names that begin with
    ``train_ds-``, and metadata and chunks in the directories of arrays; all also in a :func:`generation_dir`.

    Args:
      keys: all files of the directory, relative to it.
    """
    names = {key: _PARTIAL.sub('', without_generation(key)) for key in keys}
    arrays = {name.removesuffix('/.zarray') for name in names.values() if name.endswith('/.zarray')}
    # T5X and t5ckpt put every array directly below the step. A manifest may name deeper ones.
    if not any(key in (MANIFEST, FACTS_FILE) or generation_of(key) for key in names):
        arrays = {array for array in arrays if '/' not in array}
    return [key for key, name in names.items() if not (_OWN.fullmatch(name) or _is_in(arrays, name))]


def _is_in(arrays: Collection[str], name: str) -> bool:
    """Whether a file is the metadata or a chunk of one of these arrays."""
    return any(
        name[: slash.start()] in arrays and _IN_ARRAY.fullmatch(name, slash.end()) for slash in re.finditer('/', name)
    )

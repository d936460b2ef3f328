"""Builds and parses the names of files and directories. No files are read or written here.

T5X's names (t5x/checkpoints.py):

    checkpoint_<step>/checkpoint           the manifest
    checkpoint_<step>.tmp-<unix seconds>   a step that is being written
    train_ds-SSS-of-NNN*                   the state of a data iterator
    <leaf's name with . instead of />/     a stored array

t5ckpt's names:

    integrity.<process>.json               the file checksums of a process
    t5ckpt.json                            the facts: before the commit those of its writer; in the earlier layout, of the step
    copies.json                            in a local directory, the checksums of the files that others upload
    DATASET_REMOVED                        retention has deleted the files of data iterators beside it
    checkpoint_<step>.deleted-<unix>       a step that is being deleted
    checkpoint_<step>.replaced-<unix>      the old or the new step during a replacement
    checkpoint_<step>.damaged-<unix>       a step that could not be restored
    checkpoint_<step>.foreign-<unix>       a directory with files of other programs that had the name of a step
    checkpoint_<step>/t5ckpt-<hex>/        on object stores, all files of one save but the manifest
    checkpoint_<step>/t5ckpt.<hex>.json    on object stores, in the earlier layout, the facts of one save
    held_<step>.<unix>.<who>s<seconds>     a hold of a reader, for <seconds>, until <unix>: the step is not deleted
    deleting_<step>.<who>                  a marker: the step is about to be hidden or replaced
    .t5ckpt/                               on object stores, markers and holds, see ``catalog/bucket_catalog.py``

:func:`foreign_keys` is the only place that decides which files in a step's directory belong to T5X or t5ckpt.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable

from t5ckpt.core.keys import join
from t5ckpt.core.text import numbered

MANIFEST = 'checkpoint'
DAMAGED_MANIFEST = 'checkpoint.damaged'
"""The manifest of a damaged step whose directory cannot be renamed."""
FACTS_FILE = 't5ckpt.json'
"""The facts of an unfinished directory, which name its writer; in the earlier layout also those of a step."""
COPIES = 'copies.json'
PINNED = 'PINNED'
DATASET_REMOVED = 'DATASET_REMOVED'
TRAIN_DS_PREFIX = 'train_ds-'
STEP_PREFIX = 'checkpoint_'
GENERATION_PREFIX = 't5ckpt-'
INDEX = '.t5ckpt'
TIER_RECORD = '.t5ckpt/tier.json'
TO_PERSIST = '.t5ckpt/to_persist'
HOLD_PREFIX = 'held_'
DELETING_PREFIX = 'deleting_'

_GENERATION = re.compile(r't5ckpt-[0-9a-f]{16}')
_BUCKET_FACTS_FILE = re.compile(r't5ckpt\.[0-9a-f]{16}\.json')
_FILE_CHECKSUMS = re.compile(r'(t5ckpt-[0-9a-f]{16}/)?integrity\.(0|[1-9][0-9]{0,9})\.json')
_STEP = re.compile(r'checkpoint_(0|[1-9][0-9]{0,17})')
_PADDED = re.compile(r'checkpoint_(0[0-9]{1,17})')
_LEFTOVER = re.compile(r'checkpoint_(0|[1-9][0-9]{0,17})\.(tmp|deleted|replaced)-([0-9]{1,12})')
_DAMAGED = re.compile(r'checkpoint_(0|[1-9][0-9]{0,17})\.damaged-[0-9]{1,12}')
_FOREIGN = re.compile(r'checkpoint_(0|[1-9][0-9]{0,17})\.foreign-[0-9]{1,12}')
_HOLD = re.compile(r'held_(0|[1-9][0-9]{0,17})\.([0-9]{1,12})\.[0-9a-f]{16}s([0-9]{1,12})')
_NUMBER = re.compile(r'[0-9]{1,18}')
_PREFIXED = re.compile(r'[A-Za-z][A-Za-z0-9_\-]*[_\-]([0-9]{1,18})')
_MARKER = re.compile(r'(?:\.t5ckpt/busy/|deleting_)(0|[1-9][0-9]{0,17})(?:\.([0-9]{1,12}))?\.[0-9a-z]{1,32}')
# A chunk in its array's directory; '/' may be the separator.
_CHUNK = re.compile(r'[0-9]+(\.[0-9]+)*')
_NESTED_CHUNK = re.compile(r'[0-9]+([./][0-9]+)*')
_ARRAY_METADATA = '.zarray'
PARTIAL_SUFFIX = '.__partial'
_PARTIAL = (PARTIAL_SUFFIX, '.__lock')


@dataclasses.dataclass(frozen=True)
class Leftover:
    """The directory of a write, deletion or replacement that is in progress or was interrupted by a crash.

    Attributes:
      name: of the directory.
      step: the number of its step.
      state: ``'tmp'``, ``'deleted'`` or ``'replaced'``.
      unix: the time in the name, in unix seconds.
    """

    name: str
    step: int
    state: str
    unix: int


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
      due: on an object store, when other processes may remove what the work has left, in unix seconds.
    """

    key: str
    step: int
    due: int = 0


def step_dir(step: int, digits: int = 0) -> str:
    """The directory of a complete checkpoint; ``digits`` pads the number with zeros, as T5X can list but not write it."""
    return f'checkpoint_{step:0{digits}d}'


def flax_number(name: str) -> float | None:
    """The number in the name of a file that Flax wrote for a step that is not an integer of at least 0, else None."""
    try:
        is_other = name.startswith(STEP_PREFIX) and _STEP.fullmatch(name) is None
        return float(name.removeprefix(STEP_PREFIX)) if is_other else None
    except ValueError:
        return None


def aside_dir(step: int, state: str, unix: int) -> str:
    """The directory of a step that no listing shows.

    Args:
      step: its number.
      state: 'tmp' while it is written, 'deleted' while it is deleted, 'replaced' for the old or the new checkpoint of a
        replacement; 'damaged' for one that could not be restored, and 'foreign' for one with files of other programs, which
        were renamed.
      unix: the time, in unix seconds.
    """
    return f'checkpoint_{step}.{state}-{unix}'


def _number_in(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    return None if match is None else int(match[1])


def parse_damaged(name: str) -> int | None:
    """The step in an :func:`aside_dir` of state 'damaged', or None for any other name."""
    return _number_in(_DAMAGED, name)


def parse_foreign(name: str) -> int | None:
    """The step in an :func:`aside_dir` of state 'foreign', or None for any other name."""
    return _number_in(_FOREIGN, name)


def hold_file(step: int, until: int, seconds: int, nonce: str) -> str:
    """The file of a hold, in the run's directory or, on object stores, in ``.t5ckpt/``.

    It lasts ``seconds``, ``until`` a time of the reader's clock; ``nonce`` is 16 hexadecimal digits that no other hold has.
    """
    return f'held_{step}.{until}.{nonce}s{seconds}'


def parse_hold(name: str) -> Hold | None:
    """Parses :func:`hold_file`; None for any other name."""
    match = _HOLD.fullmatch(name)
    return None if match is None else Hold(name, int(match[1]), int(match[2]), int(match[3]))


def to_persist_file(step: int) -> str:
    """The file of a local directory that says that a step waits for its upload."""
    return f'{TO_PERSIST}/{step}'


def busy_key(step: int, due: int, nonce: str) -> str:
    """The key of a marker on an object store: the step is being written or deleted."""
    return f'{INDEX}/busy/{step}.{due}.{nonce}'


def deleting_file(step: int, nonce: str) -> str:
    """The file of a marker on storage that can rename: the step is about to be hidden or replaced."""
    return f'{DELETING_PREFIX}{step}.{nonce}'


def parse_marker(key: str) -> MarkerName | None:
    """Parses :func:`busy_key` or :func:`deleting_file`; None for any other key."""
    match = _MARKER.fullmatch(key)
    return None if match is None else MarkerName(key, int(match[1]), int(match[2] or 0))


def parse_step_dir(name: str) -> int | None:
    """The step in ``checkpoint_<step>``, or None for any other name."""
    return _number_in(_STEP, name)


def parse_step_name(name: str) -> int | None:
    """The step in ``checkpoint_<step>`` or in ``<step>``, the name in an Orbax CheckpointManager; else None."""
    return int(name) if _NUMBER.fullmatch(name) else parse_step_dir(name)


def parse_padded_step(name: str) -> int | None:
    """The step in ``checkpoint_<step>`` with leading zeros, which T5X lists as the step; else None."""
    return _number_in(_PADDED, name)


def parse_prefixed_step(name: str) -> int | None:
    """The step in the names of :func:`parse_step_name`, in ``<prefix>_<step>`` or ``<prefix>-<step>``; else None.

    Other directories may have such names; callers check that Orbax or Levanter wrote the directory.
    """
    match = _PREFIXED.fullmatch(name)
    return parse_step_name(name) if match is None else int(match.group(1))


def parse_leftover(name: str) -> Leftover | None:
    """Parses an :func:`aside_dir` of the first three states; None for any other name."""
    match = _LEFTOVER.fullmatch(name)
    return None if match is None else Leftover(name, int(match.group(1)), match.group(2), int(match.group(3)))


def file_checksums_name(process: int) -> str:
    """The file with the file checksums of one process."""
    return f'integrity.{process}.json'


def is_file_checksums(name: str) -> bool:
    """Whether a name is a :func:`file_checksums_name`."""
    return _FILE_CHECKSUMS.fullmatch(name) is not None


def generation_dir(nonce: str) -> str:
    """The directory, below the step's, of one save on an object store; ``nonce`` is 16 hexadecimal digits of no other save."""
    return f'{GENERATION_PREFIX}{nonce}'


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


def is_removal_mark(key: str) -> bool:
    """Whether a file says that the states of data iterators beside it are gone on purpose."""
    return without_generation(key) == DATASET_REMOVED


def removal_marks(files: Collection[str]) -> set[str]:
    """The names of the marks beside some files, see :func:`is_removal_mark`."""
    return {join(generation_of(file), DATASET_REMOVED) for file in files}


def positions_for_t5x(keys: Collection[str]) -> dict[str, str]:
    """From T5X's name of the state of a data iterator to the key of the save's own, for those in a :func:`generation_dir`."""
    return {without_generation(key): key for key in keys if generation_of(key) and is_position(key)}


def facts_file_of(manifest_checksum: str) -> str:
    """The file with the facts beside the manifest with this xxh3-64, on an object store in the earlier layout."""
    return f't5ckpt.{manifest_checksum}.json'


def is_bucket_facts_file(name: str) -> bool:
    """Whether :func:`facts_file_of` returns a name for some manifest."""
    return _BUCKET_FACTS_FILE.fullmatch(name) is not None


def is_facts_file(name: str) -> bool:
    """Whether a name is that of a file with facts."""
    return name == FACTS_FILE or is_bucket_facts_file(name)


def superseded(keys: Collection[str], current_files: Collection[str]) -> set[str]:
    """The files in a step's directory that belong to another checkpoint, or to a save that was not committed.

    Args:
      keys: all files of the directory, relative to it.
      current_files: those of the current checkpoint, from its file checksums and its facts, and the file with the facts.
    """
    if not any(generation_of(key) or is_bucket_facts_file(key) for key in keys):
        return set()
    of_step = {MANIFEST, PINNED, *current_files, *removal_marks(current_files), *positions_for_t5x(current_files)}
    return {*keys} - of_step - {*foreign_keys(keys)}


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


def part_text(where: str, part: str) -> str:
    """The error that a directory has only a part of a step, see :func:`part_of`."""
    return (
        f'{where} is the part of {part}: the other files are on the disks of the other processes. Restore it in a job of several '
        'processes (or of one, if it has all chunks) with Checkpointer(local_dir=...), or read the copy in checkpoints_dir.'
    )


def dataset_prefix(shard_id: int, num_shards: int) -> str:
    """The prefix of a data shard's iterator files, T5X's ``train_ds-000-of-001``."""
    return f'{TRAIN_DS_PREFIX}{shard_id:03}-of-{num_shards:03}'


def foreign_keys(keys: Iterable[str]) -> list[str]:
    """The files in a step's directory that neither T5X nor t5ckpt writes, decided by their names.

    T5X and t5ckpt write the manifest, the files with facts, the file checksums, ``PINNED``, ``DATASET_REMOVED``, names that begin
    with ``train_ds-``, and metadata and chunks in the directories of arrays; all also in a :func:`generation_dir`.

    Args:
      keys: all files of the directory, relative to it.
    """
    keys = list(keys)
    names = [without_generation(key) for key in keys]
    is_step = any(key == MANIFEST or is_facts_file(key) or generation_of(key) for key in keys)
    arrays = {key.removesuffix(f'/{_ARRAY_METADATA}') for key in names if key.endswith(f'/{_ARRAY_METADATA}')}
    # T5X and t5ckpt put every array directly below the step. A manifest may name deeper ones.
    arrays = {array for array in arrays if is_step or '/' not in array}
    return [key for key, name in zip(keys, names, strict=True) if not _is_own(name, arrays)]


def _is_own(key: str, arrays: Collection[str]) -> bool:
    for suffix in _PARTIAL:
        key = key.removesuffix(suffix)
    top, slash, _ = key.partition('/')
    if is_position(key) or is_file_checksums(key):
        return True
    if not slash:
        return top in (MANIFEST, DAMAGED_MANIFEST, COPIES, PINNED, DATASET_REMOVED) or is_facts_file(top)
    directory, _, name = key.rpartition('/')
    if name == _ARRAY_METADATA:
        return directory in arrays or '/' not in directory
    if _CHUNK.fullmatch(name) and ('/' not in directory or directory in arrays):
        # The metadata may be deleted already, or not written yet.
        return True
    parents = [directory[: match.start()] for match in re.finditer('/', directory)]
    return any(array in arrays and _NESTED_CHUNK.fullmatch(key[len(array) + 1 :]) for array in parents)

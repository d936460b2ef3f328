"""Finds the checkpoint of a path or of a step as a ``Located``, or raises an error that lists the contents of the directory.

``catalog/listing.py`` lists the steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from t5ckpt.catalog.layouts import (
    T5X,
    ListedStep,
    inspect_name,
    is_checkpoint,
    is_orbax,
    is_state_file,
    is_zarr_tree,
    readable,
)
from t5ckpt.catalog.listing import checkpoint_around, inspect_step, listing, newest, newest_and_passed, step_of
from t5ckpt.core.arguments import check_flags, given_step
from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.keys import join
from t5ckpt.core.text import counted, some_of
from t5ckpt.errors import CheckpointNotFoundError, NoEffectWarning, StorageError, T5CkptError, UnsupportedFormatError
from t5ckpt.format.names import MANIFEST, flax_number, parse_prefixed_step, parse_step_dir, step_dir
from t5ckpt.format.safetensors import FLAX_WHOLE, SHARD, WHOLE_NAMES, is_tensor_file
from t5ckpt.storage import AbsentStorage, PathOrStorage, Storage, open_storage, split_path

_log = logging.getLogger('t5ckpt')

# The structure that pytree_serialization of JAX writes beside its arrays.
_JAX_TREE = 'pytreedef.json'
_READ = (
    'restore(path=...) and open_checkpoint read it, t5ckpt show lists it, t5ckpt convert {} makes a checkpoint of it'
)
_AS_INIT = ', as the init_fn of restore_or_init (docs/migration.md)'
# A listing for each is a request to a bucket.
_MAX_BELOW = 20
# The names of unfinished and damaged steps, of T5X or Orbax, and hidden names.
_LEFTOVER = re.compile(r'\.|.*\.(orbax-checkpoint-tmp|partial_save)|checkpoint_([0-9]+\.[a-z]|tmp$)', re.DOTALL)
_MODEL = re.compile(r'model\.safetensors|flax_model\.msgpack|.*\.(safetensors|msgpack)\.index\.json')
_STEP = re.compile(r'(?:step[_-])?([0-9]+)')
# What other programs write: the name of the file, or of a file in a step's directory; what it is; and what to do.
_FOREIGN = (
    (
        r'(.*/)?(\.metadata|[^/]*\.distcp)',
        'a file of torch.distributed.checkpoint (DCP), as torchtitan saves with it',
        'its metadata is a pickle and is not read. Load it with PyTorch and save safetensors',
    ),
    (r'.*/gda', 'a directory of axlearn', "it is in axlearn's own layout and is not read. Load it with axlearn"),
    (
        r'\.zgroup|.*/\.zattrs',
        'a file of a zarr group, such as a step of seqax',
        't5ckpt convert seqax converts such a step',
    ),
    (r'.*\.partial_save(\.pending_.*)?', 'a partial save of Orbax', 'ocp.partial.finalize completes it'),
    (
        r'[0-9]{8}T[0-9]{6}F[0-9]{6}(-[0-9]+)?',
        'a save of elements.Checkpoint (DreamerV3)',
        'its states are pickles and are not read. Load them with elements',
    ),
    (_JAX_TREE, "a file of JAX's pytree_serialization", f'load its directory with JAX{_AS_INIT}'),
    (r'\.zarray|zarr\.json', 'one array of zarr, or an empty group', 'the directory above an array opens as a tree'),
    (r'.*\.safetensors\.index\..*json', 'a safetensors file', _READ.format('safetensors')),
    (
        r'.*-[0-9]+-of-[0-9]+\.safetensors',
        'one of several safetensors files',
        'copy their index (.safetensors.index.json), too, and pass the index',
    ),
    (r'.*\.safetensors', 'a safetensors file', _READ.format('safetensors')),
    (r'.*\.np[yz]', 'a file of NumPy', f'load it with numpy.load{_AS_INIT}'),
    (
        r'.*\.msgpack\.index\.json',
        'an index of Flax weights',
        'convert it (t5ckpt convert flax)',
    ),
    (
        r'.*\.eqx',
        'a file of Equinox, in which leaves have no names',
        f'load it with equinox.tree_deserialise_leaves{_AS_INIT}',
    ),
    (r'.*\.(index|data-00000-of-00001)', 'a file of TensorFlow', 'convert it (t5ckpt convert tf)'),
    (r'.*\.(h5|hdf5)', 'an HDF5 file', f'load it with the library that wrote it{_AS_INIT}'),
    (r'.*\.keras', 'a model of Keras', f'load it with keras.saving.load_model{_AS_INIT}'),
    (r'.*\.(pkl|pickle)', 'a pickle, which can run any code and is not read', f'load it{_AS_INIT}'),
    (
        r'.*\.(bin|pt|pth)',
        'a PyTorch file',
        'load it with PyTorch and save safetensors (it needs pickle and is not read)',
    ),
    (r'attributes\.json', 'a file of N5 arrays', 'TensorStore reads them'),
    (r'.*\.(zip|tar|gz|tgz|bz2|xz|zst)', 'an archive or a compressed file', 'unpack it, and pass the result'),
)
# The first bytes of some of these files, and their usual name.
_BEGINNINGS = {
    rb'\x89HDF': '.h5',
    rb'\x80[\x04\x05]\x95': '.pkl',
    rb'PK\x03\x04.{,200}data\.pkl': '.pt',
    rb'PK\x03\x04|\x1f\x8b|\x28\xb5\x2f\xfd': '.zip',
}


@dataclasses.dataclass(frozen=True)
class Located:
    """A checkpoint in a storage; nothing of it has been read but its directory's name.

    Attributes:
      storage: its root is the parent of the checkpoint's directory.
      directory: the checkpoint's directory, a key of ``storage``; '' if the manifest is at the root.
      manifest: the name of the manifest's file; '' in an Orbax directory without one.
      step: from the directory's name, or None.
      follow_links: whether symbolic links may lead out of the directory.
    """

    storage: Storage
    directory: str
    manifest: str
    step: int | None
    follow_links: bool = False

    def step_to_write(self) -> int:
        """The step, for a copy.

        Raises:
          UnsupportedFormatError: there is none in the directory's name.
        """
        if self.step is None:
            raise UnsupportedFormatError(
                f'{self.url}: its directory has no step in its name, so the copy would have none. Rename it to '
                '"checkpoint_<step>".'
            )
        return self.step

    @property
    def url(self) -> str:
        """The path or URL of the manifest, or of the directory without one."""
        return self.storage.url(join(self.directory, self.manifest))


def with_links(located: Located, follow_links: bool) -> Located:
    """Sets ``follow_links``; warns on a storage that has no links."""
    check_flags(follow_links=follow_links)
    if follow_links and not located.storage.is_file_system:
        warn_caller(NoEffectWarning(no_links_text(located)))
    return dataclasses.replace(located, follow_links=follow_links or located.follow_links)


def no_links_text(located: Located) -> str:
    """The warning for ``follow_links`` on a storage without links."""
    return f'follow_links has no effect: {located.storage.url()} is not on a local file system and has no links. Leave it out.'


def open_run_storage(path: PathOrStorage, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """Opens a run's directory, which need not exist. For an empty path, returns a storage that raises when it is used.

    Raises:
      CheckpointNotFoundError: the directory is a step of a run or is inside one, so that its checkpoints would be deleted
        with that step.
    """
    if isinstance(path, (str, bytes, os.PathLike)) and not os.fspath(path):
        return AbsentStorage()
    storage = open_storage(path, storage_options)
    directory = checkpoint_around(storage, storage_options)
    if directory is not None:
        raise _in_checkpoint(storage, directory)
    return storage


def _in_checkpoint(storage: Storage, directory: str) -> CheckpointNotFoundError:
    here = storage.url().rstrip('/')
    what = 'is a checkpoint' if here == directory else f'is in the checkpoint {directory}'
    return CheckpointNotFoundError(
        f'{here} {what}, not a run. Pass the directory of the run, such as {directory.rpartition("/")[0]}, or another one; '
        'restore(path=...) and t5ckpt show read the checkpoint.'
    )


def refuse_other_contents(storage: Storage, *, marks: bool = True) -> None:
    """Raises an error for a path that holds something else than a run; not for a run, and where a new one may begin.

    Whatever begins a run or writes a step calls it, so that a path of the wrong level begins no second run in silence. The files
    decide, with links resolved; a name decides only where there are none. ``open_run_storage`` has refused a path inside a
    checkpoint.

    Args:
      storage: the path.
      marks: also refuses a file, incomplete steps and trees of zarr arrays; a copy or a conversion may write beside these, and
        fails itself for a file.

    Raises:
      T5CkptError: it names what the path holds, and the path to pass.
    """
    if marks and storage.root_kind() == 'file':
        raise no_checkpoint(storage)
    if newest(storage) is not None:
        return
    contents = contents_of_new_run(storage)
    mark = _mark(storage) if marks and not contents else ''
    # The first step may have been committed meanwhile.
    if (contents or mark) and newest(storage) is None:
        raise no_checkpoint(storage, *filter(None, [mark, 'To start a run, pass another directory.']))


def contents_of_new_run(storage: Storage) -> list[str]:
    """The checkpoints, the models and a step of another trainer at a path without steps, where a trainer begins a run.

    Raises:
      CheckpointNotFoundError: the path is a checkpoint, or has the name of a step.
    """
    where = storage.url().rstrip('/')
    parent, _, name = where.rpartition('/')
    entries = storage.entries()
    if entries and is_checkpoint(storage, ''):
        raise _in_checkpoint(storage, where)
    # Also 'checkpoint_7.tmp-...' and the like.
    if parse_step_dir(name.partition('.')[0]) is not None:
        raise no_checkpoint(
            storage, f'It is the path of a step, not of a run. Pass the directory of the run, {parent}.'
        )
    if not entries:
        if name != name.strip() and storage.root_kind() is None:
            raise no_checkpoint(storage, f'It has white space around its name. Pass {parent}/{name.strip()}.')
        return []
    models = [entry.name for entry in entries if _MODEL.fullmatch(entry.name)]
    # A broken step of the run itself does not count: a save replaces it.
    others = [each for each in openable_below(storage) if parse_step_dir(each) is None]
    return others + models + _steps_of_others(storage)


def _mark(storage: Storage) -> str:
    """Says why a directory without checkpoints is not a place for a new run; '' if nothing speaks against it."""
    entries = storage.entries()
    # A user's files beside an array are no tree of a checkpoint.
    is_bare = all(entry.is_dir or entry.name.startswith('.z') for entry in entries)
    if is_bare and is_zarr_tree(storage, storage.url().rstrip('/').rpartition('/')[2]):
        return 'It is a directory tree of zarr arrays, not a run, and restore(path=...) and t5ckpt show read it.'
    if storage.orbax_commits and any(entry.is_dir and is_orbax(storage, entry.name) for entry in entries):
        return 'Steps of Orbax lack commit_success.txt, the mark of a complete one here. If a copy has lost it, write it again.'
    # In a bucket, interrupted saves leave files under the name of the step.
    steps = [entry for entry in entries if storage.commits_by_rename and parse_step_dir(entry.name) is not None]
    is_broken = any(not entry.is_dir or storage.entries(entry.name) for entry in steps)
    return 'Its steps are incomplete: move them away to start a new run here.' if is_broken else ''


def log_other_contents(storage: Storage) -> None:
    """Logs, for a run without steps, what :func:`refuse_other_contents` will refuse at its first save."""
    try:
        refuse_other_contents(storage, marks=False)
    except T5CkptError as error:
        _log.warning('t5ckpt: %s', error)


def open_target(path: PathOrStorage, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """Opens the directory of a run to write steps to.

    Raises:
      CheckpointNotFoundError: it holds something else, see :func:`refuse_other_contents`.
    """
    storage = open_run_storage(path, storage_options)
    refuse_other_contents(storage, marks=False)
    return storage


def locate(
    path: PathOrStorage,
    step: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    *,
    tensors: bool = False,
) -> Located:
    """Resolves a path as :func:`find_checkpoint` does, to a location.

    Args:
      path: of a run, a step or a file; or a Storage, whose root is a run or a step.
      step: which step, if ``path`` is a run's directory; None takes the latest.
      storage_options: see docs/storage.md.
      tensors: also accepts a safetensors file, or a directory without a checkpoint that has a model of Hugging Face.

    Raises:
      ValueError: ``step`` is not an integer of at least 0.
      CheckpointNotFoundError: no checkpoint; the message lists the contents of the directory.
    """
    step = given_step(step)
    storage = open_storage(path, storage_options)
    # A storage has no parent.
    parent, name = ('', '') if isinstance(path, Storage) else split_path(path)
    outer = open_storage(parent, storage_options) if name else storage
    if name and outer.is_file(name):
        foreign = foreign_among([name])
        if foreign and not (tensors and is_tensor_file(name)):
            raise UnsupportedFormatError(f'{path} is {foreign[0][1]}.')
        # The path is the manifest's file.
        grand, directory = split_path(parent)
        # In Flax's layout the file has the number.
        number = parse_step_dir(name) if step_of(directory) is None else step_of(directory)
        if step is not None and step != number:
            raise _is_one(f'{path}', step)
        local = outer.local_path(name)
        # A link that is the path itself is followed, if no other file belongs to the checkpoint.
        follows = name.endswith(('.safetensors', '.msgpack')) and local is not None and os.path.islink(local)
        root = open_storage(grand, storage_options) if directory else outer
        return Located(root, directory, name, number, follows)
    if storage.root_kind() != 'dir':
        # The path that TensorFlow gives is the beginning of its files' names.
        index = f'{name}.index'
        if name and outer.is_file(index):
            raise UnsupportedFormatError(f'{path}.index is {foreign_among([index])[0][1]}.')
        number = step_of(name)
        run = name.rpartition('@')[0]
        is_command = run != '' and outer.kind(run) == 'dir'
        notes = ['@ belongs to the command line: pass step=, or the path of the step.'] * is_command
        raise no_checkpoint(storage, *notes) if number is None else no_step(outer, number, listing(outer))
    if step is None:
        # Beside steps it is a file of TensorFlow, or a run was started here.
        if storage.is_file(MANIFEST) and (step_of(name) is not None or newest(storage) is None):
            return Located(outer, name, MANIFEST, step_of(name))
        if is_orbax(storage, ''):
            return Located(outer, name, '', parse_prefixed_step(name))
    try:
        return locate_step(storage, step)
    except CheckpointNotFoundError:
        # Checked last, because each check is a request on a bucket, and the path of a run is not the path of an export in it.
        models = (*WHOLE_NAMES, FLAX_WHOLE) if tensors and step is None else ()
        model = next(filter(storage.is_file, models), None)
        if step is not None or (model is None and (_steps_of_others(storage) or not is_zarr_tree(storage, name))):
            raise
        return Located(outer, name, model or '', None if model else parse_prefixed_step(name))


def _is_one(where: str, step: int) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f'{where} is one checkpoint, not a run with step {step}. Leave step out, or pass the directory of a run.'
    )


def locate_step(storage: Storage, step: int | None) -> Located:
    """Finds a step in a run's directory; None takes the latest.

    Raises:
      CheckpointNotFoundError: with the existing steps.
    """
    if step is not None and storage.is_file(join(step_dir(step), MANIFEST)):
        # That of another program is found, too, so that decoding it names the program.
        return Located(storage, step_dir(step), MANIFEST, step)
    listed_step, passed = newest_and_passed(storage) if step is None else (inspect_step(storage, step), [])
    if listed_step is not None:
        readable(listed_step)
        if step is None:
            log_newer(storage, listed_step.step, passed)
        return Located(storage, listed_step.directory, listed_step.manifest, listed_step.step)
    if step is None:
        refuse_other_contents(storage)
        raise no_checkpoint(storage)
    if storage.is_file(MANIFEST):
        raise _is_one(storage.url(), step)
    raise no_step(storage, step, listing(storage))


def foreign_among(names: Collection[str]) -> list[tuple[str, str]]:
    """The files of other programs among some names, each with a description and a cure, to end a sentence.

    The most telling one comes first. A possible manifest is none of them.
    """
    return [
        (name, f'{what}, not a checkpoint: {cure}')
        for pattern, what, cure in _FOREIGN
        for name in names
        if re.fullmatch(pattern, name, re.DOTALL)
    ]


def foreign_bytes(data: bytes) -> list[tuple[str, str]]:
    """As :func:`foreign_among`, by the first bytes of a file."""
    return foreign_among([name for start, name in _BEGINNINGS.items() if re.match(start, data, re.DOTALL)])


def foreign_in(storage: Storage) -> list[tuple[str, str]]:
    """As :func:`foreign_among`, of the names in a directory, and in the latest directory in it that is named like a step."""
    names = [entry.name for entry in storage.entries()]
    steps = {int(match[1]): name for name in names if (match := _STEP.fullmatch(name))}
    for latest in [max(steps)] if steps else []:
        names += [join(steps[latest], entry.name) for entry in storage.entries(steps[latest])]
    return foreign_among(names)


def _steps_of_others(storage: Storage) -> list[str]:
    """The files of the latest step of another trainer."""
    return [key for key, _ in foreign_in(storage) if '/' in key]


def log_newer(storage: Storage, step: int, passed: Sequence[str] = ()) -> None:
    """Logs names with a larger number than that of the newest step: no manifest is there, or the number has a fraction (Flax).

    Args:
      storage: the run.
      step: its newest one.
      passed: the names with larger numbers in a bucket, where a save may be under way; a file system lists its own.
    """
    fractions: list[str] = []
    # The storage may be away, which a restart from local disks does not notice.
    with contextlib.suppress(StorageError):
        if storage.is_file_system:
            names = [entry.name for entry in storage.entries()]
            larger = [name for name in names if (parse_step_dir(name) or 0) > step]
            # Another process may have saved one meanwhile.
            passed = [name for name in larger if inspect_name(storage, name) is None]
            fractions = [name for name in names if (flax_number(name) or 0) > step and is_state_file(storage, name)]
    newer = [name for name in passed if parse_step_dir(name) is not None]
    if newer:
        text = 't5ckpt: %s: %s: no file "checkpoint", so step %d is the newest complete one'
        level = logging.WARNING if storage.is_file_system else logging.INFO
        _log.log(level, text, storage.url(), some_of(newer, 5), step)
    if fractions:
        _log.warning(
            't5ckpt: step %d is the newest with an integer as its number. Flax wrote newer ones in %s: %s. Give the path of '
            'one to restore it.',
            step,
            storage.url(),
            some_of(fractions, 5),
        )


def no_checkpoint(storage: Storage, *notes: str) -> T5CkptError:
    """The error for a path without a checkpoint: says what is there, and which path or program to use.

    Args:
      storage: the path.
      notes: sentences about it, before the cure.
    """
    where, kind = storage.url(), storage.kind('')
    if kind is None:
        absent = f'{where}: there is no such file or directory.'
        return CheckpointNotFoundError(' '.join([absent, *notes, 'Check the path.']))
    if kind == 'file':
        for _, what in foreign_among([where]):
            return UnsupportedFormatError(f'{where} is {what}.')
        return CheckpointNotFoundError(f'{where} is a file, not the directory of a run. Check the path.')
    names = [entry.name for entry in storage.entries()]
    # The directory above needs the options of a bucket, which a storage does not tell.
    around = checkpoint_around(storage) if storage.is_file_system else None
    # JAX's arrays have no names without the file of the tree.
    below = [] if _JAX_TREE in names else openable_below(storage)
    foreign = [f'{storage.url(key)} is {what}.' for key, what in foreign_in(storage)[:1]]
    if below:
        cure = f'Give the path of one: {storage.url(below[0])}'
    elif around is not None:
        cure = f'Give the path of the checkpoint around it: {around}'
    else:
        cure = '' if foreign else 'Check the path.'
    contents = f'it contains {counted(len(names), "entry", "entries")}: {some_of(names, 5)}' if names else 'it is empty'
    sentences = [f'{where}: no complete checkpoint there; {contents}.', *notes, *foreign, cure]
    return CheckpointNotFoundError(' '.join(filter(None, sentences)))


def not_of_format(source: str, text: str) -> T5CkptError:
    """The error for a path without a checkpoint of the format that a conversion asks for; names the verb that takes the path."""
    storage, (parent, name) = open_storage(source), split_path(source)
    listed_step = inspect_name(open_storage(parent), name) or newest(storage)
    if listed_step is None:
        return CheckpointNotFoundError(f'{text}. {no_checkpoint(storage)}')
    verb = 'cp' if listed_step.layout.startswith(T5X) else f'convert {listed_step.layout}'
    return CheckpointNotFoundError(f'{text}. It is in the layout of {listed_step.layout}: use t5ckpt {verb}.')


def no_step(storage: Storage, step: int, steps: Sequence[ListedStep]) -> T5CkptError:
    """The error for a step that a run lacks, with its complete steps."""
    if not steps and storage.kind('') != 'dir':
        return no_checkpoint(storage)
    existing = f'{", ".join(str(each.step) for each in steps[-10:])}. Pass one of them.' if steps else 'none.'
    return CheckpointNotFoundError(
        f'{storage.url(step_dir(step))}: step {step} does not exist, complete steps are: {existing}'
    )


def openable_below(storage: Storage, without: Collection[str] = (), directory: str = '') -> list[str]:
    """The runs, the checkpoints and the files of Flax in a directory that is not one itself, by the files in them.

    Looks at ``_MAX_BELOW`` names, directories first, except those ``without`` and those that a save or a deletion left; below
    these, at as many until one is found.
    """
    entries = storage.entries(directory)
    entries = [entry for entry in entries if entry.name not in without and not _LEFTOVER.match(entry.name)]
    found: list[str] = []
    for entry in sorted(entries, key=lambda entry: not entry.is_dir)[:_MAX_BELOW]:
        key = join(directory, entry.name)
        with contextlib.suppress(T5CkptError):
            if not entry.is_dir:
                found += [key] if SHARD.fullmatch(key) is None and is_state_file(storage, key) else []
            elif is_checkpoint(storage, key):
                found.append(key)
            elif not directory:
                below = openable_below(storage, (), key)[:1]
                # A run is named instead of its step.
                found += [key if parse_prefixed_step(each.rpartition('/')[2]) is not None else each for each in below]
        if directory and found:
            break
    return found

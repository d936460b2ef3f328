"""Finds the checkpoint of a path or of a step as a ``Located``, or raises an error that lists the contents of the directory.

``catalog/listing.py`` lists the steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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
)
from t5ckpt.catalog.listing import catalog_of, checkpoint_around, inspect_step, listing, newest, step_of
from t5ckpt.core.arguments import given_step
from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.keys import join
from t5ckpt.core.text import counted, some_of
from t5ckpt.errors import CheckpointNotFoundError, NoEffectWarning, StorageError, T5CkptError, UnsupportedFormatError
from t5ckpt.format.names import (
    MANIFEST,
    flax_number,
    parse_prefixed_step,
    parse_step_dir,
    parse_step_name,
    step_dir,
)
from t5ckpt.format.safetensors import FLAX_WHOLE, SHARD, WHOLE_NAMES, is_tensor_file
from t5ckpt.storage import AbsentStorage, Storage, open_storage, split_path
from t5ckpt.storage.base import Entry

_log = logging.getLogger('t5ckpt')

# The structure that pytree_serialization of JAX writes beside its arrays.
JAX_TREE = 'pytreedef.json'
# A listing for each is a request to a bucket.
_MAX_BELOW = 20
# The names of unfinished and damaged steps, of T5X or Orbax, and hidden names.
_LEFTOVER = re.compile(r'\.|.*\.(orbax-checkpoint-tmp|partial_save)|checkpoint_([0-9]+\.[a-z]|tmp$)', re.DOTALL)
_STEP = re.compile(r'(?:step[_-])?([0-9]+)')
# A directory is described by the first pattern that matches one of the names in it.
_MARKS = (
    (
        r'\.metadata|.*\.distcp',
        'a torch.distributed.checkpoint (DCP) directory, whose metadata is a pickle and is not read',
    ),
    (r'.*\.partial_save(\.pending_.*)?', 'a partial save of Orbax, which ocp.partial.finalize completes'),
    # CLU writes a TensorFlow checkpoint, too, which holds only the position in the data.
    (r'.*\.flax', 'a run of CLU, whose states are its files .flax: restore(path=...) and t5ckpt convert flax take one'),
    (r'.*\.index', 'a TensorFlow checkpoint, which t5ckpt convert tf converts'),
    (r'.*\.safetensors\.index\..*json', 'a safetensors model, of which restore(path=...) takes the index'),
    (
        r'.*-[0-9]+-of-[0-9]+\.safetensors',
        'a safetensors model in several files. Copy its index (.safetensors.index.json), too',
    ),
    (r'.*\.safetensors', 'a safetensors model, of which restore(path=...) takes a file'),
    (
        r'flax_model.*\.msgpack(\.index\.json)?',
        "Flax weights of Hugging Face (t5ckpt.convert_checkpoint('flax', path, directory))",
    ),
    (
        r'pytorch_model.*\.bin|.*\.pth?',
        'a PyTorch file, which needs pickle and is not read: load it with PyTorch and save safetensors',
    ),
    (r'.*\.eqx', 'files of Equinox; equinox.tree_deserialise_leaves loads one'),
    (JAX_TREE, "a directory of JAX's pytree_serialization, which t5ckpt convert jax converts"),
    # A group of zarr v3 that has arrays opens.
    (r'\.zarray|zarr\.json', 'one array of zarr, or an empty group; the directory above an array opens as a tree'),
    (
        r'[0-9]{8}T[0-9]{6}F[0-9]{6}(-[0-9]+)?',
        'a run of elements.Checkpoint (DreamerV3), whose states are pickles and are not read: load them with elements',
    ),
    (r'attributes\.json', 'N5 arrays, which TensorStore reads'),
    (r'\.zgroup', 'a zarr group, such as a step of seqax, without a T5X manifest'),
)
# The same for the directory of a step: the files that it contains, a description, and how to read it.
_STEP_MARKS = (
    (
        {'.metadata'},
        'a run of torchtitan, or another one that saves with torch.distributed.checkpoint (DCP)',
        'Their metadata is a pickle and is not read: load them with PyTorch and save safetensors',
    ),
    ({'index', 'gda'}, 'a run of axlearn', "They are in axlearn's own layout and are not read: load them with axlearn"),
    ({'.zattrs', '.zgroup'}, 'a run of seqax', 't5ckpt convert seqax converts them'),
)
# A file is recognized by its name, because it may be too large to read.
_FILES = (
    (
        ('.safetensors', '.safetensors.index.json'),
        'a safetensors file',
        'restore(path=...) and open_checkpoint read it, t5ckpt show lists it, t5ckpt import safetensors makes a checkpoint of it',
    ),
    (
        '.npz',
        'an npz file',
        'restore(path=...) and open_checkpoint read it, t5ckpt show lists it, t5ckpt import npz makes a checkpoint of it',
    ),
    ('.npy', 'one array of numpy', 'numpy.load reads it unless it is a pickle'),
    (
        '.msgpack.index.json',
        'an index of Flax weights',
        "convert it (t5ckpt.convert_checkpoint('flax', path, directory))",
    ),
    (
        '.eqx',
        'a file of Equinox, in which leaves have no names',
        'load it with equinox.tree_deserialise_leaves, as the init_fn of restore_or_init (docs/migration.md)',
    ),
    (('.index', '.data-00000-of-00001'), 'a file of TensorFlow', 'convert it (t5ckpt convert tf)'),
    (
        ('.h5', '.hdf5'),
        'an HDF5 file',
        'load it with the library that wrote it, as the init_fn of restore_or_init (docs/migration.md)',
    ),
    (
        '.keras',
        'a model of Keras',
        'load it with keras.saving.load_model, as the init_fn of restore_or_init (docs/migration.md)',
    ),
    (
        ('.pkl', '.pickle'),
        'a pickle, which can run any code and is not read',
        'load it as the init_fn of restore_or_init (docs/migration.md)',
    ),
    (
        ('.zip', '.tar', '.gz', '.tgz', '.bz2', '.xz', '.zst'),
        'an archive or a compressed file',
        'unpack it, and pass the result',
    ),
    (
        ('.bin', '.pt', '.pth'),
        'a PyTorch file, which needs pickle and is not read',
        'load it with PyTorch and save safetensors',
    ),
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
    if follow_links and not located.storage.is_file_system:
        warn_caller(NoEffectWarning(no_links_text(located)))
    return dataclasses.replace(located, follow_links=follow_links or located.follow_links)


def no_links_text(located: Located) -> str:
    """The warning for ``follow_links`` on a storage without links."""
    return f'follow_links has no effect: {located.storage.url()} is not on a local file system and has no links. Leave it out.'


def open_run_storage(
    path: str | os.PathLike[str] | Storage, storage_options: Mapping[str, Any] | None = None
) -> Storage:
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
        raise _not_run_but_checkpoint(storage, directory)
    return storage


def _not_run_but_checkpoint(storage: Storage, directory: str) -> CheckpointNotFoundError:
    here, (parent, _, name) = storage.url().rstrip('/'), directory.rpartition('/')
    step = parse_step_name(name)
    if step is None and not (storage if directory == here else open_storage(directory)).is_file(MANIFEST):
        # Orbax and Levanter have other prefixes.
        step = parse_prefixed_step(name)
    what = 'is one checkpoint' if step is None else f'is step {step} of a run'
    local = storage.local_path('')
    if directory != here:
        is_link = local is not None and os.path.realpath(local) == directory
        what = f'is {"a link to" if is_link else "inside"} {directory}, which {what}'
    cure = (
        f'the directory of the run: {parent}' if step is not None else 'another directory; restore(path=...) reads it'
    )
    return CheckpointNotFoundError(f'{here} {what}, not a run. Pass {cure}')


_NOT_COMMITTED = (
    ': steps of Orbax lack commit_success.txt, the mark of a complete one here. If a copy has lost it, write it again'
)


def refuse_other_contents(storage: Storage, *, marks: bool = True) -> None:
    """Raises an error for a path that holds something else than a run; not for a run, and where a new one may begin.

    Whatever begins a run or writes a step calls it, so that a path of the wrong level begins no second run in silence. The files
    decide, with links resolved; a name decides only where there are none. ``open_run_storage`` has refused a path inside a
    checkpoint.

    Args:
      storage: the path.
      marks: also refuses incomplete steps, and those of other trainers by their names; a save may write beside them.

    Raises:
      T5CkptError: it names what the path holds, and the path to pass.
    """
    if storage.root_kind() == 'file':
        if marks:
            raise not_a_run(storage)
        return  # The save itself fails.
    if entries := storage.entries():
        if newest(storage) is not None:
            return
        _refuse_checkpoint(storage)
        checkpoints, models = _contents_beside_steps(storage)
        if models:
            raise CheckpointNotFoundError(f'{no_checkpoint(storage)} Pass another directory to start a run.')
        if checkpoints or (marks and _run_of_others(storage) is not None):
            raise no_checkpoint(storage)
        if marks:
            _refuse_incomplete(storage, entries)
    _refuse_name(storage)


def contents_of_new_run(storage: Storage) -> list[str]:
    """The checkpoints and the models at a path without steps, where a trainer begins a run.

    Raises:
      CheckpointNotFoundError: the path is a checkpoint, or has the name of a step.
    """
    contents: list[str] = []
    if storage.entries():
        _refuse_checkpoint(storage)
        contents = [*itertools.chain(*_contents_beside_steps(storage))]
    _refuse_name(storage)
    return contents


def _refuse_checkpoint(storage: Storage) -> None:
    if is_checkpoint(storage, ''):
        raise _not_run_but_checkpoint(storage, storage.url().rstrip('/'))


def _refuse_name(storage: Storage) -> None:
    where = storage.url().rstrip('/')
    parent, _, name = where.rpartition('/')
    if name != name.strip() and storage.root_kind() is None:
        raise CheckpointNotFoundError(
            f'{where!r} does not exist and has white space around its name. Pass the path without it: {parent}/{name.strip()}'
        )
    # Also 'checkpoint_7.tmp-...' and the like.
    if parse_step_dir(name.partition('.')[0]) is not None:
        raise CheckpointNotFoundError(
            f'{where} is the path of a step, not of a run, and has no checkpoint. Pass the directory of the run: {parent}'
        )


def _contents_beside_steps(storage: Storage) -> tuple[list[str], list[str]]:
    """The checkpoints below a path, and the models in it, that are not steps of its run."""
    # A broken step of the run itself does not count: a save replaces it. Nor does one that was committed just now.
    checkpoints = [
        each for each in openable_below(storage) if parse_step_dir(each.removesuffix(f'/{MANIFEST}')) is None
    ]
    indices = ('.safetensors.index.json', '.msgpack.index.json')
    models = [entry.name for entry in storage.entries() if entry.name.endswith(indices)]
    return checkpoints, models or [*filter(None, [model_file(storage)])]


def _refuse_incomplete(storage: Storage, entries: Sequence[Entry]) -> None:
    """See :func:`refuse_other_contents`."""
    where = storage.url().rstrip('/')
    # A user's files beside an array are no tree of a checkpoint.
    is_bare = all(entry.is_dir or entry.name.startswith('.z') for entry in entries)
    if is_bare and is_zarr_tree(storage, where.rpartition('/')[2]):
        raise CheckpointNotFoundError(
            f'{where} is a directory tree of zarr arrays, not a run. restore(path=...) reads it. Pass another directory'
        )
    holding = catalog_of(storage).incomplete()
    if storage.orbax_commits:
        holding += [entry.name for entry in entries if entry.is_dir and is_orbax(storage, entry.name)]
    # The first step may have been committed meanwhile.
    if holding and newest(storage) is None:
        raise CheckpointNotFoundError(
            f'{where} contains {some_of(holding, 5)}, none of which is a complete checkpoint'
            f'{_NOT_COMMITTED if storage.orbax_commits else ""}. Move them away to start a new run.'
        )


def log_other_contents(storage: Storage) -> None:
    """Logs, for a run without steps, what :func:`refuse_other_contents` will refuse at its first save."""
    try:
        refuse_other_contents(storage, marks=False)
    except T5CkptError as error:
        _log.warning('t5ckpt: %s', error)


def open_target(path: str | os.PathLike[str] | Storage, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """Opens the directory of a run to write steps to.

    Raises:
      CheckpointNotFoundError: it holds something else, see :func:`refuse_other_contents`.
    """
    storage = open_run_storage(path, storage_options)
    refuse_other_contents(storage, marks=False)
    return storage


def locate(
    path: str | os.PathLike[str] | Storage,
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
      tensors: also accepts a safetensors or npz file, or a directory without a checkpoint that has a model of Hugging Face.

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
        foreign = foreign_file(name)
        if foreign is not None and not (tensors and is_tensor_file(name)):
            raise UnsupportedFormatError(f'{path} is {foreign}.')
        # The path is the manifest's file.
        grand, directory = split_path(parent)
        if step is not None and step != step_of(directory):
            raise CheckpointNotFoundError(
                f'{path} is one checkpoint, not a run with step {step}. Leave step out, or pass the directory of a run.'
            )
        number = step_of(directory)
        if number is None:
            # In Flax's layout the file has the number.
            number = parse_step_dir(name)
        local = outer.local_path(name)
        # A link that is the path itself is followed, if no other file belongs to the checkpoint.
        follows = name.endswith(('.safetensors', '.npz', '.msgpack')) and local is not None and os.path.islink(local)
        if directory:
            return Located(open_storage(grand, storage_options), directory, name, number, follows)
        return Located(outer, '', name, number, follows)
    if storage.root_kind() != 'dir':
        # The path that TensorFlow gives is the beginning of its files' names.
        index = f'{name}.index'
        if name and outer.is_file(index):
            raise UnsupportedFormatError(f'{path}.index is {foreign_file(index)}.')
        raise CheckpointNotFoundError(f'{storage.url()}: no such file or directory. Check the path.')
    try:
        return _locate_in_dir(storage, outer, name, step)
    except CheckpointNotFoundError:
        # Checked last, because each check is a request on a bucket, and the path of a run is not the path of an export in it.
        file = model_file(storage) if tensors and step is None else None
        if file is None and (step is not None or _run_of_others(storage) or not is_zarr_tree(storage, name)):
            raise
        return Located(outer, name, file or '', None if file else parse_prefixed_step(name))


def _locate_in_dir(storage: Storage, outer: Storage, name: str, step: int | None) -> Located:
    if (
        step is None
        and storage.is_file(MANIFEST)
        and (step_of(name) is not None or not catalog_of(storage).is_beside_manifest())
    ):
        return Located(outer, name, MANIFEST, step_of(name))
    if step is None and is_orbax(storage, ''):
        return Located(outer, name, '', parse_prefixed_step(name))
    return locate_step(storage, step)


def locate_step(storage: Storage, step: int | None) -> Located:
    """Finds a step in a run's directory; None takes the latest.

    Raises:
      CheckpointNotFoundError: with the existing steps.
    """
    if step is not None and storage.is_file(join(step_dir(step), MANIFEST)):
        # A damaged manifest is found, too, so that decoding it raises the error.
        return Located(storage, step_dir(step), MANIFEST, step)
    listed_step = newest(storage) if step is None else inspect_step(storage, step)
    if listed_step is not None:
        if step is None:
            log_newer_of_flax(storage, listed_step.step)
        return Located(storage, listed_step.directory, listed_step.manifest, listed_step.step)
    if storage.root_kind() == 'file':
        raise not_a_run(storage)
    if step is None:
        # If all steps are damaged, open one of them, so that decoding it raises the error.
        damaged = max(_damaged_steps(storage), default=None)
        if damaged is not None:
            return Located(storage, step_dir(damaged), MANIFEST, damaged)
        refuse_other_contents(storage)
        raise no_checkpoint(storage)
    if storage.is_file(MANIFEST):
        raise CheckpointNotFoundError(
            f'{storage.url()} is one checkpoint, not a run with step {step}. Leave step out, or pass the directory of a run.'
        )
    steps = listing(storage).steps
    listed_step = next((candidate for candidate in steps if candidate.step == step), None)
    if listed_step is not None:
        # On an object store, steps with a prefix in their names are found only by a listing.
        return Located(storage, listed_step.directory, listed_step.manifest, listed_step.step)
    raise no_step(storage, step, steps, 'Pass one of them, or None for the latest.')


def _damaged_steps(storage: Storage) -> list[int]:
    steps = {parse_step_dir(entry.name): entry.name for entry in storage.entries() if entry.is_dir}
    return [step for step, name in steps.items() if step is not None and storage.is_file(join(name, MANIFEST))]


def foreign_file(name: str) -> str | None:
    """Describes a file of another program by its name, with a cure, to end a sentence; None for a possible manifest."""
    return next((f'{what}, not a checkpoint: {cure}' for ends, what, cure in _FILES if name.endswith(ends)), None)


def foreign_bytes(data: bytes) -> str | None:
    """As :func:`foreign_file`, by the first bytes of the file."""
    names = (name for beginning, name in _BEGINNINGS.items() if re.match(beginning, data, re.DOTALL))
    return next(map(foreign_file, names), None)


def not_a_run(storage: Storage) -> T5CkptError:
    """The error for a path that is not the directory of a run; for a file it says which program reads it."""
    where = storage.url()
    if storage.kind('') is None:
        return CheckpointNotFoundError(f'{where}: {catalog_of(storage).absence}. Check the path.')
    what = foreign_file(where)
    if what is not None:
        return UnsupportedFormatError(f'{where} is {what}.')
    return CheckpointNotFoundError(f'{where} is a file, not the directory of a run. Check the path.')


def foreign_layout(storage: Storage) -> str | None:
    """Describes the layout of a storage's root, to end a sentence; None for an unknown layout.

    Compares only names: those in the directory, and those in the latest directory that is named like a step.
    """
    run = _run_of_others(storage)
    if run is not None:
        return run
    names = [entry.name for entry in storage.entries()]
    return next((text for mark, text in _MARKS if any(re.fullmatch(mark, name) for name in names)), None)


def _run_of_others(storage: Storage) -> str | None:
    """Describes the run of a trainer whose steps t5ckpt does not read; None if it is not one."""
    directories = [entry.name for entry in storage.entries() if entry.is_dir]
    steps = {name: int(match[1]) for name in directories if (match := _STEP.fullmatch(name))}
    if steps:
        latest = max(steps, key=lambda name: steps[name])
        names = {below.name for below in storage.entries(latest)}
        for marks, what, cure in _STEP_MARKS:
            if marks <= names:
                shown = ', '.join(str(step) for step in sorted(steps.values())[-5:])
                more = 'the last are ' if len(steps) > 5 else ''
                return f'{what}, with {counted(len(steps), "step")}: {more}{shown}. {cure}; {storage.url(join(latest))} is one'
    return None


def model_file(storage: Storage) -> str | None:
    """The file with which the model of Hugging Face in a directory is opened; None without a model."""
    return next((name for name in (*WHOLE_NAMES, FLAX_WHOLE) if storage.is_file(name)), None)


def log_newer_of_flax(storage: Storage, step: int) -> None:
    """Logs the files of Flax with a fraction in their number, which is larger than that of the run's newest step."""
    with contextlib.suppress(StorageError):
        entries = storage.entries() if storage.is_file_system else []
        numbers = {entry.name: flax_number(entry.name) for entry in entries if not entry.is_dir}
        newer = [name for name, number in numbers.items() if number is not None and number > step]
        newer = [name for name in newer if is_state_file(storage, name)]
        if newer:
            _log.warning(
                't5ckpt: step %d is the newest with an integer as its number. Flax wrote newer ones in %s: %s. Give the path of '
                'one to restore it.',
                step,
                storage.url(),
                some_of(newer, 5),
            )


def no_checkpoint(storage: Storage) -> T5CkptError:
    """The error for a directory without a checkpoint; it lists the contents and names a file that can be read."""
    if storage.kind('') != 'dir':
        return not_a_run(storage)
    # JAX's arrays have no names without the file of the tree.
    model, below = model_file(storage), [] if storage.is_file(JAX_TREE) else openable_below(storage)
    # The directory above needs the options of a bucket, which a storage does not tell.
    around = checkpoint_around(storage) if storage.is_file_system else None
    cure = 'Check the path.' if around is None else f'Give the path of that checkpoint: {around}'
    if model is not None:
        # The caller reads no models; those that do have found it.
        foreign = foreign_file(model)
        cure = (
            f'Give the path of the file: {storage.url(model)}'
            if foreign is None
            else f'{storage.url(model)} is {foreign}.'
        )
    elif below:
        cure = f'Give the path of one: {storage.url(below[0])}'
    is_known = model is not None or not below or foreign_layout(storage) is not None
    contents = _contents_text(storage) if is_known else f'it contains {some_of(below, 5)}'
    part = '' if around is None else f' is a part of the checkpoint {around}'
    return CheckpointNotFoundError(f'{storage.url()}{part}: no complete checkpoint there; {contents}. {cure}')


def not_of_format(source: str, text: str) -> T5CkptError:
    """The error for a path without a checkpoint of the format that a conversion asks for; names the verb that takes the path."""
    storage, (parent, name) = open_storage(source), split_path(source)
    listed_step = inspect_name(open_storage(parent), name) or newest(storage)
    if listed_step is None:
        return CheckpointNotFoundError(f'{text}. {no_checkpoint(storage)}')
    verb = 'cp' if listed_step.layout.startswith(T5X) else f'convert {listed_step.layout}'
    return CheckpointNotFoundError(f'{text}. It is in the layout of {listed_step.layout}: use t5ckpt {verb}.')


def no_step(storage: Storage, step: int, steps: Sequence[ListedStep], cure: str) -> T5CkptError:
    """The error for a step that a run lacks, with its complete steps and how to name one of them."""
    if not steps and not catalog_of(storage).exists():
        return not_a_run(storage)
    where = f'{storage.url(step_dir(step))}: step {step} does not exist, complete steps are'
    if not steps:
        return CheckpointNotFoundError(f'{where}: none.')
    return CheckpointNotFoundError(
        f'{where}: {", ".join(str(listed_step.step) for listed_step in steps[-10:])}. {cure}'
    )


def openable_below(storage: Storage, without: Collection[str] = ()) -> list[str]:
    """The runs, the checkpoints and the files of Flax in a directory that is not one itself, by the files in them.

    Looks at ``_MAX_BELOW`` names, directories first, except those ``without`` and those that a save or a deletion left.
    """
    entries = [entry for entry in storage.entries() if entry.name not in without and not _LEFTOVER.match(entry.name)]
    found: list[str] = []
    for entry in sorted(entries, key=lambda entry: not entry.is_dir)[:_MAX_BELOW]:
        with contextlib.suppress(T5CkptError):
            if not entry.is_dir:
                is_shard = SHARD.fullmatch(entry.name) is not None
                found += [entry.name] if not is_shard and is_state_file(storage, entry.name) else []
            elif is_checkpoint(storage, entry.name):
                found.append(entry.name)
            else:
                found += _openable_in(storage, entry.name)
    return found


def _openable_in(storage: Storage, directory: str) -> list[str]:
    """The directory if it is a run, or of JAX's pytree_serialization, else the checkpoint in it."""
    if storage.is_file(join(directory, JAX_TREE)):
        return [directory]
    for below in storage.entries(directory)[:_MAX_BELOW]:
        key = join(directory, below.name)
        if not _LEFTOVER.match(below.name) and (is_checkpoint if below.is_dir else is_state_file)(storage, key):
            return [directory if parse_prefixed_step(below.name) is not None else key]
    return []


def _contents_text(storage: Storage) -> str:
    names = [entry.name for entry in storage.entries()]
    if not names:
        return 'the directory is empty'
    layout = foreign_layout(storage)
    looks = '' if layout is None else f'; it looks like {layout}'
    return f'it contains {counted(len(names), "entry", "entries")}: {some_of(names, 5)}{looks}'

"""Copies checkpoints between any two storages, as they are or changed: leaves are left out, cast or renamed.

One pass in bounded memory. The chunk files of unchanged arrays are taken over byte for byte, once they match their checksums;
they are hard-linked if source and copy are on one file system (``save/linked_arrays.py``). The manifest is that of a new save.
Sources may be in the format of T5X, Orbax or Flax; the copy is in T5X's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from t5ckpt.catalog.locate import locate, with_links
from t5ckpt.convert.options import COPY, ConvertOptions, ConvertReport, check_options
from t5ckpt.convert.source import Source, carried_facts, write_source
from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import Path, leaf_name, path_of
from t5ckpt.core.text import lines, listed
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NoEffectWarning,
    TreeMismatchError,
)
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.file_checksums import FileChecksums, entry_of
from t5ckpt.format.names import PINNED, TRAIN_DS_PREFIX, foreign_keys, is_position, removal_marks, without_generation
from t5ckpt.planning.leaf_choice import LeafPatterns
from t5ckpt.reading.array_reader import ArrayReader
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.contents import Contents, read_contents
from t5ckpt.save.linked_arrays import linked_leaves, verified_reader
from t5ckpt.storage import PathOrStorage
from t5ckpt.tree.leaf_table import Empty, LeafTable


def copy_checkpoint(
    source: PathOrStorage,
    target: PathOrStorage,
    options: ConvertOptions = ConvertOptions(),  # noqa: B008 - frozen
) -> ConvertReport:
    """Copies a checkpoint to another run, on any storage, with the changes of the options.

    Without changes, all chunk files of the copy have the bytes of the source; pins and files of other programs are not copied.
    The changes are applied in this order: ``take`` and ``leave``, ``rename``, ``save_dtype``.

    Args:
      source: a run's directory (its latest step), a step's, or a manifest file; or a Storage with one of the first two as its
        root.
      target: the directory of the run to write to; the copy is ``checkpoint_<step>`` in it, with the step of the source.
      options: see :class:`ConvertOptions`.

    Returns:
      The report, with ``mapped`` from old to new names.

    Raises:
      CheckpointNotFoundError: the source does not exist.
      CheckpointExistsError: the step exists, or another process replaces or deletes it.
      CorruptCheckpointError: a file is missing or differs from its checksum. Nothing became visible.
      UnsafeSpecError: a symbolic link leads out of the checkpoint.
      UnmatchedPattern: a pattern or the cast matches no leaf.
      TreeMismatchError: two leaves would get the same name.
      StorageError: one of the storages failed. Nothing became visible.
    """
    check_options(options, COPY)
    contents = read_contents(with_links(locate(source), options.follow_links))
    reader = _opened(contents, options)
    leaves, files = linked_leaves(contents, reader), reader.files
    positions = _iterator_files(contents, files)
    names = [*map(leaf_name, leaves), *positions]
    taken = options.taken(names)
    kept = {path: leaf for path, leaf in leaves.items() if leaf_name(path) in taken}
    if len(kept) < len(leaves) and all(isinstance(leaf, Empty) for leaf in kept.values()):
        raise TreeMismatchError('the copy would have no leaves. Leave out fewer of them.')
    new_paths = _renamed(kept, options.rename)
    in_manifest = contents.manifest.leaves
    found = Source(
        {new_paths[path]: leaf for path, leaf in kept.items()},
        contents.located.step,
        contents.located.url,
        {leaf_name(path): leaf_name(new) for path, new in new_paths.items()},
        dropped=tuple(name for name in names if name not in taken),
        left_out=_left_out(contents, files),
        files=_read_positions(files, {name: file for name, file in positions.items() if name in taken}),
        facts=carried_facts(contents.facts),
        # In Flax's manifests, all leaves are inline.
        inline={new_paths[path]: isinstance(in_manifest.get(path), np.ndarray) for path in kept}
        if contents.manifest.version
        else None,
    )
    return write_source(found, target, options)


def _opened(contents: Contents, options: ConvertOptions) -> ArrayReader:
    """The source, which is trusted with ``trust_files`` if a list of checksums is lost."""
    try:
        reader = verified_reader(contents)
    except CorruptCheckpointError:
        if not options.trust_files:
            raise
        return verified_reader(contents, trusts_files=True)
    if options.trust_files:
        warn_caller(NoEffectWarning('trust_files has no effect: no list of checksums is lost. Leave it out.'))
    return reader


def _left_out(contents: Contents, files: CheckpointFiles) -> tuple[str, ...]:
    """The pin and the files of other programs, which a copy does not have; or items of a step of Orbax."""
    if not contents.located.manifest:
        return contents.left_out
    listed = {key.removeprefix(f'{files.directory}/') for key, _ in files.storage.walk(files.directory)}
    # Also of T5X, which names its directories as it likes.
    arrays = [f'{leaf.location}/' for leaf in contents.leaves().values() if isinstance(leaf, StoredArray)]
    others = {*foreign_keys(listed)} - (files.checksums or {}).keys() - {contents.located.manifest}
    return tuple(sorted(listed & {PINNED} | {name for name in others if not name.startswith(tuple(arrays))}))


# --- data iterators ----------------------------------------------------------------------------------------------------


def _iterator_files(contents: Contents, source: CheckpointFiles) -> dict[str, str]:
    """The files of data iterators, also those that are recorded and lost, by their name without the generation."""
    storage, directory = source.storage, join(source.directory, contents.facts.positions_in)
    names = [entry.name for entry in storage.entries(directory) if entry.name.startswith(TRAIN_DS_PREFIX)]
    recorded = [file for file in source.checksums or () if is_position(file)]
    marks = [join(source.directory, mark) for mark in removal_marks(recorded)]
    files = {} if any(storage.are_files(marks)) else {without_generation(file): file for file in recorded}
    for name in names:
        key = join(directory, name)
        keys = [key] if storage.kind(key) == 'file' else [below for below, _ in storage.walk(key)]
        files |= {below.removeprefix(f'{directory}/'): below.removeprefix(f'{source.directory}/') for below in keys}
    return files


def _read_positions(source: CheckpointFiles, files: Mapping[str, str]) -> dict[str, bytes]:
    """Files of data iterators, compared with their checksums."""
    read: dict[str, bytes] = {}
    for name, file in files.items():
        where, cure = source.storage.url(join(source.directory, file)), f"Leave it out: leave=['{name}']."
        try:
            read[name] = source.read(file)
        except CheckpointNotFoundError as error:
            raise CorruptCheckpointError(f'{where} is missing. {cure}') from error
        (source.checksums or FileChecksums()).check(file, entry_of(read[name]), where, cure)
    return read


# --- names -------------------------------------------------------------------------------------------------------------


def _renamed(leaves: LeafTable, given: Sequence[tuple[str | re.Pattern[str], str]]) -> dict[Path, Path]:
    """The new path of each leaf, by its old one."""
    new_paths = {path: path for path in leaves}
    rest = [*leaves]
    for pattern, replacement in given:
        patterns = LeafPatterns(pattern, 'rename')
        patterns.check(map(leaf_name, rest))
        matches = {path: patterns.patterns[0].fullmatch(leaf_name(path)) for path in rest}
        rest = [path for path in rest if matches[path] is None]
        expanded = {path: path_of(match.expand(replacement)) for path, match in matches.items() if match is not None}
        new_paths |= {path: tuple(key for key in new if key) for path, new in expanded.items()}
    old_names: dict[Path, str] = {}
    clashes: list[str] = []
    for path, new in new_paths.items():
        if new in old_names or not new:
            first = f'{old_names[new]} and ' if new in old_names else ''
            clashes.append(f'{first}{leaf_name(path)} would become {leaf_name(new)!r}')
        old_names[new] = leaf_name(path)
    for new, name in old_names.items():
        above = next((old_names[new[:length]] for length in range(1, len(new)) if new[:length] in old_names), None)
        if above is not None:
            clashes.append(f'{name} would become {leaf_name(new)!r}, below the new name of {above}')
    if clashes:
        raise TreeMismatchError(lines('names clash after the renaming:', *listed(clashes)))
    return new_paths

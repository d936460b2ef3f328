"""Every error t5ckpt raises on purpose.

    T5CkptError
    ├── CheckpointNotFoundError   FileNotFoundError, ValueError   no such step, directory or run
    ├── InvalidPathError          ValueError                      a path or URL that names no place
    ├── CheckpointExistsError     FileExistsError                 a complete checkpoint stands where one is to be written
    ├── FormatError               ValueError                      the files are not in a format that a reader accepts
    │   ├── CorruptCheckpointError                                it was a checkpoint once: truncated, chunk missing, ...
    │   ├── UnsupportedFormatError                                it is something else, or newer than this reader
    │   └── UnsafeSpecError                                       it points outside its own directory, or names other drivers
    ├── TreeMismatchError         ValueError                      checkpoint and template differ; lists every difference
    │   ├── ShapeMismatch
    │   ├── DtypeMismatch
    │   ├── MissingLeaves
    │   ├── UnexpectedLeaves
    │   ├── ShardingMismatch                                      a dimension of the template does not divide over its mesh
    │   └── UnmatchedPattern                                     a pattern or a cast that is meant for no leaf there is
    ├── UnsupportedLeafError      TypeError, ValueError           a leaf that no checkpoint can hold
    ├── DatasetStateError         RuntimeError                    a data iterator's position cannot be saved or taken back
    ├── StorageError              OSError                         the backend refused or failed
    │   ├── NoSpaceError
    │   ├── AccessDeniedError     PermissionError
    │   └── NotADirectoryStorageError  NotADirectoryError
    ├── StepKeptError             RuntimeError                    a step is pinned, or read by somebody, and is not deleted
    ├── OutputExistsError         FileExistsError                 something stands where an export is to be written
    ├── SaveFailedError           RuntimeError                    a save in the background failed; the cause is chained
    ├── ClosedError               ValueError                      a save with a checkpointer that was closed
    ├── ReadOnlyError             ValueError                      a save or a deletion with one that only reads
    ├── DisagreementError         ValueError                      the processes were asked for different things
    ├── ProcessMissingError       TimeoutError                    a process did not arrive within the time-out
    ├── CoordinationError         RuntimeError                    a process died, or JAX's coordination service failed
    ├── RemoteError               RuntimeError                    another process failed, and so all did
    ├── UnsupportedTopologyError  RuntimeError                    processes or devices this version cannot serve
    ├── NotEnoughMemoryError      MemoryError                     an array is larger than this machine's memory
    └── MissingDependencyError    ImportError                     an optional extra is not installed

And every warning, each given once for its cause; ``warnings.simplefilter('error', t5ckpt.T5CkptWarning)`` makes them errors.

    T5CkptWarning                 UserWarning
    ├── MissingMetricWarning                                  a policy looks at a metric that the steps do not have
    ├── NarrowedDtypeWarning                                  64-bit leaves that JAX narrows on a device
    ├── NoEffectWarning                                       an option that does nothing here
    ├── ObsoleteArgumentWarning   DeprecationWarning          an argument of older versions of T5X, which does nothing
    ├── StepMismatchWarning                                   a step is saved under another number than its own
    ├── TemplateMismatchWarning                               what is saved does not fit what it would be restored to
    ├── UnreadLayoutWarning                                   a new run where steps lie that t5ckpt does not read
    └── UnshardedTemplateWarning                              a template without shardings for leaves of several devices

Each is also the builtin that callers of T5X already catch. ``TreeMismatchError`` carries its differences as data in
``problems``, so that a program need not parse the text.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from t5ckpt.core.text import counted, lines, printable
from t5ckpt.core.value_suffix import value_rule

__all__ = [
    'AccessDeniedError',
    'CheckpointExistsError',
    'CheckpointNotFoundError',
    'ClosedError',
    'CoordinationError',
    'CorruptCheckpointError',
    'DatasetStateError',
    'DisagreementError',
    'DtypeMismatch',
    'FormatError',
    'InvalidPathError',
    'LeafProblem',
    'MissingDependencyError',
    'MissingLeaves',
    'MissingMetricWarning',
    'NarrowedDtypeWarning',
    'NoEffectWarning',
    'NoSpaceError',
    'NotADirectoryStorageError',
    'NotEnoughMemoryError',
    'ObsoleteArgumentWarning',
    'OutputExistsError',
    'ProcessMissingError',
    'ReadOnlyError',
    'RemoteError',
    'SaveFailedError',
    'ShapeMismatch',
    'ShardingMismatch',
    'StepKeptError',
    'StepMismatchWarning',
    'StorageError',
    'T5CkptError',
    'T5CkptWarning',
    'TemplateMismatchWarning',
    'TreeMismatchError',
    'UnexpectedLeaves',
    'UnmatchedPattern',
    'UnreadLayoutWarning',
    'UnsafeSpecError',
    'UnshardedTemplateWarning',
    'UnsupportedFormatError',
    'UnsupportedLeafError',
    'UnsupportedTopologyError',
    'mismatch_error',
    'near_names',
    'with_cures',
]


class _Printable(Exception):  # noqa: N818 - no error of its own
    """Escapes its text when it is shown.

    The text holds names from checkpoints, which a stranger may have chosen: nothing of them reaches a terminal as a command
    or begins a line. What has several lines is built with ``_text.lines``.
    """

    def __str__(self) -> str:
        if len(self.args) == 1 and isinstance(self.args[0], str):
            return printable(self.args[0])
        return printable(super().__str__())


class T5CkptError(_Printable):
    """Root of the tree."""


class T5CkptWarning(_Printable, UserWarning):
    """Root of all warnings; ``warnings.simplefilter('error', t5ckpt.T5CkptWarning)`` makes them errors."""


class NoEffectWarning(T5CkptWarning):
    """An option was given and does nothing here, for the reason that the message names."""


class UnreadLayoutWarning(T5CkptWarning):
    """A run starts anew in a directory that holds steps which t5ckpt does not read; the message names them."""


class NarrowedDtypeWarning(T5CkptWarning):
    """Leaves of 64 bits come back with 32, because JAX narrows them on a device."""


class UnshardedTemplateWarning(T5CkptWarning):
    """A template names no sharding for leaves that are saved from several devices; each would be restored to one."""


class ObsoleteArgumentWarning(T5CkptWarning, DeprecationWarning):
    """An argument that older versions of T5X take was given. It has no effect."""


class CheckpointNotFoundError(T5CkptError, FileNotFoundError, ValueError):
    """No complete checkpoint where one was asked for."""


class InvalidPathError(T5CkptError, ValueError):
    """A path or URL that names nothing, or not for certain; nothing was asked or created."""


class CheckpointExistsError(T5CkptError, FileExistsError):
    """A complete checkpoint stands where one was to be written, and replacing it was not asked for."""


class FormatError(T5CkptError, ValueError):
    """Something is there, but it cannot be read as a checkpoint."""


class CorruptCheckpointError(FormatError):
    """A checkpoint, but damaged: truncated, undecodable, or a chunk file is gone."""


class UnsupportedFormatError(FormatError):
    """Another format, or a version from the future; the message says what it looks like."""


class UnsafeSpecError(FormatError):
    """A spec that would read outside the checkpoint's own directory or through a driver that is not allowed."""


class UnsupportedLeafError(T5CkptError, TypeError, ValueError):
    """A leaf of the state that cannot be written without changing it."""


class DatasetStateError(T5CkptError, RuntimeError):
    """A data iterator cannot say where it stands, or does not take the position that a checkpoint holds."""


class StorageError(T5CkptError, OSError):
    """The file system or object store refused; the message names the path."""


class NoSpaceError(StorageError):
    """The device or the quota is full."""


class AccessDeniedError(StorageError, PermissionError):
    """No permission, or a read-only mount."""


class NotADirectoryStorageError(StorageError, NotADirectoryError):
    """A file stands where a directory should be."""


class OutputExistsError(T5CkptError, FileExistsError):
    """Something stands where an export is to be written, and replacing it was not asked for or is not safe."""


class StepKeptError(T5CkptError, RuntimeError):
    """A step is pinned, or a reader holds it, and so it was not deleted."""


class SaveFailedError(T5CkptError, RuntimeError):
    """A save that ran in the background failed; ``__cause__`` is the first error."""


class ClosedError(T5CkptError, ValueError):
    """A save with a checkpointer that was closed."""


class ReadOnlyError(T5CkptError, ValueError):
    """A save or a deletion with a checkpointer that was made with ``read_only=True``."""


class DisagreementError(T5CkptError, ValueError):
    """The processes of a job were asked to save different things; the message shows how they differ."""


class ProcessMissingError(T5CkptError, TimeoutError):
    """A process did not arrive at a barrier, or sent no answer, within ``process_timeout``.

    Attributes:
      missing: the indices of the processes.
      phase: the barrier or the message that the others waited for.
    """

    def __init__(self, action: str, phase: str, missing: tuple[int, ...], seconds: float):
        names = f'process {", ".join(map(str, missing))}' if missing else 'one of the processes'
        super().__init__(
            f'{action}: {names} did not arrive at {phase!r} within {seconds:g} s. It died, hangs, or did not call save or '
            'restore, which every process must call. Look at its log; process_timeout= sets the time-out.'
        )
        self.missing = missing
        self.phase = phase


class CoordinationError(T5CkptError, RuntimeError):
    """A process of the job died, or JAX's coordination service failed; a time-out is a :class:`ProcessMissingError`.

    Attributes:
      code: the status code of the service, such as ``'UNAVAILABLE'``; '' where its error has none.
      died: the indices of the processes that the service reports as dead.
    """

    def __init__(self, message: str, code: str = '', died: tuple[int, ...] = ()):
        super().__init__(message)
        self.code = code
        self.died = died


class RemoteError(T5CkptError, RuntimeError):
    """Another process failed, and with it the whole job's save or restore; ``processes`` says which."""

    def __init__(self, message: str, processes: tuple[int, ...] = ()):
        # The other process escaped what its error says, see _text.lines_of_error; the line breaks that are left are ours.
        super().__init__(lines(*message.split('\n')))
        self.processes = processes


class UnsupportedTopologyError(T5CkptError, RuntimeError):
    """The processes or the devices at hand are not served."""


class NotEnoughMemoryError(T5CkptError, MemoryError):
    """An array, or what a checkpoint claims to be one, is larger than the memory of this machine."""


class MissingDependencyError(T5CkptError, ImportError):
    """An optional dependency is needed; the message names the extra to install."""


class MissingMetricWarning(T5CkptWarning):
    """A policy looks at a metric under a name that the saves do not have."""


class StepMismatchWarning(T5CkptWarning):
    """A save was given another step than the one that the state holds, where a restored run would go on."""


class TemplateMismatchWarning(T5CkptWarning):
    """A state was saved that the same checkpointer cannot restore; the message lists the differences."""


@dataclasses.dataclass(frozen=True)
class LeafProblem:
    """One difference between a checkpoint and a template.

    Attributes:
      leaf: the leaf's name, ``'target/decoder/w'``.
      kind: ``'shape'``, ``'dtype'``, ``'missing'``, ``'unexpected'``, ``'sharding'`` or ``'mesh'``.
      checkpoint: what the checkpoint holds, as text; empty when it holds nothing.
      model: what the template expects, as text; empty when it expects nothing.
      hint: what else helps.
      near: names on the other side that have no partner and are close, nearest first: the leaf may have been renamed.
    """

    leaf: str
    kind: str
    checkpoint: str
    model: str
    hint: str = ''
    near: tuple[str, ...] = ()

    def __str__(self) -> str:
        return printable(self._text())

    def _text(self) -> str:
        tail = f' {self.hint}' if self.hint else ''
        tail += f' Near: {", ".join(self.near)}.' if self.near else ''
        match self.kind:
            case 'missing':
                return f'{self.leaf}: not in the checkpoint, template {self.model}.{tail}'
            case 'unexpected':
                return f'{self.leaf}: checkpoint {self.checkpoint}, not in the template.{tail}'
            case 'sharding' | 'mesh':
                return f'{self.leaf}: {self.model}.{tail}'
            case _:
                held = (
                    self.checkpoint if self.checkpoint.startswith('fallback_state') else f'checkpoint {self.checkpoint}'
                )
                return f'{self.leaf}: {held}, template {self.model}.{tail}'


class TreeMismatchError(T5CkptError, ValueError):
    """The checkpoint's tree is not the template's; ``problems`` lists every difference."""

    def __init__(self, message: str, problems: Sequence[LeafProblem] = (), where: str = ''):
        super().__init__(message)
        self.problems = tuple(problems)
        # The checkpoint, where the text was made by mismatch_error.
        self.where = where


class ShapeMismatch(TreeMismatchError):  # noqa: N818 - the name DESIGN gives
    """Shapes differ, and nothing else does."""


class DtypeMismatch(TreeMismatchError):  # noqa: N818
    """Dtypes differ in kind (float, integer, bool, complex, key), and nothing else differs."""


class MissingLeaves(TreeMismatchError):  # noqa: N818
    """The template has leaves that the checkpoint lacks, and nothing else differs."""


class UnexpectedLeaves(TreeMismatchError):  # noqa: N818
    """The checkpoint has leaves that the template lacks, and nothing else differs."""


class ShardingMismatch(TreeMismatchError):  # noqa: N818
    """The template asks for shardings that its shapes or its mesh do not allow, and nothing else differs."""


class UnmatchedPattern(TreeMismatchError):  # noqa: N818
    """A pattern, or a cast, that is meant for no leaf; what it was to do would be left undone."""


_CURES = {
    'rename': 'state_transformation_fns=[functools.partial(t5ckpt.apply_assignment_map, assignment_map=[{rule}])]',
    'dtype': 'A cast between kinds is never made silently: convert in a state_transformation_fn, or change the template.',
    'mesh': 'jax.eval_shape inside jax.set_mesh gives such shardings. Name the devices: '
    'jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.sharding.spec)) with a mesh of '
    'jax.make_mesh, or jax.eval_shape(jax.jit(init, out_shardings=...)).',
    'missing': 'To start leaves that are new from values of yours: fallback_state=, nested dicts like the template.',
    'shape': 'Change the template, or put an array of the right shape in the place of the leaf in a state_transformation_fn; to '
    'start it anew, leave it out there, and pass fallback_state=.',
    'sharding': 'Leave such a dimension whole, with None in its place in the PartitionSpec (by the rules of a partitioner), or '
    'use a mesh whose axis divides it.',
    'unexpected': 'To leave out what the template has no place for: state_transformation_fns=[t5ckpt.intersect_state], or ... as '
    'the leaf of the template.',
}
_CLASSES: dict[str, type[TreeMismatchError]] = {
    'shape': ShapeMismatch,
    'dtype': DtypeMismatch,
    'mesh': ShardingMismatch,
    'missing': MissingLeaves,
    'sharding': ShardingMismatch,
    'unexpected': UnexpectedLeaves,
}
_SHOWN = 20


def with_cures(error: TreeMismatchError, cures: Mapping[str, str]) -> TreeMismatchError:
    """The error with the cures of the function that the user has called: options of another one are of no use there."""
    return mismatch_error(error.problems, error.where, cures) if error.where else error


def mismatch_error(
    problems: Sequence[LeafProblem], where: str, cures: Mapping[str, str] = MappingProxyType({})
) -> TreeMismatchError:
    """Builds the one error that holds all differences.

    Args:
      problems: the differences, at least one.
      where: the checkpoint, for the first line.
      cures: by kind, instead of those of ``Checkpointer.restore``; 'rename' has a place for the ``rule``.

    Returns:
      The class of the kind when all problems are of one kind, else TreeMismatchError.
    """
    kinds = sorted({problem.kind for problem in problems})
    classes = {_CLASSES[kind] for kind in kinds}
    cls = classes.pop() if len(classes) == 1 else TreeMismatchError
    shown = [f'{where} does not fit the template in {counted(len(problems), "place")}:']
    shown += [f'  {problem}' for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        shown.append(f'  ... and {len(problems) - _SHOWN} more, all of them in .problems')
    cures = _CURES | dict(cures)
    shown += _renaming(problems, cures['rename'])
    shown += dict.fromkeys(cures[kind] for kind in kinds)
    shown.append('There is an example of each in docs/changed-models.md.')
    return cls(lines(*shown), problems, where)


def _renaming(problems: Sequence[LeafProblem], cure: str) -> list[str]:
    """How to rename, with the first pair of near names as the example; nothing where there is no such pair."""
    first = next((problem for problem in problems if problem.near), None)
    if first is None:
        return []
    template, held = (first.leaf, first.near[0]) if first.kind == 'missing' else (first.near[0], first.leaf)
    lacking, excess = ([each.leaf for each in problems if each.kind == kind] for kind in ('missing', 'unexpected'))
    rule = (
        value_rule(lacking, excess)
        or _scope_rule(template, held, problems)
        or (_literal(template), held.replace('\\', r'\\'))
    )
    text = 'Where only a name has changed, say so, the name in the template first'
    return [f'{text}: {cure.replace("{rule}", repr(rule))}']


def _scope_rule(template: str, held: str, problems: Sequence[LeafProblem]) -> tuple[str, str] | None:
    """A rule for the scope in which two names differ, if every name that it would change leads to a leaf without a partner."""
    ours, theirs = template.split('/'), held.split('/')
    differing = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    if len(ours) != len(theirs) or len(differing) != 1 or not 0 < differing[0] < len(ours) - 1 or '\\' in held:
        return None
    rule = rf'(.*)/{_literal(ours[differing[0]])}/(.*)', rf'\1/{theirs[differing[0]]}/\2'
    free = {problem.leaf for problem in problems if problem.kind == 'unexpected'} | {held}
    renamed = [
        re.fullmatch(rule[0], name, re.DOTALL)
        for name in [template, *(p.leaf for p in problems if p.kind == 'missing')]
    ]
    return rule if all(match is None or match.expand(rule[1]) in free for match in renamed) else None


def _literal(name: str) -> str:
    """A pattern for this name alone; a minus needs no escape outside brackets."""
    return re.escape(name).replace('\\-', '-')


def near_names(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Names close to ``name``, nearest first, at most ``count``.

    The comparison is quadratic in the length of the names, so at most 500 candidates are looked at, those that
    share the last component first: a renamed scope is the commonest cause.
    """
    last = name.rpartition('/')[2]
    candidates = sorted(names, key=lambda other: (other.rpartition('/')[2] != last, other))[:500]
    return difflib.get_close_matches(name, candidates, n=count, cutoff=0.6)

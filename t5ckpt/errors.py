"""The error and warning classes of t5ckpt.

    T5CkptError
    ├── CheckpointNotFoundError   FileNotFoundError, ValueError   no such step, directory or run
    │   └── ChangedMeanwhileError                                 it was deleted or overwritten while it was being read
    ├── InvalidPathError          ValueError                      a malformed or ambiguous path or URL
    ├── CheckpointExistsError     FileExistsError                 a complete checkpoint exists at the destination of a write
    ├── FormatError               ValueError                      the files are not in a format that a reader accepts
    │   ├── CorruptCheckpointError                                a damaged checkpoint: truncated, a chunk is missing, ...
    │   ├── UnsupportedFormatError                                another format, or a version newer than this reader
    │   └── UnsafeSpecError                                       an array path outside the checkpoint, or another driver
    ├── TreeMismatchError         ValueError                      checkpoint and template differ; lists every difference
    │   ├── ShapeMismatch
    │   ├── DtypeMismatch
    │   ├── MissingLeaves
    │   ├── UnexpectedLeaves
    │   ├── ShardingMismatch                                      a dimension is not divisible by its mesh axes
    │   └── UnmatchedPattern                                      a pattern or a cast that matches no leaf
    ├── UnsupportedLeafError      TypeError, ValueError           a leaf that a checkpoint cannot hold
    ├── DatasetStateError         RuntimeError                    a data iterator's position cannot be saved or restored
    ├── StorageError              OSError                         the backend refused or failed
    │   ├── NoSpaceError
    │   ├── AccessDeniedError     PermissionError
    │   ├── NotADirectoryStorageError  NotADirectoryError
    │   └── NotDurableError                                       a step is listed, but a power cut may remove it
    ├── StepKeptError             RuntimeError                    a step that is pinned, held or waits is not deleted
    ├── OutputExistsError         FileExistsError                 the destination of an export exists
    ├── SaveFailedError           RuntimeError                    a save in the background failed; the cause is chained
    ├── ClosedError               ValueError                      a save with a checkpointer that was closed
    ├── ReadOnlyError             ValueError                      a save or a deletion with a read-only checkpointer
    ├── DisagreementError         ValueError                      the processes of a job got different arguments
    ├── ProcessMissingError       TimeoutError                    a process did not arrive within the time-out
    ├── CoordinationError         RuntimeError                    a process died, or JAX's coordination service failed
    ├── RemoteError               RuntimeError                    another process failed, and the job's save or restore with it
    ├── LocalDirError             RuntimeError                    a local directory is in use, or has the steps of another run
    ├── NotPersistedError         RuntimeError                    a local step is not in the run's storage
    ├── UnsupportedTopologyError  RuntimeError                    the processes or devices of the job are not supported
    ├── NotEnoughMemoryError      MemoryError                     an array is larger than this machine's memory
    └── MissingDependencyError    ImportError                     an optional extra is not installed

Every warning is a ``T5CkptWarning``, a UserWarning, and is given once per cause: MetricModeWarning, MissingMetricWarning,
NarrowedDtypeWarning, NoEffectWarning, StepMismatchWarning,
TemplateMismatchWarning and UnshardedTemplateWarning.

Each error is also the builtin that callers of T5X already catch. ``TreeMismatchError.problems`` holds the differences as data, so
that a program does not have to parse the text.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Sequence

from t5ckpt.core.text import counted, lines, listed, numbered, printable


class _Printable(Exception):  # noqa: N818 - not an error by itself
    """Escapes control characters and line breaks in its text.

    The text holds names from checkpoints of unknown origin, which could contain terminal commands. Text of several lines is built
    with ``core.text.lines``.
    """

    def __str__(self) -> str:
        if len(self.args) == 1 and isinstance(self.args[0], str):
            return printable(self.args[0])
        return printable(super().__str__())


class T5CkptError(_Printable):
    """Base class of all errors."""


class T5CkptWarning(_Printable, UserWarning):
    """Base class of all warnings; ``warnings.simplefilter('error', t5ckpt.errors.T5CkptWarning)`` turns them into errors."""


class NoEffectWarning(T5CkptWarning):
    """An option has no effect in this call; the message gives the reason."""


class NarrowedDtypeWarning(T5CkptWarning):
    """Leaves of 64 bits are restored with 32, because JAX narrows them on a device."""


class UnshardedTemplateWarning(T5CkptWarning):
    """The template has no shardings for leaves that are saved from several devices; each would be restored to one device."""


class CheckpointNotFoundError(T5CkptError, FileNotFoundError, ValueError):
    """The path or step has no complete checkpoint."""


class ChangedMeanwhileError(CheckpointNotFoundError):
    """The checkpoint was deleted or overwritten while it was being read."""


class InvalidPathError(T5CkptError, ValueError):
    """A path or URL is malformed or ambiguous. No request was sent, and no file was created."""


class CheckpointExistsError(T5CkptError, FileExistsError):
    """A complete checkpoint exists at the destination, and ``overwrite`` was not given."""


class FormatError(T5CkptError, ValueError):
    """The files exist but cannot be read as a checkpoint."""


class CorruptCheckpointError(FormatError):
    """A checkpoint is damaged: truncated, undecodable, or without a chunk file."""


class UnsupportedFormatError(FormatError):
    """The files are in another format, or in a newer version of this one; the message names it."""


class UnsafeSpecError(FormatError):
    """An array spec leads outside the checkpoint's own directory or names a driver that is not allowed."""


class UnsupportedLeafError(T5CkptError, TypeError, ValueError):
    """A leaf that cannot be written without changing it, or whose finite values a cast would lose."""


class DatasetStateError(T5CkptError, RuntimeError):
    """A data iterator cannot return its position, or rejects the position that a checkpoint holds."""


class StorageError(T5CkptError, OSError):
    """A request to the file system or object store failed; the message names the path."""


class NoSpaceError(StorageError):
    """The device or the quota is full."""


class AccessDeniedError(StorageError, PermissionError):
    """No permission, or a read-only mount."""


class NotADirectoryStorageError(StorageError, NotADirectoryError):
    """A path component is a file where a directory is needed."""


class NotDurableError(StorageError):
    """A save failed after its rename, which could not be undone: the step is listed, but a power cut may remove it."""


class OutputExistsError(T5CkptError, FileExistsError):
    """The destination of an export exists, and replacing it was not requested or is not safe."""


class StepKeptError(T5CkptError, RuntimeError):
    """A step was not deleted, replaced or renamed: it is pinned, held or waits for its upload, or the storage cannot rename."""


class SaveFailedError(T5CkptError, RuntimeError):
    """A save that ran in the background failed; ``__cause__`` is the first error."""


class ClosedError(T5CkptError, ValueError):
    """A save with a checkpointer that was closed; with ``local`` also a deletion or a wait for uploads."""


class ReadOnlyError(T5CkptError, ValueError):
    """A save or a deletion with a checkpointer that was made with ``read_only=True``."""


class DisagreementError(T5CkptError, ValueError):
    """The processes of a job called save or restore with different arguments; the message shows the differences."""


class ProcessMissingError(T5CkptError, TimeoutError):
    """A process did not arrive at a barrier, or sent no answer, within ``process_timeout``.

    Attributes:
      missing: the indices of the processes.
      phase: the barrier or the message that the others waited for.
    """

    def __init__(self, action: str, phase: str, missing: tuple[int, ...], seconds: float):
        names = numbered('process', missing, 'processes') if missing else 'one of the processes'
        each = 'Each of them' if len(missing) > 1 else 'It'
        super().__init__(
            f'{action}: {names} did not arrive at {phase!r} within {seconds:g} s. {each} died, is hanging, or did not make the '
            'same call, which every process must make. Look at its log; process_timeout= sets the time-out.'
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
    """Another process failed, so the job's save or restore failed; ``processes`` holds the indices of the processes that did."""

    def __init__(self, message: str, processes: tuple[int, ...] = ()):
        # The other process has escaped the line breaks in its error (core.text.lines_of_error); those that remain are ours.
        super().__init__(lines(*message.split('\n')))
        self.processes = processes


class LocalDirError(T5CkptError, RuntimeError):
    """The local directory is in use by another process, or has the checkpoints of another run."""


class NotPersistedError(T5CkptError, RuntimeError):
    """A step is not in the run's storage; ``__cause__`` is the error of its upload from the local directory, if there is one."""


class UnsupportedTopologyError(T5CkptError, RuntimeError):
    """The processes or devices of the job are not supported."""


class NotEnoughMemoryError(T5CkptError, MemoryError):
    """An array is larger than the memory of this machine, or its metadata says so."""


class MissingDependencyError(T5CkptError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


class MissingMetricWarning(T5CkptWarning):
    """The saved steps do not have the metric that the keep policy compares."""


class MetricModeWarning(T5CkptWarning):
    """The metric of a policy seems to be one whose low values are good, and the mode is the default, 'max'."""


class StepMismatchWarning(T5CkptWarning):
    """The ``step`` of a save differs from the step in the state, from which a restored run would continue."""


class TemplateMismatchWarning(T5CkptWarning):
    """The saved state does not match the checkpointer's template, so it cannot be restored; the message lists the differences."""


@dataclasses.dataclass(frozen=True)
class LeafProblem:
    """One difference between a checkpoint and a template.

    Attributes:
      leaf: the leaf's name, ``'target/decoder/w'``.
      kind: ``'shape'``, ``'key shape'``, ``'dtype'``, ``'missing'``, ``'unexpected'``, ``'sharding'`` or ``'mesh'``.
      checkpoint: shape and dtype in the checkpoint, as text; empty where the checkpoint lacks the leaf.
      template: shape and dtype in the template, as text; empty where the template lacks the leaf.
      hint: a further sentence for the message.
      near: similar names of unmatched leaves on the other side, nearest first: the leaf may have been renamed.
    """

    leaf: str
    kind: str
    checkpoint: str
    template: str
    hint: str = ''
    near: tuple[str, ...] = ()

    def __str__(self) -> str:
        return printable(self._text())

    def _text(self) -> str:
        tail = f' {self.hint}' if self.hint else ''
        tail += f' Near: {", ".join(self.near)}.' if self.near else ''
        match self.kind:
            case 'missing':
                return f'{self.leaf}: not in the checkpoint, template {self.template}.{tail}'
            case 'unexpected':
                return f'{self.leaf}: checkpoint {self.checkpoint}, not in the template.{tail}'
            case 'sharding' | 'mesh':
                return f'{self.leaf}: {self.template}.{tail}'
            case _:
                held = (
                    self.checkpoint if self.checkpoint.startswith('fallback_state') else f'checkpoint {self.checkpoint}'
                )
                return f'{self.leaf}: {held}, template {self.template}.{tail}'


class TreeMismatchError(T5CkptError, ValueError):
    """Checkpoint and template differ; ``problems`` lists every difference."""

    def __init__(
        self, message: str, problems: Sequence[LeafProblem] = (), rename: Sequence[tuple[str, str | None]] = ()
    ):
        super().__init__(message)
        self.problems = tuple(problems)
        # The rules that the message proposes.
        self.rename = tuple(rename)


class ShapeMismatch(TreeMismatchError):  # noqa: N818 - the name is public
    """Only shapes differ."""


class DtypeMismatch(TreeMismatchError):  # noqa: N818
    """Only dtypes differ, and in kind (float, integer, bool, complex, key)."""


class MissingLeaves(TreeMismatchError):  # noqa: N818
    """The template has leaves that the checkpoint lacks; the others match."""


class UnexpectedLeaves(TreeMismatchError):  # noqa: N818
    """The checkpoint has leaves that the template lacks; the others match."""


class ShardingMismatch(TreeMismatchError):  # noqa: N818
    """The shardings of the template do not fit its shapes or its mesh; the rest matches."""


class UnmatchedPattern(TreeMismatchError):  # noqa: N818
    """A pattern or a cast matches no leaf, so it would have no effect."""


_INITIAL = (
    'leave= of restore and WarmStart takes the leaf from the initial state; t5ckpt.open_checkpoint(path)[leaf][...] reads the '
    'old values.'
)
# In the words of LeafChoice, which all functions take that restore.
_CURES = {
    'dtype': f'Values are not cast to another kind of dtype: change the template. {_INITIAL}',
    'key shape': 'Keys are not padded, which would repeat a stream of random numbers: change the template, or take new keys from '
    'the initial state (leave= of restore and WarmStart).',
    'mesh': 'jax.eval_shape gives such shardings inside jax.set_mesh and for arrays over Explicit axes, the default of '
    'jax.make_mesh. Restore inside jax.set_mesh(mesh), or give each leaf the mesh: jax.ShapeDtypeStruct(leaf.shape, '
    'leaf.dtype, sharding=NamedSharding(mesh, leaf.sharding.spec)).',
    'missing': "missing='init' takes new leaves from the initial state: that of init_fn, or of the template in restore.",
    'shape': f'resize= pads with zeros or truncates a leaf with as many axes. {_INITIAL}',
    'sharding': 'Use None for such a dimension in the PartitionSpec (by the rules of a partitioner), or a mesh whose axis '
    'divides it.',
    'unexpected': "strict='contains' leaves out all leaves that the template lacks. ... in the template leaves out one leaf or "
    'subtree, such as a replay buffer that grows; t5ckpt.load_t5x_checkpoint(directory, checkpointer.restored_step) reads it.',
}
_CLASSES: dict[str, type[TreeMismatchError]] = {
    'shape': ShapeMismatch,
    'dtype': DtypeMismatch,
    'key shape': ShapeMismatch,
    'mesh': ShardingMismatch,
    'missing': MissingLeaves,
    'sharding': ShardingMismatch,
    'unexpected': UnexpectedLeaves,
}


def mismatch_error(
    problems: Sequence[LeafProblem],
    where: str,
    rename: Sequence[tuple[str, str | None]] = (),
    remaining: int = 0,
) -> TreeMismatchError:
    """Builds the one error that holds all differences.

    Args:
      problems: the differences, at least one.
      where: the checkpoint, for the first line.
      rename: rules of ``rename=`` for changed names, if there are any.
      remaining: the number of differences that remain with these rules.

    Returns:
      The class of the kind when all problems are of one kind, else TreeMismatchError.
    """
    kinds = sorted({problem.kind for problem in problems})
    classes = {_CLASSES[kind] for kind in kinds}
    cls = classes.pop() if len(classes) == 1 else TreeMismatchError
    shown = [f'{where} does not fit the template in {counted(len(problems), "place")}:']
    shown += listed(problems, ', all of them in .problems')
    if rename:
        changed = (
            f'If names have changed, too ({counted(remaining, "place")} will remain)'
            if remaining
            else 'If only names have changed'
        )
        shown.append(f"{changed}, map them, the template's name first: rename={[*rename]!r}")
    shown += dict.fromkeys(_CURES[kind] for kind in kinds)
    if kinds != ['sharding']:
        shown.append('docs/changed-models.md has examples.')
    return cls(lines(*shown), problems, rename)


def near_names(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Names close to ``name``, nearest first, at most ``count``.

    The comparison is quadratic in the length of the names, so at most 500 candidates are compared. Those with the same last
    component come first, because a renamed scope is the commonest cause.
    """
    last = name.rpartition('/')[2]
    candidates = sorted(names, key=lambda other: (other.rpartition('/')[2] != last, other))[:500]
    return difflib.get_close_matches(name, candidates, count)

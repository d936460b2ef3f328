"""The result of a verification, and its text."""

from __future__ import annotations

import dataclasses

from t5ckpt.core.text import CURE_OF_DAMAGE, counted, lines, listed, printable
from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.chunk_grid import Box, chunk_key


@dataclasses.dataclass(frozen=True)
class Damage:
    """One damage of a checkpoint.

    Attributes:
      kind: ``'missing'``, ``'size'``, ``'checksum'``, ``'undecodable'``, ``'contradiction'`` (two files that do not belong
        together), ``'unsafe'`` (it leads outside the checkpoint) or ``'unreadable'`` (the file system failed).
      file: relative to the checkpoint's directory; ``'.'`` if a tree of Orbax does not decode.
      text: the found and the expected value.
      leaf: the leaf whose values are affected; empty if none or all are.
      chunk: the chunk's position in the leaf's chunk grid.
      box: the leaf's elements in that chunk, (start, stop) per dimension.
    """

    kind: str
    file: str
    text: str
    leaf: str = ''
    chunk: tuple[int, ...] | None = None
    box: Box | None = None

    def __str__(self) -> str:
        where = self.leaf
        if self.chunk is not None:
            where += f' chunk {chunk_key(self.chunk)}'
        if self.box:
            where += f' [{", ".join(f"{start}:{stop}" for start, stop in self.box)}]'
        text = ': '.join(part for part in (where, self.file, f'{self.kind}: {self.text}') if part)
        return printable(text)


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
      path: the manifest, or the directory of a checkpoint without one.
      step: from the directory's name, or None.
      full: whether every byte was read; otherwise only presence, sizes and the manifest were checked.
      has_checksums: whether the checkpoint has file checksums, as all checkpoints of t5ckpt do. In others, ``full`` decodes
        every chunk, which detects missing, truncated and undecodable chunks, but not a flipped bit in uncompressed values.
      damages: all damages, by file.
      notes: observations that are not damages, such as unknown files.
      part: for the part of a step in the local directory of one of several processes: the process whose files it has, such as
        ``'process 2 of 4'``; otherwise None. The files of the other processes were not checked.
      leaves: the number of stored arrays.
      files: the number of files that were checked.
      nbytes: the bytes of these files.
      seconds: the duration.
    """

    path: str
    step: int | None
    full: bool
    has_checksums: bool
    damages: tuple[Damage, ...]
    notes: tuple[str, ...]
    part: str | None
    leaves: int
    files: int
    nbytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the checkpoint has no damages."""
        return not self.damages

    def raise_if_damaged(self) -> None:
        """Raises CorruptCheckpointError with the damages, if there are any."""
        if self.damages:
            raise CorruptCheckpointError(
                lines(
                    f'{self.path} is damaged in {counted(len(self.damages), "place")}:',
                    *self._listed(),
                    CURE_OF_DAMAGE,
                )
            )

    def _listed(self) -> list[str]:
        return listed(self.damages, ', all of them in .damages')

    def __str__(self) -> str:
        how = 'every byte read' if self.full else 'presence and sizes'
        how += '' if self.has_checksums else ', no checksums recorded'
        intact = 'complete and intact' if self.full else 'complete'
        result = intact if self.ok else f'damaged in {counted(len(self.damages), "place")}'
        # Without a stored array, all are small; without a manifest that decodes, their number is unknown.
        arrays = counted(self.leaves, 'array') if self.leaves else 'all leaves in the manifest' if self.ok else ''
        size = ', '.join(filter(None, [arrays, counted(self.files, 'file'), counted(self.nbytes, 'byte')]))
        part = '' if self.part is None else f'the part of {self.part}: '
        head = f'{self.path}: {part}{result} ({how}; {size})'
        unread = (
            ['the contents of the files were not read; full=True (--full) reads every byte']
            if self.ok and not self.full
            else []
        )
        return lines(head, *self._listed(), *(f'  note: {note}' for note in (*unread, *self.notes)))

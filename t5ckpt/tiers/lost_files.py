"""The files that one process of a save was to upload, and whose disk is lost: the disks of replicas have them.

Only the processes' lists of file checksums say which file is assigned to which process. If one list is lost, its files are those
in no other list. The list itself is made from their checksums, and compared with its own in the facts.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.distributed.rounds import CoordinationRound, Phase
from t5ckpt.format.file_checksums import FileEntry
from t5ckpt.tiers.coverage import decode_bits, encode_bits, plan_sends, union
from t5ckpt.tiers.part import Part
from t5ckpt.tiers.upload import NotUploadableError

_MOST_TEXT_BYTES = 3 * 2**20


@dataclasses.dataclass(frozen=True)
class LostFiles:
    """The files of a lost disk that this process uploads.

    Attributes:
      save: identifies the save that is uploaded.
      index: of the process in the save.
      names: of the files.
    """

    save: str = ''
    index: int = -1
    names: tuple[str, ...] = ()

    def of(self, part: Part) -> dict[str, FileEntry] | None:
        """The files, if they are those of a part."""
        return {name: part.checksums[name] for name in self.names} if part.save == self.save else None


def find_lost_files(upload_round: CoordinationRound, part: Part, index: int) -> LostFiles | None:
    """Assigns the files that the process ``index`` of a save was to upload, and whose disk is lost; every process calls it.

    With the index -1 there are none.

    Returns:
      None if the disks do not have all of them.
    """
    if index < 0:
        return LostFiles()
    numbers = part.numbers()
    vote = [encode_bits(numbers.bits(part.listed())), encode_bits(numbers.bits(part.there))]

    def decide(votes: Sequence[Any]) -> int | None:
        listed = union((text for text, _ in votes), numbers.count)
        plan = plan_sends(
            np.packbits(np.ones(numbers.count, bool)) & ~listed, [text for _, text in votes], numbers.count
        )
        for process, text in enumerate(plan.sends):
            upload_round.share(f'sends/{process}', text.encode())
        having = [process for process, (_, text) in enumerate(votes) if text]
        return None if plan.nowhere.any() or not having else having[0]

    first = upload_round.reduce_on_leader(Phase.SEND, vote, decide)
    if first is None:
        return None
    sends = decode_bits(upload_round.receive(f'sends/{upload_round.processes.index}').decode(), numbers.count)
    existing = sorted(part.there)
    names = numbers.chosen(existing, sends) + part.positions_of(index)
    if index == 0 and upload_round.processes.index == first:
        names += [name for name in existing if name.endswith('/.zarray')]
    return LostFiles(part.save, index, tuple(names))


def pack(entries: Mapping[str, FileEntry]) -> str:
    """Entries as text; :func:`unpack` reads it. gRPC refuses messages above 4 MiB."""
    text = base64.b64encode(zlib.compress(json.dumps(dict(entries)).encode())).decode()
    if len(text) > _MOST_TEXT_BYTES:
        raise NotUploadableError(f'the checksums of {len(entries)} files are too large for one message')
    return text


def unpack(text: str) -> dict[str, FileEntry]:
    """The entries of a text."""
    entries: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return {name: (size, checksum) for name, (size, checksum) in entries.items()}

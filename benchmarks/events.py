"""What SaveBestCheckpointer's metrics cost late in a run: 1,000,000 events, 100 saves.

    python benchmarks/events.py [EVENTS] [SAVES]

Each save asks for the metrics of 10 steps after 1/SAVES of the events have come. "anew" reads the whole file at every
tenth save, as a reader without memory does at each.
"""

from __future__ import annotations

import pathlib
import struct
import sys
import tempfile
import time

from t5ckpt.metrics import TensorBoardMetrics
from t5ckpt.metrics.event_file import masked_crc32c


def _event(step: int, tag: bytes, value: float) -> bytes:
    """A record as TensorBoard's writers make it."""
    shown = b'\x0a' + bytes([len(tag)]) + tag + b'\x15' + struct.pack('<f', value)
    summary = b'\x0a' + bytes([len(shown)]) + shown
    number = b''
    while step > 0x7F:
        number, step = number + bytes([step & 0x7F | 0x80]), step >> 7
    event = (
        b'\x09' + struct.pack('<d', 1.0) + b'\x10' + number + bytes([step]) + b'\x2a' + bytes([len(summary)]) + summary
    )
    head = struct.pack('<Q', len(event))
    return head + struct.pack('<I', masked_crc32c(head)) + event + struct.pack('<I', masked_crc32c(event))


def main() -> None:
    """Prints seconds for the saves, and for reading all of it anew."""
    events, saves = (int(word) for word in (sys.argv[1:] or ('1000000', '100')))
    if saves < 10:
        sys.exit('at least ten saves: every tenth is measured anew')
    seconds: list[float] = []
    anew: list[float] = []
    with tempfile.TemporaryDirectory() as root:
        run = pathlib.Path(root, 'train')
        run.mkdir()
        metrics = TensorBoardMetrics(root)
        with (run / 'events.out.tfevents.1').open('wb', buffering=0) as file:
            for save in range(saves):
                steps = range(save * events // saves, (save + 1) * events // saves)
                tags = (b'accuracy', b'loss', b'learning_rate', b'grad_norm')
                file.write(b''.join(_event(step, tags[step % 4], 0.5) for step in steps))
                started = time.perf_counter()
                metrics.by_step('train/accuracy', steps[-40::4])
                seconds.append(time.perf_counter() - started)
                if save % 10 == 9:
                    started = time.perf_counter()
                    TensorBoardMetrics(root).by_step('train/accuracy', steps[-40::4])
                    anew.append(time.perf_counter() - started)
    print(f'{events} events, {saves} saves: {sum(seconds):.2f} s in all')
    print(
        f'the first 10 saves {sum(seconds[:10]) / 10 * 1e3:.1f} ms each, the last 10 {sum(seconds[-10:]) / 10 * 1e3:.1f} ms'
    )
    print(f'the last save with everything read anew: {anew[-1]:.2f} s')


if __name__ == '__main__':
    main()

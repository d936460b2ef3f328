"""Memory and time of conversions: checkpoints of a T5's shapes, read and written tensor by tensor.

    python benchmarks/conversion.py                          4 GB, with mT5's vocabulary: an embedding of 1 GB, twice
    python benchmarks/conversion.py --gigabytes 0.2          a small one, which only shows that everything works

Writes a TensorFlow checkpoint of that size (without TensorFlow), converts it, copies the result cast to bfloat16, and
links it; each in a process of its own. Reported is the peak of that process's resident memory above what it had once the
converter was imported. Wants four times the size on the disk of --directory. The page cache is warm: the file was just written.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import google_crc32c
import numpy as np

_STEP = 1000
_D_MODEL, _VOCABULARY = 1024, 250112


# --- a TensorFlow checkpoint, as tensor_bundle.h has it ----------------------------------------------------------------


def shapes_of(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """T5 1.1 large with mT5's vocabulary, as many layers as make up the size in float32; a smaller vocabulary if it is small."""
    budget = gigabytes * 10**9 / 4
    vocabulary = min(_VOCABULARY, int(budget / 4 / _D_MODEL))
    shapes: dict[str, tuple[int, ...]] = {'shared/embedding': (vocabulary, _D_MODEL)}
    shapes['decoder/logits/kernel'] = (_D_MODEL, vocabulary)
    shapes['decoder/rms_norm/scale'] = shapes['encoder/rms_norm/scale'] = (_D_MODEL,)
    budget -= 2 * vocabulary * _D_MODEL
    layer = 0
    while budget > 0:
        block = dict(_block('encoder', layer)) | dict(_block('decoder', layer))
        shapes |= block
        budget -= sum(int(np.prod(shape)) for shape in block.values())
        layer += 1
    return dict(sorted(shapes.items()))


def _block(tower: str, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    base = f'{tower}/block_{number:03d}'
    attentions = ['SelfAttention', 'EncDecAttention'][: 2 if tower == 'decoder' else 1]
    for layer, kind in enumerate(attentions):
        for projection in 'qkvo':
            yield f'{base}/layer_{layer:03d}/{kind}/{projection}', (_D_MODEL, _D_MODEL)
        yield f'{base}/layer_{layer:03d}/rms_norm/scale', (_D_MODEL,)
    last = f'{base}/layer_{len(attentions):03d}'
    yield f'{last}/rms_norm/scale', (_D_MODEL,)
    for name in ('wi_0', 'wi_1'):
        yield f'{last}/DenseReluDense/{name}/kernel', (_D_MODEL, 2816)
    yield f'{last}/DenseReluDense/wo/kernel', (2816, _D_MODEL)


def write_bundle(prefix: pathlib.Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """Writes tensors of noise; returns the bytes."""
    noise = np.random.default_rng(0).standard_normal(2**24, np.float32)
    entries: list[tuple[bytes, bytes]] = [(b'', _field(1, 1))]
    offset = 0
    with open(f'{prefix}.data-00000-of-00001', 'wb') as file:
        for name, shape in shapes.items():
            crc, left = 0, int(np.prod(shape))
            size = 4 * left
            while left:
                part = noise[: min(left, noise.size)].tobytes()
                file.write(part)
                crc, left = google_crc32c.extend(crc, part), left - len(part) // 4
            dims = b''.join(_field(2, _field(1, dim)) for dim in shape)
            entry = _field(1, 1) + _field(2, dims) + _field(4, offset) + _field(5, size)
            entries.append((name.encode(), entry + b'\x35' + struct.pack('<I', _masked(crc))))
            offset += size
    _write_table(pathlib.Path(f'{prefix}.index'), entries)
    return offset


def _varint(value: int) -> bytes:
    out = b''
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _write_table(path: pathlib.Path, entries: list[tuple[bytes, bytes]]) -> None:
    def block(pairs: list[tuple[bytes, bytes]]) -> bytes:
        body = b''.join(b'\0' + _varint(len(key)) + _varint(len(value)) + key + value for key, value in pairs)
        body += struct.pack('<II', 0, 1)
        return body + b'\0' + struct.pack('<I', _masked(google_crc32c.extend(0, body + b'\0')))

    def handle(start: int, size: int) -> bytes:
        return _varint(start) + _varint(size - 5)

    data, empty = block(entries), block([])
    index = block([(entries[-1][0], handle(0, len(data)))])
    footer = handle(len(data), len(empty)) + handle(len(data) + len(empty), len(index))
    footer = footer.ljust(40, b'\0') + struct.pack('<Q', 0xDB4775248B80FB57)
    path.write_bytes(data + empty + index + footer)


# --- one conversion in a process of its own ----------------------------------------------------------------------------


def measured(case: str, folder: pathlib.Path) -> dict[str, float]:
    """Seconds and peak megabytes of one case; run in a fresh process."""
    from t5ckpt.convert import ConvertOptions, convert_checkpoint as convert
    from t5ckpt.convert.copy import copy_checkpoint as rewrite

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    match case:
        case 'tf':
            convert('tf', folder / 'tf', folder / 'run')
        case 'cast':
            rewrite(folder / 'run', folder / 'cast', ConvertOptions(save_dtype='bfloat16'))
        case 'link':
            rewrite(folder / 'run', folder / 'link')
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        'seconds': time.monotonic() - started,
        'peak_mb': (peak - before) * 1024 / 10**6,
        'base_mb': before * 1024 / 10**6,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--gigabytes', type=float, default=4)
    parser.add_argument('--directory', type=pathlib.Path)
    parser.add_argument('--case', help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.case is not None:
        print(json.dumps(measured(words.case, words.directory)))
        return
    with tempfile.TemporaryDirectory(dir=words.directory) as name:
        folder = pathlib.Path(name)
        (folder / 'tf').mkdir()
        nbytes = write_bundle(folder / 'tf' / f'model.ckpt-{_STEP}', shapes_of(words.gigabytes))
        print(f'{nbytes / 10**9:.2f} GB of float32')
        for case in ('tf', 'link', 'cast'):
            command = [sys.executable, __file__, '--case', case, '--directory', str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            answer = json.loads(done.stdout)
            print(
                f'{case:8} {answer["seconds"]:6.1f} s, {nbytes / answer["seconds"] / 10**9:.2f} GB/s, peak '
                f'{answer["peak_mb"]:.0f} MB above {answer["base_mb"]:.0f} MB'
            )


if __name__ == '__main__':
    main()

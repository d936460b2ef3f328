"""Equality to the bit: NaN payloads and signed zeros count, the unused bits of sub-byte dtypes do not."""

from typing import Any

import ml_dtypes
import numpy as np

#: ml_dtypes keeps these in one byte each and defines only the low bits.
_SUB_BYTE = {
    np.dtype(ml_dtypes.int2): 0x03,
    np.dtype(ml_dtypes.uint2): 0x03,
    np.dtype(ml_dtypes.int4): 0x0F,
    np.dtype(ml_dtypes.uint4): 0x0F,
    np.dtype(ml_dtypes.float4_e2m1fn): 0x0F,
    np.dtype(ml_dtypes.float6_e2m3fn): 0x3F,
    np.dtype(ml_dtypes.float6_e3m2fn): 0x3F,
}


def bits(array: Any) -> bytes:
    """The defined bits of an array in C order, little-endian."""
    array = np.asarray(array)
    if array.dtype.byteorder == '>':
        array = array.astype(array.dtype.newbyteorder('<'))
    raw = np.frombuffer(array.tobytes(), np.uint8)
    mask = _SUB_BYTE.get(array.dtype)
    return raw.tobytes() if mask is None else (raw & mask).tobytes()


def fingerprint(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """(dtype name, shape, bits): equal exactly if two arrays are the same."""
    array = np.asarray(array)
    return array.dtype.name, array.shape, bits(array)


def assert_same(actual: Any, expected: Any, name: str = '') -> None:
    """Same dtype, same shape, same bits."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f'{name}: dtype {actual.dtype}, expected {expected.dtype}'
    assert actual.shape == expected.shape, f'{name}: shape {actual.shape}, expected {expected.shape}'
    if bits(actual) != bits(expected):
        got, want = np.frombuffer(bits(actual), np.uint8), np.frombuffer(bits(expected), np.uint8)
        bad = np.flatnonzero(got != want)
        raise AssertionError(
            f'{name}: {bad.size} of {want.size} bytes differ, first byte {bad[0]}: {got[bad[0]]} != {want[bad[0]]}'
        )


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of arbitrary bits: NaNs with payloads, infinities, denormals and negative zeros included."""
    dtype = np.dtype(dtype)
    n = int(np.prod(shape, dtype=np.int64))
    raw = rng.integers(0, 256, n * dtype.itemsize, np.uint8)
    if dtype == np.bool_:
        raw &= 1
    if dtype in (np.dtype(ml_dtypes.int2), np.dtype(ml_dtypes.int4)):
        # Signed sub-byte values are kept sign-extended: go through real values.
        half = 2 if dtype == np.dtype(ml_dtypes.int2) else 8
        return (rng.integers(-half, half, n)).astype(np.int8).astype(dtype).reshape(shape)
    if dtype in _SUB_BYTE:
        raw &= _SUB_BYTE[dtype]
    return raw.view(dtype).reshape(shape)

"""Reads the headers of an npz file (``numpy.savez``): a zip archive with one npy file per array.

The format: numpy.org/doc/stable/reference/generated/numpy.lib.format.html, and APPNOTE.TXT of PKWARE, 4.3.7, for the archive.

npz has no bfloat16, float8 and int4. t5ckpt writes such an array as its bits, with the dtype at the end of its name,
``target/w::bfloat16``. numpy.savez writes bfloat16 as opaque values of two bytes, which no other dtype of JAX has.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import math
import struct
import zipfile
import zlib
from collections.abc import Generator, Mapping
from typing import BinaryIO

import numpy as np

from t5ckpt.errors import CorruptCheckpointError, StorageError, UnsupportedFormatError
from t5ckpt.format.dtypes import DTYPES
from t5ckpt.storage import foreign_errors
from t5ckpt.tree.leaves import native_dtype

BITS: Mapping[int, np.dtype] = {1: np.dtype('uint8'), 2: np.dtype('uint16')}
"""The dtype of the bits of an array whose dtype npz lacks, by itemsize."""

# The maximum number of bytes per byte of a deflate stream (zlib.net/zlib_tech.html, "Maximum Compression Factor").
_DEFLATE_RATIO = 1032
# The length of a member's header in the archive, without the name and the extra field.
_LOCAL_HEADER = 30
# The errors of zipfile, zlib and NumPy for damaged files; RuntimeError is raised for an encrypted file.
_DAMAGE = (
    EOFError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    SyntaxError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclasses.dataclass(frozen=True)
class NpzArray:
    """An array in a file.

    Attributes:
      member: its file in the archive.
      name: of the array.
      dtype: of the array, in native byte order.
      stored: the dtype of the npy file.
      shape: of the array.
      header: the length of the npy file's header, in bytes.
      obstacle: why the bytes of the file are not those of an array in C order, such as 'compressed'; empty if they are.
    """

    member: str
    name: str
    dtype: np.dtype
    stored: np.dtype
    shape: tuple[int, ...]
    header: int
    obstacle: str


def npz_arrays(archive: zipfile.ZipFile, where: str) -> tuple[list[NpzArray], dict[str, str]]:
    """The arrays of an archive, and the dtypes by name of those that a checkpoint cannot hold; reads the headers only.

    Raises:
      CorruptCheckpointError: a header does not decode, or does not match the size of its file.
      UnsupportedFormatError: a compression method that NumPy does not use, or two arrays of one name.
    """
    twice = [member for member, count in collections.Counter(archive.namelist()).items() if count > 1]
    if twice:
        raise UnsupportedFormatError(
            f'{where} has several arrays of the name {twice[0]}. Save it again with one of them.'
        )
    arrays: list[NpzArray] = []
    unread: dict[str, str] = {}
    for member in archive.namelist():
        array = _array(archive, member, f'{where}: {member}')
        if isinstance(array, NpzArray):
            arrays.append(array)
        else:
            unread[member.removesuffix('.npy')] = array
    return arrays, unread


def _array(archive: zipfile.ZipFile, member: str, where: str) -> NpzArray | str:
    """An array, or its dtype if a checkpoint cannot hold it."""
    with npz_errors(where), archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        try:
            shape, is_fortran, dtype = read(file)
        except ValueError as error:
            # numpy.savez writes float8_e5m2 under a name that NumPy does not read.
            unknown = str(error).partition('is not a valid dtype descriptor: ')[2]
            if not unknown:
                raise
            return unknown
        header = file.tell()
    stored = native_dtype(dtype)
    native = np.dtype('bfloat16') if stored == np.dtype('V2') and dtype.names is None else stored
    if native.name not in DTYPES:
        return str(dtype)
    info = archive.getinfo(member)
    _check_size(info, header, math.prod(shape) * dtype.itemsize, where)
    whole = member.removesuffix('.npy')
    name, _, bits = whole.rpartition('::')
    extended = extended_dtype(bits, native)
    obstacles = {
        'compressed': info.compress_type != zipfile.ZIP_STORED,
        'big-endian': dtype.str[0] == '>',
        'in Fortran order': is_fortran and len(shape) > 1,
    }
    obstacle = next((text for text, applies in obstacles.items() if applies), '')
    if extended is None:
        return NpzArray(member, whole, native, stored, shape, header, obstacle)
    return NpzArray(member, name, extended, stored, shape, header, obstacle)


def stored_range(file: BinaryIO, archive: zipfile.ZipFile, array: NpzArray) -> int:
    """The first byte of an array without obstacle, from the beginning of the file."""
    start = archive.getinfo(array.member).header_offset
    file.seek(start)
    name, extra = struct.unpack('<26xHH', file.read(_LOCAL_HEADER))
    return start + _LOCAL_HEADER + name + extra + array.header


def _check_size(info: zipfile.ZipInfo, header: int, nbytes: int, where: str) -> None:
    """Compares the sizes in the header and in the archive with the compressed size, before an array is allocated.

    Raises:
      CorruptCheckpointError: they do not match.
      UnsupportedFormatError: a compression method that NumPy does not use.
    """
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UnsupportedFormatError(
            f'{where} is compressed with method {info.compress_type}; numpy.savez uses 0 and 8. Save it again.'
        )
    packed = info.compress_size * (1 if info.compress_type == zipfile.ZIP_STORED else _DEFLATE_RATIO)
    if header + nbytes != info.file_size or nbytes > packed:
        raise CorruptCheckpointError(
            f'{where}: its header has {nbytes:,} bytes of values, but the file has room for '
            f'{max(0, min(info.file_size - header, packed)):,}. Copy the file again.'
        )


@contextlib.contextmanager
def npz_errors(where: str) -> Generator[None]:
    """Turns the errors of a damaged file into :class:`CorruptCheckpointError`, and those of the storage into StorageError."""
    try:
        with foreign_errors(where):
            yield
    except (*_DAMAGE, CorruptCheckpointError, StorageError) as error:
        # A damaged offset is a seek to a place before the file.
        if isinstance(error, StorageError) and error.errno != errno.EINVAL:
            raise
        raise CorruptCheckpointError(
            f'{where} does not decode as npz ({error!s:.120}): it is damaged, or not an npz file. Copy it again.'
        ) from error


def is_extended(dtype: np.dtype) -> bool:
    """Whether npz lacks a dtype."""
    return dtype.isbuiltin != 1


def extended_dtype(name: str, stored: np.dtype) -> np.dtype | None:
    """The dtype at the end of a name, if npz lacks it and ``stored`` is the dtype of its bits."""
    dtype = DTYPES.get(name)
    return dtype if dtype is not None and is_extended(dtype) and stored == BITS[dtype.itemsize] else None

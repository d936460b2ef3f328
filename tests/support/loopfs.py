"""A file system of its own in a file, whose power can be cut: ext4 or xfs on a loop device. Needs root."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Generator

import pytest

_MEGABYTES = {'ext4': 96, 'xfs': 320}
# linux/fs.h: FS_IOC_SHUTDOWN, without flushing the log.
_SHUTDOWN, _NOLOGFLUSH = 0x8004587D, 2


def _run(*command: str) -> None:
    # The shim is for the program that is tested, not for these.
    environment = {name: value for name, value in os.environ.items() if name != 'LD_PRELOAD'}
    subprocess.run(command, check=True, env=environment, capture_output=True)


def require(kind: str) -> None:
    """Skips the test where file systems cannot be made and mounted."""
    if os.geteuid() != 0:
        pytest.skip('mounting a file system needs root')
    if shutil.which(f'mkfs.{kind}') is None:
        pytest.skip(f'mkfs.{kind} is not installed')
    try:
        with mounted(kind):
            pass
    except subprocess.CalledProcessError as error:
        pytest.skip(f'this kernel or container mounts no {kind} image: {error.stderr.decode(errors="replace")!r:.200}')


@contextlib.contextmanager
def mounted(kind: str) -> Generator[pathlib.Path]:
    """An empty file system; `image` lies beside the directory that it is mounted on."""
    with tempfile.TemporaryDirectory(prefix='t5ckpt-loop-') as name:
        place = pathlib.Path(name) / 'mount'
        place.mkdir()
        image = pathlib.Path(name) / 'image'
        with image.open('wb') as file:
            file.truncate(_MEGABYTES[kind] * 2**20)
        _run(f'mkfs.{kind}', '-q', str(image))
        _run('mount', '-o', 'loop', str(image), str(place))
        try:
            yield place
        finally:
            _run('umount', '--lazy', str(place))


def remount(place: pathlib.Path) -> None:
    """What happens at the next boot: the journal is replayed."""
    _run('umount', str(place))
    _run('mount', '-o', 'loop', str(place.parent / 'image'), str(place))


def cut_power(place: pathlib.Path) -> None:
    """Nothing reaches the disk any more, not even the journal."""
    fd = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack('I', _NOLOGFLUSH))
    finally:
        os.close(fd)

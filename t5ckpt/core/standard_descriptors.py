"""Keeps the descriptors 0, 1 and 2 from files."""

from __future__ import annotations

import os


def open_standard_descriptors() -> None:
    """Opens the descriptors 0, 1 and 2 if they are closed, so that no file gets them: C code may log to them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one. Standard output is opened for reading, so that writes to it fail.
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)

"""Run by another process, with one version of zarr-python on its path: reads arrays, and writes their bytes.

    python with_zarr.py DIRECTORY OUT NAME...

Writes the version to standard output. Nothing of t5ckpt is imported here.
"""

import contextlib
import pathlib
import sys

import zarr

with contextlib.suppress(ImportError):
    # Numpy then knows bfloat16.
    import ml_dtypes  # noqa: F401

root, out, *names = sys.argv[1:]
for name in names:
    array = zarr.open(str(pathlib.Path(root, name)), mode='r')
    pathlib.Path(out, name).write_bytes(array[...].tobytes())
sys.stdout.write(zarr.__version__)

"""Copies files between any two storages, concurrently: for copies of a step, and for uploads and downloads of local steps.

Notes: memory holds the files in flight, 256 MiB or one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from t5ckpt.core.byte_budget import ByteBudget
from t5ckpt.core.keys import join, parents_of
from t5ckpt.core.thread_pool import Pool
from t5ckpt.format.names import without_generation
from t5ckpt.storage import Storage

IN_FLIGHT_BYTES = 256 * 2**20

# Reserved for a file whose size a listing does not have.
_UNKNOWN_BYTES = 16 * 2**20


def copy_files(
    read: Callable[[str], bytes],
    sizes: Mapping[str, int],
    target: Storage,
    directory: str,
    workers: int,
    before: Callable[[int], None] = lambda _: None,
    budget_bytes: int = IN_FLIGHT_BYTES,
) -> Iterator[int]:
    """Copies files into a directory, in threads; yields the size of each.

    Args:
      read: returns the bytes of a file, by name.
      sizes: by name; 0 if unknown.
      target: the storage of the copies.
      directory: theirs. Their names are without the directory of the save, see ``names.generation_dir``.
      workers: the number of threads.
      before: called with the size of each file; it may wait, or raise an error, which ends the iteration.
      budget_bytes: the most bytes in flight, if these are of more than one file.
    """
    for parent in parents_of(map(without_generation, sizes)):
        target.make_dir(join(directory, parent))
    budget = ByteBudget(budget_bytes)

    def copy(name: str, size: int) -> int:
        before(size)
        reserved = size or _UNKNOWN_BYTES
        budget.acquire(reserved)
        try:
            data = read(name)
            target.write(join(directory, without_generation(name)), data)
            return len(data)
        finally:
            budget.release(reserved)

    with Pool(workers) as pool:
        for future in [pool.submit(copy, name, size) for name, size in sizes.items()]:
            yield future.result()

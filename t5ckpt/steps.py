"""Finds, lists and pins checkpoints, with T5X's signatures (t5x/checkpoints.py, checkpoint_utils.py).

A step is listed if its directory has a manifest, which is written last, or if it is in a layout of Orbax or Flax
(``catalog/layouts.py``). A damaged one is listed, too, and raises when it is opened.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from t5ckpt.catalog.layouts import (
    ORBAX,
    inspect_name,
    is_orbax,
    other_layout,
)
from t5ckpt.catalog.listing import dataset_steps_in, newest, steps_in
from t5ckpt.catalog.locate import locate, log_other_contents
from t5ckpt.catalog.pin_file import NO_REASON, is_pinned_at, unpin_at
from t5ckpt.commit.holds import pin_in
from t5ckpt.core.arguments import integer
from t5ckpt.format.names import step_dir
from t5ckpt.storage import PathOrStorage, open_storage, split_path


def get_checkpoint_dir(
    checkpoints_dir: str | os.PathLike[str], step: int, step_format_fixed_length: int | None = None
) -> str:
    """The directory of a step, ``<checkpoints_dir>/checkpoint_<step>``, which need not exist.

    Args:
      checkpoints_dir: the run's directory.
      step: its number.
      step_format_fixed_length: pads the number with zeros to this many digits, as in T5X. T5X and t5ckpt list such directories,
        but do not write them.
    """
    name = step_dir(integer('step', step), step_format_fixed_length or 0)
    return os.path.join(os.fspath(checkpoints_dir), name)


def all_steps(checkpoints_dir: PathOrStorage, *, storage_options: Mapping[str, Any] | None = None) -> list[int]:
    """The steps of all complete checkpoints, ascending; empty when the directory is empty or absent.

    Args:
      checkpoints_dir: the run's directory.
      storage_options: see docs/storage.md.
    """
    return steps_in(open_storage(checkpoints_dir, storage_options))


def latest_step(checkpoints_dir: PathOrStorage, *, storage_options: Mapping[str, Any] | None = None) -> int | None:
    """The largest complete step, or None if there is none. Step 0 is a step.

    Logs checkpoints in the directory that are no steps: of Flax with a fraction as their number, or those of a run in it.

    Args:
      checkpoints_dir: the run's directory.
      storage_options: see docs/storage.md.
    """
    storage = open_storage(checkpoints_dir, storage_options)
    listed = newest(storage)
    if listed is not None:
        return listed.step
    log_other_contents(storage)
    return None


def all_dataset_checkpoint_steps(
    checkpoints_dir: PathOrStorage, *, storage_options: Mapping[str, Any] | None = None
) -> list[int]:
    """The steps whose directory holds data-iterator state (``train_ds-*``), ascending.

    Args:
      checkpoints_dir: the run's directory.
      storage_options: see docs/storage.md.
    """
    return dataset_steps_in(open_storage(checkpoints_dir, storage_options))


def find_checkpoint(
    path: str | os.PathLike[str], step: int | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> str:
    """The path of a checkpoint's manifest file.

    Args:
      path: a run's directory, a step's directory, or the manifest file itself.
      step: which step, if ``path`` is a run's directory; None takes the latest. Ignored for a file, as in T5X.
      storage_options: see docs/storage.md.

    Returns:
      The manifest's path; for an Orbax directory, which has no manifest, the directory.

    Raises:
      CheckpointNotFoundError: no checkpoint; the message lists the contents of the directory.
    """
    parent, name = split_path(path)
    if step is not None and name and open_storage(parent, storage_options).is_file(name):
        step = None
    return locate(path, step, storage_options).url


# --- pins ------------------------------------------------------------------------------------------------------------


def pin_checkpoint(
    ckpt_dir: str | os.PathLike[str], txt: str = NO_REASON, *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Pins a step with a file ``PINNED`` (T5X's name) in its directory, so that retention never deletes it.

    Args:
      ckpt_dir: the step's directory; it must exist.
      txt: the file's contents, such as who pinned it and why; the default keeps those of an earlier pin.
      storage_options: see docs/storage.md.

    Raises:
      CheckpointNotFoundError: it is not a checkpoint.
      UnsupportedFormatError: it is in the layout of Orbax or Flax, to which t5ckpt writes nothing.
    """
    storage = open_storage(ckpt_dir, storage_options)
    parent, name = split_path(ckpt_dir)
    listed = inspect_name(open_storage(parent, storage_options), name) if name else None
    layout = listed.layout if listed is not None and not listed.is_t5x else ORBAX if is_orbax(storage, '') else None
    if layout is not None:
        cure = (
            'Keep policies do not delete such a step. To pin the values, '
            f"write them in T5X's format (t5ckpt convert {layout}) and pin that step."
        )
        raise other_layout(storage.url().rstrip('/'), layout, 'to which t5ckpt does not write', cure)
    run = open_storage(parent, storage_options) if name else storage
    pin_in(run, name, txt, time.time)


def unpin_checkpoint(ckpt_dir: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Unpins a step. If it is not pinned, nothing is done, which is logged.

    Args:
      ckpt_dir: the step's directory.
      storage_options: see docs/storage.md.
    """
    unpin_at(open_storage(ckpt_dir, storage_options))


def is_pinned_checkpoint(ckpt_dir: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether a step is pinned.

    Args:
      ckpt_dir: the step's directory.
      storage_options: see docs/storage.md.
    """
    return is_pinned_at(open_storage(ckpt_dir, storage_options))

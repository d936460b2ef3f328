"""Detects uses of TensorStore in a forked process.

TensorStore's threads do not exist in a forked process, and its first use there ends the process (SIGABRT). So the code that
opens or decodes arrays calls this module before. Operations without TensorStore work in a forked process: listing steps, mapped
views, saves to a local disk, and reads of arrays without a codec there.
"""

from __future__ import annotations

import os

from t5ckpt.errors import UnsupportedTopologyError

_state = {'is used': False, 'is lost': False}


def use_tensorstore() -> None:
    """Called before each use of TensorStore.

    Raises:
      UnsupportedTopologyError: this process was forked from one that had used TensorStore.
    """
    if _state['is lost']:
        raise UnsupportedTopologyError(
            f'process {os.getpid()} was forked from one that had saved or read a checkpoint, and TensorStore does not work in '
            "such a process. Save and restore in the parent, or start processes with multiprocessing's 'spawn' method."
        )
    _state['is used'] = True


def _in_child() -> None:
    _state['is lost'] = _state['is lost'] or _state['is used']


os.register_at_fork(after_in_child=_in_child)

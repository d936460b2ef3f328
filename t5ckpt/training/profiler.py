"""Traces some steps with JAX's profiler, and copies the trace to any storage."""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
import tempfile
from typing import Any, Self

from t5ckpt.distributed.processes import jax_processes
from t5ckpt.errors import T5CkptError
from t5ckpt.storage import open_storage

_log = logging.getLogger('t5ckpt')


class ProfilerWindow:
    """Traces the steps from ``start`` to ``start + count - 1`` in process 0.

    Call :meth:`before` at the beginning of every step. Use it as a context manager, so that a run that ends inside the window
    writes its trace, too. TensorBoard's profile plugin and Perfetto read the trace.

    Args:
      directory: a path or a URL for the trace, such as the run's directory.
      start: the first traced step.
      count: the number of traced steps.

    Notes: the trace is written to a temporary directory, and copied from there in the step after the window. A failed copy is
    logged with the temporary directory, and does not end the run. A run that resumes inside the window traces the rest of it.
    """

    def __init__(self, directory: str | os.PathLike[str], start: int, count: int = 3):
        if count < 1:
            raise ValueError(f'count must be at least 1, got {count}.')
        self._directory = directory
        self._steps = range(start, start + count)
        self._local: str | None = None
        self._has_started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._has_started and jax_processes().index == 0:
            _log.info('t5ckpt: no profile: the run had none of the steps %d to %d', self._steps[0], self._steps[-1])
        self._stop()

    def before(self, step: int, wait_for: Any = None) -> None:
        """Starts the trace at the first step of the window, and ends it after the last one.

        Args:
          step: the step that is about to begin.
          wait_for: results of the previous step, which are awaited before the trace ends, so that it includes them.
        """
        if step in self._steps:
            if self._local is None and jax_processes().index == 0:
                self._start()
        elif self._local is not None:
            if wait_for is not None:
                import jax

                jax.block_until_ready(wait_for)
            self._stop()

    def _start(self) -> None:
        import jax

        self._has_started = True
        self._local = tempfile.mkdtemp(prefix='t5ckpt-profile-')
        jax.profiler.start_trace(self._local)

    def _stop(self) -> None:
        if self._local is None:
            return
        import jax

        local, self._local = self._local, None
        jax.profiler.stop_trace()
        try:
            storage = open_storage(self._directory)
            for path in sorted(pathlib.Path(local).rglob('*')):
                key = path.relative_to(local).as_posix()
                if path.is_dir():
                    storage.make_dir(key)
                else:
                    storage.write(key, path.read_bytes())
        except T5CkptError as error:
            _log.warning('t5ckpt: the profile could not be copied, so it stays in %s: %s', local, error)
            return
        _log.info('t5ckpt: profile of steps %d to %d in %s', self._steps[0], self._steps[-1], storage.url())
        shutil.rmtree(local, ignore_errors=True)

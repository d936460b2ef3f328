"""Writes the HLO of a compiled function as text and, where Graphviz is installed, as a picture."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from typing import Any

from t5ckpt.distributed.processes import jax_processes
from t5ckpt.storage import open_storage

_log = logging.getLogger('t5ckpt')


def write_hlo(directory: str | os.PathLike[str], name: str, compiled: Any, *, seconds: float = 60) -> list[str]:
    """Writes ``<name>.txt`` and, with Graphviz's ``dot`` on the path, ``<name>.svg``, from process 0.

    Args:
      directory: a path or a URL.
      name: of the files, without a suffix.
      compiled: ``jax.jit(f).lower(...).compile()``.
      seconds: the time-out for the layout of the picture, which does not end for a graph of 100,000 nodes. The text is written
        in any case.

    Returns:
      The paths or URLs of the files; empty in other processes than the first.

    Raises:
      ValueError: ``name`` is empty, or ``compiled`` is not a compiled function.
    """
    if not name:
        raise ValueError("name is empty: pass the name of the files without a suffix, such as 'train_step'.")
    if not hasattr(compiled, 'runtime_executable'):
        raise ValueError(
            f'compiled must be the result of jax.jit(f).lower(...).compile(), got {type(compiled).__name__}.'
        )
    if jax_processes().index != 0:
        return []
    storage = open_storage(directory)
    storage.make_dir('')
    storage.write(f'{name}.txt', compiled.as_text().encode())
    written = [storage.url(f'{name}.txt')]
    dot = shutil.which('dot')
    if dot is None:
        _log.warning('t5ckpt: %s.svg is not written: Graphviz is not installed (apt-get install graphviz)', name)
        return written
    try:
        done = subprocess.run([dot, '-Tsvg'], input=_graph(compiled), capture_output=True, timeout=seconds, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        _log.warning('t5ckpt: %s.svg is not written: %s', name, error)
        return written
    # Leaves out the style sheet before the first element, whose hover rules make browsers very slow (as in seqax).
    storage.write(f'{name}.svg', done.stdout[done.stdout.index(b'<svg') :])
    return [*written, storage.url(f'{name}.svg')]


def _graph(compiled: Any) -> bytes:
    """The optimised module in Graphviz's DOT language."""
    import jax

    # The class with as_hlo_dot_graph is only reachable through an unoptimised computation.
    computation: Any = type(jax.jit(lambda: 0).lower().compiler_ir('hlo'))
    module = compiled.runtime_executable().hlo_modules()[0]
    return computation(module.as_serialized_hlo_module_proto()).as_hlo_dot_graph().encode()

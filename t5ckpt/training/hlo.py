"""What XLA made of a function: as text, and as a picture where Graphviz is installed."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from typing import Any

from t5ckpt.distributed.processes import jax_processes
from t5ckpt.storage import open_storage

__all__ = ['write_hlo']

_log = logging.getLogger('t5ckpt')


def write_hlo(directory: str | os.PathLike[str], name: str, compiled: Any, *, seconds: float = 60) -> list[str]:
    """Writes ``<name>.txt`` and, with Graphviz's ``dot`` on the path, ``<name>.svg``, from process 0.

    Args:
      directory: a path or a URL.
      name: of the files, without a suffix.
      compiled: ``jax.jit(f).lower(...).compile()``.
      seconds: for the layout of the picture, which takes for ever where the graph has 100,000 nodes; the text is there
        in any case.

    Returns:
      What was written, as a user would write it; nothing in other processes than the first.

    Raises:
      ValueError: ``name`` is empty, or ``compiled`` is not a compiled function.
    """
    if not name:
        raise ValueError("name is empty: pass the name of the files without a suffix, such as 'train_step'.")
    if not hasattr(compiled, 'runtime_executable'):
        raise ValueError(
            f'compiled is what jax.jit(f).lower(...).compile() returns, got {type(compiled).__name__}. Compile the function.'
        )
    if jax_processes().index != 0:
        return []
    storage = open_storage(directory)
    storage.make_dir('')
    storage.write(f'{name}.txt', compiled.as_text().encode())
    written = [storage.url(f'{name}.txt')]
    dot = shutil.which('dot')
    if dot is None:
        _log.warning('t5ckpt: no picture of %s: Graphviz is not installed (apt-get install graphviz)', name)
        return written
    try:
        done = subprocess.run([dot, '-Tsvg'], input=_graph(compiled), capture_output=True, timeout=seconds, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        _log.warning('t5ckpt: no picture of %s: %s', name, error)
        return written
    # What comes before the first element is a style sheet for hovering that makes browsers crawl (seqax found that).
    storage.write(f'{name}.svg', done.stdout[done.stdout.index(b'<svg') :])
    return [*written, storage.url(f'{name}.svg')]


def _graph(compiled: Any) -> bytes:
    """The optimised module in the language of Graphviz."""
    import jax

    # JAX hands out the class that can draw only with a computation that is not optimised.
    computation: Any = type(jax.jit(lambda: 0).lower().compiler_ir('hlo'))
    module = compiled.runtime_executable().hlo_modules()[0]
    return computation(module.as_serialized_hlo_module_proto()).as_hlo_dot_graph().encode()

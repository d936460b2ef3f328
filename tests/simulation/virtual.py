"""Loads t5ckpt so that it sees simulated time, threads, processes and disks; nothing of the package itself is changed.

:func:`enter` makes every module of the package that is imported afterwards get a module of this file instead of ``time``,
``threading``, ``queue``, ``secrets``, ``socket``, ``os``, ``fcntl``, ``shutil``, ``ctypes``, ``concurrent.futures``,
``tensorstore`` and, for the backends of paths, ``importlib``. Each has
the members of the real one, except for those that depend on the machine. Other libraries, such as NumPy and TensorStore, are
not affected. Call it once, first, in a process of its own.
"""

from __future__ import annotations

import _thread
import atexit
import builtins
import concurrent.futures
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import queue
import secrets
import socket
import sys
import threading
import time
import types
from collections.abc import Sequence
from typing import Any

import tensorstore

from simulation import arrays, posix, primitives
from simulation.scheduler import active, current_task, facade, wait_until

_HERE = 'simulation'
_BACKENDS = {'t5ckpt.storage.file': f'{_HERE}.directory', 't5ckpt.storage.gcs': f'{_HERE}.bucket'}


def clock() -> float:
    """Unix seconds by the clock of the machine of the process that asks."""
    scheduler = active()
    return time.time() if scheduler is None else scheduler.now + current_task().process.ahead


def _monotonic() -> float:
    scheduler = active()
    return time.monotonic() if scheduler is None else scheduler.now


def _sleep(seconds: float) -> None:
    scheduler = active()
    if scheduler is not None:
        scheduler.point(f'sleeps {seconds:.3f} s')
        wait_until(lambda: False, max(0.0, seconds))


def _getpid() -> int:
    return os.getpid() if active() is None else current_task().process.pid


def _gethostname() -> str:
    return socket.gethostname() if active() is None else current_task().process.machine


def _token_hex(nbytes: int = 16) -> str:
    scheduler = active()
    return secrets.token_hex(nbytes) if scheduler is None else scheduler.token(nbytes)


def _open(file: Any, mode: str = 'r', *args: Any, **options: Any) -> Any:
    """``open``, with the files that identify a machine and a process."""
    scheduler = active()
    if isinstance(file, int) and posix.is_descriptor(file):
        return posix.opened(file)
    if scheduler is None or not str(file).startswith('/proc/'):
        return builtins.open(file, mode, *args, **options)
    if str(file) == '/proc/sys/kernel/random/boot_id':
        return io.StringIO(current_task().process.machine)
    pid = str(file).split('/')[2]
    for process in scheduler.processes.values():
        is_here = process.machine == current_task().process.machine
        if is_here and not process.is_dead and pid in (str(process.pid), 'self'):
            return io.StringIO(f'{process.pid} (python) ' + ' '.join(str(number) for number in range(60)))
    raise FileNotFoundError(2, 'no such process', str(file))


def _import_module(name: str, package: str | None = None) -> types.ModuleType:
    """``importlib.import_module``, with the simulated backends of paths."""
    return importlib.import_module(_BACKENDS.get(name, name) if active() is not None else name, package)


def _modules() -> dict[str, types.ModuleType]:
    """The modules that the package gets, by name."""
    futures = facade(
        'concurrent.futures', concurrent.futures, Future=primitives.Future, as_completed=primitives.as_completed
    )
    members = {name: getattr(primitives, name) for name in primitives.__all__ if hasattr(threading, name)}
    os_members = {**posix.MEMBERS, 'getpid': _getpid}
    return {
        '_thread': facade('_thread', _thread, start_new_thread=primitives.start_new_thread),
        'atexit': facade('atexit', atexit, register=lambda function: function),
        'concurrent': types.SimpleNamespace(futures=futures),  # type: ignore[dict-item]
        'concurrent.futures': futures,
        'ctypes': posix.CTYPES,
        'fcntl': posix.FCNTL,
        'importlib': facade('importlib', importlib, import_module=_import_module),
        'os': facade('os', os, **os_members),
        'queue': facade('queue', queue, SimpleQueue=primitives.SimpleQueue),
        'secrets': facade('secrets', secrets, token_hex=_token_hex),
        'shutil': posix.SHUTIL,
        'socket': facade('socket', socket, gethostname=_gethostname),
        'tensorstore': facade('tensorstore', tensorstore, open=arrays.open_array),
        'threading': facade('threading', threading, **members),
        'time': facade('time', time, time=clock, monotonic=_monotonic, perf_counter=_monotonic, sleep=_sleep),
    }


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module whose imports and whose ``open`` are simulated."""

    simulated: dict[str, types.ModuleType]

    def exec_module(self, module: types.ModuleType) -> None:
        def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # noqa: A002
            if level == 0 and name in self.simulated:
                return self.simulated[name if fromlist else name.partition('.')[0]]
            return builtins.__import__(name, globals, locals, fromlist, level)

        module.__dict__['__builtins__'] = {**vars(builtins), '__import__': imported, 'open': _open}
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._simulated = _modules()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition('.')[0] != 't5ckpt':
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        loader = _Loader(spec.loader.name, spec.loader.path)
        loader.simulated = self._simulated
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=loader, submodule_search_locations=spec.submodule_search_locations
        )


def enter() -> None:
    """Unloads all modules of the package, so that their next import loads them in the simulated world."""
    kept = {f'{_HERE}.{name}' for name in ('scheduler', 'tasks', 'primitives', 'arrays', 'posix', 'disk', 'virtual')}
    for name in [
        name for name in sys.modules if name.partition('.')[0] in {'t5ckpt', _HERE} and name not in kept | {_HERE}
    ]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())

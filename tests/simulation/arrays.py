"""``tensorstore.open`` of an array on a simulated storage: its files are read through the storage, and then opened in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorstore as ts

from simulation import posix
from simulation.scheduler import active


def open_array(spec: Mapping[str, Any], *, context: Any = None, **options: Any) -> Any:
    """``tensorstore.open``."""
    path = spec['kvstore'].get('path', '').rstrip('/')
    is_simulated = spec['kvstore']['driver'] == 'simulated' or path.startswith(f'{posix.ROOT}/')
    if active() is None or not is_simulated:
        return ts.open(spec, context=context, **options)
    from simulation import bucket, directory

    parent, _, name = path.rpartition('/')
    storage = spec['kvstore'].get('storage')
    if storage is None:
        storage = (directory if path.startswith('/') else bucket).open_at('', parent, None)
    else:
        name = path
    memory = ts.Context()
    copies = ts.KvStore.open({'driver': 'memory'}, context=memory).result()
    for key, _ in storage.walk(name):
        copies.write(key, storage.read(key)).result()
    return ts.open({**spec, 'kvstore': {'driver': 'memory', 'path': f'{name}/'}}, context=memory, **options)

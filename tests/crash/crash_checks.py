"""What must hold after any fault, asked of the disk without t5ckpt."""

from __future__ import annotations

import json
import os
import pathlib
import re
from typing import Any

import numpy as np
import xxhash
from crash_scenarios import state
from support import independent_reader, t5x_rules
from support.facts import facts_of

from t5ckpt.format.manifest import split_facts

_STEP = re.compile(r'checkpoint_(0|[1-9]\d*)')
# What a step that stays may gain or lose: pins, and the iterator states of older steps.
_MAY_CHANGE = re.compile(r'(PINNED|DATASET_REMOVED|train_ds).*')


def listed(root: pathlib.Path) -> list[int]:
    """The steps that T5X would list: the directory has the right name and a file `checkpoint`."""
    if not root.is_dir():
        return []
    found = ((_STEP.fullmatch(path.name), path) for path in root.iterdir())
    return sorted(int(match[1]) for match, path in found if match is not None and (path / 'checkpoint').is_file())


def fingerprint(directory: pathlib.Path) -> dict[str, str]:
    """File to digest, of all that must not change while the step is there."""
    return {
        path.relative_to(directory).as_posix(): xxhash.xxh3_64_hexdigest(path.read_bytes())
        for path in sorted(directory.rglob('*'))
        if path.is_file() and _MAY_CHANGE.fullmatch(path.name) is None
    }


# Directories that were checked, by their name and all their bytes: most steps are those from before the fault.
_whole: set[tuple[str, bytes]] = set()


def check_whole(directory: pathlib.Path) -> None:
    """Every checksum that was written holds, plain TensorStore and Flax read the right values, T5X's rules are kept."""
    hashed = xxhash.xxh3_128()
    for path in sorted(directory.rglob('*')):
        data = path.read_bytes() if path.is_file() else b''
        hashed.update(json.dumps([path.relative_to(directory).as_posix(), path.is_file(), len(data)]).encode() + data)
    if (key := (directory.name, hashed.digest())) not in _whole:
        _check_whole(directory)
        _whole.add(key)


def _check_whole(directory: pathlib.Path) -> None:
    digests: dict[str, Any] = json.loads(facts_of(directory))['digests']
    assert 'checkpoint' in digests
    for name in [name for name in digests if name.startswith('integrity.')]:
        digests |= json.loads((directory / name).read_bytes())['files']
    if (directory / 'DATASET_REMOVED').exists():
        digests = {name: entry for name, entry in digests.items() if not name.startswith('train_ds-')}
    for name, (size, digest) in digests.items():
        data = (directory / name).read_bytes()
        # The facts have a checksum of their own.
        data = split_facts(data)[0] if name == 'checkpoint' else data
        assert (len(data), xxhash.xxh3_64_hexdigest(data)) == (size, digest), f'{directory / name} is damaged'
    values = independent_reader.read(directory)
    step = int(values['step'])
    assert directory.name == f'checkpoint_{step}', f'{directory} holds step {step}'
    expected = independent_reader.flat_leaves(state(step))
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(values[name], value), f'{directory}: {name} is wrong'
    # Left by a pin that was cut.
    for name in ('PINNED', 'DATASET_REMOVED'):
        for partial in directory.glob(f'{name}.*.__partial'):
            partial.unlink()
    t5x_rules.check(directory)


def open_files(root: pathlib.Path) -> list[str]:
    """What this process holds open below a directory."""
    found = []
    for name in os.listdir('/proc/self/fd'):
        try:
            target = os.readlink(f'/proc/self/fd/{name}')
        except OSError:
            continue
        if target.startswith(f'{root}/') or target == str(root):
            found.append(target)
    return found

"""Takes the turns of one process: `measure.py REQUEST ANSWER`, two JSON files.

A turn is one peer saving, or restoring, or saving from a training loop. `run.py` gives every turn a process of its own
(only with `--short` they share one): a peer finds no memory, cache or thread of another, the peak of the memory is its
own, and a restore is the first one of its process, as after a restart. TensorStore keeps what it wrote or read in
memory, so a second restore would not be one. What a peer imports is not measured: saving starts with a save that does
not count, restoring with a tiny checkpoint.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import json
import logging
import pathlib
import sys
import traceback
from typing import TYPE_CHECKING, Any

import cases
import jax
import loop
import numpy as np
import peers
import probe

if TYPE_CHECKING:
    from collections.abc import Callable

_WARMUP_STEP, _SAVE_STEP, _ASYNC_STEP = 1, 2, 3
_PACKAGES = (
    'jax',
    'jaxlib',
    'numpy',
    'tensorstore',
    'flax',
    'orbax-checkpoint',
    'safetensors',
    'flatbuffers',
    't5ckpt',
)

Samples = dict[str, float]


class WrongDataError(Exception):
    """What was restored is not what was saved."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """What is done once with one case and one peer.

    Attributes:
        action: 'save', 'restore_warm' or 'restore_cold' (what 'save' left in `root`), or 'stall'.
        seed: of the values; the same for all peers of a round.
        root: the peer's directory for this round.
    """

    case: str
    peer: str
    action: str
    seed: int
    root: str


class Setting:
    """A case at its size, on the devices of this process, with the peer whose turn it is."""

    def __init__(self, turn: Turn, size: cases.Size):
        self.case = cases.CASES[turn.case]
        self._tiny = size == cases.SHORT
        self.leaves = self.case.leaves(size)
        self.mesh = cases.mesh_of(self.case.devices)
        self.root = pathlib.Path(turn.root)
        self.source = cases.nest(cases.abstract(self.leaves, self.mesh))
        self.target = self.source
        if self.case.target_axes is not None:
            self.target = cases.nest(cases.abstract(cases.resharded(self.case, self.leaves), self.mesh))
        self._make_peer = peers.PEERS[turn.peer]
        self._seed = 10 * turn.seed

    def state(self, step: int) -> cases.Tree:
        """The values that are saved as `step`. Nothing but the leaves that a case never changes is the same twice."""
        fixed = [path for path in self.leaves if self.case.changes is not None and not self.case.changes(path)]
        seeds = {path: self._seed if path in fixed else self._seed + step for path in self.leaves}
        return self._arrays(seeds)

    def next_state(self, state: cases.Tree, step: int) -> cases.Tree:
        """As `state(step)`; the leaves that a case never changes are the very objects of `state`."""
        if self.case.changes is None:
            return self.state(step)
        seeds = {path: self._seed + step for path in self.leaves if self.case.changes(path)}
        return cases.nest(cases.flatten(state) | cases.flatten(self._arrays(seeds)))

    def _arrays(self, seeds: dict[str, int]) -> cases.Tree:
        return jax.block_until_ready(cases.nest(cases.materialize(self.leaves, self.mesh, seeds)))

    def settle(self, prepare: Callable[[pathlib.Path], object] | None = None) -> None:
        """Brings the machine to the same state before every measurement, the peer's files to the one it asks for."""
        probe.settle(self.root)
        if not self._tiny:
            probe.empty_page_cache()
        if prepare is not None:
            prepare(self.root)
        if not self._tiny:
            probe.touch_memory(2 * cases.state_bytes(self.leaves))

    def peer(self) -> peers.Peer:
        """The peer, on the directory of this turn."""
        self.root.mkdir(parents=True, exist_ok=True)
        return self._make_peer(self.root, self.source, self.target)


def _same_bits(saved: jax.Array, restored: jax.Array) -> bool:
    """Whether two arrays of any sharding hold the same bits.

    Compared on the host, shard by shard: a jitted comparison needs collectives, and XLA's for the CPU wait for each
    other forever when several programs that have them run on fewer cores than devices.
    """
    shards = {str(shard.index): shard.data for shard in saved.addressable_shards}
    for shard in restored.addressable_shards:
        same = shards.get(str(shard.index))
        expected = np.asarray(saved)[shard.index] if same is None else np.asarray(same)
        found = np.asarray(shard.data)
        if not np.array_equal(_words(expected), _words(found)):
            return False
    return True


def _words(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f'u{array.itemsize}')


def check(saved: cases.Tree, restored: cases.Tree, target: cases.Tree) -> None:
    """Raises WrongDataError unless `restored` holds the bits of `saved` in the shardings of `target`."""
    expected, found, wanted = (cases.flatten(tree) for tree in (saved, restored, target))
    if expected.keys() != found.keys():
        raise WrongDataError(f'the leaves {sorted(expected.keys() ^ found.keys())} are on one side only')
    for path, leaf in found.items():
        if not isinstance(leaf, jax.Array) or leaf.dtype != wanted[path].dtype:
            raise WrongDataError(f'{path}: restored as {type(leaf).__name__} of {leaf.dtype}, not {wanted[path].dtype}')
        if not leaf.sharding.is_equivalent_to(wanted[path].sharding, leaf.ndim):
            raise WrongDataError(f'{path}: restored to {leaf.sharding}, not to {wanted[path].sharding}')
    wrong = [path for path, leaf in found.items() if not _same_bits(expected[path], leaf)]
    if wrong:
        raise WrongDataError(f'{wrong[0]} and {len(wrong) - 1} more leaves: other values than were saved')


def _read_every_page(restored: cases.Tree) -> None:
    """Has the system fetch what is only mapped so far. On a CPU the host array is the device's own memory."""
    for leaf in cases.flatten(restored).values():
        for shard in leaf.addressable_shards:
            np.asarray(shard.data).reshape(-1).view(np.uint8)[:: 1 << 12].max(initial=0)


def save(setting: Setting) -> Samples:
    """Saves three times: uncounted, blocking, and in the background if the case asks for it and the peer can."""
    peer = setting.peer()
    asynchronous = setting.case.asynchronous and peer.asynchronous
    state = setting.state(_WARMUP_STEP)
    if asynchronous:
        peer.save_async(state, _WARMUP_STEP)()
    else:
        peer.save(state, _WARMUP_STEP)
    state = setting.next_state(state, _SAVE_STEP)
    samples = _save(setting, peer, state)
    del state
    if asynchronous:
        samples |= _save_async(setting, peer, setting.state(_ASYNC_STEP))
    peer.close()
    return samples


def _save(setting: Setting, peer: peers.Peer, state: cases.Tree) -> Samples:
    setting.settle()
    on_disk = probe.disk_bytes(peer.root)
    memory = probe.PeakMemory()
    clock = probe.Clock()
    peer.save(state, _SAVE_STEP)
    returned = clock.seconds()
    probe.make_durable(peer.root)
    durable = clock.seconds()
    return {
        'save': durable,
        'save_returned': returned,
        'save_memory': memory.above_start(),
        'disk': float(probe.disk_bytes(peer.root) - on_disk),
    }


def _save_async(setting: Setting, peer: peers.Peer, state: cases.Tree) -> Samples:
    setting.settle()
    memory = probe.PeakMemory()
    clock = probe.Clock()
    wait = peer.save_async(state, _ASYNC_STEP)
    called = clock.seconds()
    wait()
    probe.make_durable(peer.root)
    return {'async_call': called, 'async_total': clock.seconds(), 'async_memory': memory.above_start()}


def restore_warm(setting: Setting) -> Samples:
    """Restores with the files in the page cache."""
    return _restore(setting, 'restore_warm', _SAVE_STEP, probe.warm_cache)


def restore_cold(setting: Setting) -> Samples:
    """Restores with the files on the disk only; what was saved in the background, if it was."""
    last = max(step for step in (_SAVE_STEP, _ASYNC_STEP) if (setting.root / f'checkpoint_{step}').exists())
    return _restore(setting, 'restore_cold', last, probe.cool_cache)


def _restore(setting: Setting, metric: str, step: int, prepare: Callable[[pathlib.Path], object]) -> Samples:
    peer = setting.peer()
    setting.settle(prepare)
    memory = probe.PeakMemory()
    clock = probe.Clock()
    restored = jax.block_until_ready(peer.restore(step))
    samples = {metric: clock.seconds()}
    if jax.default_backend() == 'cpu':
        _read_every_page(restored)
        samples[f'{metric}_used'] = clock.seconds()
    samples[f'{metric}_memory'] = memory.above_start()
    if jax.default_backend() == 'cpu':
        samples[f'{metric}_memory'] -= cases.state_bytes(setting.leaves)
    peer.close()
    check(setting.state(step), restored, setting.target)
    return samples


def stall(setting: Setting) -> Samples:
    """The training time that a save in the background takes away; once uncounted, once measured."""
    training = loop.Training(setting.leaves, setting.mesh)
    peer = setting.peer()
    loop.measure(training, peer, setting.state(_WARMUP_STEP), _WARMUP_STEP)
    samples = loop.measure(training, peer, setting.state(_ASYNC_STEP), _ASYNC_STEP)
    peer.close()
    return samples


_ACTIONS = {'save': save, 'restore_warm': restore_warm, 'restore_cold': restore_cold, 'stall': stall}


def take(turn: Turn, size: cases.Size) -> Samples:
    """One turn. A restore is preceded by a tiny one, so that imports and threads are there; a save warms up itself."""
    if turn.action.startswith('restore') and size != cases.SHORT:
        tiny = Setting(dataclasses.replace(turn, root=f'{turn.root}_{turn.action}_tiny'), cases.SHORT)
        save(tiny)
        restore_warm(tiny)
    return _ACTIONS[turn.action](Setting(turn, size))


def facts() -> dict[str, Any]:
    """The devices and versions that the turns run with."""
    device = jax.devices()[0]
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        'platform': device.platform,
        'device': device.device_kind,
        'devices': len(jax.devices()),
        'versions': versions,
    }


def main(request_file: str, answer_file: str) -> None:
    """Takes the turns of the request and answers with the samples, or the error, of each."""
    logging.getLogger('absl').setLevel(logging.ERROR)
    request = json.loads(pathlib.Path(request_file).read_text())
    size = cases.size_of(short=request['short'], scale=request['scale'])
    answers = []
    for turn in (Turn(**turn) for turn in request['turns']):
        answer: dict[str, Any] = dataclasses.asdict(turn)
        gc.freeze()  # what is imported by now need not be looked at again each time garbage is collected
        try:
            answer['samples'] = take(turn, size)
            answer['bytes'] = cases.state_bytes(cases.CASES[turn.case].leaves(size))
        except Exception as error:  # noqa: BLE001 - the comparison goes on without the peer that failed
            traceback.print_exc()
            answer['error'] = f'{type(error).__name__}: {error}'
        answers.append(answer)
    pathlib.Path(answer_file).write_text(json.dumps({'turns': answers, 'facts': facts()}))


if __name__ == '__main__':
    main(*sys.argv[1:])

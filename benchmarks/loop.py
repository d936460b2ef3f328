"""A training loop, and the time a save takes away from it.

The model is a small transformer whose weights are the state S1; every step computes a loss and its gradients, updates
all weights, and donates the old ones. The step before is waited for while the next one runs, as loops do that report
their loss.

Lost time = the time of n steps with a save among them - the time of n steps without. n is as large as it has to be for
the checkpoint to be on the disk before the last step, so that all the work done in the background is paid for within
the measured time: processors, memory and disk that the save takes from the steps count like the call itself.
"""

from __future__ import annotations

import concurrent.futures
import functools
from typing import TYPE_CHECKING, Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import probe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import peers

    Background = Callable[[cases.Tree], concurrent.futures.Future[None]]

_SEQUENCE = 64
_RATE = 1e-3
_SAVE_AT = 2
_FEWEST_STEPS = 6
_STEPS_AFTER = 2


class LateSaveError(Exception):
    """What was restored is not the state at the step that was saved."""


def _normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * (1 + 0.02 * scale)


def _layer(x: jax.Array, weights: Mapping[str, jax.Array]) -> jax.Array:
    width, hidden = weights['wi'].shape
    h = _normalize(x, weights['norm'])
    query, key, value = (h @ weights[name] / width**0.5 for name in ('query', 'key', 'value'))
    attention = jax.nn.softmax(query @ key.T / width**0.5)
    x = x + attention @ value @ weights['out'] / width**0.5
    h = _normalize(x, weights['norm'])
    return x + jax.nn.gelu(h @ weights['wi'] / width**0.5) @ weights['wo'] / hidden**0.5


def _loss(state: cases.Tree, tokens: jax.Array) -> jax.Array:
    x = state['embedding'][tokens[:-1]]
    for name, weights in state.items():
        if name != 'embedding':
            x = _layer(x, weights)
    logits = x @ state['embedding'].T / x.shape[-1] ** 0.5
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], axis=1))


@functools.partial(jax.jit, donate_argnums=0)
def _step(state: cases.Tree, tokens: jax.Array) -> tuple[cases.Tree, jax.Array]:
    loss, gradients = jax.value_and_grad(_loss)(state, tokens)
    return jax.tree.map(lambda weight, gradient: weight - _RATE * gradient, state, gradients), loss


@jax.jit
def _digest(state: cases.Tree) -> cases.Tree:
    """A few bytes for each leaf that change when any of its bits do: the sum of its words times odd numbers."""

    def one(leaf: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
        for axis in range(words.ndim):
            odd = 2 * jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) + 1
            words = words * odd
        return jnp.sum(words, dtype=jnp.uint32)

    return jax.tree.map(one, state)


class Training:
    """The loop. It runs on one device.

    On several, a step needs collectives, and XLA's for the CPU may wait for each other forever when two steps are under
    way on fewer cores than devices.
    """

    def __init__(self, leaves: Mapping[str, cases.Leaf], mesh: jax.sharding.Mesh):
        vocabulary = leaves['embedding'].shape[0]
        tokens = np.random.default_rng(0).integers(0, vocabulary, (8, _SEQUENCE + 1), dtype=np.int32)
        self._batches = [jax.device_put(batch, cases.sharding_of(mesh, ())) for batch in tokens]

    def run(self, state: cases.Tree, steps: int | None, save: Background | None) -> dict[str, Any]:
        """Trains, saving at step _SAVE_AT if told how; without `steps`, until that save is over and a little longer."""
        saving: concurrent.futures.Future[None] | None = None
        digest = loss = None
        last, step = steps, 0
        clock = probe.Clock()
        while last is None or step < last:
            if step == _SAVE_AT:
                digest = _digest(state)
                saving = save(state) if save is not None else None
            state, new_loss = _step(state, self._batches[step % len(self._batches)])
            if loss is not None:
                loss.block_until_ready()
            loss, step = new_loss, step + 1
            if last is None and saving is not None and saving.done():
                last = max(step + _STEPS_AFTER, _FEWEST_STEPS)
        jax.block_until_ready(state)
        elapsed = clock.seconds()
        if saving is not None:
            saving.result()
        return {'state': state, 'seconds': elapsed, 'steps': step, 'digest': jax.device_get(digest)}


def measure(training: Training, peer: peers.Peer, state: cases.Tree, at: int) -> dict[str, float]:
    """The time lost to one asynchronous save, how long its call took, and how long until it was durable."""
    calls: list[float] = []
    totals: list[float] = []

    def save(state: cases.Tree) -> concurrent.futures.Future[None]:
        clock = probe.Clock()
        wait = peer.save_async(state, at)
        calls.append(clock.seconds())

        def finish() -> None:
            wait()
            probe.make_durable(peer.root)
            totals.append(clock.seconds())

        return pool.submit(finish)

    probe.settle(peer.root)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        saving = training.run(state, None, save)
    probe.settle(peer.root)
    without = training.run(saving.pop('state'), saving['steps'], None)
    del without['state']
    restored = jax.device_get(_digest(peer.restore(at)))
    if not jax.tree.all(jax.tree.map(lambda a, b: a == b, restored, saving['digest'])):
        raise LateSaveError('the checkpoint differs from the state at the step that was saved')
    return {
        'lost': saving['seconds'] - without['seconds'],
        'loop_call': calls[0],
        'loop_total': totals[0],
        'steps': float(saving['steps']),
        'step': without['seconds'] / without['steps'],
    }

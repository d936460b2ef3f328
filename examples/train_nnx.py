"""Trains a small Flax NNX transformer on text files and saves it; started again, it continues with the same bits.

    python train_nnx.py RUN_DIR [--steps 200] [--save-every 20] [--text FILE ...]

The model predicts the next byte of a text. Its weights are sharded over a mesh of all devices by the annotations of its
layers, and Grain reads the data. Each checkpoint has everything that the next step depends on: the parameters, the state
of `nnx.Optimizer`, the keys and counters of the RNG streams, which dropout uses, and the position of the data iterator.

RUN_DIR receives the checkpoints and losses.jsonl with a line for each step. SIGTERM saves and ends the run. After SIGKILL,
the steps since the last checkpoint are trained again, with the same losses.
"""

import argparse
import functools
import json
import os
import pydoc_data.topics
from collections.abc import Sequence
from pathlib import Path

# Four devices on any machine. JAX reads both variables once, when it starts.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=4')

import grain
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import t5ckpt

WIDTH, HEADS, LAYERS = 64, 4, 2
BATCH, LENGTH = 8, 64
SEED = 0


# --- data ----------------------------------------------------------------------------------------------------------


class Windows:
    """A text, split into sequences of LENGTH + 1 bytes, for `grain.MapDataset.source`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Reads all files."""
        self._text = np.frombuffer(b'\n'.join(path.read_bytes() for path in paths), np.uint8)

    def __len__(self) -> int:
        return len(self._text) // (LENGTH + 1)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._text[index * (LENGTH + 1) : (index + 1) * (LENGTH + 1)].astype(np.int32)


def make_batches(paths: Sequence[Path]) -> grain.DatasetIterator:
    """Shuffled batches, epoch after epoch. The iterator has `get_state` and `set_state`, which the checkpointer calls."""
    data = grain.MapDataset.source(Windows(paths)).seed(SEED).shuffle().repeat().batch(BATCH)
    return iter(data.to_iter_dataset())


# --- model ---------------------------------------------------------------------------------------------------------


def split(*axes: str | None) -> nnx.Initializer:
    """An initializer whose parameter is sharded along these axes of the mesh."""
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


class Block(nnx.Module):
    """Causal self-attention and a feed-forward layer, split over the axis 'model' of the mesh as in Megatron."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """`rngs` has the streams `params` and `dropout`."""
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            HEADS,
            WIDTH,
            decode=False,
            kernel_init=split(None, 'model', None),
            out_kernel_init=split('model'),
            rngs=rngs,
        )
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=split(None, 'model'), rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_init=split('model'), rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, length, width), as `x`."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.dropout(self.attention(self.norms[0](x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class Model(nnx.Module):
    """Logits of the next byte for each byte."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """See `Block`."""
        self.embed = nnx.Embed(256, WIDTH, embedding_init=split(None, 'model'), rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.logits = nnx.Linear(WIDTH, 256, kernel_init=split(None, 'model'), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(batch, length, 256)."""
        x = self.embed(tokens) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.logits(x)


# --- training ------------------------------------------------------------------------------------------------------


def make() -> dict[str, nnx.Module]:
    """A new model and its optimizer. The key `params` marks the weights (`t5ckpt.MODEL`)."""
    model = Model(nnx.Rngs(params=SEED, dropout=SEED + 1))
    return {'params': model, 'opt_state': nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)}


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def train_step(model: Model, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    """Updates model and optimizer, and returns the loss before the update, in nats per byte."""

    def loss_of(model: Model) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run_dir', type=Path)
    parser.add_argument('--steps', type=int, default=200)
    parser.add_argument('--save-every', type=int, default=20)
    # Python's reference manual, as help() shows it: about 450 kB of English.
    parser.add_argument('--text', type=Path, nargs='+', default=[Path(pydoc_data.topics.__file__)])
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """The training loop."""
    args = parse(arguments)
    pair = 2 if jax.device_count() % 2 == 0 else 1
    mesh = jax.make_mesh((jax.device_count() // pair, pair), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
    jax.set_mesh(mesh)
    graph, shapes = nnx.split(nnx.eval_shape(make))
    init = jax.jit(lambda: nnx.state(make()), out_shardings=nnx.get_named_sharding(shapes, mesh))
    # The template has shapes, dtypes and shardings but no arrays, so the state is allocated only by the restore.
    template = jax.eval_shape(init)
    batches = make_batches(args.text)
    args.run_dir.mkdir(parents=True, exist_ok=True)
    with (
        t5ckpt.PreemptionNotice() as preempted,
        t5ckpt.Checkpointer(
            template,
            checkpoints_dir=args.run_dir,
            dataset_iterator=batches,
            keep=3,
            save_policy=t5ckpt.SaveEvery(args.save_every) | t5ckpt.SaveLast(args.steps) | t5ckpt.SaveOnPreemption(),
            preempted=preempted,
        ) as checkpointer,
        (args.run_dir / 'losses.jsonl').open('a', encoding='utf-8') as log,
    ):
        objects = nnx.merge(graph, t5ckpt.restore_or_init(checkpointer, init))
        model, optimizer = objects['params'], objects['opt_state']
        start = int(optimizer.step[...])
        print(f'starting at step {start}' + ('' if checkpointer.restored_step is None else ', restored'), flush=True)
        for step in range(start, args.steps):
            batch = jax.make_array_from_process_local_data(NamedSharding(mesh, P('data')), next(batches))
            loss = float(train_step(model, optimizer, batch))
            # Returns immediately: the arrays may be donated to the next step while they are being written.
            checkpointer.maybe_save(step + 1, nnx.state(objects))
            print(json.dumps({'step': step, 'loss': loss.hex()}), file=log, flush=True)
            if step % 10 == 0:
                print(f'step {step:4}  loss {loss:.4f}', flush=True)
            if checkpointer.should_stop:
                print(f'preempted: saved step {step + 1}', flush=True)
                break


if __name__ == '__main__':
    main()

"""Trains a tiny T5 on text files and saves it; started again, it continues with the same bits.

    python train_t5.py RUN_DIR [--steps 100] [--save-every 20] [--eval-every 20] [--text FILE ...]

The model is a T5 1.1 encoder-decoder in Flax linen, with T5X's parameter names, trained by span corruption on bytes
(Raffel et al. 2020, arXiv:1910.10683; ByT5: Xue et al. 2022, arXiv:2105.13626), sharded over a mesh of all devices.

A resumed run computes the same bits because the dropout of a step depends only on the step's number, and because each
checkpoint contains the position of the input pipeline. SIGTERM saves and ends the run. After SIGKILL, the steps since the
last checkpoint are trained again. RUN_DIR receives the checkpoints, losses.jsonl with one line for each step, TensorBoard's
events in train/ and eval/, and trainer_state_tree.txt, which describes the leaves of the state.
"""

import argparse
import functools
import itertools
import json
import os
import pydoc_data.topics
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# Four devices on any machine. JAX reads both variables once, when it starts.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=4')

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import t5ckpt
from t5ckpt.training import MetricWriter, Watchdog, write_state_summary

VOCAB = 384  # pad 0, end 1, unknown 2, then 256 bytes, then sentinels that count down from 383, as in ByT5
WIDTH, HEADS, LAYERS = 128, 4, 2
BATCH, LENGTH = 8, 96
NOISE, SPANS = 15, 5  # of 96 bytes, 15 are hidden in 5 spans
EVAL_BATCHES = 2
SEED = 0


# --- data ----------------------------------------------------------------------------------------------------------


def read_text(paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of all files, as tokens; the last twentieth is held out for evaluation."""
    text = np.frombuffer(b'\n'.join(path.read_bytes() for path in paths), np.uint8).astype(np.int32) + 3
    return np.split(text, [len(text) * 19 // 20])


class Windows:
    """A text in pieces of LENGTH tokens."""

    def __init__(self, text: np.ndarray) -> None:
        """Drops the remainder at the end of the text."""
        self._text = text

    def __len__(self) -> int:
        return len(self._text) // LENGTH

    def __getitem__(self, index: int) -> np.ndarray:
        return self._text[index * LENGTH : (index + 1) * LENGTH]


def split_randomly(rng: np.random.Generator, total: int, parts: int) -> np.ndarray:
    """`parts` positive lengths that sum to `total`, all combinations equally likely."""
    cuts = np.sort(rng.choice(np.arange(1, total), parts - 1, replace=False))
    return np.diff(cuts, prepend=0, append=total)


def corrupt_spans(tokens: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Inputs with each hidden span replaced by its sentinel, and targets with the spans after their sentinels."""
    kept = split_randomly(rng, len(tokens) - NOISE, SPANS)
    hidden = split_randomly(rng, NOISE, SPANS)
    inputs, targets, at = [], [], 0
    for number, (keep, hide) in enumerate(zip(kept, hidden, strict=True)):
        sentinel = VOCAB - 1 - number
        inputs += [*tokens[at : at + keep], sentinel]
        targets += [sentinel, *tokens[at + keep : at + keep + hide]]
        at += keep + hide
    return {'inputs': np.array([*inputs, 1], np.int32), 'targets': np.array([*targets, 1], np.int32)}


def make_batches(text: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    """This process's share of an endless stream of batches, reshuffled in every epoch; the iterator records its position."""
    data = grain.MapDataset.source(Windows(text))[jax.process_index() :: jax.process_count()]
    data = data.seed(SEED).shuffle().repeat().random_map(corrupt_spans).batch(BATCH // jax.process_count())
    return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


# --- model ---------------------------------------------------------------------------------------------------------


def dense(features: int, name: str, scale: float = 1.0) -> nn.Dense:
    """A layer without bias, like all layers of T5; the initial weights have variance `scale` / fan-in."""
    return nn.Dense(
        features, use_bias=False, kernel_init=nn.initializers.variance_scaling(scale, 'fan_in', 'normal'), name=name
    )


class RelativeBias(nn.Module):
    """A learned bias for each head and bucket of distance (mesh_tensorflow, relative_position_bucket)."""

    bidirectional: bool
    buckets: int = 32
    max_distance: int = 128

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        """(1, heads, length, length): the bias of query i for key j."""
        distance = np.arange(length)[None, :] - np.arange(length)[:, None]
        half = self.buckets // 2 if self.bidirectional else self.buckets
        offset = half * (distance > 0) if self.bidirectional else 0
        distance = np.abs(distance) if self.bidirectional else np.maximum(-distance, 0)
        exact = half // 2
        spread = np.log(np.maximum(distance, 1) / exact) / np.log(self.max_distance / exact) * (half - exact)
        far = np.minimum(exact + spread.astype(np.int32), half - 1)
        table = self.param('rel_embedding', nn.initializers.normal(1.0), (HEADS, self.buckets))
        return table[None, :, offset + np.where(distance < exact, distance, far)]


class Attention(nn.Module):
    """Dot-product attention. T5 scales the initial weights of the query instead of the scores."""

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, bias: jax.Array | float = 0.0) -> jax.Array:
        """(batch, length, width), attending to `memory`."""

        def heads(name: str, of: jax.Array, scale: float = 1.0) -> jax.Array:
            return dense(WIDTH, name, scale)(of).reshape(*of.shape[:2], HEADS, WIDTH // HEADS)

        query = heads('query', x, scale=HEADS / WIDTH)
        scores = jnp.einsum('bqhd,bkhd->bhqk', query, heads('key', memory)) + bias
        mixed = jnp.einsum('bhqk,bkhd->bqhd', nn.softmax(scores), heads('value', memory))
        return dense(WIDTH, 'out')(mixed.reshape(x.shape))


class Mlp(nn.Module):
    """T5 1.1's gated feed-forward layer (Shazeer 2020, arXiv:2002.05202)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Same shape as `x`."""
        return dense(WIDTH, 'wo')(nn.gelu(dense(2 * WIDTH, 'wi_0')(x)) * dense(2 * WIDTH, 'wi_1')(x))


class EncoderLayer(nn.Module):
    """Attention and feed-forward layer, each with normalization before it and a residual connection."""

    drop: nn.Dropout

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """Same shape as `x`."""
        y = nn.RMSNorm(name='pre_attention_layer_norm')(x)
        x = x + self.drop(Attention(name='attention')(y, y, bias))
        y = nn.RMSNorm(name='pre_mlp_layer_norm')(x)
        return x + self.drop(Mlp(name='mlp')(y))


class DecoderLayer(nn.Module):
    """The encoder's layer, with attention to the output of the encoder in between."""

    drop: nn.Dropout

    @nn.compact
    def __call__(self, x: jax.Array, encoded: jax.Array, bias: jax.Array) -> jax.Array:
        """Same shape as `x`."""
        y = nn.RMSNorm(name='pre_self_attention_layer_norm')(x)
        x = x + self.drop(Attention(name='self_attention')(y, y, bias))
        y = nn.RMSNorm(name='pre_cross_attention_layer_norm')(x)
        x = x + self.drop(Attention(name='encoder_decoder_attention')(y, encoded))
        y = nn.RMSNorm(name='pre_mlp_layer_norm')(x)
        return x + self.drop(Mlp(name='mlp')(y))


class Encoder(nn.Module):
    """All layers share the bias of the first layer, as in T5."""

    drop: nn.Dropout

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Same shape as `x`."""
        bias = RelativeBias(bidirectional=True, name='relpos_bias')(x.shape[1])
        for i in range(LAYERS):
            x = EncoderLayer(self.drop, name=f'layers_{i}')(x, bias)
        return nn.RMSNorm(name='encoder_norm')(x)


class Decoder(nn.Module):
    """Each position attends only to earlier positions."""

    drop: nn.Dropout

    @nn.compact
    def __call__(self, x: jax.Array, encoded: jax.Array) -> jax.Array:
        """(batch, target length, vocabulary)."""
        length = x.shape[1]
        bias = RelativeBias(bidirectional=False, name='relpos_bias')(length)
        bias = jnp.where(np.tri(length, dtype=bool), bias, -1e9)
        for i in range(LAYERS):
            x = DecoderLayer(self.drop, name=f'layers_{i}')(x, encoded, bias)
        return dense(VOCAB, 'logits_dense')(nn.RMSNorm(name='decoder_norm')(x))


class T5(nn.Module):
    """Returns the logits of each target, given inputs and targets."""

    @nn.compact
    def __call__(self, inputs: jax.Array, targets: jax.Array, deterministic: bool = True) -> jax.Array:
        """(batch, target length, vocabulary)."""
        embed = nn.Embed(VOCAB, WIDTH, embedding_init=nn.initializers.normal(1.0), name='token_embedder')
        drop = nn.Dropout(0.1, deterministic=deterministic)
        encoded = Encoder(drop, name='encoder')(embed(inputs))
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        return Decoder(drop, name='decoder')(embed(shifted), encoded)


# --- training ------------------------------------------------------------------------------------------------------

# The first rule whose pattern is in a leaf's path defines its sharding. The paths of Adam's moments contain the path of the
# parameter. Attention and MLP are split over 'model' as in Megatron: input layers by columns, output layers by rows.
SPLITS = (
    (r'embedding$|(query|key|value|wi_\d|logits_dense)/kernel$', P(None, 'model')),
    (r'(out|wo)/kernel$', P('model', None)),
    (r'', P()),
)


def sharding_of(path: tuple, mesh: Mesh) -> NamedSharding:
    """The sharding of the leaf at `path`."""
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    return NamedSharding(mesh, next(spec for pattern, spec in SPLITS if re.search(pattern, name)))


def make_state(batch: dict) -> TrainState:
    """A new state; called by `jax.eval_shape` and under `jax.jit`."""
    variables = T5().init(jax.random.key(SEED), batch['inputs'], batch['targets'])
    optimizer = optax.adamw(optax.warmup_constant_schedule(0.0, 3e-3, 20))
    return TrainState.create(apply_fn=T5().apply, params=variables['params'], tx=optimizer)


def loss_of(params: dict, batch: dict, apply: Callable, **options: object) -> jax.Array:
    """The mean loss, in nats per byte."""
    logits = apply({'params': params}, **batch, **options)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch['targets']).mean()


def train_step(state: TrainState, batch: dict) -> tuple[TrainState, jax.Array]:
    """Returns the updated state and the loss before the update."""
    dropout = {'dropout': jax.random.fold_in(jax.random.key(SEED), state.step)}
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch, state.apply_fn, deterministic=False, rngs=dropout)
    return state.apply_gradients(grads=grads), loss


class Program:
    """The compiled functions and their shardings, over a mesh of all devices, in pairs that split the model."""

    def __init__(self, batch: dict[str, np.ndarray]) -> None:
        """`batch` is one process's share of a batch; only its shapes are used."""
        devices = jax.device_count()
        pair = 2 if devices % 2 == 0 else 1
        mesh = jax.make_mesh((devices // pair, pair), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        init = functools.partial(make_state, batch)
        shapes = jax.eval_shape(init)
        shardings = jax.tree_util.tree_map_with_path(lambda path, _: sharding_of(path, mesh), shapes)
        self.state = jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, shardings)
        self.by_batch = NamedSharding(mesh, P('data'))
        ins, whole = (shardings, self.by_batch), NamedSharding(mesh, P())
        self.init = jax.jit(init, out_shardings=shardings)
        self.train = jax.jit(train_step, donate_argnums=0, in_shardings=ins, out_shardings=(shardings, whole))
        self.evaluate = jax.jit(
            lambda state, batch: loss_of(state.params, batch, state.apply_fn), in_shardings=ins, out_shardings=whole
        )

    def put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """The global batch, from this process's share of it."""
        return {name: jax.make_array_from_process_local_data(self.by_batch, array) for name, array in batch.items()}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run_dir', type=Path)
    parser.add_argument('--steps', type=int, default=100)
    parser.add_argument('--save-every', type=int, default=20)
    parser.add_argument('--eval-every', type=int, default=20)
    # Python's reference manual, as help() shows it: about 450 kB of English.
    parser.add_argument('--text', type=Path, nargs='+', default=[Path(pydoc_data.topics.__file__)])
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """The loop."""
    args = parse(arguments)
    text, held_out = read_text(args.text)
    batches = make_batches(text)
    program = Program(next(make_batches(text)))
    held_out = [program.put(batch) for batch in itertools.islice(make_batches(held_out), EVAL_BATCHES)]
    write_state_summary(args.run_dir, program.state)
    with (
        t5ckpt.PreemptionNotice() as preempted,
        Watchdog(seconds=60) as watchdog,
        t5ckpt.Checkpointer(
            program.state,
            checkpoints_dir=args.run_dir,
            dataset_iterator=batches,
            keep_policy=t5ckpt.KeepLatest(3) | t5ckpt.KeepBest(1, 'eval/loss', 'min', keep_without_metric=False),
            save_policy=t5ckpt.SaveEvery(args.save_every) | t5ckpt.SaveLast(args.steps) | t5ckpt.SaveOnPreemption(),
            preempted=preempted,
        ) as checkpointer,
        (args.run_dir / 'losses.jsonl').open('a', encoding='utf-8') as log,
    ):
        state = t5ckpt.restore_or_init(checkpointer, program.init)
        start = int(state.step)
        print(f'starting at step {start}' + ('' if checkpointer.restored_step is None else ', restored'), flush=True)
        with (
            MetricWriter(args.run_dir / 'train', resume_at=start) as train_metrics,
            MetricWriter(args.run_dir / 'eval', resume_at=start) as eval_metrics,
        ):
            for step in range(start, args.steps):
                state, loss = program.train(state, program.put(next(batches)))
                metrics = None
                if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
                    losses = [float(program.evaluate(state, batch)) for batch in held_out]
                    metrics = {'eval/loss': sum(losses) / len(losses)}
                    eval_metrics.write(step + 1, {'loss': metrics['eval/loss']})
                train_metrics.write(step, {'loss': loss})
                # Returns immediately: the state may be donated to the next step while it is being written.
                if checkpointer.maybe_save(step + 1, state, metrics=metrics) is not None:
                    # A run that is killed resumes here, and writes no event of an earlier step again.
                    train_metrics.flush()
                    eval_metrics.flush()
                print(json.dumps({'step': step, 'loss': float(loss).hex()}), file=log, flush=True)
                if step % 10 == 0:
                    print(f'step {step:4}  loss {float(loss):.4f}', flush=True)
                watchdog.beat()
                if checkpointer.should_stop:
                    print(f'preempted: saved step {step + 1}', flush=True)
                    break


if __name__ == '__main__':
    main()

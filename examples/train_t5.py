"""Trains a tiny T5 on the text that ships with Python, saving as it goes; started again, it goes on where it stopped.

    python examples/train_t5.py RUN_DIR [--steps 100] [--save-every 20]

The model is a T5 1.1 encoder-decoder in Flax linen, with T5X's parameter names, trained by span corruption on bytes
(Raffel et al. 2020, arXiv:1910.10683; ByT5: Xue et al. 2022, arXiv:2105.13626), sharded over a mesh of 2 x 2 devices.

What makes a run resumable to the bit is not in the checkpointer alone: the batch and the dropout of a step depend on
nothing but the number of that step. RUN_DIR/losses.jsonl gets one line for each step, so that this can be checked.
"""

import argparse
import functools
import json
import os
import pydoc_data.topics
import re
from collections.abc import Callable
from pathlib import Path

# Four devices on any machine. Both are read once, when jax starts.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=4')

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import t5ckpt

VOCAB = 384  # pad 0, end 1, unknown 2, then 256 bytes, then sentinels that count down from 383: ByT5's
WIDTH, HEADS, LAYERS = 128, 4, 2
BATCH, LENGTH = 8, 96
NOISE, SPANS = 15, 5  # of 96 bytes, 15 are hidden in 5 spans
SEED = 0


# --- data ----------------------------------------------------------------------------------------------------------


def read_corpus() -> np.ndarray:
    """Python's own reference manual, as help() shows it: some 450 kB of English."""
    topics = pydoc_data.topics.topics
    return np.frombuffer('\n'.join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def split_randomly(rng: np.random.Generator, total: int, parts: int) -> np.ndarray:
    """`parts` positive lengths that sum to `total`, every way equally likely."""
    cuts = np.sort(rng.choice(np.arange(1, total), parts - 1, replace=False))
    return np.diff(cuts, prepend=0, append=total)


def corrupt_spans(rng: np.random.Generator, tokens: np.ndarray) -> tuple[list[int], list[int]]:
    """Inputs with each hidden span replaced by its sentinel, and targets with the spans after their sentinels."""
    kept = split_randomly(rng, len(tokens) - NOISE, SPANS)
    hidden = split_randomly(rng, NOISE, SPANS)
    inputs, targets, at = [], [], 0
    for number, (keep, hide) in enumerate(zip(kept, hidden, strict=True)):
        sentinel = VOCAB - 1 - number
        inputs += [*tokens[at : at + keep], sentinel]
        targets += [sentinel, *tokens[at + keep : at + keep + hide]]
        at += keep + hide
    return [*inputs, 1], [*targets, 1]


def make_batch(corpus: np.ndarray, step: int) -> dict[str, np.ndarray]:
    """The batch of a step, from the step's number alone."""
    rng = np.random.default_rng([SEED, step])
    starts = rng.integers(0, len(corpus) - LENGTH, BATCH)
    pairs = [corrupt_spans(rng, corpus[start : start + LENGTH].astype(np.int32) + 3) for start in starts]
    inputs, targets = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
    return {'inputs': inputs, 'targets': targets}


# --- model ---------------------------------------------------------------------------------------------------------


def dense(features: int, name: str, scale: float = 1.0) -> nn.Dense:
    """A layer without bias, as all of T5's are, with first weights of variance `scale` / fan-in."""
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
        """(1, heads, length, length): what query i adds to its score of key j."""
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
    """Dot-product attention. T5 scales the first weights of the query instead of the scores."""

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
    """Attention and feed-forward, each normalised before and added after."""

    drop: nn.Dropout

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """Same shape as `x`."""
        y = nn.RMSNorm(name='pre_attention_layer_norm')(x)
        x = x + self.drop(Attention(name='attention')(y, y, bias))
        y = nn.RMSNorm(name='pre_mlp_layer_norm')(x)
        return x + self.drop(Mlp(name='mlp')(y))


class DecoderLayer(nn.Module):
    """As the encoder's, with attention to what was encoded in between."""

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
    """All layers share the bias of the first, as T5's do."""

    drop: nn.Dropout

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Same shape as `x`."""
        bias = RelativeBias(bidirectional=True, name='relpos_bias')(x.shape[1])
        for i in range(LAYERS):
            x = EncoderLayer(self.drop, name=f'layers_{i}')(x, bias)
        return nn.RMSNorm(name='encoder_norm')(x)


class Decoder(nn.Module):
    """Sees only what came before."""

    drop: nn.Dropout

    @nn.compact
    def __call__(self, x: jax.Array, encoded: jax.Array) -> jax.Array:
        """Same shape as `x`."""
        length = x.shape[1]
        bias = RelativeBias(bidirectional=False, name='relpos_bias')(length)
        bias = jnp.where(np.tri(length, dtype=bool), bias, -1e9)
        for i in range(LAYERS):
            x = DecoderLayer(self.drop, name=f'layers_{i}')(x, encoded, bias)
        return nn.RMSNorm(name='decoder_norm')(x)


class T5(nn.Module):
    """Inputs and targets in, logits for each target out."""

    @nn.compact
    def __call__(self, inputs: jax.Array, targets: jax.Array, deterministic: bool = True) -> jax.Array:
        """(batch, target length, vocabulary)."""
        embed = nn.Embed(VOCAB, WIDTH, embedding_init=nn.initializers.normal(1.0), name='token_embedder')
        drop = nn.Dropout(0.1, deterministic=deterministic)
        encoded = Encoder(drop, name='encoder')(embed(inputs))
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        decoded = Decoder(drop, name='decoder')(embed(shifted), encoded)
        return dense(VOCAB, 'logits_dense')(decoded)


# --- training ------------------------------------------------------------------------------------------------------

# The first rule that is found in a leaf's path says how it is split; Adam's moments have their parameter's path in
# theirs. Attention and MLP are split over 'model' as in Megatron: by columns on the way in, by rows on the way out.
SPLITS = (
    (r'embedding$|(query|key|value|wi_\d|logits_dense)/kernel$', P(None, 'model')),
    (r'(out|wo)/kernel$', P('model', None)),
    (r'', P()),
)


def sharding_of(path: tuple, mesh: Mesh) -> NamedSharding:
    """Where the leaf at `path` lives."""
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    return NamedSharding(mesh, next(spec for pattern, spec in SPLITS if re.search(pattern, name)))


def make_state(batch: dict) -> TrainState:
    """A fresh state, to be traced."""
    variables = T5().init(jax.random.key(SEED), batch['inputs'], batch['targets'])
    optimizer = optax.adamw(optax.warmup_constant_schedule(0.0, 3e-3, 20))
    return TrainState.create(apply_fn=T5().apply, params=variables['params'], tx=optimizer)


def train_step(state: TrainState, batch: dict) -> tuple[TrainState, jax.Array]:
    """One update and the loss before it, in nats a byte."""
    dropout = jax.random.fold_in(jax.random.key(SEED), state.step)

    def loss_of(params: dict) -> jax.Array:
        logits = state.apply_fn({'params': params}, **batch, deterministic=False, rngs={'dropout': dropout})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch['targets']).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def setup(corpus: np.ndarray) -> tuple[TrainState, Callable, Callable, NamedSharding]:
    """The state's shapes and shardings, functions that make it and train it, and the sharding of a batch."""
    mesh = jax.make_mesh((2, 2), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    init = functools.partial(make_state, make_batch(corpus, 0))
    shapes = jax.eval_shape(init)
    shardings = jax.tree_util.tree_map_with_path(lambda path, _: sharding_of(path, mesh), shapes)
    abstract = jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, shardings)
    by_batch = NamedSharding(mesh, P('data'))
    train = jax.jit(train_step, donate_argnums=0, in_shardings=(shardings, by_batch), out_shardings=(shardings, None))
    return abstract, jax.jit(init, out_shardings=shardings), train, by_batch


def main() -> None:
    """The loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run_dir', type=Path)
    parser.add_argument('--steps', type=int, default=100)
    parser.add_argument('--save-every', type=int, default=20)
    args = parser.parse_args()

    corpus = read_corpus()
    abstract, init, train, by_batch = setup(corpus)
    args.run_dir.mkdir(parents=True, exist_ok=True)
    with (
        t5ckpt.Checkpointer(abstract, checkpoints_dir=args.run_dir, keep=3) as checkpointer,
        (args.run_dir / 'losses.jsonl').open('a', encoding='utf-8') as log,
    ):
        start = checkpointer.latest_step()
        state = init() if start is None else checkpointer.restore()
        print(f'starting at step {int(state.step)}' + ('' if start is None else ', restored'), flush=True)
        for step in range(int(state.step), args.steps):
            state, loss = train(state, jax.device_put(make_batch(corpus, step), by_batch))
            if (step + 1) % args.save_every == 0:
                # Returns at once: the state may be donated to the next step while it is still being written.
                checkpointer.save_async(state)
            print(json.dumps({'step': step, 'loss': float(loss).hex()}), file=log, flush=True)
            if step % 10 == 0:
                print(f'step {step:4}  loss {float(loss):.4f}', flush=True)


if __name__ == '__main__':
    main()

"""A tiny T5 in Flax with T5X's architecture and parameter names, in all the variants that an export knows.

Written from T5X's networks (t5x/examples/t5, scalable_t5) and from Flaxformer's Switch: RMS norms before each sublayer,
attention without a scale, a relative bias for a tower or for each layer, logits from the embedding scaled by d**-0.5 or of
their own, layers one by one or scanned at axis 1, heads joined or split.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes that are all different, so that no two axes can be mixed up."""

    vocab: int = 61
    width: int = 20
    heads: int = 3
    head: int = 5
    hidden: int = 22
    buckets: int = 8
    encoder_layers: int = 3
    decoder_layers: int = 2
    gated: bool = False
    tied: bool = True
    relpos_per_layer: bool = False
    scanned: bool = False
    split_heads: bool = False
    experts: int = 0
    """In every second layer."""


class Kernel(nn.Module):
    """A matrix product without bias; the kernel has the shape given, the product that of its matrix."""

    shape: tuple[int, ...]
    inward: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., in) to (..., out)."""
        kernel = self.param('kernel', nn.initializers.normal(self.inward**-0.5), self.shape)
        return x @ kernel.reshape(self.inward, -1)


class RelativeBias(nn.Module):
    """A bias for each head and bucket of distance."""

    config: Config
    bidirectional: bool

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        """(heads, length, length)."""
        c = self.config
        distance = np.arange(length)[None, :] - np.arange(length)[:, None]
        half = c.buckets // 2 if self.bidirectional else c.buckets
        offset = half * (distance > 0) if self.bidirectional else 0
        distance = np.abs(distance) if self.bidirectional else np.maximum(-distance, 0)
        exact = half // 2
        spread = np.log(np.maximum(distance, 1) / exact) / np.log(128 / exact) * (half - exact)
        far = np.minimum(exact + spread.astype(np.int32), half - 1)
        table = self.param('rel_embedding', nn.initializers.normal(1.0), (c.heads, c.buckets))
        return table[:, offset + np.where(distance < exact, distance, far)]


class Attention(nn.Module):
    """Dot products, not scaled."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, bias: Any = 0.0) -> jax.Array:
        """(batch, length, width), attending to `memory`."""
        c = self.config
        shape = (c.heads, c.head) if c.split_heads else (c.heads * c.head,)

        def heads(name: str, of: jax.Array) -> jax.Array:
            return Kernel((c.width, *shape), c.width, name=name)(of).reshape(*of.shape[:2], c.heads, c.head)

        scores = jnp.einsum('bqhd,bkhd->bhqk', heads('query', x), heads('key', memory)) + bias
        mixed = jnp.einsum('bhqk,bkhd->bqhd', nn.softmax(scores), heads('value', memory))
        return Kernel((*shape, c.width), c.heads * c.head, name='out')(mixed.reshape(*x.shape[:2], -1))


class Mlp(nn.Module):
    """Feed-forward; `experts` of it at once, each for a part of the batch, where there are some."""

    config: Config
    experts: int = 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(experts, tokens, width) with experts, else (..., width)."""
        c = self.config
        lead = (self.experts,) if self.experts else ()

        def product(name: str, of: jax.Array, shape: tuple[int, int]) -> jax.Array:
            if not lead:
                return Kernel(shape, shape[0], name=name)(of)
            return Experts((*lead, *shape), name=name)(of)

        if c.gated:
            inner = nn.gelu(product('wi_0', x, (c.width, c.hidden))) * product('wi_1', x, (c.width, c.hidden))
        else:
            inner = nn.relu(product('wi', x, (c.width, c.hidden)))
        return product('wo', inner, (c.hidden, c.width))


class Experts(nn.Module):
    """A matrix for each expert."""

    shape: tuple[int, int, int]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(experts, tokens, in) to (experts, tokens, out)."""
        kernel = self.param('kernel', nn.initializers.normal(self.shape[1] ** -0.5), self.shape)
        return jnp.einsum('eti,eio->eto', x, kernel)


class RouterWeights(nn.Module):
    """Where Flaxformer keeps the router's matrix."""

    shape: tuple[int, int]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Scores of the experts."""
        return Kernel(self.shape, self.shape[0], name='w')(x)


class Router(nn.Module):
    """Which expert, and how much of it."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(tokens, experts): the probability of the best expert, zero for the others."""
        c = self.config
        chances = nn.softmax(RouterWeights((c.width, c.experts), name='router_weights')(x))
        return chances * jax.nn.one_hot(chances.argmax(-1), c.experts)


class Switch(nn.Module):
    """A mixture of experts, the best one for each token; no capacity."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Same shape as `x`."""
        c = self.config
        tokens = x.reshape(-1, c.width)
        gates = Router(c, name='router')(tokens)
        every = Mlp(c, c.experts, name='expert')(jnp.broadcast_to(tokens, (c.experts, *tokens.shape)))
        return jnp.einsum('te,etd->td', gates, every).reshape(x.shape)


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each normalised before and added after."""

    config: Config
    sparse: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, bias: Any) -> tuple[jax.Array, None]:
        """As a scan wants it: the carry, and nothing beside."""
        c = self.config
        if c.relpos_per_layer:
            bias = RelativeBias(c, True, name='relpos_bias')(x.shape[1])
        y = nn.RMSNorm(name='pre_attention_layer_norm')(x)
        x = x + Attention(c, name='attention')(y, y, bias)
        y = nn.RMSNorm(name='pre_mlp_layer_norm')(x)
        return x + (Switch if self.sparse else Mlp)(c, name='mlp')(y), None


class DecoderLayer(nn.Module):
    """With attention to what was encoded in between."""

    config: Config
    sparse: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, bias: Any, encoded: jax.Array) -> tuple[jax.Array, None]:
        """As a scan wants it."""
        c = self.config
        if c.relpos_per_layer:
            bias = RelativeBias(c, False, name='relpos_bias')(x.shape[1])
        hidden = jnp.where(np.tri(x.shape[1], dtype=bool), 0.0, -1e10)
        y = nn.RMSNorm(name='pre_self_attention_layer_norm')(x)
        x = x + Attention(c, name='self_attention')(y, y, bias + hidden)
        y = nn.RMSNorm(name='pre_cross_attention_layer_norm')(x)
        x = x + Attention(c, name='encoder_decoder_attention')(y, encoded)
        y = nn.RMSNorm(name='pre_mlp_layer_norm')(x)
        return x + (Switch if self.sparse else Mlp)(c, name='mlp')(y), None


class Tower(nn.Module):
    """All layers and the last norm."""

    config: Config
    name_of_norm: str
    layer: Any
    layers: int
    bidirectional: bool

    @nn.compact
    def __call__(self, x: jax.Array, *memory: jax.Array) -> jax.Array:
        """Same shape as `x`."""
        c = self.config
        bias = 0.0 if c.relpos_per_layer else RelativeBias(c, self.bidirectional, name='relpos_bias')(x.shape[1])
        if c.scanned:
            scanned = nn.scan(
                self.layer,
                variable_axes={'params': 1},
                split_rngs={'params': True},
                in_axes=(nn.broadcast,) * (1 + len(memory)),
                length=self.layers,
            )
            x, _ = scanned(c, name=self.name)(x, bias, *memory)
        else:
            for i in range(self.layers):
                sparse = c.experts > 0 and i % 2 == 1
                x, _ = self.layer(c, sparse, name=f'layers_{i}')(x, bias, *memory)
        return nn.RMSNorm(name=self.name_of_norm)(x)


class Decoder(Tower):
    """A tower with logits, where they are not the embedding's."""

    @nn.compact
    def __call__(self, x: jax.Array, *memory: jax.Array) -> jax.Array:
        """The output of the tower, or the logits."""
        c = self.config
        x = super().__call__(x, *memory)
        return x if c.tied else Kernel((c.width, c.vocab), c.width, name='logits_dense')(x)


class T5(nn.Module):
    """An encoder-decoder."""

    config: Config

    @nn.compact
    def __call__(self, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """(batch, target length, vocabulary) logits."""
        c = self.config
        embedder = nn.Embed(c.vocab, c.width, embedding_init=nn.initializers.normal(1.0), name='token_embedder')
        encoder = Tower(c, 'encoder_norm', EncoderLayer, c.encoder_layers, True, name='encoder')
        decoder = Decoder(c, 'decoder_norm', DecoderLayer, c.decoder_layers, False, name='decoder')
        x = decoder(embedder(targets), encoder(embedder(inputs)))
        return embedder.attend(x) / jnp.sqrt(c.width) if c.tied else x


@functools.cache
def tokens(config: Config, length: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of two examples, without padding."""
    rng = np.random.default_rng(0)
    return rng.integers(1, config.vocab, (2, length)), rng.integers(1, config.vocab, (2, 7))


def init(config: Config, seed: int = 0) -> dict[str, Any]:
    """Random parameters as numpy arrays; norms too, which an initializer would leave at one."""
    shapes = jax.eval_shape(T5(config).init, jax.random.key(0), *tokens(config))['params']
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        values = rng.standard_normal(leaf.shape, np.float32)
        match path[-1].key:
            case 'scale':
                return 1 + 0.1 * values
            case 'kernel':
                return values / np.float32(4)
            case _:
                return values

    return jax.tree_util.tree_map_with_path(draw, shapes)


def logits(config: Config, params: Any, length: int = 12) -> np.ndarray:
    """Of the examples, as float32."""
    return np.asarray(jax.jit(T5(config).apply)({'params': params}, *tokens(config, length)), np.float32)


def encoded(config: Config, params: Any) -> np.ndarray:
    """What the encoder makes of the inputs."""
    tower = Tower(config, 'encoder_norm', EncoderLayer, config.encoder_layers, True)
    x = params['token_embedder']['embedding'][tokens(config)[0]]
    return np.asarray(tower.apply({'params': params['encoder']}, x), np.float32)

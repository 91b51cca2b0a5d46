"""A pure decoder-only transformer.

Axis glossary, for the whole project:
  S seeds, L layers, H heads, B batch, T positions, D residual width, K head width, F MLP hidden width, V vocabulary.

Pre-LayerNorm blocks, learned positions, GELU by tanh, biases in LayerNorm and the MLP only, untied head, no dropout.
Functions are written for one seed; `qkgeom_jax.ensemble` maps them over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qkgeom_jax.config import ModelConfig
from qkgeom_jax.initializers import Params

LAYER_NORM_EPSILON = 1e-5
# Finite, so that a fully masked row and a gradient through it stay finite; exp of it is exactly 0 in float32.
MASKED_LOGIT = -1e9


class Layer(NamedTuple):
    """What one block computes on the way: the argument of an `observe` function.

    residual [B, T, D] is the block's input; query, key, value are [B, H, T, K], query and key before scaling; logits
    [B, H, T, T] are query @ key^T / sqrt(K) before masking; attention [B, H, T, T] sums to 1 over its last axis.
    """

    residual: jax.Array
    query: jax.Array
    key: jax.Array
    value: jax.Array
    logits: jax.Array
    attention: jax.Array


Observe = Callable[[Layer, Params], Any]


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [B, T, D] times w [D, F], over all B x T tokens at once.

    Flattened, because XLA on the CPU copies a three-axis operand of the weight's gradient (BUILD_NOTES.md, Speed).
    """
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])


def layer_norm(x: jax.Array, params: Params) -> jax.Array:
    """x [B, T, D] normalised over its last axis, in float32 whatever the format of `x`."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + LAYER_NORM_EPSILON)
    return (y * params["scale"][None, None] + params["bias"][None, None]).astype(x.dtype)


def causal_mask(length: int) -> jax.Array:
    """[T, T], True where a query (row) may see a key (column)."""
    return jnp.tril(jnp.ones((length, length), bool))


def _block(x: jax.Array, block: Params, config: ModelConfig) -> tuple[jax.Array, Layer]:
    """One block on x [B, T, D]; `block` holds this layer's leaves in the compute format."""
    batch, length, _ = x.shape

    def heads(y: jax.Array) -> jax.Array:
        return y.reshape(batch, length, config.heads, config.head_width).swapaxes(1, 2)

    attention = block["attention"]
    y = layer_norm(x, block["norm_1"])
    query, key, value = (heads(linear(y, attention[name])) for name in ("query", "key", "value"))
    logits = (query @ key.swapaxes(-1, -2)).astype(jnp.float32) / math.sqrt(config.head_width)
    weights = jax.nn.softmax(jnp.where(causal_mask(length)[None, None], logits, MASKED_LOGIT), axis=-1)
    mixed = (weights.astype(x.dtype) @ value).swapaxes(1, 2).reshape(x.shape)
    layer = Layer(x, query, key, value, logits, weights)
    x = x + linear(mixed, attention["output"])

    mlp = block["mlp"]
    hidden = linear(layer_norm(x, block["norm_2"]), mlp["input"]) + mlp["input_bias"][None, None]
    return x + linear(jax.nn.gelu(hidden, approximate=True), mlp["output"]) + mlp["output_bias"][None, None], layer


def apply(
    params: Params, tokens: jax.Array, config: ModelConfig, observe: Observe | None = None
) -> tuple[jax.Array, Any]:
    """Next-token logits of a batch, and what `observe` makes of each block.

    Args:
      params: the tree of `qkgeom_jax.initializers.make_params`, one seed.
      tokens: int [B, T], T at most the configuration's context; ids below the vocabulary (out-of-range ids are clamped
        by the gather, so check them on the host).
      config: sizes and the compute format.
      observe: called inside the program with each block's `Layer` and its parameters; what it returns is stacked over
        a leading axis L. Reduce there: [B, H, T, T] arrays of all layers seldom fit. To have everything, pass
        ``lambda layer, block: layer``.

    Returns:
      float32 logits [B, T, V], and the stacked observations (None without `observe`).

    Raises:
      ValueError: more positions than the context has.
    """
    length = tokens.shape[-1]
    if length > config.context:
        raise ValueError(f"tokens has {length} positions; the model's context is {config.context}")
    dtype = jnp.dtype(config.compute_dtype)
    params = jax.tree.map(lambda p: p.astype(dtype), params)

    def block(x: jax.Array, block_params: Params) -> tuple[jax.Array, Any]:
        x, layer = _block(x, block_params, config)
        return x, observe(layer, block_params) if observe else None

    if config.rematerialise:
        block = jax.checkpoint(block)
    x = params["token_embedding"][tokens] + params["position_embedding"][None, :length]
    # Unrolled: the loop's slices and copies cost more on a CPU than the longer compile (BUILD_NOTES.md, Speed). An
    # observer is traced once instead, since the spectra make up most of an evaluation program.
    x, observations = jax.lax.scan(block, x, params["blocks"], unroll=observe is None)
    logits = linear(layer_norm(x, params["norm"]), params["head"])
    return logits.astype(jnp.float32), observations


def cross_entropy(params: Params, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """Mean next-token loss in nats over tokens [B, T + 1]: position t predicts token t + 1."""
    logits, _ = apply(params, tokens[:, :-1], config)
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1).mean()

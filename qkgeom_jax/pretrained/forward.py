"""The forward pass of GPT-2, GPT-NeoX and Llama: jitted, float32 at the highest precision, one layer in memory at a time.

Shapes use the axis glossary of `qkgeom_jax.model`, and G for key heads: query head h uses key head h // (H // G).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qkgeom_jax.model import MASKED_LOGIT, causal_mask, linear
from qkgeom_jax.pretrained.architecture import Architecture
from qkgeom_jax.pretrained.checkpoint import Checkpoint
from qkgeom_jax.pretrained.families import Block

_ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class Activations(NamedTuple):
    """What one layer computes on the way.

    residual [B, T, D] is the layer's input; query [B, H, T, K], key and value [B, G, T, K] are as projected, with their
    biases; rotated_query and rotated_key are query and key after the rotary position embedding (the same arrays where
    positions are learned); logits [B, H, T, T] are before masking, with every scale; attention sums to 1 over its last axis.
    """

    residual: jax.Array
    query: jax.Array
    key: jax.Array
    value: jax.Array
    rotated_query: jax.Array
    rotated_key: jax.Array
    logits: jax.Array
    attention: jax.Array


def _norm(x: jax.Array, params: dict[str, jax.Array], epsilon: float) -> jax.Array:
    """LayerNorm, or RMSNorm where there is no bias."""
    if "bias" not in params:
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon) * params["scale"][None, None]
    centred = x - x.mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    return y * params["scale"][None, None] + params["bias"][None, None]


def _linear(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    y = linear(x, params["kernel"])
    return y + params["bias"][None, None] if "bias" in params else y


def _rotate(x: jax.Array, a: Architecture) -> jax.Array:
    """The first `rotary_width` features of x [B, heads, T, K], in pairs (i, i + half), turned by their position."""
    if not a.rotary_width:
        return x
    half = a.rotary_width // 2
    frequencies = a.rope_theta ** (-np.arange(half) / half)
    angles = np.arange(x.shape[-2])[:, None] * frequencies
    cos, sin = (jnp.asarray(f(angles), jnp.float32)[None, None] for f in (np.cos, np.sin))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def repeat_keys(x: jax.Array, a: Architecture) -> jax.Array:
    """Key heads [B, G, T, K] beside the query heads that use them: [B, H, T, K]."""
    return jnp.repeat(x, a.heads // a.key_heads, axis=1)


def attend(x: jax.Array, block: Block, scale: jax.Array, a: Architecture) -> tuple[jax.Array, Activations]:
    """What attention adds to x [B, T, D], and what it computed."""
    batch, length, _ = x.shape
    y = _norm(x, block["norm_1"], a.epsilon)

    def heads(part: str, count: int) -> jax.Array:
        return _linear(y, block[part]).reshape(batch, length, count, a.head_width).swapaxes(1, 2)

    query, key, value = heads("query", a.heads), heads("key", a.key_heads), heads("value", a.key_heads)
    rotated_query, rotated_key = _rotate(query, a), _rotate(key, a)
    logits = rotated_query @ repeat_keys(rotated_key, a).swapaxes(-1, -2) * scale
    attention = jax.nn.softmax(jnp.where(causal_mask(length)[None, None], logits, MASKED_LOGIT), axis=-1)
    mixed = (attention @ repeat_keys(value, a)).swapaxes(1, 2).reshape(batch, length, a.heads * a.head_width)
    return _linear(mixed, block["output"]), Activations(
        x, query, key, value, rotated_query, rotated_key, logits, attention
    )


def feed_forward(x: jax.Array, block: Block, a: Architecture) -> jax.Array:
    """What the MLP adds to x [B, T, D]."""
    y = _norm(x, block["norm_2"], a.epsilon)
    up = _linear(y, block["up"])
    act = _ACTIVATIONS[a.activation]
    return _linear(act(_linear(y, block["gate"])) * up if "gate" in block else act(up), block["down"])


@functools.partial(jax.jit, static_argnames="a")
def _layer(x: jax.Array, block: Block, scale: jax.Array, a: Architecture) -> tuple[jax.Array, Activations]:
    with jax.default_matmul_precision("highest"):
        added, activations = attend(x, block, scale, a)
        return advance(x, added, block, a), activations


def advance(x: jax.Array, attended: jax.Array, block: Block, a: Architecture) -> jax.Array:
    """The residual stream after a layer."""
    if a.parallel:
        return x + attended + feed_forward(x, block, a)
    x = x + attended
    return x + feed_forward(x, block, a)


@functools.partial(jax.jit, static_argnames="epsilon")
def last_norm(x: jax.Array, params: dict[str, jax.Array], epsilon: float) -> jax.Array:
    """The normalisation before the head."""
    return _norm(x, params, epsilon)


@jax.jit
def _head_logits(x: jax.Array, rows: jax.Array) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return linear(x, rows.T)


def check_tokens(checkpoint: Checkpoint, token_ids: np.ndarray) -> np.ndarray:
    """The ids as int32, refused where the model has no such tokens or positions.

    Raises:
      ValueError: not whole numbers [B, T], T beyond the model's context, or an id that its vocabulary lacks.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token_ids is {ids.dtype} {ids.shape}; whole numbers [windows, positions] are needed")
    if ids.shape[1] > checkpoint.context:
        raise ValueError(f"token_ids has {ids.shape[1]} positions; the model's context is {checkpoint.context}")
    if ids.min() < 0 or ids.max() >= checkpoint.vocabulary:
        raise ValueError(
            f"token_ids has ids from {ids.min()} to {ids.max()}; the model's are 0 to {checkpoint.vocabulary - 1}"
        )
    return ids.astype(np.int32)


def residuals(
    checkpoint: Checkpoint, token_ids: np.ndarray, step: Callable[..., tuple[jax.Array, Any]] = _layer
) -> Iterator[tuple[Any, jax.Array]]:
    """What `step` makes of each layer, and the residual stream after it, layer by layer."""
    a, x = checkpoint.architecture, jnp.asarray(checkpoint.embed(token_ids))
    for layer in range(checkpoint.layers):
        block = jax.tree.map(jnp.asarray, checkpoint.block(layer))
        x, made = step(x, block, jnp.float32(a.logit_scale(layer)), a=a.block)
        del block  # before the next one is read
        yield made, x


def apply(
    checkpoint: Checkpoint, token_ids: np.ndarray, observe: Callable[[int, Activations], None] | None = None
) -> jax.Array:
    """Next-token logits of a batch.

    Args:
      checkpoint: as `open_checkpoint` gives it.
      token_ids: whole numbers [B, T], T at most the model's context.
      observe: called with the number of each layer, from 0, and its `Activations`, on the host; keep what is needed, the
        next layer's take the others' place.
    Returns:
      float32 logits [B, T, V].
    Raises:
      ValueError: ids that the model does not have, or too many positions.
    Numerics: within 1e-4 of transformers' eager attention in float32; matrix products at the highest precision.
    Source: Radford et al. (2019), Black et al. (2022), Touvron et al. (2023).
    """
    ids = check_tokens(checkpoint, token_ids)
    x = jnp.zeros(())
    for layer, (activations, x) in enumerate(residuals(checkpoint, ids)):
        if observe is not None:
            observe(layer, activations)
    y = last_norm(x, checkpoint.norm(), checkpoint.architecture.epsilon)
    return jnp.concatenate([_head_logits(y, rows) for rows in checkpoint.head()], axis=-1)

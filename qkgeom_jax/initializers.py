"""Initial parameters, and the three ways in which queries and keys may start.

Shapes use the axis glossary of `qkgeom_jax.model`. A kernel is [input, output]: y = x @ w.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from qkgeom_jax.config import ModelConfig

Params = dict

EMBEDDING_STD = 0.02


def _xavier(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Glorot and Bengio (2010), uniform, over the last two axes."""
    bound = math.sqrt(6 / (shape[-2] + shape[-1]))
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def qk_identical(key: jax.Array, depth: int, width: int) -> tuple[jax.Array, jax.Array]:
    """W_Q = W_K, one Xavier draw a layer."""
    w = _xavier(key, (depth, width, width))
    return w, w


def independent(key: jax.Array, depth: int, width: int) -> tuple[jax.Array, jax.Array]:
    """W_Q and W_K are separate Xavier draws."""
    key_q, key_k = jax.random.split(key)
    return _xavier(key_q, (depth, width, width)), _xavier(key_k, (depth, width, width))


def disjoint_support(key: jax.Array, depth: int, width: int) -> tuple[jax.Array, jax.Array]:
    """W_Q reads one random half of the input features, W_K the other; training may fill the zeros.

    The halves are drawn anew for each layer. What is not zero is scaled by sqrt 2, so that norms match `independent`.
    (Splitting output features instead would make every attention logit exactly 0.)
    """
    key_w, key_half = jax.random.split(key)
    w_q, w_k = independent(key_w, depth, width)

    def half(key: jax.Array) -> jax.Array:
        return jax.random.permutation(key, width) < width // 2

    chosen = jax.vmap(half)(jax.random.split(key_half, depth))[:, :, None]
    scale = math.sqrt(2)
    return jnp.where(chosen, scale * w_q, 0.0), jnp.where(chosen, 0.0, scale * w_k)


QUERY_KEY = {"qk_identical": qk_identical, "disjoint_support": disjoint_support, "independent": independent}


def make_params(key: jax.Array, config: ModelConfig) -> Params:
    """The parameter tree of one seed.

    Everything but W_Q and W_K is drawn from keys of its own, so two initialisations with one seed differ in W_Q and
    W_K alone. Embeddings N(0, 0.02^2); attention Xavier over the whole [D, D]; MLP N(0, 0.02^2), its output divided by
    sqrt(2 L); LayerNorm scales 1; biases 0; the untied head N(0, 0.02^2).

    Args:
      key: a PRNG key.
      config: sizes and the query/key initialisation.

    Returns:
      A nested dict of float32 arrays; the blocks' leaves are stacked over a leading axis L.
    """
    depth, width, hidden = config.depth, config.width, config.hidden
    keys = dict(zip(("token", "position", "qk", "value", "output", "mlp_in", "mlp_out", "head"), jax.random.split(key, 8)))

    def normal(name: str, *shape: int) -> jax.Array:
        return EMBEDDING_STD * jax.random.normal(keys[name], shape, jnp.float32)

    def norm(*shape: int) -> dict[str, jax.Array]:
        return {"scale": jnp.ones(shape, jnp.float32), "bias": jnp.zeros(shape, jnp.float32)}

    query, key_kernel = QUERY_KEY[config.init](keys["qk"], depth, width)
    return {
        "token_embedding": normal("token", config.vocabulary, width),
        "position_embedding": normal("position", config.context, width),
        "blocks": {
            "norm_1": norm(depth, width),
            "attention": {
                "query": query,
                "key": key_kernel,
                "value": _xavier(keys["value"], (depth, width, width)),
                "output": _xavier(keys["output"], (depth, width, width)),
            },
            "norm_2": norm(depth, width),
            "mlp": {
                "input": normal("mlp_in", depth, width, hidden),
                "input_bias": jnp.zeros((depth, hidden), jnp.float32),
                "output": normal("mlp_out", depth, hidden, width) / math.sqrt(2 * depth),
                "output_bias": jnp.zeros((depth, width), jnp.float32),
            },
        },
        "norm": norm(width),
        "head": normal("head", width, config.vocabulary),
    }

"""Initial parameters, and the three ways in which queries and keys may start.

Shapes use the axis glossary of `qkgeom_jax.model`. A kernel is [input, output]: y = x @ w.
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp

from qkgeom_jax.config import ModelConfig

Params = dict

EMBEDDING_STD = 0.02


# Keeps the compiler from repeating a generator in everything that reads a part of what it drew.
_drawn = jax.lax.optimization_barrier


def _xavier(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Glorot and Bengio (2010), uniform, over the last two axes."""
    bound = math.sqrt(6 / (shape[-2] + shape[-1]))
    # Drawn flat: a generator of many axes takes the compiler five times as long.
    return _drawn(jax.random.uniform(key, (math.prod(shape),), jnp.float32, -bound, bound)).reshape(shape)


def qk_identical(key: jax.Array, depth: int, width: int) -> tuple[jax.Array, jax.Array]:
    """W_Q = W_K, one Xavier draw a layer."""
    w = _xavier(key, (depth, width, width))
    return w, w


def independent(key: jax.Array, depth: int, width: int) -> tuple[jax.Array, jax.Array]:
    """W_Q and W_K are separate Xavier draws."""
    w_q, w_k = _xavier(key, (2, depth, width, width))
    return w_q, w_k


def disjoint_support(key: jax.Array, depth: int, width: int) -> tuple[jax.Array, jax.Array]:
    """W_Q reads one random half of the input features, W_K the other; training may fill the zeros.

    The halves are drawn anew for each layer. What is not zero is scaled by sqrt 2, so that norms match `independent`.
    (Splitting output features instead would make every attention logit exactly 0.)
    """
    key_w, key_half = jax.random.split(key)
    w_q, w_k = independent(key_w, depth, width)

    # Ranks of uniform numbers are a random permutation.
    ranks = jax.random.uniform(key_half, (depth * width,)).reshape(depth, width).argsort(-1).argsort(-1)
    chosen = (ranks < width // 2)[:, :, None]
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
    key_normal, key_qk, key_uniform = jax.random.split(key, 3)
    shapes = {
        "token": (config.vocabulary, width),
        "position": (config.context, width),
        "mlp_in": (depth, width, hidden),
        "mlp_out": (depth, hidden, width),
        "head": (width, config.vocabulary),
    }
    # One draw for all of them: each random operation costs a CPU's compiler about a second.
    sizes = [math.prod(shape) for shape in shapes.values()]
    drawn = _drawn(EMBEDDING_STD * jax.random.normal(key_normal, (sum(sizes),), jnp.float32))
    pieces = jnp.split(drawn, list(itertools.accumulate(sizes))[:-1])
    normal = {name: piece.reshape(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
    value, output = _xavier(key_uniform, (2, depth, width, width))

    def norm(*shape: int) -> dict[str, jax.Array]:
        return {"scale": jnp.ones(shape, jnp.float32), "bias": jnp.zeros(shape, jnp.float32)}

    query, key_kernel = QUERY_KEY[config.init](key_qk, depth, width)
    return {
        "token_embedding": normal["token"],
        "position_embedding": normal["position"],
        "blocks": {
            "norm_1": norm(depth, width),
            "attention": {
                "query": query,
                "key": key_kernel,
                "value": value,
                "output": output,
            },
            "norm_2": norm(depth, width),
            "mlp": {
                "input": normal["mlp_in"],
                "input_bias": jnp.zeros((depth, hidden), jnp.float32),
                "output": normal["mlp_out"] / math.sqrt(2 * depth),
                "output_bias": jnp.zeros((depth, width), jnp.float32),
            },
        },
        "norm": norm(width),
        "head": normal["head"],
    }

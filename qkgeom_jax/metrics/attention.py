"""How peaked attention is, and how its logits are distributed.

All take logits [..., T, T] (queries, then keys) and a boolean mask [T, T] (or of the logits' shape), True where a query
may attend to a key, and work in float32. A query without any allowed key is left out of the averages.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax


def _by_key(logits: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits [T keys, ..., T queries] in float32 and a mask that broadcasts to them."""
    logits, mask = jnp.asarray(logits).astype(jnp.float32), jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask has dtype {mask.dtype}; it must be boolean, True where a query may attend to a key")
    if logits.ndim < 2 or mask.shape not in (logits.shape, logits.shape[-2:]):
        raise ValueError(f"mask has shape {mask.shape}; logits {logits.shape} take one of shape {logits.shape[-2:]}")
    mask = mask.reshape((1,) * (logits.ndim - mask.ndim) + mask.shape)
    return jnp.moveaxis(logits, -1, 0), jnp.moveaxis(mask, -1, 0)


@functools.partial(jax.jit, static_argnames="k")
def statistics_by_key(logits: jax.Array, mask: jax.Array, k: int = 5) -> dict[str, jax.Array]:
    """All eight metrics, [...], from two passes over the keys; logits and mask as from `_by_key`.

    In each step stand all queries side by side: on a CPU half the time of a softmax along rows with `lax.top_k`. The
    softmax is that of `jax.nn.log_softmax`: the row's maximum subtracted, masked entries finite.
    """
    least = jnp.finfo(jnp.float32).min
    queries = jnp.zeros(logits.shape[1:], jnp.float32)

    def insert(carry, row):
        top, total, size = carry
        logit, allowed = row
        next_larger = jnp.concatenate([jnp.full_like(top[:1], jnp.inf), top[:-1]])
        top = jnp.maximum(top, jnp.minimum(next_larger, jnp.where(allowed, logit, least)[None]))
        logit = jnp.where(allowed, logit, 0.0)
        return (top, total + logit, jnp.maximum(size, jnp.abs(logit))), None

    start = jnp.full((k, *queries.shape), least), queries, queries
    (top, total, size), _ = lax.scan(insert, start, (logits, mask))
    keys = jnp.broadcast_to(jnp.sum(mask, axis=0), queries.shape)
    pairs = jnp.sum(keys, axis=-1, keepdims=True)
    mean = jnp.sum(total, axis=-1, keepdims=True) / pairs
    scale = jnp.max(size, axis=-1, keepdims=True)
    scale = jnp.where(scale > 0, scale, 1.0)

    def accumulate(carry, row):
        mass, moment, squares = carry
        logit, allowed = row
        below = jnp.where(allowed, logit - top[0], 0.0)
        weight = jnp.where(allowed, jnp.exp(below), 0.0)
        deviation = jnp.where(allowed, (logit - mean) / scale, 0.0)
        moment = moment + weight * jnp.where(weight > 0, below, 0.0)
        return (mass + weight, moment, squares + deviation * deviation), None

    (mass, moment, squares), _ = lax.scan(accumulate, (queries, queries, queries), (logits, mask))
    answered = keys > 0
    mass = jnp.where(answered, mass, 1.0)
    exists = jnp.arange(k).reshape((k,) + (1,) * queries.ndim) < keys[None]
    weights = jnp.where(exists, jnp.exp(jnp.where(exists, top - top[:1], 0.0)), 0.0) / mass[None]
    std = jnp.sqrt(jnp.sum(squares, axis=-1) / pairs[..., 0]) * scale[..., 0]

    def query_mean(values):
        return jnp.sum(jnp.where(answered, values, 0.0), axis=-1) / jnp.sum(answered, axis=-1)

    return {
        "attention_entropy": query_mean(jnp.log(mass) - moment / mass),
        "top_1_mass": query_mean(weights[0]),
        f"top_{k}_mass": query_mean(jnp.sum(weights, axis=0)),
        "attention_gap": query_mean(weights[0] - weights[1]) if k > 1 else None,
        "logit_mean": mean[..., 0],
        "logit_std": std,
        "logit_variance": std * std,
        "logit_max": jnp.max(top[0], axis=-1),
    }


def attention_entropy(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over queries of the entropy of their attention.

    H = -sum_j p_j ln p_j over the allowed keys, p = softmax(logits).

    Args:
      logits: [..., T, T], any floating type, already divided by sqrt(K).
      mask: [T, T] boolean, True = allowed.
    Returns:
      [...], float32, nats, in [0, ln T]; a query with one key has 0; NaN where the mask allows nothing.
    Raises:
      ValueError: a mask that is not boolean or not of the logits' shape.
    Numerics: within 1e-6 of float64; finite derivatives where a weight is 0.
    Source: Table 1, attention distribution.

    >>> print(attention_entropy(jnp.zeros((2, 2)), jnp.tril(jnp.ones((2, 2), bool))))  # (ln 1 + ln 2) / 2
    0.3465736
    """
    return statistics_by_key(*_by_key(logits, mask), 1)["attention_entropy"]


def top_k_mass(logits: jax.Array, k: int, mask: jax.Array) -> jax.Array:
    """Mean over queries of the attention that their k most attended keys hold together.

    Args:
      logits: [..., T, T]; k: at least 1; mask: [T, T] boolean, True = allowed.
    Returns:
      [...], float32, in (0, 1]; a query with k keys or fewer has 1; NaN where the mask allows nothing.
    Raises:
      ValueError: k < 1, or a mask that does not fit.
    Source: Table 1, attention distribution (k = 1 and 5).

    >>> print(top_k_mass(jnp.zeros((2, 2)), 1, jnp.tril(jnp.ones((2, 2), bool))))
    0.75
    """
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    return statistics_by_key(*_by_key(logits, mask), k)[f"top_{k}_mass"]


def attention_gap(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over queries of the largest attention weight minus the second largest, p(1) - p(2).

    Args:
      logits: [..., T, T]; mask: [T, T] boolean, True = allowed.
    Returns:
      [...], float32, in [0, 1]; a query with one key has 1; NaN where the mask allows nothing.
    Raises:
      ValueError: a mask that does not fit.
    Source: Table 1, attention distribution.

    >>> print(attention_gap(jnp.zeros((2, 2)), jnp.tril(jnp.ones((2, 2), bool))))
    0.5
    """
    return statistics_by_key(*_by_key(logits, mask), 2)["attention_gap"]


def logit_statistics(logits: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Mean, standard deviation, variance and maximum of the logits at the allowed positions.

    The variance is that of the population (1/n).

    Args:
      logits: [..., T, T], already divided by sqrt(K); mask: [T, T] boolean, True = allowed.
    Returns:
      logit_mean, logit_std, logit_variance, logit_max: [...], float32, in the logits' unit (its square for the
      variance, which alone may overflow); with a single allowed position std and variance are 0; NaN (maximum: -inf)
      where the mask allows nothing.
    Raises:
      ValueError: a mask that does not fit.
    Source: Table 1, logit geometry; the deviation as in Table 5.

    >>> statistics = logit_statistics(jnp.array([[1.0, 9.0], [3.0, 5.0]]), jnp.tril(jnp.ones((2, 2), bool)))
    >>> print({name: value.item() for name, value in statistics.items() if name != "logit_std"})
    {'logit_mean': 3.0, 'logit_variance': 2.6666667461395264, 'logit_max': 5.0}
    """
    every = statistics_by_key(*_by_key(logits, mask), 1)
    return {name: every[name] for name in ("logit_mean", "logit_std", "logit_variance", "logit_max")}

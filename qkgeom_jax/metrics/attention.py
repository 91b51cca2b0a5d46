"""How peaked attention is, and how its logits are distributed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MASKED = -1e9


def _log_weights(logits: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log attention weights in float32 and the mask, both [..., T, T]."""
    logits = jnp.asarray(logits).astype(jnp.float32)
    mask = jnp.broadcast_to(mask, logits.shape)
    return jax.nn.log_softmax(jnp.where(mask, logits, _MASKED), axis=-1), mask


def _query_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of values [..., T] over the queries that may attend to a key."""
    answers = jnp.any(mask, axis=-1)
    return jnp.sum(jnp.where(answers, values, 0.0), axis=-1) / jnp.sum(answers, axis=-1)


def attention_entropy(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean entropy of the attention of a query, in nats."""
    log_p, mask = _log_weights(logits, mask)
    terms = jnp.where(mask, jnp.exp(log_p) * log_p, 0.0)
    return _query_mean(-jnp.sum(terms, axis=-1), mask)


def _top_weights(logits: jax.Array, mask: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    log_p, mask = _log_weights(logits, mask)
    p = jnp.where(mask, jnp.exp(log_p), 0.0)
    return jax.lax.top_k(p, min(k, p.shape[-1]))[0], mask


def top_k_mass(logits: jax.Array, k: int, mask: jax.Array) -> jax.Array:
    """Mean attention on the k keys with most of it."""
    top, mask = _top_weights(logits, mask, k)
    return _query_mean(jnp.sum(top, axis=-1), mask)


def attention_gap(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean difference between the largest and second largest attention weight."""
    top, mask = _top_weights(logits, mask, 2)
    return _query_mean(top[..., 0] - (top[..., 1] if top.shape[-1] > 1 else 0.0), mask)


def logit_statistics(logits: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Mean, deviation, variance and maximum of the allowed logits."""
    logits = jnp.asarray(logits).astype(jnp.float32)
    mask = jnp.broadcast_to(mask, logits.shape)
    count = jnp.sum(mask, axis=(-2, -1), keepdims=True)
    mean = jnp.sum(jnp.where(mask, logits, 0.0), axis=(-2, -1), keepdims=True) / count
    variance = jnp.sum(jnp.where(mask, (logits - mean) ** 2, 0.0), axis=(-2, -1)) / count[..., 0, 0]
    return {
        "logit_mean": mean[..., 0, 0],
        "logit_std": jnp.sqrt(variance),
        "logit_variance": variance,
        "logit_max": jnp.max(jnp.where(mask, logits, -jnp.inf), axis=(-2, -1)),
    }

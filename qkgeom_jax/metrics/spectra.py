"""How many dimensions a matrix uses: participation ratios, effective ranks, eigenvalues of covariances."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qkgeom_jax.metrics.linalg import _scaled, product_singular_values, singular_values


def _centred(x: jax.Array) -> jax.Array:
    return x - jnp.mean(x, axis=-2, keepdims=True)


def _trace_ratio(x: jax.Array) -> jax.Array:
    """tr(C)^2 / ||C||_F^2 with C = x^T x; 0 where x is zero."""
    x, _ = _scaled(x)
    if x.shape[-2] < x.shape[-1]:
        x = jnp.swapaxes(x, -1, -2)
    with jax.default_matmul_precision("highest"):
        gram = jnp.swapaxes(x, -1, -2) @ x
    trace = jnp.trace(gram, axis1=-2, axis2=-1)
    squares = jnp.sum(gram**2, axis=(-2, -1))
    return trace**2 / jnp.where(squares == 0, 1.0, squares)


def participation_ratio(x: jax.Array, centred: bool = True) -> jax.Array:
    """Participation ratio of the covariance of activations."""
    x, _ = _scaled(x)
    return _trace_ratio(_centred(x) if centred else x)


def participation_ratio_weight(w: jax.Array) -> jax.Array:
    """Participation ratio of the squared singular values of a matrix."""
    return _trace_ratio(w)


def effective_rank(singular_values: jax.Array) -> jax.Array:
    """exp of the entropy of the normalised singular values."""
    s = jnp.asarray(singular_values).astype(jnp.float32)
    largest = jnp.max(s, axis=-1, keepdims=True)
    s = s / jnp.where(largest == 0, 1.0, largest)
    total = jnp.sum(s, axis=-1, keepdims=True)
    p = s / jnp.where(total == 0, 1.0, total)
    entropy = -jnp.sum(p * jnp.log(jnp.where(p > 0, p, 1.0)), axis=-1)
    return jnp.where(total[..., 0] == 0, 0.0, jnp.exp(entropy))


def effective_rank_activations(x: jax.Array) -> jax.Array:
    """Effective rank of the centred activations."""
    x, _ = _scaled(x)
    return effective_rank(singular_values(_centred(x)))


def covariance_statistics(x: jax.Array) -> dict[str, jax.Array]:
    """Trace, largest and smallest eigenvalue and condition of the covariance of activations."""
    x, scale = _scaled(x)
    tokens, d = x.shape[-2:]
    s = singular_values(_centred(x)) * scale[..., 0]
    return _covariance_statistics(s, tokens, d)


def _covariance_statistics(s: jax.Array, tokens: int, d: int) -> dict[str, jax.Array]:
    root = s / tokens**0.5
    largest = root[..., 0] ** 2
    smallest = root[..., -1] ** 2 if tokens >= d else jnp.zeros_like(largest)
    return {
        "trace": jnp.sum(root**2, axis=-1),
        "max": largest,
        "min": smallest,
        "condition": jnp.where(smallest == 0, jnp.inf, largest / jnp.where(smallest == 0, 1.0, smallest)),
    }


def effective_rank_qk(q: jax.Array, k: jax.Array) -> jax.Array:
    """Effective rank of Q K^T."""
    return effective_rank(product_singular_values(q, k))


def effective_rank_qk_weight(w_q: jax.Array, w_k: jax.Array) -> jax.Array:
    """Effective rank of W_Q W_K^T of one head."""
    return effective_rank(product_singular_values(w_q, w_k))

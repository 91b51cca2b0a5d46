"""Sizes of weights and activations, and how W_Q and W_K are aligned."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qkgeom_jax.metrics.linalg import _scaled, singular_values


def _cosine(a: jax.Array, b: jax.Array, axis) -> jax.Array:
    """Cosine along axis; 0 where either is zero."""
    sizes = jnp.sqrt(jnp.sum(a * a, axis=axis)) * jnp.sqrt(jnp.sum(b * b, axis=axis))
    return jnp.sum(a * b, axis=axis) / jnp.where(sizes == 0, 1.0, sizes)


def cosine_similarity(w_q: jax.Array, w_k: jax.Array) -> jax.Array:
    """Cosine of the angle between two flattened matrices."""
    return _cosine(_scaled(w_q)[0], _scaled(w_k)[0], (-2, -1))


def column_alignment(w_q: jax.Array, w_k: jax.Array, signed: bool = False) -> jax.Array:
    """Mean over columns of the absolute (or signed) cosine between the same column of two matrices."""
    cosines = _cosine(_scaled(w_q)[0], _scaled(w_k)[0], -2)
    return jnp.mean(cosines if signed else jnp.abs(cosines), axis=-1)


def frobenius_norm(w: jax.Array) -> jax.Array:
    """Root of the sum of squares."""
    w, scale = _scaled(w)
    return jnp.sqrt(jnp.sum(w * w, axis=(-2, -1))) * scale[..., 0, 0]


def spectral_norm(w: jax.Array) -> jax.Array:
    """Largest singular value."""
    return singular_values(w)[..., 0]


def activation_norm(x: jax.Array) -> jax.Array:
    """Mean over tokens of the L2 norm."""
    x, scale = _scaled(x)
    return jnp.mean(jnp.sqrt(jnp.sum(x * x, axis=-1)), axis=-1) * scale[..., 0, 0]

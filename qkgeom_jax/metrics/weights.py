"""Sizes of weights and activations, and how W_Q and W_K are aligned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from qkgeom_jax.metrics.linalg import scaled, transpose

_SQUARINGS = 20


def _same_shape(w_q: jax.Array, w_k: jax.Array) -> tuple[jax.Array, jax.Array]:
    w_q, w_k = jnp.asarray(w_q), jnp.asarray(w_k)
    if w_q.shape != w_k.shape:
        raise ValueError(f"w_q has shape {w_q.shape} and w_k {w_k.shape}; they must have the same")
    return w_q, w_k


def _cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Cosine along the last axis; 0, with a derivative of 0, where either vector is zero."""
    a, b = (scaled(x[..., None])[0][..., 0] for x in (a, b))
    sizes = jnp.sum(a * a, axis=-1) * jnp.sum(b * b, axis=-1)
    return jnp.where(sizes == 0, 0.0, jnp.sum(a * b, axis=-1) / jnp.sqrt(jnp.where(sizes == 0, 1.0, sizes)))


def cosine_similarity(w_q: jax.Array, w_k: jax.Array) -> jax.Array:
    """Cosine of the angle between two matrices, taken as vectors.

    <W_Q, W_K>_F / (||W_Q||_F ||W_K||_F)

    Args:
      w_q, w_k: [..., D, H*K], any floating type.
    Returns:
      [...], float32, in [-1, 1]; 0 where either matrix is zero.
    Raises:
      ValueError: different shapes.
    Source: Table 1, query-key geometry.

    >>> print(cosine_similarity(jnp.eye(2), -3 * jnp.eye(2)))
    -1.0
    """
    return _cosine(*(w.reshape(*w.shape[:-2], -1) for w in _same_shape(w_q, w_k)))


def column_alignment(w_q: jax.Array, w_k: jax.Array, signed: bool = False) -> jax.Array:
    """Mean over columns of the absolute cosine between the same column of two matrices.

    mean_j |cos(W_Q[:, j], W_K[:, j])|, a column being the weights of one output feature.

    Args:
      w_q, w_k: [..., D, H*K], input axis first, any floating type.
      signed: average the cosines themselves.
    Returns:
      [...], float32, in [0, 1] (signed: [-1, 1]); a zero column counts as 0. Equal matrices have 1, matrices of
      disjoint support 0, independent Gaussian ones about sqrt(2 / (pi D)).
    Raises:
      ValueError: different shapes.
    Source: Table 1, query-key geometry; Table 3 and Figure 1, alignment.

    >>> w = jnp.array([[1.0, 1.0], [0.0, 1.0]])
    >>> print(column_alignment(w, jnp.array([[-2.0, 1.0], [0.0, -1.0]])))
    0.5
    """
    cosines = _cosine(*map(transpose, _same_shape(w_q, w_k)))
    return jnp.mean(cosines if signed else jnp.abs(cosines), axis=-1)


def frobenius_norm(w: jax.Array) -> jax.Array:
    """Root of the sum of squares of a matrix.

    Args:
      w: [..., m, n], any floating type.
    Returns:
      [...], float32, at least 0; 0 for a zero matrix.
    Source: Table 1, norm and scale.

    >>> print(frobenius_norm(jnp.array([[3.0, 0.0], [0.0, 4.0]])))
    5.0
    """
    w, scale = scaled(w)
    return jnp.sqrt(jnp.sum(w * w, axis=(-2, -1))) * scale[..., 0, 0]


@jax.jit
@jax.default_matmul_precision("highest")
def spectral_norm(w: jax.Array) -> jax.Array:
    """Largest singular value of a matrix, by squaring its Gram matrix twenty times.

    s^2 = tr(G P) / tr(P) with G = W^T W and P = G^(2^20): every other direction has died out, unless its singular value
    is the same to rounding.

    Args:
      w: [..., m, n], any floating type.
    Returns:
      [...], float32, at least 0; 0 for a zero matrix, NaN for one that is not finite.
    Numerics: within 1e-6 of float64 (relative), equal and nearly equal singular values included. Differentiable.
    Source: Table 1, norm and scale.

    >>> print(spectral_norm(jnp.array([[3.0, 0.0], [0.0, 4.0]])))
    4.0
    """
    w, scale = scaled(w)
    if w.shape[-2] < w.shape[-1]:
        w = transpose(w)
    gram = transpose(w) @ w

    def normalised(p):
        trace = jnp.trace(p, axis1=-2, axis2=-1)[..., None, None]
        return p / jnp.where(trace > 0, trace, 1.0)

    # a derivative of the projector does not change that of the Rayleigh quotient
    start = normalised(lax.stop_gradient(gram))
    projector = lax.fori_loop(0, _SQUARINGS, lambda _, p: normalised(p @ p), start)
    square = jnp.sum(gram * projector, axis=(-2, -1))
    return jnp.where(square == 0, 0.0, jnp.sqrt(jnp.where(square == 0, 1.0, square))) * scale[..., 0, 0]


def activation_norm(x: jax.Array) -> jax.Array:
    """Mean over tokens of the L2 norm.

    Args:
      x: [..., tokens, d], any floating type.
    Returns:
      [...], float32, at least 0.
    Source: Table 1, norm and scale.

    >>> print(activation_norm(jnp.array([[3.0, 4.0], [0.0, 1.0]])))
    3.0
    """
    x, scale = scaled(x)
    return jnp.mean(jnp.sqrt(jnp.sum(x * x, axis=-1)), axis=-1) * scale[..., 0, 0]

"""How many dimensions a matrix uses: participation ratios, effective ranks, eigenvalues of covariances.

Covariances are those of the population (1/n). None of these changes when its input is multiplied by a number, except
the covariance statistics.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from qkgeom_jax.metrics.linalg import EPSILON, product_singular_values, scaled, transpose
from qkgeom_jax.metrics.linalg import singular_values as _singular_values


def subtract_mean(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [..., tokens, d] less its mean over the tokens, and that mean; exactly 0 where all tokens are equal."""
    mean = jnp.mean(x, axis=-2, keepdims=True)
    rest = x - mean
    # equal tokens leave the rounding of their mean behind
    return jnp.where(jnp.all(x == x[..., :1, :], axis=-2, keepdims=True), 0.0, rest), mean


def trace_ratio(gram: jax.Array) -> jax.Array:
    """tr(G)^2 / ||G||_F^2 of [..., d, d]; 0 where G is zero."""
    trace = jnp.trace(gram, axis1=-2, axis2=-1)
    squares = jnp.sum(gram * gram, axis=(-2, -1))
    return jnp.where(squares == 0, 0.0, trace * trace / jnp.where(squares == 0, 1.0, squares))


@functools.partial(jax.jit, static_argnames="centred")
@jax.default_matmul_precision("highest")
def participation_ratio(x: jax.Array, centred: bool = True) -> jax.Array:
    """Participation ratio of the covariance of activations.

    PR = (sum_i l_i)^2 / sum_i l_i^2 = tr(C)^2 / ||C||_F^2 with l the eigenvalues of C, the covariance over the tokens.

    Args:
      x: [..., tokens, d], any floating type.
      centred: subtract the mean over the tokens first; otherwise C is the second moment.
    Returns:
      [...], float32, dimensionless, in [1, min(tokens, d)]; 0 where the activations do not vary (one token, equal
      tokens), NaN where they are not finite.
    Numerics: within 1e-5 (relative) of float64. Differentiable.
    Source: Table 1, spectral structure; Table 4, Figures 2 and 3.

    >>> print(participation_ratio(jnp.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])))
    2.0
    """
    x, _ = scaled(x)
    return participation_ratio_weight(subtract_mean(x)[0] if centred else x)


@jax.jit
@jax.default_matmul_precision("highest")
def participation_ratio_weight(w: jax.Array) -> jax.Array:
    """Participation ratio of the squared singular values of a matrix.

    PR = tr(W^T W)^2 / ||W^T W||_F^2

    Args:
      w: [..., m, n], any floating type.
    Returns:
      [...], float32, dimensionless, in [1, min(m, n)]; 0 for a zero matrix, NaN for one that is not finite.
    Numerics: within 1e-5 (relative) of float64. Differentiable.
    Source: ours, beside the ratio of the activations.

    >>> print(participation_ratio_weight(2 * jnp.eye(3)))
    3.0
    """
    w, _ = scaled(w)
    if w.shape[-2] < w.shape[-1]:
        w = transpose(w)
    return trace_ratio(transpose(w) @ w)


@jax.jit
def effective_rank(singular_values: jax.Array) -> jax.Array:
    """exp of the entropy of the normalised singular values.

    exp(-sum_i p_i ln p_i), p = s / sum(s)

    Args:
      singular_values: [..., r], at least 0, in any order.
    Returns:
      [...], float32, dimensionless, in [1, r]; 0 where all are 0, NaN where one is not finite.
    Source: Table 1, spectral structure; Roy and Vetterli (2007).

    >>> print(effective_rank(jnp.array([2.0, 2.0, 0.0])))
    2.0
    """
    s = jnp.asarray(singular_values).astype(jnp.float32)
    s, _ = scaled(s[..., None])
    total = jnp.sum(s, axis=-2, keepdims=True)
    p = (s / jnp.where(total == 0, 1.0, total))[..., 0]
    entropy = -jnp.sum(p * jnp.log(jnp.where(p > 0, p, 1.0)), axis=-1)
    return jnp.where(total[..., 0, 0] == 0, 0.0, jnp.exp(entropy))


def effective_rank_activations(x: jax.Array) -> jax.Array:
    """Effective rank of centred activations, from their singular values.

    Args:
      x: [..., tokens, d], any floating type.
    Returns:
      [...], float32, dimensionless, in [1, min(tokens, d)]; 0 where the activations do not vary.
    Numerics: within 1e-5 (relative) of float64.
    Source: Table 1, spectral structure.

    >>> print(effective_rank_activations(jnp.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])))
    2.0
    """
    return effective_rank(_singular_values(subtract_mean(scaled(x)[0])[0]))


def spectrum_statistics(s: jax.Array, tokens: int) -> dict[str, jax.Array]:
    """Statistics of the covariance of activations that have, centred, the singular values s [..., d]."""
    root = s / tokens**0.5
    largest, smallest = root[..., 0], root[..., -1]
    singular = smallest <= s.shape[-1] * EPSILON * largest
    return {
        "trace": jnp.sum(root * root, axis=-1),
        "max": largest * largest,
        "min": jnp.where(singular, 0.0, smallest * smallest),
        "condition": jnp.where(singular, jnp.inf, (largest / jnp.where(singular, 1.0, smallest)) ** 2),
    }


def covariance_statistics(x: jax.Array) -> dict[str, jax.Array]:
    """Trace, largest and smallest eigenvalue and condition number of the covariance of activations.

    From the singular values s of the centred activations, l = s^2 / tokens: a covariance matrix in float32 would have
    lost eigenvalues below 1e-7 of the largest already.

    Args:
      x: [..., tokens, d], any floating type.
    Returns:
      trace, max, min (squared units of x, at least 0) and condition = max / min (at least 1): [...], float32. Where
      the smallest singular value is rounding (below d * 1.2e-7 of the largest, or fewer than d + 1 tokens) min is 0
      and condition inf. All NaN where x is not finite.
    Numerics: the root of min is within 5e-7 of that of max.
    Source: Table 1, covariance eigenvalue statistics.

    >>> x = jnp.array([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> print({name: round(value.item(), 5) for name, value in covariance_statistics(x).items()})
    {'trace': 2.5, 'max': 2.0, 'min': 0.5, 'condition': 4.0}
    """
    x, scale = scaled(x)
    tokens, d = x.shape[-2:]
    s = _singular_values(subtract_mean(x)[0]) * scale[..., 0]
    return spectrum_statistics(jnp.pad(s, [(0, 0)] * (s.ndim - 1) + [(0, max(d - tokens, 0))]), tokens)


def effective_rank_qk(q: jax.Array, k: jax.Array) -> jax.Array:
    """Effective rank of the logit matrix Q K^T, before scaling and mask.

    Args:
      q, k: [..., T, K], activations of one head, any floating type.
    Returns:
      [...], float32, dimensionless, in [1, min(T, K)]; 0 where Q K^T is zero.
    Raises:
      ValueError: different head widths.
    Numerics: within 1e-5 (relative) of float64; from the K x K core of two triangular factors.
    Source: Table 5 and Figure 3, QK^T effective rank.

    >>> print(effective_rank_qk(jnp.eye(3), 5 * jnp.eye(3)).round(4))
    3.0
    """
    return effective_rank(product_singular_values(q, k))


def effective_rank_qk_weight(w_q: jax.Array, w_k: jax.Array) -> jax.Array:
    """Effective rank of W_Q W_K^T of one head.

    Args:
      w_q, w_k: [..., D, K], the columns of one head, any floating type.
    Returns:
      [...], float32, dimensionless, in [1, min(D, K)]; 0 where the product is zero. Unlike the other metrics of the
      weights it is the same for W_Q M and W_K M^-T.
    Raises:
      ValueError: different head widths.
    Numerics: within 1e-5 (relative) of float64.
    Source: ours, beside the effective rank of Q K^T.

    >>> print(effective_rank_qk_weight(jnp.eye(3)[:, :2], jnp.eye(3)[:, :2]).round(4))
    2.0
    """
    return effective_rank(product_singular_values(w_q, w_k))

"""Singular values and QR in plain JAX: no LAPACK, nothing that can hang, the same program on CPU, GPU and TPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_EPSILON = 2.0**-23
_MAXIMUM_SWEEPS = 24


def _scaled(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`a` in float32 with largest entry 1, and the factor taken out ([..., 1, 1]; NaN where `a` is not finite)."""
    a = jnp.asarray(a).astype(jnp.float32)
    if a.size == 0:
        return a, jnp.ones((*a.shape[:-2], 1, 1), jnp.float32)
    scale = jnp.max(jnp.abs(a), axis=(-2, -1), keepdims=True)
    scale = jnp.where(jnp.isfinite(scale), jnp.where(scale > 0, scale, 1.0), jnp.nan)
    return a / scale, scale


def qr(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Thin QR by Gram-Schmidt applied twice."""
    a, scale = _scaled(a)
    m, n = a.shape[-2:]
    if m < n:
        raise ValueError(f"a has shape {a.shape}; qr takes at least as many rows as columns")
    rows = jnp.swapaxes(a, -1, -2)

    def column(j, carry):
        q, r = carry
        v = lax.dynamic_index_in_dim(rows, j, axis=-2, keepdims=False)
        size = jnp.sqrt(jnp.sum(v * v, axis=-1, keepdims=True))
        c1 = jnp.einsum("...nm,...m->...n", q, v)
        v = v - jnp.einsum("...nm,...n->...m", q, c1)
        c2 = jnp.einsum("...nm,...m->...n", q, v)
        v = v - jnp.einsum("...nm,...n->...m", q, c2)
        length = jnp.sqrt(jnp.sum(v * v, axis=-1, keepdims=True))
        # what rounding leaves of a dependent column is replaced by the coordinate axis that q covers least
        gone = length <= 4 * _EPSILON * size
        axis = jnp.argmin(jnp.sum(q * q, axis=-2), axis=-1)
        e = jax.nn.one_hot(axis, m, dtype=jnp.float32)
        for _ in range(2):
            e = e - jnp.einsum("...nm,...n->...m", q, jnp.einsum("...nm,...m->...n", q, e))
        e = e / jnp.sqrt(jnp.sum(e * e, axis=-1, keepdims=True))
        unit = jnp.where(gone, e, v / jnp.where(gone, 1.0, length))
        coefficients = c1 + c2 + jnp.where(gone, 0.0, length) * jax.nn.one_hot(j, n, dtype=jnp.float32).reshape(
            (1,) * (c1.ndim - 1) + (n,)
        )
        return (
            lax.dynamic_update_index_in_dim(q, unit, j, axis=-2),
            lax.dynamic_update_index_in_dim(r, coefficients, j, axis=-1),
        )

    with jax.default_matmul_precision("highest"):
        q, r = lax.fori_loop(0, n, column, (jnp.zeros_like(rows), jnp.zeros((*a.shape[:-2], n, n), jnp.float32)))
    return jnp.swapaxes(q, -1, -2), r * scale


def _rotate_all(x: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """One sweep over all pairs of the rows of x [..., n, w], n even; the first m entries are what becomes orthogonal."""
    half = x.shape[-2] // 2

    def one_round(_, carry):
        x, worst = carry
        a, b = x[..., :half, :], x[..., half:, :]
        alpha = jnp.sum(a[..., :m] ** 2, axis=-1, keepdims=True)
        beta = jnp.sum(b[..., :m] ** 2, axis=-1, keepdims=True)
        gamma = jnp.sum(a[..., :m] * b[..., :m], axis=-1, keepdims=True)
        size = jnp.sqrt(alpha) * jnp.sqrt(beta)
        cosine = jnp.abs(gamma) / jnp.where(size > 0, size, 1.0)
        worst = jnp.maximum(worst, jnp.max(cosine, axis=(-2, -1)))
        zeta = (beta - alpha) / (2 * jnp.where(gamma == 0, 1.0, gamma))
        t = jnp.where(zeta >= 0, 1.0, -1.0) / (jnp.abs(zeta) + jnp.sqrt(1 + zeta * zeta))
        t = jnp.where(gamma == 0, 0.0, t)
        c = 1 / jnp.sqrt(1 + t * t)
        s = c * t
        a, b = c * a - s * b, s * a + c * b
        if half > 1:  # the circle method: the first stays, the others move on by one place
            a, b = (
                jnp.concatenate([a[..., :1, :], b[..., :1, :], a[..., 1:-1, :]], axis=-2),
                jnp.concatenate([b[..., 1:, :], a[..., -1:, :]], axis=-2),
            )
        return jnp.concatenate([a, b], axis=-2), worst

    return lax.fori_loop(0, x.shape[-2] - 1, one_round, (x, jnp.zeros(x.shape[:-2], jnp.float32)))


def _jacobi(x: jax.Array, m: int) -> jax.Array:
    """Rotates the rows of x until their first m entries are orthogonal."""
    tolerance = 4 * _EPSILON

    def unfinished(carry):
        _, worst, sweep = carry
        return jnp.any(worst > tolerance) & (sweep < _MAXIMUM_SWEEPS)

    def body(carry):
        x, _, sweep = carry
        x, worst = _rotate_all(x, m)
        return x, worst, sweep + 1

    x, _, _ = lax.while_loop(unfinished, body, (x, jnp.ones(x.shape[:-2], jnp.float32), 0))
    return x


def _padded(rows: jax.Array) -> jax.Array:
    """Rows with a zero row added where their number is odd."""
    odd = rows.shape[-2] % 2
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, odd), (0, 0)])


def svd(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Thin singular value decomposition by one-sided Jacobi."""
    a = jnp.asarray(a)
    m, n = a.shape[-2:]
    if m < n:
        u, s, vt = svd(jnp.swapaxes(a, -1, -2))
        return jnp.swapaxes(vt, -1, -2), s, jnp.swapaxes(u, -1, -2)
    a, scale = _scaled(a)
    if a.size == 0:
        return a, jnp.zeros((*a.shape[:-2], n), jnp.float32), jnp.zeros((*a.shape[:-2], n, n), jnp.float32)
    with jax.default_matmul_precision("highest"):
        q, r = qr(a)
        eye = jnp.broadcast_to(jnp.eye(n, dtype=jnp.float32), r.shape)
        # r = (sum over rows of x): r^T has columns r_i; rows of r are the vectors that are made orthogonal
        x = _jacobi(_padded(jnp.concatenate([r, eye], axis=-1)), n)
        s = jnp.sqrt(jnp.sum(x[..., :n] ** 2, axis=-1))
        order = jnp.argsort(-s, axis=-1)[..., :n]
        s = jnp.take_along_axis(s, order, axis=-1)
        x = jnp.take_along_axis(x, order[..., None], axis=-2)
        core_u = jnp.swapaxes(x[..., n:], -1, -2)
        v, _ = qr(jnp.swapaxes(x[..., :n] / jnp.where(s > 0, s, 1.0)[..., None], -1, -2))
        return q @ core_u, s * scale[..., 0], jnp.swapaxes(v, -1, -2)


def singular_values(a: jax.Array) -> jax.Array:
    """Singular values in descending order."""
    a = jnp.asarray(a)
    m, n = a.shape[-2:]
    if m < n:
        a, m, n = jnp.swapaxes(a, -1, -2), n, m
    a, scale = _scaled(a)
    if a.size == 0:
        return jnp.zeros((*a.shape[:-2], n), jnp.float32)
    _, r = qr(a)
    x = _jacobi(_padded(r), n)
    s = jnp.sqrt(jnp.sum(x**2, axis=-1))
    return -jnp.sort(-s, axis=-1)[..., :n] * scale[..., 0]


def product_singular_values(a: jax.Array, b: jax.Array) -> jax.Array:
    """Singular values of a b^T without forming it where the inner dimension is the smallest."""
    (a, scale_a), (b, scale_b) = _scaled(a), _scaled(b)
    with jax.default_matmul_precision("highest"):
        if min(a.shape[-2], b.shape[-2]) < a.shape[-1]:
            core = a @ jnp.swapaxes(b, -1, -2)
        else:
            core = qr(a)[1] @ jnp.swapaxes(qr(b)[1], -1, -2)
    return singular_values(core) * scale_a[..., 0] * scale_b[..., 0]

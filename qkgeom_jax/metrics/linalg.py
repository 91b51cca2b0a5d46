"""Singular values, SVD and QR in plain JAX.

LAPACK inside a jitted program can deadlock on a CPU whose threads are few, and accelerators are slow on large batches of
small matrices; here is only elementwise arithmetic and matrix products, the same on every backend. Matrices may have
any number of leading batch axes; they are taken to float32 and scaled by their largest entry, so that neither 1e-20 nor
1e18 overflows. A matrix with a NaN or an infinity gives NaN for itself alone.
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax

EPSILON = 2.0**-23
_MAXIMUM_SWEEPS = 30
# Beyond this ratio of rows to columns two products with the Gram matrix are cheaper than reflecting all rows.
_TALL = 4


def scaled(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`a` in float32 with largest entry 1, and the factor taken out, [..., 1, 1]; NaN where `a` is not finite."""
    a = jnp.asarray(a).astype(jnp.float32)
    scale = jnp.max(jnp.abs(a), axis=(-2, -1), keepdims=True, initial=0.0)
    scale = jnp.where(jnp.isfinite(scale), jnp.where(scale > 0, scale, 1.0), jnp.nan)
    return a / scale, scale


def transpose(a: jax.Array) -> jax.Array:
    """The matrices of a batch, transposed."""
    return jnp.swapaxes(a, -1, -2)


def _norm(v: jax.Array) -> jax.Array:
    """Length along the last axis, which is kept."""
    return jnp.sqrt(jnp.sum(v * v, axis=-1, keepdims=True))


def _at(v: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """One slice of v, its axis dropped."""
    return lax.dynamic_index_in_dim(v, index, axis=axis, keepdims=False)


def _matvec(a: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("...mn,...n->...m", a, v)


def _vecmat(v: jax.Array, a: jax.Array) -> jax.Array:
    return jnp.einsum("...m,...mn->...n", v, a)


@jax.jit
@jax.default_matmul_precision("highest")
def qr(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Thin QR decomposition by Gram-Schmidt applied twice.

    a = q r with q^T q = 1 and r upper triangular with a diagonal of at least 0.

    Args:
      a: [..., m, n] with m >= n, any floating type.
    Returns:
      q [..., m, n] and r [..., n, n], float32. q is orthonormal for every finite input: where a column depends on those
      before it, r has a 0 on the diagonal and q a unit vector orthogonal to the others.
    Raises:
      ValueError: m < n.
    Numerics: q^T q is 1 within 1e-6; q r is `a` within 5e-7 of its largest entry times sqrt(n).
    Source: Giraud, Langou, Rozloznik (2005), "twice is enough".

    >>> q, r = qr(jnp.array([[3.0, 1.0], [4.0, 2.0]]))
    >>> print(r.round(3))
    [[5.  2.2]
     [0.  0.4]]
    """
    m, n = jnp.shape(a)[-2:]
    if m < n:
        raise ValueError(f"a has shape {jnp.shape(a)}; qr takes at least as many rows as columns")
    a, scale = scaled(a)
    # each column to length about 1: squares of 1e-20 would be 0
    columns, lengths = scaled(transpose(a)[..., None, :])
    columns, lengths = columns[..., 0, :], lengths[..., 0, 0]

    def add_column(j, carry):
        q, r, covered = carry
        v = _at(columns, j, -2)
        size = _norm(v)
        first = _matvec(q, v)
        v = v - _vecmat(first, q)
        dependent = _norm(v) <= 4 * EPSILON * size
        # the coordinate axis that the columns so far cover least stands in for what is only rounding
        v = jnp.where(dependent, jax.nn.one_hot(jnp.argmin(covered, axis=-1), m, dtype=jnp.float32), v)
        second = _matvec(q, v)
        v = v - _vecmat(second, q)
        length = _norm(v)
        v = v / jnp.where(length > 0, length, 1.0)
        diagonal = jnp.where(jnp.arange(n) == j, jnp.ones_like(first), 0.0) * length
        coefficients = first + jnp.where(dependent, 0.0, second + diagonal)
        q = lax.dynamic_update_index_in_dim(q, v, j, axis=-2)
        r = lax.dynamic_update_index_in_dim(r, coefficients, j, axis=-1)
        return q, r, covered + v * v

    start = jnp.zeros_like(columns), jnp.zeros((*a.shape[:-2], n, n), jnp.float32), jnp.zeros_like(a[..., 0])
    q, r, _ = lax.fori_loop(0, n, add_column, start)
    return transpose(q), r * lengths[..., None, :] * scale


def _gram_factor(gram: jax.Array, floor: float, inverse: bool) -> tuple[jax.Array, jax.Array]:
    """r with r^T r = gram (triangular but for the order of its columns) and, if asked for, its inverse.

    Cholesky with columns of length 1 and the largest remaining pivot first. What remains when that is below `floor` is
    rounding: it counts as a diagonal matrix, and for the inverse's sake as one of size `floor`.
    """
    n = gram.shape[-1]
    squares = jnp.diagonal(gram, axis1=-2, axis2=-1)
    lengths = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 1.0)
    a = gram / lengths[..., :, None] / lengths[..., None, :]
    if inverse:
        a = jnp.concatenate([a, jnp.broadcast_to(jnp.eye(n, dtype=jnp.float32), a.shape)], axis=-1)
    index = jnp.broadcast_to(jnp.arange(a.shape[-1]), a[..., 0, :].shape)

    def eliminate(k, carry):
        # the update of the step before stands first, so that it happens in place on the carried array
        a, factor, row, left, rows = carry
        a = a - factor[..., :, None] * row[..., None, :]
        left = left - factor * factor
        best = jnp.argmax(left, axis=-1)[..., None]
        row = jnp.take_along_axis(a, best[..., None], axis=-2)[..., 0, :]
        pivot = jnp.take_along_axis(left, best, axis=-1)
        rounding = pivot <= floor
        root = jnp.sqrt(jnp.where(rounding, floor if inverse else jnp.maximum(pivot, 0.0), pivot))
        remaining = (left > -jnp.inf) & (index[..., :n] != best)
        factor = jnp.where(remaining & ~rounding, row[..., :n] / root, 0.0)
        row = jnp.concatenate([jnp.where(index[..., :n] == best, root, factor), row[..., n:] / root], axis=-1)
        left = jnp.where(remaining, left, -jnp.inf)
        return a, factor, row, left, lax.dynamic_update_index_in_dim(rows, row, k, axis=-2)

    left = jnp.where(squares > 0, 1.0, 0.0 * squares)
    start = a, jnp.zeros_like(left), jnp.zeros_like(a[..., 0, :]), left, jnp.zeros_like(a)
    rows = lax.fori_loop(0, n, eliminate, start)[-1]
    return rows[..., :n] * lengths[..., None, :], transpose(rows[..., n:] / (lengths[..., None, :] if inverse else 1.0))


def triangles(*xs: jax.Array) -> list[jax.Array]:
    """For each x [..., m, n] (any m, the same n, scaled) an r [..., n, n] with r^T r = x^T x, to the precision of x.

    From two Gram matrices: the first factor only has to make the columns nearly orthogonal, the second, of a
    well-conditioned matrix, restores the small singular values that a single Gram matrix loses (CholeskyQR applied
    twice). The loops over columns run once for all x together.
    """
    first, inverse = _gram_factor(stacked([transpose(x) @ x for x in xs]), 8 * EPSILON, True)
    ys = [x @ w for x, w in zip(xs, unstacked(inverse, xs))]
    second, _ = _gram_factor(stacked([transpose(y) @ y for y in ys]), EPSILON, False)
    return unstacked(second @ first, xs)


def stacked(matrices: list[jax.Array]) -> jax.Array:
    """One batch axis over all matrices of equal shape in several batches."""
    return jnp.concatenate([a.reshape(-1, *a.shape[-2:]) for a in matrices])


def unstacked(stack: jax.Array, like: list[jax.Array]) -> list[jax.Array]:
    """The inverse of `stacked`, with the batch axes of `like`."""
    sizes = [math.prod(a.shape[:-2]) for a in like]
    parts = jnp.split(stack, list(itertools.accumulate(sizes))[:-1])
    return [part.reshape(*a.shape[:-2], *part.shape[1:]) for part, a in zip(parts, like)]


def _reflector(x: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """u, beta, d so that (1 - beta u u^T) x = d e_k, for x with zeros before its entry k."""
    here = jnp.broadcast_to(jnp.arange(x.shape[-1]) == k, x.shape)
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    pivot = jnp.sum(jnp.where(here, x, 0.0), axis=-1, keepdims=True)
    d = jnp.where(pivot >= 0, -1.0, 1.0) * jnp.sqrt(square)
    half = square - pivot * d
    return jnp.where(here, x - d, x), jnp.where(half == 0, 0.0, 1 / jnp.where(half == 0, 1.0, half)), d[..., 0]


def _bidiagonal(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Diagonal and superdiagonal, [..., n] each (the last entry of the second is 0), of a [..., m, n], m >= n."""
    m, n = a.shape[-2:]
    rows, columns = jnp.arange(m), jnp.arange(n)

    def reflect(k, carry):
        # the update of the step before stands first, so that it happens in place on the carried array
        a, u, w, z, v, diagonal, above = carry
        a = a - (u[..., :, None] * w[..., None, :] + z[..., :, None] * v[..., None, :])
        x = _at(a, k, -1)
        u, beta, d = _reflector(jnp.where(jnp.broadcast_to(rows >= k, x.shape), x, 0.0), k)
        w = beta * _vecmat(u, a)
        y = _at(a, k, -2) - _at(u, k, -1)[..., None] * w
        v, beta, e = _reflector(jnp.where(jnp.broadcast_to(columns > k, y.shape), y, 0.0), k + 1)
        z = beta * (_matvec(a, v) - u * jnp.sum(w * v, axis=-1, keepdims=True))
        diagonal = lax.dynamic_update_index_in_dim(diagonal, d, k, axis=-1)
        above = lax.dynamic_update_index_in_dim(above, e, k, axis=-1)
        return a, u, w, z, v, diagonal, above

    tall, short = jnp.zeros_like(a[..., 0]), jnp.zeros_like(a[..., 0, :])
    *_, diagonal, above = lax.fori_loop(0, n, reflect, (a, tall, short, tall, short, short, short))
    return diagonal, above


def _bidiagonal_values(diagonal: jax.Array, above: jax.Array) -> jax.Array:
    """Singular values, descending, by bisection: Sturm counts of the tridiagonal matrix with eigenvalues +-s."""
    n = diagonal.shape[-1]
    z = jnp.stack([diagonal, above], axis=-1).reshape(*diagonal.shape[:-1], 2 * n)[..., : 2 * n - 1]
    sizes = jnp.pad(jnp.abs(z), [(0, 0)] * (z.ndim - 1) + [(1, 1)])
    bound = jnp.max(sizes[..., 1:] + sizes[..., :-1], axis=-1, keepdims=True) * (1 + 4 * EPSILON)
    squares = jnp.moveaxis(z * z, -1, 0)[..., None]
    least = jnp.float32(1e-30)

    def halve(_, bracket):
        low, high = bracket
        middle = (low + high) / 2

        def pivot(carry, square):
            q, count = carry
            q = -middle - square / q
            q = jnp.where(jnp.abs(q) < least, -least, q)
            return (q, count + (q < 0)), None

        first = jnp.minimum(-middle, -least)
        (_, count), _ = lax.scan(pivot, (first, jnp.ones_like(first, dtype=jnp.int32)), squares)
        # count - n singular values lie below the middle; the j-th largest does if that is at least n - j
        above_it = count - n < jnp.broadcast_to(n - jnp.arange(n), count.shape)
        return jnp.where(above_it, middle, low), jnp.where(above_it, high, middle)

    high = jnp.broadcast_to(bound, diagonal.shape)
    low, high = lax.fori_loop(0, 26, halve, (jnp.zeros_like(high), high))
    return jnp.where(low == 0, 0.0, (low + high) / 2)


@jax.custom_jvp
@jax.jit
@jax.default_matmul_precision("highest")
def singular_values(a: jax.Array) -> jax.Array:
    """Singular values, by bidiagonalisation and bisection.

    Args:
      a: [..., m, n], any m and n, any floating type.
    Returns:
      [..., min(m, n)], float32, descending, at least 0; all 0 for a zero matrix, NaN for one that is not finite.
    Numerics: within 5e-7 of the largest singular value (256 x 256 and 4096 x 64, against float64); smaller ones than
      that are noise. Differentiable, with finite derivatives at equal and at zero values.
    Source: Golub and Kahan (1965); tall matrices first by CholeskyQR applied twice, Yamamoto et al. (2015).

    >>> print(singular_values(jnp.array([[0.0, 2.0], [-3.0, 0.0], [0.0, 0.0]])).round(5))
    [3. 2.]
    """
    a, scale = scaled(a)
    if a.shape[-2] < a.shape[-1]:
        a = transpose(a)
    m, n = a.shape[-2:]
    if a.size == 0:
        return jnp.zeros((*a.shape[:-2], n), jnp.float32)
    if m > _TALL * n:
        (a,) = triangles(a)
    return _bidiagonal_values(*_bidiagonal(a)) * scale[..., 0]


@singular_values.defjvp
def _singular_values_jvp(primals, tangents):
    u, _, vt = svd(primals[0])
    tangent = jnp.asarray(tangents[0]).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        return singular_values(primals[0]), jnp.einsum("...mi,...mn,...in->...i", u, tangent, vt)


@jax.jit
@jax.default_matmul_precision("highest")
def product_singular_values(a: jax.Array, b: jax.Array) -> jax.Array:
    """Singular values of a b^T, without forming it where the inner dimension is the smallest.

    Args:
      a: [..., m, k]; b: [..., n, k]; any floating type.
    Returns:
      [..., r], float32, descending, with r = min(m, n, k).
    Raises:
      ValueError: different inner dimensions.
    Numerics: within 1e-6 of the largest singular value.
    Source: the core r_a r_b^T of two triangular factors, as in Golub and Van Loan, Matrix Computations, 8.6.

    >>> a = jnp.ones((100, 1)); print(product_singular_values(a, 2 * a).round())
    [200.]
    """
    (a, scale_a), (b, scale_b) = scaled(a), scaled(b)
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"a has shape {a.shape} and b {b.shape}; their last axes differ")
    if min(a.shape[-2], b.shape[-2]) < a.shape[-1]:
        core = a @ transpose(b)
    else:
        core = b @ transpose(triangles(a)[0])
    return singular_values(core) * (scale_a * scale_b)[..., 0]


def _jacobi(x: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """x [..., n, w], n even, its rows rotated until their first m entries are orthogonal, and the sweeps it took."""
    half = x.shape[-2] // 2
    tolerance = EPSILON * max(m, 4) ** 0.5

    def next_pairs(a, b):
        """The circle method: the first row stays, the others move on by one place."""
        if half == 1:
            return jnp.concatenate([a, b], axis=-2)
        moved = [a[..., :1, :], b[..., :1, :], a[..., 1:-1, :], b[..., 1:, :], a[..., -1:, :]]
        return jnp.concatenate(moved, axis=-2)

    def rotate(_, carry):
        # angles are those found in the round before: as carried arrays they are not recomputed for every entry
        x, squares, sine, tangent, moved, worst = carry
        a, b = x[..., :half, :], x[..., half:, :]
        # this form, unlike cos a - sin b, keeps lengths: 2e-7 instead of 2e-5 after ten sweeps of 256 x 256
        x = next_pairs(a - sine * (b + tangent * a), b + sine * (a - tangent * b))
        squares = next_pairs(squares[..., :half, :] - moved, squares[..., half:, :] + moved)
        alpha, beta = jnp.maximum(squares[..., :half, :], 0.0), jnp.maximum(squares[..., half:, :], 0.0)
        gamma = jnp.sum(x[..., :half, :m] * x[..., half:, :m], axis=-1, keepdims=True)
        size = jnp.sqrt(alpha) * jnp.sqrt(beta)
        cosine = jnp.abs(gamma) / jnp.where(size > 0, size, 1.0)
        turn = cosine > tolerance
        zeta = (beta - alpha) / jnp.where(turn, 2 * gamma, 1.0)
        t = jnp.where(zeta >= 0, 1.0, -1.0) / (jnp.abs(zeta) + jnp.sqrt(1 + zeta * zeta))
        t = jnp.where(turn, t, 0.0)
        cos = 1 / jnp.sqrt(1 + t * t)
        sine = cos * t
        return x, squares, sine, sine / (1 + cos), t * gamma, jnp.maximum(worst, jnp.max(cosine, axis=(-2, -1)))

    def unfinished(carry):
        *_, worst, sweep = carry
        return jnp.any(worst > tolerance) & (sweep < _MAXIMUM_SWEEPS)

    def sweep_once(carry):
        x, sine, tangent, moved, _, sweep = carry
        squares = jnp.sum(x[..., :m] ** 2, axis=-1, keepdims=True)
        start = x, squares, sine, tangent, moved, jnp.zeros(x.shape[:-2], jnp.float32)
        x, _, *angles, worst = lax.fori_loop(0, x.shape[-2] - 1, rotate, start)
        return x, *angles, worst, sweep + 1

    zero = jnp.zeros_like(x[..., :half, :1])
    start = x, zero, zero, zero, jnp.ones(x.shape[:-2], jnp.float32), 0
    x, *_, sweeps = lax.while_loop(unfinished, sweep_once, start)
    return x, sweeps


@jax.jit
@jax.default_matmul_precision("highest")
def svd(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Thin singular value decomposition, by one-sided Jacobi rotations.

    a = u diag(s) vt, with r = min(m, n).

    Args:
      a: [..., m, n], any m and n, any floating type.
    Returns:
      u [..., m, r], s [..., r] descending, vt [..., r, n], float32; u and vt are orthonormal also where s is 0. All
      three are NaN for a matrix that is not finite.
    Numerics: s within 1e-6 of the largest, u and vt orthonormal within 1e-5 (256 x 256). Sweeps go on until every pair
      of columns is orthogonal to rounding, at most 30 (11 for a square Gaussian 256 x 256). Not differentiable.
    Source: Hestenes (1958); preconditioning by QR, Drmac and Veselic (2008).

    >>> u, s, vt = svd(jnp.array([[0.0, 2.0], [-3.0, 0.0], [0.0, 0.0]]))
    >>> print(s.round(5))
    [3. 2.]
    """
    a = jnp.asarray(a)
    m, n = a.shape[-2:]
    if m < n:
        u, s, vt = svd(transpose(a))
        return transpose(vt), s, transpose(u)
    a, scale = scaled(a)
    if a.size == 0:
        zeros = jnp.zeros((*a.shape[:-2], n, n), jnp.float32)
        return a, zeros[..., 0], zeros
    q, r = qr(a)
    # rows of r, and beside them the rotations so far; a zero row makes their number even
    x = jnp.concatenate([r, jnp.broadcast_to(jnp.eye(n, dtype=jnp.float32), r.shape)], axis=-1)
    x, _ = _jacobi(jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, n % 2), (0, 0)]), n)
    s = _norm(x[..., :n])
    order = jnp.argsort(-s[..., 0], axis=-1)[..., :n, None]
    x, s = jnp.take_along_axis(x, order, axis=-2), jnp.take_along_axis(s, order, axis=-2)
    v, _ = qr(transpose(x[..., :n] / jnp.where(s > 0, s, 1.0)))
    return q @ transpose(x[..., n:]), s[..., 0] * scale[..., 0], transpose(v)

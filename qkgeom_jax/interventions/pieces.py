"""What interventions are made of: when they act, and what they do to a matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from qkgeom_jax import metrics
from qkgeom_jax.metrics import frobenius_norm
from qkgeom_jax.metrics.linalg import qr, svd

# In a training loop that is not compiled, these still are, once for each shape.
_svd, _qr = jax.jit(svd), jax.jit(qr)
singular_values = jax.jit(metrics.singular_values)


@dataclass(frozen=True)
class When:
    """A condition on n, the number of completed updates, the present one included. Combine with ``&``."""

    due: Callable[[Any], Any]

    def __call__(self, n: Any) -> Any:
        return self.due(n)

    def __and__(self, other: When) -> When:
        return When(lambda n: self(n) & other(n))


always = When(lambda n: True)


def every(period: int) -> When:
    """After each update that makes n a multiple of `period`.

    >>> [n for n in range(1, 7) if every(3)(n)]
    [3, 6]
    """
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        raise ValueError(f"period is {period!r}; allowed: a whole number of at least 1")
    return When(lambda n: n % period == 0)


def between(start: int, stop: int | None = None) -> When:
    """After the updates start + 1 to stop; without `stop`, after all that follow.

    Epoch e of E steps is ``between(e * E, (e + 1) * E)``.

    >>> [n for n in range(1, 7) if between(2, 4)(n)]
    [3, 4]
    """
    if stop is None:
        return When(lambda n: n > start)
    return When(lambda n: (n > start) & (n <= stop))


def at(update: int) -> When:
    """After that one update, counted from 1.

    >>> [n for n in range(1, 7) if at(2)(n)]
    [2]
    """
    return When(lambda n: n == update)


def blend(a: jax.Array, b: jax.Array, strength: float) -> jax.Array:
    """(1 - strength) a + strength b: a at 0, b at 1.

    >>> float(blend(jnp.float32(2.0), jnp.float32(4.0), 0.5))
    3.0
    """
    return (1 - strength) * a + strength * b


def change_spectrum(w: jax.Array, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Other singular values, the same singular vectors: W + U diag(change(s) - s) V^T.

    Args:
      w: [..., m, n].
      change: from the singular values [..., min(m, n)], descending, to new ones of that shape.

    Returns:
      float32 [..., m, n]; W itself, bitwise, where change(s) = s. The vectors of equal singular values, and so of a
      zero matrix, are an arbitrary orthonormal choice. A matrix that is not finite gives NaN, for itself alone.

    Numerics: no LAPACK call; the new values as asked for to 1e-5 of the largest.

    >>> w = change_spectrum(jnp.diag(jnp.array([3.0, 1.0])), lambda s: s[::-1])
    >>> w.round(4).tolist()
    [[1.0, 0.0], [0.0, 3.0]]
    """
    w = jnp.asarray(w, jnp.float32)
    u, s, vt = _svd(w)
    with jax.default_matmul_precision("highest"):
        return w + (u * (change(s) - s)[..., None, :]) @ vt


def with_norm(w: jax.Array, norm: jax.Array) -> jax.Array:
    """W [..., m, n] scaled to the Frobenius norms `norm` [...]; a zero matrix stays zero.

    >>> with_norm(jnp.array([[3.0, 4.0]]), 10.0).tolist()
    [[6.0, 8.0]]
    """
    now = frobenius_norm(w)
    return w * jnp.where(now > 0, norm / jnp.where(now > 0, now, 1.0), 1.0)[..., None, None]


def random_rotation(key: jax.Array, batch: int, n: int) -> jax.Array:
    """Haar-random orthogonal matrices [batch, n, n], float32: Q of a Gaussian matrix (Stewart, 1980).

    >>> r = random_rotation(jax.random.key(0), 5, 3)
    >>> bool(jnp.allclose(r @ r.mT, jnp.eye(3)[None], atol=1e-5))
    True
    """
    # Uniform because `qr` gives R a positive diagonal; with R's signs left to chance, Q would not be.
    return _qr(jax.random.normal(key, (batch, n, n)))[0]

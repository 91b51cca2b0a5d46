"""Singular values, SVD and QR against float64 LAPACK, closed forms and degenerate matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkgeom_jax.metrics import linalg, product_singular_values, qr, singular_values, svd

@functools.cache
def compiled(function, *shapes):
    """The program for float32 arguments of these shapes: each is compiled once for all tests."""
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()


def run(function, *arguments):
    """The compiled function's results as NumPy arrays."""
    program = compiled(function, *(np.shape(a) for a in arguments))
    return jax.tree.map(np.asarray, program(*(np.asarray(a, np.float32) for a in arguments)))


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def with_spectrum(m, n, s, seed=0):
    """An m x n matrix with singular values s, in float32, and its singular values as they are after rounding."""
    rng = np.random.default_rng(seed)
    u, _ = np.linalg.qr(rng.standard_normal((m, len(s))))
    v, _ = np.linalg.qr(rng.standard_normal((n, len(s))))
    a = ((u * s) @ v.T).astype(np.float32)
    return a, exact_values(a)


def exact_values(a):
    return np.linalg.svd(np.asarray(a).astype(np.float64), compute_uv=False)


def relative_error(s, exact):
    """Largest error over the matrices of a batch, each relative to its largest singular value."""
    difference = np.max(np.abs(np.asarray(s).astype(np.float64) - exact), axis=-1)
    return np.max(difference / np.max(exact, axis=-1))


def zoo():
    """Awkward 8 x 6 matrices by name."""
    g = gaussian(8, 6)
    tied, _ = with_spectrum(8, 6, np.array([2.0, 2.0, 2.0, 1.0, 1.0, 1.0]))
    graded, _ = with_spectrum(8, 6, np.logspace(0, -7, 6))
    return {
        "gaussian": g,
        "tied": tied,
        "graded": graded,
        "zero": np.zeros_like(g),
        "rank one": np.outer(g[:, 0], g[0]).astype(np.float32),
        "equal columns": np.repeat(g[:, :2], 3, axis=1),
        "zero columns": g * np.array([1, 0, 1, 0, 0, 1], np.float32),
        "orthonormal": np.linalg.qr(g)[0].astype(np.float32),
        "tiny": g * np.float32(1e-20),
        "huge": g * np.float32(1e18),
        "mixed": g * np.logspace(0, -18, 6).astype(np.float32),
    }


ZOO = np.stack(list(zoo().values()))


def orthonormal_error(a):
    """How far the columns of [..., m, n] are from orthonormal."""
    a = np.asarray(a).astype(np.float64)
    return np.max(np.abs(np.swapaxes(a, -1, -2) @ a - np.eye(a.shape[-1])))


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (2, 1, 9, 12)])
def test_svd_of_any_shape(shape):
    a = gaussian(*shape)
    u, s, vt = run(svd, a)
    r = min(shape[-2:])
    assert u.shape == (*shape[:-1], r) and s.shape == (*shape[:-2], r) and vt.shape == (*shape[:-2], r, shape[-1])
    assert relative_error(s, exact_values(a)) < 1e-6
    assert np.all(np.diff(s) <= 0)
    assert orthonormal_error(u) < 2e-6 and orthonormal_error(np.swapaxes(vt, -1, -2)) < 2e-6
    np.testing.assert_allclose((u * s[..., None, :]) @ vt, a, atol=1e-5)


def test_svd_of_a_large_square_matrix_converges():
    a = gaussian(2, 256, 256)
    u, s, vt = run(svd, a)
    assert relative_error(s, exact_values(a)) < 1e-6
    assert orthonormal_error(u) < 1e-5 and orthonormal_error(np.swapaxes(vt, -1, -2)) < 1e-5
    assert np.max(np.abs((u * s[..., None, :]) @ vt - a)) < 2e-6 * s[0, 0]


def test_svd_of_awkward_matrices():
    u, s, vt = run(svd, ZOO)
    for name, a, u, s, vt in zip(zoo(), ZOO, u, s, vt):
        exact = exact_values(a)
        assert np.max(np.abs(s - exact)) <= 1e-6 * exact[0], name
        assert orthonormal_error(u) < 3e-6 and orthonormal_error(vt.T) < 3e-6, name
        assert np.max(np.abs((u * s) @ vt - a)) <= 3e-6 * exact[0], name


def test_singular_values_of_awkward_matrices():
    for name, a, s in zip(zoo(), ZOO, run(singular_values, ZOO)):
        exact = exact_values(a)
        assert np.max(np.abs(s - exact)) <= 1e-6 * exact[0], name
        assert np.all(np.diff(s) <= 0) and s[-1] >= 0, name


def test_singular_values_of_tall_awkward_matrices():
    """Ten copies of each matrix below another take the route by Gram matrices."""
    tall = np.concatenate([ZOO] * 10, axis=-2)
    for name, a, s in zip(zoo(), tall, run(singular_values, tall)):
        exact = exact_values(a)
        assert np.max(np.abs(s - exact)) <= 1e-6 * exact[0], name


@pytest.mark.parametrize("decades", [1, 3, 5])
def test_tall_matrices_keep_small_singular_values(decades):
    """A Gram matrix alone would lose what lies more than 3.5 decades below the largest."""
    a, exact = with_spectrum(500, 20, np.logspace(0, -decades, 20), seed=decades)
    s = run(singular_values, a)
    assert relative_error(s, exact) < 1e-6
    np.testing.assert_allclose(s[-1], exact[-1], rtol=2e-7 * 10**decades + 1e-6)
    gram = np.sqrt(np.abs(np.linalg.eigvalsh(a.T @ a)))[::-1]
    assert decades < 5 or abs(gram[-1] / exact[-1] - 1) > 1e-2


def test_singular_values_wide_and_single():
    for shape in [(1, 6), (2, 30, 30)]:
        a = gaussian(*shape)
        assert relative_error(run(singular_values, a), exact_values(a)) < 1e-6


def test_matrices_that_are_not_finite_are_nan_for_themselves_alone():
    a = ZOO.copy()
    a[1, 2, 3], a[2, 0, 0] = np.nan, np.inf
    for function in (svd, singular_values, qr):
        for before, after in zip(jax.tree.leaves(run(function, ZOO)), jax.tree.leaves(run(function, a))):
            assert np.all(np.isnan(after[1:3]))
            np.testing.assert_array_equal(after[[0, *range(3, len(a))]], before[[0, *range(3, len(a))]])
    tall = np.concatenate([a] * 10, axis=-2)
    np.testing.assert_array_equal(np.isnan(run(singular_values, tall)).all(axis=-1), np.isin(np.arange(len(a)), [1, 2]))


def sweeps(*matrices):
    a = np.stack(matrices)
    x = np.concatenate([a, np.broadcast_to(np.eye(a.shape[-2]), a.shape)], axis=-1)
    return int(run(sweep_count, x))


def sweep_count(x):
    return linalg._jacobi(x, x.shape[-1] // 2)[1]


def test_sweeps_follow_from_convergence():
    square, identity = gaussian(32, 32), np.eye(32)
    graded = np.diag(np.logspace(0, -5, 32)) + 1e-9
    assert sweeps(identity, identity) == 1
    assert sweeps(graded, identity) < sweeps(square, identity) < 15
    assert sweeps(np.full_like(square, np.nan), identity) <= 2


def test_qr_of_awkward_matrices():
    q, r = run(qr, ZOO)
    for name, a, q, r in zip(zoo(), ZOO, q, r):
        assert orthonormal_error(q) < 1e-6, name
        assert np.max(np.abs(q @ r - a)) <= 2e-6 * np.max(np.abs(a)), name
        assert np.all(np.tril(r, -1) == 0) and np.all(np.diag(r) >= 0), name
    zero = list(zoo()).index("zero columns")
    np.testing.assert_array_equal(np.diag(run(qr, ZOO)[1][zero])[[1, 3, 4]], 0)


def test_qr_equals_lapack_up_to_signs():
    a = gaussian(3, 50, 12)
    q, r = run(qr, a)
    exact_q, exact_r = np.linalg.qr(a.astype(np.float64))
    signs = np.sign(np.diagonal(exact_r, axis1=-2, axis2=-1))
    np.testing.assert_allclose(q, exact_q * signs[:, None, :], atol=2e-6)
    np.testing.assert_allclose(r, exact_r * signs[..., None], atol=1e-5)


def test_qr_refuses_wide_matrices():
    with pytest.raises(ValueError, match=r"\(3, 4\)"):
        qr(jnp.ones((3, 4)))


@pytest.mark.parametrize(("m", "n", "k"), [(30, 20, 6), (4, 30, 6), (6, 6, 6)])
def test_product_singular_values(m, n, k):
    a, b = gaussian(2, m, k), gaussian(2, n, k, seed=1)
    s = run(product_singular_values, a, b)
    exact = exact_values(a.astype(np.float64) @ np.swapaxes(b, -1, -2))[..., : min(m, n, k)]
    assert s.shape == exact.shape
    assert relative_error(s, exact) < 1e-6


def test_product_singular_values_of_extreme_scales_and_deficient_factors():
    a, b = gaussian(30, 6), gaussian(20, 6, seed=1)
    a[:, 3] = a[:, 2]
    exact = exact_values(a.astype(np.float64) @ b.T)[:6]
    program = functools.partial(run, product_singular_values)
    for scale_a, scale_b in ((1, 1), (1e-20, 1e18), (1e18, 1e-20)):
        s = program(a * np.float32(scale_a), b * np.float32(scale_b))
        assert relative_error(s, exact * scale_a * scale_b) < 2e-6
    np.testing.assert_array_equal(program(0 * a, b), 0)


def test_product_singular_values_refuses_different_inner_axes():
    with pytest.raises(ValueError, match=r"\(5, 3\).*\(5, 4\)"):
        product_singular_values(jnp.ones((5, 3)), jnp.ones((5, 4)))


def test_bfloat16_is_taken_to_float32():
    a = jnp.asarray(gaussian(8, 6)).astype(jnp.bfloat16)
    exact = exact_values(np.asarray(a.astype(jnp.float32)))
    s = jax.jit(singular_values)(a)
    assert s.dtype == jnp.float32
    assert relative_error(s, exact) < 1e-6
    assert {x.dtype for x in (*jax.eval_shape(svd, a), *jax.eval_shape(qr, a))} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("function", [svd, singular_values, qr])
def test_vmap_loop_and_eager_equal_the_batch(function):
    well_conditioned = ZOO[[0, 1, 7]]
    batch = jax.tree.leaves(run(function, ZOO))
    mapped = jax.tree.leaves(jax.jit(jax.vmap(function))(ZOO))
    loop = [jax.tree.leaves(run(function, a)) for a in well_conditioned]
    eager = jax.tree.leaves(function(ZOO[0]))
    for together, by_vmap, by_itself, *alone in zip(batch, mapped, eager, *loop):
        np.testing.assert_allclose(by_vmap, together, atol=2e-6 * np.max(np.abs(together[:8])))
        np.testing.assert_allclose(alone[0], together[0], atol=1e-5)
        np.testing.assert_allclose(by_itself, together[0], atol=1e-5)
    if function is not qr:
        s = [leaves[1 if function is svd else 0] for leaves in loop]
        np.testing.assert_allclose(s, batch[1 if function is svd else 0][[0, 1, 7]], atol=1e-5)


def test_empty_batches():
    a = jnp.zeros((0, 4, 3))
    assert [x.shape for x in svd(a)] == [(0, 4, 3), (0, 3), (0, 3, 3)]
    assert singular_values(a).shape == (0, 3)
    assert [x.shape for x in qr(a)] == [(0, 4, 3), (0, 3, 3)]


def test_gradient_of_singular_values():
    a = gaussian(7, 5)
    weights = np.arange(1.0, 6.0, dtype=np.float32)
    u, _, vt = np.linalg.svd(a.astype(np.float64), full_matrices=False)
    gradient = jax.jit(jax.grad(lambda a: jnp.sum(singular_values(a) * weights)))
    np.testing.assert_allclose(gradient(a), (u * weights) @ vt, atol=1e-5)
    for degenerate in (np.eye(7, 5), np.zeros((7, 5)), np.ones((7, 5))):
        assert np.all(np.isfinite(gradient(degenerate.astype(np.float32))))


@pytest.mark.parametrize("function", [svd, singular_values, qr])
def test_programs_hold_no_custom_call(function):
    assert "custom-call" not in compiled(function, ZOO.shape).as_text()

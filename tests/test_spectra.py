"""Participation ratios, effective ranks and covariances: closed forms, float64 NumPy, invariances, degenerate input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkgeom_jax.metrics import (
    covariance_statistics,
    effective_rank,
    effective_rank_activations,
    effective_rank_qk,
    effective_rank_qk_weight,
    participation_ratio,
    participation_ratio_weight,
)

uncentred = functools.partial(participation_ratio, centred=False)
covariance = jax.jit(covariance_statistics)
rank_of_activations = jax.jit(effective_rank_activations)
rank_qk = jax.jit(effective_rank_qk)


def activations(*shape, seed=0):
    """Correlated columns of different sizes around a mean that is not 0."""
    rng = np.random.default_rng(seed)
    d = shape[-1]
    return (rng.standard_normal(shape) @ rng.standard_normal((d, d)) + rng.standard_normal(d)).astype(np.float32)


def orthonormal(m, n, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((m, n)))[0].astype(np.float32)


def exact_pr(c):
    """From eigenvalues, in float64."""
    eigenvalues = np.linalg.eigvalsh(np.asarray(c, np.float64))
    return eigenvalues.sum() ** 2 / (eigenvalues**2).sum()


def exact_covariance(x, centred=True):
    x = np.asarray(x, np.float64)
    x = x - x.mean(0) if centred else x
    return x.T @ x / len(x)


def exact_effective_rank(a):
    s = np.linalg.svd(np.asarray(a, np.float64), compute_uv=False)
    p = s[s > 1e-13 * s[0]] / s.sum()
    return np.exp(-np.sum(p * np.log(p)))


def test_participation_ratio_equals_its_eigenvalue_form():
    x = activations(3, 200, 7)
    np.testing.assert_allclose(participation_ratio(x), [exact_pr(exact_covariance(each)) for each in x], rtol=1e-5)
    np.testing.assert_allclose(uncentred(x), [exact_pr(exact_covariance(each, False)) for each in x], rtol=1e-5)
    assert np.all(np.abs(participation_ratio(x) - uncentred(x)) > 0.01)
    wide = activations(5, 9)
    np.testing.assert_allclose(participation_ratio(wide), exact_pr(exact_covariance(wide)), rtol=1e-5)
    np.testing.assert_allclose(participation_ratio_weight(wide), exact_pr(wide @ wide.T.astype(np.float64)), rtol=1e-5)


def test_participation_ratio_of_equal_eigenvalues_and_of_rank_one():
    basis = np.eye(6, dtype=np.float32)
    np.testing.assert_allclose(participation_ratio(np.concatenate([basis, -basis])), 6, rtol=1e-6)
    np.testing.assert_allclose(participation_ratio_weight(orthonormal(20, 6)), 6, rtol=1e-5)
    line = np.outer(np.arange(10.0), [1.0, -2.0, 3.0])
    np.testing.assert_allclose([participation_ratio(line), participation_ratio_weight(line)], 1, rtol=1e-6)


def test_no_variance_has_participation_ratio_and_rank_zero():
    equal = np.broadcast_to(np.array([0.1, -1 / 3, 1e3], np.float32), (50, 3))
    one = np.array([[1.0, 2.0, 3.0]], np.float32)
    for x in (equal, one):
        assert participation_ratio(x) == 0 and rank_of_activations(x) == 0
        assert 0 < uncentred(x) < 1.001
        statistics = covariance(x)
        assert [float(statistics[name]) for name in ("trace", "max", "min", "condition")] == [0, 0, 0, np.inf]
    assert participation_ratio(np.zeros((4, 3))) == 0 and participation_ratio_weight(np.zeros((4, 3))) == 0


@pytest.mark.parametrize("scale", [1e-20, 3.0, 1e18])
def test_scale_changes_no_ratio_or_rank(scale):
    x, y = activations(60, 5), activations(60, 5, seed=1)
    scaled = (x * np.float32(scale)).astype(np.float32)
    for measure in (participation_ratio, uncentred, participation_ratio_weight, rank_of_activations):
        np.testing.assert_allclose(measure(scaled), measure(x), rtol=1e-5)
    np.testing.assert_allclose(rank_qk(scaled, y), rank_qk(x, y), rtol=1e-5)
    np.testing.assert_allclose(covariance(scaled)["condition"], covariance(x)["condition"], rtol=1e-4)


def test_rotation_changes_no_ratio_or_rank():
    x, y, rotation = activations(60, 5), activations(60, 5, seed=1), orthonormal(5, 5)
    for measure in (participation_ratio, uncentred, rank_of_activations):
        np.testing.assert_allclose(measure(x @ rotation), measure(x), rtol=1e-5)
    np.testing.assert_allclose(rank_qk(x @ rotation, y @ rotation), rank_qk(x, y), rtol=1e-5)
    assert abs(rank_qk(x @ rotation, y) / rank_qk(x, y) - 1) > 1e-3


def test_effective_rank_closed_forms():
    np.testing.assert_allclose(effective_rank(jnp.ones((2, 7))), 7, rtol=1e-6)
    np.testing.assert_allclose(effective_rank(jnp.array([0.0, 3.0, 0.0])), 1, rtol=1e-6)
    p = np.array([0.5, 0.25, 0.25])
    np.testing.assert_allclose(effective_rank(8 * p), 2**1.5, rtol=1e-6)
    np.testing.assert_allclose(effective_rank(np.float32(1e-30) * p), 2**1.5, rtol=1e-6)
    np.testing.assert_allclose(effective_rank(np.float32(1e38) * p), 2**1.5, rtol=1e-6)
    assert effective_rank(jnp.zeros(4)) == 0
    np.testing.assert_array_equal(np.isnan(effective_rank(jnp.array([[1.0, np.nan], [1.0, 2.0]]))), [True, False])


def test_effective_rank_of_an_orthonormal_product_is_its_rank():
    q, k = orthonormal(40, 12), orthonormal(40, 12, seed=1)
    np.testing.assert_allclose(rank_qk(q, k), 12, rtol=1e-5)
    q[:, 5:] = 0
    np.testing.assert_allclose(rank_qk(q, k), 5, rtol=1e-5)
    np.testing.assert_array_equal(rank_qk(0 * q, k), 0)


def test_effective_rank_qk_equals_that_of_the_logit_matrix():
    q, k = activations(2, 40, 12), activations(2, 40, 12, seed=1)
    exact = [exact_effective_rank(a.astype(np.float64) @ b.T) for a, b in zip(q, k)]
    np.testing.assert_allclose(rank_qk(q, k), exact, rtol=1e-5)
    short = [exact_effective_rank(a.astype(np.float64) @ b.T) for a, b in zip(q[:, :6], k[:, :6])]
    np.testing.assert_allclose(rank_qk(q[:, :6], k[:, :6]), short, rtol=1e-5)


def test_effective_rank_qk_of_equal_tokens_is_one():
    q, k = activations(40, 12), activations(40, 12, seed=1)
    np.testing.assert_allclose(rank_qk(np.broadcast_to(q[:1], q.shape), k), 1, rtol=1e-5)


def test_effective_rank_qk_weight_is_unchanged_by_the_gauge_of_a_head():
    w_q, w_k = activations(30, 6), activations(30, 6, seed=1)
    gauge = activations(6, 6, seed=2)
    exact = exact_effective_rank(w_q.astype(np.float64) @ w_k.T)
    program = jax.jit(effective_rank_qk_weight)
    np.testing.assert_allclose(program(w_q, w_k), exact, rtol=1e-5)
    np.testing.assert_allclose(program(w_q @ gauge, w_k @ np.linalg.inv(gauge).T), exact, rtol=1e-3)


def test_covariance_statistics_and_rank_equal_float64():
    x = activations(2, 300, 8)
    statistics = covariance(x)
    eigenvalues = np.linalg.eigvalsh([exact_covariance(each) for each in x])
    np.testing.assert_allclose(statistics["trace"], eigenvalues.sum(-1), rtol=1e-5)
    np.testing.assert_allclose(statistics["max"], eigenvalues[:, -1], rtol=1e-5)
    np.testing.assert_allclose(statistics["min"], eigenvalues[:, 0], rtol=1e-4)
    np.testing.assert_allclose(statistics["condition"], eigenvalues[:, -1] / eigenvalues[:, 0], rtol=1e-4)
    exact = [exact_effective_rank(each.astype(np.float64) - each.mean(0, dtype=np.float64)) for each in x]
    np.testing.assert_allclose(rank_of_activations(x), exact, rtol=1e-5)


def test_covariance_keeps_a_small_eigenvalue_and_knows_a_singular_one():
    x = activations(300, 8)
    x[:, 0] = x[:, 1] + 3e-4 * np.random.default_rng(3).standard_normal(300)
    eigenvalues = np.linalg.eigvalsh(exact_covariance(x))
    assert eigenvalues[-1] / eigenvalues[0] > 1e8
    np.testing.assert_allclose(covariance(x)["min"], eigenvalues[0], rtol=0.05)
    x[:, 0] = x[:, 1]
    assert covariance(x)["min"] == 0 and covariance(x)["condition"] == np.inf
    few = covariance(x[:5])
    assert few["min"] == 0 and few["condition"] == np.inf and few["max"] > 0


def test_bfloat16_is_taken_to_float32():
    x = jnp.asarray(activations(60, 5)).astype(jnp.bfloat16)
    same = x.astype(jnp.float32)
    for measure in (participation_ratio, participation_ratio_weight):
        assert measure(x).dtype == jnp.float32
        np.testing.assert_array_equal(measure(x), measure(same))
    np.testing.assert_array_equal(rank_qk(x, x), rank_qk(same, same))


def test_values_that_are_not_finite_stay_with_their_matrix():
    x = activations(3, 60, 5)
    x[1, 4, 2] = np.inf
    for values in (participation_ratio(x), rank_of_activations(x), covariance(x)["max"], rank_qk(x, x)):
        np.testing.assert_array_equal(np.isnan(values), [False, True, False])


def test_gradients_are_finite_and_right():
    x = activations(20, 4)
    gradient = jax.jit(jax.grad(participation_ratio))
    step = np.zeros_like(x)
    step[3, 2] = 1e-2
    slope = (exact_pr(exact_covariance(x + step)) - exact_pr(exact_covariance(x - step))) / 2e-2
    np.testing.assert_allclose(gradient(x)[3, 2], slope, rtol=1e-3)
    for degenerate in (np.zeros_like(x), np.ones_like(x), np.eye(20, 4, dtype=np.float32)):
        assert np.all(np.isfinite(gradient(degenerate)))
        assert np.all(np.isfinite(jax.grad(participation_ratio_weight)(degenerate)))
    assert np.all(np.isfinite(jax.grad(effective_rank)(jnp.array([2.0, 0.0, 0.0]))))
    assert np.all(np.isfinite(jax.grad(effective_rank)(jnp.zeros(3))))


def test_gradient_of_the_effective_rank_of_activations():
    x = activations(20, 4)
    exact = lambda x: exact_effective_rank(x - x.mean(0))  # noqa: E731
    step = np.zeros_like(x)
    step[3, 2] = 1e-2
    slope = (exact(x.astype(np.float64) + step) - exact(x.astype(np.float64) - step)) / 2e-2
    np.testing.assert_allclose(jax.jit(jax.grad(effective_rank_activations))(x)[3, 2], slope, rtol=2e-3)


def test_vmap_equals_loop():
    x, y = activations(3, 60, 5), activations(3, 60, 5, seed=1)
    np.testing.assert_allclose(jax.vmap(participation_ratio)(x), [participation_ratio(a) for a in x], rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(effective_rank_qk))(x, y), list(map(rank_qk, x, y)), rtol=1e-5)

"""Norms and alignments of weights: closed forms, float64 NumPy, invariances, degenerate input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkgeom_jax.metrics import activation_norm, column_alignment, cosine_similarity, frobenius_norm, spectral_norm


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def exact_cosines(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(0) / np.sqrt((a * a).sum(0) * (b * b).sum(0))


def test_alignments_equal_float64():
    w_q, w_k = gaussian(2, 9, 5), gaussian(2, 9, 5, seed=1) + 0.5 * gaussian(2, 9, 5)
    cosines = np.array([exact_cosines(a, b) for a, b in zip(w_q, w_k)])
    np.testing.assert_allclose(column_alignment(w_q, w_k), np.abs(cosines).mean(-1), rtol=1e-5)
    np.testing.assert_allclose(column_alignment(w_q, w_k, signed=True), cosines.mean(-1), rtol=1e-5)
    flat = [exact_cosines(a.reshape(-1, 1), b.reshape(-1, 1))[0] for a, b in zip(w_q, w_k)]
    np.testing.assert_allclose(cosine_similarity(w_q, w_k), flat, rtol=1e-5)


def test_alignment_of_the_three_initialisations():
    w = gaussian(256, 64)
    half = (np.arange(256) < 128)[:, None]
    assert column_alignment(w, w) == pytest.approx(1, abs=1e-6)
    assert cosine_similarity(w, -2 * w) == pytest.approx(-1, abs=1e-6)
    assert column_alignment(w, -2 * w) == pytest.approx(1, abs=1e-6)
    assert column_alignment(w, -2 * w, signed=True) == pytest.approx(-1, abs=1e-6)
    assert column_alignment(w * half, w * ~half) == 0 and cosine_similarity(w * half, w * ~half) == 0
    independent = float(column_alignment(w, gaussian(256, 64, seed=1)))
    assert independent == pytest.approx(np.sqrt(2 / (np.pi * 256)), rel=0.2)


def test_a_zero_column_counts_as_unaligned():
    w = np.ones((4, 2), np.float32)
    other = w * np.array([1, 0], np.float32)
    assert column_alignment(w, other) == 0.5
    assert column_alignment(w, 0 * w) == 0 and cosine_similarity(w, 0 * w) == 0


def test_norms_equal_float64():
    w = gaussian(3, 9, 5)
    np.testing.assert_allclose(frobenius_norm(w), np.sqrt((w.astype(np.float64) ** 2).sum((1, 2))), rtol=1e-6)
    exact = np.linalg.norm(w.astype(np.float64), 2, axis=(1, 2))
    np.testing.assert_allclose(spectral_norm(w), exact, rtol=1e-6)
    np.testing.assert_allclose(spectral_norm(np.swapaxes(w, 1, 2)), exact, rtol=1e-6)
    np.testing.assert_allclose(activation_norm(w), np.linalg.norm(w.astype(np.float64), axis=-1).mean(-1), rtol=1e-6)


def test_spectral_norm_where_values_are_close():
    for gap in (0.0, 1e-7, 1e-5, 1e-3):
        u, v = np.linalg.qr(gaussian(40, 40))[0], np.linalg.qr(gaussian(40, 40, seed=1))[0]
        s = np.linspace(0.0, 1.0, 40)
        s[-2] = 1 - gap
        w = ((u.astype(np.float64) * s) @ v).astype(np.float32)
        np.testing.assert_allclose(spectral_norm(w), np.linalg.norm(w.astype(np.float64), 2), rtol=1e-6)
    np.testing.assert_allclose(spectral_norm(jnp.eye(7)), 1, rtol=1e-6)
    large = gaussian(256, 256)
    np.testing.assert_allclose(spectral_norm(large), np.linalg.norm(large.astype(np.float64), 2), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-20, 1e18])
def test_scale(scale):
    w, other, scale = gaussian(9, 5), gaussian(9, 5, seed=1), np.float32(scale)
    for norm in (frobenius_norm, spectral_norm, activation_norm):
        np.testing.assert_allclose(norm(scale * w) / scale, norm(w), rtol=1e-5)
    np.testing.assert_allclose(column_alignment(scale * w, other), column_alignment(w, other), rtol=1e-5)
    np.testing.assert_allclose(cosine_similarity(scale * w, other), cosine_similarity(w, other), rtol=1e-5)
    columns = np.array([1e-18, 1, 1, 1, 1], np.float32)
    np.testing.assert_allclose(column_alignment(w * columns, other), column_alignment(w, other), rtol=1e-5)


def test_zero_and_values_that_are_not_finite():
    w = gaussian(3, 9, 5)
    w[1] = 0
    w[2, 1, 1] = np.nan
    for norm in (frobenius_norm, spectral_norm, activation_norm):
        value = np.asarray(norm(w))
        assert value[0] > 0 and value[1] == 0 and np.isnan(value[2])
    for alignment in (cosine_similarity, column_alignment):
        value = np.asarray(alignment(w, w))
        np.testing.assert_allclose(value, [1, 0, np.nan], rtol=1e-6)


def test_bfloat16_is_taken_to_float32():
    w = jnp.asarray(gaussian(9, 5)).astype(jnp.bfloat16)
    for norm in (frobenius_norm, spectral_norm, activation_norm):
        assert norm(w).dtype == jnp.float32
        np.testing.assert_array_equal(norm(w), norm(w.astype(jnp.float32)))
    assert column_alignment(w, w).dtype == jnp.float32


def test_gradients():
    w, other = gaussian(9, 5), gaussian(9, 5, seed=1)
    u, _, vt = np.linalg.svd(w.astype(np.float64))
    np.testing.assert_allclose(jax.grad(spectral_norm)(w), np.outer(u[:, 0], vt[0]), atol=1e-5)
    step = np.zeros_like(w)
    step[3, 2] = 1e-2
    slope = np.mean(np.abs(exact_cosines(w + step, other)) - np.abs(exact_cosines(w - step, other))) / 2e-2
    np.testing.assert_allclose(jax.grad(column_alignment)(w, other)[3, 2], slope, rtol=1e-3)
    zero_column = w * np.array([0, 1, 1, 1, 1], np.float32)
    for degenerate in (0 * w, zero_column, np.eye(9, 5, dtype=np.float32)):
        assert np.all(np.isfinite(jax.grad(spectral_norm)(degenerate)))
        for alignment in (cosine_similarity, column_alignment):
            assert np.all(np.isfinite(jax.grad(alignment)(degenerate, other)))


def test_jit_equals_eager_and_vmap_equals_loop():
    w, other = gaussian(3, 9, 5), gaussian(3, 9, 5, seed=1)
    for norm in (frobenius_norm, spectral_norm, activation_norm):
        np.testing.assert_allclose(jax.jit(norm)(w), norm(w), rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(norm)(w), [norm(each) for each in w], rtol=1e-6)
    alone = [column_alignment(a, b) for a, b in zip(w, other)]
    np.testing.assert_allclose(jax.jit(jax.vmap(column_alignment))(w, other), alone, rtol=1e-6)


def test_different_shapes_are_named():
    for alignment in (cosine_similarity, column_alignment):
        with pytest.raises(ValueError, match=r"\(4, 3\).*\(4, 2\)"):
            alignment(jnp.ones((4, 3)), jnp.ones((4, 2)))

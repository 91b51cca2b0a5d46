"""Attention and logit metrics: closed forms, float64 NumPy, masks, degenerate rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkgeom_jax.metrics import attention_entropy, attention_gap, logit_statistics, top_k_mass


def causal(positions):
    return np.tril(np.ones((positions, positions), bool))


def random_logits(*shape, seed=0, size=3.0):
    return (size * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def exact_rows(logits, mask):
    """Attention weights over the allowed keys of every query that has any, in float64, largest first."""
    for row, allowed in zip(np.asarray(logits, np.float64), mask):
        if allowed.any():
            weights = np.exp(row[allowed] - row[allowed].max())
            yield np.sort(weights / weights.sum())[::-1]


def exact(logits, mask):
    rows = list(exact_rows(logits, mask))
    return {
        "entropy": np.mean([-np.sum(p[p > 0] * np.log(p[p > 0])) for p in rows]),
        "top_1": np.mean([p[0] for p in rows]),
        "top_5": np.mean([p[:5].sum() for p in rows]),
        "gap": np.mean([p[0] - p[1] if len(p) > 1 else 1.0 for p in rows]),
    }


def measured(logits, mask):
    return {
        "entropy": attention_entropy(logits, mask),
        "top_1": top_k_mass(logits, 1, mask),
        "top_5": top_k_mass(logits, 5, mask),
        "gap": attention_gap(logits, mask),
    }


MASKS = {
    "causal": causal(12),
    "everything": np.ones((12, 12), bool),
    "window": causal(12) & ~np.tril(np.ones((12, 12), bool), -4),
    "rows without keys": causal(12) & (np.arange(12) % 3 > 0)[:, None],
    "single keys": np.eye(12, dtype=bool),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("size", [0.0, 3.0, 300.0])
def test_attention_metrics_equal_float64(name, size):
    logits = random_logits(2, 12, 12, size=size)
    values = measured(logits, MASKS[name])
    for metric, value in values.items():
        np.testing.assert_allclose(value, [exact(each, MASKS[name])[metric] for each in logits], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", MASKS)
def test_logit_statistics_equal_float64(name):
    mask = MASKS[name]
    logits = random_logits(2, 12, 12) + 7
    values = logit_statistics(logits, mask)
    allowed = logits[:, mask].astype(np.float64)
    np.testing.assert_allclose(values["logit_mean"], allowed.mean(-1), rtol=1e-6)
    np.testing.assert_allclose(values["logit_std"], allowed.std(-1), rtol=1e-5)
    np.testing.assert_allclose(values["logit_variance"], allowed.var(-1), rtol=1e-5)
    np.testing.assert_array_equal(values["logit_max"], logits[:, mask].max(-1))


def test_uniform_causal_attention():
    values = measured(jnp.zeros((64, 64)), causal(64))
    lengths = np.arange(1, 65)
    np.testing.assert_allclose(values["entropy"], np.mean(np.log(lengths)), rtol=1e-6)
    np.testing.assert_allclose(values["top_1"], np.mean(1 / lengths), rtol=1e-6)
    np.testing.assert_allclose(values["top_5"], np.mean(np.minimum(5 / lengths, 1)), rtol=1e-6)
    np.testing.assert_allclose(values["gap"], 1 / 64, rtol=1e-6)


def test_a_row_with_one_key():
    values = measured(jnp.array([[5.0]]), causal(1))
    assert [float(values[name]) for name in ("entropy", "top_1", "top_5", "gap")] == [0, 1, 1, 1]
    statistics = logit_statistics(jnp.array([[5.0]]), causal(1))
    assert [float(value) for value in statistics.values()] == [5, 0, 0, 5]


def test_fewer_than_five_keys_hold_all_attention():
    np.testing.assert_allclose(top_k_mass(random_logits(4, 4), 5, causal(4)), 1, rtol=1e-6)
    np.testing.assert_allclose(top_k_mass(random_logits(4, 4), 50, causal(4)), 1, rtol=1e-6)


def test_fully_peaked_attention():
    values = measured(1e5 * np.eye(8, dtype=np.float32), causal(8))
    np.testing.assert_allclose([values[name] for name in ("entropy", "top_1", "top_5", "gap")], [0, 1, 1, 1], atol=1e-6)


def test_masked_logits_have_no_influence():
    logits = random_logits(12, 12)
    for junk in (1e30, -1e30, np.inf, np.nan):
        changed = np.where(causal(12), logits, np.float32(junk))
        for name, value in measured(changed, causal(12)).items():
            np.testing.assert_array_equal(value, measured(logits, causal(12))[name])
        for name, value in logit_statistics(changed, causal(12)).items():
            np.testing.assert_array_equal(value, logit_statistics(logits, causal(12))[name])


def test_allowed_logits_of_minus_infinity_get_no_attention():
    logits = random_logits(12, 12)
    mask = MASKS["window"] | np.eye(12, dtype=bool)
    closed = np.where(mask, logits, np.float32(-np.inf))
    for name, value in measured(closed, causal(12)).items():
        np.testing.assert_allclose(value, measured(logits, mask)[name], rtol=1e-6)


def test_shift_of_a_row_changes_no_attention_and_scale_no_order():
    logits = random_logits(12, 12)
    shifted = logits + np.arange(12, dtype=np.float32)[:, None]
    for name, value in measured(shifted, causal(12)).items():
        np.testing.assert_allclose(value, measured(logits, causal(12))[name], rtol=1e-5)
    assert attention_entropy(2 * logits, causal(12)) < attention_entropy(logits, causal(12))


@pytest.mark.parametrize("scale", [1e-20, 1e18])
def test_logit_statistics_follow_the_scale(scale):
    logits = random_logits(12, 12)
    big, one = logit_statistics(logits * np.float32(scale), causal(12)), logit_statistics(logits, causal(12))
    for name in ("logit_mean", "logit_std", "logit_max"):
        np.testing.assert_allclose(big[name] / np.float32(scale), one[name], rtol=1e-5)


def test_bfloat16_is_taken_to_float32():
    logits = jnp.asarray(random_logits(12, 12)).astype(jnp.bfloat16)
    for name, value in measured(logits, causal(12)).items():
        assert value.dtype == jnp.float32
        np.testing.assert_array_equal(value, measured(logits.astype(jnp.float32), causal(12))[name])


def test_values_that_are_not_finite_stay_with_their_matrix():
    logits = random_logits(3, 12, 12)
    logits[1, 5, 2] = np.nan
    for value in (*measured(logits, causal(12)).values(), *logit_statistics(logits, causal(12)).values()):
        np.testing.assert_array_equal(np.isnan(value), [False, True, False])


def test_a_mask_that_allows_nothing_gives_nan():
    for value in measured(random_logits(4, 4), np.zeros((4, 4), bool)).values():
        assert np.isnan(value)


@pytest.mark.parametrize("size", [0.0, 3.0, 1e5])
def test_gradients_are_finite(size):
    logits = random_logits(12, 12, size=size)
    for mask in (MASKS["causal"], MASKS["rows without keys"]):
        for measure in (attention_entropy, attention_gap, lambda a, m: top_k_mass(a, 5, m)):
            gradient = jax.grad(measure)(logits, mask)
            assert np.all(np.isfinite(gradient)) and np.all(np.asarray(gradient)[~mask] == 0)


def test_gradient_of_the_entropy_is_right():
    logits = random_logits(6, 6)
    step = np.zeros_like(logits)
    step[4, 1] = 1e-2
    slope = (exact(logits + step, causal(6))["entropy"] - exact(logits - step, causal(6))["entropy"]) / 2e-2
    np.testing.assert_allclose(jax.grad(attention_entropy)(logits, causal(6))[4, 1], slope, rtol=1e-3)


def test_jit_equals_eager_and_vmap_equals_loop():
    logits = random_logits(3, 12, 12)
    for measure in (attention_entropy, attention_gap):
        batch = measure(logits, causal(12))
        np.testing.assert_allclose(jax.jit(measure)(logits, causal(12)), batch, rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(measure, (0, None))(logits, causal(12)), batch, rtol=1e-6)
        np.testing.assert_allclose([measure(each, causal(12)) for each in logits], batch, rtol=1e-6)


def test_a_mask_per_matrix():
    logits = random_logits(2, 12, 12)
    masks = np.stack([MASKS["causal"], MASKS["window"]])
    alone = [attention_entropy(each, mask) for each, mask in zip(logits, masks)]
    np.testing.assert_allclose(attention_entropy(logits, masks), alone, rtol=1e-6)


def test_bad_arguments_are_named():
    logits = random_logits(4, 4)
    with pytest.raises(ValueError, match="float32.*boolean"):
        attention_entropy(logits, np.ones((4, 4), np.float32))
    with pytest.raises(ValueError, match=r"\(3, 3\)"):
        attention_gap(logits, causal(3))
    with pytest.raises(ValueError, match="k is 0"):
        top_k_mass(logits, 0, causal(4))

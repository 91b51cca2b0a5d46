import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from qkgeom_jax import ensemble, evaluate, initializers, metrics, model, optim
from qkgeom_jax.results import METRIC_COLUMNS


@pytest.fixture(scope="module")
def measured():
    config = tiny.config()
    tokens = tiny.tokens()
    probes = evaluate.make_probes(tokens[:400], tokens[400:], config)
    programs = ensemble.make_ensemble(config, optim.make_optimizer(config))
    state = programs.initialise(ensemble.make_keys(config.seeds))
    compiled = programs.measure.lower(state.params, probes).compile()
    return config, probes, state.params, compiled, compiled(state.params, probes)


def test_windows_are_evenly_spaced_and_cover_the_split():
    found = evaluate.windows(np.arange(100), total=40, context=9)
    assert found.shape == (4, 10) and found.dtype == np.int32
    np.testing.assert_array_equal(found[:, 0], [0, 30, 60, 90])
    assert (np.diff(found, axis=1) == 1).all()
    np.testing.assert_array_equal(evaluate.windows(np.arange(10), 40, 9), np.tile(np.arange(10), (4, 1)))
    with pytest.raises(ValueError, match="9 tokens is shorter than one window of 10"):
        evaluate.windows(np.arange(9), 40, 9)


def test_every_column_is_measured_for_every_seed_layer_and_head(measured):
    *_, result = measured
    assert set(result.layers) == set(METRIC_COLUMNS)
    assert all(values.shape == (2, 2) and values.dtype == jnp.float32 for values in result.layers.values())
    assert all(values.shape == (2, 2, 2) for values in result.heads.values())
    assert {"participation_ratio_q", "effective_rank_qk", "attention_entropy"} <= set(result.heads)
    assert all(np.isfinite(values).all() for values in result.layers.values())


def test_losses_are_those_of_the_model(measured):
    config, probes, params, _, result = measured
    for seed in range(2):
        own = jax.tree.map(lambda a: a[seed], params)
        for probe, got in ((probes.train, result.train_loss), (probes.validation, result.val_loss)):
            np.testing.assert_allclose(got[seed], model.cross_entropy(own, probe, config.model), rtol=1e-5)


def test_metrics_are_those_of_the_model_s_own_queries_and_keys(measured):
    config, probes, params, _, result = measured
    own = jax.tree.map(lambda a: a[1], params)
    _, seen = model.apply(own, probes.geometry[:, :-1], config.model, lambda layer, block: layer)
    q, k = (np.asarray(x[1, :, 0], np.float64).reshape(-1, 8) for x in (seen.query, seen.key))
    for name, x in (("participation_ratio_q", q), ("participation_ratio_k", k)):
        eigenvalues = np.linalg.eigvalsh(np.cov(x.T, bias=True))
        expected = eigenvalues.sum() ** 2 / (eigenvalues**2).sum()
        np.testing.assert_allclose(result.heads[name][1, 1, 0], expected, rtol=1e-4)
    attention = np.asarray(seen.attention[1], np.float64)
    entropy = -(attention * np.log(np.where(attention > 0, attention, 1))).sum(-1).mean()
    np.testing.assert_allclose(result.layers["attention_entropy"][1, 1], entropy, rtol=1e-5)
    norm = np.linalg.norm(np.asarray(seen.residual[1], np.float64), axis=-1).mean()
    np.testing.assert_allclose(result.layers["activation_norm_residual"][1, 1], norm, rtol=1e-5)


def test_a_layer_s_value_is_the_mean_over_its_heads(measured):
    *_, result = measured
    for name, heads in result.heads.items():
        np.testing.assert_allclose(result.layers[name], np.asarray(heads).mean(-1), rtol=1e-5)


def test_the_evaluation_program_calls_nothing_outside_xla_and_returns_no_attention(measured):
    config, _, _, compiled, result = measured
    assert "custom-call" not in compiled.as_text()
    assert max(leaf.size for leaf in jax.tree.leaves(result)) <= 2 * 2 * 2


def test_metrics_stay_exact_whatever_trains_the_model(measured):
    config, probes, params, *_ = measured
    own = jax.tree.map(lambda a: a[0], params)
    exact = evaluate.measure(own, probes, config)
    mixed = evaluate.measure(own, probes, tiny.config(compute_dtype="bfloat16", rematerialise=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), exact, mixed)
    jaxpr = str(jax.make_jaxpr(lambda p: evaluate.measure(p, probes, config))(own))
    products = jaxpr.count("dot_general[")
    assert products and jaxpr.count("Precision.HIGHEST") >= products


def test_an_untrained_pair_has_the_alignment_of_its_initialisation():
    for init, expected in (("qk_identical", 1.0), ("disjoint_support", 0.0), ("independent", np.sqrt(2 / (np.pi * 64)))):
        params = initializers.make_params(jax.random.key(0), tiny.config(init=init, width=64).model)
        attention = params["blocks"]["attention"]
        alignment = jax.vmap(metrics.column_alignment)(attention["query"], attention["key"])
        np.testing.assert_allclose(alignment, expected, atol=0.02)

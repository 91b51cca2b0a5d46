"""The metrics together: every key of `attention_geometry`, their invariances, the program they make, the import."""

import doctest
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkgeom_jax import metrics
from qkgeom_jax.metrics import PER_HEAD, PER_LAYER, attention_geometry

B, H, T, K, D, FEW = 3, 2, 12, 4, 7, 2
WEIGHTS_ONLY = {
    *(f"participation_ratio_{x}_weight" for x in "qk"),
    *(f"{norm}_{x}" for norm in ("frobenius_norm", "spectral_norm") for x in "qk"),
    "effective_rank_qk_weight",
    "cosine_similarity",
    "column_alignment",
    "column_alignment_signed",
}


def inputs(seed=0, positions=T, width=K):
    """Activations x and weights of one layer; q = x w_q and k = x w_k split into heads, with different biases."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((B, positions, D))
    w_q, w_k = rng.standard_normal((2, D, H * width))
    return x, w_q, w_k, rng.standard_normal((2, H * width))


def heads(x, w, bias=0.0):
    return np.moveaxis((x @ w + bias).reshape(*x.shape[:2], H, -1), 2, 1)


def arguments(seed=0, **sizes):
    x, w_q, w_k, bias = inputs(seed, **sizes)
    return [np.asarray(a, np.float32) for a in (heads(x, w_q, bias[0]), heads(x, w_k, bias[1]), w_q, w_k)]


@functools.cache
def compiled(positions, width):
    program = functools.partial(attention_geometry, spectrum_sequences=FEW)
    return jax.jit(program).lower(*arguments(positions=positions, width=width)).compile()


def measure(*arrays):
    return jax.tree.map(np.asarray, compiled(arrays[0].shape[2], arrays[0].shape[3])(*arrays))


def ratio(c):
    eigenvalues = np.linalg.eigvalsh(c)
    return eigenvalues.sum() ** 2 / (eigenvalues**2).sum()


def rank(a):
    s = np.linalg.svd(a, compute_uv=False)
    p = s[s > 1e-12 * s[0]] / s.sum()
    return np.exp(-(p * np.log(p)).sum())


def covariance(x, centre=True):
    x = x - x.mean(0) if centre else x
    return x.T @ x / len(x)


def exact_geometry(q, k, w_q, w_k, mask):
    """The same by NumPy in float64, with loops and eigenvalues."""
    q, k, w_q, w_k = (np.asarray(a, np.float64) for a in (q, k, w_q, w_k))
    width = q.shape[-1]
    result = {name: [] for name in PER_HEAD}
    for h in range(q.shape[1]):
        rows, pooled, ranks = [], [], []
        for b in range(len(q)):
            logits = q[b, h] @ k[b, h].T / np.sqrt(width)
            pooled.append(logits[mask])
            if b < FEW:
                ranks.append(rank(q[b, h] @ k[b, h].T))
            for row, allowed in zip(logits, mask):
                p = np.exp(row[allowed] - row[allowed].max())
                p = np.sort(p / p.sum())[::-1]
                rows.append([-(p * np.log(p)).sum(), p[0], p[:5].sum(), p[0] - p[1] if len(p) > 1 else 1.0])
        pooled = np.concatenate(pooled)
        names = ("attention_entropy", "top_1_mass", "top_5_mass", "attention_gap")
        one = dict(zip(names, np.mean(rows, axis=0)))
        one |= {"logit_mean": pooled.mean(), "logit_std": pooled.std(), "logit_variance": pooled.var()}
        one |= {"logit_max": pooled.max(), "effective_rank_qk": np.mean(ranks)}
        columns = slice(h * width, (h + 1) * width)
        one["effective_rank_qk_weight"] = rank(w_q[:, columns] @ w_k[:, columns].T)
        for name, x, w in (("q", q, w_q), ("k", k, w_k)):
            tokens = x[:, h].reshape(-1, width)
            eigenvalues = np.linalg.eigvalsh(covariance(tokens))
            one[f"participation_ratio_{name}"] = ratio(covariance(tokens))
            one[f"participation_ratio_{name}_uncentred"] = ratio(covariance(tokens, centre=False))
            one[f"participation_ratio_{name}_weight"] = ratio(w[:, columns].T @ w[:, columns])
            one[f"effective_rank_{name}"] = rank(tokens - tokens.mean(0))
            one[f"covariance_trace_{name}"] = eigenvalues.sum()
            one[f"covariance_max_{name}"], one[f"covariance_min_{name}"] = eigenvalues[-1], eigenvalues[0]
            one[f"covariance_condition_{name}"] = eigenvalues[-1] / eigenvalues[0]
            one[f"activation_norm_{name}"] = np.sqrt((tokens**2).sum(-1)).mean()
        for name, value in one.items():
            result[name].append(value)
    cosines = (w_q * w_k).sum(0) / np.sqrt((w_q**2).sum(0) * (w_k**2).sum(0))
    result["column_alignment"], result["column_alignment_signed"] = np.abs(cosines).mean(), cosines.mean()
    result["cosine_similarity"] = (w_q * w_k).sum() / np.linalg.norm(w_q) / np.linalg.norm(w_k)
    for name, x, w in (("q", q, w_q), ("k", k, w_k)):
        joint = np.moveaxis(x, 1, 2).reshape(-1, q.shape[1] * width)
        result[f"participation_ratio_{name}_joint"] = ratio(covariance(joint))
        result[f"frobenius_norm_{name}"] = np.linalg.norm(w)
        result[f"spectral_norm_{name}"] = np.linalg.norm(w, 2)
    return result


def assert_same(actual, expected, names=None, rtol=1e-4):
    for name in names or expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol=rtol, atol=1e-6, err_msg=name)


def test_every_metric_equals_float64():
    arrays = arguments()
    results = measure(*arrays)
    assert set(results) == {*PER_HEAD, *PER_LAYER} and len(PER_HEAD) + len(PER_LAYER) == len(results)
    assert all(results[name].shape == (H,) and results[name].dtype == np.float32 for name in PER_HEAD)
    assert all(results[name].shape == () and results[name].dtype == np.float32 for name in PER_LAYER)
    assert_same(results, exact_geometry(*arrays, np.tril(np.ones((T, T), bool))))


@pytest.mark.slow
def test_fewer_positions_than_head_width():
    arrays = arguments(positions=3, width=6)
    exact = exact_geometry(*arrays, np.tril(np.ones((3, 3), bool)))
    results = measure(*arrays)
    assert_same(results, exact, rtol=1e-3)


def test_names_are_the_columns_of_the_results():
    both = ["participation_ratio_{}", "participation_ratio_{}_joint", "participation_ratio_{}_uncentred"]
    both += ["participation_ratio_{}_weight", "effective_rank_{}", "activation_norm_{}", "frobenius_norm_{}"]
    both += ["spectral_norm_{}", *(f"covariance_{x}_{{}}" for x in ("trace", "max", "min", "condition"))]
    columns = {name.format(x) for name in both for x in "qk"}
    columns |= {"attention_entropy", "top_1_mass", "top_5_mass", "attention_gap", "cosine_similarity"}
    columns |= {"column_alignment", "column_alignment_signed", "effective_rank_qk", "effective_rank_qk_weight"}
    columns |= {"logit_mean", "logit_std", "logit_variance", "logit_max"}
    assert {*PER_HEAD, *PER_LAYER} == columns and not {*PER_HEAD} & {*PER_LAYER}


def test_metrics_without_weights_and_with_another_mask():
    q, k, w_q, w_k = arguments()
    mask = np.tril(np.ones((T, T), bool)) & ~np.tril(np.ones((T, T), bool), -3)
    results = attention_geometry(q, k, mask=mask, spectrum_sequences=FEW)
    exact = exact_geometry(q, k, w_q, w_k, mask)
    assert set(results) == {*PER_HEAD, *PER_LAYER} - WEIGHTS_ONLY
    assert_same(results, exact, results)


@pytest.mark.slow
def test_bfloat16_is_taken_to_float32():
    arrays = [jnp.asarray(a).astype(jnp.bfloat16) for a in arguments()]
    results = attention_geometry(*arrays, spectrum_sequences=FEW)
    assert all(value.dtype == jnp.float32 for value in results.values())
    assert_same(results, measure(*(np.asarray(a.astype(jnp.float32)) for a in arrays)), rtol=2e-5)


def test_spectrum_sequences_are_the_first():
    arrays = arguments()
    changed = [a.copy() for a in arrays]
    changed[0][FEW:] += 1
    np.testing.assert_array_equal(measure(*changed)["effective_rank_qk"], measure(*arrays)["effective_rank_qk"])
    changed[0][0] *= np.arange(1, T + 1, dtype=np.float32)[:, None]
    assert np.all(measure(*changed)["effective_rank_qk"] != measure(*arrays)["effective_rank_qk"])


def test_common_rotation_changes_nothing():
    q, k, w_q, w_k = arguments()
    rotation = np.linalg.qr(np.random.default_rng(1).standard_normal((K, K)))[0].astype(np.float32)
    block = np.kron(np.eye(H, dtype=np.float32), rotation)
    before, after = measure(q, k, w_q, w_k), measure(q @ rotation, k @ rotation, w_q @ block, w_k @ block)
    columnwise = {"column_alignment", "column_alignment_signed"}
    assert_same(after, before, set(before) - columnwise)
    assert abs(after["column_alignment"] - before["column_alignment"]) > 1e-3


def test_a_gauge_leaves_attention_but_moves_weights_and_activations():
    """W_Q M and W_K M^-T, per head, are the same attention."""
    x, w_q, w_k, _ = inputs()
    gauge = np.eye(K) + 0.5 * np.random.default_rng(2).standard_normal((K, K))
    block, inverse = np.kron(np.eye(H), gauge), np.kron(np.eye(H), np.linalg.inv(gauge).T)
    before = measure(*(np.float32(a) for a in (heads(x, w_q), heads(x, w_k), w_q, w_k)))
    w_q, w_k = w_q @ block, w_k @ inverse
    after = measure(*(np.float32(a) for a in (heads(x, w_q), heads(x, w_k), w_q, w_k)))
    unchanged = {name for name in before if name.startswith(("attention_", "top_", "logit_", "effective_rank_qk"))}
    assert_same(after, before, unchanged, rtol=1e-3)
    moved = set(before) - unchanged
    assert {"participation_ratio_q", "participation_ratio_k_weight", "column_alignment", "spectral_norm_q"} < moved
    for name in moved:
        assert np.all(np.abs(after[name] / before[name] - 1) > 1e-3), name


@pytest.mark.parametrize(("scale_q", "scale_k"), [(1e-20, 1e-20), (1e18, 1e18), (1e18, 1e-20)])
def test_extreme_scales(scale_q, scale_k):
    q, k, w_q, w_k = arguments()
    scaled = (np.float32(a) * np.float32(s) for a, s in zip((q, k, w_q, w_k), (scale_q, scale_k) * 2))
    before, after = measure(q, k, w_q, w_k), measure(*scaled)
    free = [name for name in before if name.startswith(("participation_ratio", "effective_rank", "c"))]
    free = [name for name in free if not name.startswith("covariance") or "condition" in name]
    assert len(free) == 8 + 4 + 2 + 3
    assert_same(after, before, free)
    # the square of 1e18 * 1e18 is no float32
    assert all(np.all(np.isfinite(value)) for name, value in after.items() if name != "logit_variance")
    for name, scale in (("activation_norm_q", scale_q), ("frobenius_norm_k", scale_k), ("spectral_norm_q", scale_q)):
        np.testing.assert_allclose(after[name] / np.float32(scale), before[name], rtol=1e-5)


def test_degenerate_inputs_have_stated_values():
    q, k, w_q, w_k = arguments()
    nothing = measure(0 * q, 0 * k, 0 * w_q, 0 * w_k)
    lengths = np.arange(1, T + 1)
    np.testing.assert_allclose(nothing["attention_entropy"], np.log(lengths).mean(), rtol=1e-6)
    zero = {name for name in nothing if not name.startswith(("attention_", "top_", "covariance_condition"))}
    assert all(np.all(nothing[name] == 0) for name in zero)
    assert all(np.all(nothing[f"covariance_condition_{x}"] == np.inf) for x in "qk")
    equal = measure(np.broadcast_to(q[:1, :, :1], q.shape).copy(), k, w_q, w_k)
    assert np.all(equal["participation_ratio_q"] == 0) and np.all(equal["effective_rank_q"] == 0)
    np.testing.assert_allclose(equal["effective_rank_qk"], 1, rtol=1e-5)
    np.testing.assert_allclose(equal["participation_ratio_q_uncentred"], 1, rtol=1e-5)


def test_one_token():
    one = attention_geometry(jnp.full((1, 1, 1, 3), 2.0), jnp.full((1, 1, 1, 3), 0.5), jnp.eye(3), jnp.eye(3))
    finite = {name: float(value.item()) for name, value in one.items() if "condition" not in name}
    assert all(np.isfinite(value) for value in finite.values())
    assert [finite[name] for name in ("attention_entropy", "top_1_mass", "attention_gap")] == [0, 1, 1]
    assert finite["participation_ratio_q"] == 0 and finite["logit_std"] == 0
    assert finite["effective_rank_qk"] == pytest.approx(1, abs=1e-5)
    assert finite["effective_rank_qk_weight"] == pytest.approx(3, abs=1e-5)


def test_a_head_that_is_not_finite_stays_alone():
    arrays = arguments()
    before = measure(*arrays)
    arrays[0][1, 0, 2, 1] = np.nan
    after = measure(*arrays)
    for name in set(PER_HEAD) - WEIGHTS_ONLY:
        if name.endswith("_k") or "_k_" in name or name == "effective_rank_qk_weight":
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)
        else:
            assert np.isnan(after[name][0]), name
            np.testing.assert_allclose(after[name][1], before[name][1], rtol=1e-6, err_msg=name)


def test_vmap_over_seeds_equals_a_loop():
    stacked = [np.stack(group) for group in zip(arguments(0), arguments(1))]
    together = jax.jit(jax.vmap(functools.partial(attention_geometry, spectrum_sequences=FEW)))(*stacked)
    for seed in range(2):
        assert_same({name: value[seed] for name, value in together.items()}, measure(*arguments(seed)), rtol=1e-5)


@pytest.mark.slow
def test_operation_by_operation_equals_the_program():
    arrays = [a[:1, :, :5] if a.ndim == 4 else a for a in arguments()]
    program = attention_geometry(*arrays)
    with jax.disable_jit():
        assert_same(attention_geometry(*arrays), program, rtol=1e-5)


@pytest.mark.slow
def test_gradient_reaches_queries_and_keys():
    def loss(q, k):
        results = attention_geometry(q, k, spectrum_sequences=FEW)
        return sum(jnp.sum(results[name]) for name in ("participation_ratio_k", "attention_entropy", "effective_rank_qk"))

    q, k, *_ = arguments()
    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1)))(q, k):
        assert np.all(np.isfinite(gradient)) and np.max(np.abs(gradient)) > 0


def equations(jaxpr):
    """All equations, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def test_every_product_is_at_the_highest_precision():
    highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    a = jnp.ones((3, 40, 4))
    programs = [jax.make_jaxpr(attention_geometry)(*arguments())]
    programs += [jax.make_jaxpr(f)(a) for f in (metrics.svd, metrics.qr, metrics.singular_values, metrics.spectral_norm)]
    programs += [jax.make_jaxpr(f)(a, a) for f in (metrics.effective_rank_qk, metrics.effective_rank_qk_weight)]
    functions = (metrics.participation_ratio, metrics.participation_ratio_weight, metrics.covariance_statistics)
    programs += [jax.make_jaxpr(f)(a) for f in (*functions, metrics.effective_rank_activations)]
    programs.append(jax.make_jaxpr(jax.grad(lambda x: metrics.singular_values(x).sum()))(a))
    for program in programs:
        products = [e for e in equations(program.jaxpr) if e.primitive.name == "dot_general"]
        assert products and all(product.params["precision"] == highest for product in products)
    plain = jax.make_jaxpr(jnp.dot)(a[0], a[0].T)
    assert [e.params["precision"] for e in equations(plain.jaxpr) if e.primitive.name == "dot_general"] == [None]


def test_the_program_holds_no_custom_call():
    assert "custom-call" not in compiled(T, K).as_text()
    lapack = jax.jit(jnp.linalg.svd).lower(jnp.ones((2, 4, 4))).compile().as_text()
    assert "custom-call" in lapack


def test_bad_arguments_are_named():
    q, k, w_q, w_k = arguments()
    bad = [
        ((q, k[:, :1]), {}, r"\(3, 1, 12, 4\)"),
        ((q[0], k[0]), {}, r"\(2, 12, 4\)"),
        ((q, k, w_q), {}, "w_k"),
        ((q, k, w_q, w_k[:3]), {}, r"\(3, 8\)"),
        ((q, k, w_q[:, :6], w_k[:, :6]), {}, "need 8 columns"),
        ((q, k), {"mask": np.ones((3, 3), bool)}, r"mask.*\(3, 3\)"),
        ((q, k), {"mask": np.ones((T, T))}, "mask is float.*boolean"),
        ((q, k), {"spectrum_sequences": 0}, "spectrum_sequences is 0"),
    ]
    for positional, named, message in bad:
        with pytest.raises(ValueError, match=message):
            attention_geometry(*positional, **named)


@pytest.mark.parametrize("name", [name for name in metrics.__all__ if name not in ("PER_HEAD", "PER_LAYER")])
def test_docstring(name):
    function = getattr(metrics, name)
    assert all(part in function.__doc__ for part in ("Args:", "Returns:", "Source:"))
    examples = doctest.DocTestParser().get_doctest(
        function.__doc__, {"jax": jax, "jnp": jnp, name: function}, name, None, None
    )
    assert examples.examples and doctest.DocTestRunner().run(examples).failed == 0


IMPORT = """
import os, sys, threading
import jax, jax.numpy
modules, environment, threads = set(sys.modules), dict(os.environ), threading.active_count()
config = {name: getattr(jax.config, name) for name in ("jax_enable_x64", "jax_default_matmul_precision")}
import qkgeom_jax.metrics
print(*sorted(set(sys.modules) - modules), sep="\\n")
assert dict(os.environ) == environment and threading.active_count() == threads
assert config == {name: getattr(jax.config, name) for name in config}
assert not jax._src.xla_bridge.backends_are_initialized()
"""


def test_import_loads_nothing_heavy_and_changes_nothing():
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.run([sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    added = run.stdout.split()
    assert "qkgeom_jax.metrics" in added
    foreign = {name.partition(".")[0] for name in added} - {"qkgeom_jax", "jax", "jaxlib", "numpy"}
    assert foreign <= set(sys.stdlib_module_names), foreign
    assert {name for name in added if name.startswith("qkgeom_jax")} == {
        "qkgeom_jax", "qkgeom_jax.metrics", *(f"qkgeom_jax.metrics.{x}" for x in ("attention", "linalg", "spectra", "weights")),
    }  # fmt: skip

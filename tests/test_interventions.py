"""Each intervention on hand-made trees, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qkgeom_jax.interventions import (
    at,
    between,
    blend,
    change_spectrum,
    every,
    forced_k_contraction,
    freeze,
    k_spectrum_clamp,
    on,
    project,
    qk_align,
    qk_decouple,
    random_rotation,
    with_norm,
)

# Six layers, so that one compiled decomposition serves most tests.
L, D = 6, 6
KEY, QUERY = on("attention/key", layout="bio"), on("attention/query", layout="bio")
PER_HEAD = on("attention/key", layout="bio", heads=2)


def gaussian(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make_tree(dtype=jnp.float32):
    attention = {name: gaussian(L, D, D, seed=i).astype(dtype) for i, name in enumerate(("query", "key", "value"))}
    return {"attention": attention, "bias": gaussian(D, seed=9).astype(dtype)}


def apply_once(tx, params, updates, state=None, **extra):
    """One update of `sgd(1.0)` and then `tx`: params - updates, changed."""
    chain = optax.chain(optax.sgd(1.0), tx)
    new, state = chain.update(updates, chain.init(params) if state is None else state, params, **extra)
    return optax.apply_updates(params, new), state


def spectrum(w):
    return np.linalg.svd(np.asarray(w, np.float64), compute_uv=False)


def equal(a, b):
    """Whether two arrays have the same bits."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def others_equal(a, b):
    """Whether all leaves but W_K have the same bits."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
    return all(equal(x, y) for (path, x), y in pairs if "key" not in str(path))


# When


def test_conditions_count_completed_updates():
    fires = lambda when: [n for n in range(1, 13) if when(n)]  # noqa: E731
    assert fires(every(4)) == [4, 8, 12]
    assert fires(between(4, 8)) == [5, 6, 7, 8], "one epoch of four steps, after one epoch"
    assert fires(every(4) & between(4)) == [8, 12]
    assert fires(at(5)) == [5]
    assert fires(between(3, 3)) == []


@pytest.mark.parametrize("period", [0, -1, 2.5, True])
def test_a_period_that_is_no_count_is_refused(period):
    with pytest.raises(ValueError, match="period is"):
        every(period)


@pytest.mark.parametrize("counted", ["by the state", "by the step"])
def test_a_projection_acts_when_it_is_due_and_never_else(counted):
    tx = project(lambda w: 0 * w, KEY, when=every(3) & between(3))
    params, state = make_tree(), None
    ones = jax.tree.map(jnp.ones_like, params)
    for n in range(1, 8):
        before = params
        params, state = apply_once(tx, params, ones, state, **({"step": n} if counted == "by the step" else {}))
        expected = np.zeros((L, D, D), np.float32) if n == 6 else np.asarray(before["attention"]["key"]) - 1
        np.testing.assert_allclose(params["attention"]["key"], expected, atol=1e-6)
        assert others_equal(params, jax.tree.map(lambda p: p - 1, before))


def test_a_given_step_goes_before_the_counter_which_goes_on_from_it():
    tx = optax.chain(optax.identity(), project(lambda w: 0 * w, KEY, when=at(11)))
    params = make_tree()
    zeros = jax.tree.map(jnp.zeros_like, params)
    _, state = tx.update(zeros, tx.init(params), params, step=10)
    updates, state = tx.update(zeros, state, params)
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["attention"]["key"], 0)
    assert int(state[1].count) == 11


# Which leaves, in which layout


@pytest.mark.parametrize(
    "rule, expected",
    [
        ("attention/key", {"attention/key"}),
        ("key", {"attention/key"}),
        ("attention/*", {"attention/query", "attention/key", "attention/value"}),
        (("query", "key"), {"attention/query", "attention/key"}),
        (lambda tree: jax.tree.map(lambda leaf: leaf.ndim == 3, tree),
         {"attention/query", "attention/key", "attention/value"}),
        ({"attention": {"query": False, "key": True, "value": False}, "bias": False}, {"attention/key"}),
    ],
)  # fmt: skip
def test_rules_and_masks_name_leaves(rule, expected):
    assert {leaf.path for leaf in on(rule, layout="bio").find(make_tree())} == expected


@pytest.mark.parametrize(
    "leaves, message",
    [
        (on("attention/keys", layout="bio"), "attention/keys' matches no leaf; the tree's leaves: attention/key,"),
        (on("ey", layout="bio"), "matches no leaf"),
        (on(lambda tree: jax.tree.map(lambda leaf: False, tree)), "the mask matches no leaf"),
        (on([True, False]), "the mask has 2 leaves and the parameters have 4"),
        (on("attention/key"), r"attention/key has shape \(6, 6, 6\)"),
        (on("attention/key", layout="io"), r"layout is 'io', 2 axes; attention/key has shape \(6, 6, 6\)"),
        (on("attention/key", layout="bio", heads=4), "heads is 4; attention/key has 6 output features"),
        (on("bias"), r"bias has shape \(6,\)"),
    ],
)
def test_a_rule_or_layout_that_does_not_fit_is_refused_at_init(leaves, message):
    with pytest.raises(ValueError, match=message):
        project(lambda w: w, leaves).init(make_tree())


@pytest.mark.parametrize(
    "options", [{"layout": "bxo"}, {"layout": "bo"}, {"layout": ""}, {"layout": 3}, {"heads": 0}, {"heads": 2.0}]
)
def test_a_layout_of_other_letters_is_refused(options):
    with pytest.raises(ValueError, match="allowed"):
        on("key", **options)


def test_leaves_that_are_not_real_floats_are_refused():
    with pytest.raises(ValueError, match="table has dtype int32"):
        project(lambda w: w, on("table")).init({"table": jnp.ones([2, 2], jnp.int32)})
    with pytest.raises(ValueError, match="takes what on"):
        project(lambda w: w, "table")


@pytest.mark.parametrize(
    "shape, layout, heads, head_of",
    [
        ((5, 2, 3), "ioo", 2, lambda w, h: w[:, h, :]),  # a Flax attention kernel [D, H, K]
        ((6, 5), "oi", 2, lambda w, h: w[3 * h : 3 * h + 3].T),  # a weight [out, in]
        ((2, 3, 5), "iio", 1, lambda w, h: w.reshape(6, 5)),
    ],
)
def test_a_layout_says_what_the_matrices_are(shape, layout, heads, head_of):
    w = gaussian(*shape)
    (leaf,) = on("w", layout=layout, heads=heads).find({"w": w})
    matrices = leaf.matrices(w)
    np.testing.assert_array_equal(leaf.array(matrices, shape), w)
    for h in range(heads):
        np.testing.assert_array_equal(matrices[h] if heads > 1 else matrices, head_of(w, h))


@pytest.mark.parametrize("layout, heads", [("bio", 1), ("bio", 4), ("bioo", 4), ("obi", 2), ("oibo", 2), ("bbio", 2)])
def test_matrices_go_back_to_where_they_came_from(layout, heads):
    w = gaussian(*(4, 8, 2, 6)[: len(layout)]) if len(layout) == 4 else gaussian(4, 6, 8)
    (leaf,) = on("w", layout=layout, heads=heads).find({"w": w})
    np.testing.assert_array_equal(leaf.array(leaf.matrices(w), w.shape), w)


def test_leaves_of_one_shape_are_changed_in_one_call():
    params = {f"block_{i}": {"key": gaussian(3, 4, seed=i)} for i in range(3)} | {"key": gaussian(2, 2)}
    seen = []

    def change(w):
        seen.append(w.shape)
        return -w

    tx = project(change, on("key"))
    state = tx.init(params)
    seen.clear()
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
    assert seen == [(3, 3, 4), (1, 2, 2)]
    jax.tree.map(lambda p, q: np.testing.assert_allclose(q, -p), params, optax.apply_updates(params, updates))


# What is refused, and what is kept


def every_transformation():
    yield "project", project(lambda w: w, KEY)
    yield "freeze", freeze(KEY)
    yield "k_spectrum_clamp", k_spectrum_clamp(KEY)
    yield "forced_k_contraction", forced_k_contraction(KEY, rank=2)
    yield "qk_decouple", qk_decouple(KEY, when=at(5), key=jax.random.key(0))
    yield "qk_align", qk_align(QUERY, KEY)


@pytest.mark.parametrize("name, tx", list(every_transformation()))
def test_misuse_is_refused_by_name(name, tx):
    params = make_tree()
    zeros = jax.tree.map(jnp.zeros_like, params)
    chain = optax.chain(optax.scale(-1.0), tx)
    state = chain.init(params)
    with pytest.raises(ValueError, match=f"{name} needs params"):
        chain.update(zeros, state)
    with pytest.raises(ValueError, match=f"{name} got the extra argument 'stpe'.*did you mean step"):
        chain.update(zeros, state, params, stpe=3)
    with pytest.raises(ValueError, match=r"step has shape \(3,\)"):
        chain.update(zeros, state, params, step=jnp.arange(3))
    with pytest.raises(ValueError, match="dtype float32"):
        chain.update(zeros, state, params, step=jnp.float32(3))
    with pytest.raises(ValueError, match="leaves"):
        chain.update(zeros, state, {"other": params["bias"]})
    chain.update(zeros, state, params, value=jnp.float32(1.0), step=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: k_spectrum_clamp(KEY, strength=1.5),
        lambda: k_spectrum_clamp(KEY, strength=float("nan")),
        lambda: forced_k_contraction(KEY, factor=-0.1),
        lambda: forced_k_contraction(KEY, factor=float("inf")),
        lambda: qk_align(QUERY, KEY, strength=-1),
        lambda: qk_align(QUERY, KEY, sign=0),
    ],
)
def test_values_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="allowed"):
        make()


def test_a_change_of_shape_is_refused_at_init():
    with pytest.raises(ValueError, match=r"change made \(6, 6, 5\) of matrices \(6, 6, 6\)"):
        project(lambda w: w[..., :5], KEY).init(make_tree())


def test_bfloat16_parameters_keep_their_type():
    params = make_tree(jnp.bfloat16)
    for _, tx in every_transformation():
        after, _ = apply_once(tx, params, jax.tree.map(jnp.ones_like, params))
        assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype(jnp.bfloat16)}
    after, _ = apply_once(project(lambda w: w / 3, KEY), params, jax.tree.map(jnp.zeros_like, params))
    before, after = (np.asarray(tree["attention"]["key"], np.float32) for tree in (params, after))
    np.testing.assert_allclose(after, before / 3, rtol=0.02)


def test_the_state_keeps_its_structure_and_types_over_a_scan():
    params = make_tree()
    chain = optax.chain(*(tx for _, tx in every_transformation()))

    def step(carry, n):
        updates, state = chain.update(jax.tree.map(jnp.ones_like, params), *carry[::-1], step=n)
        return (optax.apply_updates(carry[0], updates), state), None

    start = (params, chain.init(params))
    end = jax.eval_shape(lambda c: jax.lax.scan(step, c, jnp.arange(1, 4))[0], start)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), end) == jax.tree.map(lambda a: (a.shape, a.dtype), start)


# The pieces


def degenerate():
    """Six matrices: Gaussian, zero, orthogonal, of rank one, with equal pairs of singular values, NaN."""
    u, v = np.linalg.qr(gaussian(D, D, seed=3))[0], np.linalg.qr(gaussian(D, D, seed=4))[0]
    pairs = u @ np.diag([2, 2, 1, 1, 0, 0]) @ v
    nan = np.full((D, D), np.nan)
    return jnp.asarray(np.stack([gaussian(D, D), np.zeros((D, D)), u, np.outer(u[0], v[0]), pairs, nan]), jnp.float32)


def test_change_spectrum_sets_singular_values_whatever_they_were():
    wanted = np.array([7, 5, 4, 3, 2, 1.0])
    after = change_spectrum(degenerate(), lambda s: jnp.broadcast_to(jnp.asarray(wanted, jnp.float32), s.shape))
    np.testing.assert_allclose(spectrum(after[:5]), np.tile(wanted, (5, 1)), atol=7e-5)
    assert np.isnan(after[5]).all(), "a matrix that is not finite gives NaN, and leaves the others alone"


def test_change_spectrum_of_nothing_is_nothing():
    w = degenerate()
    assert equal(change_spectrum(w, lambda s: s)[:5], w[:5])


def test_blend_is_exact_at_its_ends():
    a, b = gaussian(5), gaussian(5, seed=1)
    assert equal(blend(a, b, 0.0), a) and equal(blend(a, b, 1.0), b)
    np.testing.assert_allclose(blend(a, b, 0.25), 0.75 * np.asarray(a) + 0.25 * np.asarray(b), rtol=1e-6)


def test_with_norm_scales_all_but_a_zero_matrix():
    after = with_norm(degenerate()[:2], jnp.array([2.0, 2.0]))
    np.testing.assert_allclose(np.linalg.norm(after, axis=(-2, -1)), [2, 0], rtol=1e-6)


def test_random_rotations_are_orthogonal_and_without_a_preferred_direction():
    r = np.asarray(random_rotation(jax.random.key(1), 4000, 3), np.float64)
    np.testing.assert_allclose(r @ r.swapaxes(-1, -2), np.tile(np.eye(3), (4000, 1, 1)), atol=1e-5)
    # Haar measure: entries have mean 0 and mean square 1/n, the trace mean square 1; both determinants are as likely
    error = 5 / np.sqrt(4000)
    np.testing.assert_allclose(r.mean(0), 0, atol=error)
    np.testing.assert_allclose((r**2).mean(0), 1 / 3, atol=error)
    assert abs(np.trace(r, axis1=1, axis2=2).var() - 1) < 2 * error
    assert abs(np.linalg.det(r).mean()) < error


# The interventions of Table 2


@pytest.fixture(scope="module")
def clamped():
    params, updates = make_tree(), jax.tree.map(lambda p: 0.3 * jnp.flip(p), make_tree())
    return params, updates, *apply_once(k_spectrum_clamp(KEY, when=at(1)), params, updates)


def test_clamp_restores_singular_values_and_keeps_the_vectors(clamped):
    params, updates, after, _ = clamped
    start, update = (np.asarray(tree["attention"]["key"], np.float64) for tree in (params, updates))
    u, s, vt = np.linalg.svd(start - update)
    assert np.abs(s - spectrum(start)).max() > 0.1, "the update did change them"
    expected = (u * spectrum(start)[:, None, :]) @ vt
    np.testing.assert_allclose(after["attention"]["key"], expected, atol=1e-5)
    np.testing.assert_allclose(spectrum(after["attention"]["key"]), spectrum(start), atol=1e-5)
    assert others_equal(after, jax.tree.map(lambda p, u: p - u, params, updates))


def test_clamp_twice_equals_once(clamped):
    params, _, after, state = clamped
    twice = change_spectrum(after["attention"]["key"], lambda s: state[1].start[0][0])
    np.testing.assert_allclose(twice, after["attention"]["key"], atol=5e-6)


def test_a_partial_clamp_goes_part_of_the_way():
    params, updates = make_tree(), jax.tree.map(lambda p: 0.3 * jnp.flip(p), make_tree())
    moved = np.asarray(params["attention"]["key"] - updates["attention"]["key"])
    after, _ = apply_once(k_spectrum_clamp(KEY, when=at(1), strength=0.25), params, updates)
    expected = 0.75 * spectrum(moved) + 0.25 * spectrum(params["attention"]["key"])
    np.testing.assert_allclose(spectrum(after["attention"]["key"]), expected, atol=1e-5)
    after, _ = apply_once(k_spectrum_clamp(KEY, when=at(1), strength=0.0), params, updates)
    assert equal(after["attention"]["key"], moved)


def test_contraction_scales_the_tail_and_keeps_the_norm():
    params = make_tree()
    zeros = jax.tree.map(jnp.zeros_like, params)
    before = spectrum(params["attention"]["key"])
    for rank in (2, 2 / 6 + 1e-9):
        after, _ = apply_once(forced_k_contraction(KEY, rank=rank, factor=0.05, when=at(1)), params, zeros)
        expected = before * np.array([1, 1, 0.05, 0.05, 0.05, 0.05])
        expected *= np.linalg.norm(before, axis=-1, keepdims=True) / np.linalg.norm(expected, axis=-1, keepdims=True)
        np.testing.assert_allclose(spectrum(after["attention"]["key"]), expected, atol=1e-5)
        assert others_equal(after, params)


def test_contraction_by_one_changes_nothing():
    params, tx = make_tree(), forced_k_contraction(KEY, rank=2, factor=1.0, when=at(1))
    after, _ = apply_once(tx, params, jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_allclose(after["attention"]["key"], params["attention"]["key"], atol=1e-5)


@pytest.mark.parametrize("leaves, rank", [(PER_HEAD, 3), *((KEY, rank) for rank in (6, 32, 0, 2.5, float("nan")))])
def test_a_rank_that_leaves_no_tail_is_refused(leaves, rank):
    with pytest.raises(ValueError, match="rank is"):
        forced_k_contraction(leaves, rank=rank).init(make_tree())


@pytest.mark.parametrize("make", [k_spectrum_clamp, functools.partial(forced_k_contraction, rank=0.5)])
def test_degenerate_matrices_stay_finite(make):
    params = {"key": degenerate()}
    after, _ = apply_once(make(on("key", layout="bio"), when=at(1)), params, jax.tree.map(jnp.zeros_like, params))
    assert np.isfinite(after["key"][:5]).all() and np.isnan(after["key"][5]).all()


@pytest.mark.slow
def test_a_matrix_per_head():
    params, updates = make_tree(), jax.tree.map(lambda p: 0.3 * jnp.flip(p), make_tree())
    after, _ = apply_once(k_spectrum_clamp(PER_HEAD, when=at(1)), params, updates)
    for h in range(2):
        block = np.s_[:, :, 3 * h : 3 * h + 3]
        start, end = params["attention"]["key"][block], after["attention"]["key"][block]
        np.testing.assert_allclose(spectrum(end), spectrum(start), atol=1e-5)
    assert np.abs(spectrum(after["attention"]["key"]) - spectrum(params["attention"]["key"])).max() > 1e-3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_freezing_is_exact_under_weight_decay_and_momentum(dtype):
    params = make_tree(dtype)
    tx = optax.chain(optax.adamw(0.1, weight_decay=0.5), freeze(on(("key", "bias"))))

    @jax.jit
    def train(params):
        def step(carry, n):
            grads = jax.tree.map(lambda p: jnp.sin(7 * p) + 0.1, carry[0])
            updates, state = tx.update(grads, carry[1], carry[0], step=n)
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(1, 31))[0][0]

    after = train(params)
    assert equal(after["attention"]["key"], params["attention"]["key"]) and equal(after["bias"], params["bias"])
    assert not equal(after["attention"]["query"], params["attention"]["query"])


def test_freezing_keeps_the_sign_of_zero():
    params = make_tree()
    params["attention"]["key"] = params["attention"]["key"].at[0, 0, :2].set(jnp.array([0.0, -0.0]))
    after, _ = apply_once(freeze(KEY), params, jax.tree.map(jnp.ones_like, params))
    assert equal(after["attention"]["key"], params["attention"]["key"])


@pytest.mark.parametrize("leaves, blocks", [(KEY, 1), (PER_HEAD, 2)])
def test_decouple_rotates_once_and_keeps_the_spectrum(leaves, blocks):
    params, state = make_tree(), None
    zeros = jax.tree.map(jnp.zeros_like, params)
    history = [params]
    tx = qk_decouple(leaves, when=at(3), key=jax.random.key(2))
    for _ in range(5):
        params, state = apply_once(tx, params, zeros, state)
        history.append(params)
    moves = [not equal(a["attention"]["key"], b["attention"]["key"]) for a, b in zip(history, history[1:])]
    assert moves == [False, False, True, False, False]
    before, after = (np.asarray(tree["attention"]["key"], np.float64) for tree in (history[0], history[-1]))
    rotation = np.linalg.solve(before, after)
    np.testing.assert_allclose(rotation @ rotation.swapaxes(-1, -2), np.tile(np.eye(D), (L, 1, 1)), atol=2e-4)
    assert np.abs(rotation[0] - rotation[1]).max() > 0.1, "each layer has its own"
    np.testing.assert_allclose(spectrum(after), spectrum(before), atol=1e-5)
    outside = np.kron(np.eye(blocks), np.ones((D // blocks, D // blocks))) == 0
    np.testing.assert_allclose(rotation[:, outside], 0, atol=2e-4)
    assert np.abs(rotation[:, ~outside]).max() > 0.1 and others_equal(history[0], history[-1])


def test_decouple_takes_its_key_from_the_update_first():
    params = make_tree()
    zeros = jax.tree.map(jnp.zeros_like, params)
    with pytest.raises(ValueError, match="needs a key"):
        apply_once(qk_decouple(KEY, when=at(1)), params, zeros)
    given, _ = apply_once(qk_decouple(KEY, when=at(1)), params, zeros, key=jax.random.key(4))
    both, _ = apply_once(qk_decouple(KEY, when=at(1), key=jax.random.key(5)), params, zeros, key=jax.random.key(4))
    own, _ = apply_once(qk_decouple(KEY, when=at(1), key=jax.random.key(5)), params, zeros)
    assert equal(given["attention"]["key"], both["attention"]["key"])
    assert not np.allclose(given["attention"]["key"], own["attention"]["key"])


def penalty(q, k):
    cosines = (q * k).sum(-2) / np.sqrt((q * q).sum(-2) * (k * k).sum(-2))
    return (1 - cosines**2).mean(-1).sum()


@pytest.mark.parametrize("sign", [1, -1])
def test_align_adds_the_gradient_of_its_penalty(sign):
    params = make_tree()
    gradients = jax.tree.map(jnp.ones_like, params)
    tx = qk_align(QUERY, KEY, strength=0.5, sign=sign)
    after, _ = tx.update(gradients, tx.init(params), params)
    q, k = (np.asarray(params["attention"][name], np.float64) for name in ("query", "key"))
    for name in ("query", "key"):
        slope = np.zeros_like(q)
        for index in np.ndindex(q.shape):
            step = np.zeros_like(q)
            step[index] = 1e-5
            d_q, d_k = (step, 0) if name == "query" else (0, step)
            slope[index] = (penalty(q + d_q, k + d_k) - penalty(q - d_q, k - d_k)) / 2e-5
        np.testing.assert_allclose(after["attention"][name], 1 + sign * 0.5 * slope, atol=1e-6)
    assert equal(after["attention"]["value"], gradients["attention"]["value"])


def test_align_pulls_columns_together_and_its_negative_apart():
    def size_of_cosines(sign):
        tx = optax.chain(qk_align(QUERY, KEY, strength=1.0, sign=sign), optax.sgd(1.0))
        params = make_tree()
        for _ in range(20):
            updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
            params = optax.apply_updates(params, updates)
        return 1 - penalty(*(np.asarray(params["attention"][name], np.float64) for name in ("query", "key"))) / L

    start = 1 - penalty(*(np.asarray(make_tree()["attention"][name], np.float64) for name in ("query", "key"))) / L
    assert size_of_cosines(-1) < start - 0.05 and size_of_cosines(1) > start + 0.05


def test_align_is_finite_where_columns_are_zero_equal_or_orthogonal():
    eye = jnp.eye(D)
    params = {"q": jnp.stack([eye, eye, 0 * eye, eye]), "k": jnp.stack([eye, jnp.roll(eye, 1, 0), eye, 0 * eye])}
    tx = qk_align(on("q", layout="bio"), on("k", layout="bio"), strength=1.0)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    for leaf in jax.tree.leaves(updates):
        np.testing.assert_array_equal(leaf, 0)


def test_align_pairs_matrices():
    with pytest.raises(ValueError, match="they go in pairs"):
        qk_align(on("query", layout="bio"), on("key")).init({"query": gaussian(2, 3, 3), "key": gaussian(3, 3)})
    with pytest.raises(ValueError, match="attention/key is both query and key"):
        qk_align(on(("query", "key"), layout="bio"), on(("key", "value"), layout="bio")).init(make_tree())


# Under vmap

BRANCHED = ("k_spectrum_clamp", "forced_k_contraction", "qk_decouple")


def make_step(tx):
    def step(params, state, n):
        updates, state = tx.update(jax.tree.map(lambda p: 0.1 * jnp.cos(9 * p), params), state, params, step=n)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.slow
def test_three_seeds_together_equal_three_alone():
    seeds = {"key": jnp.stack([gaussian(2, D, D, seed=s) for s in range(3)])}
    tx = optax.chain(optax.sgd(1.0), k_spectrum_clamp(on("key", layout="bio"), when=every(2)))

    def train(params, init, step):
        return jax.lax.scan(lambda c, n: (step(*c, n), None), (params, init(params)), jnp.arange(1, 7))[0][0]["key"]

    together = jax.jit(lambda p: train(p, jax.vmap(tx.init), jax.vmap(make_step(tx), in_axes=(0, 0, None))))
    alone = jax.jit(lambda p: train(p, tx.init, make_step(tx)))
    mapped = together(seeds)
    solo = [alone(jax.tree.map(lambda leaf, seed=seed: leaf[seed], seeds)) for seed in range(3)]
    np.testing.assert_allclose(mapped, jnp.stack(solo), atol=2e-6)
    with_nan = together({"key": seeds["key"].at[1].set(jnp.nan)})
    assert np.isnan(with_nan[1]).all() and equal(with_nan[0], mapped[0]) and equal(with_nan[2], mapped[2])


@pytest.mark.parametrize("name, tx", [pair for pair in every_transformation() if pair[0] in BRANCHED])
def test_a_step_that_is_not_batched_keeps_the_branch_under_vmap(name, tx):
    seeds = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), make_tree())
    state = jax.eval_shape(jax.vmap(tx.init), seeds)

    def program(counted_by_step):
        step = make_step(tx) if counted_by_step else lambda p, s, n: make_step(tx)(p, s, None)
        mapped = jax.vmap(step, in_axes=(0, 0, None))
        chunk = lambda p, s: jax.lax.scan(lambda c, n: (mapped(*c, n), None), (p, s), jnp.arange(1, 4))[0]  # noqa: E731
        return str(jax.make_jaxpr(chunk)(seeds, state))

    assert " cond[" in program(True)
    assert " cond[" not in program(False), "the counter of the state is batched: what the docstring warns of"

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from qkgeom_jax import initializers, model
from qkgeom_jax.config import INITIALIZATIONS

make_params = jax.jit(initializers.make_params, static_argnums=1)
apply = jax.jit(model.apply, static_argnums=(2, 3))


@pytest.fixture(scope="module")
def setup():
    config = tiny.config().model
    params = make_params(jax.random.key(0), config)
    return config, params, jnp.asarray(tiny.tokens(24).reshape(3, 8).astype(np.int32))


def everything(layer, block):
    return layer


def numpy_forward(params, tokens, config):
    """The model again, in float64 NumPy, one sequence and one head at a time."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def norm(x, q):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * q["scale"] + q["bias"]

    out = []
    for sequence in np.asarray(tokens):
        x = p["token_embedding"][sequence] + p["position_embedding"][: len(sequence)]
        for layer in range(config.depth):
            b = jax.tree.map(lambda a: a[layer], p["blocks"])
            y = norm(x, b["norm_1"])
            mixed = np.zeros_like(x)
            for head in range(config.heads):
                columns = slice(head * config.head_width, (head + 1) * config.head_width)
                q, k, v = (y @ b["attention"][name][:, columns] for name in ("query", "key", "value"))
                for t in range(len(sequence)):
                    logits = k[: t + 1] @ q[t] / math.sqrt(config.head_width)
                    weights = np.exp(logits - logits.max())
                    mixed[t, columns] = weights / weights.sum() @ v[: t + 1]
            x = x + mixed @ b["attention"]["output"]
            h = norm(x, b["norm_2"]) @ b["mlp"]["input"] + b["mlp"]["input_bias"]
            gelu = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
            x = x + gelu @ b["mlp"]["output"] + b["mlp"]["output_bias"]
        out.append(norm(x, p["norm"]) @ p["head"])
    return np.array(out)


def test_logits_equal_an_independent_float64_computation(setup):
    config, params, tokens = setup
    # Biases and scales away from 0 and 1, so that a forgotten one would show.
    params = jax.tree.map(lambda a: a + 0.1 * jnp.cos(jnp.arange(a.size, dtype=jnp.float32)).reshape(a.shape), params)
    got, observed = apply(params, tokens, config)
    assert observed is None and got.shape == (3, 8, 11) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, numpy_forward(params, tokens, config), atol=2e-5)


def test_no_position_sees_a_later_token(setup):
    config, params, tokens = setup

    def logit_at(embedded, position):
        """Logits of one position as a function of a perturbation at every position."""
        shifted = params | {"position_embedding": params["position_embedding"] + embedded}
        return apply(shifted, tokens, config)[0][:, position].sum()

    zero = jnp.zeros_like(params["position_embedding"])
    gradient = jax.jit(jax.grad(logit_at))
    for position in range(8):
        reach = np.abs(gradient(zero, position)).sum(-1)
        assert (reach[position + 1 :] == 0).all() and (reach[: position + 1] > 0).all()


def test_observe_returns_every_layer(setup):
    config, params, tokens = setup
    logits, seen = apply(params, tokens, config, everything)
    plain, _ = apply(params, tokens, config)
    np.testing.assert_allclose(logits, plain, atol=1e-6)
    assert seen.query.shape == seen.key.shape == seen.value.shape == (2, 3, 2, 8, 8)
    assert seen.logits.shape == seen.attention.shape == (2, 3, 2, 8, 8) and seen.residual.shape == (2, 3, 8, 16)
    np.testing.assert_allclose(seen.attention.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(seen.logits, seen.query @ seen.key.swapaxes(-1, -2) / math.sqrt(8), atol=1e-6)
    assert (np.asarray(seen.attention)[..., ~np.tri(8, dtype=bool)] == 0).all()
    embedded = params["token_embedding"][tokens] + params["position_embedding"][None]
    np.testing.assert_allclose(seen.residual[0], embedded)
    assert not np.allclose(seen.query[0], seen.query[1])


def test_untrained_loss_is_near_that_of_a_uniform_guess(setup):
    config, params, _ = setup
    loss = model.cross_entropy(params, jnp.asarray(tiny.tokens(90).reshape(10, 9).astype(np.int32)), config)
    assert abs(float(loss) - math.log(11)) < 0.1


def test_shorter_sequences_pass_and_longer_ones_are_refused(setup):
    config, params, tokens = setup
    whole, _ = apply(params, tokens, config)
    half, _ = apply(params, tokens[:, :4], config)
    np.testing.assert_allclose(half, whole[:, :4], atol=1e-6)
    with pytest.raises(ValueError, match="9 positions; the model's context is 8"):
        model.apply(params, jnp.zeros((1, 9), jnp.int32), config)


def test_rematerialisation_changes_no_gradient(setup):
    config, params, _ = setup
    tokens = jnp.asarray(tiny.tokens(18).reshape(2, 9).astype(np.int32))
    again = tiny.config(rematerialise=True).model
    gradient = jax.jit(jax.grad(model.cross_entropy), static_argnums=2)
    plain, remade = (gradient(params, tokens, c) for c in (config, again))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), plain, remade)


def test_bfloat16_computes_in_bfloat16_and_returns_float32(setup):
    config, params, tokens = setup
    half = tiny.config(compute_dtype="bfloat16").model
    logits, seen = apply(params, tokens, half, everything)
    assert logits.dtype == jnp.float32 and seen.query.dtype == jnp.bfloat16 and seen.logits.dtype == jnp.float32
    exact, _ = apply(params, tokens, config)
    difference = np.abs(logits - exact).max()
    assert 0 < difference < 0.02


# Initialisations


def query_key(init, seed=0, width=64):
    config = tiny.config(init=init, width=width).model
    attention = make_params(jax.random.key(seed), config)["blocks"]["attention"]
    return np.asarray(attention["query"]), np.asarray(attention["key"])


def test_qk_identical_starts_equal_and_layers_differ():
    q, k = query_key("qk_identical")
    assert (q == k).all() and not np.allclose(q[0], q[1])


def test_disjoint_support_reads_disjoint_halves_of_the_input():
    q, k = query_key("disjoint_support")
    for layer in range(2):
        rows_q, rows_k = ((w[layer] != 0).any(1) for w in (q, k))
        assert rows_q.sum() == rows_k.sum() == 32 and not (rows_q & rows_k).any()
    assert ((q[0] != 0).any(1) != (q[1] != 0).any(1)).any(), "every layer draws halves of its own"
    norms = [np.linalg.norm(w) for init in ("disjoint_support", "independent") for w in query_key(init)]
    np.testing.assert_allclose(norms, norms[0], rtol=0.03)


def test_independent_is_xavier_over_the_whole_matrix():
    q, k = query_key("independent")
    bound = math.sqrt(6 / 128)
    for w in (q, k):
        assert np.abs(w).max() <= bound and abs(w.std() - bound / math.sqrt(3)) < 0.003
    assert not np.allclose(q, k)


def test_initialisations_of_one_seed_share_everything_but_queries_and_keys():
    trees = [make_params(jax.random.key(4), tiny.config(init=init).model) for init in INITIALIZATIONS]
    for tree in trees:
        del tree["blocks"]["attention"]["query"], tree["blocks"]["attention"]["key"]
    jax.tree.map(np.testing.assert_array_equal, *trees[:2])
    jax.tree.map(np.testing.assert_array_equal, *trees[1:])


def test_the_scales_of_embeddings_and_mlp():
    params = make_params(jax.random.key(0), tiny.config(depth=8, width=64, vocabulary=200).model)
    for name in ("token_embedding", "head"):
        assert abs(float(params[name].std()) - 0.02) < 0.001
    mlp = params["blocks"]["mlp"]
    assert abs(float(mlp["input"].std()) - 0.02) < 0.001 and abs(float(mlp["output"].std()) - 0.02 / 4) < 0.0003
    assert float(jnp.abs(mlp["input"][0] - mlp["input"][1]).max()) > 0

"""In other people's training loops: Flax NNX, Flax Linen with its TrainState, and a plain pytree in Equinox's layout.

Each model has two attention blocks of width 8 with two heads of 4, and trains with AdamW and a clamp of W_K.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from qkgeom_jax.interventions import every, freeze, k_spectrum_clamp, on, qk_align

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), jnp.float32)
Y = jnp.roll(X, 1, axis=1)
EVERY_THIRD = every(3)


def spectra(kernels):
    """Of [D, ...] kernels, whole."""
    matrices = np.stack([np.asarray(kernel, np.float64).reshape(8, 8) for kernel in kernels])
    return np.linalg.svd(matrices, compute_uv=False)


def check(history):
    """W_K of both blocks before and after each of three steps."""
    start = spectra(history[0])
    for n, kernels in enumerate(history[1:], start=1):
        distance = np.abs(spectra(kernels) - start).max()
        assert distance < 1e-5 if n == 3 else distance > 1e-4, (n, distance)


def test_flax_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([
                nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=rngs) for _ in range(2)
            ])  # fmt: skip

        def __call__(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    model = Model(nnx.Rngs(0))
    clamp = k_spectrum_clamp(on("key/kernel", layout="ioo"), when=EVERY_THIRD)
    tx = optax.chain(optax.adamw(0.01), clamp, freeze(on("query/kernel")))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer, n):
        gradients = nnx.grad(lambda model: jnp.mean((model(X) - Y) ** 2))(model)
        optimizer.update(model, gradients, step=n)

    history = [[block.key.kernel[...] for block in model.blocks]]
    query = np.asarray(model.blocks[1].query.kernel[...])
    for n in range(1, 4):
        train(model, optimizer, n)
        history.append([block.key.kernel[...] for block in model.blocks])
    check(history)
    np.testing.assert_array_equal(model.blocks[1].query.kernel[...], query)


def test_flax_linen_with_its_train_state():
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            for i in range(2):
                x = x + linen.MultiHeadDotProductAttention(num_heads=2, name=f"block_{i}")(x)
            return x

    model = Model()
    clamp = k_spectrum_clamp(on("key/kernel", layout="ioo"), when=EVERY_THIRD)
    state = TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), X), tx=optax.chain(optax.adamw(0.01), clamp)
    )

    @jax.jit
    def train(state):
        gradients = jax.grad(lambda params: jnp.mean((state.apply_fn(params, X) - Y) ** 2))(state.params)
        return state.apply_gradients(grads=gradients)  # which can pass no step: the state counts

    def kernels(state):
        return [state.params["params"][f"block_{i}"]["key"]["kernel"] for i in range(2)]

    history = [kernels(state)]
    for _ in range(3):
        state = train(state)
        history.append(kernels(state))
    check(history)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    weight: jax.Array  # [out, in]

    def __call__(self, x):
        return x @ self.weight.T


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Attention:
    query: Linear
    key: Linear
    value: Linear
    scale: jax.Array | None = None

    def __call__(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2)) @ v


def make_plain():
    weights = jnp.asarray(np.random.default_rng(1).normal(0, 0.4, (2, 3, 8, 8)), jnp.float32)
    return [Attention(*map(Linear, block)) for block in weights]


def plain_loss(blocks):
    x = X
    for block in blocks:
        x = x + block(x)
    return jnp.mean((x - Y) ** 2)


def test_a_plain_pytree_in_a_loop_that_is_not_compiled():
    model = make_plain()
    tx = optax.chain(optax.adamw(0.01), k_spectrum_clamp(on("key/weight", layout="oi"), when=EVERY_THIRD))
    state, history = tx.init(model), [[block.key.weight for block in model]]
    gradients_of = jax.jit(jax.grad(plain_loss))
    for n in range(1, 4):
        updates, state = tx.update(gradients_of(model), state, model, step=n)
        model = optax.apply_updates(model, updates)
        history.append([block.key.weight for block in model])
    check(history)


def test_a_layout_says_which_vectors_are_aligned():
    """In a weight [out, in] the columns of W_Q are its rows."""
    model = make_plain()
    query, key = (on(f"{name}/weight", layout="oi") for name in ("query", "key"))
    tx = qk_align(query, key, strength=1.0)
    zeros = jax.tree.map(jnp.zeros_like, model)
    updates, _ = tx.update(zeros, tx.init(model), model)
    gradient, w = np.asarray(updates[0].query.weight), np.asarray(model[0].query.weight)
    np.testing.assert_allclose((gradient * w).sum(1), 0, atol=1e-7)  # a cosine's gradient is orthogonal to its vector
    assert np.abs((gradient * w).sum(0)).max() > 1e-4


def test_inside_optax_masked_and_multi_transform():
    model = {"attention": {"key": jnp.ones([4, 4]), "query": jnp.ones([4, 4])}, "bias": jnp.ones([4])}
    labels = {"attention": {"key": "held", "query": "free"}, "bias": "free"}
    tx = optax.multi_transform(
        {"held": optax.chain(optax.adamw(0.1), freeze(on("key"))), "free": optax.adamw(0.1)}, labels
    )  # fmt: skip
    updates, _ = tx.update(model, tx.init(model), model)
    after = optax.apply_updates(model, updates)
    np.testing.assert_array_equal(after["attention"]["key"], 1)
    assert (after["attention"]["query"] != 1).all() and (after["bias"] != 1).all()
    with pytest.raises(ValueError, match="matches no leaf"):
        optax.masked(freeze(on("key")), {"attention": {"key": False, "query": True}, "bias": True}).init(model)

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from qkgeom_jax import ensemble, initializers, model, optim, train


def make(config):
    return ensemble.make_ensemble(config, optim.make_optimizer(config))


@pytest.fixture(scope="module")
def trained():
    """Two chunks of two steps of seeds 3, 5 and 8, with the state before the second."""
    config = tiny.config(seeds=(3, 5, 8))
    programs, keys, tokens = make(config), ensemble.make_keys(config.seeds), jnp.asarray(tiny.tokens())
    start = programs.initialise(keys)
    middle = programs.advance(jax.tree.map(jnp.copy, start), keys, jnp.int32(0), tokens)
    end = programs.advance(jax.tree.map(jnp.copy, middle), keys, jnp.int32(2), tokens)
    return programs, keys, tokens, start, middle, end


def test_batches_are_windows_of_the_text_and_depend_on_seed_and_step_alone():
    tokens, length = jnp.arange(50, dtype=jnp.uint8), 9
    keys = ensemble.make_keys((3, 5))
    drawn = [np.asarray(train.draw_batch(key, step, tokens, 400, length)) for key in keys for step in (0, 1)]
    for batch in drawn:
        assert batch.dtype == np.int32 and (np.diff(batch, axis=1) == 1).all()
        assert batch.min() == 0 and batch.max() == 49, "the first and the last window are drawn too"
    assert len({batch.tobytes() for batch in drawn}) == 4
    again = train.draw_batch(ensemble.make_keys((9, 5))[1], 1, tokens, 400, length)
    np.testing.assert_array_equal(again, drawn[3])


def test_a_text_of_one_window_gives_that_window():
    batch = train.draw_batch(jax.random.key(0), 0, jnp.arange(9, dtype=jnp.uint8), 3, 9)
    np.testing.assert_array_equal(batch, np.tile(np.arange(9), (3, 1)))


def test_the_schedule_rises_falls_and_then_stays():
    config = tiny.config(learning_rate=1.0, final_learning_rate=0.1, warmup_steps=4, decay_steps=20)
    rate = [float(optim.learning_rate(config)(n)) for n in range(30)]
    np.testing.assert_allclose(rate[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)
    cosine = [0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * n / 16)) for n in range(17)]
    np.testing.assert_allclose(rate[4:21], cosine, rtol=1e-5)
    np.testing.assert_allclose(rate[20:], 0.1, rtol=1e-6)


@pytest.mark.parametrize("warmup, steps", [(0, 5), (1, 5), (5, 5), (50, 5)])
def test_the_schedule_is_finite_and_bounded_at_its_limits(warmup, steps):
    config = tiny.config(warmup_steps=warmup, decay_steps=steps)
    rates = np.array([float(optim.learning_rate(config)(n)) for n in range(8)])
    assert np.isfinite(rates).all() and (rates > 0).all() and rates.max() <= 1e-3 * (1 + 1e-6)


def test_weight_decay_acts_on_matrices_alone():
    params = initializers.make_params(jax.random.key(0), tiny.config().model)
    mask = optim.matrices(params)
    decayed = {"/".join(k.key for k in path) for path, on in jax.tree_util.tree_leaves_with_path(mask) if on}
    kernels = {f"blocks/attention/{name}" for name in ("query", "key", "value", "output")}
    assert decayed == kernels | {"blocks/mlp/input", "blocks/mlp/output", "token_embedding", "position_embedding", "head"}


def test_training_lowers_the_loss_on_a_text_that_can_be_learnt():
    config = tiny.config(epochs=1, steps_per_epoch=80, chunk=80, learning_rate=1e-2)
    programs, keys = make(config), ensemble.make_keys(config.seeds)
    tokens = jnp.asarray(np.tile(np.arange(1, 9, dtype=np.uint8), 60))
    window = tokens[:9].astype(jnp.int32)[None]
    state = programs.initialise(keys)
    before = jax.vmap(lambda p: model.cross_entropy(p, window, config.model))(state.params)
    state = programs.advance(state, keys, jnp.int32(0), tokens)
    after = jax.vmap(lambda p: model.cross_entropy(p, window, config.model))(state.params)
    assert (np.asarray(after) < 0.3 * np.asarray(before)).all()


def test_a_seed_trains_alike_in_company_and_alone(trained):
    _, _, tokens, _, _, end = trained
    solo, keys = make(tiny.config(seeds=(5,))), ensemble.make_keys((5,))
    state = solo.initialise(keys)
    for step in (0, 2):
        state = solo.advance(state, keys, jnp.int32(step), tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b[1], atol=2e-6), state.params, end.params)


def test_seeds_and_steps_differ(trained):
    *_, start, middle, end = trained
    for state in (start, end):
        query = np.asarray(state.params["blocks"]["attention"]["query"])
        assert not np.allclose(query[0], query[1])
    for before, after in ((start, middle), (middle, end)):
        moved = jax.tree.map(lambda a, b: bool((a != b).any()), before.params, after.params)
        assert all(jax.tree.leaves(moved))


def test_a_seed_that_diverges_is_frozen_and_leaves_the_others_bitwise(trained):
    programs, keys, tokens, _, middle, end = trained
    poisoned = jax.tree.map(jnp.copy, middle)
    head = poisoned.params["head"]
    poisoned = poisoned.replace(params=poisoned.params | {"head": head.at[1].set(jnp.where(head[1] > 0, jnp.inf, head[1]))})
    result = programs.advance(jax.tree.map(jnp.copy, poisoned), keys, jnp.int32(2), tokens)
    np.testing.assert_array_equal(result.alive, [True, False, True])
    np.testing.assert_array_equal(result.diverged_step, [-1, 3, -1])
    for seed in (0, 2):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[seed], b[seed]), result.params, end.params)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[seed], b[seed]), result.opt_state, end.opt_state)
    frozen = (result.params, result.opt_state), (poisoned.params, poisoned.opt_state)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), *frozen)


def test_one_trace_serves_a_whole_run():
    config, traces = tiny.config(), []

    def count(updates, state, params=None, **extra):
        traces.append(extra["step"].shape)
        return updates, state

    counter = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), count)
    programs = ensemble.make_ensemble(config, optim.make_optimizer(config, on_parameters=counter))
    keys, tokens = ensemble.make_keys(config.seeds), jnp.asarray(tiny.tokens())
    state = programs.initialise(keys)
    for step in range(0, 8, config.training.chunk_steps):
        state = programs.advance(state, keys, jnp.int32(step), tokens)
    assert traces == [()], "traced once, with a step that is not batched over seeds"


def test_the_training_program_calls_no_lapack():
    config = tiny.config()
    programs, keys = make(config), ensemble.make_keys(config.seeds)
    state = jax.eval_shape(programs.initialise, keys)
    text = programs.advance.lower(state, keys, jnp.int32(0), jnp.asarray(tiny.tokens())).compile().as_text()
    assert not re.findall(r'custom_call_target="[^"]*"', text)

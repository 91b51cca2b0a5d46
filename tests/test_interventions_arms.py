"""From a name and a configuration to an arm of a study, and what an arm that never acts leaves as it was."""

import ast
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from qkgeom_jax import config as configuration
from qkgeom_jax import ensemble, initializers, optim, train
from qkgeom_jax.config import INTERVENTIONS, PARTS, Config, from_dict, override
from qkgeom_jax.interventions import first_update, load_intervention, make_intervention

ARMS = INTERVENTIONS[1:]
ROOT = Path(__file__).parents[1]

# A user's own file, as docs/interventions.md has it.
OWN = '''
"""Every 10 updates, all singular values of W_Q and W_K become their mean."""

import jax.numpy as jnp

from qkgeom_jax.interventions import change_spectrum, every, on, project


def flatten(s):
    return jnp.broadcast_to(s.mean(-1, keepdims=True), s.shape)


def flat_spectrum(config):
    kernels = on(("attention/query", "attention/key"), layout="bio", heads=config.model.heads)
    return project(lambda w: change_spectrum(w, flatten), kernels, when=every(10), name="flat_spectrum")
'''


def arm(name, **changes):
    init = {"qk_decouple": "qk_identical"}.get(name, "independent")
    return tiny.config(**{"contraction_rank": 4, "intervention": name, "init": init} | changes)


def start(config):
    """W_Q, W_K and W_V of two seeds: enough of a tree for the chain and the arms, which know no model."""
    rng = np.random.default_rng(0)
    kernels = {name: jnp.asarray(rng.normal(0, 0.2, (2, 2, 16, 16)), jnp.float32) for name in ("query", "key", "value")}
    if config.model.init == "qk_identical":
        kernels["key"] = kernels["query"]
    return {"blocks": {"attention": kernels}}


def toy_step(optimizer):
    """A step of all seeds on gradients that need no model."""

    def step(params, state, key, n):
        gradients = jax.tree.map(lambda p: jnp.sin(5 * p) + 0.1 * p, params)
        updates, state = optimizer.update(gradients, state, params, step=n, key=key)
        return optax.apply_updates(params, updates), state

    return jax.vmap(step, in_axes=(0, 0, 0, None))


@functools.lru_cache
def toy_run(config, idle=False):
    """The parameters after 50 updates by the whole chain."""
    pair = () if idle else make_intervention(config.intervention, config)
    optimizer = optim.make_optimizer(config, *pair)
    params, keys = start(config), ensemble.make_keys(config.seeds)

    @jax.jit
    def run(params, keys):
        step = toy_step(optimizer)
        state = jax.vmap(optimizer.init)(params)
        return jax.lax.scan(lambda c, n: (step(*c, keys, n), None), (params, state), jnp.arange(1, 51))[0][0]

    return run(params, keys)


def assert_equal_bitwise(a, b):
    bits = [jax.tree.map(lambda leaf: np.asarray(leaf).view(np.int32), tree) for tree in (a, b)]
    jax.tree.map(np.testing.assert_array_equal, *bits)


def attention(params, name):
    return np.asarray(params["blocks"]["attention"][name])


# The configuration


def test_the_configuration_goes_to_json_and_back():
    config = arm("forced_k_contraction", contraction_rank=0.25, start_epoch=1, per_head=True)
    assert from_dict(config.to_dict()) == config
    older = {name: value for name, value in Config().to_dict().items() if name != "manipulation"}
    assert from_dict(older) == Config(), "written before there were interventions"
    assert PARTS["manipulation"] is configuration.InterventionConfig


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"intervention": "k_clamp"}, "intervention is 'k_clamp'; allowed: none, k_spectrum_clamp"),
        ({"intervention": "arms.txt:mine"}, "intervention is"),
        ({"intervention": "arms.py:freeze_q"}, "another name"),
        ({"intervention": "arms.py:no-name"}, "intervention is"),
        ({"intervention": "qk_decouple"}, "init is 'independent'; allowed: qk_identical with intervention qk_decouple"),
        ({"intervention": "forced_k_contraction", "contraction_rank": 16}, "contraction_rank is 16; .*below 16"),
        ({"intervention": "forced_k_contraction", "contraction_rank": 8, "per_head": True}, "below 8, .* of a head"),
        ({"contraction_rank": 2.5}, "contraction_rank is 2.5"),
        ({"contraction_rank": 0}, "contraction_rank is 0"),
        ({"contraction_factor": float("nan")}, "contraction_factor is nan"),
        ({"clamp_strength": 1.5}, "clamp_strength is 1.5"),
        ({"period": 0}, "period is 0"),
        ({"start_epoch": -1}, "start_epoch is -1"),
        ({"align_sign": 0}, "align_sign is 0"),
        ({"align_lambda": -1}, "align_lambda is -1"),
        ({"per_head": 1}, "per_head is 1"),
    ],
)
def test_what_the_configuration_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny.config(**changes)


def test_the_folder_of_a_users_own_bears_its_name():
    assert tiny.config(intervention="some/where/mine.py:flat_spectrum").name == "depth2-independent-flat_spectrum"


@pytest.mark.parametrize(
    "name, changes, first",
    [
        ("none", {}, None),
        ("k_spectrum_clamp", {}, 600),  # epoch 1 begins after 500 updates, and 500 belongs to epoch 0
        ("forced_k_contraction", {"start_epoch": 0}, 100),
        ("freeze_q", {}, 1),
        ("qk_align", {"start_epoch": 2}, 1001),
        ("qk_decouple", {}, 1501),
        ("k_spectrum_clamp", {"period": 5001}, None),
        ("k_spectrum_clamp", {"period": 5000}, 5000),
        ("qk_decouple", {"start_epoch": 10}, None),
        ("mine.py:flat", {}, 1),
    ],
)
def test_when_an_arm_first_acts(name, changes, first):
    assert first_update(name, arm(name, steps_per_epoch=500, epochs=10, **changes)) == first


# The arms


def test_every_name_makes_an_arm_of_two_transformations():
    for name in INTERVENTIONS:
        pair = make_intervention(name, arm(name))
        assert all(isinstance(part, optax.GradientTransformation) for part in pair)
    with pytest.raises(ValueError, match="allowed: none"):
        make_intervention("k_clamp", tiny.config())


@pytest.mark.parametrize(
    "name, changes",
    [("freeze_q", {"start_epoch": 99}), ("qk_align", {"align_lambda": 0.0}), ("qk_align", {"start_epoch": 99})],
)
def test_an_arm_that_does_nothing_equals_the_baseline_bitwise(name, changes):
    assert_equal_bitwise(toy_run(arm(name, **changes)), toy_run(arm(name), idle=True))


@pytest.mark.parametrize("name, frozen, free", [("freeze_q", "query", "key"), ("freeze_k", "key", "query")])
def test_a_frozen_kernel_keeps_its_bits_under_the_whole_chain(name, frozen, free):
    config = arm(name, weight_decay=0.5)
    after = toy_run(config)
    np.testing.assert_array_equal(attention(after, frozen), attention(start(config), frozen))
    assert (attention(after, free) != attention(start(config), free)).all()


def test_align_acts_before_the_clip_on_both_kernels_alone():
    weak, strong = (toy_run(arm("qk_align", align_lambda=strength)) for strength in (0.0, 100.0))
    for name in ("query", "key"):
        assert np.abs(attention(weak, name) - attention(strong, name)).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name, changes", [("k_spectrum_clamp", {"period": 3}), ("qk_decouple", {"start_epoch": 1})])
def test_an_arm_first_acts_when_it_says_so_and_seeds_differ(name, changes):
    """An epoch has four steps. Up to then, W_K has the bits that the baseline gives it."""
    config = arm(name, **changes)
    optimizers = optim.make_optimizer(config), optim.make_optimizer(config, *make_intervention(name, config))
    steps = [jax.jit(toy_step(optimizer)) for optimizer in optimizers]
    runs = [(start(config), jax.vmap(optimizer.init)(start(config))) for optimizer in optimizers]
    keys = ensemble.make_keys(config.seeds)
    n = 0
    while n < 10 and (runs[0][0]["blocks"]["attention"]["key"] == runs[1][0]["blocks"]["attention"]["key"]).all():
        n += 1
        runs = [step(*run, keys, jnp.int32(n)) for step, run in zip(steps, runs, strict=True)]
    assert n == first_update(name, config) == {"k_spectrum_clamp": 6, "qk_decouple": 5}[name]
    before, after = (attention(params, "key").astype(np.float64) for params, _ in runs)
    turns = np.linalg.solve(before, after)
    if name == "k_spectrum_clamp":
        spectra = [np.linalg.svd(w, compute_uv=False) for w in (after, attention(start(config), "key"))]
        np.testing.assert_allclose(*spectra, atol=1e-5)
    else:
        np.testing.assert_allclose(turns @ turns.swapaxes(-1, -2), np.broadcast_to(np.eye(16), turns.shape), atol=1e-3)
        assert np.abs(turns[0] - turns[1]).max() > 0.1, "each seed has its own rotation"


# A user's own


def test_a_users_own_file_makes_an_arm(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    config = tiny.config(intervention=f"{tmp_path}/own.py:flat_spectrum")
    _, last = make_intervention(config.intervention, config)
    params = jax.tree.map(lambda leaf: leaf[0], start(config))
    zeros = jax.tree.map(jnp.zeros_like, params)
    for step in (9, 10):
        updates, _ = last.update(zeros, last.init(params), params, step=step)
        after = optax.apply_updates(params, updates)
        spectra = np.linalg.svd(attention(after, "query").reshape(2, 16, 2, 8).swapaxes(1, 2), compute_uv=False)
        assert (np.ptp(spectra, axis=-1) < 1e-4).all() == (step == 10)
    np.testing.assert_array_equal(attention(after, "value"), attention(params, "value"))


@pytest.mark.parametrize(
    "text, name, message",
    [
        (None, "flat", "there is no file"),
        ("flat_spectrum = 3", "flat_spectrum", "has no function flat_spectrum"),
        ("def flat_spectrum(c): ...", "flat_spectrums", "has no function flat_spectrums; did you mean flat_spectrum"),
        ("1 / 0", "flat", "raises ZeroDivisionError: division by zero"),
        ("def flat(:", "flat", "raises SyntaxError"),
        ("raise SystemExit(3)", "flat", "raises SystemExit: 3"),
        ("import nowhere_at_all", "flat", "raises ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_answered_in_one_sentence(tmp_path, text, name, message):
    if text is not None:
        (tmp_path / "own.py").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_intervention(f"{tmp_path}/own.py:{name}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reference", ["own.txt:flat", "own.py", "own.py:", "own.py:a b", ":flat"])
def test_a_reference_of_another_form_is_refused(reference):
    with pytest.raises(ValueError, match="FILE.py:name"):
        load_intervention(reference)


@pytest.mark.parametrize(
    "body, message",
    [
        ("return 3", "returned 3; it must return an optax.GradientTransformation or a pair"),
        ("return (optax.identity(), None)", "must return"),
        ("raise KeyError(config.model.depth)", "raises KeyError: 2"),
        ("from qkgeom_jax.interventions import on; return on", "must return"),
    ],
)
def test_an_arm_of_another_kind_is_refused(tmp_path, body, message):
    (tmp_path / "own.py").write_text(f"import optax\n\ndef mine(config):\n    {body}\n")
    with pytest.raises(ValueError, match=message):
        make_intervention(f"{tmp_path}/own.py:mine", tiny.config())


def test_a_pair_stands_at_both_ends_and_a_file_may_hold_dataclasses(tmp_path):
    (tmp_path / "own.py").write_text(
        "from __future__ import annotations\nimport dataclasses\nimport optax\n\n"
        "@dataclasses.dataclass\nclass Two:\n    factor: float\n\n"
        "def both(config):\n    return optax.scale(Two(2.0).factor), optax.scale(3.0)\n"
    )
    first, last = make_intervention(f"{tmp_path}/own.py:both", tiny.config())
    assert first.update(1.0, first.init(1.0))[0] == 2 and last.update(1.0, last.init(1.0))[0] == 3


# Through the ensemble


def trained(config, *pair):
    config = override(config, steps_per_epoch=25, epochs=2, chunk=25, seeds=(3, 5))
    optimizer = optim.make_optimizer(config, *(pair or make_intervention(config.intervention, config)))
    keys = ensemble.make_keys(config.seeds)
    shapes = jax.eval_shape(lambda key: initializers.make_params(key, config.model), keys[0])
    rng = np.random.default_rng(0)  # no program is compiled for the initial parameters
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.2, (2, *leaf.shape)), jnp.float32), shapes)
    state = train.TrainState(params, jax.vmap(optimizer.init)(params), jnp.ones(2, bool), jnp.full(2, -1, jnp.int32))
    programs = ensemble.make_ensemble(config, optimizer)
    for step in (0, 25):
        state = programs.advance(state, keys, jnp.int32(step), jnp.asarray(tiny.tokens()))
    assert state.alive.all()
    return state.params


@functools.lru_cache
def baseline(init):
    return trained(tiny.config(init=init), optax.identity(), optax.identity())


@pytest.mark.parametrize("name", INTERVENTIONS)
def test_every_arm_trains_in_the_ensemble_with_one_state(name):
    config = arm(name)
    programs = ensemble.make_ensemble(config, optim.make_optimizer(config, *make_intervention(name, config)))
    keys = ensemble.make_keys(config.seeds)
    state = jax.eval_shape(programs.initialise, keys)
    after = jax.eval_shape(programs.advance, state, keys, jnp.int32(0), jnp.asarray(tiny.tokens()))
    describe = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)  # noqa: E731
    assert describe(after) == describe(state)


IDLE = [
    *((name, {"start_epoch": 2}) for name in ARMS),
    *((name, {"start_epoch": 0, "period": 51}) for name in ("k_spectrum_clamp", "forced_k_contraction")),
    ("qk_align", {"align_lambda": 0.0}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, changes", IDLE)
def test_every_idle_arm_equals_the_baseline_bitwise_in_training(name, changes):
    """An empty window, a period longer than the run, a penalty of nothing: 50 steps of two seeds."""
    config = arm(name, **changes)
    assert_equal_bitwise(trained(config), baseline(config.model.init))


@pytest.mark.parametrize("name", ["k_spectrum_clamp", "forced_k_contraction", "qk_decouple"])
def test_no_arm_calls_lapack(name):
    config = arm(name)
    _, last = make_intervention(name, config)
    params, keys = start(config), ensemble.make_keys(config.seeds)
    state = jax.eval_shape(jax.vmap(last.init), params)
    update = jax.vmap(lambda p, s, k, n: last.update(p, s, p, step=n, key=k)[0], in_axes=(0, 0, 0, None))
    assert "lapack" not in str(jax.jit(update).lower(params, state, keys, jnp.int32(1)).as_text())
    assert "lapack" in jax.jit(jnp.linalg.svd).lower(jnp.ones([2, 2])).as_text(), "where it would show"


def test_interventions_see_trees_and_configurations_never_a_model():
    allowed = {"config", "interventions", "metrics"}
    for path in (ROOT / "qkgeom_jax" / "interventions").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("qkgeom_jax"):
                parts = node.module.split(".")[1:2] or [alias.name for alias in node.names]
                assert set(parts) <= allowed, path

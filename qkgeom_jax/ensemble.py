"""All seeds of a configuration in one device program: the only module that knows that there are seeds.

Every leaf of a stacked state has a leading axis S. A seed's key depends on the seed alone, so a seed trains alike in
whatever company (to about 1e-9; BUILD_NOTES.md), and seeds never mix: a seed that diverges leaves the others bitwise
as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from qkgeom_jax import evaluate, train
from qkgeom_jax.config import Config
from qkgeom_jax.evaluate import Measurement, Probes
from qkgeom_jax.initializers import Params
from qkgeom_jax.train import TrainState


def make_keys(seeds: Sequence[int]) -> jax.Array:
    """One PRNG key a seed, [S]."""
    return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))


@dataclass(frozen=True)
class Ensemble:
    """The compiled programs of one configuration.

    initialise(keys [S]) -> stacked state.
    advance(state, keys, step, tokens) -> the state `config.training.chunk_steps` updates later; `step` counts the
      updates already made; the given state's buffers are donated.
    measure(params, probes) -> a `Measurement` with a leading axis S.
    """

    initialise: Callable[[jax.Array], TrainState]
    advance: Callable[[TrainState, jax.Array, jax.Array, jax.Array], TrainState]
    measure: Callable[[Params, Probes], Measurement]


def make_ensemble(config: Config, optimizer: optax.GradientTransformationExtraArgs) -> Ensemble:
    """The three programs of `config`, each traced once."""
    initialise = jax.vmap(functools.partial(train.make_state, config=config, optimizer=optimizer))
    step_all = jax.vmap(
        functools.partial(train.train_step, config=config, optimizer=optimizer), in_axes=(0, 0, None, None)
    )

    def advance(state: TrainState, keys: jax.Array, step: jax.Array, tokens: jax.Array) -> TrainState:
        # `step` is unbatched, so that a lax.cond on it stays a branch under vmap instead of running both sides.
        steps = step + jnp.arange(config.training.chunk_steps, dtype=jnp.int32)
        return jax.lax.scan(lambda s, n: (step_all(s, keys, n, tokens), None), state, steps)[0]

    measure = jax.vmap(functools.partial(evaluate.measure, config=config), in_axes=(0, None))
    return Ensemble(jax.jit(initialise), jax.jit(advance, donate_argnums=0), jax.jit(measure))


def by_parts(program: Callable[[int], Callable[..., Any]], count: int, width: int, *stacked: Any) -> Any:
    """A program over `count` seeds, at most `width` of them at a time: less memory, and longer.

    Args:
      program: gives the program for a number of seeds; it takes a part of each of `stacked`.
      count, width: how many seeds there are, and how many at most go together.
      stacked: trees whose leaves have a leading axis S.

    Returns:
      What one call for all seeds would: a tree whose leaves have a leading axis S.
    """
    if width >= count:
        return program(count)(*stacked)
    parts = []
    for start in range(0, count, width):
        part = jax.tree.map(lambda leaf: leaf[start : start + width], stacked)
        parts.append(program(min(width, count - start))(*part))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)

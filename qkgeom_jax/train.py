"""Training of ONE seed: its state, one step, one scanned chunk. `qkgeom_jax.ensemble` maps it over seeds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import struct

from qkgeom_jax import model
from qkgeom_jax.config import Config
from qkgeom_jax.initializers import Params, make_params

# Everything random comes from fold_in(key of the seed, purpose, ...): never from the order of calls.
PARAMETERS, BATCHES, INTERVENTION = range(3)


@struct.dataclass
class TrainState:
    """One seed's state. The step is no part of it: it is the same for all seeds and must stay unbatched under vmap."""

    params: Params
    opt_state: optax.OptState
    alive: jax.Array  # bool: False from the step on at which the loss or an update was not finite
    diverged_step: jax.Array  # int32: that step, counted from 1; -1 while alive


def make_state(key: jax.Array, config: Config, optimizer: optax.GradientTransformation) -> TrainState:
    """The untrained state of the seed whose key is `key`."""
    params = make_params(jax.random.fold_in(key, PARAMETERS), config.model)
    return TrainState(params, optimizer.init(params), jnp.array(True), jnp.array(-1, jnp.int32))


def draw_batch(key: jax.Array, step: jax.Array, tokens: jax.Array, batch: int, length: int) -> jax.Array:
    """Windows of `length` tokens at uniformly random places: a pure function of (seed's key, step).

    Args:
      key: the seed's key.
      step: completed updates before this one.
      tokens: integer [N], the training split.

    Returns:
      int32 [batch, length].
    """
    draw = jax.random.fold_in(jax.random.fold_in(key, BATCHES), step)
    starts = jax.random.randint(draw, (batch,), 0, tokens.shape[0] - length + 1)
    return jax.vmap(lambda start: jax.lax.dynamic_slice(tokens, (start,), (length,)))(starts).astype(jnp.int32)


def train_step(
    state: TrainState,
    key: jax.Array,
    step: jax.Array,
    tokens: jax.Array,
    config: Config,
    optimizer: optax.GradientTransformationExtraArgs,
) -> TrainState:
    """One update. A seed whose loss or new parameters are not finite keeps its last finite state from then on."""
    batch = draw_batch(key, step, tokens, config.training.batch, config.model.context + 1)
    loss, gradients = jax.value_and_grad(model.cross_entropy)(state.params, batch, config.model)
    # Interventions count completed updates, this one included.
    draw = jax.random.fold_in(key, INTERVENTION)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params, step=step + 1, key=draw)
    params = optax.apply_updates(state.params, updates)
    finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(params))
    alive = state.alive & finite
    new = (params, opt_state)
    params, opt_state = jax.tree.map(lambda a, b: jnp.where(alive, a, b), new, (state.params, state.opt_state))
    diverged = jnp.where(state.alive & ~finite, jnp.int32(step + 1), state.diverged_step)
    return TrainState(params, opt_state, alive, diverged)

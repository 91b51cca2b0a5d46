"""The optimizer: one chain for every run, with places at both ends for an intervention.

What changes gradients stands first; AdamW follows; what projects parameters stands last, so that nothing (weight
decay, momentum) moves a parameter after its projection. The baseline goes through the same chain with an identity in
those places, and equals an arm that never acts bitwise.
"""

from __future__ import annotations

import jax
import optax

from qkgeom_jax.config import Config


def learning_rate(config: Config) -> optax.Schedule:
    """Linear warm-up to the peak, cosine to the final rate at `decay_steps`, constant after."""
    peak, final = config.optimizer.learning_rate, config.optimizer.final_learning_rate
    warmup = min(config.warmup_steps, config.decay_steps)
    # Starting at peak / warmup, so that the very first update is not empty.
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    fall = optax.cosine_decay_schedule(peak, max(config.decay_steps - warmup, 1), alpha=final / peak)
    return optax.join_schedules([rise, fall], [warmup])


def matrices(params: optax.Params) -> optax.Params:
    """A mask of the leaves that weight decay acts on: matrices and embeddings, neither biases nor norms.

    Leaves of the blocks carry a leading layer axis, which does not count.
    """

    def is_matrix(path: tuple, leaf: jax.Array) -> bool:
        stacked = path[0].key == "blocks"
        return leaf.ndim - stacked >= 2

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _rounding_boundary() -> optax.GradientTransformationExtraArgs:
    """The identity, behind a branch that is never taken.

    XLA on the CPU fuses AdamW's last product with the sum that follows, and rounds once instead of twice, unless a
    branch stands between, as an intervention's does: without one in every chain, arms that never act would drift from
    the baseline. (`optimization_barrier` does not survive there.)
    """

    def update(updates, state, params=None, *, step=None, **extra):
        if step is not None:
            updates = jax.lax.cond(step < 0, lambda: optax.tree.zeros_like(updates), lambda: updates)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def make_optimizer(
    config: Config,
    on_gradients: optax.GradientTransformation | None = None,
    on_parameters: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm and AdamW, between an intervention on gradients and one on parameters.

    Args:
      config: rates, decay and clip.
      on_gradients: stands before the clip (an alignment regulariser, say).
      on_parameters: stands last (a clamp, a freeze). Both may take the extra argument `step`.
    """
    o = config.optimizer
    return optax.with_extra_args_support(
        optax.chain(
            on_gradients or optax.identity(),
            optax.clip_by_global_norm(o.gradient_clip),
            optax.adamw(learning_rate(config), o.beta_1, o.beta_2, weight_decay=o.weight_decay, mask=matrices),
            _rounding_boundary(),
            on_parameters or optax.identity(),
        )
    )

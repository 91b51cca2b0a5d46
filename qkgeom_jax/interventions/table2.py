"""The interventions of Table 2. Freezing is `qkgeom_jax.interventions.freeze` of W_Q or of W_K."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from qkgeom_jax.interventions.leaves import Leaves
from qkgeom_jax.interventions.pieces import (
    always,
    blend,
    change_spectrum,
    every,
    random_rotation,
    singular_values,
    with_norm,
)
from qkgeom_jax.interventions.transforms import moved, project, stack, transform, unstack
from qkgeom_jax.metrics import frobenius_norm


def k_spectrum_clamp(
    leaves: Leaves, *, when: Callable[[Any], Any] = every(100), strength: float = 1.0
) -> optax.GradientTransformationExtraArgs:
    """Restores the singular values to those at initialisation and keeps the singular vectors. Stands last.

    s := (1 - strength) s + strength s_0, both in descending order.

    Args:
      leaves: W_K, by `on`.
      when: as in `project`; Table 2 has every 100 steps from epoch 1 on, ``every(100) & between(steps_per_epoch)``.
      strength: from 0 (nothing) to 1 (the initial values).

    Source: Table 2; `strength` is ours.
    """
    if not (isinstance(strength, (int, float)) and 0 <= strength <= 1):
        raise ValueError(f"strength is {strength!r}; allowed: a number from 0 to 1")

    def clamp(w: jax.Array, initial: jax.Array) -> jax.Array:
        return change_spectrum(w, lambda s: blend(s, initial, strength))

    return project(clamp, leaves, when=when, remember=singular_values, name="k_spectrum_clamp")


def tail_start(rank: int | float, full: int) -> int:
    """How many singular values of `full` come before the tail.

    Raises:
      ValueError: nothing would come after them, or `rank` is neither a whole number nor a fraction below 1.

    >>> tail_start(32, 64), tail_start(0.25, 64)
    (32, 16)
    """
    number = isinstance(rank, (int, float)) and not isinstance(rank, bool) and math.isfinite(rank)
    if not number or rank <= 0 or (rank > 1 and rank != int(rank)):
        raise ValueError(f"rank is {rank!r}; allowed: a whole number of at least 1, or a fraction below 1")
    first = max(1, int(rank * full)) if rank < 1 else int(rank)
    if first >= full:
        raise ValueError(f"rank is {rank!r}, and a matrix of rank {full} has no singular values after that")
    return first


def forced_k_contraction(
    leaves: Leaves, *, rank: int | float = 32, factor: float = 0.05, when: Callable[[Any], Any] = every(100)
) -> optax.GradientTransformationExtraArgs:
    """Multiplies the singular values after the first `rank` by `factor` and keeps the Frobenius norm. Stands last.

    Args:
      leaves: W_K, by `on`.
      rank: how many singular values stay: a whole number, or a fraction (below 1) of the smaller side of the matrix.
      factor: of at least 0; 1 changes nothing.
      when: as in `project`.

    Raises:
      ValueError: `factor` is negative or not finite; at init, `rank` leaves no tail.

    Source: Table 2, which does not say what 'renormalizes the projection' keeps; by the Frobenius norm logits spread.
    """
    if not (isinstance(factor, (int, float)) and math.isfinite(factor) and factor >= 0):
        raise ValueError(f"factor is {factor!r}; allowed: a finite number of at least 0")

    def contract(w: jax.Array) -> jax.Array:
        first = tail_start(rank, min(w.shape[-2:]))
        scale = jnp.where(jnp.arange(min(w.shape[-2:])) < first, 1.0, factor)
        return with_norm(change_spectrum(w, lambda s: s * jnp.broadcast_to(scale, s.shape)), frobenius_norm(w))

    return project(contract, leaves, when=when, name="forced_k_contraction")


def qk_decouple(
    leaves: Leaves, *, when: Callable[[Any], Any], key: jax.Array | None = None
) -> optax.GradientTransformationExtraArgs:
    """W_K := W_K R with R a Haar-random rotation of its output features. Stands last.

    Each matrix has an R of its own, drawn anew each time that it is due. The singular values stay; with `on(...,
    heads=H)` R is block-diagonal, one block a head.

    Args:
      leaves: W_K, by `on`; the layout must say which axes are output.
      when: as in `project`; Table 2 has once, after epoch 3 begins: ``at(3 * steps_per_epoch + 1)``.
      key: where R comes from. The extra argument ``key`` of update goes first: pass it where models under vmap are to
        have rotations of their own.

    Source: Table 2, which starts from W_Q = W_K; the kind of rotation is ours.
    """

    def act(found, updates, params, start, n, given):
        chosen = key if given is None else given
        if chosen is None:
            raise ValueError("qk_decouple needs a key: at construction, or as an extra argument of update")
        draw = jax.random.fold_in(chosen, n)
        stacks = stack(found, [moved(u, p) for u, p in zip(updates, params, strict=True)])
        changes = {}
        for index, (shape, w) in enumerate(stacks.items()):
            rotation = random_rotation(jax.random.fold_in(draw, index), w.shape[0], w.shape[-1])
            with jax.default_matmul_precision("highest"):
                changes[shape] = w @ rotation - w
        return [u + d for u, d in zip(updates, unstack(found, params, changes), strict=True)]

    return transform("qk_decouple", [leaves], when, act)


def _unit_columns(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Columns divided by their norms, and 1 / norm; zeros where a column is zero."""
    norm = jnp.sqrt(jnp.sum(w * w, axis=-2, keepdims=True))
    inverse = jnp.where(norm > 0, 1 / jnp.where(norm > 0, norm, 1.0), 0.0)
    return w * inverse, inverse


def qk_align(
    query: Leaves, key: Leaves, *, strength: float = 0.001, sign: int = 1, when: Callable[[Any], Any] = always
) -> optax.GradientTransformationExtraArgs:
    """Adds to the gradients that of sign x strength x mean_j(1 - cos^2(W_Q[:, j], W_K[:, j])). Stands first.

    The mean is over the columns (output features) of one matrix; several matrices are summed. Not part of the loss that
    the training loop sees.

    Args:
      query, key: W_Q and W_K, by `on`. The first leaf of the one goes with the first of the other, and so on.
      strength: lambda.
      sign: 1 pulls columns together, -1 apart.
      when: as in `project`.

    Numerics: in closed form, so finite for zero, equal and orthogonal columns (a zero column has no gradient).

    Source: Table 2 has 'a weak Q/K alignment regularization penalty with lambda=0.001'; its form is ours.
    """
    if not (isinstance(strength, (int, float)) and math.isfinite(strength) and strength >= 0):
        raise ValueError(f"strength is {strength!r}; allowed: a finite number of at least 0")
    if sign not in (1, -1):
        raise ValueError(f"sign is {sign!r}; allowed: 1, -1")

    def check(params: optax.Params) -> tuple:
        flat = jax.tree.leaves(params)
        shapes = [
            [jax.eval_shape(leaf.matrices, flat[leaf.index]).shape for leaf in side.find(params)]
            for side in (query, key)
        ]
        if shapes[0] != shapes[1]:
            raise ValueError(f"query and key name matrices of shapes {shapes[0]} and {shapes[1]}; they go in pairs")
        return ()

    def act(found, updates, params, start, n, given):
        half = len(found) // 2
        w_q, w_k = stack(found[:half], params[:half]), stack(found[half:], params[half:])
        of_q, of_k = {}, {}
        for shape in w_q:
            q, inverse_q = _unit_columns(w_q[shape])
            k, inverse_k = _unit_columns(w_k[shape])
            cosine = jnp.sum(q * k, axis=-2, keepdims=True)
            slope = -2 * sign * strength / shape[-1] * cosine
            of_q[shape] = slope * inverse_q * (k - cosine * q)
            of_k[shape] = slope * inverse_k * (q - cosine * k)
        added = unstack(found[:half], params[:half], of_q) + unstack(found[half:], params[half:], of_k)
        return [u + d for u, d in zip(updates, added, strict=True)]

    return transform("qk_align", [query, key], when, act, check)

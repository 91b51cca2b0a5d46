"""Matrix functions and conditions as Optax gradient transformations, for any parameter tree in any training loop.

What projects parameters stands last in the chain, so that neither weight decay nor momentum moves a parameter after
its projection; what changes gradients stands first.

All take an optional extra argument ``step``, the number of completed updates, the present one included: 1 at the first
(``tx.update(grads, state, params, step=n)``). Without it a counter in the state serves. **Under vmap pass an unbatched
step**: the counter is batched there, which turns `lax.cond` into a select and runs the decomposition on every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from qkgeom_jax.config import did_you_mean
from qkgeom_jax.interventions.leaves import Leaf, Leaves
from qkgeom_jax.interventions.pieces import always

# Extra arguments that Optax's own transformations take; a chain hands every argument to every member.
OPTAX_ARGUMENTS = ("value", "grad", "value_fn", "grad_fn")


class InterventionState(NamedTuple):
    """`count`: int32 [], completed updates. `start`: what is remembered of the initial parameters, or ()."""

    count: jax.Array
    start: Any


def _refuse_unknown(name: str, arguments: Any) -> None:
    for argument in arguments:
        if argument not in OPTAX_ARGUMENTS:
            hint = did_you_mean(argument, ("step", "key"))
            raise ValueError(f"{name} got the extra argument {argument!r}; it takes step and key{hint}")


def _completed(name: str, step: Any, count: jax.Array) -> jax.Array:
    """n, from the extra argument where it is given."""
    if step is None:
        return count + 1
    step = jnp.asarray(step)
    if step.ndim or not jnp.issubdtype(step.dtype, jnp.integer):
        raise ValueError(f"step has shape {step.shape} and dtype {step.dtype}; {name} takes a whole number, unbatched")
    return step.astype(jnp.int32)


def transform(
    name: str,
    selections: Sequence[Leaves],
    when: Callable[[Any], Any],
    act: Callable[..., list[jax.Array]],
    at_init: Callable[[optax.Params], Any] = lambda params: (),
    as_matrices: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """The frame of all: `act(leaves, updates, params, start, n, key)` gives the named leaves' new updates when due."""
    for selection in selections:
        if not isinstance(selection, Leaves):
            raise ValueError(f"leaves is {selection!r}; {name} takes what on(...) returns")

    def named(tree: Any) -> list[Leaf]:
        found = [leaf for selection in selections for leaf in selection.find(tree, as_matrices)]
        twice = {leaf.path for leaf in found if sum(leaf.index == other.index for other in found) > 1}
        if twice:
            raise ValueError(f"{name}: {', '.join(sorted(twice))} is both query and key")
        return found

    def init(params: optax.Params) -> InterventionState:
        named(params)
        return InterventionState(jnp.zeros([], jnp.int32), at_init(params))

    def update(updates, state, params=None, *, step=None, key=None, **others):
        if params is None:
            raise ValueError(f"{name} needs params: call update(updates, state, params)")
        _refuse_unknown(name, others)
        n = _completed(name, step, state.count)
        leaves, flat_params = named(params), jax.tree.leaves(params)
        flat, structure = jax.tree.flatten(updates)
        if len(flat) != len(flat_params):
            raise ValueError(f"{name}: updates has {len(flat)} leaves and params has {len(flat_params)}")
        old = [jnp.asarray(flat[leaf.index]) for leaf in leaves]
        own = [jnp.asarray(flat_params[leaf.index]) for leaf in leaves]

        def changed() -> list[jax.Array]:
            new = act(leaves, old, own, state.start, n, key)
            return [a.astype(b.dtype) for a, b in zip(new, old, strict=True)]

        due = when(n)
        if isinstance(due, jax.core.Tracer):
            new = jax.lax.cond(due, changed, lambda: old)
        else:  # `always`, or a loop that is not compiled
            new = changed() if due else old
        for leaf, value in zip(leaves, new, strict=True):
            flat[leaf.index] = value
        return jax.tree.unflatten(structure, flat), InterventionState(n, state.start)

    return optax.GradientTransformationExtraArgs(init, update)


def stack(leaves: Sequence[Leaf], arrays: Sequence[jax.Array]) -> dict[tuple[int, int], jax.Array]:
    """All matrices of one shape as float32 [N, m, n]: a decomposition is compiled once for them, not once a leaf."""
    groups: dict[tuple[int, int], list[jax.Array]] = {}
    for leaf, array in zip(leaves, arrays, strict=True):
        w = leaf.matrices(array).astype(jnp.float32)
        groups.setdefault(w.shape[-2:], []).append(w.reshape(-1, *w.shape[-2:]))
    return {shape: jnp.concatenate(group) for shape, group in groups.items()}


def unstack(leaves: Sequence[Leaf], arrays: Sequence[jax.Array], stacks: dict) -> list[jax.Array]:
    """The inverse of `stack`: arrays like `arrays`, float32."""
    taken = dict.fromkeys(stacks, 0)
    out = []
    for leaf, array in zip(leaves, arrays, strict=True):
        shape = jax.eval_shape(leaf.matrices, array).shape
        first = taken[shape[-2:]]
        taken[shape[-2:]] += math.prod(shape[:-2])
        out.append(leaf.array(stacks[shape[-2:]][first : taken[shape[-2:]]].reshape(shape), array.shape))
    return out


def moved(update: jax.Array, param: jax.Array) -> jax.Array:
    """The parameter that the update leads to, as `optax.apply_updates` has it."""
    return (param + update).astype(param.dtype)


def project(
    change: Callable[..., jax.Array],
    leaves: Leaves,
    *,
    when: Callable[[Any], Any] = always,
    remember: Callable[[jax.Array], Any] | None = None,
    name: str = "project",
) -> optax.GradientTransformationExtraArgs:
    """Replaces matrices by a function of them, after the rest of the update: u := u + f(p + u) - (p + u).

    Stands last in the chain.

    Args:
      change: f, from all named matrices of one shape, float32 [N, m, n], to new ones; where `remember` is given, its
        second argument is what that returned.
      leaves: which, by `on`.
      when: a condition on n, by `every`, `between`, `at`, joined by ``&``, or any function of n that JAX can trace.
      remember: from the initial matrices [N, m, n] to arrays that the state keeps.
      name: how error messages call it.

    Returns:
      A transformation whose state, for any tree, is one counter and what is remembered. Other leaves pass untouched, as
      do all leaves on steps when it is not due; there, it costs a branch. An update keeps its dtype, so that a bfloat16
      parameter and update carry the result to bfloat16's precision.

    Raises:
      ValueError: from update, params is missing or an extra argument unknown; from both init and update, the leaves do
        not fit the tree.

    >>> from qkgeom_jax.interventions import on
    >>> tx = optax.chain(optax.sgd(1.0), project(lambda w: 0.5 * w, on("w")))
    >>> params = {"w": jnp.full([2, 2], 4.0)}
    >>> updates, _ = tx.update({"w": jnp.full([2, 2], 2.0)}, tx.init(params), params)
    >>> optax.apply_updates(params, updates)["w"].tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """

    def kept(params: optax.Params) -> tuple:
        found, flat = leaves.find(params), jax.tree.leaves(params)
        stacks = stack(found, [jnp.asarray(flat[leaf.index]) for leaf in found])
        start = tuple((remember(w),) if remember else () for w in stacks.values())
        for w, own in zip(stacks.values(), start, strict=True):
            shape = jax.eval_shape(change, w, *own).shape
            if shape != w.shape:
                raise ValueError(f"{name}: change made {shape} of matrices {w.shape}; it keeps the shape")
        return start

    def act(found, updates, params, start, n, key):
        stacks = stack(found, [moved(u, p) for u, p in zip(updates, params, strict=True)])
        changes = {shape: change(w, *own) - w for (shape, w), own in zip(stacks.items(), start, strict=True)}
        return [u + d for u, d in zip(updates, unstack(found, params, changes), strict=True)]

    return transform(name, [leaves], when, act, kept)


def freeze(
    leaves: Leaves, *, when: Callable[[Any], Any] = always, name: str = "freeze"
) -> optax.GradientTransformationExtraArgs:
    """Holds leaves as they are, bitwise. Stands last in the chain.

    A leaf that is held from the first update on equals its initial value for ever: an empty update does that exactly,
    which adding the difference to a remembered copy does not. With a later `when`, it stays as it was then.

    >>> from qkgeom_jax.interventions import on
    >>> tx = optax.chain(optax.adamw(0.1, weight_decay=0.5), freeze(on("w")))
    >>> params = {"w": jnp.ones([2, 2])}
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> optax.apply_updates(params, updates)["w"].tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """

    def act(found, updates, params, start, n, key):
        # Minus zero is what leaves every number as it is: -0.0 + 0.0 would be 0.0.
        return [jnp.full_like(u, -0.0) for u in updates]

    return transform(name, [leaves], when, act, as_matrices=False)

"""Which leaves of a parameter tree are meant, and how each is laid out as matrices."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey, keystr, tree_leaves_with_path

Rule = str | Sequence[str] | Callable[[Any], Any] | Any


@dataclass(frozen=True)
class Leaf:
    """A leaf that a rule matched: where it stands among the tree's leaves, and which axes are batch, input, output."""

    index: int
    path: str
    layout: str | None
    heads: int

    def _permutation(self) -> list[int]:
        return [axis for kind in "bio" for axis, letter in enumerate(self.layout) if letter == kind]

    def matrices(self, array: jax.Array) -> jax.Array:
        """The array as [..., m, n]: batch axes and heads first, then all input axes as one, then all output axes."""
        ordered = jnp.transpose(array, self._permutation())
        batch, inputs = self.layout.count("b"), self.layout.count("i")
        m = math.prod(ordered.shape[batch : batch + inputs])
        w = ordered.reshape(*ordered.shape[:batch], m, -1)
        if self.heads == 1:
            return w
        return jnp.moveaxis(w.reshape(*w.shape[:-1], self.heads, -1), -2, -3)

    def array(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `matrices` for an array of `shape`."""
        if self.heads > 1:
            w = jnp.moveaxis(matrices, -3, -2)
            matrices = w.reshape(*w.shape[:-2], -1)
        order = self._permutation()
        ordered = matrices.reshape([shape[axis] for axis in order])
        return jnp.transpose(ordered, [order.index(axis) for axis in range(len(order))])


@dataclass(frozen=True)
class Leaves:
    """The result of `on`."""

    rule: Rule
    layout: str | None
    heads: int

    def find(self, tree: Any, as_matrices: bool = True) -> list[Leaf]:
        """The leaves of `tree` that the rule names; without `as_matrices`, whatever their layout.

        Raises:
          ValueError: the rule matches nothing, or a leaf is no matrix of floats in the stated layout.
        """
        paths = tree_leaves_with_path(tree)
        found = []
        for index, ((path, leaf), named) in enumerate(zip(paths, self._named(tree, paths), strict=True)):
            if named:
                where = keystr(path, simple=True, separator="/")
                layout = self._layout_of(where, leaf) if as_matrices else None
                found.append(Leaf(index, where, layout, self.heads))
        if not found:
            have = ", ".join(keystr(path, simple=True, separator="/") for path, _ in paths[:40]) or "none"
            raise ValueError(f"leaves: {self._description()} matches no leaf; the tree's leaves: {have}")
        return found

    def _description(self) -> str:
        return "the mask" if self._patterns() is None else f"the rule {', '.join(self._patterns())!r}"

    def _patterns(self) -> tuple[str, ...] | None:
        if isinstance(self.rule, str):
            return (self.rule,)
        texts = isinstance(self.rule, (tuple, list)) and all(isinstance(entry, str) for entry in self.rule)
        return tuple(self.rule) if texts else None

    def _named(self, tree: Any, paths: list) -> list[bool]:
        patterns = self._patterns()
        if patterns is not None:
            return [any(_matches(path, pattern) for pattern in patterns) for path, _ in paths]
        mask = jax.tree.leaves(self.rule(tree) if callable(self.rule) else self.rule)
        if len(mask) != len(paths):
            raise ValueError(f"leaves: the mask has {len(mask)} leaves and the parameters have {len(paths)}")
        return [bool(entry) for entry in mask]

    def _layout_of(self, path: str, leaf: Any) -> str:
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"leaves: {path} has dtype {dtype}; only real floating-point leaves are taken as matrices")
        layout = self.layout or ("io" if len(shape) == 2 else None)
        if layout is None:
            raise ValueError(f"layout is missing: {path} has shape {shape}; all but two axes need one, as 'bio'")
        if len(layout) != len(shape):
            raise ValueError(f"layout is {layout!r}, {len(layout)} axes; {path} has shape {shape}")
        outputs = math.prod(size for size, letter in zip(shape, layout, strict=True) if letter == "o")
        if outputs % self.heads:
            raise ValueError(f"heads is {self.heads}; {path} has {outputs} output features (shape {shape}, {layout!r})")
        return layout


def _matches(path: tuple, pattern: str) -> bool:
    """Whether the pattern is the end of the path."""
    # Flax NNX wraps each array in a Variable at init, but not at update: its `.value` is no part of the name.
    wrapped = isinstance(path[-1], GetAttrKey) and path[-1].name == "value" if path else False
    names = [keystr(p, simple=True, separator="/") for p in (path, path[:-1] if wrapped else path)]
    return any(fnmatch.fnmatchcase(f"/{name}", f"*/{pattern.removeprefix('/')}") for name in names)


def on(rule: Rule, *, layout: str | None = None, heads: int = 1) -> Leaves:
    """Names leaves of a parameter tree and states their layout.

    Args:
      rule: what the end of a leaf's path looks like, as ``"attention/key"`` (``*`` stands for anything; path parts are
        joined by ``/``), or several such patterns; or a mask as Optax has it: a tree of booleans with the parameters'
        structure, or a function from the parameters to one.
      layout: a letter for each axis: ``b`` batch (a matrix for each index), ``i`` input, ``o`` output; several input or
        output axes make one. This project's stacked kernels [L, D, D] are ``"bio"``, a Flax attention kernel [D, H, K]
        is ``"ioo"``, a weight [out, in] is ``"oi"``. A leaf of two axes is ``"io"`` (y = x @ w) unless stated.
      heads: 1 treats each matrix as a whole; H treats every block of a H-th of its output features on its own.

    Returns:
      What the transformations of this package take as `leaves`. It is checked against the parameters when they are
      seen: a rule that matches no leaf, and a layout that a leaf does not have, raise ValueError.

    Raises:
      ValueError: `layout` has other letters, or lacks input or output; `heads` is no whole number of at least 1.

    >>> params = {"attention": {"key": jnp.zeros([4, 8, 8]), "query": jnp.zeros([4, 8, 8])}}
    >>> [leaf.path for leaf in on("attention/key", layout="bio").find(params)]
    ['attention/key']
    """
    if layout is not None and not (isinstance(layout, str) and {"i", "o"} <= set(layout) <= {"b", "i", "o"}):
        raise ValueError(f"layout is {layout!r}; allowed: a letter for each axis, b, i or o, among them an i and an o")
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        raise ValueError(f"heads is {heads!r}; allowed: a whole number of at least 1")
    return Leaves(rule, layout, heads)

"""Interventions on queries and keys: Optax transformations, the pieces they are made of, and the arms of a study."""

from qkgeom_jax.interventions.arms import first_update, load_intervention, make_intervention
from qkgeom_jax.interventions.leaves import Leaves, on
from qkgeom_jax.interventions.pieces import (
    When,
    always,
    at,
    between,
    blend,
    change_spectrum,
    every,
    random_rotation,
    with_norm,
)
from qkgeom_jax.interventions.table2 import forced_k_contraction, k_spectrum_clamp, qk_align, qk_decouple
from qkgeom_jax.interventions.transforms import InterventionState, freeze, project

__all__ = [
    "InterventionState",
    "Leaves",
    "When",
    "always",
    "at",
    "between",
    "blend",
    "change_spectrum",
    "every",
    "first_update",
    "forced_k_contraction",
    "freeze",
    "k_spectrum_clamp",
    "load_intervention",
    "make_intervention",
    "on",
    "project",
    "qk_align",
    "qk_decouple",
    "random_rotation",
    "with_norm",
]

"""Strict numerics for every test: an implicit rank promotion is an error, not a broadcast."""

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")

"""The losses and every metric of ONE seed, on tokens that are the same for all. Nothing [T, T] leaves the program."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qkgeom_jax import metrics, model
from qkgeom_jax.config import Config, ModelConfig
from qkgeom_jax.initializers import Params


class Probes(NamedTuple):
    """Fixed windows of tokens: int32 [windows, T + 1]."""

    geometry: jax.Array
    train: jax.Array
    validation: jax.Array


class Measurement(NamedTuple):
    """`layers` and `heads` map a column's name to [L] and, where the metric has heads, to [L, H]."""

    train_loss: jax.Array
    val_loss: jax.Array
    layers: dict[str, jax.Array]
    heads: dict[str, jax.Array]


def windows(tokens: np.ndarray, total: int, context: int) -> np.ndarray:
    """About `total` tokens as evenly spaced windows of context + 1 that start at the split's first token.

    Windows overlap where the split is shorter than `total`.

    Raises:
      ValueError: the split is shorter than one window.
    """
    length = context + 1
    if len(tokens) < length:
        raise ValueError(f"a split of {len(tokens)} tokens is shorter than one window of {length}")
    count = max(1, total // context)
    starts = np.linspace(0, len(tokens) - length, count).astype(np.int64)
    return np.stack([np.asarray(tokens[start : start + length], dtype=np.int32) for start in starts])


def make_probes(train: np.ndarray, validation: np.ndarray, config: Config) -> Probes:
    """The tokens that every seed, depth and arm is measured on."""
    sizes, context = config.evaluation, config.model.context
    return Probes(
        geometry=jnp.asarray(windows(validation, sizes.probe_tokens, context)),
        train=jnp.asarray(windows(train, sizes.loss_tokens, context)),
        validation=jnp.asarray(windows(validation, sizes.loss_tokens, context)),
    )


def mean_loss(params: Params, probe: jax.Array, config: ModelConfig, batch: int) -> jax.Array:
    """`model.cross_entropy` of a probe, a batch at a time so that memory stays that of a training step."""
    losses = jax.lax.map(
        lambda window: model.cross_entropy(params, window[None], config), probe, batch_size=min(batch, len(probe))
    )
    return losses.mean()


def measure(params: Params, probes: Probes, config: Config) -> Measurement:
    """Losses and the geometry of every layer and head, in float32 at highest precision whatever trained it."""
    exact = ModelConfig(**{**vars(config.model), "compute_dtype": "float32", "rematerialise": False})
    with jax.default_matmul_precision("highest"):

        def observe(layer: model.Layer, block: Params) -> dict[str, jax.Array]:
            geometry = metrics.attention_geometry(
                layer.query,
                layer.key,
                block["attention"]["query"],
                block["attention"]["key"],
                spectrum_sequences=config.evaluation.spectrum_sequences,
            )
            residual = layer.residual.reshape(-1, exact.width)
            return geometry | {"activation_norm_residual": metrics.activation_norm(residual)}

        _, geometry = model.apply(params, probes.geometry[:, :-1], exact, observe)
        batch = config.training.batch
        train_loss = mean_loss(params, probes.train, exact, batch)
        val_loss = mean_loss(params, probes.validation, exact, batch)
    heads = {name: value for name, value in geometry.items() if value.ndim == 2}
    layers = {name: value.mean(-1) if value.ndim == 2 else value for name, value in geometry.items()}
    return Measurement(train_loss, val_loss, layers, heads)

"""The grid's metrics of every layer of a checkpoint, its loss, and what its loss says about how its files were read."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from qkgeom_jax import metrics
from qkgeom_jax.pretrained import forward
from qkgeom_jax.pretrained.architecture import Architecture
from qkgeom_jax.pretrained.checkpoint import Checkpoint, with_reading
from qkgeom_jax.pretrained.families import Block
from qkgeom_jax.results import METRIC_COLUMNS

CONTRAST = "contrast_normalised"
# As in the grid: the spectra of Q K^T make up most of the time.
SPECTRUM_SEQUENCES = 16
# A reading whose loss is lower by this much (nats a token) is not lower by chance.
NOTABLE_NATS = 0.1


@dataclass(frozen=True)
class Measurement:
    """One checkpoint on some tokens.

    Attributes:
      rows: for each layer `results.METRIC_COLUMNS` and `contrast_normalised`; None where a value is not defined.
      heads: for each per-head quantity [L, H], or [L, G] where it is of the key heads.
      loss: mean next-token nats within the windows; NaN with windows of one token.
    """

    rows: list[dict[str, float | None]]
    heads: dict[str, np.ndarray]
    loss: float


@functools.partial(jax.jit, static_argnames=("a", "spectrum_sequences"))
def _measured_layer(
    x: jax.Array, block: Block, scale: jax.Array, a: Architecture, spectrum_sequences: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
    with jax.default_matmul_precision("highest"):
        added, seen = forward.attend(x, block, scale, a)
        geometry = _geometry(seen, block, scale, a, spectrum_sequences)
        return forward.advance(x, added, block, a), geometry


def _geometry(
    seen: forward.Activations, block: Block, scale: jax.Array, a: Architecture, spectrum_sequences: int
) -> dict[str, jax.Array]:
    """The grid's metrics; those of keys over the distinct key heads."""
    group = a.heads // a.key_heads
    w_k = block["key"]["kernel"].reshape(a.width, a.key_heads, a.head_width)
    # attention_geometry divides by sqrt(K) itself
    scored_query = seen.rotated_query * (scale * math.sqrt(a.head_width))
    found = metrics.attention_geometry(
        seen.query,
        forward.repeat_keys(seen.key, a),
        block["query"]["kernel"],
        jnp.repeat(w_k, group, axis=1).reshape(a.width, -1),
        spectrum_sequences=spectrum_sequences,
        scored=(scored_query, forward.repeat_keys(seen.rotated_key, a)),
    )
    found[CONTRAST] = (found["participation_ratio_q"] - found["participation_ratio_k"]) / a.head_width
    found["activation_norm_residual"] = metrics.activation_norm(seen.residual.reshape(-1, a.width))
    for name in found.keys() & set(_KEY_COLUMNS):
        found[name] = found[name][::group]
    # Every key head stood there `group` times; the joint participation ratio does not change by that.
    for name in ("frobenius_norm_k", "spectral_norm_k"):
        found[name] = found[name] / math.sqrt(group)
    return found


_KEY_COLUMNS = tuple(
    name for name in metrics.PER_HEAD if name.endswith("_k") or name.startswith("participation_ratio_k")
)


@jax.jit
def _tally(x: jax.Array, rows: jax.Array, targets: jax.Array, state: tuple) -> tuple:
    """Running log-sum-exp [N] and the targets' logits [N] after `rows` [C, D] more of the vocabulary."""
    with jax.default_matmul_precision("highest"):
        logits = x @ rows.T
    total, chosen = state
    total = jnp.logaddexp(total, jax.scipy.special.logsumexp(logits, axis=-1))
    inside = (targets >= 0) & (targets < len(rows))
    value = jnp.take_along_axis(logits, jnp.clip(targets, 0, len(rows) - 1)[:, None], axis=-1)[:, 0]
    return total, jnp.where(inside, value, chosen)


def _loss(checkpoint: Checkpoint, x: jax.Array, ids: np.ndarray) -> float:
    """Mean next-token nats; [N, V] logits never exist as a whole."""
    if ids.shape[1] < 2:
        return math.nan
    y = forward.last_norm(x, checkpoint.norm(), checkpoint.architecture.epsilon)
    y = y[:, :-1].reshape(-1, checkpoint.architecture.width)
    targets = ids[:, 1:].reshape(-1)
    state, start = (jnp.full(len(y), -jnp.inf), jnp.zeros(len(y))), 0
    for chunk in checkpoint.head():
        for rows in (chunk[at : at + 4096] for at in range(0, len(chunk), 4096)):
            state = _tally(y, jnp.asarray(rows), jnp.asarray(targets - start), state)
            start += len(rows)
    total, chosen = state
    return float((total - chosen).mean())


def measure(
    checkpoint: Checkpoint,
    token_ids: np.ndarray,
    *,
    spectrum_sequences: int = SPECTRUM_SEQUENCES,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:
    """Every metric of every layer, one layer's weights and activations in memory at a time.

    Participation ratios, covariances, norms and effective_rank_q and _k are of queries and keys as projected (with their
    biases, before the rotary position embedding); attention, logits and effective_rank_qk are after it, with every scale
    of the logits. With grouped heads a key head's quantities are over the distinct key heads; what pairs queries with keys
    (contrast_normalised, cosine similarity, alignment, effective_rank_qk_weight) takes each query head with the key head
    that it uses. Weight metrics are of the kernels alone.

    Args:
      checkpoint: as `open_checkpoint` gives it.
      token_ids: whole numbers [windows, T], T at most the model's context.
      spectrum_sequences: how many of the first windows enter the spectra of Q K^T.
      progress: called with the layers done and their number.
    Returns:
      A `Measurement`.
    Raises:
      ValueError: ids that the model does not have, or too many positions.
      CheckpointFormatError: a file that was cut since it was opened.
    Numerics: as `qkgeom_jax.metrics.attention_geometry`.
    Source: Table 6.
    """
    ids = forward.check_tokens(checkpoint, token_ids)
    step = functools.partial(_measured_layer, spectrum_sequences=spectrum_sequences)
    layers: list[dict[str, np.ndarray]] = []
    x = None
    for geometry, x in forward.residuals(checkpoint, ids, step):
        layers.append({name: np.asarray(value, np.float32) for name, value in geometry.items()})
        if progress is not None:
            progress(len(layers), checkpoint.layers)
    heads = {name: np.stack([layer[name] for layer in layers]) for name, value in layers[0].items() if value.ndim == 1}
    rows = [{name: _cell(layer[name]) for name in (*METRIC_COLUMNS, CONTRAST)} for layer in layers]
    return Measurement(rows, heads, _loss(checkpoint, x, ids))


def _cell(values: np.ndarray) -> float | None:
    mean = float(values.mean(dtype=np.float32))
    return mean if math.isfinite(mean) else None


def loss(checkpoint: Checkpoint, token_ids: np.ndarray) -> float:
    """Mean next-token nats of windows [B, T], without any metric."""
    ids = forward.check_tokens(checkpoint, token_ids)
    x = None
    for _, x in forward.residuals(checkpoint, ids):
        pass
    return _loss(checkpoint, x, ids)


def _other_readings(checkpoint: Checkpoint) -> dict[str, Checkpoint]:
    """Ways of reading the same bytes that have the same shapes, and what each would mean."""
    a = checkpoint.architecture
    found = {}
    if a.family == "llama" and not str(checkpoint.path).endswith(".gguf"):
        found["its query and key rows are permuted (in neighbouring pairs, as in GGUF files)"] = with_reading(
            checkpoint, permuted=True
        )
    for factor in (0.25, 0.5, 2, 4):
        heads, keys, width = a.heads * factor, a.key_heads * factor, a.head_width / factor
        rotary = a.rotary_width / factor
        if all(n == int(n) for n in (heads, keys, width)) and min(heads, keys) >= 1 and width >= 2 and rotary % 2 == 0:
            found[f"it has {int(heads)} heads, not {a.heads}"] = with_reading(
                checkpoint, heads=int(heads), key_heads=int(keys), head_width=int(width), rotary_width=int(rotary)
            )
    if a.family == "gpt_neox":
        found["its query_key_value matrices are [Q | K | V], not interleaved per head"] = with_reading(
            checkpoint, flat=True
        )
    return found


def reading_notes(checkpoint: Checkpoint, token_ids: np.ndarray) -> list[str]:
    """What a trained model's loss tells about mistakes that shapes cannot show.

    The same bytes are read in the other ways that have the same shapes (half or twice the heads, permuted rows of Llama,
    a flat query_key_value of GPT-NeoX); where one of them predicts the text clearly better, the files were written so, or
    the configuration is wrong. An untrained model shows nothing of this.

    Args:
      checkpoint: as `open_checkpoint` gives it.
      token_ids: text that the model should predict, whole numbers [windows, T]; a few hundred tokens are enough.
    Returns:
      A sentence for each suspicion; none where all is well.
    Raises:
      ValueError: as `measure`.
    Source: ours.
    """
    own, uniform = loss(checkpoint, token_ids), math.log(checkpoint.vocabulary)
    notes = []
    for text, other in _other_readings(checkpoint).items():
        if (value := loss(other, token_ids)) < min(own - NOTABLE_NATS, uniform):
            notes.append(f"{checkpoint.path}: as if {text}: its loss falls from {own:.3f} to {value:.3f} when read so")
    if not own < uniform:
        notes.append(
            f"{checkpoint.path}: its loss of {own:.3f} is not below {uniform:.3f}, that of equal probabilities: untrained, "
            "read wrongly, or not of this text"
        )
    return notes

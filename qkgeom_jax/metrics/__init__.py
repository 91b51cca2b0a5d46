"""Geometry of queries, keys and attention, for any JAX program."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from qkgeom_jax.metrics.attention import (
    attention_entropy,
    attention_gap,
    logit_statistics,
    statistics_by_key,
    top_k_mass,
)
from qkgeom_jax.metrics.linalg import (
    product_singular_values,
    qr,
    scaled,
    singular_values,
    stacked,
    svd,
    transpose,
    triangles,
    unstacked,
)
from qkgeom_jax.metrics.spectra import (
    covariance_statistics,
    effective_rank,
    effective_rank_activations,
    effective_rank_qk,
    effective_rank_qk_weight,
    participation_ratio,
    participation_ratio_weight,
    spectrum_statistics,
    subtract_mean,
    trace_ratio,
)
from qkgeom_jax.metrics.weights import (
    activation_norm,
    column_alignment,
    cosine_similarity,
    frobenius_norm,
    spectral_norm,
)

__all__ = (
    "PER_HEAD",
    "PER_LAYER",
    "activation_norm",
    "attention_entropy",
    "attention_gap",
    "attention_geometry",
    "column_alignment",
    "cosine_similarity",
    "covariance_statistics",
    "effective_rank",
    "effective_rank_activations",
    "effective_rank_qk",
    "effective_rank_qk_weight",
    "frobenius_norm",
    "logit_statistics",
    "participation_ratio",
    "participation_ratio_weight",
    "product_singular_values",
    "qr",
    "singular_values",
    "spectral_norm",
    "svd",
    "top_k_mass",
)

PER_HEAD = (
    "attention_entropy",
    "top_1_mass",
    "top_5_mass",
    "attention_gap",
    "participation_ratio_q",
    "participation_ratio_k",
    "participation_ratio_q_uncentred",
    "participation_ratio_k_uncentred",
    "participation_ratio_q_weight",
    "participation_ratio_k_weight",
    "effective_rank_q",
    "effective_rank_k",
    "covariance_trace_q",
    "covariance_trace_k",
    "covariance_max_q",
    "covariance_max_k",
    "covariance_min_q",
    "covariance_min_k",
    "covariance_condition_q",
    "covariance_condition_k",
    "effective_rank_qk",
    "effective_rank_qk_weight",
    "logit_mean",
    "logit_std",
    "logit_variance",
    "logit_max",
    "activation_norm_q",
    "activation_norm_k",
)
PER_LAYER = (
    "cosine_similarity",
    "column_alignment",
    "column_alignment_signed",
    "participation_ratio_q_joint",
    "participation_ratio_k_joint",
    "frobenius_norm_q",
    "frobenius_norm_k",
    "spectral_norm_q",
    "spectral_norm_k",
)


@functools.partial(jax.jit, static_argnames="spectrum_sequences")
def attention_geometry(
    q: jax.Array,
    k: jax.Array,
    w_q: jax.Array | None = None,
    w_k: jax.Array | None = None,
    *,
    mask: jax.Array | None = None,
    spectrum_sequences: int | None = None,
    scored: tuple[jax.Array, jax.Array] | None = None,
) -> dict[str, jax.Array]:
    """Every metric of one attention layer, under the names of the results' columns.

    Args:
      q, k: [B, H, T, K], activations of B sequences, not yet divided by sqrt(K); any floating type.
      w_q, w_k: [D, H*K], input axis first, heads in consecutive blocks of K columns; without them the metrics of the
        weights are left out.
      mask: [T, T] boolean, True = allowed; by default causal.
      spectrum_sequences: how many of the first sequences enter the spectra of Q K^T; by default all.
      scored: queries and keys [B, H, T, K] as they enter the logits, where these differ from `q` and `k` (after a rotary
        position embedding, or scaled); the attention, logit and effective_rank_qk columns are theirs.
    Returns:
      The names of `PER_HEAD` with [H], those of `PER_LAYER` with []; float32, units and degenerate values as in the
      functions of the same name. Covariances, participation ratios and norms are taken over the B*T tokens; attention
      and effective_rank_qk are averaged over sequences (and queries); logit_mean, logit_std and logit_variance pool
      all allowed pairs of all sequences, logit_max is their maximum. A head that is not finite is NaN for itself.
    Raises:
      ValueError: shapes that do not fit, one weight without the other, a mask that is not boolean [T, T].
    Numerics: within 1e-4 of float64 (relative); matrix products at the highest precision.
    Source: Table 1.

    >>> q = jax.random.normal(jax.random.key(0), (4, 2, 8, 3))
    >>> print(attention_geometry(q, q)["participation_ratio_q"].shape)
    (2,)
    """
    q, k = jnp.asarray(q).astype(jnp.float32), jnp.asarray(k).astype(jnp.float32)
    if q.ndim != 4 or q.shape != k.shape:
        raise ValueError(f"q has shape {q.shape} and k {k.shape}; both must be [B, H, T, K]")
    batch, heads, positions, width = q.shape
    weights = _head_weights(w_q, w_k, heads, width)
    if mask is None:
        mask = jnp.tril(jnp.ones((positions, positions), bool))
    mask = jnp.asarray(mask)
    if mask.shape != (positions, positions) or mask.dtype != jnp.bool_:
        raise ValueError(f"mask is {mask.dtype} {mask.shape}; it must be boolean {(positions, positions)}")
    if spectrum_sequences is not None and spectrum_sequences < 1:
        raise ValueError(f"spectrum_sequences is {spectrum_sequences}; it must be at least 1")
    if scored is None:
        scored_q, scored_k = q, k
    else:
        scored_q, scored_k = (jnp.asarray(x).astype(jnp.float32) for x in scored)
        if scored_q.shape != q.shape or scored_k.shape != q.shape:
            raise ValueError(f"scored has the shapes {scored_q.shape} and {scored_k.shape}; both must be {q.shape}")
    with jax.default_matmul_precision("highest"):
        logits = jnp.einsum("bhik,bhjk->jbhi", scored_q, scored_k) / width**0.5
        results = _attention_metrics(logits, mask.T[:, None, None, :])
        # [2, H, B*T, K]: queries and keys side by side, so that each computation stands in the program once
        tokens = jnp.stack([q, k]).swapaxes(1, 2).reshape(2, heads, batch * positions, width)
        tokens, scale = scaled(tokens)
        rest, mean = subtract_mean(tokens)
        pairs = _participation_ratios(rest, mean, scale, weights)
        pairs["activation_norm"] = activation_norm(tokens) * scale[..., 0, 0]
        few, _ = scaled(jnp.stack([scored_q, scored_k])[:, :spectrum_sequences])
        (s, pairs["effective_rank"]), *products = _spectra([rest, few] if weights is None else [rest, few, weights])
        covariance = spectrum_statistics(s * scale[..., 0], batch * positions)
        pairs |= {f"covariance_{name}": value for name, value in covariance.items()}
        results["effective_rank_qk"] = jnp.mean(products[0][1], axis=0)
        if weights is not None:
            results["effective_rank_qk_weight"] = products[1][1]
            both = jnp.stack([jnp.asarray(w).astype(jnp.float32) for w in (w_q, w_k)])
            pairs |= {"frobenius_norm": frobenius_norm(both), "spectral_norm": spectral_norm(both)}
            results["cosine_similarity"] = cosine_similarity(w_q, w_k)
            results["column_alignment"] = column_alignment(w_q, w_k)
            results["column_alignment_signed"] = column_alignment(w_q, w_k, signed=True)
    for name, (of_queries, of_keys) in pairs.items():
        _, _, variant = name.partition("participation_ratio_")
        results[f"participation_ratio_q_{variant}" if variant else f"{name}_q"] = of_queries
        results[f"participation_ratio_k_{variant}" if variant else f"{name}_k"] = of_keys
    return results


def _head_weights(w_q, w_k, heads: int, width: int) -> jax.Array | None:
    """[2, H, D, K] with largest entry 1 in each head, or None."""
    if w_q is None and w_k is None:
        return None
    if w_q is None or w_k is None or jnp.ndim(w_q) != 2 or jnp.shape(w_q) != jnp.shape(w_k):
        shapes = [None if w is None else jnp.shape(w) for w in (w_q, w_k)]
        raise ValueError(f"w_q and w_k have the shapes {shapes}; give both, of the same shape [D, H*K], or neither")
    if jnp.shape(w_q)[1] != heads * width:
        raise ValueError(f"w_q has shape {jnp.shape(w_q)}; {heads} heads of width {width} need {heads * width} columns")
    both = jnp.stack([jnp.asarray(w).astype(jnp.float32) for w in (w_q, w_k)])
    return scaled(both.reshape(2, -1, heads, width).swapaxes(1, 2))[0]


def _attention_metrics(logits: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Those of attention and logits [T keys, B, H, T queries], with the sequences pooled."""
    each = statistics_by_key(logits, mask)
    results = {name: jnp.mean(value, axis=0) for name, value in each.items()}
    # every sequence has the same number of pairs: variance within plus variance of the means
    parts = jnp.concatenate([each["logit_std"], each["logit_mean"] - results["logit_mean"][None]])
    largest = jnp.max(jnp.abs(parts), axis=0, keepdims=True)
    largest = jnp.where(largest > 0, largest, 1.0)
    std = (jnp.sqrt(jnp.sum((parts / largest) ** 2, axis=0, keepdims=True) / len(each["logit_std"])) * largest)[0]
    return results | {"logit_std": std, "logit_variance": std * std, "logit_max": jnp.max(each["logit_max"], axis=0)}


def _participation_ratios(rest, mean, scale, weights) -> dict[str, jax.Array]:
    """All of them, queries and keys: from one Gram matrix over all heads of rest [2, H, N, K], and that of the weights."""
    heads, tokens, width = rest.shape[1:]
    together = rest.swapaxes(1, 2).reshape(2, tokens, heads * width)
    gram = (transpose(together) @ together).reshape(2, heads, width, heads, width)
    own = jnp.stack([gram[:, h, :, h] for h in range(heads)], axis=1)
    grams = [own, own + tokens * mean[..., 0, :, None] * mean]
    if weights is not None:
        grams.append(transpose(weights) @ weights)
    names = ("participation_ratio", "participation_ratio_uncentred", "participation_ratio_weight")
    size = scale / jnp.max(scale, axis=1, keepdims=True)
    joint = gram * size[..., None] * size.reshape(2, 1, 1, heads, 1)
    joint = trace_ratio(joint.reshape(2, heads * width, heads * width))
    return {**dict(zip(names, trace_ratio(jnp.stack(grams)))), "participation_ratio_joint": joint}


def _spectra(matrices: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    """Singular values, and effective ranks, of the first batch, and of a[0] a[1]^T for each of the others."""
    first, *others = triangles(*matrices)
    cores = [first, *(a[0] @ transpose(a[1]) for a in others)]
    s = singular_values(stacked(cores))
    # a core is K x K also where its matrices have fewer rows
    ranks = np.repeat([min(x.shape[-2:]) for x in matrices], [math.prod(core.shape[:-2]) for core in cores])
    s = jnp.where(np.arange(s.shape[-1]) < ranks[:, None], s, 0.0)
    return list(zip(unstacked(s, cores), unstacked(effective_rank(s), cores)))

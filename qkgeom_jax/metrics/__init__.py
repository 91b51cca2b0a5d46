"""Geometry of queries, keys and attention, for any JAX program."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qkgeom_jax.metrics.attention import attention_entropy, attention_gap, logit_statistics, top_k_mass
from qkgeom_jax.metrics.linalg import product_singular_values, qr, singular_values, svd
from qkgeom_jax.metrics.spectra import (
    covariance_statistics,
    effective_rank,
    effective_rank_activations,
    effective_rank_qk,
    effective_rank_qk_weight,
    participation_ratio,
    participation_ratio_weight,
)
from qkgeom_jax.metrics.weights import (
    activation_norm,
    column_alignment,
    cosine_similarity,
    frobenius_norm,
    spectral_norm,
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


def attention_geometry(q, k, w_q=None, w_k=None, *, mask=None, spectrum_sequences=None) -> dict[str, jax.Array]:
    """Every metric of one attention layer."""
    q, k = jnp.asarray(q).astype(jnp.float32), jnp.asarray(k).astype(jnp.float32)
    batch, heads, positions, width = q.shape
    mask = jnp.tril(jnp.ones((positions, positions), bool)) if mask is None else jnp.asarray(mask)
    results: dict[str, jax.Array] = {}
    with jax.default_matmul_precision("highest"):
        logits = jnp.einsum("bhik,bhjk->bhij", q, k) / width**0.5
        results["attention_entropy"] = jnp.mean(attention_entropy(logits, mask), axis=0)
        results["top_1_mass"] = jnp.mean(top_k_mass(logits, 1, mask), axis=0)
        results["top_5_mass"] = jnp.mean(top_k_mass(logits, 5, mask), axis=0)
        results["attention_gap"] = jnp.mean(attention_gap(logits, mask), axis=0)
        statistics = logit_statistics(logits, mask)
        mean = jnp.mean(statistics["logit_mean"], axis=0, keepdims=True)
        variance = jnp.mean(statistics["logit_variance"] + (statistics["logit_mean"] - mean) ** 2, axis=0)
        results["logit_mean"] = mean[0]
        results["logit_std"] = jnp.sqrt(variance)
        results["logit_variance"] = variance
        results["logit_max"] = jnp.max(statistics["logit_max"], axis=0)
        for name, x in (("q", q), ("k", k)):
            tokens = jnp.swapaxes(x, 0, 1).reshape(heads, batch * positions, width)
            results[f"participation_ratio_{name}"] = participation_ratio(tokens)
            results[f"participation_ratio_{name}_uncentred"] = participation_ratio(tokens, centred=False)
            joint = jnp.swapaxes(x, 1, 2).reshape(batch * positions, heads * width)
            results[f"participation_ratio_{name}_joint"] = participation_ratio(joint)
            results[f"effective_rank_{name}"] = effective_rank_activations(tokens)
            for statistic, value in covariance_statistics(tokens).items():
                results[f"covariance_{statistic}_{name}"] = value
            results[f"activation_norm_{name}"] = activation_norm(tokens)
        few = slice(None, spectrum_sequences)
        results["effective_rank_qk"] = jnp.mean(effective_rank_qk(q[few], k[few]), axis=0)
        if w_q is not None and w_k is not None:
            per_head = {}
            for name, w in (("q", w_q), ("k", w_k)):
                w = jnp.asarray(w).astype(jnp.float32)
                per_head[name] = jnp.moveaxis(w.reshape(w.shape[0], heads, width), 1, 0)
                results[f"participation_ratio_{name}_weight"] = participation_ratio_weight(per_head[name])
                results[f"frobenius_norm_{name}"] = frobenius_norm(w)
                results[f"spectral_norm_{name}"] = spectral_norm(w)
            results["effective_rank_qk_weight"] = effective_rank_qk_weight(per_head["q"], per_head["k"])
            results["cosine_similarity"] = cosine_similarity(w_q, w_k)
            results["column_alignment"] = column_alignment(w_q, w_k)
            results["column_alignment_signed"] = column_alignment(w_q, w_k, signed=True)
    return results

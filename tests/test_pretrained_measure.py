"""The grid's metrics on checkpoints, against an independent computation and the grid itself; wrong readings seen by loss."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pretrained_models as models
from qkgeom_jax import metrics, pretrained, results
from qkgeom_jax.pretrained.gguf_file import unpermute
from qkgeom_jax.pretrained.measure import loss

GLASSLLM = Path(__file__).parents[1].parent / "shared/models/glassllm_en"


def ratio(x):
    """Participation ratio of the centred covariance of x [N, K]."""
    eigenvalues = np.linalg.eigvalsh(np.cov(x.T))
    return eigenvalues.sum() ** 2 / np.sum(eigenvalues**2)


def rank(w):
    """Effective rank of a matrix."""
    s = np.linalg.svd(w, compute_uv=False)
    p = s[s > 0] / s.sum()
    return np.exp(-np.sum(p * np.log(p)))


def first_layer(arrays, ids, values):
    """Queries and keys of a Llama's first layer in float64: [B, H, T, K] before and after the rotation."""
    w = {name.removeprefix("model.layers.0."): a.astype(np.float64) for name, a in arrays.items()}
    x = w["model.embed_tokens.weight"][ids]
    y = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + values["rms_norm_eps"]) * w["input_layernorm.weight"]
    heads = {"q": values["num_attention_heads"], "k": values["num_key_value_heads"]}
    found = [
        (y @ w[f"self_attn.{p}_proj.weight"].T).reshape(*ids.shape, n, -1).swapaxes(1, 2) for p, n in heads.items()
    ]
    width = found[0].shape[-1]
    pairs = width // 2
    angle = np.arange(ids.shape[1])[:, None] * values["rope_theta"] ** (-2 * np.arange(pairs) / width)

    def rotate(a):
        z = (a[..., :pairs] + 1j * a[..., pairs:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    return x, found, [rotate(a) for a in found]


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    folder, arrays = models.make(tmp_path_factory.mktemp("llama"), "llama")
    checkpoint = pretrained.open_checkpoint(folder)
    ids = models.ids()
    return checkpoint, arrays, ids, pretrained.measure(checkpoint, ids)


def test_key_quantities_are_over_distinct_key_heads_before_the_rotation(grouped):
    checkpoint, arrays, ids, measured = grouped
    _, (q, k), _ = first_layer(arrays, ids, models.config("llama"))
    row = measured.rows[0]
    of_queries = np.array([ratio(q[:, h].reshape(-1, 4)) for h in range(9)])
    of_keys = np.array([ratio(k[:, g].reshape(-1, 4)) for g in range(3)])
    np.testing.assert_allclose(measured.heads["participation_ratio_q"][0], of_queries, rtol=1e-4)
    np.testing.assert_allclose(measured.heads["participation_ratio_k"][0], of_keys, rtol=1e-4)
    assert row["participation_ratio_k"] == pytest.approx(of_keys.mean(), rel=1e-4)
    joint = k.swapaxes(1, 2).reshape(-1, 12)
    assert row["participation_ratio_k_joint"] == pytest.approx(ratio(joint), rel=1e-4)
    w_k = arrays["model.layers.0.self_attn.k_proj.weight"].astype(np.float64)
    assert row["frobenius_norm_k"] == pytest.approx(np.linalg.norm(w_k), rel=1e-5)
    assert row["spectral_norm_k"] == pytest.approx(np.linalg.norm(w_k, 2), rel=1e-4)
    assert row["activation_norm_k"] == pytest.approx(np.linalg.norm(k, axis=-1).mean(), rel=1e-5)


def test_the_contrast_pairs_each_query_head_with_the_key_head_it_uses(grouped):
    checkpoint, arrays, ids, measured = grouped
    _, (q, k), _ = first_layer(arrays, ids, models.config("llama"))
    paired = [ratio(q[:, h].reshape(-1, 4)) - ratio(k[:, h // 3].reshape(-1, 4)) for h in range(9)]
    np.testing.assert_allclose(measured.heads["contrast_normalised"][0], np.array(paired) / 4, atol=1e-5)
    assert measured.rows[0]["contrast_normalised"] == pytest.approx(np.mean(paired) / 4, abs=1e-5)
    w_q, w_k = (arrays[f"model.layers.0.self_attn.{p}_proj.weight"].astype(np.float64) for p in "qk")
    w_k = np.repeat(w_k.reshape(3, 4, 36), 3, axis=0).reshape(36, 36)
    cosines = np.sum(w_q * w_k, 1) / np.linalg.norm(w_q, axis=1) / np.linalg.norm(w_k, axis=1)
    assert measured.rows[0]["column_alignment"] == pytest.approx(np.abs(cosines).mean(), rel=1e-4)
    products = [rank(w_q[4 * h : 4 * h + 4].T @ w_k[4 * h : 4 * h + 4]) for h in range(9)]
    assert measured.rows[0]["effective_rank_qk_weight"] == pytest.approx(np.mean(products), rel=1e-4)


def test_attention_logits_and_their_rank_are_after_the_rotation(grouped):
    checkpoint, arrays, ids, measured = grouped
    x, before, (q, k) = first_layer(arrays, ids, models.config("llama"))
    logits = q @ np.repeat(k, 3, axis=1).swapaxes(-1, -2)
    row = measured.rows[0]
    assert row["effective_rank_qk"] == pytest.approx(np.mean([rank(m) for one in logits for m in one]), rel=1e-3)
    logits = logits / 2
    allowed = np.tril(np.ones((20, 20), bool))
    weights = np.where(allowed, np.exp(logits), 0)
    weights /= weights.sum(-1, keepdims=True)
    entropy = -np.sum(np.where(allowed, weights * np.log(np.where(allowed, weights, 1)), 0), -1)
    assert row["attention_entropy"] == pytest.approx(entropy.mean(), rel=1e-4)
    assert row["logit_max"] == pytest.approx(logits[..., allowed].max(axis=(0, 2)).mean(), rel=1e-4)
    unrotated = before[0] @ np.repeat(before[1], 3, axis=1).swapaxes(-1, -2) / 2
    assert abs(unrotated[..., allowed].max(axis=(0, 2)).mean() - row["logit_max"]) > 1e-2  # the test can fail
    assert row["activation_norm_residual"] == pytest.approx(np.linalg.norm(x, axis=-1).mean(), rel=1e-5)


def test_rows_have_the_grid_s_columns_and_the_loss_is_that_of_the_logits(grouped):
    checkpoint, _, ids, measured = grouped
    assert len(measured.rows) == 2 and measured.heads["attention_entropy"].shape == (2, 9)
    assert measured.heads["effective_rank_k"].shape == (2, 3)
    for row in measured.rows:
        assert tuple(row) == (*results.METRIC_COLUMNS, "contrast_normalised")
        assert all(value is not None and math.isfinite(value) for value in row.values())
    log_p = jax.nn.log_softmax(pretrained.apply(checkpoint, ids))
    expected = -np.take_along_axis(np.asarray(log_p)[:, :-1], ids[:, 1:, None], -1).mean()
    assert measured.loss == pytest.approx(expected, abs=1e-5) == loss(checkpoint, ids)


def test_inverse_layer_scaling_divides_the_second_layer_s_logits(tmp_path):
    plain = pretrained.open_checkpoint(models.make(tmp_path / "a", "gpt2", n_layer=2)[0])
    scaled = pretrained.open_checkpoint(models.make(tmp_path / "b", "gpt2", scale_attn_by_inverse_layer_idx=True)[0])
    seen = {}
    for name, checkpoint in (("plain", plain), ("scaled", scaled)):
        pretrained.apply(checkpoint, models.ids(), lambda at, layer: seen.update({(name, at): layer}))
    np.testing.assert_array_equal(seen["scaled", 0].logits, seen["plain", 0].logits)
    np.testing.assert_allclose(2 * seen["scaled", 1].logits, seen["plain", 1].logits, atol=1e-5)
    rows = [pretrained.measure(c, models.ids()).rows[1] for c in (plain, scaled)]
    assert rows[0]["logit_std"] == pytest.approx(2 * rows[1]["logit_std"], rel=1e-5)
    assert rows[0]["effective_rank_qk"] == pytest.approx(rows[1]["effective_rank_qk"], rel=1e-4)


def test_one_layer_is_read_after_another(tmp_path):
    checkpoint = pretrained.open_checkpoint(models.make(tmp_path / "a", "gpt_neox")[0])
    events = []

    def watched(name, tensor):
        return dataclasses.replace(tensor, rows=lambda *at: (events.append(name), tensor.rows(*at))[1])

    watched_tensors = {name: watched(name, tensor) for name, tensor in checkpoint.tensors.items()}
    checkpoint = dataclasses.replace(checkpoint, tensors=watched_tensors)
    pretrained.measure(checkpoint, models.ids(), progress=lambda done, total: events.append((done, total)))
    first, second = events.index((1, 2)), events.index((2, 2))
    assert events[0] == "embed_in.weight" and all("layers.0." in name for name in events[1:first])
    assert all("layers.1." in name for name in events[first + 1 : second])
    assert set(events[second + 1 :]) == {"final_layer_norm.weight", "final_layer_norm.bias", "embed_out.weight"}


def test_values_that_are_not_finite_are_undefined_and_others_stay(tmp_path):
    values = models.config("gpt2")
    arrays = models.tensors(values)
    arrays["transformer.h.1.attn.c_attn.weight"][0, 0] = np.nan
    measured = pretrained.measure(
        pretrained.open_checkpoint(models.write(tmp_path / "a", values, arrays)), models.ids()
    )
    assert measured.rows[0]["participation_ratio_q"] is not None
    assert measured.rows[1]["participation_ratio_q"] is None
    assert math.isnan(measured.loss)


def test_windows_of_one_token_have_no_loss(tmp_path):
    checkpoint = pretrained.open_checkpoint(models.make(tmp_path / "a", "gpt2")[0])
    assert math.isnan(loss(checkpoint, models.ids(3, 1)))


def test_scored_arrays_of_another_shape_are_refused():
    q = jnp.ones((2, 3, 8, 4))
    with pytest.raises(ValueError, match="scored has the shapes"):
        metrics.attention_geometry(q, q, scored=(q, q[:1]))


def sample(checkpoint, windows=6, length=32):
    """Text that the model itself would write: what it predicts best when it is read rightly."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, checkpoint.vocabulary, (windows, length))
    for at in range(1, length):
        logits = np.asarray(pretrained.apply(checkpoint, ids))[:, at - 1]
        ids[:, at] = np.argmax(logits + rng.gumbel(size=logits.shape), axis=-1)
    return ids


def strong(family, **changes):
    """A random model in which attention decides what follows: large values, no MLP."""
    values = models.config(family, **changes)
    arrays = models.tensors(values)
    for name, w in arrays.items():
        if any(
            part in name
            for part in ("q_proj", "k_proj", "v_proj", "o_proj", "c_attn", "attn.c_proj", "query_key", "dense.w")
        ):
            w *= 4
        if "mlp" in name:
            w *= 0.1
    return values, arrays


def permute(w, heads):
    """The inverse of `unpermute`."""
    order = unpermute(np.arange(len(w))[:, None], heads)[:, 0]
    return w[np.argsort(order)]


def test_llama_rows_left_permuted_are_seen_by_the_loss(tmp_path):
    values, arrays = strong("llama")
    right = pretrained.open_checkpoint(models.write(tmp_path / "right", values, arrays))
    text = sample(right)
    assert pretrained.reading_notes(right, text) == []
    for layer in range(2):
        for part, heads in (("q", 9), ("k", 3)):
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            arrays[name] = permute(arrays[name], heads)
    wrong = pretrained.open_checkpoint(models.write(tmp_path / "wrong", values, arrays))
    notes = pretrained.reading_notes(wrong, text)
    assert any("rows are permuted" in note for note in notes)


def test_a_flat_neox_matrix_is_seen_by_the_loss(tmp_path):
    values, arrays = strong("gpt_neox")
    right = pretrained.open_checkpoint(models.write(tmp_path / "right", values, arrays))
    text = sample(right)
    assert pretrained.reading_notes(right, text) == []
    for name, w in arrays.items():
        if "query_key_value" in name:  # from [head, q|k|v, feature] to [q|k|v, head, feature]
            arrays[name] = w.reshape(3, 3, 8, -1).swapaxes(0, 1).reshape(w.shape)
    wrong = pretrained.open_checkpoint(models.write(tmp_path / "wrong", values, arrays))
    assert any("[Q | K | V]" in note for note in pretrained.reading_notes(wrong, text))


@pytest.mark.parametrize("lie", [2, 8])
def test_a_head_count_that_fits_all_shapes_is_seen_by_the_loss(tmp_path, lie):
    values, arrays = strong("gpt2", n_head=4)
    right = pretrained.open_checkpoint(models.write(tmp_path / "right", values, arrays))
    text = sample(right)
    assert pretrained.reading_notes(right, text) == []
    wrong = pretrained.open_checkpoint(models.write(tmp_path / "wrong", values | {"n_head": lie}, arrays))
    assert any(f"it has 4 heads, not {lie}" in note for note in pretrained.reading_notes(wrong, text))


def test_an_untrained_model_is_said_to_predict_nothing(tmp_path):
    checkpoint = pretrained.open_checkpoint(models.make(tmp_path / "a", "llama")[0])
    (note,) = pretrained.reading_notes(checkpoint, models.ids())
    assert "not below 3.912" in note


def english(checkpoint, tokens=512):
    """Windows of the prose that ships with Python."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra: checkpoints)")
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))[:20_000]
    ids = np.array(checkpoint.tokenizer().encode(text, add_special_tokens=False).ids)
    return ids[:tokens].reshape(-1, 128)


@pytest.mark.skipif(not GLASSLLM.exists(), reason="../shared/models/glassllm_en is not there")
def test_the_real_llama_reads_well_and_only_as_it_is(tmp_path):
    checkpoint = pretrained.open_checkpoint(GLASSLLM)
    text = english(checkpoint)
    assert pretrained.reading_notes(checkpoint, text) == []
    measured = pretrained.measure(checkpoint, text)
    assert measured.loss < math.log(1024)
    # trained: far below the 20 to 22 of a random start
    assert all(1 < value < 12 for value in measured.heads["participation_ratio_k"].ravel())
    arrays = {
        (name if name.startswith("lm_head") else f"model.{name}"): tensor.read()
        for name, tensor in checkpoint.tensors.items()
    }
    values = results.read_json(GLASSLLM / "config.json")
    for name, w in arrays.items():
        if "q_proj" in name or "k_proj" in name:
            arrays[name] = permute(w, 4 if "q_proj" in name else 2)
    wrong = pretrained.open_checkpoint(models.write(tmp_path / "wrong", values, arrays))
    (note,) = pretrained.reading_notes(wrong, text)
    assert "rows are permuted" in note

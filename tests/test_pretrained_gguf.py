"""Llama models in GGUF files: rows un-permuted, quantised matrices dequantised, damaged files refused."""

import numpy as np
import pytest

import pretrained_models as models
from qkgeom_jax import pretrained
from qkgeom_jax.pretrained.gguf_file import unpermute

gguf = pytest.importorskip("gguf", reason="gguf is not installed (extra: gguf)")

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}


def permute(w, heads):
    """As converters to GGUF do it: rows of half-split pairs become neighbours."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def write(path, values, arrays, quantised=None, architecture="llama", **fields):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_rope_freq_base(values["rope_theta"])
    if "scaling" in fields:
        writer.add_rope_scaling_type(fields["scaling"])
    for name, w in arrays.items():
        short = name.removeprefix("model.")
        if short == "embed_tokens.weight":
            short = "token_embd.weight"
        elif short == "norm.weight":
            short = "output_norm.weight"
        else:
            _, layer, rest = short.split(".", 2)
            part = rest.removesuffix(".weight")
            heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
            w = permute(w, values[heads[part]]) if part in heads else w
            short = f"blk.{layer}.{NAMES[part]}.weight"
        if quantised and w.ndim == 2:
            writer.add_tensor(short, gguf.quantize(w, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(short, w)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_rows_are_put_back_and_logits_are_the_folder_s(tmp_path):
    folder, arrays = models.make(tmp_path / "a", "llama")
    found = pretrained.open_checkpoint(write(tmp_path / "a.gguf", models.config("llama"), arrays))
    whole = pretrained.open_checkpoint(folder)
    assert (found.heads, found.key_heads, found.context, found.vocabulary) == (9, 3, 32, 50)
    np.testing.assert_allclose(pretrained.apply(found, models.ids()), pretrained.apply(whole, models.ids()), atol=1e-5)
    assert found.weights_sha256() == whole.weights_sha256()
    assert found.tokenizer() is None


def test_unpermute_undoes_permute():
    w = np.arange(24.0).reshape(12, 2)
    np.testing.assert_array_equal(unpermute(permute(w, 3), 3), w)
    assert not np.array_equal(permute(w, 3), w)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
def test_quantised_matrices_come_near(tmp_path, kind):
    values = models.config("llama", **WIDE)
    arrays = models.tensors(values)
    kind = gguf.GGMLQuantizationType[kind]
    found = pretrained.open_checkpoint(write(tmp_path / "a.gguf", values, arrays, kind))
    kernel = found.block(1)["query"]["kernel"]
    error = np.abs(kernel - arrays["model.layers.1.self_attn.q_proj.weight"].T).max()
    assert 0 < error < {"F16": 1e-3, "Q8_0": 0.02, "Q4_1": 0.1}[kind.name]
    rows = found.embed(np.array([[49, 0]]))
    np.testing.assert_allclose(rows[0], arrays["model.embed_tokens.weight"][[49, 0]], atol=0.1)


def test_other_architectures_and_scaled_rotations_are_refused(tmp_path):
    values = models.config("llama")
    arrays = models.tensors(values)
    with pytest.raises(pretrained.CheckpointFormatError, match="'falcon' is not supported in GGUF"):
        pretrained.open_checkpoint(write(tmp_path / "a.gguf", values, arrays, architecture="falcon"))
    scaled = write(tmp_path / "b.gguf", values, arrays, scaling=gguf.RopeScalingType.YARN)
    with pytest.raises(pretrained.CheckpointFormatError, match="scaled by 'yarn'"):
        pretrained.open_checkpoint(scaled)


@pytest.mark.parametrize("kept", [0, 3, 20, 300, 0.5, 0.9])
def test_a_cut_file_is_refused(tmp_path, kept):
    values = models.config("llama")
    path = write(tmp_path / "a.gguf", values, models.tensors(values))
    data = path.read_bytes()
    path.write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    with pytest.raises(pretrained.CheckpointFormatError, match="a.gguf"):
        found = pretrained.open_checkpoint(path)
        found.weights_sha256()


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(pretrained.CheckpointFormatError, match="a.gguf is missing"):
        pretrained.open_checkpoint(tmp_path / "a.gguf")

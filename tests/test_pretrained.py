"""Reading checkpoint folders: right matrices from each family, and one sentence about every file that is wrong."""

import doctest
import json
import math
import struct

import ml_dtypes
import numpy as np
import pytest

import pretrained_models as models
from qkgeom_jax import pretrained
from qkgeom_jax.pretrained import CheckpointFormatError
from qkgeom_jax.pretrained import folder as folder_module
from qkgeom_jax.pretrained.tensors import read_safetensors, safetensors_bytes

FAMILIES = tuple(models.CONFIGS)


def refuse(folder, match):
    with pytest.raises(CheckpointFormatError, match=match) as caught:
        pretrained.open_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_needed_files_prefer_safetensors_and_leave_the_rest():
    config, tokenizer = "config.json", "tokenizer.json"
    assert pretrained.needed_files(
        ["pytorch_model.bin", "model.safetensors", tokenizer, config, "onnx/model.safetensors", "README.md"]
    ) == [config, "model.safetensors", tokenizer]
    index = "pytorch_model.bin.index.json"
    shards = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    assert pretrained.needed_files([config, index, *shards, "training_args.bin"]) == [config, index, *shards]
    with pytest.raises(ValueError, match="config.json"):
        pretrained.needed_files(["model.safetensors"])
    with pytest.raises(ValueError, match="no weights"):
        pretrained.needed_files([config, "flax_model.msgpack"])


def test_doctests():
    found = doctest.testmod(folder_module)
    assert found.attempted and not found.failed


def test_sizes_and_files(tmp_path):
    folder, _ = models.make(tmp_path / "a", "llama")
    found = pretrained.open_checkpoint(folder)
    sizes = (
        found.family,
        found.layers,
        found.heads,
        found.key_heads,
        found.head_width,
        found.context,
        found.vocabulary,
    )
    assert sizes == ("llama", 2, 9, 3, 4, 32, 50)
    assert [file.name for file in found.files] == ["config.json", "model.safetensors"]
    assert found.tokenizer() is None


def test_gpt2_columns_are_queries_then_keys_then_values(tmp_path):
    folder, arrays = models.make(tmp_path / "a", "gpt2")
    block = pretrained.open_checkpoint(folder).block(1)
    for at, part in enumerate(("query", "key", "value")):
        columns = slice(24 * at, 24 * (at + 1))
        np.testing.assert_array_equal(block[part]["kernel"], arrays["transformer.h.1.attn.c_attn.weight"][:, columns])
        np.testing.assert_array_equal(block[part]["bias"], arrays["transformer.h.1.attn.c_attn.bias"][columns])


def test_gpt_neox_rows_are_interleaved_per_head_not_split_flat(tmp_path):
    folder, arrays = models.make(tmp_path / "a", "gpt_neox")
    block = pretrained.open_checkpoint(folder).block(0)
    fused = arrays["gpt_neox.layers.0.attention.query_key_value.weight"]
    bias = arrays["gpt_neox.layers.0.attention.query_key_value.bias"]
    for at, part in enumerate(("query", "key", "value")):
        for head in range(3):
            rows = slice(8 * (3 * head + at), 8 * (3 * head + at + 1))
            np.testing.assert_array_equal(block[part]["kernel"][:, 8 * head : 8 * head + 8], fused[rows].T)
            np.testing.assert_array_equal(block[part]["bias"][8 * head : 8 * head + 8], bias[rows])
    assert not np.array_equal(block["key"]["kernel"], fused[24:48].T)  # what a flat split would give


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floating_types_are_read_as_float32(tmp_path, dtype):
    values = models.config("llama")
    arrays = {name: w.astype(dtype) for name, w in models.tensors(values).items()}
    found = pretrained.open_checkpoint(models.write(tmp_path / "a", values, arrays))
    kernel = found.block(0)["query"]["kernel"]
    assert kernel.dtype == np.float32
    np.testing.assert_array_equal(kernel, arrays["model.layers.0.self_attn.q_proj.weight"].astype(np.float32).T)
    rows = found.embed(np.array([[3, 7, 3]]))
    np.testing.assert_array_equal(rows[0], arrays["model.embed_tokens.weight"][[3, 7, 3]].astype(np.float32))
    assert np.isfinite(pretrained.apply(found, models.ids())).all()


def test_base_models_without_a_prefix_and_useless_tensors_are_read(tmp_path):
    values = models.config("gpt2")
    arrays = {name.removeprefix("transformer."): w for name, w in models.tensors(values).items()}
    arrays["h.0.attn.bias"] = np.tril(np.ones((1, 1, 32, 32), bool))
    arrays["h.0.attn.masked_bias"] = np.float32(-1e4)
    bare = pretrained.open_checkpoint(models.write(tmp_path / "bare", values, arrays))
    whole = pretrained.open_checkpoint(models.make(tmp_path / "whole", "gpt2")[0])
    assert bare.weights_sha256() == whole.weights_sha256()


def test_the_digest_tells_weights_apart_and_nothing_else(tmp_path):
    values = models.config("gpt_neox")
    folder, arrays = models.make(tmp_path / "a", "gpt_neox")
    models.write_shards(tmp_path / "shards", values, arrays)
    changed = {name: w.copy() for name, w in arrays.items()}
    changed["embed_out.weight"][49, 23] = np.nextafter(changed["embed_out.weight"][49, 23], 9, dtype=np.float32)
    models.write(tmp_path / "changed", values, changed)
    a, shards, other = (pretrained.open_checkpoint(tmp_path / name) for name in ("a", "shards", "changed"))
    assert a.weights_sha256() == shards.weights_sha256() != other.weights_sha256()
    assert len(a.weights_sha256()) == 64
    assert [file.name for file in shards.files][1:3] == [
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
    ]


def test_fingerprints_estimate_distances(tmp_path):
    prints = [
        pretrained.layer_fingerprints(pretrained.open_checkpoint(models.make(tmp_path / str(seed), "llama", seed)[0]))
        for seed in (0, 1)
    ]
    arrays = [models.tensors(models.config("llama"), seed) for seed in (0, 1)]
    true, estimated = 0.0, 0.0
    for name, (a, b) in {name: (prints[0][name], prints[1][name]) for name in prints[0]}.items():
        w = arrays[0][f"model.{name}"].astype(np.float64)
        assert a[:2] == pytest.approx([w.mean(), np.linalg.norm(w)], rel=1e-5, abs=1e-7)
        true += np.sum((w - arrays[1][f"model.{name}"]) ** 2)
        estimated += np.sum((a - b)[2:] ** 2)
    assert len(prints[0]) == 1 + 2 * 7  # every matrix, and no vector
    assert estimated == pytest.approx(true, rel=0.3)


def test_a_missing_shard_is_named(tmp_path):
    values = models.config("llama")
    folder = models.write_shards(tmp_path / "a", values, models.tensors(values))
    (folder / "model-00002-of-00002.safetensors").unlink()
    refuse(folder, "the shard .*model-00002-of-00002.safetensors is missing")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "", 3, None])
def test_an_index_that_points_elsewhere_is_refused(tmp_path, name):
    values = models.config("llama")
    folder = models.write_shards(tmp_path / "a", values, models.tensors(values))
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": places | {"model.norm.weight": name}}))
    refuse(folder, "no name of a file beside it")


def test_an_index_that_misplaces_a_tensor_is_refused(tmp_path):
    values = models.config("llama")
    folder = models.write_shards(tmp_path / "a", values, models.tensors(values))
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    other = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} - {places["model.norm.weight"]}
    index.write_text(json.dumps({"weight_map": places | {"model.norm.weight": other.pop()}}))
    refuse(folder, "does not hold the tensor 'model.norm.weight'")


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1])
def test_a_cut_safetensors_file_is_refused(tmp_path, size):
    folder, _ = models.make(tmp_path / "a", "gpt2")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refuse(folder, "model.safetensors.* cut")


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = {
    "no JSON": b"{",
    "no UTF-8": b'{"\xff":1}',
    "a list": b"[]",
    "nested": b"[" * 100_000,
    "twice": b'{"a":1,"a":1}',
    "no entry": {"a": 3},
    "no type": {"a": ENTRY | {"dtype": None}},
    "unknown type": {"a": ENTRY | {"dtype": "F7"}},
    "unhashable type": {"a": ENTRY | {"dtype": []}},
    "negative": {"a": ENTRY | {"shape": [-2]}},
    "boolean": {"a": ENTRY | {"shape": [True, 2]}},
    "fraction": {"a": ENTRY | {"shape": [2.0]}},
    "huge": {"a": ENTRY | {"shape": [2**62, 2**62]}},
    "beyond": {"a": ENTRY | {"data_offsets": [8, 16 + 10**12]}},
    "before": {"a": ENTRY | {"data_offsets": [-8, 0]}},
    "backwards": {"a": ENTRY | {"data_offsets": [8, 0]}},
    "one offset": {"a": ENTRY | {"data_offsets": [0]}},
    "too short": {"a": ENTRY | {"data_offsets": [0, 4]}},
    "overlap": {"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}},
    "many axes": {"a": ENTRY | {"shape": [1] * 99 + [2]}},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path, case):
    header = HOSTILE[case] if isinstance(HOSTILE[case], bytes) else json.dumps(HOSTILE[case]).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(CheckpointFormatError, match="model.safetensors"):
        read_safetensors(path)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**8 + 1])
def test_a_header_s_length_is_held_against_the_file(tmp_path, length):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(CheckpointFormatError, match=f"its header would take {length}"):
        read_safetensors(path)


def test_a_file_that_shrinks_after_it_was_opened_is_noticed(tmp_path):
    folder, _ = models.make(tmp_path / "a", "llama")
    found = pretrained.open_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4000])
    with pytest.raises(CheckpointFormatError, match="was cut while it was read"):
        found.weights_sha256()


def test_equal_arrays_give_equal_bytes_and_come_back(tmp_path):
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.float16([1]), "c": np.array(3, np.int64)}
    data = safetensors_bytes(arrays)
    assert data == safetensors_bytes(dict(sorted(arrays.items())))
    (tmp_path / "x").write_bytes(data)
    back = read_safetensors(tmp_path / "x")
    for name, w in arrays.items():
        np.testing.assert_array_equal(back[name].read(), w)
        assert back[name].read().dtype == w.dtype


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("gpt2", {"n_head": 5}, "5 heads do not divide the width 24"),
        ("gpt_neox", {"num_attention_heads": 7}, "7 heads do not divide"),
        ("llama", {"num_attention_heads": 18}, r"k_proj.weight' has shape \[12, 36\].* asks for \[6, 36\]"),
        ("llama", {"num_key_value_heads": 9}, r"k_proj.weight' has shape \[12, 36\].* asks for \[36, 36\]"),
        ("llama", {"num_key_value_heads": 2}, "9 query heads cannot share 2 key heads"),
        ("llama", {"head_dim": 8}, "q_proj.weight' has shape"),
        ("gpt2", {"n_layer": 3}, "holds 2 layers, its configuration says 3"),
        ("gpt2", {"n_layer": 1}, "holds 2 layers, its configuration says 1"),
        ("gpt2", {"n_layer": 10**9}, "holds 2 layers"),
        ("gpt2", {"n_layer": -1}, "n_layer is -1"),
        ("gpt2", {"n_head": True}, "n_head is True"),
        ("gpt2", {"n_head": 0}, "n_head is 0"),
        ("gpt2", {"n_embd": "24"}, "n_embd is '24'"),
        ("gpt2", {"n_positions": 64}, r"wpe.weight' has shape \[32, 24\]"),
        ("gpt2", {"vocab_size": 49}, "wte.weight' has shape"),
        ("gpt2", {"tie_word_embeddings": False}, "lacks the tensor 'lm_head.weight'"),
        ("gpt2", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ("gpt2", {"activation_function": "mish"}, "activation 'mish'"),
        ("gpt2", {"activation_function": ["gelu"]}, "activation"),
        ("gpt2", {"layer_norm_epsilon": math.inf}, "layer_norm_epsilon is inf"),
        ("gpt2", {"model_type": "gptj"}, "'gptj' is not supported; supported: gpt2, gpt_neox, llama"),
        ("gpt2", {"model_type": None}, "model_type None"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned heads"),
        ("gpt_neox", {"rotary_pct": 2.0}, "16 rotated features do not fit a head of 8"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "scaled by 'linear'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "scaled by 'llama3'"),
        ("llama", {"rope_parameters": [1]}, "an object is needed"),
    ],
)  # fmt: skip
def test_a_configuration_that_lies_is_refused(tmp_path, family, changes, match):
    values = models.config(family)
    refuse(models.write(tmp_path / "a", values | changes, models.tensors(values)), match)


def test_stored_frequencies_betray_a_wrong_head_count_or_base(tmp_path):
    values = models.config("gpt_neox")
    arrays = models.tensors(values)
    for layer in range(2):  # 8 features a head, a quarter rotated
        arrays[f"gpt_neox.layers.{layer}.attention.rotary_emb.inv_freq"] = np.float32([1.0])
    assert pretrained.open_checkpoint(models.write(tmp_path / "a", values, arrays)).heads == 3
    refuse(
        models.write(tmp_path / "a", values | {"num_attention_heads": 1}, arrays), "frequencies .* 1 heads of width 24"
    )
    llama = models.config("llama", rope_theta=100.0)
    arrays = models.tensors(llama) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.float32([1.0, 0.01])}
    refuse(models.write(tmp_path / "b", llama, arrays), "frequencies .* base 100")


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"model_type": "gpt2", "model_type": "gpt2"}', "\xff"])
def test_a_damaged_config_is_refused(tmp_path, text):
    folder, _ = models.make(tmp_path / "a", "gpt2")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refuse(folder, "config.json")


def test_missing_parts_are_named(tmp_path):
    folder, arrays = models.make(tmp_path / "a", "gpt2")
    refuse(tmp_path / "nothing", "does not exist")
    refuse(folder / "config.json", "is no folder")
    (folder / "model.safetensors").unlink()
    refuse(folder, "holds no weights")
    (folder / "config.json").unlink()
    refuse(folder, "config.json is missing")
    values = models.config("gpt2")
    del arrays["transformer.h.1.mlp.c_fc.bias"]
    refuse(models.write(tmp_path / "b", values, arrays), "lacks the tensor 'h.1.mlp.c_fc.bias'")
    arrays = models.tensors(values)
    arrays["transformer.h.1.mlp.c_fc.weight"] = arrays["transformer.h.1.mlp.c_fc.weight"].astype(np.int8)
    refuse(models.write(tmp_path / "c", values, arrays), "of type I8")
    arrays = models.tensors(values)
    arrays |= {"wte.weight": arrays["transformer.wte.weight"]}
    refuse(models.write(tmp_path / "d", values, arrays), "both with and without 'transformer.'")


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (np.zeros((2, 33), int), "33 positions; the model's context is 32"),
        (np.full((1, 4), 50), "ids from 50 to 50; the model's are 0 to 49"),
        (np.full((1, 4), -1), "from -1"),
        (np.zeros((2, 4)), "float64"),
        (np.zeros(4, int), r"\(4,\)"),
        (np.zeros((0, 4), int), r"\(0, 4\)"),
    ],
)
@pytest.mark.parametrize("function", [pretrained.apply, pretrained.measure])
def test_ids_that_the_model_lacks_are_refused(tmp_path, function, ids, match):
    found = pretrained.open_checkpoint(models.make(tmp_path / "a", "gpt2")[0])
    with pytest.raises(ValueError, match=match):
        function(found, ids)


def test_a_damaged_tokenizer_is_refused_and_a_sound_one_used(tmp_path):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra: checkpoints)")
    folder, _ = models.make(tmp_path / "a", "gpt2")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointFormatError, match="tokenizer.json is no tokenizer"):
        pretrained.open_checkpoint(folder).tokenizer()
    from qkgeom_jax.pretrained.export import tokenizer_json

    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(("<unk>", "\n", "a", "b"))))
    assert pretrained.open_checkpoint(folder).tokenizer().encode("ab\nz<unk>").ids[:4] == [2, 3, 1, 0]

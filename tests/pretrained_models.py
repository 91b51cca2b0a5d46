"""Small random checkpoints of the three families, as folders in the hub's layout, without any library of the hub."""

import json

import numpy as np

from qkgeom_jax.pretrained.architecture import read_architecture
from qkgeom_jax.pretrained.families import EMBEDDINGS, HEADS, LAYERS, PREFIXES, layer_shapes, outer_shapes
from qkgeom_jax.pretrained.tensors import safetensors_bytes

CONFIGS = {
    "gpt2": {
        "model_type": "gpt2", "n_layer": 2, "n_head": 3, "n_embd": 24, "n_positions": 32, "vocab_size": 50,
        "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
    },
    "gpt_neox": {
        "model_type": "gpt_neox", "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 24,
        "intermediate_size": 96, "max_position_embeddings": 32, "vocab_size": 50, "rotary_pct": 0.25,
        "rotary_emb_base": 10000, "use_parallel_residual": True, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
        "tie_word_embeddings": False,
    },
    "llama": {
        "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3,
        "hidden_size": 36, "intermediate_size": 40, "max_position_embeddings": 32, "vocab_size": 50,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    },
}  # fmt: skip


def config(family, **changes):
    return CONFIGS[family] | changes


def tensors(values, seed=0):
    """Random tensors under the names that files have."""
    a = read_architecture(values, "config.json")
    rng = np.random.default_rng(seed)
    shapes = {PREFIXES[a.family] + name: shape for name, shape in outer_shapes(a).items()}
    for layer in range(a.layers):
        at = f"{PREFIXES[a.family]}{LAYERS[a.family]}.{layer}."
        shapes |= {at + name: shape for name, shape in layer_shapes(a).items()}
    if not a.tied:
        shapes[HEADS[a.family][0]] = shapes[PREFIXES[a.family] + EMBEDDINGS[a.family]]
    found = {}
    for name, shape in shapes.items():
        scale = len(shape) == 1 and name.endswith("weight")
        found[name] = (scale + rng.normal(0, 0.2 if scale else 0.3, shape)).astype(np.float32)
    return found


def write(folder, values, arrays, name="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / name).write_bytes(safetensors_bytes(arrays))
    return folder


def make(folder, family, seed=0, **changes):
    """A whole checkpoint folder; returns it and its tensors."""
    values = config(family, **changes)
    arrays = tensors(values, seed)
    return write(folder, values, arrays), arrays


def write_shards(folder, values, arrays):
    """The same in two shards with an index."""
    names = sorted(arrays)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in halves.items():
        write(folder, values, {name: arrays[name] for name in own}, file)
    places = {name: file for file, own in halves.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def ids(windows=3, length=20, vocabulary=50):
    return np.random.default_rng(1).integers(0, vocabulary, (windows, length))

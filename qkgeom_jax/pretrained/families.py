"""Where each family keeps its matrices, and how one layer of it becomes a block that the forward pass knows.

A block is a nested dict of float32 arrays with kernels [input, output]:
  norm_1, norm_2: scale [D], bias [D];  query: kernel [D, H*K], bias [H*K];  key, value: kernel [D, G*K], bias [G*K];
  output: kernel [H*K, D], bias [D];  up, gate: kernel [D, F], bias [F];  down: kernel [F, D], bias [D];
G key heads; a part that a family does not have is absent. Heads are consecutive blocks of K columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qkgeom_jax.pretrained.architecture import Architecture

Block = dict[str, dict[str, np.ndarray]]
Shapes = dict[str, tuple[int, ...]]

PREFIXES = {"gpt2": "transformer.", "gpt_neox": "gpt_neox.", "llama": "model."}
LAYERS = {"gpt2": "h", "gpt_neox": "layers", "llama": "layers"}
EMBEDDINGS = {"gpt2": "wte.weight", "gpt_neox": "embed_in.weight", "llama": "embed_tokens.weight"}
POSITIONS = "wpe.weight"
NORMS = {"gpt2": "ln_f", "gpt_neox": "final_layer_norm", "llama": "norm"}
HEADS = {"gpt2": ("lm_head.weight",), "gpt_neox": ("embed_out.weight", "lm_head.weight"), "llama": ("lm_head.weight",)}
# Buffers of older files that say what the rotation was: a check on the configuration.
FREQUENCIES = {"gpt_neox": "attention.rotary_emb.inv_freq", "llama": "self_attn.rotary_emb.inv_freq"}


def _linear(name: str, inputs: int, outputs: int, bias: bool, transposed: bool = True) -> Shapes:
    """A linear map's tensors; `transposed` is torch's own [output, input]."""
    kernel = (outputs, inputs) if transposed else (inputs, outputs)
    return {f"{name}.weight": kernel} | ({f"{name}.bias": (outputs,)} if bias else {})


def _norms(width: int, bias: bool, *names: str) -> Shapes:
    return {f"{name}.{part}": (width,) for name in names for part in (("weight", "bias") if bias else ("weight",))}


def outer_shapes(a: Architecture) -> Shapes:
    """The tensors outside the layers, the head aside."""
    shapes = {EMBEDDINGS[a.family]: (a.vocabulary, a.width)} | _norms(a.width, a.family != "llama", NORMS[a.family])
    return shapes | ({POSITIONS: (a.context, a.width)} if a.family == "gpt2" else {})


def layer_shapes(a: Architecture) -> Shapes:
    """The tensors of each layer, without the layer's prefix."""
    queries, keys = a.heads * a.head_width, a.key_heads * a.head_width
    if a.family == "gpt2":
        return (
            _norms(a.width, True, "ln_1", "ln_2")
            | _linear("attn.c_attn", a.width, 3 * a.width, True, transposed=False)
            | _linear("attn.c_proj", a.width, a.width, True, transposed=False)
            | _linear("mlp.c_fc", a.width, a.hidden, True, transposed=False)
            | _linear("mlp.c_proj", a.hidden, a.width, True, transposed=False)
        )
    shapes = _norms(a.width, a.family == "gpt_neox", "input_layernorm", "post_attention_layernorm")
    if a.family == "gpt_neox":
        return (
            shapes
            | _linear("attention.query_key_value", a.width, 3 * a.width, a.attention_bias)
            | _linear("attention.dense", a.width, a.width, a.attention_bias)
            | _linear("mlp.dense_h_to_4h", a.width, a.hidden, True)
            | _linear("mlp.dense_4h_to_h", a.hidden, a.width, True)
        )
    return (
        shapes
        | _linear("self_attn.q_proj", a.width, queries, a.attention_bias)
        | _linear("self_attn.k_proj", a.width, keys, a.attention_bias)
        | _linear("self_attn.v_proj", a.width, keys, a.attention_bias)
        | _linear("self_attn.o_proj", queries, a.width, a.attention_bias)
        | _linear("mlp.gate_proj", a.width, a.hidden, a.mlp_bias)
        | _linear("mlp.up_proj", a.width, a.hidden, a.mlp_bias)
        | _linear("mlp.down_proj", a.hidden, a.width, a.mlp_bias)
    )


def make_norm(tensors: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """scale, and bias where there is one."""
    found = {"scale": tensors[f"{name}.weight"]}
    return found | ({"bias": tensors[f"{name}.bias"]} if f"{name}.bias" in tensors else {})


def make_block(a: Architecture, tensors: Mapping[str, np.ndarray]) -> Block:
    """One layer's block from its tensors [names of `layer_shapes`], float32."""

    def linear(name: str) -> dict[str, np.ndarray]:
        kernel = tensors[f"{name}.weight"]
        found = {"kernel": kernel if a.family == "gpt2" else kernel.T}
        return found | ({"bias": tensors[f"{name}.bias"]} if f"{name}.bias" in tensors else {})

    if a.family == "gpt2":
        fused = linear("attn.c_attn")
        # the columns are [Q | K | V], each of all heads
        parts = {name: np.split(value, 3, axis=-1) for name, value in fused.items()}
        names = ("ln_1", "ln_2", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    elif a.family == "gpt_neox":
        fused = linear("attention.query_key_value")
        parts = {name: _fused_by_head(value, a) for name, value in fused.items()}
        names = (
            "input_layernorm",
            "post_attention_layernorm",
            "attention.dense",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        )
    else:
        attention = {part: linear(f"self_attn.{part[0]}_proj") for part in ("query", "key", "value")}
        names = ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
        return attention | _rest(tensors, linear, names) | {"gate": linear("mlp.gate_proj")}
    attention = {part: {name: p[i] for name, p in parts.items()} for i, part in enumerate(("query", "key", "value"))}
    return attention | _rest(tensors, linear, names)


def _fused_by_head(value: np.ndarray, a: Architecture) -> list[np.ndarray]:
    """Queries, keys and values from [..., 3 D]: columns [q | k | v] of the first head, then of the second."""
    if a.flat:
        return np.split(value, 3, axis=-1)
    by_head = value.reshape(*value.shape[:-1], a.heads, 3, a.head_width)
    return [by_head[..., part, :].reshape(*value.shape[:-1], a.width) for part in range(3)]


def _rest(tensors, linear, names: tuple[str, ...]) -> Block:
    norm_1, norm_2, output, up, down = names
    return {
        "norm_1": make_norm(tensors, norm_1), "norm_2": make_norm(tensors, norm_2),
        "output": linear(output), "up": linear(up), "down": linear(down),
    }  # fmt: skip

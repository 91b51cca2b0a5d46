"""A checkpoint's config.json, in the old and the new spelling, as one frozen description of a decoder-only model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkgeom_jax.config import did_you_mean
from qkgeom_jax.pretrained.tensors import CheckpointFormatError

FAMILIES = ("gpt2", "gpt_neox", "llama")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
# Names that transformers has for them.
_ACTIVATION_NAMES = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """What the forward pass has to know; hashable, so that it can be static under `jax.jit`.

    `rotary_width` is how many features of a head are rotated, 0 where positions are learned; `inverse_layer_scale`
    divides the logits of layer l by l + 1 as well; `flat` reads GPT-NeoX's fused matrix as [Q | K | V], which no
    configuration asks for (only for `reading_notes`).
    """

    family: str
    layers: int
    heads: int
    key_heads: int
    head_width: int
    width: int
    hidden: int
    vocabulary: int
    context: int
    epsilon: float
    activation: str
    tied: bool
    rotary_width: int = 0
    rope_theta: float = 10_000.0
    parallel: bool = False
    inverse_layer_scale: bool = False
    scale_logits: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    flat: bool = False

    def logit_scale(self, layer: int) -> float:
        """What query and key products are multiplied by."""
        scale = 1 / math.sqrt(self.head_width) if self.scale_logits else 1.0
        return scale / (layer + 1) if self.inverse_layer_scale else scale

    @property
    def block(self) -> Architecture:
        """What one block's program depends on: models that differ elsewhere share it."""
        return dataclasses.replace(
            self,
            layers=0,
            vocabulary=0,
            context=0,
            tied=False,
            inverse_layer_scale=False,
            scale_logits=False,
            flat=False,
        )


class _Reader:
    """Typed access to a configuration's values; what is wrong is said with the file's name."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def fail(self, text: str) -> CheckpointFormatError:
        return CheckpointFormatError(f"{self.path}: {text}")

    def get(self, *names: str) -> Any:
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def count(self, *names: str, default: int | None = None) -> int:
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.fail(f"{names[0]} is {value!r}; a whole number of at least 1 is needed")
        return value

    def number(self, *names: str, default: float) -> float:
        value = self.get(*names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
            raise self.fail(f"{names[0]} is {value!r}; a positive number is needed")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"{name} is {value!r}; true or false is needed")
        return value

    def activation(self, *names: str, default: str) -> str:
        name = self.get(*names) or default
        if not isinstance(name, str) or name not in _ACTIVATION_NAMES:
            raise self.fail(f"the activation {name!r} is not supported; supported: {', '.join(_ACTIVATION_NAMES)}")
        return _ACTIVATION_NAMES[name]

    def rope(self) -> Mapping[str, Any]:
        """The rotary parameters: `rope_parameters` of newer files; scaled ones are refused by name."""
        new = self.get("rope_parameters") or {}
        for given in (new, self.get("rope_scaling") or {}):
            if not isinstance(given, dict):
                raise self.fail(f"rope parameters are {given!r}; an object is needed")
            kind = given.get("rope_type", given.get("type", "default"))
            if kind != "default":
                raise self.fail(f"RoPE scaled by {kind!r} is not supported")
        return new


def read_architecture(values: Mapping[str, Any], path: Path) -> Architecture:
    """The architecture that a config.json describes.

    Raises:
      CheckpointFormatError: a family or an option that is not supported, or values that cannot be.
    """
    read = _Reader(values, path)
    family = values.get("model_type")
    if family not in FAMILIES:
        hint = did_you_mean(str(family), FAMILIES)
        raise read.fail(f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}{hint}")
    if values.get("pruned_heads") or values.get("add_cross_attention"):
        raise read.fail("pruned heads and cross attention are not supported")
    found = {"gpt2": _gpt2, "gpt_neox": _gpt_neox, "llama": _llama}[family](read)
    if found.heads % found.key_heads:
        raise read.fail(f"{found.heads} query heads cannot share {found.key_heads} key heads evenly")
    if found.rotary_width % 2 or found.rotary_width > found.head_width:
        raise read.fail(f"{found.rotary_width} rotated features do not fit a head of {found.head_width}, or are odd")
    return found


def _even_width(read: _Reader, width: int, heads: int) -> int:
    if width % heads:
        raise read.fail(f"{heads} heads do not divide the width {width}")
    return width // heads


def _gpt2(read: _Reader) -> Architecture:
    width, heads = read.count("n_embd", "hidden_size"), read.count("n_head", "num_attention_heads")
    return Architecture(
        family="gpt2",
        layers=read.count("n_layer", "num_hidden_layers"),
        heads=heads,
        key_heads=heads,
        head_width=_even_width(read, width, heads),
        width=width,
        hidden=read.count("n_inner", default=4 * width),
        vocabulary=read.count("vocab_size"),
        context=read.count("n_positions", "n_ctx", "max_position_embeddings"),
        epsilon=read.number("layer_norm_epsilon", default=1e-5),
        activation=read.activation("activation_function", default="gelu_new"),
        tied=read.flag("tie_word_embeddings", True),
        inverse_layer_scale=read.flag("scale_attn_by_inverse_layer_idx", False),
        scale_logits=read.flag("scale_attn_weights", True),
    )


def _gpt_neox(read: _Reader) -> Architecture:
    width, heads = read.count("hidden_size"), read.count("num_attention_heads")
    head_width = _even_width(read, width, heads)
    rope = _Reader(read.rope(), read.path)
    share = rope.number(
        "partial_rotary_factor", default=read.number("rotary_pct", "partial_rotary_factor", default=0.25)
    )
    return Architecture(
        family="gpt_neox",
        layers=read.count("num_hidden_layers"),
        heads=heads,
        key_heads=heads,
        head_width=head_width,
        width=width,
        hidden=read.count("intermediate_size"),
        vocabulary=read.count("vocab_size"),
        context=read.count("max_position_embeddings"),
        epsilon=read.number("layer_norm_eps", default=1e-5),
        activation=read.activation("hidden_act", default="gelu"),
        tied=read.flag("tie_word_embeddings", False),
        rotary_width=int(head_width * share),
        rope_theta=rope.number("rope_theta", default=read.number("rotary_emb_base", "rope_theta", default=10_000.0)),
        parallel=read.flag("use_parallel_residual", True),
        attention_bias=read.flag("attention_bias", True),
    )


def _llama(read: _Reader) -> Architecture:
    width, heads = read.count("hidden_size"), read.count("num_attention_heads")
    head_width = read.count("head_dim") if read.get("head_dim") is not None else _even_width(read, width, heads)
    rope = _Reader(read.rope(), read.path)
    return Architecture(
        family="llama",
        layers=read.count("num_hidden_layers"),
        heads=heads,
        key_heads=read.count("num_key_value_heads", default=heads),
        head_width=head_width,
        width=width,
        hidden=read.count("intermediate_size"),
        vocabulary=read.count("vocab_size"),
        context=read.count("max_position_embeddings"),
        epsilon=read.number("rms_norm_eps", default=1e-6),
        activation=read.activation("hidden_act", default="silu"),
        tied=read.flag("tie_word_embeddings", False),
        rotary_width=head_width,
        rope_theta=rope.number("rope_theta", default=read.number("rope_theta", default=10_000.0)),
        attention_bias=read.flag("attention_bias", False),
        mlp_bias=read.flag("mlp_bias", False),
    )

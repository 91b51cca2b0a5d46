"""Llama models in GGUF files: quantised matrices are dequantised when read, permuted query and key rows put back."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from qkgeom_jax.pretrained.tensors import CheckpointFormatError, Tensor, Tensors

_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
# Of the values in a header: bytes of one, by its type; text and arrays have lengths of their own.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9
# A vocabulary has some hundred thousand; the library makes an array of each.
_MOST_ELEMENTS = 1 << 22
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def read_gguf(path: Path) -> tuple[dict[str, Any], Tensors]:
    """A config.json's values and the tensors, both as a Llama folder has them.

    Raises:
      CheckpointFormatError: gguf is not installed, the file is damaged, or of another architecture.
    """
    try:
        import gguf
    except ImportError:
        raise CheckpointFormatError(f"{path} needs gguf to be read: pip install 'qkgeom_jax[gguf]'") from None
    if not path.is_file():
        raise CheckpointFormatError(f"{path} is missing")
    try:
        _check_header(path)
        reader = gguf.GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        found = {tensor.name: tensor for tensor in reader.tensors}
        config = _config(path, values, found)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        return config, {_name(name): _tensor(gguf, path, tensor, heads) for name, tensor in found.items()}
    except CheckpointFormatError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a parser of another project makes of hostile bytes
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointFormatError(f"{path} is no GGUF file, or damaged ({reason})") from None


def _check_header(path: Path) -> None:
    """Holds every length in the header against the file: the library would build what is claimed, element by element.

    Raises:
      ValueError: something is longer than the file, or there is more than any model has.
    """
    size = path.stat().st_size
    with path.open("rb") as file:

        def take(format_: str) -> tuple[int, ...]:
            length = struct.calcsize(f"<{format_}")
            if len(data := file.read(length)) < length:
                raise ValueError("it is cut")
            return struct.unpack(f"<{format_}", data)

        def skip(count: int, each: int) -> None:
            if count * each > size - file.tell():
                raise ValueError(f"it claims {count * each} bytes where there are {size - file.tell()}")
            file.seek(count * each, os.SEEK_CUR)

        def skip_text() -> None:
            skip(*take("Q"), 1)

        magic, version, tensors, keys = take("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("it does not begin as GGUF of version 2 or 3 does")
        elements = tensors + keys
        for _ in range(keys):
            skip_text()
            (kind,) = take("I")
            count = 1
            if kind == _ARRAY:
                kind, count = take("IQ")
                elements += count
            if elements > _MOST_ELEMENTS:
                raise ValueError(f"it claims {elements} values")
            if kind == _TEXT:
                for _ in range(count):
                    skip_text()
            elif kind in _SIZES:
                skip(count, _SIZES[kind])
            else:
                raise ValueError(f"it has a value of type {kind}")
        for _ in range(tensors):
            skip_text()
            (dimensions,) = take("I")
            skip(dimensions, 8)
            skip(1, 12)


def _config(path: Path, values: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    family = values.get("general.architecture")
    if family != "llama":
        raise CheckpointFormatError(
            f"{path}: the architecture {family!r} is not supported in GGUF files; supported: llama"
        )

    def get(name: str, default: Any = None) -> Any:
        value = values.get(f"llama.{name}", default)
        return value.item() if isinstance(value, np.generic) else value

    heads = get("attention.head_count")
    scaling = get("rope.scaling.type", "none")
    return {
        "model_type": "llama",
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", get("rope.dimension_count")),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10_000.0),
        "rope_scaling": None if scaling == "none" and "rope_freqs.weight" not in tensors else {"rope_type": scaling},
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
    }


def _name(name: str) -> str:
    """A GGUF name as a Llama folder has it."""
    if name in _NAMES:
        return _NAMES[name]
    blk, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, kind = rest.rpartition(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if blk == "blk" and part in _LAYER_NAMES else name


def unpermute(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * K, ...] from neighbouring to half-split pairs of the rotation."""
    return w.reshape(heads, w.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)


def _tensor(gguf: Any, path: Path, tensor: Any, heads: dict[str, int]) -> Tensor:
    shape = tuple(int(n) for n in tensor.shape[::-1])
    part = tensor.name.split(".")[-2] if tensor.name.startswith("blk.") else ""

    def rows(start: int, stop: int) -> np.ndarray:
        try:
            if part in heads:
                whole = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
                return unpermute(whole, heads[part])[start:stop]
            data = tensor.data[start:stop]
            return np.asarray(gguf.dequantize(data, tensor.tensor_type), np.float32).reshape(stop - start, *shape[1:])
        except (NotImplementedError, ValueError) as error:
            raise CheckpointFormatError(f"{path}: the tensor {tensor.name!r} cannot be dequantised ({error})") from None

    return Tensor("F32", shape, rows)

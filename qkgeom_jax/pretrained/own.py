"""Parameters of our own training as tensors and a config.json of GPT-2: zero biases where it has them and we do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from qkgeom_jax.config import Config, ModelConfig, from_dict
from qkgeom_jax.integrity import require_unchanged
from qkgeom_jax.model import LAYER_NORM_EPSILON
from qkgeom_jax.pretrained.tensors import CheckpointFormatError, read_object
from qkgeom_jax.reading import read_npz

PARAMETERS = "params"
EPOCH_FILE = re.compile(r"epoch_(\d+)\.npz")


def read_group_config(path: Path) -> Config:
    """The configuration of a group of our own training, from its config.json."""
    try:
        return from_dict(read_object(path))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointFormatError):
            raise
        raise CheckpointFormatError(f"{path} is not the configuration of a group of a study: {error}") from None


def read_params(path: Path, config: Config, seed: int | None = None) -> dict[str, np.ndarray]:
    """One seed's parameters, named by their paths in the tree (``blocks/attention/query``).

    Raises:
      CheckpointFormatError: the file is missing or damaged, is not what its group's manifest says, or has other seeds.
    """
    seed = config.seeds[0] if seed is None else seed
    if seed not in config.seeds:
        raise CheckpointFormatError(f"{path} holds the seeds {', '.join(map(str, config.seeds))}, not {seed}")
    try:
        stacked = read_npz(path)
    except FileNotFoundError:
        raise CheckpointFormatError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointFormatError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointFormatError(str(error)) from None
    try:
        require_unchanged(path.parent.parent, [f"{path.parent.name}/{path.name}"])
    except ValueError as error:
        raise CheckpointFormatError(str(error)) from None
    at = config.seeds.index(seed)
    for name, value in stacked.items():
        if value.ndim < 2 or len(value) != len(config.seeds):
            raise CheckpointFormatError(
                f"{path}: {name} has shape {value.shape}, not one entry a seed of {len(config.seeds)}"
            )
    return {name: value[at].astype(np.float32) for name, value in stacked.items()}


def gpt2_config(model: ModelConfig) -> dict[str, Any]:
    """The config.json of GPT-2 that describes `qkgeom_jax.model`."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "n_ctx": model.context,
        "n_embd": model.width,
        "n_head": model.heads,
        "n_inner": model.hidden,
        "n_layer": model.depth,
        "n_positions": model.context,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": model.vocabulary,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def gpt2_tensors(params: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """One seed's parameters under GPT-2's names.

    Raises:
      CheckpointFormatError: `params`, read from `path`, lack a leaf.
    """
    try:
        found = {
            "transformer.wte.weight": params["token_embedding"],
            "transformer.wpe.weight": params["position_embedding"],
            "transformer.ln_f.weight": params["norm/scale"],
            "transformer.ln_f.bias": params["norm/bias"],
            "lm_head.weight": np.ascontiguousarray(params["head"].T),
        }
        block = {name.removeprefix("blocks/"): value for name, value in params.items() if name.startswith("blocks/")}
        for layer in range(len(block["attention/query"])):
            own = {name: value[layer] for name, value in block.items()}
            fused = np.concatenate([own[f"attention/{part}"] for part in ("query", "key", "value")], axis=1)
            tensors = {
                "ln_1.weight": own["norm_1/scale"],
                "ln_1.bias": own["norm_1/bias"],
                "attn.c_attn.weight": fused,
                "attn.c_attn.bias": np.zeros(fused.shape[1], np.float32),
                "attn.c_proj.weight": own["attention/output"],
                "attn.c_proj.bias": np.zeros(own["attention/output"].shape[1], np.float32),
                "ln_2.weight": own["norm_2/scale"],
                "ln_2.bias": own["norm_2/bias"],
                "mlp.c_fc.weight": own["mlp/input"],
                "mlp.c_fc.bias": own["mlp/input_bias"],
                "mlp.c_proj.weight": own["mlp/output"],
                "mlp.c_proj.bias": own["mlp/output_bias"],
            }
            found |= {f"transformer.h.{layer}.{name}": value for name, value in tensors.items()}
    except (KeyError, IndexError, ValueError) as error:
        raise CheckpointFormatError(
            f"{path} does not hold the parameters of a transformer of ours: {error!r}"
        ) from None
    return found

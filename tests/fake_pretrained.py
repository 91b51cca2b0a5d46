"""Stands in for `qkgeom_jax.pretrained` where a test is about the loop around it: a "weights file" is JSON."""

import hashlib
import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np

from qkgeom_jax.series_results import LAYER_COLUMNS

NAMES = ("config.json", "model.safetensors", "tokenizer.json")


class CheckpointFormatError(ValueError):
    pass


def files(value, heads=2, broken=False):
    """The files of a revision whose every metric depends on `value`."""
    weights = json.dumps({"value": value, "heads": heads}).encode()
    return {
        "config.json": b"{}",
        "model.safetensors": weights[:5] if broken else weights,
        "README.md": b"unneeded" * 100,
    }


class Words:
    """A tokenizer: a word's length."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return SimpleNamespace(ids=[len(word) % 20 for word in text.split()])


class Checkpoint:
    def __init__(self, folder):
        try:
            self.value = json.loads((folder / "model.safetensors").read_text())["value"]
        except (OSError, ValueError) as error:
            raise CheckpointFormatError(f"{folder.name}: model.safetensors is cut") from error
        self.family, self.layers, self.heads, self.context, self.vocabulary = "gpt2", 2, 2, 32, 20

    def weights_sha256(self):
        return hashlib.sha256(str(self.value).encode()).hexdigest()

    def tokenizer(self):
        return Words()


def needed_files(names):
    if "model.safetensors" not in names:
        raise ValueError("it has no weights")
    return [name for name in NAMES if name in names]


def measure(checkpoint, token_ids, progress=None):
    if checkpoint.value == "crash":
        raise RuntimeError("something\nunforeseen")
    rows = [{name: checkpoint.value + layer for name in LAYER_COLUMNS} for layer in range(checkpoint.layers)]
    rows[0]["column_alignment"] = rows[1]["column_alignment"] = None
    heads = {"participation_ratio_q": np.zeros((2, 2), np.float32)}
    return SimpleNamespace(rows=rows, heads=heads, loss=float(checkpoint.value))


def layer_fingerprints(checkpoint):
    walk = np.random.default_rng(0).normal(size=(2, 30)) * checkpoint.value
    return {f"layers.{layer}.query": np.concatenate([[0.0, 100.0], walk[layer]]) for layer in range(2)}


def reading_notes(checkpoint, token_ids):
    return ["made: up"] if checkpoint.value == 99 else []


def install(monkeypatch):
    import qkgeom_jax

    module = ModuleType("qkgeom_jax.pretrained")
    vars(module).update({name: value for name, value in globals().items() if not name.startswith("_")})
    module.open_checkpoint = Checkpoint
    monkeypatch.setitem(sys.modules, "qkgeom_jax.pretrained", module)
    monkeypatch.setattr(qkgeom_jax, "pretrained", module, raising=False)

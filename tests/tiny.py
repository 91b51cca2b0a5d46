"""A configuration and a text small enough that programs compile in seconds."""

import numpy as np

from qkgeom_jax.config import Config, override

SIZES = {
    "depth": 2, "width": 16, "heads": 2, "context": 8, "vocabulary": 11, "batch": 2, "epochs": 2, "steps_per_epoch": 4,
    "chunk": 2, "probe_tokens": 64, "spectrum_sequences": 2, "loss_tokens": 32, "seeds": (3, 5),
}  # fmt: skip


def config(**changes) -> Config:
    return override(Config(), **(SIZES | changes))


def tokens(count: int = 500, vocabulary: int = 11) -> np.ndarray:
    return np.random.default_rng(0).integers(1, vocabulary, count).astype(np.uint8)


def flags(**changes) -> list[str]:
    """`SIZES` as command-line flags; the text decides the vocabulary."""
    sizes = {name: value for name, value in (SIZES | changes).items() if name not in ("depth", "vocabulary", "seeds")}
    return [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]


def text(letters: int = 4000) -> str:
    rng = np.random.default_rng(1)
    return "".join(rng.choice(list("etaoin shrdlu\n"), letters))

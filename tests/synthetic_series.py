"""Records of checkpoint series with metrics that are made up."""

import numpy as np

from qkgeom_jax.series_results import CONTRAST, LAYER_COLUMNS, Record
from qkgeom_jax.suspects import Flag


def records(series, family, steps, *, names=None, flagged=(), layers=(0.0, 0.0), failed=(), **values):
    """One series; `values`: contrast, q, k, rank, entropy, a number a revision; `layers` are added to the contrast."""
    steps = list(steps)
    columns = {
        "contrast": CONTRAST, "q": "participation_ratio_q", "k": "participation_ratio_k", "rank": "effective_rank_qk",
        "entropy": "attention_entropy",
    }  # fmt: skip
    found = []
    for place, step in enumerate(steps):
        row = dict.fromkeys(LAYER_COLUMNS, 1.0)
        row |= {columns[name]: float(numbers[place]) for name, numbers in values.items()}
        flags = (Flag("final", f"holds the weights of the last revision, step{steps[-1]}"),) if step in flagged else ()
        found.append(
            Record(
                series, f"someone/{series}", names[place] if names else f"step{step}", family, 1000, "done",
                tokens=4096, context=512, commit="c" * 40, weights_sha256="d" * 64, loss=3.0, place=place, flags=flags,
                rows=tuple(row | {CONTRAST: row[CONTRAST] + offset} for offset in layers),
            )
        )  # fmt: skip
    return found + [Record(series, f"someone/{series}", name, family, error="no such revision") for name in failed]


def paper_like(flagged=(), failed=()):
    """Seven series whose counts are those of the paper's Table 6, and one of a user's own."""
    steps = [0, 1, 2, 4, 8, 16]
    up = np.array([5, 1, 2, 3.5, 4, 5])

    def one(name, family, contrast, q, k, bridge, **more):
        entropy = 2 + (1 if bridge else -1) * k * up / 10
        values = {"contrast": contrast * up, "q": 10 + q * up, "k": 10 + k * up, "rank": 5 + k * up, "entropy": entropy}
        return records(name, family, steps, **values, **more)

    return {
        "pythia-70m": one("pythia-70m", "pythia", 1, -1, -1, True, flagged=flagged, failed=failed),
        "pythia-160m": one("pythia-160m", "pythia", -1, -1, -1, True),
        "pythia-410m": one("pythia-410m", "pythia", -1, -1, -1, True),
        "smollm2-135m": one("smollm2-135m", "smollm2", -1, -1, 1, False),
        "smollm2-360m": one("smollm2-360m", "smollm2", -1, -1, 1, False),
        "gpt2-small": one("gpt2-small", "gpt2", -1, 1, 1, True),
        "mine": one("mine", "own llama", 1, 1, -1, True),
    }

"""Studies on disk without training: groups' folders whose every number is known."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from qkgeom_jax import config, results

# (depth, init, layer, seed, epochs [E + 1]) to the curves of some columns; a column that is not there is 1 throughout.
Curves = Callable[[int, str, int, int, np.ndarray], Mapping[str, np.ndarray]]


def realistic(depth: int, init: str, layer: int, seed: int, epochs: np.ndarray) -> dict[str, np.ndarray]:
    """Curves like those of a short training, with differences between cells and seeds, and a little noise."""
    state = [depth, config.INITIALIZATIONS.index(init), layer]
    cell = np.random.default_rng(state).normal(size=3)
    rng = np.random.default_rng([*state, seed])
    own, noise = rng.normal(size=3), rng.normal(size=(6, len(epochs)))
    fall, rise = np.exp(-epochs / 1.5), 1 - np.exp(-epochs / 4)
    place = layer / max(depth - 1, 1)
    pr_k = -0.25 + 0.1 * cell[0] + 0.05 * own[0] + (0.1 if init == "qk_identical" else 0)
    rank = 0.6 * pr_k + 0.05 * cell[1] + 0.02 * own[1]
    entropy = 0.1 * rank + 0.005 * cell[2] + 0.002 * own[2]
    alignment = {
        "qk_identical": 1 - (0.5 + 0.1 * place) * rise,
        "disjoint_support": 0.19 * rise,
        "independent": 0.07 + 0.12 * rise,
    }[init]
    return {
        "participation_ratio_q": 6 + 9 * fall + (5 + 3 * place + 0.6 * own[1]) * rise + 0.15 * noise[0],
        "participation_ratio_k": 7 + 9 * fall + 0.5 * place + pr_k * epochs + 0.15 * noise[1],
        "effective_rank_qk": 9 + 4 * fall + rank * epochs + 0.1 * noise[2],
        "attention_entropy": 1.8 + 1.5 * fall - 0.6 * np.sin(np.pi * place) + entropy * epochs + 0.01 * noise[3],
        "top_1_mass": 0.2 + 0.3 * rise + 0.1 * np.sin(np.pi * place) + 0.01 * noise[4],
        "column_alignment": alignment * (1 + 0.02 * own[2]) + 0.002 * np.abs(noise[5]),
    }


def write_study(
    out: Path,
    *,
    depths: Sequence[int] = (4, 6, 8),
    inits: Sequence[str] = config.INITIALIZATIONS,
    interventions: Sequence[str] = ("none",),
    seeds: Sequence[int] = (7, 37, 42, 105),
    epochs: int = 8,
    steps_per_epoch: int = 125,
    curves: Curves = realistic,
    val_loss: Callable[[int, str, int], float] = lambda depth, init, seed: 1.5 + seed / 1000 - depth / 100,
    diverged: Mapping[str, Mapping[int, int]] = {},
    statuses: Mapping[str, str] = {},
) -> Path:
    """Write OUT/groups as a training would; `diverged` and `statuses` go by a group's name."""
    at = np.arange(epochs + 1)
    for depth, init, intervention in ((d, i, v) for d in depths for i in inits for v in interventions):
        group = config.override(
            config.PRESETS["laptop"], depth=depth, init=init, seeds=tuple(seeds), epochs=epochs,
            steps_per_epoch=steps_per_epoch, intervention=intervention,
        )  # fmt: skip
        losses, metrics = [], []
        for seed in seeds:
            for epoch in at:
                loss = val_loss(depth, init, seed) + 2.0 * (epochs - epoch)
                losses.append([seed, epoch, epoch * steps_per_epoch, loss - 0.05, loss])
            for layer in range(depth):
                known = curves(depth, init, layer, seed, at)
                table = np.stack([known.get(c, np.ones(len(at))) for c in results.METRIC_COLUMNS])
                metrics += [[seed, epoch, epoch * steps_per_epoch, layer, *table[:, epoch].tolist()] for epoch in at]
        folder = out / "groups" / group.name
        bad = {str(seed): step for seed, step in diverged.get(group.name, {}).items()}
        status = {"status": statuses.get(group.name, "done"), "epochs_done": epochs, "diverged": bad}
        results.write_json(folder / "config.json", group.to_dict())
        results.write_csv(folder / "losses.csv", results.GROUP_LOSS_COLUMNS, losses)
        results.write_csv(folder / "metrics.csv", results.GROUP_METRIC_COLUMNS, metrics)
        results.write_json(folder / "status.json", status)
    return out


def read_study(out: Path) -> tuple[results.Table, results.Table]:
    """Collect a study and read its runs and metrics."""
    results.collect(out)
    runs = results.read_csv(out / "runs.csv", results.RUN_COLUMNS)
    return runs, results.read_csv(out / "metrics.csv", results.METRIC_TABLE_COLUMNS)

"""What a group has measured so far: kept in its checkpoints, written out as its tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qkgeom_jax.results import GROUP_LOSS_COLUMNS, GROUP_METRIC_COLUMNS, METRIC_COLUMNS, write_csv, write_npz


def _plain(values: Any) -> list:
    """Nested lists that JSON can hold: float32 exactly, None where a value is not finite."""
    array = np.asarray(values)
    return np.where(np.isfinite(array), array, None).tolist()


class History:
    """One entry an evaluation, over all seeds of a group.

    Args:
      seeds: the group's seeds, in the order of the stacked axis.
      entries: what `entries` held before, from a checkpoint's record.
    """

    def __init__(self, seeds: Sequence[int], entries: list[dict[str, Any]] | None = None) -> None:
        self.seeds = list(seeds)
        self.entries = entries or []

    def add(self, epoch: int, step: int, measurement: Any, diverged_steps: Sequence[int]) -> None:
        """Append a `Measurement` (leading axis S).

        A seed that diverged (its step is not negative) is left out from then on: its state is frozen and would only
        repeat itself.
        """
        self.entries.append(
            {
                "epoch": epoch,
                "step": step,
                "present": [bool(d < 0) for d in diverged_steps],
                "train_loss": _plain(measurement.train_loss),
                "val_loss": _plain(measurement.val_loss),
                "layers": {name: _plain(measurement.layers[name]) for name in METRIC_COLUMNS},
                "heads": {name: _plain(values) for name, values in sorted(measurement.heads.items())},
            }
        )

    def _rows(self) -> tuple[list[list], list[list]]:
        losses, metrics = [], []
        for index, seed in enumerate(self.seeds):
            for entry in self.entries:
                if not entry["present"][index]:
                    continue
                place = [seed, entry["epoch"], entry["step"]]
                losses.append([*place, *_floats(entry[name][index] for name in ("train_loss", "val_loss"))])
                columns = [entry["layers"][name][index] for name in METRIC_COLUMNS]
                metrics += [[*place, layer, *_floats(values)] for layer, values in enumerate(zip(*columns, strict=True))]
        return losses, metrics

    def write(self, folder: Path) -> None:
        """losses.csv, metrics.csv and heads.npz, each replaced atomically.

        heads.npz holds `seeds` [S], `epochs` [E], and each per-head metric as float32 [S, E, L, H].
        """
        losses, metrics = self._rows()
        write_csv(folder / "losses.csv", GROUP_LOSS_COLUMNS, losses)
        write_csv(folder / "metrics.csv", GROUP_METRIC_COLUMNS, metrics)
        arrays = {"seeds": np.asarray(self.seeds), "epochs": np.asarray([entry["epoch"] for entry in self.entries])}
        for name in self.entries[0]["heads"]:
            # None becomes NaN.
            stacked = np.asarray([entry["heads"][name] for entry in self.entries], dtype=np.float32)
            arrays[name] = stacked.swapaxes(0, 1)
        write_npz(folder / "heads.npz", arrays)


def _floats(values: Any) -> list[np.float32 | None]:
    return [None if value is None else np.float32(value) for value in values]

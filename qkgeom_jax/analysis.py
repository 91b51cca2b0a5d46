"""Trajectories, their slopes and the regressions over them, from a study's tables alone.

A *trajectory* is one layer of one depth and initialisation over the epochs, averaged over the seeds (the paper's 54).
Only finished groups without an intervention enter; diverged seeds are left out. PR stands for participation ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from qkgeom_jax.config import INITIALIZATIONS
from qkgeom_jax.results import METRIC_COLUMNS, Table, select

SUBSETS = {
    "all": INITIALIZATIONS,
    "uncoupled": ("disjoint_support", "independent"),
    "qk_identical": ("qk_identical",),
}

# The ways to take a slope. The first is the one that the tables and Figure 3 use.
FITS = {
    "per_epoch": "per epoch, epochs 1 to E",
    "per_1000_steps": "per 1,000 steps, epochs 1 to E",
    "with_epoch_0": "per epoch, epochs 0 to E",
    "second_half": "per epoch, epochs after E/2",
}
SLOPES = {
    "pr_q_slope": "participation_ratio_q",
    "pr_k_slope": "participation_ratio_k",
    "pr_difference_slope": "participation_ratio_difference",
    "effective_rank_qk_slope": "effective_rank_qk",
    "attention_entropy_slope": "attention_entropy",
}
# Figure 3: what is regressed (y) on what (x).
REGRESSIONS = {
    "key specialisation to interaction spectrum": ("pr_k_slope", "effective_rank_qk_slope"),
    "interaction spectrum to entropy": ("effective_rank_qk_slope", "attention_entropy_slope"),
}


@dataclass(frozen=True)
class GroupSeries:
    """Every metric of one finished group, by seed, layer and epoch.

    Attributes:
      depth: L.
      init: the query/key initialisation.
      seeds: the S seeds that did not diverge, ascending.
      epochs: [E + 1], ascending from 0, the untrained model.
      steps: completed optimizer steps [E + 1].
      values: a metric's column, or ``participation_ratio_difference`` (PR_Q - PR_K), to float64 [S, L, E + 1].
    """

    depth: int
    init: str
    seeds: tuple[int, ...]
    epochs: np.ndarray
    steps: np.ndarray
    values: Mapping[str, np.ndarray]

    def trajectory(self, column: str) -> np.ndarray:
        """The mean over seeds [L, E + 1]."""
        return self.values[column].mean(axis=0)


@dataclass(frozen=True)
class MeanSd:
    """A mean and the sample standard deviation (n - 1) of `n` values (None: not said); NaN where undefined."""

    mean: float
    sd: float
    n: int | None = None


@dataclass(frozen=True)
class Regression:
    """A least-squares line through n points, Pearson's r, its p, and 95% confidence intervals.

    All are NaN where the line is undefined, and `reason` says why; it is empty otherwise.
    """

    n: int
    slope: float = np.nan
    intercept: float = np.nan
    r: float = np.nan
    p: float = np.nan
    r_low: float = np.nan
    r_high: float = np.nan
    slope_low: float = np.nan
    slope_high: float = np.nan
    reason: str = ""


def mean_sd(values: Sequence[float] | np.ndarray) -> MeanSd:
    """The mean and the sample standard deviation (n - 1).

    Args:
      values: numbers [n].

    Returns:
      `MeanSd` in the values' unit; the mean is NaN for no value, the standard deviation for fewer than two.

    >>> mean_sd([1.0, 3.0])
    MeanSd(mean=2.0, sd=1.4142135623730951, n=2)
    """
    values = np.asarray(values, np.float64)
    mean = float(values.mean()) if values.size else np.nan
    return MeanSd(mean, float(values.std(ddof=1)) if values.size > 1 else np.nan, values.size)


def standard_error(values: np.ndarray) -> np.ndarray:
    """The standard error of the mean over the first axis, sd / sqrt(n).

    Args:
      values: [n, ...].

    Returns:
      [...], in the values' unit, not negative; NaN for fewer than two values.

    >>> standard_error(np.array([1.0, 3.0])).item()
    1.0
    """
    n = len(values)
    return values.std(axis=0, ddof=1) / np.sqrt(n) if n > 1 else np.full(values.shape[1:], np.nan)


def slope(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The slope of the least-squares line: sum (x - mean x)(y - mean y) / sum (x - mean x)^2.

    Args:
      x: places [n], such as epochs.
      y: values [..., n].

    Returns:
      [...], in the unit of y over that of x. NaN where y holds one, and everywhere for fewer than two distinct x.

    >>> slope(np.array([1, 2, 3]), np.array([0.0, 2.0, 4.0])).item()
    2.0
    """
    x = np.asarray(x, np.float64)
    if np.unique(x).size < 2:
        return np.full(y.shape[:-1], np.nan)
    x = x - x.mean()
    return np.sum(x * (y - y.mean(axis=-1, keepdims=True)), axis=-1) / np.sum(x * x)


def fit_slope(epochs: np.ndarray, steps: np.ndarray, y: np.ndarray, fit: str = "per_epoch") -> np.ndarray:
    """The slope over epochs in one of the ways of `FITS`.

    Args:
      epochs: [E + 1], ascending, 0 for the untrained model.
      steps: completed optimizer steps [E + 1].
      y: values [..., E + 1].
      fit: ``per_epoch`` (epochs 1 to E), ``per_1000_steps`` (the same epochs), ``with_epoch_0`` (all), or
        ``second_half`` (epochs after E/2).

    Returns:
      [...], the unit of y per epoch or per 1,000 steps; NaN where fewer than two epochs are left.

    Raises:
      ValueError: `fit` is none of these.

    Source: the paper's Table 4 and Figure 3 speak of slopes only; which epochs enter is ours.

    >>> fit_slope(np.arange(4), 500 * np.arange(4), np.array([9.0, 1.0, 2.0, 3.0]), "per_1000_steps").item()
    2.0
    """
    if fit not in FITS:
        raise ValueError(f"fit is {fit!r}; allowed: {', '.join(FITS)}")
    x = steps / 1000 if fit == "per_1000_steps" else epochs
    last = np.max(epochs, initial=0)
    kept = epochs > {"with_epoch_0": -1, "second_half": last / 2}.get(fit, 0)
    return slope(x[kept], y[..., kept])


def regression(x: np.ndarray, y: np.ndarray) -> Regression:
    """Least-squares line of y on x, Pearson's r, its two-sided p, and 95% confidence intervals.

    The interval of r is by Fisher's z, tanh(artanh r -+ 1.96 / sqrt(n - 3)), and needs four points; that of the slope
    is by Student's t with n - 2 degrees of freedom. Pairs with an undefined member are left out.

    Args:
      x: [n].
      y: [n].

    Returns:
      `Regression`; undefined, with the reason, for fewer than three points or where all x or all y are equal.

    >>> fitted = regression(np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, 3.0, 5.0, 7.0]))
    >>> fitted.slope, fitted.intercept, fitted.r
    (2.0, 1.0, 1.0)
    """
    defined = np.isfinite(x) & np.isfinite(y)
    x, y = x[defined], y[defined]
    n = int(x.size)
    if n < 3:
        return Regression(n, reason=f"{n} cells with slopes, a fit needs 3")
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return Regression(n, reason="all cells have the same " + ("x" if np.ptp(x) == 0 else "y"))
    line = stats.linregress(x, y)
    r = float(np.clip(line.rvalue, -1, 1))
    low = high = np.nan
    if abs(r) == 1:
        low = high = r
    elif n > 3:
        reach = stats.norm.ppf(0.975) / np.sqrt(n - 3)
        low, high = np.tanh(np.arctanh(r) - reach), np.tanh(np.arctanh(r) + reach)
    margin = stats.t.ppf(0.975, n - 2) * line.stderr
    return Regression(
        n, float(line.slope), float(line.intercept), r, float(line.pvalue), float(low), float(high),
        float(line.slope - margin), float(line.slope + margin),
    )  # fmt: skip


def finished_groups(metrics: Table, runs: Table, intervention: str = "none") -> list[GroupSeries]:
    """The metrics of every finished group of one intervention, without diverged seeds.

    Args:
      metrics: OUT/metrics.csv, with the columns of `results.METRIC_TABLE_COLUMNS`.
      runs: OUT/runs.csv.
      intervention: the arm.

    Returns:
      One `GroupSeries` for each depth and initialisation, in order of depth, then as in the paper's tables. A group
      of which no seed is left is not there.

    Raises:
      ValueError: a seed, epoch or layer of a group is missing from `metrics`.
    """
    done = select(runs, (runs["status"] == "done") & (runs["intervention"] == intervention))
    keys = {(int(depth), str(init)) for depth, init in zip(done["depth"], done["init"])}
    groups = []
    for depth, init in sorted(keys, key=lambda key: (key[0], _init_order(key[1]))):
        seeds = np.unique(done["seed"][(done["depth"] == depth) & (done["init"] == init)])
        own = (metrics["depth"] == depth) & (metrics["init"] == init) & (metrics["intervention"] == intervention)
        groups.append(_group_series(depth, init, seeds, select(metrics, own & np.isin(metrics["seed"], seeds))))
    return groups


def _init_order(init: str) -> tuple[int, str]:
    known = init in INITIALIZATIONS
    return (INITIALIZATIONS.index(init) if known else len(INITIALIZATIONS)), init


def _group_series(depth: int, init: str, seeds: np.ndarray, rows: Table) -> GroupSeries:
    epochs, first = np.unique(rows["epoch"], return_index=True)
    shape = (len(seeds), depth, len(epochs))
    at = np.lexsort((rows["epoch"], rows["layer"], rows["seed"]))
    grid = [axis.ravel() for axis in np.meshgrid(seeds, np.arange(depth), epochs, indexing="ij")]
    if not all(np.array_equal(rows[name][at], axis) for name, axis in zip(("seed", "layer", "epoch"), grid)):
        raise ValueError(f"metrics: depth {depth}, {init} lacks a seed, layer or epoch, or has one twice")
    values = {column: rows[column][at].reshape(shape) for column in METRIC_COLUMNS}
    values["participation_ratio_difference"] = values["participation_ratio_q"] - values["participation_ratio_k"]
    return GroupSeries(depth, init, tuple(int(seed) for seed in seeds), epochs, rows["step"][first], values)


CELL_COLUMNS = (
    "depth", "init", "layer", "seeds", "epochs", "pr_difference_last", "pr_difference_positive_share", *SLOPES,
)  # fmt: skip


def cells(groups: Sequence[GroupSeries], fit: str = "per_epoch") -> Table:
    """One row for each trajectory: its slopes, and the level of PR_Q - PR_K.

    Args:
      groups: from `finished_groups`.
      fit: one of `FITS`.

    Returns:
      Columns [cells] named in `CELL_COLUMNS`: ``seeds`` and ``epochs`` are counts, ``pr_difference_last`` is
      PR_Q - PR_K at the last epoch, ``pr_difference_positive_share`` the share of the epochs 1 to E at which it is
      positive; both are NaN without a trained epoch. The slopes are as `fit_slope` gives them.
    """
    rows: dict[str, list] = {column: [] for column in CELL_COLUMNS}
    for group in groups:
        trained = group.trajectory("participation_ratio_difference")[:, group.epochs >= 1]
        count = trained.shape[1]
        undefined = np.isnan(trained).any(axis=1) | (count == 0)
        rows["depth"] += [group.depth] * group.depth
        rows["init"] += [group.init] * group.depth
        rows["layer"] += range(group.depth)
        rows["seeds"] += [len(group.seeds)] * group.depth
        rows["epochs"] += [count] * group.depth
        rows["pr_difference_last"] += list(trained[:, -1] if count else np.full(group.depth, np.nan))
        rows["pr_difference_positive_share"] += list(
            np.where(undefined, np.nan, (trained > 0).sum(axis=1) / max(count, 1))
        )
        for name, column in SLOPES.items():
            rows[name] += list(fit_slope(group.epochs, group.steps, group.trajectory(column), fit))
    kinds = {"init": np.str_, "depth": np.int64, "layer": np.int64, "seeds": np.int64, "epochs": np.int64}
    return {column: np.array(values, kinds.get(column, np.float64)) for column, values in rows.items()}


def subset(table: Table, name: str) -> Table:
    """The rows of a table with a column ``init`` that belong to one of `SUBSETS`."""
    return select(table, np.isin(table["init"], SUBSETS[name]))


def figure_3_regressions(table: Table) -> dict[str, Regression]:
    """The two regressions of Figure 3 over the uncoupled rows of `cells`, by the names of `REGRESSIONS`."""
    uncoupled = subset(table, "uncoupled")
    return {name: regression(uncoupled[x], uncoupled[y]) for name, (x, y) in REGRESSIONS.items()}

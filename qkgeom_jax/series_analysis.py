"""Slopes and correlations over the revisions of a series, and the counts of Table 6, from a study's records alone.

A *trajectory* is a series' metrics averaged over layers, one value a revision. The untrained revision (step 0) and the
flagged ones stay out of slopes and correlations. PR stands for participation ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from qkgeom_jax.analysis import Regression, regression
from qkgeom_jax.series_results import CONTRAST, SUMMARY, Record

# A series counts from this many revisions on, as in the paper.
LEAST_REVISIONS = 3

# What a slope is taken over. The first is the one of Table 6 and Figure 5.
FITS = {
    "per_revision": "per revision",
    "per_1000_steps": "per 1,000 steps",
    "per_decade": "per factor of 10 in steps",
}
# Which revisions enter. The first is the one of Table 6 and Figure 5; early and late share the middle of an odd number.
WINDOWS = {
    "trained": "all trained",
    "early": "first half",
    "late": "second half",
    "with_untrained": "with the untrained one",
    "with_flagged": "with the flagged ones",
}
SLOPES = {
    "pr_difference_slope": CONTRAST,
    "pr_q_slope": "participation_ratio_q",
    "pr_k_slope": "participation_ratio_k",
}
# Figure 5, right: both positive is what the paper calls bridge co-movement.
CORRELATIONS = {
    "pr_k_with_effective_rank_qk": ("participation_ratio_k", "effective_rank_qk"),
    "effective_rank_qk_with_entropy": ("effective_rank_qk", "attention_entropy"),
}
STATEMENTS = ("pr_difference_slope_positive", "pr_q_slope_positive", "pr_k_slope_negative", "bridge_comovement")


@dataclass(frozen=True)
class Trajectory:
    """A series over its measured revisions, in order of steps.

    Attributes:
      series, family: names.
      revisions: [n].
      steps: [n], NaN where a revision's name holds none.
      values: each of `series_results.SUMMARY`, averaged over layers [n].
      flagged: [n], True for those that a flag excludes.
    """

    series: str
    family: str
    revisions: tuple[str, ...]
    steps: np.ndarray
    values: Mapping[str, np.ndarray]
    flagged: np.ndarray

    def window(self, name: str = "trained") -> np.ndarray:
        """The places [k] of the revisions of one of `WINDOWS`.

        Raises:
          ValueError: there is no such window.
        """
        if name not in WINDOWS:
            raise ValueError(f"window is {name!r}; allowed: {', '.join(WINDOWS)}")
        kept = np.ones(len(self.revisions), bool) if name == "with_flagged" else ~self.flagged
        if name != "with_untrained":
            kept &= self.steps != 0
        places = np.flatnonzero(kept)
        half = (len(places) + 1) // 2
        return places[:half] if name == "early" else places[len(places) - half :] if name == "late" else places


@dataclass(frozen=True)
class Summary:
    """What Table 6 and Figure 5 say of one series in one window.

    Attributes:
      series, family: names.
      revisions: how many entered.
      first, last: their first and last revision; empty for none.
      slopes: `SLOPES` to a line over the revisions, undefined with its reason where they are fewer than three.
      correlations: `CORRELATIONS` to the same; its r is Pearson's.
      rank_correlations: `CORRELATIONS` to Spearman's; NaN where undefined.
    """

    series: str
    family: str
    revisions: int
    first: str
    last: str
    slopes: Mapping[str, Regression]
    correlations: Mapping[str, Regression]
    rank_correlations: Mapping[str, float]

    def holds(self, statement: str, ranks: bool = False) -> bool | None:
        """Whether one of `STATEMENTS` holds; None where it is undefined.

        Args:
          statement: its name.
          ranks: take Spearman's correlations for the bridge, not Pearson's.
        """
        if statement == "bridge_comovement":
            values = list(self.rank_correlations.values()) if ranks else [c.r for c in self.correlations.values()]
        else:
            name, sign = statement.rsplit("_", 1)
            values = [(-1 if sign == "negative" else 1) * self.slopes[name].slope]
        return None if np.isnan(values).any() else all(value > 0 for value in values)


def trajectories(series: Mapping[str, Sequence[Record]]) -> list[Trajectory]:
    """The measured revisions of each series, which has at least one.

    Args:
      series: from `series_results.collect`.
    """
    found = []
    for name, records in series.items():
        done = [record for record in records if record.status == "done"]
        if done:
            found.append(
                Trajectory(
                    name,
                    done[0].family,
                    tuple(record.revision for record in done),
                    np.array([np.nan if record.step is None else record.step for record in done], np.float64),
                    {column: np.array([record.mean(column) for record in done]) for column in SUMMARY},
                    np.array([record.excluded for record in done]),
                )
            )
    return found


def _abscissa(steps: np.ndarray, fit: str) -> np.ndarray:
    if fit == "per_revision":
        return np.arange(len(steps), dtype=np.float64)
    if fit == "per_1000_steps":
        return steps / 1000
    return np.log10(np.where(steps > 0, steps, np.nan))


def summarise(trajectory: Trajectory, window: str = "trained", fit: str = "per_revision") -> Summary:
    """Slopes and correlations of one series.

    Args:
      trajectory: from `trajectories`.
      window: one of `WINDOWS`.
      fit: one of `FITS`; a slope's unit is that of its column, the contrast's being 1 / head width of dimensions.

    Raises:
      ValueError: there is no such window or fit.

    Source: the paper's Table 6 and Figure 5 speak of fitted slopes and model-level correlations only; least squares over
    the index of the revision, and Pearson's r over revisions, are ours.
    """
    if fit not in FITS:
        raise ValueError(f"fit is {fit!r}; allowed: {', '.join(FITS)}")
    places = trajectory.window(window)
    values = {column: trajectory.values[column][places] for column in SUMMARY}
    x = _abscissa(trajectory.steps[places], fit)
    correlations = {name: regression(values[a], values[b]) for name, (a, b) in CORRELATIONS.items()}
    names = [trajectory.revisions[place] for place in places] or [""]
    return Summary(
        trajectory.series, trajectory.family, len(places), names[0], names[-1],
        {name: regression(x, values[column]) for name, column in SLOPES.items()},
        correlations,
        {
            name: np.nan if correlations[name].reason else float(stats.spearmanr(values[a], values[b]).statistic)
            for name, (a, b) in CORRELATIONS.items()
        },
    )  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """A row of Table 6: in how many of `models` series each of `STATEMENTS` holds (None for no series)."""

    family: str
    models: int
    holding: Mapping[str, int | None]


def count(summaries: Sequence[Summary], family: str, ranks: bool = False) -> Counts:
    """A row of Table 6 over the series that have enough revisions.

    Args:
      summaries: of any families.
      family: the one to count, or ``all``.
      ranks: as for `Summary.holds`.
    """
    own = [s for s in summaries if s.revisions >= LEAST_REVISIONS and family in ("all", s.family)]
    holding = {name: sum(s.holds(name, ranks) is True for s in own) if own else None for name in STATEMENTS}
    return Counts(family, len(own), holding)

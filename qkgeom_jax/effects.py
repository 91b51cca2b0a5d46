"""What an intervention changes: each seed of an arm against the same seed of its baseline, from a study's tables alone.

A delta is arm minus baseline. Diverged seeds are left out of both. PR stands for participation ratio.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from qkgeom_jax.analysis import GroupSeries, finished_groups
from qkgeom_jax.config import DOSES, INTERVENTIONS, REQUIRED_INIT, split_dose
from qkgeom_jax.results import Group, Table, select

# The three whose signs make up the paper's confidence, and the loss that it reports beside them.
SIGNED = ("attention_entropy", "logit_std", "effective_rank_qk")
QUANTITIES = ("val_loss", *SIGNED)
# An exact test goes through 2^n patterns of signs.
MOST_SEEDS = 20


@dataclass(frozen=True)
class Arm:
    """One finished arm of one depth and initialisation.

    Attributes:
      depth: L.
      init: the query/key initialisation.
      name: the intervention.
      acts: it falls due within the run; a baseline does not.
      dose: the strength of an arm of `config.DOSES`, else None.
      seeds: the S seeds that did not diverge, ascending.
      epochs: [E + 1], ascending from 0.
      values: one of `QUANTITIES` to float64 [S, L, E + 1]; the loss, which has no layers, to [S, 1, E + 1].
    """

    depth: int
    init: str
    name: str
    acts: bool
    dose: float | None
    seeds: tuple[int, ...]
    epochs: np.ndarray
    values: Mapping[str, np.ndarray]

    def final(self, quantity: str) -> np.ndarray:
        """The last epoch's values [S], averaged over layers."""
        return self.values[quantity][:, :, -1].mean(axis=1)


@dataclass(frozen=True)
class Comparison:
    """An arm against the baseline of one initialisation, seed by seed.

    Attributes:
      arm: the arm.
      against: the initialisation of the baseline.
      seeds: the S seeds that both have.
      epochs: [E + 1], those that both have.
      deltas: one of `QUANTITIES` to float64 [S, L, E + 1], the loss to [S, 1, E + 1].
    """

    arm: Arm
    against: str
    seeds: tuple[int, ...]
    epochs: np.ndarray
    deltas: Mapping[str, np.ndarray]

    def final(self, quantity: str) -> np.ndarray:
        """The last epoch's deltas [S], averaged over layers."""
        return self.deltas[quantity][:, :, -1].mean(axis=1)

    @property
    def confidence(self) -> float:
        """The share of seeds and of `SIGNED` whose delta has the sign of its mean; NaN where nothing changed."""
        finals = np.array([self.final(quantity) for quantity in SIGNED])
        same = np.sign(finals) == np.sign(finals.mean(axis=1, keepdims=True))
        return float(np.mean(same & (finals != 0))) if finals.any() else np.nan


@dataclass(frozen=True)
class Effect:
    """The mean of n paired deltas, its 95% interval, and two tests of no effect; NaN where undefined.

    `p_t` is of the paired t test, `p_sign_flip` of the exact sign-flip test, both two-sided.
    """

    n: int
    mean: float = np.nan
    low: float = np.nan
    high: float = np.nan
    p_t: float = np.nan
    p_sign_flip: float = np.nan


def sign_flip_p(deltas: np.ndarray) -> float:
    """The exact two-sided sign-flip test: the share of all 2^n sign patterns whose absolute sum reaches that observed.

    Without an effect each paired delta is as likely with the other sign. With n deltas p is at least 2^(1 - n): five
    seeds cannot give less than 0.0625.

    Args:
      deltas: paired differences [n].

    Returns:
      p in (0, 1]; 1 where all deltas are 0; NaN for none, or for more than `MOST_SEEDS`.

    Source: R. A. Fisher, The Design of Experiments (1935), section 21.

    >>> sign_flip_p(np.array([1.0, 2.0, 3.0]))
    0.25
    """
    deltas = np.asarray(deltas, np.float64)
    if not 0 < deltas.size <= MOST_SEEDS:
        return np.nan
    sums = np.zeros(1)
    for delta in deltas:
        sums = np.concatenate([sums + delta, sums - delta])
    observed = abs(deltas.sum())
    # Patterns that equal the observed one in exact arithmetic must count, whatever the order of the additions.
    return float(np.mean(np.abs(sums) >= observed - 1e-12 * np.abs(deltas).sum()))


def effect(deltas: np.ndarray) -> Effect:
    """Summarise paired deltas [n]: mean, 95% interval by Student's t with n - 1 degrees of freedom, and tests.

    Args:
      deltas: arm minus baseline, one a seed.

    Returns:
      `Effect`, in the deltas' unit; interval and `p_t` are NaN for fewer than two. Equal deltas have an interval of
      width 0, and `p_t` 0, or 1 if they are 0.

    >>> effect(np.array([1.0, 1.0])).p_t
    0.0
    """
    deltas = np.asarray(deltas, np.float64)
    n = deltas.size
    if n == 0:
        return Effect(0)
    mean = float(deltas.mean())
    if n == 1:
        return Effect(1, mean, p_sign_flip=sign_flip_p(deltas))
    error = deltas.std(ddof=1) / np.sqrt(n)
    reach = stats.t.ppf(0.975, n - 1) * error
    p = 2 * stats.t.sf(abs(mean) / error, n - 1) if error > 0 else float(mean == 0)
    return Effect(n, mean, float(mean - reach), float(mean + reach), float(p), sign_flip_p(deltas))


def _losses(losses: Table, series: GroupSeries, name: str) -> np.ndarray:
    """val_loss [S, 1, E + 1] of one arm."""
    own = (losses["depth"] == series.depth) & (losses["init"] == series.init) & (losses["intervention"] == name)
    rows = select(losses, own & np.isin(losses["seed"], series.seeds))
    at = np.lexsort((rows["epoch"], rows["seed"]))
    if not np.array_equal(rows["epoch"][at], np.tile(series.epochs, len(series.seeds))):
        raise ValueError(f"losses: depth {series.depth}, {series.init}, {name} lacks an epoch, or has one twice")
    return rows["val_loss"][at].reshape(len(series.seeds), 1, len(series.epochs))


def _order(name: str) -> tuple[int, str, float]:
    """Baseline, the paper's arms, the user's own; a weaker or stronger dose follows its arm."""
    arm, dose = split_dose(name)
    place = INTERVENTIONS.index(arm) if arm in INTERVENTIONS else len(INTERVENTIONS)
    return place, arm, float(dose) if dose else -1.0


def finished_arms(groups: Sequence[Group], metrics: Table, losses: Table, runs: Table) -> list[Arm]:
    """Every finished arm of a study, by depth, initialisation and arm.

    Args:
      groups: from `results.collect`.
      metrics: OUT/metrics.csv.
      losses: OUT/losses.csv.
      runs: OUT/runs.csv.

    Raises:
      ValueError: a seed, epoch or layer of a group is missing.
    """
    stated = {group.key: group.config for group in groups}
    arms = []
    for name in sorted({group.key[2] for group in groups}, key=_order):
        for series in finished_groups(metrics, runs, name):
            config = stated[series.depth, series.init, name]
            paper_arm, dose = split_dose(name)
            if paper_arm in DOSES and dose is None:
                dose = config["manipulation"][DOSES[paper_arm]]
            values = {"val_loss": _losses(losses, series, name)} | {q: series.values[q] for q in SIGNED}
            acts = name != "none" and config.get("first_update", 1) is not None
            arms.append(Arm(
                series.depth, series.init, name, acts, None if dose is None else float(dose), series.seeds, series.epochs,
                values,
            ))  # fmt: skip
    return sorted(arms, key=lambda arm: (arm.depth, arm.init != "independent", arm.init))


def compare(arms: Sequence[Arm]) -> list[Comparison]:
    """Every arm against the baseline of its own depth and initialisation.

    An arm that has one initialisation only (`config.REQUIRED_INIT`) is compared with the baselines of all others, too:
    the paper has one baseline for all arms.
    """
    found = []
    baselines = [arm for arm in arms if arm.name == "none"]
    for arm, baseline in itertools.product(arms, baselines):
        same = arm.init == baseline.init or arm.name in REQUIRED_INIT
        if arm.name == "none" or arm.depth != baseline.depth or not same:
            continue
        seeds = tuple(sorted(set(arm.seeds) & set(baseline.seeds)))
        epochs = np.intersect1d(arm.epochs, baseline.epochs)
        if not seeds or not len(epochs):
            continue
        deltas = {
            quantity: _at(arm, quantity, seeds, epochs) - _at(baseline, quantity, seeds, epochs)
            for quantity in QUANTITIES
        }
        found.append(Comparison(arm, baseline.init, seeds, epochs, deltas))
    return found


def _at(arm: Arm, quantity: str, seeds: Sequence[int], epochs: np.ndarray) -> np.ndarray:
    values = arm.values[quantity][np.isin(arm.seeds, seeds)]
    return values[:, :, np.isin(arm.epochs, epochs)]

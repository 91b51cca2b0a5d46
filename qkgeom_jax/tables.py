"""The paper's Tables 3 and 4 and what belongs beside them, with the paper's values; rendered as CSV and Markdown."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkgeom_jax import paper
from qkgeom_jax.analysis import FITS, REGRESSIONS, GroupSeries, MeanSd, Regression, cells, mean_sd, subset
from qkgeom_jax.results import Table, select, write_csv, write_text

INIT_LABELS = {
    "qk_identical": "QK identical",
    "disjoint_support": "Disjoint support",
    "independent": "Independent",
}
SUBSET_LABELS = {"all": "All trajectories", "uncoupled": "Uncoupled Q/K", "qk_identical": "QK identical"}
QUANTITY_LABELS = {
    "pr_q_slope": "PR_Q slope",
    "pr_k_slope": "PR_K slope",
    "pr_difference_slope": "(PR_Q - PR_K) slope",
    "effective_rank_qk_slope": "QK^T effective rank slope",
    "attention_entropy_slope": "attention entropy slope",
}
PR_SLOPES = ("pr_q_slope", "pr_k_slope", "pr_difference_slope")


@dataclass(frozen=True)
class Column:
    """A column of a `ReportTable`.

    Attributes:
      name: its name in the CSV file.
      heading: its heading in Markdown.
      form: how Markdown prints its floating-point numbers.
      spread: its cells are `MeanSd`; the CSV file has a second column ``NAME_sd``.
    """

    name: str
    heading: str
    form: str = ".4f"
    spread: bool = False


@dataclass(frozen=True)
class ReportTable:
    """A table before it is written. A cell is text, a number, `MeanSd`, or None (or NaN) for an empty one."""

    title: str
    columns: tuple[Column, ...]
    rows: list[tuple]
    notes: list[str]


def _beside(name: str, heading: str, **how: Any) -> tuple[Column, Column]:
    """A column and the paper's beside it."""
    return Column(name, heading, **how), Column(f"paper_{name}", "paper", **how)


def _lack(label: str, defined: int, total: int, one: str, many: str, need: str = "") -> list[str]:
    """The note that says why a row's cell is empty, or has no standard deviation."""
    if total == 0:
        return [f"{label}: no finished {one}."]
    if defined < total:
        return [f"{label}: {defined} of {total} {many} have a value{need}."]
    return [f"{label}: one {one}, so no standard deviation."] if total == 1 else []


def _defined(values: np.ndarray) -> MeanSd:
    return mean_sd(values[np.isfinite(values)])


def _count(values: np.ndarray, holds: np.ndarray) -> int | None:
    """How often something holds; None where there is nothing to ask it of."""
    return int(np.sum(holds)) if np.isfinite(values).any() else None


def table_3(runs: Table) -> ReportTable:
    """Table 3: final validation loss and alignment by initialisation, over finished runs without intervention.

    Args:
      runs: OUT/runs.csv.

    Returns:
      A row for each initialisation of the paper: mean and sample standard deviation over runs (a depth and a seed),
      the alignment of a run averaged over its layers, and the paper's values beside.
    """
    columns = (
        Column("init", "Initialisation"),
        *_beside("runs", "Runs"),
        *_beside("final_val_loss", "Final val loss", spread=True),
        *_beside("final_alignment", "Final alignment", spread=True),
        *_beside("depth_8_alignment", "Depth-8 alignment", spread=True),
    )
    rows = []
    notes = ["Mean ± sample standard deviation over runs, a run's alignment being the mean over its layers."]
    for init, label in INIT_LABELS.items():
        own = select(runs, (runs["status"] == "done") & (runs["intervention"] == "none") & (runs["init"] == init))
        deep = own["final_alignment"][own["depth"] == 8]
        count, reference = len(own["seed"]), paper.TABLE_3[init]
        row: list = [label, count, reference["runs"]]
        for name, values in (
            ("final_val_loss", own["final_val_loss"]),
            ("final_alignment", own["final_alignment"]),
            ("depth_8_alignment", deep),
        ):
            row += [_defined(values), MeanSd(*reference[name])]
        rows.append(tuple(row))
        notes += _lack(label, min(row[3].n, row[5].n), count, "run", "runs")
        if count:
            notes += _lack(label, row[7].n, len(deep), "run of depth 8", "runs of depth 8")
    return ReportTable("Table 3: final loss and alignment", columns, rows, notes)


def table_4(table: Table) -> ReportTable:
    """Table 4: slopes of the participation ratios over the trajectories of each subset, the paper's values beside.

    Args:
      table: from `analysis.cells`.

    Returns:
      Rows all, uncoupled and identical: mean and sample standard deviation over trajectories, per epoch.
    """
    columns = [Column("subset", "Subset"), *_beside("n", "n")]
    for name in PR_SLOPES:
        columns += _beside(name, QUANTITY_LABELS[name], form="+.4f", spread=True)
    rows, notes = [], ["Per epoch, over epochs 1 to E; mean ± sample standard deviation over trajectories."]
    for key, label in SUBSET_LABELS.items():
        own, reference = subset(table, key), paper.TABLE_4[key]
        n = len(own["depth"])
        row: list = [label, n, reference["n"]]
        for name in PR_SLOPES:
            row += [_defined(own[name]), MeanSd(*reference[name])]
        rows.append(tuple(row))
        notes += _lack(label, row[-2].n, n, "trajectory", "trajectories", "; a slope needs two trained epochs")
    return ReportTable("Table 4: slopes of the participation ratios", tuple(columns), rows, notes)


def table_4_fits(groups: Sequence[GroupSeries]) -> ReportTable:
    """Table 4 by each of `analysis.FITS`: how much hangs on which epochs enter the slope."""
    columns = [Column("subset", "Subset"), Column("fit", "Slope"), Column("n", "n")]
    columns += [Column(name, QUANTITY_LABELS[name], form="+.4f", spread=True) for name in PR_SLOPES]
    tables = {fit: cells(groups, fit) for fit in FITS}
    rows, notes = [], ["n counts the trajectories that have such a slope, which takes two epochs."]
    for key, label in SUBSET_LABELS.items():
        for fit, text in FITS.items():
            own = subset(tables[fit], key)
            slopes = [_defined(own[name]) for name in PR_SLOPES]
            rows.append((label, text, slopes[-1].n, *slopes))
    return ReportTable("Table 4 by other slopes", tuple(columns), rows, notes)


def signs(table: Table) -> ReportTable:
    """In how many trajectories PR_Q - PR_K is positive: its level, and its slope.

    Args:
      table: from `analysis.cells`.

    Returns:
      Rows all, uncoupled and identical; counts of trajectories, and the mean share of the epochs 1 to E.
    """
    columns = (
        Column("subset", "Subset"),
        Column("n", "n"),
        Column("level_last", "Level > 0 at the last epoch"),
        Column("level_always", "Level > 0 at every epoch from 1"),
        Column("level_share", "Share of these epochs", form=".3f"),
        Column("slope", "Slope > 0"),
        Column("paper_positive", "paper: positive"),
        Column("paper_n", "paper: n"),
    )
    rows, notes = [], ["'Positive in all trajectories studied' (the paper) may mean the level or the slope."]
    for key, label in SUBSET_LABELS.items():
        own = subset(table, key)
        n, share = len(own["depth"]), own["pr_difference_positive_share"]
        level, rise = own["pr_difference_last"], own["pr_difference_slope"]
        rows.append((
            label, n, _count(level, level > 0), _count(share, share == 1), _defined(share).mean,
            _count(rise, rise > 0), paper.POSITIVE_TRAJECTORIES[key], paper.TABLE_4[key]["n"],
        ))  # fmt: skip
        defined = int(np.isfinite(rise).sum())
        if defined < n or n == 0:
            notes += _lack(label, defined, n, "trajectory", "trajectories", " for the slope; it needs two epochs")
    return ReportTable("Trajectories in which PR_Q - PR_K is positive", columns, rows, notes)


def figure_3_table(regressions: Mapping[str, Regression]) -> ReportTable:
    """The regressions of Figure 3, from `analysis.figure_3_regressions`, with 95% confidence intervals."""
    columns = (
        Column("y", "y"), Column("x", "x"), Column("n", "n"),
        Column("slope", "Slope"), Column("slope_low", "95% from"), Column("slope_high", "to"),
        Column("intercept", "Intercept"),
        Column("r", "r", form=".3f"), Column("r_low", "95% from", form=".3f"), Column("r_high", "to", form=".3f"),
        Column("p", "p", form=".2g"),
    )  # fmt: skip
    rows, notes = [], ["Over the uncoupled cells. Layers of one model are not independent: p is too small."]
    for name, fitted in regressions.items():
        x, y = (QUANTITY_LABELS[quantity] for quantity in REGRESSIONS[name])
        rows.append((y, x, *(getattr(fitted, column.name) for column in columns[2:])))
        if fitted.reason:
            notes.append(f"{y} on {x}: {fitted.reason}.")
        elif fitted.n == 3:
            notes.append(f"{y} on {x}: three cells, so no confidence interval of r.")
    return ReportTable("Regressions of Figure 3", columns, rows, notes)


def _printed(value: Any, form: str) -> str:
    if isinstance(value, MeanSd):
        sd = _printed(value.sd, form.lstrip("+"))
        return _printed(value.mean, form) + (f" ± {sd}" if sd else "")
    if value is None or isinstance(value, float) and np.isnan(value):
        return ""
    return format(value, form) if isinstance(value, float) else str(value)


def to_markdown(table: ReportTable) -> str:
    """The table in Markdown: title, grid, and the notes under it.

    >>> table = ReportTable("Losses", (Column("x", "X", ".2f", spread=True),), [(MeanSd(1.234, 0.05),)], ["Two runs."])
    >>> print(to_markdown(table))
    **Losses**
    <BLANKLINE>
    | X |
    | --- |
    | 1.23 ± 0.05 |
    <BLANKLINE>
    - Two runs.
    <BLANKLINE>
    """
    lines = ["| " + " | ".join(column.heading for column in table.columns) + " |"]
    lines.append("|" + " --- |" * len(table.columns))
    for row in table.rows:
        cells_ = (_printed(value, column.form) for column, value in zip(table.columns, row, strict=True))
        lines.append("| " + " | ".join(cells_) + " |")
    return "\n".join([f"**{table.title}**", "", *lines, "", *(f"- {note}" for note in table.notes), ""])


def write_table(table: ReportTable, path: str | os.PathLike) -> None:
    """Write PATH.csv and PATH.md. In the CSV a `MeanSd` is two columns, the second with ``_sd`` to its name."""
    path, names, rows = Path(path), [], []
    for column in table.columns:
        names += [column.name, f"{column.name}_sd"] if column.spread else [column.name]
    for row in table.rows:
        flat: list = []
        for value in row:
            flat += [value.mean, value.sd] if isinstance(value, MeanSd) else [value]
        rows.append(flat)
    write_csv(path.with_name(path.name + ".csv"), names, rows)
    write_text(path.with_name(path.name + ".md"), to_markdown(table))

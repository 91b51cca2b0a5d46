"""Table 6 and what belongs beside it, with the paper's counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qkgeom_jax import paper
from qkgeom_jax.series_analysis import (
    CORRELATIONS,
    FITS,
    LEAST_REVISIONS,
    SLOPES,
    STATEMENTS,
    WINDOWS,
    Summary,
    Trajectory,
    count,
    summarise,
)  # fmt: skip
from qkgeom_jax.series_results import Record
from qkgeom_jax.tables import Column, ReportTable

FAMILY_LABELS = {"pythia": "Pythia", "smollm2": "SmolLM2", "gpt2": "GPT-2"}
STATEMENT_LABELS = {
    "pr_difference_slope_positive": "ΔPR slope > 0",
    "pr_q_slope_positive": "PR_Q slope > 0",
    "pr_k_slope_negative": "PR_K slope < 0",
    "bridge_comovement": "Bridge co-movement",
}
SLOPE_LABELS = {"pr_difference_slope": "ΔPR / d_head slope", "pr_q_slope": "PR_Q slope", "pr_k_slope": "PR_K slope"}
CORRELATION_LABELS = {
    "pr_k_with_effective_rank_qk": "r(PR_K, QK^T rank)",
    "effective_rank_qk_with_entropy": "r(QK^T rank, entropy)",
}


def family_label(family: str) -> str:
    """How a family is called in tables and figures."""
    return FAMILY_LABELS.get(family, family)


def families(summaries: Sequence[Summary]) -> list[str]:
    """The paper's families, then others that are there."""
    return [*FAMILY_LABELS, *sorted({summary.family for summary in summaries} - FAMILY_LABELS.keys())]


def revision_notes(series: Mapping[str, Sequence[Record]]) -> list[str]:
    """A sentence for every series with a flagged or failed revision."""
    notes = []
    for name, records in series.items():
        flagged = [
            f"{record.revision} ({'; '.join(flag.text for flag in record.flags)}{'' if record.excluded else '; kept'})"
            for record in records
            if record.flags
        ]
        if flagged:
            notes.append(f"{name}, flagged, and left out of slopes and correlations unless kept: {', '.join(flagged)}.")
        if failed := [record.revision or "its list of revisions" for record in records if record.status == "failed"]:
            notes.append(f"{name}, failed (see series.csv): {', '.join(failed)}.")
    return notes


def table_6(found: Sequence[Trajectory], series: Mapping[str, Sequence[Record]]) -> ReportTable:
    """Table 6: in how many series of each family each statement holds, the paper's counts beside.

    Args:
      found: from `series_analysis.trajectories`.
      series: the records, for the notes about single revisions.

    Returns:
      A row for each of the paper's families, others that are there, and all together.
    """
    columns = [Column("family", "Family"), Column("models", "Models"), Column("paper_models", "paper")]
    for name in STATEMENTS:
        columns += [Column(name, STATEMENT_LABELS[name]), Column(f"paper_{name}", "paper")]
    summaries = [summarise(trajectory) for trajectory in found]
    rows = []
    for family in (*families(summaries), "all"):
        counts, reference = count(summaries, family), paper.TABLE_6.get(family, {})
        row: list = [
            "All fitted series" if family == "all" else family_label(family),
            counts.models,
            reference.get("models"),
        ]
        for name in STATEMENTS:
            row += [counts.holding[name], reference.get(name)]
        rows.append(tuple(row))
    notes = [
        "ΔPR: the paired contrast (PR_Q - PR_K) / d_head. Slopes: least squares over the index of the revision, without "
        "the untrained and the flagged ones, of the mean over layers. Bridge co-movement: PR_K with QK^T effective rank "
        "and that with entropy, both Pearson's r > 0 over the same revisions.",
        "The paper does not say which revisions it took, nor which repositories; it counts the series of "
        f"{LEAST_REVISIONS} or more revisions, as is done here.",
    ]
    for summary in summaries:
        if summary.revisions < LEAST_REVISIONS:
            notes.append(f"{summary.series} does not count: {summary.revisions} trained and unflagged revisions.")
    with_flagged = count([summarise(trajectory, "with_flagged") for trajectory in found], "all")
    kept = count(summaries, "all")
    if (with_flagged.models, with_flagged.holding) != (kept.models, kept.holding):
        parts = [f"{STATEMENT_LABELS[name]} {with_flagged.holding[name]}" for name in STATEMENTS]
        notes.append(f"With the flagged revisions in, of {with_flagged.models} series: {', '.join(parts)}.")
    return ReportTable("Table 6: public checkpoint series", tuple(columns), rows, [*notes, *revision_notes(series)])


# Window, slope, Spearman's correlations for Pearson's.
_VARIANTS = (
    ("trained", "per_1000_steps", False), ("trained", "per_decade", False), ("trained", "per_revision", True),
    ("early", "per_revision", False), ("late", "per_revision", False),
    ("with_untrained", "per_revision", False), ("with_flagged", "per_revision", False),
)  # fmt: skip


def table_6_variants(found: Sequence[Trajectory]) -> ReportTable:
    """Table 6 by other slopes, correlations and revisions: how much hangs on these choices."""
    columns = (
        Column("family", "Family"), Column("revisions", "Revisions"), Column("slope", "Slope"),
        Column("correlation", "Correlation"), Column("models", "Models"),
        *(Column(name, STATEMENT_LABELS[name]) for name in STATEMENTS),
    )  # fmt: skip
    rows = []
    names = [f for f in families([summarise(t) for t in found]) if any(t.family == f for t in found)]
    for family in (*names, "all"):
        for window, fit, ranks in _VARIANTS:
            counts = count([summarise(trajectory, window, fit) for trajectory in found], family, ranks)
            label = "All fitted series" if family == "all" else family_label(family)
            kind = "Spearman" if ranks else "Pearson"
            rows.append((label, WINDOWS[window], FITS[fit], kind, counts.models, *counts.holding.values()))
    notes = [
        "Halves are of the trained and unflagged revisions in order of steps, sharing the middle one of an odd number: "
        "beyond the paper, which says that the trend holds early in training and decays later.",
        f"A series counts from {LEAST_REVISIONS} revisions in the window on.",
    ]
    return ReportTable("Table 6 by other slopes and revisions", columns, rows, notes)


def series_table(found: Sequence[Trajectory]) -> ReportTable:
    """Figure 5 in numbers: slopes and correlations of each series, over all and over each half of its revisions."""
    columns = [
        Column("series", "Series"), Column("window", "Revisions"), Column("n", "n"), Column("first", "First"),
        Column("last", "Last"),
    ]  # fmt: skip
    for name in SLOPES:
        columns.append(Column(name, SLOPE_LABELS[name], form="+.4f"))
        if name == "pr_difference_slope":
            columns += [Column(f"{name}_low", "95% from", form="+.4f"), Column(f"{name}_high", "to", form="+.4f")]
    for name in CORRELATIONS:
        columns += [
            Column(name, CORRELATION_LABELS[name], form="+.2f"),
            Column(f"{name}_low", "95% from", form="+.2f"), Column(f"{name}_high", "to", form="+.2f"),
            Column(f"{name}_spearman", "Spearman", form="+.2f"),
        ]  # fmt: skip
    rows, short = [], False
    for trajectory in found:
        for window in ("trained", "early", "late"):
            summary = summarise(trajectory, window)
            row: list = [summary.series, WINDOWS[window], summary.revisions, summary.first, summary.last]
            for name, line in summary.slopes.items():
                row += [line.slope, line.slope_low, line.slope_high] if name == "pr_difference_slope" else [line.slope]
            for name, line in summary.correlations.items():
                row += [line.r, line.r_low, line.r_high, summary.rank_correlations[name]]
            rows.append(tuple(row))
            short |= summary.revisions < LEAST_REVISIONS
    notes = [
        "Per revision; Student's t for slopes, Fisher's z (from four revisions on) for r. Successive revisions are not "
        "independent: intervals are too narrow."
    ]
    if short:
        notes.append(f"Fewer than {LEAST_REVISIONS} revisions have no slope and no correlation.")
    return ReportTable("Slopes and correlations by series", tuple(columns), rows, notes)

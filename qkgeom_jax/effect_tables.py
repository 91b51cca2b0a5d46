"""The paper's Table 5 and what belongs beside it: each delta with its tests, by layer and epoch, and by dose."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qkgeom_jax import paper
from qkgeom_jax.analysis import mean_sd
from qkgeom_jax.config import REQUIRED_INIT, split_dose
from qkgeom_jax.effects import MOST_SEEDS, QUANTITIES, SIGNED, Arm, Comparison, effect
from qkgeom_jax.results import write_csv
from qkgeom_jax.tables import INIT_LABELS, Column, ReportTable

ARM_LABELS = {
    "none": "No intervention",
    "k_spectrum_clamp": "K spectrum clamp",
    "forced_k_contraction": "Forced K contraction",
    "freeze_q": "Freeze Q",
    "freeze_k": "Freeze K",
    "qk_decouple": "Q/K decouple",
    "qk_align": "Q/K align",
}
QUANTITY_LABELS = {
    "val_loss": "Val loss (nats)",
    "attention_entropy": "Entropy (nats)",
    "logit_std": "Logit std",
    "effective_rank_qk": "QK^T effective rank",
}
DOSE_LABELS = {"k_spectrum_clamp": "Clamp strength", "forced_k_contraction": "Contraction factor"}
IDLE = " †"
IDLE_NOTE = "†: falls due only after the run's end; it never acted."


def label(arm: Arm) -> str:
    """An arm as tables and figures write it; a dose stands after @, and a mark says that it never acted."""
    name, dose = split_dose(arm.name)
    idle = "" if arm.acts or arm.name == "none" else IDLE
    return ARM_LABELS.get(name, name) + (f"@{dose}" if dose else "") + idle


def _idle_notes(arms: Sequence[Arm]) -> list[str]:
    return [IDLE_NOTE] if any(label(arm).endswith(IDLE) for arm in arms) else []


def _paper_against(comparisons: Sequence[Comparison], arm: Arm) -> Comparison | None:
    """The comparison that stands for the paper's: its one baseline starts from independent weights."""
    own = [c for c in comparisons if c.arm is arm]
    preferred = [c for c in own if arm.name in REQUIRED_INIT and c.against == "independent"]
    return next(iter(preferred + own), None)


def table_5(arms: Sequence[Arm], comparisons: Sequence[Comparison]) -> ReportTable:
    """Table 5: each arm's final loss, entropy, logit deviation and QK^T effective rank, and its confidence.

    Args:
      arms: from `effects.finished_arms`; may be empty.
      comparisons: from `effects.compare`.

    Returns:
      A row for each arm: mean and sample standard deviation over its runs, averaged over layers, at the last epoch;
      confidence is the share of seeds and quantities whose delta has the sign of the mean delta. The paper's beside.
    """
    columns = [Column("depth", "Depth"), Column("init", "Initialisation"), Column("arm", "Arm"), Column("n", "Runs")]
    for name in QUANTITIES:
        form = ".2f" if name == "effective_rank_qk" else ".4f"
        columns += [Column(name, QUANTITY_LABELS[name], form, spread=True), Column(f"paper_{name}", "paper", form)]
    columns += [Column("confidence", "Conf.", ".2f"), Column("paper_confidence", "paper", ".2f")]
    rows = []
    notes = [
        "Mean ± sample standard deviation over runs at the last epoch, a run being the mean over its layers. "
        f"Conf.: share of seeds and of {', '.join(QUANTITY_LABELS[q] for q in SIGNED)} whose delta against the same "
        "seed's baseline has the sign of the mean delta.",
        "The paper's values are of another text, size and length: signs compare, sizes do not.",
    ]
    for arm in arms:
        told = paper.TABLE_5.get(arm.name, {}) if arm.name != "none" or arm.init == "independent" else {}
        against = _paper_against(comparisons, arm)
        row = [arm.depth, INIT_LABELS.get(arm.init, arm.init), label(arm), len(arm.seeds)]
        for name in QUANTITIES:
            row += [mean_sd(arm.final(name)), told.get(name)]
        rows.append((*row, against.confidence if against else None, told.get("confidence")))
        if against and against.against != arm.init:
            own = [f"{c.confidence:.2f}" for c in comparisons if c.arm is arm and c.against == arm.init]
            notes.append(
                f"{label(arm)}, depth {arm.depth}: confidence against the {against.against} baseline"
                + (f"; against its own start {own[0]}." if own else ".")
            )
        elif not against and arm.name != "none":
            notes.append(f"{label(arm)}, depth {arm.depth}: no finished baseline with a seed in common.")
    if not arms:
        notes.append("No finished arm.")
    return ReportTable("Table 5: outcomes of the interventions", tuple(columns), rows, notes + _idle_notes(arms))


def _paper_delta(comparison: Comparison, quantity: str) -> float | None:
    told = paper.TABLE_5.get(comparison.arm.name)
    return told[quantity] - paper.TABLE_5["none"][quantity] if told else None


def effects_table(comparisons: Sequence[Comparison]) -> ReportTable:
    """Each arm's paired delta at the last epoch, with its interval, two tests, and the sign of the paper's."""
    columns = (
        Column("depth", "Depth"), Column("init", "Initialisation"), Column("arm", "Arm"), Column("against", "Against"),
        Column("quantity", "Quantity"), Column("n", "Seeds"), Column("mean", "Delta", "+.4f"),
        Column("low", "95% from", "+.4f"), Column("high", "to", "+.4f"), Column("same_sign", "Seeds of its sign"),
        Column("p_t", "p (t)", ".2g"), Column("p_sign_flip", "p (sign flip)", ".2g"),
        Column("paper_delta", "paper", "+.4f"), Column("agrees", "Sign as the paper's"),
    )  # fmt: skip
    rows = []
    notes = [
        "Arm minus the same seed's baseline, mean over layers, last epoch. Interval and p (t): Student's t over seeds; "
        "p (sign flip): exact, at least 2^(1 - n), so 0.0625 for five seeds. No p is corrected for the number of tests."
    ]
    for comparison, quantity in itertools.product(comparisons, QUANTITIES):
        deltas = comparison.final(quantity)
        found, told = effect(deltas), _paper_delta(comparison, quantity)
        agrees = None if told is None or found.mean == 0 else "yes" if told * found.mean > 0 else "no"
        arm = comparison.arm
        rows.append((
            arm.depth, INIT_LABELS.get(arm.init, arm.init), label(arm),
            INIT_LABELS.get(comparison.against, comparison.against), QUANTITY_LABELS[quantity], found.n, found.mean,
            found.low, found.high, int(np.sum(np.sign(deltas) == np.sign(found.mean))), found.p_t, found.p_sign_flip,
            told, agrees,
        ))  # fmt: skip
    if any(len(c.seeds) < 2 for c in comparisons):
        notes.append("An interval and p (t) need two seeds.")
    if any(len(c.seeds) > MOST_SEEDS for c in comparisons):
        notes.append(f"The exact sign-flip test is left out above {MOST_SEEDS} seeds.")
    if not comparisons:
        notes.append("No finished arm with a finished baseline.")
    return ReportTable("Paired deltas", columns, rows, notes + _idle_notes([c.arm for c in comparisons]))


def dose_points(comparisons: Sequence[Comparison], arm: str) -> list[Comparison]:
    """The comparisons of an arm at all its doses, the weakest first."""
    own = [c for c in comparisons if split_dose(c.arm.name)[0] == arm and c.against == c.arm.init]
    return sorted(own, key=lambda c: (c.arm.depth, c.arm.init, c.arm.dose))


def dose_table(comparisons: Sequence[Comparison]) -> ReportTable:
    """The dose response of the arms that have a dose: paired deltas at the last epoch."""
    columns = (
        Column("arm", "Arm"), Column("depth", "Depth"), Column("init", "Initialisation"), Column("dose", "Dose", "g"),
        Column("n", "Seeds"), *(Column(q, QUANTITY_LABELS[q], "+.4f", spread=True) for q in QUANTITIES),
    )  # fmt: skip
    rows, notes = [], [
        "Mean ± sample standard deviation of the paired deltas. No effect: strength 0, factor 1. More doses: "
        "--clamp-strengths, --contraction-factors."
    ]  # fmt: skip
    for arm, text in DOSE_LABELS.items():
        own = dose_points(comparisons, arm)
        for c in own:
            deltas = [mean_sd(c.final(quantity)) for quantity in QUANTITIES]
            rows.append((text, c.arm.depth, INIT_LABELS.get(c.arm.init, c.arm.init), c.arm.dose, len(c.seeds), *deltas))
        if not own:
            notes.append(f"{text}: no finished arm.")
    return ReportTable("Dose response", columns, rows, notes)


DETAIL_COLUMNS = (
    "depth", "init", "arm", "against", "quantity", "epoch", "layer", "n", "mean", "low", "high", "p_t", "p_sign_flip",
)  # fmt: skip


def write_details(comparisons: Sequence[Comparison], path: Path) -> None:
    """Every delta by epoch and layer, and by epoch averaged over layers (an empty layer), as a CSV file."""
    rows = []
    for c, quantity in itertools.product(comparisons, QUANTITIES):
        layers = c.deltas[quantity]
        curves = {None: layers.mean(axis=1)}
        if quantity in SIGNED:  # the loss has no layers
            curves |= {layer: layers[:, layer] for layer in range(layers.shape[1])}
        for (layer, curve), (at, epoch) in itertools.product(curves.items(), enumerate(c.epochs)):
            found = effect(curve[:, at])
            values = (found.n, found.mean, found.low, found.high, found.p_t, found.p_sign_flip)
            rows.append((c.arm.depth, c.arm.init, c.arm.name, c.against, quantity, int(epoch), layer, *values))
    write_csv(path, DETAIL_COLUMNS, rows)


def agreement(comparisons: Sequence[Comparison]) -> list[str]:
    """A sentence for each of the paper's arms: which signs are as the paper's."""
    lines = []
    for c in comparisons:
        if c.arm.name not in paper.TABLE_5:
            continue
        parts = []
        for quantity in QUANTITIES:
            ours, told = effect(c.final(quantity)), _paper_delta(c, quantity)
            verdict = "no change" if ours.mean == 0 else "as the paper" if ours.mean * told > 0 else "against the paper"
            clear = "" if np.isnan(ours.low) or ours.low * ours.high > 0 else ", its interval holding 0"
            parts.append(f"{QUANTITY_LABELS[quantity]} {ours.mean:+.4f} ({verdict}'s {told:+.4f}{clear})")
        against = f" against the {c.against} baseline" if c.against != c.arm.init else ""
        lines.append(f"{label(c.arm)}, depth {c.arm.depth}, {c.arm.init}{against}: {'; '.join(parts)}.")
    return lines


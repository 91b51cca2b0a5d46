"""The paper's Figure 4 and what belongs beside it, from a study's tables alone."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from qkgeom_jax import paper
from qkgeom_jax.config import DOSES, REQUIRED_INIT
from qkgeom_jax.effect_tables import DOSE_LABELS, dose_points, label
from qkgeom_jax.effects import QUANTITIES, Comparison, effect
from qkgeom_jax.figures import GREY, STYLE, WIDTH, explain
from qkgeom_jax.tables import INIT_LABELS

AXES_LABELS = {
    "val_loss": "Δ val loss (nats)",
    "attention_entropy": "Δ entropy (nats)",
    "logit_std": "Δ logit std",
    "effective_rank_qk": "Δ QK$^T$ effective rank",
}
# Okabe and Ito's colours again; markers tell them apart too.
LOOKS = (
    ("#D55E00", "o"), ("#0072B2", "s"), ("#009E73", "^"), ("#CC79A7", "v"), ("#E69F00", "D"), ("#56B4E9", "P"),
    ("#000000", "X"), ("#999999", "*"),
)  # fmt: skip
SHADES = matplotlib.colormaps["cividis"]
REASON = "No finished arm with a finished baseline."


def _named(comparisons: Sequence[Comparison]) -> list[tuple[str, Comparison]]:
    """The arms without extra doses and their labels, which say as much as tells them apart."""
    plain = [c for c in comparisons if "@" not in c.arm.name]
    depths = {c.arm.depth for c in plain}
    inits = {c.arm.init for c in plain if c.arm.name not in REQUIRED_INIT}
    named = []
    for c in plain:
        parts = [f"depth {c.arm.depth}"] * (len(depths) > 1)
        if c.arm.name in REQUIRED_INIT:
            parts.append(f"{INIT_LABELS.get(c.against, c.against)} baseline")
        elif len(inits) > 1:
            parts.append(INIT_LABELS.get(c.arm.init, c.arm.init))
        named.append((label(c.arm) + (f"\n({', '.join(parts)})" if parts else ""), c))
    return named


def _reach(found: Sequence) -> np.ndarray:
    """Lengths of the error bars, down and up [2, n]; NaN where there is no interval."""
    return np.array([[e.mean - e.low for e in found], [e.high - e.mean for e in found]])


@matplotlib.rc_context(STYLE)
def figure_4(comparisons: Sequence[Comparison]) -> Figure:
    """Figure 4: mean paired deltas at the last epoch with 95% intervals over seeds, coloured by confidence.

    Args:
      comparisons: from `effects.compare`; may be empty. Extra doses are left to `figure_dose`.

    Returns:
      A figure of four panels, one a quantity; a diamond is the paper's delta where it has one.
    """
    named = _named(comparisons)
    figure = Figure(figsize=(WIDTH, 1.1 + 0.34 * max(len(named), 4)), layout="constrained")
    panels = figure.subplots(1, len(QUANTITIES), sharey=True)
    for axes, quantity in zip(panels, QUANTITIES):
        axes.set_xlabel(AXES_LABELS[quantity])
        if not named:
            explain(axes, REASON)
            continue
        found = [effect(c.final(quantity)) for _, c in named]
        colours = [GREY if np.isnan(c.confidence) else SHADES(2 * c.confidence - 1) for _, c in named]
        places = np.arange(len(named))
        axes.barh(places, [e.mean for e in found], color=colours, height=0.7)
        axes.errorbar(
            [e.mean for e in found], places, xerr=_reach(found), fmt="none", ecolor="#CC3311", elinewidth=1.0, capsize=2
        )
        told = [paper.TABLE_5.get(c.arm.name) for _, c in named]
        marked = [(t[quantity] - paper.TABLE_5["none"][quantity], place) for t, place in zip(told, places) if t]
        if marked:
            axes.plot(*zip(*marked), "D", color="none", markeredgecolor="black", markersize=4, markeredgewidth=0.8)
        axes.axvline(0, color="black", linewidth=0.6)
        axes.margins(y=0.02)
        axes.xaxis.set_major_locator(MaxNLocator(3))
    if named:
        panels[0].set_yticks(np.arange(len(named)), [text for text, _ in named])
        panels[0].invert_yaxis()
        shades = ScalarMappable(Normalize(0.5, 1), SHADES)
        figure.colorbar(shades, ax=panels, label="Confidence", shrink=0.8, aspect=25)
        handles = [
            Patch(color=SHADES(0.5), label="mean delta"),
            Line2D([], [], color="#CC3311", linewidth=1.0, label="95% interval over seeds"),
            Line2D([], [], marker="D", linestyle="none", color="none", markeredgecolor="black", label="the paper's delta"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=3)
    if any(len(c.seeds) < 2 for _, c in named):
        figure.supxlabel("An interval needs two seeds; where it is missing, there is one.", fontsize=7, color=GREY)
    return figure


def _interval(axes: Axes, x: np.ndarray, values: np.ndarray, look: tuple[str, str], name: str) -> None:
    """The mean of values [n, x] with a band of its 95% interval; no band for n = 1."""
    found = [effect(column) for column in values.T]
    axes.plot(x, [e.mean for e in found], color=look[0], marker=look[1], markersize=3, linewidth=1.1, label=name)
    axes.fill_between(x, [e.low for e in found], [e.high for e in found], color=look[0], alpha=0.13, linewidth=0)


@matplotlib.rc_context(STYLE)
def figure_4_details(comparisons: Sequence[Comparison]) -> Figure:
    """Paired deltas over epochs, averaged over layers (top), and over layers at the last epoch (bottom), by depth.

    Against baselines of the arm's own start alone: another start differs from the first epoch on.

    Args:
      comparisons: from `effects.compare`; may be empty.

    Returns:
      A figure; lines are means over seeds, bands 95% intervals, absent for one seed. The loss has no layers.
    """
    named = _named([c for c in comparisons if c.against == c.arm.init])
    depths = sorted({c.arm.depth for _, c in named})
    figure = Figure(figsize=(WIDTH, 3.8 * max(len(depths), 1)), layout="constrained")
    if not named:
        explain(figure.subplots(), REASON)
        return figure
    rows = figure.subplots(2 * len(depths), len(QUANTITIES), squeeze=False)
    looks = {name: LOOKS[i % len(LOOKS)] for i, (name, _) in enumerate(named)}
    for depth, over_epochs, over_layers in zip(depths, rows[::2], rows[1::2]):
        own = [(name, c) for name, c in named if c.arm.depth == depth]
        for quantity, top, bottom in zip(QUANTITIES, over_epochs, over_layers):
            top.set_title(f"{AXES_LABELS[quantity]}", fontweight="normal")
            top.set_xlabel("Epoch")
            bottom.set_xlabel(f"Layer (depth {depth})")
            for name, c in own:
                _interval(top, c.epochs, c.deltas[quantity].mean(axis=1), looks[name], name)
                if quantity != "val_loss":
                    _interval(bottom, np.arange(depth), c.deltas[quantity][:, :, -1], looks[name], name)
            top.axhline(0, color=GREY, linewidth=0.6, zorder=0)
            top.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            if quantity != "val_loss":
                bottom.axhline(0, color=GREY, linewidth=0.6, zorder=0)
                bottom.set_xlim(-0.3, depth - 0.7)
                bottom.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        over_layers[0].axis("off")
        handles, names = over_epochs[0].get_legend_handles_labels()
        over_layers[0].legend(handles, names, loc="center", fontsize=6.5, handlelength=2)
    return figure


@matplotlib.rc_context(STYLE)
def figure_dose(comparisons: Sequence[Comparison]) -> Figure:
    """The dose response: paired deltas at the last epoch over the strength of the clamp and the contraction.

    Args:
      comparisons: from `effects.compare`; may be empty.

    Returns:
      A figure, a row an arm; the dose without effect (0, and 1 for the contraction's factor) is the baseline itself,
      and the strongest stands on the right. Dots are seeds, bars 95% intervals.
    """
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    rows = figure.subplots(len(DOSES), len(QUANTITIES))
    for arm, row in zip(DOSES, rows):
        own = dose_points(comparisons, arm)
        neutral = 1.0 if arm == "forced_k_contraction" else 0.0
        studies = sorted({(c.arm.depth, c.arm.init) for c in own})
        for quantity, axes in zip(QUANTITIES, row):
            axes.set_title(AXES_LABELS[quantity], fontweight="normal")
            axes.set_xlabel(DOSE_LABELS[arm])
            if not own:
                explain(axes, "No finished arm.")
                continue
            for study, (colour, marker) in zip(studies, LOOKS * len(studies)):
                points = [c for c in own if (c.arm.depth, c.arm.init) == study]
                doses = [c.arm.dose for c in points]
                found = [effect(c.final(quantity)) for c in points]
                for c in points:
                    axes.plot([c.arm.dose] * len(c.seeds), c.final(quantity), ".", color=colour, alpha=0.4, markersize=3)
                line = sorted([(neutral, 0.0), *zip(doses, (e.mean for e in found))])
                axes.plot(*zip(*line), color=colour, linewidth=1.0)
                axes.errorbar(
                    doses, [e.mean for e in found], yerr=_reach(found), fmt=marker, color=colour, capsize=2,
                    label=f"depth {study[0]}, {INIT_LABELS.get(study[1], study[1])}",
                )  # fmt: skip
            axes.axhline(0, color=GREY, linewidth=0.6, zorder=0)
            axes.set_xlim((1.05, -0.05) if neutral else (-0.05, 1.05))
        if len(studies) > 1:
            row[0].legend(fontsize=6)
    return figure

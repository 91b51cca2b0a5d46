"""Figure 5, from a checkpoint study's records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from qkgeom_jax.figures import DIFFERENCE, GREY, STYLE, explain, make_figure
from qkgeom_jax.series_analysis import CORRELATIONS, LEAST_REVISIONS, Trajectory, summarise
from qkgeom_jax.series_results import CONTRAST

# Okabe and Ito's colours: one a family, the series of a family told apart by marker.
FAMILY_COLOURS = {"pythia": "#0072B2", "smollm2": "#D55E00", "gpt2": "#009E73"}
OTHER_COLOURS = ("#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
# The windows of the left panel: marker, filled, offset downwards in rows, label.
WINDOW_LOOKS = {
    "trained": ("o", True, 0.0, "all trained revisions, 95% interval"),
    "early": ("<", False, 0.26, "first half of them"),
    "late": (">", False, -0.26, "second half"),
}
CORRELATION_LOOKS = {
    "pr_k_with_effective_rank_qk": ("o", True, 0.14, "PR$_K$ with QK$^T$ rank"),
    "effective_rank_qk_with_entropy": ("D", False, -0.14, "QK$^T$ rank with entropy"),
}
# An interval of few revisions may dwarf every slope: it is drawn to so many times the largest one.
WIDEST = 2.5


def _looks(found: Sequence[Trajectory]) -> dict[str, tuple[str, str]]:
    """Series to colour and marker."""
    others = [family for family in dict.fromkeys(t.family for t in found) if family not in FAMILY_COLOURS]
    colours = FAMILY_COLOURS | {family: OTHER_COLOURS[at % len(OTHER_COLOURS)] for at, family in enumerate(others)}
    places = {family: count() for family in colours}
    return {t.series: (colours[t.family], MARKERS[next(places[t.family]) % len(MARKERS)]) for t in found}


def _face(colour: str, filled: bool) -> dict[str, object]:
    return {
        "color": colour,
        "markerfacecolor": colour if filled else "white",
        "markeredgecolor": colour,
        "markeredgewidth": 0.9,
    }


def _legend(axes: Axes, handles: Sequence[Line2D], columns: int, length: float) -> None:
    """Under the axis label, where no point can lie."""
    below = axes.transAxes + ScaledTranslation(0, -0.38, axes.figure.dpi_scale_trans)
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below, ncols=columns,
        handlelength=length, borderaxespad=0,
    )  # fmt: skip


def _explain_markers(axes: Axes, looks: Mapping[str, tuple[str, bool, float, str]]) -> None:
    handles = [
        Line2D([], [], linestyle="none", marker=marker, markersize=4.5, label=label, **_face("black", filled))
        for marker, filled, _, label in looks.values()
    ]
    _legend(axes, handles, 1, 1.0)


def _draw_slopes(axes: Axes, found: Sequence[Trajectory], looks: Mapping[str, tuple[str, str]]) -> None:
    largest = 0.0
    for row, trajectory in enumerate(found):
        colour = looks[trajectory.series][0]
        for window, (marker, filled, offset, _) in WINDOW_LOOKS.items():
            line = summarise(trajectory, window).slopes["pr_difference_slope"]
            if np.isnan(line.slope):
                continue
            largest = max(largest, abs(line.slope))
            if window == "trained" and np.isfinite(line.slope_low):
                axes.plot([line.slope_low, line.slope_high], [row, row], color=colour, linewidth=1.2)
            axes.plot(line.slope, row - offset, marker=marker, markersize=5, linestyle="none", **_face(colour, filled))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    low, high = axes.get_xlim()
    if largest:
        axes.set_xlim(max(low, -WIDEST * largest), min(high, WIDEST * largest))
    axes.set_xlabel(f"Slope of ({DIFFERENCE}) / d$_{{head}}$ per revision")
    _explain_markers(axes, WINDOW_LOOKS)


def _draw_correlations(axes: Axes, found: Sequence[Trajectory], looks: Mapping[str, tuple[str, str]]) -> None:
    for row, trajectory in enumerate(found):
        colour = looks[trajectory.series][0]
        summary = summarise(trajectory)
        for name in CORRELATIONS:
            marker, filled, offset, _ = CORRELATION_LOOKS[name]
            line = summary.correlations[name]
            if np.isnan(line.r):
                continue
            if np.isfinite(line.r_low):
                axes.plot([line.r_low, line.r_high], [row - offset] * 2, color=colour, linewidth=1.0)
            axes.plot(line.r, row - offset, marker=marker, markersize=4.5, linestyle="none", **_face(colour, filled))
    axes.set_xlim(-1.05, 1.05)
    axes.set_xticks([-1, -0.5, 0, 0.5, 1])
    axes.set_xlabel("Pearson's r over revisions")
    _explain_markers(axes, CORRELATION_LOOKS)


def _draw_trajectories(axes: Axes, found: Sequence[Trajectory], looks: Mapping[str, tuple[str, str]]) -> None:
    """The contrast against the step; revisions without a step are not there."""
    positive = np.concatenate([t.steps[t.steps > 0] for t in found] or [np.empty(0)])
    if not positive.size:
        explain(axes, "No revision has a step in its name.")
        return
    for trajectory in found:
        colour, marker = looks[trajectory.series]
        values, steps = trajectory.values[CONTRAST], trajectory.steps
        small = 2.2 if len(steps) > 40 else STYLE["lines.markersize"]
        plain = {"color": colour, "marker": marker, "markersize": small}
        kept = trajectory.window("with_untrained")
        kept = kept[np.isfinite(steps[kept])]
        early = np.union1d(np.setdiff1d(kept, trajectory.window("trained")), trajectory.window("early"))
        late = np.union1d(early[-1:], trajectory.window("late"))
        for places, style in ((early, "-"), (late, (0, (2.5, 1.5)))):
            places = places[np.isfinite(steps[places])].astype(int)
            axes.plot(steps[places], values[places], linestyle=style, **plain)
        wrong = trajectory.flagged & np.isfinite(steps)
        axes.plot(
            steps[wrong],
            values[wrong],
            linestyle="none",
            marker=marker,
            markersize=6,
            zorder=4,
            **_face(colour, filled=False),
        )
        axes.plot(steps[wrong], values[wrong], linestyle="none", marker="x", markersize=4, color="black", zorder=5)
    axes.axhline(0, color=GREY, linewidth=0.6, zorder=0)
    if any((t.steps == 0).any() for t in found):
        axes.set_xscale("symlog", linthresh=positive.min(), linscale=0.4)
        axes.set_xlim(left=-0.3 * positive.min())
    else:
        axes.set_xscale("log")
    axes.set_xlim(right=1.3 * positive.max())
    axes.set_xlabel("Training step (0: untrained)" if axes.get_xscale() == "symlog" else "Training step")
    axes.set_ylabel(f"({DIFFERENCE}) / d$_{{head}}$")
    handles = [
        Line2D([], [], color="black", linestyle="-", label="first half"),
        Line2D([], [], color="black", linestyle=(0, (2.5, 1.5)), label="second half"),
    ]
    if any(t.flagged.any() for t in found):
        handles.append(
            Line2D([], [], color="black", linestyle="none", marker="x", label="flagged: in no slope or correlation")
        )
    _legend(axes, handles, 3, 2.2)


def _row_label(trajectory: Trajectory) -> str:
    label = f"{trajectory.series}\nn = {len(trajectory.window())}"
    return label + (f", {int(trajectory.flagged.sum())} flagged" if trajectory.flagged.any() else "")


@matplotlib.rc_context(STYLE)
def figure_5(found: Sequence[Trajectory]) -> Figure:
    """Figure 5, and under it the trajectories that its slopes come from.

    Args:
      found: from `series_analysis.trajectories`; may be empty.

    Returns:
      A figure. a: slopes of the normalised paired contrast per revision, over all trained revisions and over each half.
      b: correlations over revisions. c (beyond the paper): the contrast on a logarithmic axis of steps; flagged
      revisions are hollow and crossed, outside lines, slopes and correlations.
    """
    if not found:
        figure = make_figure(2.0)
        explain(figure.subplots(), "No revision has been measured.")
        return figure
    looks = _looks(found)
    rows = max(1.7, 0.36 * len(found) + 0.4)
    figure = make_figure(rows + 3.6)
    panels = figure.subplot_mosaic(
        [["slopes", "correlations"], ["trajectory", "trajectory"]], height_ratios=[rows, 2.0]
    )
    for name, title, draw in (
        ("slopes", "a  Slope of the paired contrast", _draw_slopes),
        ("correlations", "b  Bridge correlations", _draw_correlations),
        ("trajectory", "c  Paired contrast in training", _draw_trajectories),
    ):
        axes = panels[name]
        axes.set_title(title)
        draw(axes, found, looks)
        if name == "trajectory":
            continue
        axes.axvline(0, color=GREY, linewidth=0.6, zorder=0)
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.set_yticks(range(len(found)), [_row_label(t) for t in found] if name == "slopes" else [""] * len(found))
        axes.tick_params(axis="y", length=0)
        for row, trajectory in enumerate(found):
            if len(trajectory.window()) < LEAST_REVISIONS:
                text = f"fewer than {LEAST_REVISIONS} revisions"
                axes.text(0.03, row, text, transform=axes.get_yaxis_transform(), va="center", fontsize=7, color=GREY)
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="-", label=series)
        for series, (colour, marker) in looks.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure

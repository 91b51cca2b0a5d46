"""The paper's Figures 1 to 3, from a study's tables alone; drawn without pyplot, the same bytes for the same data."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from qkgeom_jax.analysis import REGRESSIONS, GroupSeries, Regression, standard_error, subset
from qkgeom_jax.results import Table, select, write_bytes
from qkgeom_jax.tables import INIT_LABELS

WIDTH = 7.0  # inches: two columns of a paper, where the smallest letters stay at 7 points

# The defaults first: a user's own matplotlibrc must not change the bytes.
STYLE = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")} | {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7.5, "legend.frameon": False, "lines.linewidth": 1.4, "lines.markersize": 3.5,
    "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "legend.handlelength": 3, "mathtext.default": "regular", "pdf.fonttype": 42, "figure.dpi": 200,
}  # fmt: skip

# Okabe and Ito's colours, told apart by marker and line as well.
LOOKS = {
    "qk_identical": {"color": "#D55E00", "marker": "o", "linestyle": "-"},
    "disjoint_support": {"color": "#009E73", "marker": "s", "linestyle": "--"},
    "independent": {"color": "#0072B2", "marker": "^", "linestyle": "-."},
}
GREY = "#666666"
DIFFERENCE = "PR$_Q$ − PR$_K$"


def explain(axes: Axes, reason: str) -> None:
    """An empty panel that says why it is empty."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", va="center", color=GREY, wrap=True)


def _band(axes: Axes, x: np.ndarray, values: np.ndarray, look: Mapping[str, str], **line: object) -> None:
    """The mean of values [n, x] with a band of a standard error; no band for n = 1."""
    mean, error = values.mean(axis=0), standard_error(values)
    axes.plot(x, mean, clip_on=False, **(dict(look) | line))
    axes.fill_between(x, mean - error, mean + error, color=look["color"], alpha=0.3, linewidth=0)


def _say_bands(figure: Figure, groups: Sequence[GroupSeries]) -> None:
    if any(len(group.seeds) < 2 for group in groups):
        figure.supxlabel("A band needs two seeds; where it is missing, there is one.", fontsize=7, color=GREY)


def make_figure(height: float, width: float = WIDTH) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


@matplotlib.rc_context(STYLE)
def figure_1(groups: Sequence[GroupSeries]) -> Figure:
    """Figure 1. Top: alignment over epochs by initialisation. Bottom: profiles over the layers of the deepest depth.

    Args:
      groups: from `analysis.finished_groups`; may be empty.

    Returns:
      A figure. Lines at the top are means over runs (a depth and a seed, averaged over layers), at the bottom over
      seeds, at the last epoch; bands are one standard error over the same, and absent for one run or seed.
    """
    figure = make_figure(4.4)
    panels = figure.subplot_mosaic([["top", "top", "top"], ["entropy", "mass", "difference"]])
    top = panels["top"]
    top.set_title("a  Alignment of W$_Q$ and W$_K$, all depths")
    top.set_xlabel("Epoch")
    top.set_ylabel("Column alignment")
    deepest = max((group.depth for group in groups), default=0)
    if not groups:
        for axes in panels.values():
            explain(axes, "No finished group.")
        return figure
    for init, look in LOOKS.items():
        own = [group for group in groups if group.init == init]
        if not own:
            continue
        epochs = functools.reduce(np.intersect1d, [group.epochs for group in own])
        runs = [group.values["column_alignment"].mean(axis=1)[:, np.isin(group.epochs, epochs)] for group in own]
        _band(top, epochs, np.concatenate(runs), look, label=INIT_LABELS[init])
    top.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    top.set_ylim(bottom=0)
    figure.legend(*top.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    profiles = {
        "entropy": ("attention_entropy", "b  Attention entropy", "Entropy (nats)"),
        "mass": ("top_1_mass", "c  Top-1 mass", "Largest attention weight"),
        "difference": ("participation_ratio_difference", "d  PR contrast", f"{DIFFERENCE} (dimensions)"),
    }
    for name, (column, title, label) in profiles.items():
        axes = panels[name]
        for group in groups:
            if group.depth == deepest and group.init in LOOKS:
                _band(axes, np.arange(deepest), group.values[column][:, :, -1], LOOKS[group.init])
        axes.set_title(title)
        axes.set_ylabel(label)
        axes.set_xlabel(f"Layer (depth {deepest})")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panels["difference"].axhline(0, color=GREY, linewidth=0.6, zorder=0)
    _say_bands(figure, groups)
    return figure


def _shade(place: float) -> str:
    """Light grey for the first layer (0) to dark for the last (1)."""
    return str(0.75 - 0.6 * place)


@matplotlib.rc_context(STYLE)
def figure_2(groups: Sequence[GroupSeries]) -> Figure:
    """Figure 2: PR_Q - PR_K over epochs, a panel for each initialisation and depth.

    Args:
      groups: from `analysis.finished_groups`; may be empty.

    Returns:
      A figure. Thin lines are layers, from light (first) to dark (last), averaged over seeds; the thick line is their
      mean, its band one standard error over seeds (each averaged over layers), absent for one seed.
    """
    inits = [init for init in LOOKS if any(group.init == init for group in groups)]
    depths = sorted({group.depth for group in groups})
    if not inits:
        figure = make_figure(2.0)
        explain(figure.subplots(), "No finished group.")
        return figure
    figure = make_figure(0.6 + 1.5 * len(inits), max(WIDTH, 0.4 + 1.5 * len(depths)) if len(depths) > 1 else WIDTH / 2)
    panels = figure.subplots(len(inits), len(depths), sharex=True, sharey=True, squeeze=False)
    for row, init in zip(panels, inits):
        row[0].set_ylabel(f"{INIT_LABELS[init]}\n{DIFFERENCE}")
        for axes, depth in zip(row, depths):
            own = [group for group in groups if (group.init, group.depth) == (init, depth)]
            axes.axhline(0, color=GREY, linewidth=0.6, zorder=0)
            if not own:
                axes.text(0.5, 0.5, "not finished", transform=axes.transAxes, ha="center", color=GREY)
            for group in own:
                look, values = LOOKS[init], group.values["participation_ratio_difference"]
                for layer, line in enumerate(values.mean(axis=0)):
                    axes.plot(group.epochs, line, color=_shade(layer / max(depth - 1, 1)), linewidth=0.7)
                _band(axes, group.epochs, values.mean(axis=1), look, linestyle="-", linewidth=1.6, markersize=3)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    handles = [
        Line2D([], [], color=_shade(0), linewidth=0.7, label="first layer"),
        Line2D([], [], color=_shade(1), linewidth=0.7, label="last layer"),
        Line2D([], [], color="black", linewidth=1.6, label="mean over layers"),
        Patch(color="black", alpha=0.3, linewidth=0, label="± standard error over seeds"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4 if len(depths) > 1 else 2)
    for axes, depth in zip(panels[0], depths):
        axes.set_title(f"Depth {depth}")
    for axes in panels[-1]:
        axes.set_xlabel("Epoch")
    _say_bands(figure, groups)
    return figure


def _in_figures(p: float) -> str:
    """A probability as print has it."""
    if p == 0 or p >= 1e-3:
        return f"{p:.2g}"
    digits, exponent = f"{p:.1e}".split("e")
    return f"{digits} × 10$^{{{int(exponent)}}}$"


def _draw_line(axes: Axes, fitted: Regression, x: np.ndarray) -> None:
    """The fitted line over the reach of x, with r and p above the points; or why there is none."""
    if fitted.reason:
        text, color = f"No line: {fitted.reason}.", GREY
    else:
        ends = np.array([np.nanmin(x), np.nanmax(x)])
        axes.plot(ends, fitted.intercept + fitted.slope * ends, color="black", linewidth=1.0)
        interval = "" if np.isnan(fitted.r_low) else f" [{fitted.r_low:.2f}, {fitted.r_high:.2f}]"
        text, color = f"r = {fitted.r:.2f}{interval}\np = {_in_figures(fitted.p)}, n = {fitted.n}", "black"
    axes.autoscale_view()
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.18 * (high - low))  # room for the text above every point
    # On white, since a zero line may pass behind it.
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(0.03, 0.98, text, transform=axes.transAxes, va="top", fontsize=7.5, color=color, bbox=white)


@matplotlib.rc_context(STYLE)
def figure_3(table: Table, regressions: Mapping[str, Regression]) -> Figure:
    """Figure 3: slopes against slopes, one point a trajectory, and the lines through the uncoupled ones.

    Args:
      table: from `analysis.cells`.
      regressions: from `analysis.figure_3_regressions`.

    Returns:
      A figure of two panels; identical cells are hollow and outside the fit. A panel without a line says why.
    """
    labels = {
        "pr_k_slope": "PR$_K$ slope (per epoch)",
        "effective_rank_qk_slope": "QK$^T$ effective rank slope (per epoch)",
        "attention_entropy_slope": "Entropy slope (nats per epoch)",
    }
    titles = ("a  Keys and interaction spectrum", "b  Interaction spectrum and entropy")
    figure = make_figure(3.3)
    panels = figure.subplots(1, 2)
    for axes, title, (name, (x, y)) in zip(panels, titles, REGRESSIONS.items()):
        axes.set_title(title)
        axes.set_xlabel(labels[x])
        axes.set_ylabel(labels[y])
        if not np.isfinite(table[x] + table[y]).any():
            explain(axes, "No finished trajectory of two trained epochs.")
            continue
        for init, look in LOOKS.items():
            own = select(table, table["init"] == init)
            if not len(own[x]):
                continue
            hollow = init == "qk_identical"
            face = {"markerfacecolor": "none", "markeredgecolor": look["color"], "markeredgewidth": 0.9}
            axes.plot(
                own[x], own[y], linestyle="none", marker=look["marker"], markersize=4.5,
                label=INIT_LABELS[init] + (" (not in the fit)" if hollow else ""),
                **(face if hollow else {"color": look["color"], "markeredgecolor": "white", "markeredgewidth": 0.4}),
            )  # fmt: skip
        _draw_line(axes, regressions[name], subset(table, "uncoupled")[x])
        axes.autoscale(False)  # a zero line appears only where zero is in view
        axes.axhline(0, color=GREY, linewidth=0.6, zorder=0)
        axes.axvline(0, color=GREY, linewidth=0.6, zorder=0)
    if panels[0].lines:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


@matplotlib.rc_context(STYLE)
def save(figure: Figure, path: str | os.PathLike) -> None:
    """Write PATH.png (200 dots an inch) and PATH.pdf, atomically and without a date or a version.

    Args:
      figure: any figure; equal figures give equal bytes.
      path: where, without the ending.

    Raises:
      OSError: as `results.write_bytes` does.
    """
    path = Path(path)
    for ending, canvas, metadata in (
        ("png", FigureCanvasAgg, {"Software": None}),
        ("pdf", FigureCanvasPdf, {"Creator": None, "Producer": None, "CreationDate": None}),
    ):
        stream = io.BytesIO()  # the layout of the first is kept, since finding it takes longer than drawing
        canvas(figure).print_figure(stream, format=ending, dpi=200, metadata=metadata)
        figure.set_layout_engine("none")
        write_bytes(path.with_name(f"{path.name}.{ending}"), stream.getvalue())

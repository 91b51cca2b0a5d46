"""Everything after training: tables, figures and report.md, from the groups' folders of a study."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from qkgeom_jax import analysis, effect_figures, effect_tables, effects, figures, paper, tables
from qkgeom_jax.analysis import GroupSeries
from qkgeom_jax.integrity import changed, digested, require_unchanged
from qkgeom_jax.results import (
    LOSS_COLUMNS, METRIC_TABLE_COLUMNS, RUN_COLUMNS, Group, collect, read_csv, read_groups, read_sealed, write_csv,
    write_text,
)  # fmt: skip

# Queries and keys part over the first several hundred optimizer steps: shorter runs show little else.
SHORT_STEPS = 1000

GRID_CAPTIONS = {
    "figure1": (
        "**Figure 1.** a: column alignment of W_Q and W_K (mean of |cos| over columns), mean over runs, each averaged "
        "over its layers; bands: one standard error over runs. b-d: profiles over the layers of the deepest depth at "
        "the last epoch, mean over seeds; bands: one standard error over seeds. PR: participation ratio."
    ),
    "figure2": (
        "**Figure 2.** The contrast of participation ratios, PR_Q - PR_K, over epochs. Thin lines: layers, averaged "
        "over seeds, from light (first) to dark (last). Thick lines: their mean; bands: one standard error over seeds."
    ),
    "figure3": (
        "**Figure 3.** Slopes over epochs 1 to E, one point for each initialisation, depth and layer, averaged over "
        "seeds. Lines, r (95% confidence interval) and p: over the uncoupled cells."
    ),
}
ARM_CAPTIONS = {
    "figure4": (
        "**Figure 4.** Mean paired deltas, arm minus the same seed's baseline, at the last epoch and averaged over "
        "layers; bars of error: 95% intervals over seeds (Student's t). Colour: the share of seeds and of entropy, logit "
        "deviation and effective rank whose delta has the sign of the mean delta. Diamonds: the paper's deltas."
    ),
    "figure4_details": (
        "**The same deltas** over epochs, averaged over layers (top), and over layers at the last epoch (bottom). "
        "Bands: 95% intervals over seeds."
    ),
    "figure_dose": (
        "**Dose response.** Mean paired deltas at the last epoch by strength of the clamp (1 restores the initial "
        "spectrum of W_K) and by factor of the contraction (1 leaves it). Dots: seeds; bars of error: 95% intervals."
    ),
}


def _flat(value: Any) -> str:
    """A JSON value in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_flat(item) for item in value)
    return " ".join(str(value).split())


def _stated(out: Path) -> dict[str, Any]:
    """What config.json and manifest.json state; the manifest, written last, wins."""
    stated: dict[str, Any] = {}
    for name in ("config.json", "manifest.json"):
        stated |= read_sealed(out / name) if (out / name).exists() else {}
    return stated


def _distinct(groups: Sequence[Group], part: str, field: str) -> str:
    """A field of the groups' configurations; all its values where they differ."""
    values = sorted({str(group.config[part][field]) for group in groups})
    return " or ".join(values)


def _what_was_run(groups: Sequence[Group], stated: Mapping[str, Any]) -> list[str]:
    lines = []
    if groups:
        seeds = sorted({seed for group in groups for seed in group.seeds})
        lines += [
            f"- Depths {_flat(sorted({group.key[0] for group in groups}))}; initialisations "
            f"{_flat(sorted({group.key[1] for group in groups}))}; interventions "
            f"{_flat(sorted({group.key[2] for group in groups}))}; seeds {_flat(seeds)}",
            "- Model: width {width}, {heads} heads, context {context}".format(
                **{field: _distinct(groups, "model", field) for field in ("width", "heads", "context")}
            ),
            "- Training: {epochs} epochs of {steps_per_epoch} steps, {batch} sequences a step, ".format(
                **{field: _distinct(groups, "training", field) for field in ("epochs", "steps_per_epoch", "batch")}
            )
            + f"peak learning rate {_distinct(groups, 'optimizer', 'learning_rate')}",
        ]
    for key in ("preset", "corpus", "versions", "device", "git_commit"):
        if stated.get(key) is not None:
            lines.append(f"- {key.replace('_', ' ').capitalize()}: {_flat(stated[key])}")
    return lines


def _steps(group: Group) -> int:
    return group.config["training"]["epochs"] * group.config["training"]["steps_per_epoch"]


def _place(group: Group) -> str:
    return f"depth {group.key[0]}, {group.key[1]}, {group.key[2]}"


def _remarks(groups: Sequence[Group], stated: Mapping[str, Any]) -> list[str]:
    remarks = [
        "The paper states neither width, context, optimizer nor the length of an epoch. Its values stand beside ours "
        "for their signs and order, not as a target."
    ]
    finished = [group for group in groups if group.status == "done"]
    if not finished:
        remarks.append("No group has finished: tables and figures are empty.")
    elif min(map(_steps, finished)) < SHORT_STEPS:
        remarks.append(
            f"**Too short for the claims**: runs of {min(map(_steps, finished)):,} steps. Queries and keys take "
            f"several hundred to part; below {SHORT_STEPS:,} these numbers show that the machinery works, no more."
        )
    lengths = {(group.config["training"]["epochs"], group.config["training"]["steps_per_epoch"]) for group in finished}
    if len(lengths) > 1:
        remarks.append("Groups differ in the number or the length of their epochs: their slopes are not comparable.")
    for group in finished:
        if (decay := group.config["optimizer"].get("decay_steps")) and decay < _steps(group):
            remarks.append(
                f"Extended: {_place(group)}: its schedule was made for {decay:,} steps; the steps after that ran at the final "
                "learning rate."
            )
    if stated.get("preset") == "paper":
        remarks.append("The preset `paper` is not calibrated: the paper leaves open what it fixes.")
    corpora = sorted({group.config["corpus"]["corpus"] for group in groups} - {"wikitext103"})
    if corpora:
        remarks.append(f"The paper trained on WikiText-103, this study on {_flat(corpora)}: losses are not comparable.")
    for group in groups:
        place = _place(group)
        if group.status != "done":
            remarks.append(
                f"Left out, not finished: {place} ({group.status}, {group.epochs_done} of "
                f"{group.config['training']['epochs']} epochs)."
            )
        for seed, step in sorted(group.diverged.items()):
            remarks.append(f"Left out, diverged: {place}, seed {seed}, at step {step}.")
    warnings = stated.get("warnings")
    return remarks + [_flat(warning) for warning in (warnings if isinstance(warnings, list) else [])]


def _write_cells(series: Sequence[GroupSeries], path: Path) -> None:
    """One row for each trajectory and way of taking the slope."""
    rows = []
    for fit in analysis.FITS:
        table = analysis.cells(series, fit)
        rows += [[fit, *row] for row in zip(*table.values())]
    write_csv(path, ("fit", *analysis.CELL_COLUMNS), rows)


@dataclass(frozen=True)
class _Results:
    """What a command's report shows: tables and figures by file name, captions of the figures, and findings in words."""

    tables: dict[str, tables.ReportTable]
    figures: dict[str, Figure]
    captions: dict[str, str]
    findings: list[str]


def _grid_results(out: Path, groups: Sequence[Group]) -> _Results:
    """Tables 3 and 4, Figures 1 to 3, over the groups without intervention."""
    runs = read_csv(out / "runs.csv", RUN_COLUMNS)
    series = analysis.finished_groups(read_csv(out / "metrics.csv", METRIC_TABLE_COLUMNS), runs)
    table = analysis.cells(series)
    regressions = analysis.figure_3_regressions(table)
    _write_cells(series, out / "tables" / "trajectories.csv")
    made = {
        "table3": tables.table_3(runs),
        "table4": tables.table_4(table),
        "table4_signs": tables.signs(table),
        "table4_slopes": tables.table_4_fits(series),
        "figure3": tables.figure_3_table(regressions),
    }
    drawn = {
        "figure1": figures.figure_1(series),
        "figure2": figures.figure_2(series),
        "figure3": figures.figure_3(table, regressions),
    }
    return _Results(made, drawn, GRID_CAPTIONS, [])


def _arm_results(out: Path, groups: Sequence[Group]) -> _Results:
    """Table 5, Figure 4, and the dose response."""
    runs, losses = read_csv(out / "runs.csv", RUN_COLUMNS), read_csv(out / "losses.csv", LOSS_COLUMNS)
    arms = effects.finished_arms(groups, read_csv(out / "metrics.csv", METRIC_TABLE_COLUMNS), losses, runs)
    compared = effects.compare(arms)
    effect_tables.write_details(compared, out / "tables" / "deltas.csv")
    made = {
        "table5": effect_tables.table_5(arms, compared),
        "table5_deltas": effect_tables.effects_table(compared),
        "table5_doses": effect_tables.dose_table(compared),
    }
    drawn = {
        "figure4": effect_figures.figure_4(compared),
        "figure4_details": effect_figures.figure_4_details(compared),
        "figure_dose": effect_figures.figure_dose(compared),
    }
    return _Results(made, drawn, ARM_CAPTIONS, effect_tables.agreement(compared))


RESULTS = {"grid": _grid_results, "interventions": _arm_results}


def _check_group_files(out: Path) -> None:
    """Refuses to show numbers of a finished group that are not those that were written, or under another configuration."""
    if changed(out, ["config.json"]):
        raise ValueError(f"{out / 'config.json'} is damaged: it is not what was written")
    for group in read_groups(out):
        if group.status == "done":
            require_unchanged(group.folder, ("config.json", "losses.csv", "metrics.csv"))


def write_all(out: str | os.PathLike) -> Path:
    """Rebuild every table, figure and the report of a study; equal groups give equal bytes.

    Writes runs.csv, losses.csv, metrics.csv, tables/, figures/ and report.md into `out`, each whole or not at all, and
    their digests into manifest.json where there is one.

    Args:
      out: the study's folder, with groups/; config.json and manifest.json are used where they are.

    Returns:
      The path of report.md.

    Raises:
      ValueError: `out` is no folder, a group's file is damaged, or the folder is of an unknown command.
      OSError: a file cannot be read or written.
    """
    out = Path(out)
    if not out.is_dir():
        raise ValueError(f"out is {str(out)!r}, which is no folder")
    _check_group_files(out)
    stated = _stated(out)
    command = stated.get("command", "grid")
    if not isinstance(command, str) or command not in RESULTS:
        raise ValueError(f"{out} holds results of the command {command!r}; allowed here: {', '.join(RESULTS)}")
    with digested(out):
        _write(out, stated, RESULTS[command])
    return out / "report.md"


def _write(out: Path, stated: Mapping[str, Any], results_of: Callable[[Path, Sequence[Group]], _Results]) -> None:
    groups = collect(out)
    found = results_of(out, groups)
    for name, report_table in found.tables.items():
        tables.write_table(report_table, out / "tables" / name)
    for name, figure in found.figures.items():
        figures.save(figure, out / "figures" / name)

    text = ["# Queries and keys in training", "", f"Beside it: {paper.SOURCE}.", "", "## What was run", ""]
    text += [*_what_was_run(groups, stated), "", "## Remarks", ""]
    text += [f"- {remark}" for remark in _remarks(groups, stated)] + ["", "## Tables", ""]
    text += [tables.to_markdown(report_table) for report_table in found.tables.values()]
    if found.findings:
        text += ["## Signs beside the paper's", "", *(f"- {finding}" for finding in found.findings), ""]
    text += ["## Figures", ""]
    for name, caption in found.captions.items():
        text += [f"![{name}](figures/{name}.png)", "", caption, ""]
    write_text(out / "report.md", "\n".join(text))

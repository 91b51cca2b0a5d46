"""Everything after measuring: the CSV files, tables, Figure 5, report.md and the manifest, from the records."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from qkgeom_jax import figures, paper, series_figures, series_tables, tables
from qkgeom_jax.integrity import digests, update_manifest
from qkgeom_jax.results import read_json, write_text
from qkgeom_jax.series_analysis import trajectories
from qkgeom_jax.series_probe import UNBIASED_TOKENS
from qkgeom_jax.series_results import Record, collect

CAPTION = (
    "**Figure 5.** a: slopes of the normalised paired contrast (PR_Q - PR_K) / d_head over the index of the revision, "
    "with 95% intervals; triangles: the first and the second half of the revisions. b: Pearson's r over revisions of PR_K "
    "with QK^T effective rank, and of that with attention entropy. c, beyond the paper: the contrast, averaged over "
    "layers, in training. "
    "Hollow and crossed: flagged revisions, in no slope or correlation."
)
# Of the readers of checkpoints, where they are installed.
READERS = ("huggingface_hub", "safetensors", "tokenizers", "gguf", "torch")


def remarks(series: Mapping[str, Sequence[Record]]) -> list[str]:
    """What a reader has to know of these results."""
    records = [record for own in series.values() for record in own]
    done = [record for record in records if record.status == "done"]
    found = []
    if not done:
        found.append("No revision has been measured: the table and the figure are empty.")
    if done and (fewest := min(record.tokens for record in done)) < UNBIASED_TOKENS:
        found.append(
            f"Measured on as few as {fewest:,} tokens: below {UNBIASED_TOKENS:,} the participation ratio comes out too "
            "low. Compare only equal counts."
        )
    if len({record.context for record in done}) > 1:
        found.append("Series were measured in windows of different lengths: compare trends, not levels.")
    if any(record.family == "smollm2" for record in done):
        found.append("SmolLM2 has no revision before 250 billion tokens: it cannot show an early regime.")
    return found + series_tables.revision_notes(series)


def _seconds(series: Mapping[str, Sequence[Record]]) -> dict[str, dict[str, float]]:
    """Wall time by series and phase."""
    return {
        name: {
            phase: round(sum((record.seconds or {}).get(phase, 0) for record in own), 3)
            for phase in ("fetch", "measure")
        }
        for name, own in series.items()
    }


def write_process(out: Path) -> None:
    """What this process computes with, into OUT/manifest.json."""
    from qkgeom_jax.manifest import describe_process

    value = describe_process()
    for name in READERS:
        try:
            value["versions"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    update_manifest(out, value, without=["digests"])


def _what_was_measured(series: Mapping[str, Sequence[Record]], config: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, records in series.items():
        done = sum(record.status == "done" for record in records)
        lines.append(f"- {name} ({records[0].source}): {done} of {len(records)} revisions")
    if config:
        lines.append("- On {tokens:,} tokens of {name} ({kind}, sha256 {sha256})".format(**config["measured_on"]))
    return lines


def _read_config(path: Path) -> dict[str, Any]:
    """A study's config.json; {} where there is none.

    Raises:
      ValueError: it does not say what was measured on.
    """
    if not path.exists():
        return {}
    config = read_json(path)
    try:
        on = config["measured_on"]
        if type(on["tokens"]) is int and all(isinstance(on[name], str) for name in ("name", "kind", "sha256")):
            return config
    except (KeyError, TypeError):
        pass
    raise ValueError(f"{path} is damaged: it does not say what was measured on")


def write_all(out: str | os.PathLike) -> Path:
    """Rebuild every table, the figure and the report of a study; equal records give equal bytes.

    Args:
      out: the study's folder, with revisions/; config.json is used where it is.

    Returns:
      The path of report.md.

    Raises:
      ValueError: `out` is no folder, or a record is damaged.
      OSError: a file cannot be read or written.
    """
    out = Path(out)
    if not out.is_dir():
        raise ValueError(f"out is {str(out)!r}, which is no folder")
    update_manifest(out, {}, without=["digests"])
    series = collect(out)
    config = _read_config(out / "config.json")
    found = trajectories(series)
    made = {
        "table6": series_tables.table_6(found, series),
        "table6_variants": series_tables.table_6_variants(found),
        "figure5": series_tables.series_table(found),
    }
    for name, table in made.items():
        tables.write_table(table, out / "tables" / name)
    figures.save(series_figures.figure_5(found), out / "figures" / "figure5")
    text = [
        "# Queries and keys in checkpoint series",
        "",
        f"Beside it: {paper.SOURCE}.",
        "",
        "## What was measured",
        "",
    ]
    text += [*_what_was_measured(series, config), "", "## Remarks", "", *(f"- {remark}" for remark in remarks(series))]
    text += ["", "## Figure", "", "![figure5](figures/figure5.png)", "", CAPTION, "", "## Tables", ""]
    text += [tables.to_markdown(table) for table in made.values()]
    write_text(out / "report.md", "\n".join(text))
    stated = {"seconds": _seconds(series), "remarks": remarks(series)}
    update_manifest(out, stated | {"digests": digests(out)})
    return out / "report.md"

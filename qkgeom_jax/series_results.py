"""A checkpoint study on disk: one record for each revision, and metrics.csv and series.csv rebuilt from all of them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from qkgeom_jax.reading import read_npz
from qkgeom_jax.results import METRIC_COLUMNS, read_json, write_csv, write_json, write_npz
from qkgeom_jax.series import CATALOGUE, in_order, step_of
from qkgeom_jax.suspects import Flag, Weights, find_suspects

# The paired contrast, (PR_Q - PR_K) / head width, stands behind the grid's columns.
CONTRAST = "contrast_normalised"
LAYER_COLUMNS = (*METRIC_COLUMNS, CONTRAST)
METRICS_COLUMNS = ("series", "family", "revision", "step", "tokens_seen", "layer", *LAYER_COLUMNS)
# Means over layers, repeated in series.csv beside what is known of the revision.
SUMMARY = (CONTRAST, "participation_ratio_q", "participation_ratio_k", "effective_rank_qk", "attention_entropy")
SERIES_COLUMNS = (
    "series", "family", "source", "revision", "step", "tokens_seen", "status", "in_fit", "flags", "commit",
    "weights_sha256", "tokens", "context", "loss", *SUMMARY, "error",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One revision's outcome.

    Attributes:
      series, source, revision: whose; an empty revision stands for a series whose revisions could not be listed.
      family: a row of Table 6, else the model's architecture; empty where no revision could be opened.
      tokens_per_step: None where not known.
      status: "done" or "failed".
      error: one sentence where it failed.
      commit: what the revision stood for on the hub; empty for a folder.
      weights_sha256: digest of the weights.
      tokens, context: how many tokens it was measured on, in windows of how many; 0 where it failed.
      loss: mean next-token loss in nats; NaN where it failed.
      rows: `LAYER_COLUMNS` for each layer, None for what is not defined.
      place: in the list that was asked for; orders revisions that have no step.
      reading: what the loss of the series' last revision says against the way in which its files were read.
      order: what is wrong with the place of this revision in the list that the user gave; else empty.
      seconds: spent on fetching, and on measuring.
      flags: found by `read_records` from all revisions together; not stored.
    """

    series: str
    source: str
    revision: str
    family: str = ""
    tokens_per_step: int | None = None
    status: str = "failed"
    error: str = ""
    commit: str = ""
    weights_sha256: str = ""
    tokens: int = 0
    context: int = 0
    loss: float = math.nan
    rows: tuple[Mapping[str, float | None], ...] = ()
    place: int = 0
    reading: tuple[str, ...] = ()
    order: str = ""
    seconds: Mapping[str, float] | None = None
    flags: tuple[Flag, ...] = ()

    @property
    def step(self) -> int | None:
        return step_of(self.revision)

    @property
    def tokens_seen(self) -> int | None:
        return None if self.step is None or self.tokens_per_step is None else self.step * self.tokens_per_step

    @property
    def excluded(self) -> bool:
        """Left out of slopes and correlations, because of a flag."""
        return any(flag.excludes for flag in self.flags)

    def mean(self, column: str) -> float:
        """The mean over layers of one of `LAYER_COLUMNS`; NaN where a layer has none."""
        values = [row[column] for row in self.rows]
        return math.nan if not values or None in values else float(np.mean(values))


def record_path(out: Path, series: str, revision: str) -> Path:
    """OUT/revisions/SERIES/REVISION.json, the names made safe for a file system."""
    return out / "revisions" / quote(series, safe=" ") / f"{quote(revision, safe='') or '_listing'}.json"


def tokens_path(out: Path, series: str) -> Path:
    """OUT/tokens/SERIES.npy, the windows that all revisions of a series are measured on."""
    return out / "tokens" / f"{quote(series, safe=' ')}.npy"


def write_record(
    out: Path,
    record: Record,
    heads: Mapping[str, np.ndarray] | None = None,
    prints: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write one revision's record, its arrays first: a record that says "done" has them.

    Args:
      out: the study's folder.
      record: its flags are not stored.
      heads: each metric per head [L, H], into REVISION.npz.
      prints: fingerprints of its weights, into the same file.
    """
    path = record_path(out, record.series, record.revision)
    if record.status == "done":
        arrays = {f"heads/{name}": values for name, values in (heads or {}).items()}
        write_npz(
            path.with_suffix(".npz"), arrays | {f"weights/{name}": values for name, values in (prints or {}).items()}
        )
    value = {name: getattr(record, name) for name in Record.__dataclass_fields__ if name != "flags"}
    value |= {"rows": [dict(row) for row in record.rows], "reading": list(record.reading)}
    value["loss"] = None if math.isnan(record.loss) else record.loss
    write_json(path, value)


def finite(value: Any) -> float | None:
    """A number for JSON: None for what is not defined."""
    return None if value is None or not math.isfinite(value) else float(value)


def is_done(out: Path, series: str, revision: str) -> bool:
    """A record says so; a damaged one does not."""
    try:
        return read_json(record_path(out, series, revision))["status"] == "done"
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def _read_record(path: Path) -> tuple[Record, Weights | None]:
    """A record and, where it is done, its weights' fingerprints."""
    value = read_json(path)
    try:
        value["loss"] = math.nan if value["loss"] is None else value["loss"]
        record = Record(**(value | {"rows": tuple(value["rows"]), "reading": tuple(value["reading"])}))
        _check_kinds(record)
        if record.status != "done":
            return record, None
        if not record.rows or any(set(row) != set(LAYER_COLUMNS) for row in record.rows):
            raise ValueError("its rows do not have the metrics' columns")
        arrays = read_npz(path.with_suffix(".npz"))
        prints = {name.removeprefix("weights/"): value for name, value in arrays.items() if name.startswith("weights/")}
        if any(array.ndim != 1 or array.dtype != np.float64 or len(array) < 2 for array in prints.values()):
            raise ValueError("its weights' fingerprints are none")
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise ValueError(f"{path} is no record of a revision: {error}; delete it and run the command again") from error
    return record, Weights(record.revision, record.weights_sha256, prints)


def read_records(out: str | os.PathLike) -> dict[str, list[Record]]:
    """Every revision's record with its flags, in order of steps, by series: those of the catalogue first.

    Args:
      out: the study's folder.

    Raises:
      ValueError: a record is damaged.
    """
    found: dict[str, dict[str, tuple[Record, Weights | None]]] = {}
    for path in sorted(Path(out).glob("revisions/*/*.json")):
        record, weights = _read_record(path)
        found.setdefault(record.series, {})[record.revision] = (record, weights)
    order = [*(name for name in CATALOGUE if name in found), *sorted(found.keys() - CATALOGUE.keys())]
    return {series: _flagged(found[series]) for series in order}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _check_kinds(record: Record) -> None:
    """Raises ValueError for a value of another kind than `write_record` writes."""
    texts = ("series", "source", "revision", "family", "status", "error", "commit", "weights_sha256", "order")
    good = {name: isinstance(getattr(record, name), str) for name in texts}
    good |= {name: type(getattr(record, name)) is int for name in ("tokens", "context", "place")}
    seconds = {} if record.seconds is None else record.seconds
    good |= {
        "tokens_per_step": record.tokens_per_step is None or type(record.tokens_per_step) is int,
        "loss": math.isnan(record.loss) or _is_number(record.loss),
        "rows": all(value is None or _is_number(value) for row in record.rows for value in row.values()),
        "reading": all(isinstance(note, str) for note in record.reading),
        "seconds": all(map(_is_number, seconds.values())),
    }
    if wrong := [name for name, fine in good.items() if not fine]:
        raise ValueError(f"its {wrong[0]} is {str(getattr(record, wrong[0]))[:80]!r}")


def _flagged(revisions: Mapping[str, tuple[Record, Weights | None]]) -> list[Record]:
    order = in_order(sorted(revisions, key=lambda name: revisions[name][0].place))
    measured = [weights for name in order if (weights := revisions[name][1]) is not None]
    placed = [weights for weights in measured if step_of(weights.revision) is not None]
    unplaced = [weights for weights in measured if step_of(weights.revision) is None]
    # Where no name holds a step the order is only a guess, and neighbours mean nothing: copies alone are told.
    suspects = find_suspects(placed, unplaced)
    records = []
    for name in order:
        record = revisions[name][0]
        flags = list(suspects.get(name, ()))
        if record.status == "done" and not all(math.isfinite(record.mean(column)) for column in SUMMARY):
            flags.append(Flag("numbers", "its metrics are not all finite"))
        flags += [Flag("reading", text) for text in record.reading]
        if record.order:
            flags.append(Flag("order", record.order))
        records.append(replace(record, flags=tuple(flags)))
    return records


def collect(out: str | os.PathLike) -> dict[str, list[Record]]:
    """Rebuild metrics.csv and series.csv from the revisions' records; equal records give equal bytes.

    Returns:
      The records, as `read_records` gives them.

    Raises:
      ValueError: a record is damaged.
      OSError: a file cannot be read or written.
    """
    out = Path(out)
    series = read_records(out)
    records = [record for name in series for record in series[name]]
    metrics: list[Sequence[Any]] = []
    for record in records:
        key = (record.series, record.family, record.revision, record.step, record.tokens_seen)
        metrics += [[*key, layer, *(row[column] for column in LAYER_COLUMNS)] for layer, row in enumerate(record.rows)]
    write_csv(out / "metrics.csv", METRICS_COLUMNS, metrics)
    write_csv(out / "series.csv", SERIES_COLUMNS, [_series_row(record) for record in records])
    return series


def _series_row(record: Record) -> list[Any]:
    fits = record.status == "done" and not record.excluded and record.step != 0
    return [
        record.series, record.family, record.source, record.revision, record.step, record.tokens_seen, record.status,
        int(fits), "; ".join(flag.text for flag in record.flags), record.commit, record.weights_sha256,
        record.tokens or None, record.context or None, record.loss, *(record.mean(column) for column in SUMMARY),
        record.error,
    ]  # fmt: skip

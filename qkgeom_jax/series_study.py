"""The study of checkpoint series: one revision at a time is fetched, measured and written; what is done is skipped.

OUT/config.json says what all revisions are measured on, and a later command must mean the same; each revision's record
is complete in itself; everything else in OUT is rebuilt from the records.
"""

from __future__ import annotations

import dataclasses
import io
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkgeom_jax import results
from qkgeom_jax.command import DISK_FULL, DONE, FAILED, FREE_SPACE, DiskFullError, is_out_of_memory, tell
from qkgeom_jax.hub import HubRepository, LocalFolder, RevisionError, open_source, readable
from qkgeom_jax.reading import read_npy
from qkgeom_jax.series import DEFAULT_REVISIONS, Selection, Series, choose, in_order, order_notes
from qkgeom_jax.series_probe import Probe, ProbeError, check_windows, make_windows
from qkgeom_jax.series_results import LAYER_COLUMNS, Record, finite, is_done, record_path, tokens_path, write_record
from qkgeom_jax.study import StudyError, disk_free, write_config, writing

Source = LocalFolder | HubRepository
# Enough to see whether a model predicts text.
READING_TOKENS = 512


@dataclass(frozen=True)
class SeriesStudy:
    """What one command asks for.

    Attributes:
      out: the results folder.
      series: in the order in which they are measured.
      selection: which revisions of each; None for each one's default.
      probe: what they are measured on.
      cache: the hub's cache; None for the client's own.
      offline: take what is in the cache, and ask no network.
    """

    out: Path
    series: tuple[Series, ...]
    selection: Selection | None
    probe: Probe
    cache: Path | None = None
    offline: bool = False

    def open(self, series: Series) -> tuple[Source, list[str]]:
        """Where a series' revisions come from, and those that are wanted, in the order in which they are measured.

        Without a selection: log-spaced ones of a series of the catalogue, the default branch of another repository, all
        that a folder holds.

        Raises:
          RevisionError: they cannot be listed, or none fits.
        """
        source, selection = open_source(series, self.cache, self.offline), self.selection
        if selection is None:
            if not series.local and not series.pattern:
                return source, ["main"]
            selection = Selection() if series.local else Selection(count=DEFAULT_REVISIONS)
        available = source.revisions() if selection.needs_a_list else []
        try:
            return source, choose(selection, available, series.name)
        except ValueError as error:
            raise RevisionError(str(error)) from None


def settle(study: SeriesStudy) -> dict[str, Any]:
    """The value of OUT/config.json: the folder's own, with this command's series added. Writes nothing.

    Raises:
      StudyError: the folder holds results that were measured on something else, or another source under one name.
    """
    path, probe = study.out / "config.json", study.probe
    kind = "text" if probe.ids is None else "token ids"
    measured_on = {
        "kind": kind,
        "name": probe.name,
        "sha256": probe.sha256,
        "tokens": probe.tokens,
        "context": probe.context,
    }
    series = {
        one.name: {name: value for name, value in dataclasses.asdict(one).items() if name not in ("name", "steps")}
        for one in study.series
    }
    value = {"command": "checkpoints", "measured_on": measured_on, "series": series}
    if not path.exists():
        return value
    advice = "choose another --out, or move the folder aside with --fresh"
    try:
        stored = results.read_json(path)
        if (command := stored["command"]) != value["command"]:
            raise StudyError(f"{study.out} holds results of the command {command!r}; {advice}")
        held_on, held = dict(stored["measured_on"]), dict(stored["series"])
        sources = {name: one["source"] for name, one in held.items()}
    except StudyError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise StudyError(f"{path} is damaged ({error!r}); {advice}") from None
    changed = []
    for name, new in measured_on.items():
        if name != "name" and held_on.get(name) != new:
            changed.append(f"{name} was {held_on.get(name)!r} and is now {new!r}")
    for name, one in series.items():
        if sources.get(name, one["source"]) != one["source"]:
            changed.append(f"{name} was {sources[name]} and is now {one['source']}")
    if changed:
        raise StudyError(f"{study.out} holds results of another configuration: {'; '.join(changed)}; {advice}")
    return value | {"measured_on": held_on, "series": held | series}


def prepare(study: SeriesStudy) -> None:
    """Create the folder, and write config.json where the command adds to it.

    Raises:
      StudyError: as `settle`, or the folder cannot be written.
    """
    value = settle(study)
    with writing(study.out):
        study.out.mkdir(parents=True, exist_ok=True)
        write_config(study.out, value)


def _windows(study: SeriesStudy, series: Series, source: Source, checkpoint: Any) -> np.ndarray:
    """The windows of a series: made by its first revision, and kept in OUT for all others."""
    path = tokens_path(study.out, series.name)
    if path.exists():
        return check_windows(read_npy(path), checkpoint)
    tokenizer = None
    if study.probe.ids is None:
        tokenizer = checkpoint.tokenizer()
        if tokenizer is None and not series.local:
            tokenizer = source.tokenizer()
    windows = make_windows(study.probe, checkpoint, tokenizer)
    stream = io.BytesIO()
    np.save(stream, windows, allow_pickle=False)
    results.write_bytes(path, stream.getvalue())
    return windows


def _measure(study: SeriesStudy, series: Series, source: Source, begun: Record, last: bool) -> Record:
    """Fetch, measure and write one revision; its record. The last one is also held against other ways of reading it."""
    from qkgeom_jax import pretrained

    started = time.perf_counter()
    located = source.locate(begun.revision)
    fetched = time.perf_counter()
    checkpoint = pretrained.open_checkpoint(located.path)
    windows = _windows(study, series, source, checkpoint)
    measurement = pretrained.measure(checkpoint, windows)
    reading = pretrained.reading_notes(checkpoint, windows[: max(1, READING_TOKENS // windows.shape[1])]) if last else []
    record = dataclasses.replace(
        begun,
        family=series.family or f"own {checkpoint.family}",
        status="done",
        commit=located.commit or "",
        weights_sha256=checkpoint.weights_sha256(),
        tokens=windows.size,
        context=windows.shape[1],
        loss=float(measurement.loss),
        reading=tuple(note.removeprefix(f"{located.path}: ") for note in reading),
        rows=tuple({name: finite(row.get(name)) for name in LAYER_COLUMNS} for row in measurement.rows),
        seconds={
            "fetch": round(fetched - started, 3),
            "measure": round(time.perf_counter() - fetched, 3),
        },
    )
    write_record(study.out, record, measurement.heads, pretrained.layer_fingerprints(checkpoint))
    return record


def _failure(error: Exception) -> tuple[str, bool]:
    """One sentence about what became of a revision, and whether its traceback would tell more."""
    from qkgeom_jax.pretrained import CheckpointFormatError

    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (RevisionError, ProbeError, CheckpointFormatError)):
        return text, False
    if is_out_of_memory(error):
        return "out of memory; fewer --tokens, or a smaller --context, need less", False
    return f"{type(error).__name__}: {text}", True


def run(study: SeriesStudy, say: Callable[[str], None]) -> int:
    """Measure every revision that is not done, then rebuild tables, figures and report.

    It may be ended at any moment: a record says "done" only when all that belongs to it is on disk.

    Args:
      study: prepared.
      say: called with a line about each revision.

    Returns:
      The exit status: 0 done, 1 a revision or a series failed.

    Raises:
      DiskFullError: what was measured is kept.
    """
    from qkgeom_jax import series_report

    failed = False
    for note in study.probe.notes:
        say(note)
    for series in study.series:
        try:
            source, revisions = study.open(series)
        except RevisionError as error:
            say(f"{series.name}: {error}")
            write_record(study.out, Record(series.name, series.source, "", series.family or "", error=str(error)))
            failed = True
            continue
        record_path(study.out, series.name, "").unlink(missing_ok=True)
        order, last = order_notes(revisions), in_order(revisions)[-1]
        for place, revision in enumerate(revisions):
            if is_done(study.out, series.name, revision):
                continue
            begun = Record(
                series.name, series.source, revision, series.family or "", series.tokens_per_step,
                place=place, order=order.get(revision, ""),
            )  # fmt: skip
            trace = record_path(study.out, series.name, revision).with_suffix(".error.txt")
            try:
                record = _measure(study, series, source, begun, revision == last and begun.step != 0)
                trace.unlink(missing_ok=True)
                say(f"{series.name} {revision}: loss {record.loss:.3f}, {sum(record.seconds.values()):.1f} s")
            except Exception as error:
                if getattr(error, "errno", None) in DISK_FULL:
                    raise DiskFullError(f"{series.name} {revision}: {error}; {FREE_SPACE}") from error
                sentence, more = _failure(error)
                if more:
                    results.write_text(trace, traceback.format_exc())
                write_record(study.out, dataclasses.replace(begun, error=sentence))
                say(f"{series.name} {revision} failed: {sentence}" + (f" (all of it: {trace})" if more else ""))
                failed = True
    series_report.write_all(study.out)
    return FAILED if failed else DONE


def print_plan(study: SeriesStudy) -> int:
    """Say what would be measured and how many bytes would be downloaded first. Fetches and writes nothing.

    Returns:
      The exit status: 1 where a revision cannot be had.
    """
    total, failed, disk = 0, False, study.out
    for series in study.series:
        try:
            source, revisions = study.open(series)
        except RevisionError as error:
            tell(f"{series.name}: {error}")
            failed = True
            continue
        disk = getattr(source, "cache", disk)
        size = missing = done = 0
        for revision in revisions:
            if is_done(study.out, series.name, revision):
                done += 1
                continue
            try:
                planned = source.plan(revision)
            except RevisionError as error:
                tell(f"{series.name} {revision}: {error}")
                failed = True
                continue
            size, missing = size + planned.bytes, missing + planned.bytes - planned.here
            tell(f"{series.name} {revision}: {planned.files} files, {readable(planned.bytes)}, "
                  f"{readable(planned.bytes - planned.here)} to download")  # fmt: skip
        total += missing
        tell(
            f"{series.name}: {len(revisions)} revisions ({done} done), {readable(size)}, "
            f"{readable(missing)} to download"
        )
    tell(f"to download: {readable(total)}; free on that disk: {readable(disk_free(disk))}")
    context = study.probe.context or "the smaller of 512 and each model's own"
    tell(f"measured on {study.probe.tokens:,} tokens of {study.probe.name}, windows of {context}")
    return FAILED if failed else DONE

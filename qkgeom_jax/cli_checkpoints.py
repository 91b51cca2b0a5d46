"""The command over checkpoint series. Arguments are refused in one sentence before anything heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qkgeom_jax import command, flags
from qkgeom_jax.series import CATALOGUE, DEFAULT_REVISIONS, PAPER_SERIES, own_series, parse_selection

DEFAULT_OUT = "results/checkpoints"


def _make_parser(description: str) -> flags.Parser:
    parser = flags.Parser(prog="checkpoints.py", description=description)
    add = parser.add_argument
    add("--series", type=flags.listed(flags.one_of(tuple(CATALOGUE))), metavar="LIST",
        help=f"public series: {', '.join(CATALOGUE)} (default, without --model: the paper's six)")  # fmt: skip
    add("--model", type=flags.listed(flags.place), metavar="LIST",
        help="your own: hub repositories as OWNER/NAME, folders with a checkpoint or one in each subfolder, GGUF files")  # fmt: skip
    add("--revisions", type=parse_selection, metavar="WHICH",
        help=f"a list of names or steps, FIRST..LAST (steps), all, log:N (log-spaced; the default of public series, "
        f"N = {DEFAULT_REVISIONS})")  # fmt: skip
    text = parser.add_mutually_exclusive_group()
    text.add_argument(
        "--text", type=flags.place, metavar="FILE", help="UTF-8 text to measure on (default: the prose that ships with Python)"
    )
    text.add_argument("--token-ids", type=flags.place, metavar="FILE.npy", help="token ids instead, [n] or [windows, context]")
    add("--tokens", type=flags.at_least(2), metavar="N", help="tokens in total (default 4096)")
    add(
        "--context",
        type=flags.at_least(2),
        metavar="N",
        help="tokens of a window (default: 512, or the model's own if less)",
    )
    add("--cache", type=flags.place, metavar="FOLDER", help="the hub's cache (default: its own)")
    add("--offline", action="store_true", help="take what the cache has; ask no network")
    add("--out", type=flags.place, metavar="FOLDER", default=DEFAULT_OUT, help=f"results folder (default {DEFAULT_OUT})")
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument("--plan", action="store_true", help="say what would be measured and downloaded; do nothing")
    doing.add_argument("--figures", action="store_true", help="redraw table and figure from the results folder")
    doing.add_argument("--verify", nargs="?", const="", type=flags.place_or_none, metavar="FOLDER",
        help="compare every file of a results folder (default: that of --out) with what was written")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="move an old results folder aside and start anew")
    return parser


def _make_study(given: Any) -> Any:
    """What the flags ask for.

    Raises:
      ValueError: one sentence about a series, a text, or token ids that cannot be.
    """
    from qkgeom_jax.hub import require_hub
    from qkgeom_jax.series_probe import UNBIASED_TOKENS, ids_probe, text_probe
    from qkgeom_jax.series_study import SeriesStudy

    own = [own_series(source) for source in given.model or ()]
    named = given.series or (() if own else PAPER_SERIES)
    series = (*(CATALOGUE[name] for name in named), *own)
    for one in series:
        if sum(other.name == one.name for other in series) > 1:
            raise ValueError(f"two series are called {one.name}: measure them into different --out folders")
    if not all(one.local for one in series):
        require_hub()
    if given.token_ids:
        probe = ids_probe(given.token_ids, given.tokens, given.context)
    else:
        probe = text_probe(given.text, given.tokens or UNBIASED_TOKENS, given.context)
    if probe.context and probe.context > probe.tokens:
        raise ValueError(f"--tokens is {probe.tokens}, less than one window of {probe.context}")
    cache = Path(os.path.expanduser(given.cache)).absolute() if given.cache else None
    return SeriesStudy(Path(given.out).absolute(), series, given.revisions, probe, cache, given.offline)


def _execute(given: Any) -> int:
    from qkgeom_jax import results, series_report, series_study, study
    from qkgeom_jax.integrity import print_verification
    from qkgeom_jax.lock import Lock

    if given.figures or given.verify is not None:
        out = Path(given.verify or given.out).absolute()
        if not (out / "revisions").is_dir():
            raise ValueError(f"{out} holds no measured revisions; measure first, or name the folder with --out")
        if given.verify is not None:
            return print_verification(out)
        command.tell(series_report.write_all(out))
        return command.DONE
    if not given.plan:
        study.require_writable(Path(given.out).absolute())
    wanted = _make_study(given)
    if given.plan:
        if not given.fresh:
            series_study.settle(wanted)
        return series_study.print_plan(wanted)
    if given.fresh and (aside := study.set_aside(wanted.out)):
        command.say(f"moved the old results to {aside}")
    series_study.prepare(wanted)
    with Lock(wanted.out / "lock"):
        series_report.write_process(wanted.out)
        status = series_study.run(wanted, command.say)
    for remark in results.read_json(wanted.out / "manifest.json")["remarks"]:
        command.say(remark)
    command.tell(wanted.out / "report.md")
    return status


def checkpoints(argv: Sequence[str] | None = None) -> int:
    """Measure series of public checkpoints, or your own; write Table 6, Figure 5 and a report."""
    parser = _make_parser(checkpoints.__doc__)
    return command.run(parser, lambda _: _execute(parser.parse_args(argv)))

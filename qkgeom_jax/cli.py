"""The commands. Arguments are checked, and refused in one sentence, before anything heavy is imported or written."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qkgeom_jax import command, flags, study
from qkgeom_jax.config import DOSES, INITIALIZATIONS, INTERVENTIONS, PRESETS, Config, override
from qkgeom_jax.stop import StopSignal


def _make_parser(prog: str, description: str, without: Sequence[str] = ()) -> flags.Parser:
    """The flags that every training command has; those of some parts of the configuration left out."""
    parser = flags.Parser(prog=prog, description=description)
    add = parser.add_argument
    none: dict[str, Any] = {"default": argparse.SUPPRESS}
    add("--depths", type=flags.DEPTHS, metavar="LIST", help="numbers of blocks, as 4,6,8", **none)
    add("--inits", type=flags.INITS, metavar="LIST", help=f"query/key initialisations: {', '.join(INITIALIZATIONS)}", **none)
    add("--seeds", type=flags.SEEDS, metavar="LIST", help="seeds, all trained in one program", **none)
    add("--preset", type=flags.one_of(tuple(PRESETS)), metavar="NAME", help=f"{', '.join(PRESETS)}", **none)
    add("--out", type=flags.place, metavar="FOLDER", help="results folder (default: results/COMMAND-PRESET)", **none)
    add("--config", type=flags.place, metavar="FILE.toml", help="the same names as the flags, with _ for -; flags win", **none)
    add("--keep-epochs", type=flags.one_of(("ends", "all")), metavar="WHICH",
        help="keep the parameters of the first and last epoch (ends) or of all", **none)  # fmt: skip
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument("--plan", action="store_true", help="say what would run, its memory, disk and time; train nothing")
    doing.add_argument("--status", action="store_true", help="say how far the results folder has come")
    doing.add_argument("--figures", action="store_true", help="redraw tables and figures from the results folder")
    doing.add_argument("--verify", nargs="?", const="", type=flags.place_or_none, metavar="FOLDER",
        help="compare every file of a results folder (default: that of --out) with what was written")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="move an old results folder aside and start anew")
    flags.add_config_flags(parser, without)
    return parser


# The paper's: four seeds for the grid, five for the interventions.
GRID_SEEDS = Config().seeds
INTERVENTION_SEEDS = (*GRID_SEEDS, 210)

# Flags that are no field of the configuration but may stand in a TOML file.
STUDY_KEYS = (
    "depths", "inits", "seeds", "preset", "out", "keep_epochs", "interventions", "clamp_strengths", "contraction_factors",
)  # fmt: skip


def _settings(parser: flags.Parser, argv: Sequence[str] | None, defaults: dict[str, Any]) -> dict[str, Any]:
    """Flags over TOML over defaults; the configuration of all groups under ``base``."""
    given = vars(parser.parse_args(argv))
    known = [name for name in (*STUDY_KEYS, *flags.config_fields()) if parser.has(name)]
    toml = flags.read_toml(given["config"], known) if "config" in given else {}
    for name in STUDY_KEYS & toml.keys():
        value = toml[name]
        try:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            toml[name] = parser.type_of(name)(text)
        except (argparse.ArgumentTypeError, ValueError) as error:  # too many digits to be written
            raise ValueError(f"{name} in {given['config']}: {error}") from None
    settings = defaults | toml | given
    return settings | {"base": flags.resolve(settings["preset"], toml, {"seeds": settings["seeds"]} | given)}


def _make_study(name: str, settings: dict[str, Any]) -> study.Study:
    preset, base = settings["preset"], settings["base"]
    out = Path(settings.get("out") or f"results/{name}-{preset}").absolute()
    groups = study.make_groups(base, settings["depths"], settings["inits"], _arms(settings))
    if repeated := next((g.name for g in groups if [h.name for h in groups].count(g.name) > 1), None):
        raise ValueError(f"two interventions would share the folder {repeated}; give one of them another name")
    return study.Study(name, preset, out, base, groups, settings["keep_epochs"])


def _arms(settings: dict[str, Any]) -> tuple[str, ...]:
    """The arms asked for, and those with other doses; the baseline is added where arms are made into groups."""
    arms = list(settings["interventions"])
    for arm, field in DOSES.items():
        for dose in settings.get(f"{field}s", ()):
            if dose != getattr(settings["base"].manipulation, field):
                arms.append(f"{arm}@{dose:g}")
    return tuple(dict.fromkeys(arms))


def _check_arms(wanted: study.Study) -> None:
    """Refuses an arm that cannot be built or does not fit the parameters, before anything is written.

    Raises:
      ValueError: one sentence that names the arm.
    """
    own = [group for group in wanted.groups if ":" in group.intervention]
    if not own:
        return
    import jax

    from qkgeom_jax.ensemble import make_keys
    from qkgeom_jax.group import make_programs

    for group in own:
        programs = make_programs(group)
        try:
            jax.eval_shape(programs.initialise, make_keys(group.seeds))
        except Exception as error:
            raise ValueError(f"intervention {group.intervention}: {' '.join(str(error).split())}") from error


def _with_corpus(wanted: study.Study) -> tuple[study.Study, Any]:
    """The study with its corpus's vocabulary, and the corpus."""
    from qkgeom_jax.corpus import load_corpus, require_windows

    corpus = load_corpus(wanted.base.corpus, progress=command.say)
    require_windows(corpus, wanted.base.model.context)

    def sized(config: Config) -> Config:
        return override(config, vocabulary=len(corpus.vocabulary))

    return dataclasses.replace(wanted, base=sized(wanted.base), groups=tuple(map(sized, wanted.groups))), corpus


def _say_corpus(corpus: Any) -> None:
    counts = ", ".join(f"{split} {count:,}" for split, count in corpus.characters.items())
    unknown = ", ".join(f"{split} {share:.3%}" for split, share in corpus.unknown_share.items())
    command.say(f"corpus {corpus.name}: {counts} characters; {len(corpus.vocabulary)} symbols; unknown: {unknown}")
    for note in corpus.notes:
        command.say(f"  {note}")


def _execute(wanted: study.Study, settings: dict[str, Any], stop: StopSignal) -> int:
    if settings["status"]:
        from qkgeom_jax.plan import print_status

        return print_status(wanted)
    if settings["figures"]:
        study.require_results(wanted.out)
        command.tell(study.write_report(wanted))
        return command.DONE
    if settings["verify"] is not None:
        from qkgeom_jax.integrity import print_verification

        out = Path(settings["verify"] or wanted.out).absolute()
        study.require_results(out)
        return print_verification(out)
    if not settings["plan"]:
        study.require_writable(wanted.out)
    _check_arms(wanted)
    wanted, corpus = _with_corpus(wanted)
    if settings["plan"]:
        from qkgeom_jax.plan import print_plan

        return print_plan(wanted if settings["fresh"] else study.settle(wanted, corpus.sha256), corpus)
    if settings["fresh"] and (aside := study.set_aside(wanted.out)):
        command.say(f"moved the old results to {aside}")
    wanted = study.settle(wanted, corpus.sha256)
    study.prepare(wanted, corpus.sha256)
    _say_corpus(corpus)
    from qkgeom_jax.progress import make_progress

    with make_progress(wanted.groups) as progress:
        status = study.run(wanted, corpus, progress, stop)
    command.tell(wanted.out / "report.md")
    return status


def _main(name: str, parser: flags.Parser, defaults: dict[str, Any], argv: Sequence[str] | None) -> int:
    def work(stop: StopSignal) -> int:
        settings = _settings(parser, argv, defaults)
        return _execute(_make_study(name, settings), settings, stop)

    return command.run(parser, work)


def grid(argv: Sequence[str] | None = None) -> int:
    """Train every depth, initialisation and seed; write Tables 3 and 4, Figures 1 to 3 and a report."""
    parser = _make_parser("grid.py", grid.__doc__, without=("manipulation",))
    defaults = {
        "preset": "quick", "depths": (4, 6, 8), "inits": INITIALIZATIONS, "seeds": GRID_SEEDS, "keep_epochs": "ends",
        "interventions": ("none",),
    }  # fmt: skip
    return _main("grid", parser, defaults, argv)


def interventions(argv: Sequence[str] | None = None) -> int:
    """Train every intervention beside its baseline on the same seeds; write Table 5, Figure 4 and a report."""
    parser = _make_parser("interventions.py", interventions.__doc__)
    add, none = parser.add_argument, argparse.SUPPRESS
    add("--interventions", type=flags.arms, metavar="LIST", default=none,
        help=f"all, or some of {', '.join(INTERVENTIONS[1:])}, FILE.py:name; none, the baseline, is always there")
    add("--clamp-strengths", type=flags.DOSE_LIST, metavar="LIST", default=none,
        help="more clamps, of these strengths (0 to 1), for the dose response")
    add("--contraction-factors", type=flags.DOSE_LIST, metavar="LIST", default=none,
        help="more contractions, by these factors, for the dose response")  # fmt: skip
    defaults = {
        "preset": "quick", "depths": (4,), "inits": ("independent",), "seeds": INTERVENTION_SEEDS, "keep_epochs": "ends",
        "interventions": INTERVENTIONS,
    }  # fmt: skip
    return _main("interventions", parser, defaults, argv)

"""A study: its groups, its folder, and the loop that trains them one after another.

OUT/config.json says what all groups share, and a later command must mean the same; each group's folder is complete in
itself; everything else in OUT is rebuilt from the groups.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import secrets
import shutil
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkgeom_jax import integrity, results
from qkgeom_jax.command import DISK_FULL, DIVERGED, DONE, FAILED, FREE_SPACE, DiskFullError
from qkgeom_jax.config import PARTS, REQUIRED_INIT, Config, override
from qkgeom_jax.lock import Lock
from qkgeom_jax.stop import Stopped, StopSignal

# What may differ between two commands on one folder without changing what the results mean: the corpus is known by
# its sha256, wherever it lies; a chunk is only how many steps go into one call.
HARMLESS = {("training", "chunk"), ("corpus", "corpus"), ("corpus", "data_dir")}


class StudyError(ValueError):
    """The command and the folder do not go together; the message is one sentence for the user."""


@dataclass(frozen=True)
class Study:
    """What one command asks for.

    Attributes:
      command: "grid" or "interventions".
      preset: the name of the preset that the numbers started from.
      out: the results folder.
      base: what all groups share.
      groups: the groups, in the order in which they train.
      keep_epochs: "ends" or "all", of which epochs the parameters are kept.
    """

    command: str
    preset: str
    out: Path
    base: Config
    groups: tuple[Config, ...]
    keep_epochs: str = "ends"


def make_groups(
    base: Config, depths: Sequence[int], inits: Sequence[str], interventions: Sequence[str] = ("none",)
) -> tuple[Config, ...]:
    """Every combination, shallow depths first, arm by arm.

    The baseline ``none`` comes first and is always there. An arm that means something from one initialisation only is
    trained from that one, and so is a baseline for it.
    """
    arms = ("none", *(name for name in interventions if name != "none"))
    own = {name: (REQUIRED_INIT[name],) if name in REQUIRED_INIT else tuple(inits) for name in arms[1:]}
    own = {"none": tuple(dict.fromkeys((*inits, *(init for chosen in own.values() for init in chosen))))} | own
    return tuple(
        override(base, depth=depth, init=init, intervention=name) for depth in depths for name in arms for init in own[name]
    )


def _shared(config: Config) -> dict[str, Any]:
    """The parts of a configuration that all groups of a study share."""
    values = config.to_dict()
    del values["model"]["depth"], values["model"]["init"], values["intervention"]
    return values


def _differences(old: Any, new: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(name), new.get(name), (*path, name))
    elif old != new:
        yield path, old, new


def settle(study: Study, corpus_sha256: str) -> Study:
    """The study as its folder's first command fixed it, or the study itself in a new folder. Writes nothing.

    More epochs than before are an extension: the schedule stays that of the first command.

    Raises:
      StudyError: the folder holds results of another meaning; all that differs is named, old and new.
    """
    path = study.out / "config.json"
    schedule = {"decay_steps": study.base.decay_steps, "warmup_steps": study.base.warmup_steps}
    if path.exists():
        try:
            stored = results.read_json(path)
            # A field that is absent was not there yet, and has its default.
            stored |= {part: dataclasses.asdict(kind()) | stored.get(part, {}) for part, kind in PARTS.items()}
            for name in ("depth", "init"):
                del stored["model"][name]
            held = stored["optimizer"]
            for name in schedule:
                if getattr(study.base.optimizer, name) is None:
                    schedule[name] = held[name]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StudyError(f"{path} is damaged ({error}); move the folder away with --fresh") from None
    base = override(study.base, **schedule)
    if path.exists():
        wanted = {"command": study.command, "corpus_sha256": corpus_sha256, **_shared(base)}
        changed = []
        for where, old, new in _differences({k: v for k, v in stored.items() if k != "preset"}, wanted):
            extension = where == ("training", "epochs") and isinstance(old, int) and new > old
            if where not in HARMLESS and not extension:
                changed.append(f"{'.'.join(where)} was {old!r} and is now {new!r}")
        if changed:
            raise StudyError(
                f"{study.out} holds results of another configuration: {'; '.join(changed)}; "
                "choose another --out, or move the folder aside with --fresh"
            )
    groups = tuple(override(group, **schedule) for group in study.groups)
    for group in groups:
        _check_own_arm(group, study.out / "groups" / group.name)
    return dataclasses.replace(study, base=base, groups=groups)


def _own_arm(group: Config) -> dict[str, str]:
    """For a user's own arm, what its file says, as a sum: the name alone does not tell what the arm does."""
    file = group.intervention.rpartition(":")[0]
    return {"intervention_sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest()} if file else {}


def _check_own_arm(group: Config, folder: Path) -> None:
    path, now = folder / "config.json", _own_arm(group)
    begun = now and (folder / "losses.csv").exists()
    if begun and results.read_json(path).get("intervention_sha256") != now["intervention_sha256"]:
        raise StudyError(
            f"{folder} holds results of another content of {group.intervention.rpartition(':')[0]}; give the changed arm "
            "another name, choose another --out, or move the folder aside with --fresh"
        )


def require_writable(out: Path, flag: str = "--out") -> None:
    """Refuses a folder, given by that flag, that could not be written, before anything is read. Writes nothing.

    Raises:
      StudyError: one sentence.
    """
    try:
        str(out).encode()
    except UnicodeEncodeError:  # from an ASCII locale; TensorStore takes UTF-8 alone
        raise StudyError(f"{out} is not UTF-8 here; set PYTHONUTF8=1, or choose another {flag}") from None
    place = out
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise StudyError(f"{out} cannot be written: {place} is no folder; choose another {flag}")
    if not os.access(place, os.W_OK | os.X_OK):
        raise StudyError(f"{out} cannot be written: {place} may not be written to; choose another {flag}")


def prepare(study: Study, corpus_sha256: str) -> None:
    """Create the folder, and write config.json where the command adds to it.

    Raises:
      StudyError: it cannot be written.
    """
    value = {"command": study.command, "preset": study.preset, "corpus_sha256": corpus_sha256, **_shared(study.base)}
    with writing(study.out):
        (study.out / "groups").mkdir(parents=True, exist_ok=True)
        write_config(study.out, value)


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """A block that makes a results folder; what cannot be written is one sentence.

    Raises:
      StudyError: for any OSError of the block but that of a full disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise StudyError(f"{out} cannot be written: {error.strerror}; choose another --out") from None


def write_config(out: Path, value: dict[str, Any]) -> None:
    """OUT/config.json, where it says something else or nothing yet."""
    path = out / "config.json"
    if not path.exists() or results.read_json(path) != value:
        results.write_json(path, value)
        integrity.renew_digest(out, path.name)


def require_results(out: Path) -> None:
    """Refuses a folder in which no group has begun.

    Raises:
      StudyError: there is nothing.
    """
    if not (out / "groups").is_dir():
        raise StudyError(f"{out} holds no results; train first, or name the folder with --out")


def set_aside(out: Path) -> Path | None:
    """Rename a results folder to the first free OUT.old-N; None where there is nothing to move."""
    if not out.exists():
        return None
    number = 1
    while (aside := out.with_name(f"{out.name}.old-{number}")).exists():
        number += 1
    out.rename(aside)
    return aside


def is_done(group: Config, folder: Path) -> bool:
    """The group has nothing left to do: it has all its epochs, or no seed that could train on."""
    path = folder / "status.json"
    try:
        status = results.read_status(path)
    except (FileNotFoundError, ValueError):  # a damaged one is made again
        return False
    dead = len(status["diverged"]) == len(group.seeds)
    return status["status"] == "done" and (status["epochs_done"] >= group.training.epochs or dead)


def _damage(folder: Path) -> dict[str, str]:
    """What `integrity.changed` says of a finished group's files; its status and manifest are among them."""
    name = "status.json"
    try:
        path = folder / name
        if not path.exists() or results.read_status(path)["status"] != "done":
            return {}
        name = "manifest.json"
        return integrity.changed(folder)
    except (KeyError, ValueError):
        return {name: "damaged"}


def _take_away_damaged(folder: Path) -> list[str]:
    """Moves files of a finished group that are not what was written to quarantine/; what became of them, in words.

    Its tables are made again from its checkpoint, so a group that keeps none of these has to be trained again; for
    parameters alone, which enter no table, that would be too much.
    """
    damage = _damage(folder)
    tables = any(not name.startswith("params/") for name in damage)
    if not (tables or any((folder / "checkpoints").glob("[0-9]*"))):
        return []
    for name, state in damage.items():
        if state == "damaged":
            aside = folder / "quarantine" / f"{Path(name).name}-{secrets.token_hex(4)}"
            aside.parent.mkdir(exist_ok=True)
            (folder / name).rename(aside)
    return [f"{name} is {state}" for name, state in damage.items()]


def run(study: Study, corpus: Any, progress: Any, stop: StopSignal) -> int:
    """Train every group that is not done, then rebuild tables, figures and report.

    A group that raises leaves its traceback in its folder, and the next one starts.

    Returns:
      The exit status: 0 done, 1 a group failed, 3 only seeds diverged.

    Raises:
      Stopped: a signal asked for an end.
      LockedError: another process trains one of the groups.
      DiskFullError: what was finished is kept.
    """
    failed, diverged = [], []
    for group in study.groups:
        folder = study.out / "groups" / group.name
        folder.mkdir(exist_ok=True)
        with Lock(folder / "lock"):
            damage = _take_away_damaged(folder)
            if is_done(group, folder) and not damage:
                progress.skip(group)
                diverged += results.read_status(folder / "status.json")["diverged"]
                continue
            progress.begin(group)
            for what in damage:
                progress.note(f"{group.name}: {what}; made again from its checkpoint")
            try:
                outcome = _run_group(study, group, folder, corpus, progress, stop)
            except Stopped:
                raise
            except Exception as error:
                if getattr(error, "errno", None) in DISK_FULL:  # neither a traceback nor another group could be written
                    raise DiskFullError(f"{group.name}: {_last_good(error, folder)}; {FREE_SPACE}") from error
                _write_failure(group, folder, progress, error)
                failed.append(group.name)
                continue
            diverged += outcome.diverged
            if len(outcome.diverged) == len(group.seeds):
                progress.note(f"{group.name}: every seed diverged; nothing of it enters the tables")
    progress.phase("writing tables and figures")
    write_report(study, corpus)
    if failed:
        progress.note(
            f"{len(failed)} of {len(study.groups)} groups failed: {', '.join(failed)}; the same command tries them again, and "
            "leaves the others as they are"
        )
    return FAILED if failed else DIVERGED if diverged else DONE


def write_report(study: Study, corpus: Any | None = None) -> Path:
    """Rebuild tables, figures and report from the groups, and with a corpus the manifest; the path of report.md.

    One process at a time: whoever comes last shows the groups of all.
    """
    from qkgeom_jax import report
    from qkgeom_jax.manifest import write_manifest

    with Lock(study.out / "lock", wait=True):
        if corpus is not None:
            write_manifest(study.out, study.preset, corpus)
        return report.write_all(study.out)


def _run_group(study: Study, group: Config, folder: Path, corpus: Any, progress: Any, stop: StopSignal) -> Any:
    """One group from where it stands to its end; its outcome."""
    from qkgeom_jax import group as training
    from qkgeom_jax.interventions import first_update
    from qkgeom_jax.manifest import write_group_manifest

    (folder / "params").mkdir(exist_ok=True)
    (folder / "error.txt").unlink(missing_ok=True)
    acts = {"first_update": first_update(group.intervention, group)}
    if group.intervention != "none" and acts["first_update"] is None:
        progress.note(f"{group.name} never acts: it falls due after the last of {group.training.steps} steps")
    stated = {"corpus_sha256": corpus.sha256} | acts | _own_arm(group)
    results.write_json(folder / "config.json", group.to_dict() | stated)
    outcome = training.train_group(group, folder, corpus, progress, stop, study.keep_epochs)
    write_group_manifest(folder, outcome.phases, outcome.made_by)
    results.write_json(folder / "status.json", training.status_value("done", group.training.epochs, outcome.diverged))
    return outcome


def _last_good(error: Exception, folder: Path) -> str:
    """What could not be written, and from which step on the group will be trained again."""
    if not isinstance(error, OSError):  # a CheckpointError says both
        return _first_line(error)
    steps = [int(path.name) for path in (folder / "checkpoints").glob("[0-9]*") if path.name.isdigit()]
    good = f"the last good step is {max(steps)}" if steps else "there is no good step"
    return f"{error.filename}: {error.strerror} ({disk_free(folder) / 1e6:.1f} MB free); {good}"


def _write_failure(group: Config, folder: Path, progress: Any, error: Exception) -> None:
    from qkgeom_jax.group import status_value

    results.write_text(folder / "error.txt", traceback.format_exc())
    results.write_json(folder / "status.json", status_value("failed", 0, {}))
    progress.note(f"{group.name} failed: {_first_line(error)} (all of it: {folder / 'error.txt'})")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def disk_free(path: Path) -> int:
    """Bytes free where `path` lies or will lie."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


